//! The start of the controller: configuration, logs, runtime, signals, exit code.

use std::process::ExitCode;

use diy_mesh_controller::Config;
use diy_mesh_runtime::{error_chain, init_logging, shutdown_signal};

fn main() -> ExitCode {
    let config = Config::load();
    init_logging(config.log.clone(), config.log_format);
    match run(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}", error_chain(&*error));
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn run(config: Config) -> anyhow::Result<()> {
    let shutdown = shutdown_signal()?;
    Ok(diy_mesh_controller::run(config, shutdown).await?)
}
