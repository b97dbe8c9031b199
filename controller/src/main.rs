//! The controller's start: configuration, logs, runtime, signals, exit code. Everything else is in the library.

use std::io::{self, IsTerminal as _};
use std::process::ExitCode;

use clap::Parser;
use diy_mesh_controller::Config;
use diy_mesh_controller::config::RawConfig;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::fmt;
use tracing_subscriber::prelude::*;

fn main() -> ExitCode {
    let config = match Config::try_from(RawConfig::parse()) {
        Ok(config) => config,
        Err(problems) => {
            eprint!("controller: {problems}");
            return ExitCode::from(2);
        }
    };
    let lines = fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    tracing_subscriber::registry()
        .with(config.log.clone())
        .with(lines)
        .init();
    match run(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn run(config: Config) -> anyhow::Result<()> {
    let (mut terminate, mut interrupt) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    let shutdown = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    Ok(diy_mesh_controller::run(config, shutdown).await?)
}
