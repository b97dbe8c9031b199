//! The commands of `mesh`. The hidden commands belong to the sandbox: see `sandbox::enter`.

pub mod check;
pub mod demo;
pub mod identity;
pub mod rotate_root;
pub mod routes;
pub mod services;
mod terminal;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use tracing_subscriber::filter::Targets;

use crate::sandbox::{enter, exec};

/// DIY Service Mesh: the whole mesh, small enough to read, fast enough to run
#[derive(Parser)]
#[command(name = "mesh", version = VERSION)]
pub struct Mesh {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

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
    /// List the routes of Services with their backends and conditions
    Routes(routes::Arguments),
    /// List the Services that the controller knows, with endpoints and identities
    Services(services::Arguments),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the version
    Version,
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
            Self::Routes(arguments) => routes::run(&arguments),
            Self::Services(arguments) => services::run(arguments),
            Self::Completions { shell } => completions(shell),
            Self::Version => {
                terminal::print(&format!("mesh {VERSION}\n"))?;
                Ok(ExitCode::SUCCESS)
            }
            Self::SandboxNode(Programs { programs }) => enter::node(&programs),
            Self::SandboxInit(Programs { programs }) => enter::init(&programs),
            Self::SandboxAgent { programs, log } => enter::agent(programs, log),
            Self::SandboxExec { spec } => exec::run(&spec).map(|never| match never {}),
        }
    }
}

/// The version, and the commit if the sources are a git checkout.
pub const VERSION: &str = env!("MESH_VERSION");

fn completions(shell: Shell) -> Result<ExitCode> {
    let mut script = Vec::new();
    // clap_complete includes hidden commands.
    let shown = |command: &&clap::Command| !command.is_hide_set();
    let commands = Mesh::command();
    let commands = commands.get_subcommands().filter(shown).cloned();
    let mut mesh = clap::Command::new("mesh")
        .version(VERSION)
        .subcommands(commands);
    clap_complete::generate(shell, &mut mesh, "mesh", &mut script);
    terminal::print(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}

/// Runs a future on a new single-threaded runtime.
fn block_on<T>(future: impl Future<Output = T>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("failed to start the runtime")?;
    Ok(runtime.block_on(future))
}
