//! proxy-init: sets the redirect rules of the network namespace that it is started in, and ends. Exit code 2 is a wrong configuration,
//! 1 a failure.

use std::io::{self, Write};
use std::process::ExitCode;

use diy_mesh_proxy_init::config::Config;

fn main() -> ExitCode {
    let config = match Config::read() {
        Ok(config) => config,
        Err(problems) => {
            eprintln!("proxy-init: {problems}");
            return ExitCode::from(2);
        }
    };
    match diy_mesh_proxy_init::run(&config) {
        Ok(report) => {
            // The rules are set, whether or not somebody reads of it.
            io::stdout().write_all(report.as_bytes()).ok();
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("proxy-init: {error}");
            ExitCode::FAILURE
        }
    }
}
