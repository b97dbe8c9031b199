//! Starts the proxy: configuration, logging, runtime; the rest is `lib.rs`.

use std::io::{self, IsTerminal as _};
use std::process::ExitCode;

use diy_mesh_proxy::config::Config;
use diy_mesh_proxy::{run, shutdown_signal};
use tracing_subscriber::fmt;
use tracing_subscriber::prelude::*;

fn main() -> ExitCode {
    let config = match Config::load() {
        Ok(config) => config,
        Err(problems) => {
            eprintln!("proxy: the configuration is wrong:\n{problems}");
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
    match run(config, shutdown_signal) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("proxy: {error:#}");
            ExitCode::FAILURE
        }
    }
}
