//! Process lifecycle of a sample program: runtime, signals, exit code, standard output.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Runs `work` with a token that SIGTERM and SIGINT cancel. Logs an error of `work` and returns
/// exit code 1.
pub fn run<F>(name: &str, work: impl FnOnce(CancellationToken) -> F) -> ExitCode
where
    F: Future<Output = anyhow::Result<()>>,
{
    match run_to_end(work) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run_to_end<F>(work: impl FnOnce(CancellationToken) -> F) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<()>>,
{
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let result = runtime.block_on(async {
        let stop = cancel_on_signals().context("cannot register signal handlers")?;
        work(stop).await
    });
    // Does not wait for a name lookup in progress.
    runtime.shutdown_background();
    result
}

/// Writes whole lines in one locked write and flushes, so that concurrent blocks never interleave.
pub fn print(block: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(block.as_bytes())?;
    if !block.ends_with('\n') {
        out.write_all(b"\n")?;
    }
    out.flush()
}

fn cancel_on_signals() -> io::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
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
