//! The program `mesh`: parses the command line and runs the command.

use std::process::ExitCode;

use clap::Parser;
use diy_mesh::commands::Mesh;

fn main() -> ExitCode {
    Mesh::parse().command.run().unwrap_or_else(|error| {
        eprintln!("mesh: {error:#}");
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_is_valid() {
        Mesh::command().debug_assert();
    }
}
