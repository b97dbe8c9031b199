//! Starts the injector: logging, configuration, runtime, signals, exit code. Decides nothing.

use std::io::{self, IsTerminal as _};
use std::process::ExitCode;

use diy_mesh_injector::{Config, Flags, run};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt;
use tracing_subscriber::prelude::*;

fn main() -> ExitCode {
    let flags = Flags::parse_process();
    let filter = flags.log.as_deref().unwrap_or("info");
    let filter: Targets = match filter.parse() {
        Ok(filter) => filter,
        Err(error) => {
            eprintln!(
                "injector: LOG (--log): {filter:?} is no filter: {error}; for example `info`"
            );
            return ExitCode::from(2);
        }
    };
    let lines = fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    tracing_subscriber::registry()
        .with(filter)
        .with(lines)
        .init();
    let config = match Config::from_flags(flags) {
        Ok(config) => config,
        Err(problems) => {
            eprintln!("injector: {problems}");
            return ExitCode::from(2);
        }
    };
    let Err(error) = serve(config) else {
        return ExitCode::SUCCESS;
    };
    eprintln!("injector: {error}");
    ExitCode::FAILURE
}

#[tokio::main(flavor = "current_thread")]
async fn serve(config: Config) -> anyhow::Result<()> {
    let (mut terminate, mut interrupt) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    let shutdown = async {
        tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
    };
    Ok(run(config, shutdown).await?)
}
