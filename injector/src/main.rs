//! Starts the injector: logging, configuration, runtime, signals, exit code. Decides nothing.

use std::process::ExitCode;

use clap::Parser;
use diy_mesh_injector::{Config, Flags, run};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let flags = Flags::parse();
    let filter = EnvFilter::new(flags.log.as_deref().unwrap_or("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
    let config = match Config::from_flags(flags) {
        Ok(config) => config,
        Err(problems) => {
            eprintln!("injector: {problems}");
            return ExitCode::from(2);
        }
    };
    let Err(error) = serve(config) else { return ExitCode::SUCCESS };
    eprintln!("injector: {error}");
    ExitCode::FAILURE
}

#[tokio::main(flavor = "current_thread")]
async fn serve(config: Config) -> anyhow::Result<()> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let shutdown = async {
        tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
    };
    Ok(run(config, shutdown).await?)
}
