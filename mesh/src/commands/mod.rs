//! The commands of `mesh`.

pub mod authz;
pub mod callers;
pub mod changes;
pub mod check;
pub mod dashboard;
pub mod demo;
pub mod egress;
pub mod encryption;
pub mod identity;
pub mod install;
pub mod plan;
pub mod proxy;
pub mod rotate_root;
pub mod routes;
pub mod services;
pub mod stat;
pub mod tap;
pub mod test;
pub mod top;
pub mod uninstall;
pub mod upgrade;
pub mod why;

use std::{
    env,
    process::{ExitCode, Termination},
};

use anyhow::{Context, Result};
use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use diy_mesh_sandbox::internal::Internal;

use crate::authorization::Outcome;
use crate::terminal;

/// Runs the command of this process's arguments. Exits if they are invalid.
pub fn run() -> ExitCode {
    match env::args_os().nth(1) {
        Some(name) if Internal::is_name(&name) => exit(Internal::parse().run(), 1),
        _ => Mesh::parse().command.run(),
    }
}

/// DIY Service Mesh: the whole mesh, small enough to read, fast enough to run
#[derive(Parser)]
#[command(name = "mesh", version = VERSION)]
struct Mesh {
    /// The command.
    #[command(subcommand)]
    command: Command,
}

/// A command and its arguments.
#[derive(Subcommand)]
enum Command {
    /// Run the demo on this machine, without a cluster or Docker
    Demo(demo::Arguments),
    /// Tell whether a call is allowed, by which policy and rule, and why
    Authz(Box<authz::Arguments>),
    /// List the callers of pods and their calls
    Callers(callers::Arguments),
    /// List recent changes of objects and pods that steer traffic, with their authors
    Changes(changes::Arguments),
    /// Check the mesh of a cluster and recommend actions
    Check(check::Arguments),
    /// Show workloads, their calls and failures on a page in the browser
    Dashboard(dashboard::Arguments),
    /// List what pods call outside of the cluster, or write policies that allow exactly that
    Egress(egress::Arguments),
    /// Tell which Services are not encrypted, and why
    Encryption(encryption::Arguments),
    /// Show the trust roots, the root rotation and the certificates of the workloads
    Identity(identity::Arguments),
    /// Print the objects of the mesh, for `kubectl apply -f -` or a repository
    Install(install::Arguments),
    /// Tell what policies, or strict mode, would have denied of the calls that were seen
    Plan(plan::Arguments),
    /// Show what is in force in the proxy of a pod: endpoints, routes, policies, certificate
    Proxy(proxy::Arguments),
    /// Rotate the trust root of the mesh without downtime
    RotateRoot(rotate_root::Arguments),
    /// List the routes of Services with their backends and conditions
    Routes(routes::Arguments),
    /// List the Services that the controller knows, with endpoints and identities
    Services(services::Arguments),
    /// Show rates, success, durations and mutual TLS of workloads, routes and edges
    Stat(stat::Arguments),
    /// Show the exchanges of pods as they end
    Tap(tap::Arguments),
    /// Run expectations about calls against manifests, without a cluster
    Test(test::Arguments),
    /// Watch rates, success and durations live, worst first
    Top(top::Arguments),
    /// Delete the mesh from a cluster, once no pod has a proxy
    Uninstall(uninstall::Arguments),
    /// Check whether the mesh of a cluster can be upgraded to the release of this program
    Upgrade(upgrade::Arguments),
    /// Tell why an exchange did what it did, from both of its proxies
    Why(why::Arguments),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the version
    Version,
}

impl Command {
    /// Runs the command.
    fn run(self) -> ExitCode {
        match self {
            Self::Demo(arguments) => exit(demo::run(&arguments), 1),
            Self::Authz(arguments) => exit(block_on(authz::run(&arguments)), 2),
            Self::Callers(arguments) => exit(block_on(callers::run(&arguments)), 2),
            Self::Changes(arguments) => exit(block_on(changes::run(&arguments)), 2),
            Self::Check(arguments) => exit(block_on(check::run(&arguments)), 2),
            Self::Dashboard(arguments) => exit(block_on(dashboard::run(&arguments)), 2),
            Self::Egress(arguments) => exit(block_on(egress::run(&arguments)), 2),
            Self::Encryption(arguments) => exit(block_on(encryption::run(&arguments)), 2),
            Self::Identity(arguments) => exit(block_on(identity::run(&arguments)), 1),
            Self::Install(arguments) => exit(install::run(&arguments), 1),
            Self::Plan(arguments) => exit(block_on(plan::run(&arguments)), 2),
            Self::Proxy(arguments) => exit(block_on(proxy::run(&arguments)), 2),
            Self::RotateRoot(arguments) => exit(block_on(rotate_root::run(&arguments)), 1),
            Self::Routes(arguments) => exit(block_on(routes::run(&arguments)), 1),
            Self::Services(arguments) => exit(block_on(services::run(&arguments)), 1),
            Self::Stat(arguments) => exit(block_on(stat::run(&arguments)), 2),
            Self::Tap(arguments) => exit(block_on(tap::run(&arguments)), 2),
            Self::Test(arguments) => exit(test::run(&arguments), 2),
            Self::Top(arguments) => exit(block_on(top::run(&arguments)), 2),
            Self::Uninstall(arguments) => exit(block_on(uninstall::run(&arguments)), 1),
            Self::Upgrade(arguments) => exit(block_on(upgrade::run(&arguments)), 2),
            Self::Why(arguments) => exit(block_on(why::run(&arguments)), 2),
            Self::Completions { shell } => exit(completions(shell), 1),
            Self::Version => exit(terminal::print(&format!("mesh {VERSION}\n")), 1),
        }
    }
}

/// The version, and the commit if the sources are a git checkout.
pub const VERSION: &str = env!("MESH_VERSION");

/// The definition of the command line.
pub fn command() -> clap::Command {
    Mesh::command()
}

fn completions(shell: Shell) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command(), "mesh", &mut script);
    terminal::print(&String::from_utf8_lossy(&script))
}

/// The exit code of a command. An error is printed and has the given code, unless the reader of
/// standard output has exited.
fn exit(result: Result<impl Termination>, code_of_errors: u8) -> ExitCode {
    match result {
        Ok(result) => result.report(),
        Err(error) if terminal::is_closed(&error) => ExitCode::SUCCESS,
        Err(error) => {
            terminal::note(&format!("mesh: {error:#}"));
            ExitCode::from(code_of_errors)
        }
    }
}

impl Termination for Outcome {
    fn report(self) -> ExitCode {
        match self {
            Self::Allowed => ExitCode::SUCCESS,
            Self::Denied => ExitCode::FAILURE,
            Self::Asks | Self::Unknown => ExitCode::from(3),
        }
    }
}

/// Runs a future on a new single-threaded runtime.
fn block_on<T>(future: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("failed to start the runtime")?;
    runtime.block_on(future)
}

/// The exit code of `mesh authz`, `mesh egress` and the like, for their tests.
#[cfg(test)]
fn code(run: impl Future<Output = Result<Outcome>>) -> ExitCode {
    exit(block_on(run), 2)
}

/// The arguments of a command, for its tests.
#[cfg(test)]
fn parsed<A: clap::Args>(line: &str) -> Result<A, clap::Error> {
    let command = A::augment_args(clap::Command::new("mesh"));
    A::from_arg_matches(&command.try_get_matches_from(line.split(' '))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_valid() {
        command().debug_assert();
        Internal::command().debug_assert();
    }

    /// The error of invalid arguments.
    fn error(arguments: &[&str]) -> String {
        let arguments = [&["mesh"], arguments].concat();
        let error = Mesh::try_parse_from(arguments).err();
        error.expect("they are invalid").to_string()
    }

    #[test]
    fn errors_and_help_do_not_name_commands_of_the_sandbox() {
        for arguments in [&["sandbox"][..], &["sandbox-nod"], &["--help"], &["help"]] {
            let error = error(arguments);
            assert!(!error.contains("sandbox-node"), "{error}");
        }
        assert!(Internal::is_name("sandbox-node".as_ref()));
        assert!(!Internal::is_name("help".as_ref()));
    }

    #[test]
    fn errors_suggest_similar_commands_and_flags() {
        for (arguments, similar) in [
            (&["demmo"][..], "'demo'"),
            (&["demo", "--quite"], "'--quiet'"),
        ] {
            let error = error(arguments);
            let expected = format!("similar {} exists: {similar}", kind(arguments));
            assert!(error.contains(&expected), "{error}");
        }
        let unrelated = error(&["demo", "--xyz"]);
        assert!(!unrelated.contains("similar"), "{unrelated}");
    }

    #[test]
    fn commands_about_the_whole_mesh_reject_a_namespace() {
        for command in [&["rotate-root"][..], &["authz", "forget", "shop"]] {
            let error = error(&[command, &["-n", "mesh"]].concat());
            assert!(error.contains("--mesh-namespace"), "{error}");
        }
    }

    fn kind(arguments: &[&str]) -> &'static str {
        match arguments.len() {
            1 => "subcommand",
            _ => "argument",
        }
    }
}
