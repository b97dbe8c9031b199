//! The commands of the sandbox's own processes (see `enter`). They have a parser of their own:
//! neither help nor suggestions nor completions of `mesh` name them.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, Parser};
use tracing_subscriber::filter::Targets;

use super::{enter, exec};

/// A command that only `mesh` runs. `programs` is the directory of the programs that run in place of
/// images.
#[derive(Parser)]
#[command(name = "mesh")]
pub enum Internal {
    /// Create the namespaces of a sandbox
    #[command(name = "sandbox-node")]
    Node {
        /// Directory of the programs.
        programs: PathBuf,
    },
    /// Run process 1 of a sandbox
    #[command(name = "sandbox-init")]
    Init {
        /// Directory of the programs.
        programs: PathBuf,
    },
    /// Run the node of a sandbox
    #[command(name = "sandbox-agent")]
    Agent {
        /// Directory of the programs.
        programs: PathBuf,
        /// Log filter
        #[arg(long, env = "LOG", default_value = "warn")]
        log: Targets,
    },
    /// Replace this process with the program of a container
    #[command(name = "sandbox-exec")]
    Exec {
        /// Path of the process specification
        spec: PathBuf,
    },
}

impl Internal {
    /// Whether this is the name of such a command.
    pub fn is_name(argument: &OsStr) -> bool {
        Self::command().find_subcommand(argument).is_some()
    }

    /// Runs the command.
    pub fn run(self) -> Result<ExitCode> {
        match self {
            Self::Node { programs } => enter::node(&programs),
            Self::Init { programs } => enter::init(&programs),
            Self::Agent { programs, log } => enter::agent(programs, log),
            Self::Exec { spec } => exec::run(&spec).map(|never| match never {}),
        }
    }
}
