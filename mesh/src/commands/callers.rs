//! `mesh callers`: lists the callers of pods and their calls, as proxies saw them. Changes nothing.

use std::{collections::BTreeSet, path::PathBuf};

use anyhow::Result;
use clap::Args;
use diy_mesh_proto::authorization::edge::connection;
use diy_mesh_proto::mesh::v1::get_edges_response::Group;
use serde::Serialize;

use super::egress::{not_watched, of_group, read};
use crate::terminal::{self, Colors, Output, plain};
use crate::{
    authorization::Outcome,
    controller,
    edges::{self, Observed},
    egress,
};

/// The arguments of `mesh callers`.
#[derive(Args, Debug)]
#[command(after_help = "Exit codes: 0 success; 2 error.\n\n\
    Examples:\n  mesh callers -n shop                        the callers of the pods of a namespace in the last 7 days\n  \
    mesh callers -o json | jq '.groups[].calls[] | select(.caller | startswith(\"unauthenticated\"))'")]
pub struct Arguments {
    /// File with the calls, the JSON of GetEdgesResponse, in place of a controller
    #[arg(long, value_name = "FILE")]
    edges: Option<PathBuf>,
    #[command(flatten)]
    controller: controller::Arguments,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// The calls to all pods.
#[derive(Debug, Serialize)]
struct Report {
    /// By the pods whose proxies have reported.
    groups: Vec<Called>,
    /// The pods without a report of a proxy in the last 7 days.
    unwatched: BTreeSet<String>,
}

/// The calls to a group of pods.
#[derive(Debug, Serialize)]
struct Called {
    /// The pods.
    pods: String,
    /// The start of the observation. `None`: the group stands for others that were cut.
    since: Option<String>,
    /// Whether other calls were cut.
    incomplete: bool,
    /// The kinds of calls.
    calls: Vec<Calls>,
}

/// Calls that are alike.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct Calls {
    /// The service account, or `unauthenticated`, with a block of addresses of opaque traffic.
    caller: String,
    /// The port of the pods.
    port: u32,
    /// The method and the path, or `connections`; those without a byte of the client are no calls.
    call: String,
    /// The last day of UTC on which there were such calls.
    last_day: String,
}

/// Lists the calls.
pub async fn run(arguments: &Arguments) -> Result<Outcome> {
    let (observed, unwatched) = read(&arguments.controller, arguments.edges.as_ref()).await?;
    let report = report(&observed, unwatched);
    let output = arguments.output;
    output.print(&report, |colors| text(&report, colors))?;
    Ok(Outcome::Allowed)
}

fn report(observed: &Observed, unwatched: BTreeSet<String>) -> Report {
    let called = |group: &Group| Called {
        pods: edges::title(group),
        since: egress::since(group),
        incomplete: group.incomplete,
        calls: calls(group),
    };
    Report {
        groups: observed.groups.iter().map(called).collect(),
        unwatched,
    }
}

fn calls(group: &Group) -> Vec<Calls> {
    let calls = group.edges.iter().filter_map(|seen| {
        let edge = seen.edge.as_ref()?;
        let silent = edge.silent.as_ref().map(connection);
        let call = match &silent {
            Some(_) => "connections without a byte".to_owned(),
            None => edges::what(edge),
        };
        let edge = silent.as_ref().unwrap_or(edge);
        edge.destination.is_empty().then(|| Calls {
            caller: edges::caller(edge),
            port: edge.port,
            call,
            last_day: egress::last_day(seen),
        })
    });
    // In their order.
    BTreeSet::from_iter(calls).into_iter().collect()
}

fn text(report: &Report, colors: Colors) -> String {
    if report.groups.is_empty() && report.unwatched.is_empty() {
        return "no proxy of these pods has reported in the last 7 days\n".to_owned();
    }
    let headings = ["PODS", "SINCE", "CALLER", "PORT", "CALLS", "LAST DAY"];
    let mut rows = vec![terminal::headings(headings)];
    for group in &report.groups {
        let details = group.calls.iter().map(|one| {
            let port = one.port.to_string();
            [&one.caller, &port, &one.call, &one.last_day]
                .map(plain)
                .to_vec()
        });
        let since = group.since.as_deref().unwrap_or("-");
        let rows_of_group = of_group(&group.pods, since, group.incomplete, details.collect());
        rows.extend(rows_of_group);
    }
    rows.extend(report.unwatched.iter().map(not_watched));
    colors.table(&rows)
}

#[cfg(test)]
mod tests {
    use std::process::ExitCode;

    use diy_mesh_model::identity::TRUST_DOMAIN;
    use diy_mesh_proto::mesh::v1::{Edge, SilentConnection};

    use super::*;
    use crate::commands::{code, parsed};
    use crate::plan::tests::{edge, group, segment};

    #[test]
    fn table_lists_calls_by_pods_and_callers() {
        let outside = Edge {
            destination: "api.example.com:443".to_owned(),
            ..Edge::default()
        };
        let scan = Edge {
            block: "192.0.2.0/24".to_owned(),
            ..edge("", 9090, "", None)
        };
        let silent = Edge {
            silent: Some(SilentConnection {
                port: 9090,
                block: scan.block.clone(),
                ..SilentConnection::default()
            }),
            ..Edge::default()
        };
        let edges = vec![
            silent,
            edge("web", 8080, "GET", segment("/items")),
            outside,
            scan,
            edge("api", 8080, "POST", None),
        ];
        let observed = Observed {
            groups: vec![group(edges), group(vec![])],
            trust_domain: TRUST_DOMAIN.to_owned(),
        };
        let unwatched = BTreeSet::from(["shop/db".to_owned()]);
        let expected = "\
PODS                SINCE                 CALLER                              PORT  CALLS                       LAST DAY
shop/cart app=cart  1970-01-09T00:00:00Z  shop/api                            8080  POST (path not recorded)    1970-01-10
                                          shop/web                            8080  GET /items/...              1970-01-10
                                          unauthenticated 192.0.2.0/24        9090  connections                 1970-01-10
                                          unauthenticated 192.0.2.0/24        9090  connections without a byte  1970-01-10
shop/cart app=cart  1970-01-09T00:00:00Z  none
shop/db             -                     not watched: no proxy has reported
";
        let report = report(&observed, unwatched);
        assert_eq!(text(&report, Colors::DISABLED), expected);
    }

    #[test]
    fn calls_of_a_file_are_listed() {
        let calls = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/tutorial/calls.json");
        let line = format!("callers -n http-server --edges {calls}");
        assert_eq!(code(run(&parsed(&line).unwrap())), ExitCode::SUCCESS);
    }
}
