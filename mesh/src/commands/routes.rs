//! `mesh routes`: lists the routes of Services with their parents, backends and conditions, from
//! a cluster or from files. Changes nothing.

use std::{fs, io, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result, anyhow};
use clap::Args;
use serde_json::Value;

use super::terminal::{self, Colors, Output, TextStyle};
use crate::{
    cluster::{self, Cluster},
    routes::{self, Condition, Parent, Route},
    sandbox::manifest,
};

/// The arguments of `mesh routes`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  mesh routes                       all routes with Services as parents\n  \
    mesh routes shop/web              those of one Service\n  \
    mesh routes -o json | jq '.[] | select(any(.parents[].conditions[]; .status == false))'"
)]
pub struct Arguments {
    /// Services whose routes are listed [default: all]
    #[arg(value_name = "NAMESPACE/NAME")]
    services: Vec<String>,
    /// Context of the kubeconfig [default: the current context]
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// Namespace of the routes [default: all]
    #[arg(short, long, value_name = "NAME")]
    namespace: Option<String>,
    /// File with routes to list in place of a cluster, which have no conditions; repeatable
    #[arg(short, long, value_name = "FILE", conflicts_with = "context")]
    filename: Vec<PathBuf>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// Lists the routes.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let mut routes = match arguments.filename.is_empty() {
        true => super::block_on(from_cluster(arguments))??,
        false => from_files(arguments)?,
    };
    let is_selected = |parent: &Parent| {
        arguments.services.is_empty() || arguments.services.contains(&parent.service)
    };
    routes.retain(|route| route.parents.iter().any(is_selected));
    routes.sort_by_key(|route| {
        (
            route.namespace.clone(),
            route.name.clone(),
            route.kind.clone(),
        )
    });
    terminal::print(&match arguments.output {
        Output::Json => format!("{:#}\n", routes.iter().map(Route::json).collect::<Value>()),
        Output::Text => table(&routes, Colors::of(&io::stdout())),
    })?;
    Ok(ExitCode::SUCCESS)
}

async fn from_cluster(arguments: &Arguments) -> Result<Vec<Route>> {
    let cluster = Cluster::connect(&cluster::Arguments {
        context: arguments.context.clone(),
        // Not needed: routes are in all namespaces.
        namespace: String::new(),
    })
    .await?;
    let routes = routes::fetch(&cluster.client, arguments.namespace.as_deref()).await;
    routes.map_err(|error| anyhow!("failed to list routes: {error}"))
}

fn from_files(arguments: &Arguments) -> Result<Vec<Route>> {
    let mut routes = Vec::new();
    for path in &arguments.filename {
        let text = fs::read_to_string(path);
        let text = text.with_context(|| format!("failed to read {}", path.display()))?;
        let objects = manifest::parse(&text);
        let objects = objects.with_context(|| format!("failed to parse {}", path.display()))?;
        routes.extend(objects.iter().filter_map(Route::read));
    }
    let namespace = arguments.namespace.as_ref();
    routes.retain(|route| namespace.is_none_or(|namespace| *namespace == route.namespace));
    Ok(routes)
}

type Cell = (TextStyle, String);

fn table(routes: &[Route], colors: Colors) -> String {
    let headings = [
        "ROUTE", "PARENT", "ACCEPTED", "RESOLVED", "RULE", "BACKEND", "WEIGHT",
    ];
    let bold = |text: &str| (TextStyle::Bold, text.to_owned());
    let mut rows = vec![headings.map(bold).to_vec()];
    rows.extend(routes.iter().flat_map(rows_of));
    colors.table(&rows)
}

/// One row per parent or backend, whichever are more.
fn rows_of(route: &Route) -> Vec<Vec<Cell>> {
    let plain = |text: String| (TextStyle::Ok, text);
    let empty = || plain(String::new());
    let parents = route.parents.iter().map(|parent| {
        let condition = |kind| condition(parent.condition(kind));
        [
            plain(parent.title()),
            condition("Accepted"),
            condition("ResolvedRefs"),
        ]
    });
    let parents: Vec<[Cell; 3]> = parents.collect();
    let mut backends = Vec::new();
    for (rule, of_rule) in route.rules.iter().enumerate() {
        let rule = || plain((rule + 1).to_string());
        let cells = of_rule.iter().map(|backend| {
            [
                rule(),
                plain(backend.target.clone()),
                plain(backend.weight.to_string()),
            ]
        });
        backends.extend(cells);
        if of_rule.is_empty() {
            backends.push([rule(), (TextStyle::Dim, "none".into()), empty()]);
        }
    }
    let number = parents.len().max(backends.len());
    let rows = (0..number).map(|index| {
        let title = match index {
            0 => (TextStyle::Bold, route.title()),
            _ => empty(),
        };
        let parent = parents.get(index).cloned();
        let backend = backends.get(index).cloned();
        let none = || [(); 3].map(|()| empty());
        let mut row = vec![title];
        row.extend(parent.unwrap_or_else(none));
        row.extend(backend.unwrap_or_else(none));
        row
    });
    rows.collect()
}

fn condition(condition: Option<&Condition>) -> Cell {
    match condition {
        None => (TextStyle::Warning, "-".into()),
        Some(condition) if condition.holds => (TextStyle::Ok, "True".into()),
        Some(condition) => (TextStyle::Error, format!("False: {}", condition.reason)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::routes::testing::{self, route};

    #[test]
    fn table_lists_parents_conditions_backends_and_weights() {
        let conditions = json!([
            testing::condition("Accepted", "True", "Accepted"),
            testing::condition("ResolvedRefs", "False", "InvalidKind"),
        ]);
        let one = Route::read(&route(conditions)).unwrap();
        let mut other = one.clone();
        (other.name, other.rules) = ("plain".into(), vec![vec![]]);
        other.parents[0].conditions.clear();
        let expected = "\
ROUTE                  PARENT       ACCEPTED  RESOLVED            RULE  BACKEND            WEIGHT
HTTPRoute shop/canary  shop/web:80  True      False: InvalidKind  1     shop/web-v1:80     90
                                                                  1     shop/web-v2:80     10
                                                                  2     Bucket data/files  1
HTTPRoute shop/plain   shop/web:80  -         -                   1     none
";
        assert_eq!(table(&[one, other], Colors::DISABLED), expected);
    }

    #[test]
    fn json_has_services_conditions_and_backends() {
        let conditions = json!([testing::condition("Accepted", "True", "Accepted")]);
        let value = Route::read(&route(conditions)).unwrap().json();
        assert_eq!(value["parents"][0]["service"], "shop/web");
        assert_eq!(value["parents"][0]["conditions"][0]["status"], true);
        assert_eq!(value["rules"][0]["backends"][1]["weight"], 10);
    }
}
