//! Parts of a `main` function: logs, signals, limits and error messages.

use std::error::Error;
use std::io::{self, IsTerminal as _};
use std::iter::successors;

use clap::ValueEnum;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};
use tracing::Subscriber;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::{self, MakeWriter};
use tracing_subscriber::prelude::*;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, registry};

/// The format of logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people
    Text,
    /// One JSON object per line: `timestamp`, `level`, `target`, `message`, and further fields
    Json,
}

/// Writes logs to stderr, as text in color if it is a terminal.
pub fn init_logging(filter: Targets, format: LogFormat) {
    let lines = lines(format, io::stderr);
    registry().with(filter).with(lines).init();
}

fn lines<S, W>(format: LogFormat, writer: W) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let lines = fmt::layer().with_writer(writer);
    match format {
        LogFormat::Text => lines.with_ansi(io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false)
            .boxed(),
    }
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
    for cause in successors(error.source(), |&cause| cause.source()) {
        let part = cause.to_string();
        if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

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
    fn json_logs_contain_one_object_per_line() {
        static OUTPUT: Mutex<Vec<u8>> = Mutex::new(Vec::new());
        struct Output;
        impl io::Write for Output {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                OUTPUT.lock().unwrap().extend_from_slice(bytes);
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let logs = registry().with(lines(LogFormat::Json, || Output));
        tracing::subscriber::with_default(logs, || {
            tracing::info!(pod = "shop/a", "first \"line\"\nstill the first");
            tracing::warn!("second");
        });
        let output = String::from_utf8(OUTPUT.lock().unwrap().clone()).unwrap();
        let lines: Vec<_> = output.lines().collect();
        assert_eq!(lines.len(), 2, "{output}");
        for part in [
            r#"{"timestamp":""#,
            r#""level":"INFO""#,
            r#""message":"first \"line\"\nstill the first""#,
            r#""pod":"shop/a""#,
            r#""target":"diy_mesh_runtime::process::tests""#,
        ] {
            assert!(lines[0].contains(part), "{part}: {output}");
        }
        assert!(lines[1].contains(r#""level":"WARN""#), "{output}");
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
