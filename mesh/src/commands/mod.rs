//! The commands of `mesh`. The hidden commands belong to the sandbox: see `sandbox::enter`.

pub mod check;
pub mod demo;
pub mod identity;
pub mod rotate_root;
mod terminal;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use clap::Subcommand;
use tracing_subscriber::filter::Targets;

use crate::sandbox::{enter, exec};

/// A command and its arguments.
#[derive(Subcommand)]
pub enum Command {
    /// Run the demo on this machine, without a cluster or Docker
    Demo(demo::Arguments),
    /// Check the mesh of a cluster and recommend actions
    Check(check::Arguments),
    /// Show the trust roots, the root rotation and the certificates of the workloads
    Identity(identity::Arguments),
    /// Rotate the trust root of the mesh without downtime
    RotateRoot(rotate_root::Arguments),
    /// Create the namespaces of a sandbox
    #[command(hide = true)]
    SandboxNode(Programs),
    /// Run process 1 of a sandbox
    #[command(hide = true)]
    SandboxInit(Programs),
    /// Run the node of a sandbox
    #[command(hide = true)]
    SandboxAgent {
        /// Directory of the programs that run in place of images
        #[arg(long)]
        programs: PathBuf,
        /// Log filter
        #[arg(long, env = "LOG", default_value = "warn")]
        log: Targets,
    },
    /// Replace this process with the program of a container
    #[command(hide = true)]
    SandboxExec {
        /// Path of the process specification
        spec: PathBuf,
    },
}

/// The arguments of the commands of the sandbox.
#[derive(clap::Args)]
pub struct Programs {
    /// Directory of the programs that run in place of images
    #[arg(long)]
    programs: PathBuf,
}

impl Command {
    /// Runs the command.
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

/// Runs a future on a new single-threaded runtime.
fn block_on<T>(future: impl Future<Output = T>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("failed to start the runtime")?;
    Ok(runtime.block_on(future))
}
