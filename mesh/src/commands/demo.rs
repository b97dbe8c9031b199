//! `mesh demo`: the walkthrough's manifests in a sandbox, with the output that `kubectl logs` would show. It blocks on one
//! channel, on which everything comes: what pods do and print, signals, and the clock.

use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
    sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use super::output::{Screen, Summary};
use crate::sandbox::{
    Sandbox,
    manifest::{self, Files},
    protocol::Message,
};

/// What the demo can be told.
#[derive(Args, Debug)]
pub struct Arguments {
    /// End after this many seconds; the exit code then says whether everything had become ready
    #[arg(long = "for", value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    seconds: Option<u64>,
    /// Print the summary only
    #[arg(long)]
    quiet: bool,
    /// Show only pods or containers of this name, for example http-client or proxy; may be given again
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Run the manifests of this folder instead of the walkthrough's
    #[arg(long, value_name = "DIR")]
    manifests: Option<PathBuf>,
}

/// What comes on the channel.
enum Happening {
    Sandbox(Box<Message>),
    /// The channel to the sandbox is closed.
    Signal,
}

/// How often it says what it still waits for.
const NEWS: Duration = Duration::from_secs(10);
/// How long programs may take to end when the demo ends.
const GRACE: Duration = Duration::from_secs(3);

/// Runs the demo.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let objects = match &arguments.manifests {
        Some(folder) => Files::read(folder).and_then(|files| files.objects()).with_context(|| {
            let folder = folder.display();
            format!("--manifests {folder} must name a folder of YAML files with the mesh and its apps, as this project's manifests/ is")
        })?,
        None => manifest::embedded().objects()?,
    };
    // A reader that is slow slows the programs down, as a slow terminal does; memory stays bounded.
    let (sender, happenings) = sync_channel(1024);
    watch_signals(sender.clone())?;
    let begun = Instant::now();
    let mut screen = Screen::new(arguments.quiet, arguments.only.clone());
    screen.say(
        "starting a sandbox of network namespaces; Ctrl-C ends it and leaves nothing behind",
    )?;
    let sandbox = Sandbox::start_with(
        &programs()?,
        Box::new(move |message| {
            // The receiver is gone only at the end.
            let _ = sender.send(Happening::Sandbox(Box::new(message.clone())));
            false
        }),
    )?;
    sandbox.apply_objects(objects)?;
    let deadline = arguments
        .seconds
        .map(|seconds| begun + Duration::from_secs(seconds));
    let mut demo = Demo {
        sandbox,
        screen,
        summary: Summary::default(),
        begun,
        ready: None,
    };
    let end = demo.watch(&happenings, deadline)?;
    demo.finish(end, &happenings)
}

/// Why the demo ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Time,
    Signal,
    /// Nobody reads the output any more.
    Output,
}

struct Demo {
    sandbox: Sandbox,
    screen: Screen,
    summary: Summary,
    begun: Instant,
    /// How long it took until everything was ready for the first time.
    ready: Option<Duration>,
}

impl Demo {
    fn watch(
        &mut self,
        happenings: &Receiver<Happening>,
        deadline: Option<Instant>,
    ) -> Result<End> {
        let mut news = self.begun + NEWS;
        loop {
            let next = deadline.map_or(news, |deadline| deadline.min(news));
            match happenings.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(Happening::Signal) => return Ok(End::Signal),
                Ok(Happening::Sandbox(message)) => {
                    if let Message::Failed { reason } = &*message {
                        bail!("the sandbox has ended: {reason}");
                    }
                    match self.message(&message) {
                        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                            return Ok(End::Output);
                        }
                        other => other?,
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => bail!("the sandbox is gone"),
            }
            if Instant::now() >= news {
                news += NEWS;
                self.tell_what_is_missing()?;
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(End::Time);
            }
        }
    }

    fn tell_what_is_missing(&mut self) -> io::Result<()> {
        if self.ready.is_some() {
            return Ok(());
        }
        let waiting = self.sandbox.view().not_ready();
        waiting
            .iter()
            .try_for_each(|pod| self.screen.say(&format!("still waiting for {pod}")))
    }

    fn message(&mut self, message: &Message) -> io::Result<()> {
        self.summary.note(message);
        match message {
            Message::Log(line) => self.screen.line(line),
            Message::Notice(text) => self.screen.say(text),
            Message::Pod(pod) => {
                self.screen.pod(pod)?;
                if self.ready.is_none() && self.summary.all_settled() {
                    let took = self.begun.elapsed();
                    self.ready = Some(took);
                    self.screen.say(&format!(
                        "everything is ready after {:.1} s",
                        took.as_secs_f64()
                    ))?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Ends the sandbox; what is still said meanwhile is dropped, and a second signal ends at once.
    fn finish(self, end: End, happenings: &Receiver<Happening>) -> Result<ExitCode> {
        let not_ready = self.sandbox.view().not_ready();
        thread::scope(|scope| {
            let stopping = scope.spawn(|| self.sandbox.shut_down(GRACE));
            while !stopping.is_finished() {
                if let Ok(Happening::Signal) = happenings.recv_timeout(Duration::from_millis(20)) {
                    // The processes of the sandbox end with this one.
                    std::process::exit(130);
                }
            }
            stopping
                .join()
                .expect("shut_down does not panic")
                .context("cannot end the sandbox in order")
        })?;
        if end == End::Output {
            return Ok(ExitCode::SUCCESS);
        }
        let text = self.summary.text(self.begun.elapsed(), self.ready);
        let mut out = io::stdout().lock();
        writeln!(out, "{text}")?;
        let failed = end == End::Time && self.ready.is_none();
        if failed {
            writeln!(out, "not everything became ready:")?;
            for pod in not_ready {
                writeln!(out, "  {pod}")?;
            }
        }
        Ok(if failed {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        })
    }
}

/// The folder of this program, where the others are too.
fn programs() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find the folder of this program")?;
    Ok(own
        .parent()
        .context("this program is in no folder")?
        .to_owned())
}

fn watch_signals(sender: SyncSender<Happening>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (mut interrupt, mut terminate, mut hangup) = {
        let _inside = runtime.enter();
        (
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
        )
    };
    thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            loop {
                runtime.block_on(async {
                    tokio::select! {
                        _ = interrupt.recv() => {}
                        _ = terminate.recv() => {}
                        _ = hangup.recv() => {}
                    }
                });
                if sender.send(Happening::Signal).is_err() {
                    return;
                }
            }
        })?;
    Ok(())
}
