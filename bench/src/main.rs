//! The benchmark's program: options in, exit code out. Everything else is in the library.

use std::process::ExitCode;

use diy_mesh_bench::{config::Config, run_until_signal};

fn main() -> ExitCode {
    let config = match Config::from_command_line() {
        Ok(config) => config,
        Err(problems) => {
            eprintln!("bench: {problems}");
            return ExitCode::from(2);
        }
    };
    run_until_signal(config)
}
