//! Parts of a `main` function: logs, signals, limits and error messages.

use std::error::Error;
use std::io::{self, IsTerminal as _};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

/// Writes logs to stderr, in color if it is a terminal.
pub fn init_logging(filter: Targets) {
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    tracing_subscriber::registry()
        .with(filter)
        .with(lines)
        .init();
}

/// Registers for SIGTERM and SIGINT at once. The returned future completes at the first of them.
pub fn shutdown_signal() -> io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// The limit of open files of this process.
pub fn max_open_files() -> u64 {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft)
}

/// Raises the soft limit of open files to the hard limit. Container runtimes set a soft limit of
/// 1,024. Returns the limit.
pub fn raise_max_open_files() -> u64 {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!("cannot raise the limit of open files: {error}");
    }
    max_open_files()
}

/// Formats an error and its causes as `error: cause: cause`. Omits causes that the text contains
/// already.
pub fn error_chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let part = error.to_string();
        if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Layer(&'static str, Option<Box<Layer>>);

    impl std::fmt::Display for Layer {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Layer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_ref().map(|cause| &**cause as _)
        }
    }

    #[test]
    fn error_chain_names_each_cause_once() {
        let cause = Layer("connection refused", None);
        let same = Layer("cannot connect: connection refused", Some(Box::new(cause)));
        let outer = Layer("cannot list pods", Some(Box::new(same)));
        assert_eq!(
            error_chain(&outer),
            "cannot list pods: cannot connect: connection refused"
        );
    }
}
