//! What `mesh` can be asked to do; a command is a file. The hidden ones are the sandbox's own: see `sandbox::enter`.

pub mod demo;
mod output;

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::Subcommand;

use crate::sandbox::{enter, exec};

/// A command and its arguments.
#[derive(Subcommand)]
pub enum Command {
    /// Watch requests go through the mesh on this machine: no cluster, no Docker
    Demo(demo::Arguments),
    /// Make a sandbox's namespaces
    #[command(hide = true)]
    SandboxNode(Programs),
    /// Be process 1 of a sandbox
    #[command(hide = true)]
    SandboxInit(Programs),
    /// Be a sandbox's node
    #[command(hide = true)]
    SandboxAgent(Programs),
    /// Become a container's program
    #[command(hide = true)]
    SandboxExec {
        /// The description of the process
        spec: PathBuf,
    },
}

/// What a sandbox's own commands need to know.
#[derive(clap::Args)]
pub struct Programs {
    /// The folder of the programs that stand for images
    #[arg(long)]
    programs: PathBuf,
}

impl Command {
    /// Does it.
    pub fn run(self) -> Result<ExitCode> {
        match self {
            Self::Demo(arguments) => demo::run(&arguments),
            Self::SandboxNode(Programs { programs }) => enter::node(&programs),
            Self::SandboxInit(Programs { programs }) => enter::init(&programs),
            Self::SandboxAgent(Programs { programs }) => enter::agent(programs),
            Self::SandboxExec { spec } => exec::run(&spec).map(|never| match never {}),
        }
    }
}
