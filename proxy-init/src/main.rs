//! proxy-init: sets the redirect rules of its network namespace, then exits. Exit code 2: invalid
//! flags; 1: failure.

use std::io::{self, Write};
use std::process::ExitCode;

use diy_mesh_proxy_init::config::Config;

fn main() -> ExitCode {
    match diy_mesh_proxy_init::run(&Config::read()) {
        Ok(report) => {
            // The rules are set: a closed standard output is no failure.
            io::stdout().write_all(report.as_bytes()).ok();
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("proxy-init: {error}");
            ExitCode::FAILURE
        }
    }
}
