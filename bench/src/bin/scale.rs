//! scale: parses the command line and measures the control plane at size.

use std::process::ExitCode;

use diy_mesh_bench::scale::{config::Config, run_until_signal};

fn main() -> ExitCode {
    match Config::from_command_line() {
        Ok(config) => run_until_signal(config),
        Err(error) => {
            eprintln!("scale: {error}");
            ExitCode::from(2)
        }
    }
}
