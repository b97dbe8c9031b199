//! The outside of a sample program: exit codes, the signals that end it, and its standard output.

use std::fmt::Display;
use std::future::Future;
use std::io::{self, Write};
use std::process::ExitCode;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Runs a program whose configuration has been read: `work` gets the token that SIGTERM and SIGINT cancel.
///
/// A wrong configuration ends with exit code 2, a failure with 1. A look-up of a name that is still under way does not hold up the end.
pub fn run<C, P, E, F>(
    name: &str,
    config: Result<C, P>,
    work: impl FnOnce(C, CancellationToken) -> F,
) -> ExitCode
where
    P: Display,
    E: Display,
    F: Future<Output = Result<(), E>>,
{
    let config = match config {
        Ok(config) => config,
        Err(problems) => {
            eprintln!("{name}: {problems}");
            return ExitCode::from(2);
        }
    };
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => return failed(name, &format!("cannot start: {error}")),
    };
    let result = runtime.block_on(async {
        let stop =
            stop_on_signals().map_err(|error| format!("cannot wait for signals: {error}"))?;
        work(config, stop)
            .await
            .map_err(|error| format!("{error:#}"))
    });
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(name, &error),
    }
}

/// Writes a block of whole lines at once, so that the blocks of concurrent requests never mix, and at once also into a pipe.
pub fn print(block: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(block.as_bytes())?;
    if !block.ends_with('\n') {
        out.write_all(b"\n")?;
    }
    out.flush()
}

fn stop_on_signals() -> io::Result<CancellationToken> {
    let (mut terminate, mut interrupt) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    let token = CancellationToken::new();
    let stop = token.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stop.cancel();
    });
    Ok(token)
}

fn failed(name: &str, error: &str) -> ExitCode {
    eprintln!("{name}: {error}");
    ExitCode::FAILURE
}
