//! `mesh authz forget`: gives up the AuthorizationPolicies of a namespace that were deleted with their
//! definition.

use anyhow::{Result, ensure};
use clap::Args;
use diy_mesh_controller::catalog::marker::{CONFIG_MAP, Marker};

use super::terminal::{self, printable};
use crate::authorization::Outcome;
use crate::cluster::{self, Cluster};

/// The arguments of `mesh authz forget`.
#[derive(Args, Debug)]
#[command(
    mut_arg("namespace", cluster::no_namespace),
    after_help = "Examples:\n  mesh authz forget shop      the policies of a namespace\n  \
    mesh authz forget --mesh    those of the namespace of the mesh, for which all pods wait"
)]
pub(super) struct Arguments {
    /// Namespace whose policies are given up
    #[arg(required_unless_present = "mesh", conflicts_with = "mesh")]
    name: Option<String>,
    /// Give up the policies of the namespace of the mesh
    #[arg(long)]
    mesh: bool,
    #[command(flatten)]
    cluster: cluster::Arguments,
}

pub(super) async fn run(arguments: &Arguments) -> Result<Outcome> {
    let cluster = Cluster::connect(&arguments.cluster).await?;
    let mesh = &cluster.mesh_namespace;
    let name = arguments.name.as_ref().unwrap_or(mesh);
    let was_known = Marker::new(&cluster.client, mesh).forget(name).await?;
    ensure!(
        was_known,
        "ConfigMap {mesh}/{CONFIG_MAP} does not have the namespace {}: no pod waits for its policies",
        printable(name)
    );
    let text = "is forgotten: its pods become ready within seconds, and everyone may call them\n";
    terminal::print(&format!("namespace {} {text}", printable(name)))?;
    Ok(Outcome::Allowed)
}
