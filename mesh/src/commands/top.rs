//! `mesh top`: the rows of `mesh stat`, live in the terminal. Changes nothing in the cluster, and
//! restores the terminal however it ends.

mod model;
mod screen;

use std::{
    io::{IsTerminal, stdin, stdout},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use clap::Args;
use diy_mesh_model::exchange::{Direction, Exchange};
use diy_mesh_runtime::shutdown_signal;
use ratatui::crossterm::event::{self, Event as TerminalEvent, KeyEvent};
use tokio::sync::mpsc;

use self::screen::{Asked, Screen};
use super::{
    stat::{Filter, Selection},
    why::printable_lines,
};
use crate::{
    proxies::Proxies,
    sample::Sampler,
    traffic::{By, Sample},
};

/// Time between two samples.
const INTERVAL: Duration = Duration::from_secs(1);

/// The arguments of `mesh top`.
#[derive(Args, Debug)]
#[command(
    after_help = "The worst rows come first. With a namespace, its proxies report each second, else every 10 \
    seconds. Enter shows the latest failure of a row as `mesh why` does; this needs the right pods/portforward in \
    its namespace. q, Esc or Ctrl-C ends.\n\n\
    Examples:\n  mesh top -n shop             the edges from and to namespace shop\n  \
    mesh top shop/web            those of a workload or Service\n  \
    mesh top --by workload       the workloads of all namespaces"
)]
pub struct Arguments {
    #[command(flatten)]
    of: Selection,
    /// Grouping of the requests in rows
    #[arg(long, value_enum, default_value = "edge")]
    by: By,
}

/// An event to which the screen reacts.
enum Event {
    Key(KeyEvent),
    /// The terminal has another size.
    Resize,
    Sample(Result<Sample>),
    Page(String),
}

/// Restores the terminal when it is dropped.
struct Restore;

impl Drop for Restore {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Runs the command until it is ended.
pub async fn run(arguments: &Arguments) -> Result<()> {
    if !stdin().is_terminal() || !stdout().is_terminal() {
        bail!("mesh top needs a terminal; use `mesh stat` for a table or JSON");
    }
    let (of, by) = (arguments.of.filter().await, arguments.by);
    let mut sampler = arguments.of.from.sampler(of.namespace(), true).await?;
    let proxies = sampler.proxies().cloned();
    let mut screen = Screen::new(by);
    take(&mut screen, &of, by, Ok(sampler.sample().await?));
    let ended = shutdown_signal().context("failed to install signal handlers")?;
    let (events, received) = mpsc::channel(16);
    let keys = events.clone();
    std::thread::spawn(move || read_keys(&keys));
    tokio::select! {
        () = sample(sampler, events.clone()) => Ok(()),
        shown = show((of, by), screen, proxies, events, received) => shown,
        () = ended => Ok(()),
    }
}

async fn show(
    (of, by): (Filter, By),
    mut screen: Screen,
    proxies: Option<Proxies>,
    events: mpsc::Sender<Event>,
    mut received: mpsc::Receiver<Event>,
) -> Result<()> {
    let mut terminal = ratatui::try_init().context("failed to control the terminal")?;
    let _restore = Restore;
    loop {
        terminal.draw(|frame| screen.draw(frame))?;
        match received.recv().await.context("no more events")? {
            Event::Resize => {}
            Event::Sample(sample) => take(&mut screen, &of, by, sample),
            Event::Page(page) => screen.show(page),
            Event::Key(key) => match screen.press(key) {
                Asked::Nothing => {}
                Asked::End => return Ok(()),
                Asked::Why(names) => {
                    let (proxies, events) = (proxies.clone(), events.clone());
                    tokio::spawn(async move {
                        let page = page(proxies, by, &names).await;
                        // The command may have ended.
                        let _ = events.send(Event::Page(page)).await;
                    });
                }
            },
        }
    }
}

fn take(screen: &mut Screen, of: &Filter, by: By, sample: Result<Sample>) {
    match sample {
        Ok(sample) => {
            let rows = of.rows(by, &sample).into_iter();
            let rows = rows.map(|row| (row.names.into_values().collect(), row.rates));
            screen.model.update(rows.collect());
            screen.tcp = of.tcp_rows(by, &sample);
            screen.notes = sample.notes;
        }
        Err(error) => screen.notes = vec![error.to_string()],
    }
}

/// Takes samples until the command ends.
async fn sample(mut sampler: Sampler, events: mpsc::Sender<Event>) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let sample = sampler.sample().await;
        if events.send(Event::Sample(sample)).await.is_err() {
            return;
        }
    }
}

/// Reads keys until the command ends, on a thread: reads of the terminal block.
fn read_keys(events: &mpsc::Sender<Event>) {
    while let Ok(event) = event::read() {
        let event = match event {
            TerminalEvent::Key(key) if key.is_press() => Event::Key(key),
            TerminalEvent::Resize(..) => Event::Resize,
            _ => continue,
        };
        if events.blocking_send(event).is_err() {
            return;
        }
    }
}

/// The page of `mesh why` about the latest failure of a row.
async fn page(proxies: Option<Proxies>, by: By, names: &[String]) -> String {
    let Some(proxies) = proxies else {
        return "proxies are asked by port-forward, which needs a cluster".to_owned();
    };
    let found = match (by, names) {
        (By::Workload, [name]) => {
            let is_inbound = |one: &Exchange| one.direction == Direction::Inbound;
            proxies.latest(name, is_inbound).await
        }
        (By::Edge, [from, to]) => proxies.latest_between(from, to).await,
        _ => return "a route has no proxy of its own: use mesh top --by edge".to_owned(),
    };
    match found {
        Ok(Some(story)) => printable_lines(&story.page()),
        Ok(None) => "no proxy knows a recent exchange of this row".to_owned(),
        Err(error) => printable_lines(&error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::parsed;

    #[tokio::test]
    async fn without_a_terminal_it_points_to_stat() {
        // Tests have no terminal as standard input and output, or they are captured.
        if !stdout().is_terminal() || !stdin().is_terminal() {
            let arguments: Arguments = parsed("mesh shop").expect("it is valid");
            let error = run(&arguments).await.expect_err("there is no terminal");
            assert!(error.to_string().contains("`mesh stat`"), "{error}");
        }
    }
}
