//! `mesh install`: prints the objects of the mesh. Reads no cluster, so that the same values always
//! give the same bytes.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use clap::Args;

use crate::terminal;
use crate::{
    install::{self, SCHEMA, Values},
    yaml,
};

/// The arguments of `mesh install`.
#[derive(Args, Debug)]
#[command(
    after_help = "The output contains no secrets: controller and injector generate their keys and certificates.\n\n\
    Examples:\n  mesh install --crds | kubectl apply -f -      the definitions of policies (optional)\n  \
    mesh install | kubectl apply -f -\n  \
    mesh install --set image.registry=registry.example.com/mesh --set image.tag=1.0 >mesh.yaml\n  \
    mesh check --wait                             until the mesh works"
)]
pub struct Arguments {
    #[command(flatten)]
    values: ValuesArguments,
    /// Print the CustomResourceDefinitions instead
    #[arg(long, conflicts_with = "schema")]
    crds: bool,
    /// Print the JSON schema of the values instead
    #[arg(long)]
    schema: bool,
}

/// The values of an installation.
#[derive(Args, Clone, Debug, Default)]
#[group(skip)]
pub struct ValuesArguments {
    /// YAML file with values that differ from the defaults; repeatable, later files win
    #[arg(long, value_name = "FILE")]
    values: Vec<PathBuf>,
    /// A value, such as controller.replicas=3, which wins over files; null removes an optional value;
    /// repeatable
    #[arg(long, value_name = "PATH=VALUE")]
    set: Vec<String>,
}

impl ValuesArguments {
    /// Reads the files and checks the values.
    pub fn load(&self) -> Result<Values> {
        let read = |path: &PathBuf| {
            let name = path.display().to_string();
            let text = fs::read_to_string(path);
            let text = text.with_context(|| format!("cannot read the values in {name}"))?;
            Ok((name, text))
        };
        let files = self.values.iter().map(read).collect::<Result<Vec<_>>>()?;
        Values::load(&files, &self.set)
    }
}

/// Prints the objects.
pub fn run(arguments: &Arguments) -> Result<()> {
    let values = arguments.values.load()?;
    terminal::print(&match arguments {
        Arguments { schema: true, .. } => SCHEMA.to_owned(),
        Arguments { crds: true, .. } => yaml::write(&install::definitions()),
        _ => yaml::write(&install::objects(&values)),
    })
}
