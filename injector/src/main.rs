//! The start of the injector: logs, configuration, runtime, signals, exit code.

use std::process::ExitCode;

use diy_mesh_injector::{Config, Flags, run};
use diy_mesh_runtime::{init_logging, shutdown_signal};
use tracing_subscriber::filter::Targets;

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
    init_logging(filter, flags.log_format);
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
    tracing::error!("{error}");
    ExitCode::FAILURE
}

#[tokio::main(flavor = "current_thread")]
async fn serve(config: Config) -> anyhow::Result<()> {
    let shutdown = shutdown_signal()?;
    Ok(run(config, shutdown).await?)
}
