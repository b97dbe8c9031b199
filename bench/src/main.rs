//! bench: parses the command line and runs the benchmark.

use std::process::ExitCode;

use diy_mesh_bench::{config::Config, run_until_signal};

fn main() -> ExitCode {
    let config = match Config::from_command_line() {
        Ok(config) => config,
        Err(errors) => {
            eprintln!("bench: {errors}");
            return ExitCode::from(2);
        }
    };
    run_until_signal(config)
}
