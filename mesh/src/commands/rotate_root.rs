//! `mesh rotate-root`: asks the controller for a new root, or back to the old one, and shows how it goes. The controller does it by
//! itself: this program may be ended, and begun again, at any time.

use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use anyhow::{Result, bail};
use clap::Args;
use tokio::time::{Instant, sleep};

use super::style::{self, Style, Tone};
use crate::{
    identity::{
        request::{Place, Request},
        source::{self, Source},
        status::{Mesh, Rotation, is_steady, meaning},
    },
    time::{span, stamp},
};

/// What it can be told.
#[derive(Args, Debug)]
#[command(
    after_help = "The new root is announced first, and signs only once every connected proxy trusts it; the old one goes once nobody\n\
    uses a certificate of it any more. No request fails meanwhile, and nothing is restarted.\n\n\
    Examples:\n  mesh rotate-root              begin, and watch until it is done; Ctrl-C ends the watching only\n  \
    mesh rotate-root              again: watch what is under way\n  \
    mesh rotate-root --no-wait    begin, and leave it to itself\n  \
    mesh rotate-root --abandon    back to the root before"
)]
pub struct Arguments {
    #[command(flatten)]
    source: source::Arguments,
    /// Go back to the root before
    #[arg(long)]
    abandon: bool,
    /// Watch until it is done, which is the default
    #[arg(long, overrides_with = "no_wait")]
    wait: bool,
    /// Come back as soon as the controller has answered
    #[arg(long)]
    no_wait: bool,
    /// The folder where that controller keeps its CA, instead of a cluster's Secret
    #[arg(long, value_name = "FOLDER", requires = "controller", conflicts_with_all = ["context", "namespace"])]
    ca_folder: Option<PathBuf>,
}

/// How often the controllers are asked.
const PERIOD: Duration = Duration::from_millis(500);
/// Within this time a controller takes a request, and all of them tell its answer.
const SOON: Duration = Duration::from_secs(30);

/// Asks for it, and watches.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    super::block_on(async {
        let screen = Screen {
            style: Style::of(&io::stderr()),
        };
        tokio::select! {
            done = rotate(arguments, &screen) => done,
            interrupted = tokio::signal::ctrl_c() => {
                interrupted?;
                screen.say("what is under way goes on by itself: `mesh rotate-root` shows it again, `mesh rotate-root --abandon` goes back");
                Ok(ExitCode::from(130))
            }
        }
    })?
}

async fn rotate(arguments: &Arguments, screen: &Screen) -> Result<ExitCode> {
    let source = Source::new(&arguments.source).await?;
    let place = match (&arguments.ca_folder, &source) {
        (Some(folder), _) => Place::Folder(folder.clone()),
        (None, Source::Cluster(cluster)) => Place::Cluster(cluster.clone()),
        (None, Source::Urls(_)) => {
            bail!("--controller needs --ca-folder: where the request is left for it")
        }
    };
    let request = if arguments.abandon {
        Request::Abandon
    } else {
        Request::Start
    };
    let before = Mesh::of(source.ask().await?);
    match intent(request, &before.rotation) {
        Intent::Nothing(why) => bail!("{why}"),
        Intent::Watch => screen.say("that is under way already"),
        Intent::Ask => {
            place.ask(request).await?;
            let answer = answer(&source, &place, &before.rotation).await?;
            if let Some(why) = answer.strip_prefix("refused: ") {
                bail!("the controller refuses: {why}");
            }
            screen.say(&answer);
        }
    }
    if arguments.no_wait {
        screen.say("`mesh rotate-root` shows how it goes");
        return Ok(ExitCode::SUCCESS);
    }
    let (done, took) = watch(&source, screen).await;
    let root = done
        .issuer
        .map(|issuer| {
            format!(
                "; {} signs, until {}",
                issuer.subject,
                stamp(issuer.not_after)
            )
        })
        .unwrap_or_default();
    style::print(&format!(
        "done after {}: {}{root}\n",
        span(took.as_secs()),
        done.rotation.reason
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// What a request means in the phase that is.
#[derive(Debug, PartialEq, Eq)]
enum Intent {
    Ask,
    /// It is being done.
    Watch,
    Nothing(&'static str),
}

fn intent(request: Request, rotation: &Rotation) -> Intent {
    match (request, is_steady(rotation), rotation.reverting) {
        (Request::Start, true, _)
        | (Request::Start, false, true)
        | (Request::Abandon, false, false) => Intent::Ask,
        (Request::Start, false, false) | (Request::Abandon, false, true) => Intent::Watch,
        (Request::Abandon, true, _) => {
            Intent::Nothing("no rotation is under way, so there is nothing to abandon")
        }
    }
}

/// What the controller says to the request: once it has taken it, and its state tells.
async fn answer(source: &Source, place: &Place, before: &Rotation) -> Result<String> {
    let deadline = Instant::now() + SOON;
    while place.pending().await? {
        if Instant::now() > deadline {
            bail!(
                "no controller has taken the request within {} s: does one run, and is its CA this one? `mesh check` says more",
                SOON.as_secs()
            );
        }
        sleep(PERIOD / 2).await;
    }
    loop {
        // A controller that restarts in this moment is asked again.
        let now = source.ask().await.map(|answers| Mesh::of(answers).rotation);
        match now {
            // The same answer as last time changes nothing that could be seen; then it counts after a while.
            Ok(now) if is_news(&now, before) || Instant::now() > deadline => return Ok(now.answer),
            Err(error) if Instant::now() > deadline => return Err(error.into()),
            _ => sleep(PERIOD / 2).await,
        }
    }
}

fn is_news(now: &Rotation, before: &Rotation) -> bool {
    (&now.phase, now.since, now.reverting, &now.answer)
        != (
            &before.phase,
            before.since,
            before.reverting,
            &before.answer,
        )
}

/// Shows each phase, and on whom it waits, until there is none.
async fn watch(source: &Source, screen: &Screen) -> (Mesh, Duration) {
    let begun = Instant::now();
    let (mut phase, mut told) = (String::new(), String::new());
    loop {
        let news = match source.ask().await {
            Ok(answers) => {
                let mesh = Mesh::of(answers);
                if is_steady(&mesh.rotation) {
                    return (mesh, begun.elapsed());
                }
                let heading = format!("{}: {}", mesh.rotation.phase, meaning(&mesh.rotation));
                if heading != phase {
                    screen.say(&heading);
                    phase = heading;
                }
                waits_for(&mesh.rotation.waiting)
            }
            Err(error) => format!("{error}; asking again"),
        };
        if !news.is_empty() && without_seconds(&news) != told {
            told = without_seconds(&news);
            screen.detail(&news);
        }
        sleep(PERIOD).await;
    }
}

/// The first of those that a phase waits for, and how many more: `mesh identity` lists them.
fn waits_for(waiting: &[String]) -> String {
    match waiting {
        [] => String::new(),
        [one] => format!("waits for {one}"),
        [first, more @ ..] => format!("waits for {first}, and for {} more", more.len()),
    }
}

/// A text whose countdown is not news.
fn without_seconds(text: &str) -> String {
    let mut words: Vec<&str> = text.split(' ').collect();
    for index in 1..words.len() {
        if words[index] == "s" && words[index - 1].bytes().all(|byte| byte.is_ascii_digit()) {
            words[index - 1] = "";
        }
    }
    words.join(" ")
}

struct Screen {
    style: Style,
}

impl Screen {
    /// Progress goes to standard error; where nobody reads it, nobody is missed.
    fn say(&self, text: &str) {
        let _ = writeln!(
            io::stderr().lock(),
            "{}",
            self.style.paint(Tone::Strong, text)
        );
    }

    /// What is below that.
    fn detail(&self, text: &str) {
        let _ = writeln!(
            io::stderr().lock(),
            "  {}",
            self.style.paint(Tone::Doubtful, text)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rotation(phase: &str, reverting: bool) -> Rotation {
        Rotation {
            phase: phase.into(),
            reverting,
            ..Rotation::default()
        }
    }

    #[test]
    fn what_is_under_way_is_watched_and_not_asked_for_again() {
        for (request, phase, reverting, expected) in [
            (Request::Start, "steady", false, Intent::Ask),
            (Request::Start, "announcing", false, Intent::Watch),
            (Request::Start, "switched", false, Intent::Watch),
            (Request::Start, "announcing", true, Intent::Ask),
            (Request::Abandon, "switched", false, Intent::Ask),
            (Request::Abandon, "announcing", true, Intent::Watch),
        ] {
            assert_eq!(
                intent(request, &rotation(phase, reverting)),
                expected,
                "{request:?} {phase} {reverting}"
            );
        }
        assert!(matches!(
            intent(Request::Abandon, &rotation("steady", false)),
            Intent::Nothing(_)
        ));
    }

    #[test]
    fn the_first_is_named_and_a_countdown_is_no_news() {
        let waiting: Vec<String> = (0..3)
            .map(|number| format!("shop/till-{number} to trust the current roots"))
            .collect();
        assert_eq!(
            waits_for(&waiting),
            "waits for shop/till-0 to trust the current roots, and for 2 more"
        );
        assert_eq!(waits_for(&[]), "");
        assert_eq!(
            without_seconds("files, 75 s more"),
            without_seconds("files, 7 s more")
        );
        assert_ne!(
            without_seconds("till-1 to trust"),
            without_seconds("till-2 to trust")
        );
    }
}
