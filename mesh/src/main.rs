//! The program `mesh`: reads the command line and hands over to the command.

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use diy_mesh::{commands::demo, sandbox};

/// DIY Service Mesh: the whole mesh, small enough to read, fast enough to run.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Watch requests go through the mesh on this machine: no cluster, no Docker
    Demo(demo::Arguments),
    #[command(hide = true)]
    SandboxNode {
        #[arg(long)]
        programs: PathBuf,
    },
    #[command(hide = true)]
    SandboxInit {
        #[arg(long)]
        programs: PathBuf,
    },
    #[command(hide = true)]
    SandboxAgent {
        #[arg(long)]
        programs: PathBuf,
    },
    #[command(hide = true)]
    SandboxExec { spec: PathBuf },
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Demo(arguments) => demo::run(&arguments),
        Command::SandboxNode { programs } => sandbox::enter::node(&programs),
        Command::SandboxInit { programs } => sandbox::enter::init(&programs),
        Command::SandboxAgent { programs } => sandbox::enter::agent(programs),
        Command::SandboxExec { spec } => sandbox::exec::run(&spec).map(|never| match never {}),
    };
    result.unwrap_or_else(|error| {
        eprintln!("mesh: {error:#}");
        ExitCode::FAILURE
    })
}
