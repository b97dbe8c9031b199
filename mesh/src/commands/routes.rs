//! `mesh routes`: lists the routes of Services with their parents, backends and conditions, or
//! prints what happens with the requests to a Service, as the controller or files say. Changes
//! nothing.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use diy_mesh_controller::explain::explain;
use diy_mesh_controller::object::{Key, Kind};
use diy_mesh_proto::mesh::v1::{GetRoutesResponse as Explanation, get_routes_response::Rule};
use futures::future::join_all;

use crate::terminal::{self, Cell, Colors, Output, TextStyle, plain};
use crate::{
    controller::{self, Controllers},
    files,
    routes::{Condition, Route},
};

/// The arguments of `mesh routes`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  mesh routes                       all routes with Services as parents\n  \
    mesh routes shop/web              what happens with the requests to one Service\n  \
    mesh routes -n shop               those of a namespace\n  \
    mesh routes shop/web --clients a  the same for clients in the namespace a\n  \
    mesh routes -o json | jq '.[] | select(any(.parents[].conditions[]; .status == false))'"
)]
pub struct Arguments {
    /// Services whose effective rules are printed [default: list all routes]
    #[arg(value_name = "[NAMESPACE/]NAME")]
    services: Vec<String>,
    /// Namespace of the clients of the Services [default: the namespace of the Service]
    #[arg(long, value_name = "NAMESPACE", requires = "services")]
    clients: Option<String>,
    #[command(flatten)]
    controller: controller::Arguments,
    /// File or folder with objects to read in place of a cluster, which have no conditions; repeatable
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["context", "controller"])]
    filename: Vec<PathBuf>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// Parses `NAMESPACE/NAME`.
fn service(text: &str) -> Result<Key> {
    match text.split('/').collect::<Vec<_>>()[..] {
        [namespace, name] if !namespace.is_empty() && !name.is_empty() => {
            Ok(Key::new(namespace, name))
        }
        _ => bail!("{text}: expected [NAMESPACE/]NAME of a Service"),
    }
}

/// Lists the routes, or explains the requests to Services.
pub async fn run(arguments: &Arguments) -> Result<()> {
    let output = arguments.output;
    if arguments.services.is_empty() {
        let routes = routes(arguments).await?;
        output.print(&routes, |colors| table(&routes, colors))
    } else {
        let explained = explanations(arguments).await?;
        output.print(&explained, |colors| {
            let texts = explained.iter().map(|one| explanation(one, colors));
            texts.collect::<Vec<_>>().join("\n")
        })
    }
}

async fn routes(arguments: &Arguments) -> Result<Vec<Route>> {
    let (files, controller) = (&arguments.filename, &arguments.controller);
    let only = controller.cluster.namespace.as_deref();
    let (flag, kinds) = ("names of Services", Vec::from_iter(Kind::routes()));
    let objects = files::read_or_list(files, flag, controller, [only], &kinds).await?;
    let mut routes: Vec<Route> = objects.iter().filter_map(Route::read).collect();
    routes.retain(|route| only.is_none_or(|only| *only == route.namespace));
    let key = |route: &Route| [&route.namespace, &route.name, &route.kind].map(String::clone);
    routes.sort_by_key(key);
    Ok(routes)
}

async fn explanations(arguments: &Arguments) -> Result<Vec<Explanation>> {
    let services = services(arguments).await?;
    if arguments.filename.is_empty() {
        return ask(arguments, &services).await;
    }
    let objects = files::read(&arguments.filename)?;
    let explained = services.iter().map(|service| {
        let clients = arguments.clients.as_deref().unwrap_or(&service.namespace);
        explain(&objects, service, clients).with_context(|| {
            format!("the files do not contain the Service {service}; add the file that does with --filename")
        })
    });
    explained.collect()
}

async fn services(arguments: &Arguments) -> Result<Vec<Key>> {
    let cluster = &arguments.controller.cluster;
    let names = arguments.services.iter();
    let names = join_all(names.map(|name| cluster.full_name(name))).await;
    names.iter().map(|name| service(name)).collect()
}

/// The explanations of the Services by a controller.
async fn ask(arguments: &Arguments, services: &[Key]) -> Result<Vec<Explanation>> {
    let controllers = Controllers::new(&arguments.controller).await?;
    let mut controller = controllers.connect().await?;
    let mut explained = Vec::new();
    for service in services {
        let clients = arguments.clients.as_deref().unwrap_or_default();
        explained.push(controller.routes(&service.to_string(), clients).await?);
    }
    Ok(explained)
}

/// The rules of each port in order, a row per backend, then policies and problems.
fn explanation(one: &Explanation, colors: Colors) -> String {
    let headings = ["PORT", "REQUESTS", "BACKEND", "WEIGHT", "FROM", "ALSO"];
    let mut rows = vec![terminal::headings(headings)];
    for port in &one.ports {
        let of_rules = port
            .rules
            .iter()
            .flat_map(|rule| rows_of_rule(port.port, rule));
        rows.extend(of_rules);
    }
    let mut text = format!("Service {}, clients in {}\n", one.service, one.clients);
    text.push_str(&colors.table(&rows));
    for policy in &one.policies {
        text.push_str(&format!("policy: {}\n", terminal::printable(policy)));
    }
    for problem in &one.problems {
        text.push_str(&format!("problem: {}\n", terminal::printable(problem)));
    }
    text
}

fn rows_of_rule(port: u32, rule: &Rule) -> Vec<Vec<Cell>> {
    let backends = rule.backends.iter().map(|backend| {
        let name = match &backend.service {
            Some(name) => plain(name),
            None => TextStyle::Error.cell("invalid"),
        };
        [name, plain(backend.weight.to_string())]
    });
    let mut backends: Vec<[Cell; 2]> = backends.collect();
    if backends.is_empty() {
        backends.push([TextStyle::Dim.cell("none"), plain("")]);
    }
    let rows = backends.into_iter().enumerate().map(|(index, backend)| {
        let first = |text: String| plain(if index == 0 { text } else { String::new() });
        let [name, weight] = backend;
        vec![
            first(port.to_string()),
            first(rule.requests.clone()),
            name,
            weight,
            first(rule.from.clone().unwrap_or_else(|| "-".to_owned())),
            first(rule.actions.join(", ")),
        ]
    });
    rows.collect()
}

fn table(routes: &[Route], colors: Colors) -> String {
    let headings = [
        "ROUTE", "PARENT", "ACCEPTED", "RESOLVED", "RULE", "BACKEND", "WEIGHT",
    ];
    let mut rows = vec![terminal::headings(headings)];
    rows.extend(routes.iter().flat_map(rows_of));
    let mut text = colors.table(&rows);
    for route in routes {
        let parents = route.parents.iter();
        let problems = parents.flat_map(|parent| parent.problems().map(move |one| (parent, one)));
        for (parent, one) in problems {
            let line = format!(
                "{}, parent {}: {} is {}, {}: {}",
                route.title(),
                parent.title(),
                one.kind,
                one.status(),
                one.reason,
                one.message
            );
            text.push_str(&format!("problem: {}\n", terminal::printable(&line)));
        }
    }
    text
}

/// One row per parent or backend, whichever are more.
fn rows_of(route: &Route) -> Vec<Vec<Cell>> {
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
            let weight = plain(backend.weight.to_string());
            [rule(), plain(&backend.target), weight]
        });
        backends.extend(cells);
        if of_rule.is_empty() {
            backends.push([rule(), TextStyle::Dim.cell("none"), plain("")]);
        }
    }
    let number = parents.len().max(backends.len());
    let rows = (0..number).map(|index| {
        let title = match index {
            0 => TextStyle::Bold.cell(route.title()),
            _ => plain(""),
        };
        let parent = parents.get(index).cloned();
        let backend = backends.get(index).cloned();
        let none = || [(); 3].map(|()| plain(""));
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
            testing::condition(
                "diy-service-mesh.dev/AppliesToAllPods",
                "False",
                "OlderService",
            ),
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
problem: HTTPRoute shop/canary, parent shop/web:80: diy-service-mesh.dev/AppliesToAllPods is False, OlderService: what to do
";
        assert_eq!(table(&[one, other], Colors::DISABLED), expected);
    }

    #[test]
    fn explains_the_rules_of_a_service_in_their_order() {
        let files = ["canary.yaml"].map(|name| {
            let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
            folder.join("../docs/tutorial").join(name)
        });
        let mut objects = files::read(&files).unwrap();
        objects.push(json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"name": "http-server", "namespace": "http-server"},
            "spec": {"clusterIP": "10.0.0.1", "ports": [{"port": 80}]}}));
        let key = service("http-server/http-server").unwrap();
        let one = explain(&objects, &key, "shop").unwrap();
        let expected = "\
Service http-server/http-server, clients in shop
PORT  REQUESTS             BACKEND                        WEIGHT  FROM                               ALSO
80    header x-canary=yes  http-server/http-server-v2:80  1       HTTPRoute http-server/http-server
80    all                  http-server/http-server-v1:80  90      HTTPRoute http-server/http-server
                           http-server/http-server-v2:80  10
";
        assert_eq!(explanation(&one, Colors::DISABLED), expected);
        for text in ["shop", "/", "a/b/c", "a/"] {
            assert!(service(text).is_err(), "{text}");
        }
    }

    #[test]
    fn json_has_services_conditions_and_backends() {
        let conditions = json!([testing::condition("Accepted", "True", "Accepted")]);
        let value = json!(Route::read(&route(conditions)).unwrap());
        assert_eq!(value["parents"][0]["service"], "shop/web");
        assert_eq!(value["parents"][0]["conditions"][0]["status"], true);
        assert_eq!(value["rules"][0]["backends"][1]["weight"], 10);
    }
}
