//! Entry point: reads the configuration, installs logging, runs `lib.rs`. Exit code 2: invalid configuration; 1: failure.

use std::io::{self, IsTerminal as _};
use std::process::ExitCode;

use diy_mesh_proxy::config::Config;
use diy_mesh_proxy::{run, shutdown_signal};
use tracing_subscriber::fmt;
use tracing_subscriber::prelude::*;

fn main() -> ExitCode {
    let config = Config::load();
    let stderr = fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    tracing_subscriber::registry()
        .with(config.log.clone())
        .with(stderr)
        .init();
    match run(config, shutdown_signal) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("proxy: {error:#}");
            ExitCode::FAILURE
        }
    }
}
