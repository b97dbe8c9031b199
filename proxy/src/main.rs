//! Entry point: reads the configuration, initializes logging, runs `lib.rs`. Exit code 2: invalid
//! configuration; 1: failure.

use std::process::ExitCode;

use diy_mesh_proxy::config::Config;
use diy_mesh_proxy::run;
use diy_mesh_runtime::init_logging;

fn main() -> ExitCode {
    let config = Config::load();
    init_logging(config.log.clone(), config.log_format);
    match run(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
