//! The program `mesh`.

use std::process::ExitCode;

fn main() -> ExitCode {
    diy_mesh::commands::run()
}
