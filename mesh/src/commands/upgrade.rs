//! `mesh upgrade --check`: reports whether the mesh of a cluster can become the release of this
//! program. Changes nothing: the API server gets dry runs only.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use super::check::print;
use super::install::ValuesArguments;
use crate::terminal::Output;
use crate::{
    check::{facts::Facts, target},
    cluster::{self, Cluster},
    install::{self, values::NAMESPACE},
};

/// The arguments of `mesh upgrade`.
#[derive(Args, Debug)]
#[command(
    mut_arg("namespace", cluster::no_namespace),
    after_help = "To upgrade, apply the definitions, then the objects: mesh install --crds | kubectl apply -f -; mesh install | kubectl apply -f -\n\n\
    Exit codes: 0, the upgrade is safe (warnings are possible); 1, it is not, for the reasons that are printed; 2, an error, such as no connection to the cluster.\n\n\
    Examples:\n  mesh upgrade --check\n  mesh upgrade --check --values values.yaml --set image.tag=1.0"
)]
pub struct Arguments {
    /// Check the upgrade, and change nothing
    #[arg(long, required = true)]
    check: bool,
    #[command(flatten)]
    cluster: cluster::Arguments,
    #[command(flatten)]
    values: ValuesArguments,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// Runs the checks and prints the findings.
pub async fn run(arguments: &Arguments) -> Result<ExitCode> {
    let mut values = arguments.values.load()?;
    let mut cluster = arguments.cluster.clone();
    if values.namespace() == NAMESPACE {
        values.set_namespace(&cluster.mesh_namespace);
    } else {
        values.namespace().clone_into(&mut cluster.mesh_namespace);
    }
    let objects = install::objects(&values);
    let cluster = Cluster::connect(&cluster).await?;
    let (facts, target) = tokio::join!(
        Facts::gather(&cluster, None),
        target::Target::gather(&cluster, &objects)
    );
    print(&target::run(&facts, &target), arguments.output)
}
