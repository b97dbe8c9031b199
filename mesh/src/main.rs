//! The program `mesh`.

use std::process::ExitCode;

fn main() -> ExitCode {
    diy_mesh::commands::run().unwrap_or_else(|error| {
        eprintln!("mesh: {error:#}");
        ExitCode::FAILURE
    })
}
