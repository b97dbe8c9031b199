//! Starts the proxy: configuration, logging, runtime; the rest is `lib.rs`.

use std::process::ExitCode;

use diy_mesh_proxy::config::Config;
use diy_mesh_proxy::{run, shutdown_signal};

fn main() -> ExitCode {
    let config = match Config::load() {
        Ok(config) => config,
        Err(problems) => {
            eprintln!("proxy: the configuration is wrong:\n{problems}");
            return ExitCode::from(2);
        }
    };
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(&config.log))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
    match run(config, shutdown_signal) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("proxy: {error:#}");
            ExitCode::FAILURE
        }
    }
}
