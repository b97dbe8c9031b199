//! The program `mesh`: parses the command line and runs the command.

use std::process::ExitCode;

use clap::Parser;
use diy_mesh::commands::Command;

/// DIY Service Mesh: the whole mesh, small enough to read, fast enough to run
#[derive(Parser)]
#[command(name = "mesh", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

fn main() -> ExitCode {
    Arguments::parse().command.run().unwrap_or_else(|error| {
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
        Arguments::command().debug_assert();
    }
}
