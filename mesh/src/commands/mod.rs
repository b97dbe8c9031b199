//! What `mesh` can be asked to do; a command is a file. The hidden ones are the sandbox's own: see `sandbox::enter`.

pub mod check;
pub mod demo;
pub mod identity;
mod output;
pub mod rotate_root;
mod style;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use clap::Subcommand;
use tracing_subscriber::filter::Targets;

use crate::sandbox::{enter, exec};

/// A command and its arguments.
#[derive(Subcommand)]
pub enum Command {
    /// Watch requests go through the mesh on this machine: no cluster, no Docker
    Demo(demo::Arguments),
    /// Say what is wrong with the mesh of a cluster, and what to do
    Check(check::Arguments),
    /// Show whom the mesh trusts, how far a rotation is, and each workload's certificate
    Identity(identity::Arguments),
    /// Change the mesh's root of trust while everything runs
    RotateRoot(rotate_root::Arguments),
    /// Make a sandbox's namespaces
    #[command(hide = true)]
    SandboxNode(Programs),
    /// Be process 1 of a sandbox
    #[command(hide = true)]
    SandboxInit(Programs),
    /// Be a sandbox's node
    #[command(hide = true)]
    SandboxAgent {
        /// The folder of the programs that stand for images
        #[arg(long)]
        programs: PathBuf,
        /// What is logged
        #[arg(long, env = "LOG", default_value = "warn")]
        log: Targets,
    },
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
            Self::Check(arguments) => check::run(&arguments),
            Self::Identity(arguments) => identity::run(&arguments),
            Self::RotateRoot(arguments) => rotate_root::run(&arguments),
            Self::SandboxNode(Programs { programs }) => enter::node(&programs),
            Self::SandboxInit(Programs { programs }) => enter::init(&programs),
            Self::SandboxAgent { programs, log } => enter::agent(programs, log),
            Self::SandboxExec { spec } => exec::run(&spec).map(|never| match never {}),
        }
    }
}

/// Runs what waits for others.
fn block_on<T>(future: impl Future<Output = T>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot wait for anything")?;
    Ok(runtime.block_on(future))
}
