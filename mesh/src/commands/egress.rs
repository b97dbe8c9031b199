//! `mesh egress`: lists what pods call outside of the cluster, and writes policies that allow it and
//! bound it. Changes nothing.

mod policy;

use std::{collections::BTreeSet, path::PathBuf};

use anyhow::Result;
use clap::Args;
use diy_mesh_controller::object::Kind;
use kube::api::ListParams;
use serde_json::Value;

use super::authz::generate::Mode;
use crate::terminal::{self, Cell, Colors, Output, TextStyle, plain, printable};
use crate::{
    authorization::Outcome,
    cluster::{self, Cluster},
    controller,
    edges::Observed,
    egress::{self, Report, boundary::boundary},
    files,
    pods::Pod,
    yaml,
};

/// The arguments of `mesh egress`.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit codes: 0 success; 2 error, also if no policy closes pods of the namespace; 3 pods of a policy get \
    no NetworkPolicy.\n\n\
    Examples:\n  mesh egress -n shop                    what the pods of a namespace called in the last 7 days\n  \
    mesh egress -n shop --policy           policies under audit that allow exactly that\n  \
    mesh egress -n shop --network-policy   NetworkPolicies for what enforced policies close\n  \
    mesh egress -o json | jq '.groups[] | select(.incomplete)'"
)]
pub struct Arguments {
    /// Print AuthorizationPolicies that allow what was seen
    #[arg(long, conflicts_with_all = ["network_policy", "output"])]
    policy: bool,
    /// Mode of the AuthorizationPolicies [default: audit]
    #[arg(long, value_enum, requires = "policy")]
    mode: Option<Mode>,
    /// Print NetworkPolicies for the pods of the namespace that enforced AuthorizationPolicies with the
    /// direction Outbound close
    #[arg(long, requires = "namespace", conflicts_with = "output")]
    network_policy: bool,
    /// File or folder with AuthorizationPolicies and Services, in place of the objects of the
    /// cluster; repeatable
    #[arg(short, long, value_name = "FILE", requires = "network_policy")]
    filename: Vec<PathBuf>,
    /// File with the calls, the JSON of GetEdgesResponse, in place of a controller
    #[arg(long, value_name = "FILE", conflicts_with = "network_policy")]
    edges: Option<PathBuf>,
    #[command(flatten)]
    controller: controller::Arguments,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// Lists calls, or prints policies.
pub async fn run(arguments: &Arguments) -> Result<Outcome> {
    let of = arguments.controller.cluster.namespace.as_deref();
    let of = of.unwrap_or_default();
    if arguments.network_policy {
        bound(arguments, of).await
    } else {
        list(arguments).await
    }
}

async fn list(arguments: &Arguments) -> Result<Outcome> {
    let (observed, unwatched) = read(&arguments.controller, arguments.edges.as_ref()).await?;
    let mut notes = Vec::new();
    if arguments.policy {
        let mode = arguments.mode.unwrap_or_default();
        let policies = policy::policies(&observed, mode, &mut notes);
        terminal::print(&yaml::write(&policies))?;
        let unwatched = unwatched.iter();
        notes.extend(unwatched.map(|pods| format!("{pods}: no proxy has reported, and no policy")));
    } else {
        let report = egress::report(&observed, unwatched);
        let output = arguments.output;
        output.print(&report, |colors| text(&report, colors))?;
    }
    files::print(&notes);
    Ok(Outcome::Allowed)
}

/// The calls, and the pods of the cluster without a report of a proxy.
pub(super) async fn read(
    controller: &controller::Arguments,
    edges: Option<&PathBuf>,
) -> Result<(Observed, BTreeSet<String>)> {
    let of = controller.cluster.namespace.as_deref().unwrap_or_default();
    let mut observed = Observed::read(controller, edges, of).await?;
    let is_wanted = |namespace: &str| of.is_empty() || namespace == of;
    observed.groups.retain(|group| is_wanted(&group.namespace));
    if edges.is_some() || !controller.access.controller.is_empty() {
        return Ok((observed, BTreeSet::new()));
    }
    let client = Cluster::connect(&controller.cluster).await?.client;
    let pods = cluster::objects::<Pod>(&client, controller.cluster.namespace.as_deref());
    let pods = match cluster::list(pods, &ListParams::default()).await {
        Ok(pods) => pods,
        Err(error) => {
            files::print(&[format!(
                "failed to list pods, so those without a proxy are not known: {error}"
            )]);
            vec![]
        }
    };
    let unwatched = egress::unwatched(&pods, &observed.groups, of);
    Ok((observed, unwatched))
}

fn text(report: &Report, colors: Colors) -> String {
    if report.groups.is_empty() && report.unwatched.is_empty() {
        return "no proxy of these pods has reported in the last 7 days\n".to_owned();
    }
    let headings = ["PODS", "SINCE", "DESTINATION", "PORT", "LAST DAY"];
    let mut rows = vec![terminal::headings(headings)];
    for group in &report.groups {
        let since = group.since.as_deref().unwrap_or("-");
        let details: Vec<Vec<_>> = group
            .destinations
            .iter()
            .map(|one| {
                let port = one.port.to_string();
                [&one.host, &port, &one.last_day].map(plain).to_vec()
            })
            .collect();
        rows.append(&mut of_group(&group.pods, since, group.incomplete, details));
    }
    rows.extend(report.unwatched.iter().map(not_watched));
    colors.table(&rows)
}

/// The rows of a group of pods.
pub(super) fn of_group(
    pods: &str,
    since: &str,
    incomplete: bool,
    mut details: Vec<Vec<Cell>>,
) -> Vec<Vec<Cell>> {
    if incomplete {
        let text = "others: there were more calls than are kept";
        details.push(vec![TextStyle::Warning.cell(text)]);
    }
    if details.is_empty() {
        details.push(vec![TextStyle::Dim.cell("none")]);
    }
    terminal::headed([TextStyle::Bold.cell(pods), plain(since)], details)
}

/// The row of pods without a report of a proxy.
pub(super) fn not_watched(pods: &String) -> Vec<Cell> {
    let state = TextStyle::Warning.cell("not watched: no proxy has reported");
    vec![TextStyle::Bold.cell(pods), plain("-"), state]
}

async fn bound(arguments: &Arguments, of: &str) -> Result<Outcome> {
    let objects = objects(arguments, of).await?;
    let mesh = &arguments.controller.cluster.mesh_namespace;
    let boundary = boundary(&objects, of, mesh)?;
    let mut text = format!(
        "# The boundary of the namespace {}: in the cluster TCP, and UDP to port 53; outside what\n\
         # AuthorizationPolicies allow. It does not express:\n\
         # - nodes, and pods in the network of their node: the API server and node-local DNS require\n\
         #   an ipBlock\n",
        printable(of)
    );
    for gap in boundary.gaps.iter().chain(&boundary.missing) {
        text += &format!("# - {}\n", printable(gap));
    }
    terminal::print(&(text + &yaml::write(&boundary.policies)))?;
    let gaps = boundary.gaps.iter();
    let gaps = gaps.map(|gap| format!("NetworkPolicies do not express {gap}"));
    files::print(&gaps.collect::<Vec<_>>());
    files::print(&boundary.missing);
    Ok(if boundary.missing.is_empty() {
        Outcome::Allowed
    } else {
        Outcome::Unknown
    })
}

/// The policies.
async fn objects(arguments: &Arguments, of: &str) -> Result<Vec<Value>> {
    let (files, controller) = (&arguments.filename, &arguments.controller);
    let namespaces = [of, &controller.cluster.mesh_namespace].map(Some);
    let namespaces = BTreeSet::from(namespaces);
    let kinds = [Kind::Authorization];
    files::read_or_list(files, "--filename", controller, namespaces, &kinds).await
}

#[cfg(test)]
mod tests {
    use std::process::ExitCode;

    use serde_json::json;

    use super::*;
    use crate::commands::{block_on, code};
    use crate::egress::testing::observed;

    fn parsed(line: &str) -> Result<Arguments, clap::Error> {
        crate::commands::parsed(line)
    }

    const CALLS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/tutorial/calls.json");

    #[test]
    fn arguments_are_checked() {
        for line in [
            "egress --network-policy",
            "egress -n shop --policy --network-policy",
            "egress -n shop --policy -o json",
            "egress -n shop --mode enforce",
            "egress -n shop -f policies.yaml",
            "egress -n shop --network-policy --edges calls.json",
        ] {
            assert!(parsed(line).is_err(), "{line}");
        }
        let arguments = parsed("egress -n shop --network-policy -f a -f b").unwrap();
        assert_eq!(
            (
                arguments.controller.cluster.namespace.as_deref(),
                arguments.filename.len()
            ),
            (Some("shop"), 2)
        );
    }

    #[test]
    fn calls_to_pods_are_no_destinations() {
        let arguments = parsed(&format!("egress -n http-server --edges {CALLS}")).unwrap();
        let read = read(&arguments.controller, arguments.edges.as_ref());
        let (observed, _) = block_on(read).unwrap();
        let [group] = &observed.groups[..] else {
            panic!("{:?}", observed.groups)
        };
        let destinations = egress::destinations(group);
        assert_eq!((group.edges.len(), destinations.len()), (2, 1));
        assert_eq!(destinations[0].host, "api.example.com");
        assert_eq!(code(run(&arguments)), ExitCode::SUCCESS);
    }

    #[test]
    fn table_lists_destinations_by_pods_and_what_is_not_known() {
        let mut observed = observed(&["api.example.com:443", "[2001:db8::7]:80"]);
        let mut group = observed.groups[0].clone();
        group.edges.clear();
        group.labels.clear();
        observed.groups.push(group.clone());
        (group.service_account, group.incomplete) = (String::new(), true);
        observed.groups.push(group);
        let unwatched = BTreeSet::from(["shop/db".to_owned()]);
        let report = egress::report(&observed, unwatched);
        let expected = "\
PODS                SINCE                 DESTINATION                                  PORT  LAST DAY
shop/cart app=cart  1970-01-09T00:00:00Z  2001:db8::7                                  80    1970-01-10
                                          api.example.com                              443   1970-01-10
shop/cart           1970-01-09T00:00:00Z  none
shop, other pods    -                     others: there were more calls than are kept
shop/db             -                     not watched: no proxy has reported
";
        assert_eq!(text(&report, Colors::DISABLED), expected);
        let report = json!(report);
        assert_eq!(report["groups"][0]["destinations"][1]["port"], 443);
        assert_eq!(report["groups"][2]["since"], Value::Null);
        let nothing = egress::report(&self::observed_nothing(), BTreeSet::new());
        let expected = "no proxy of these pods has reported in the last 7 days\n";
        assert_eq!(text(&nothing, Colors::DISABLED), expected);
    }

    fn observed_nothing() -> Observed {
        let mut observed = observed(&[]);
        observed.groups.clear();
        observed
    }

    #[test]
    fn files_without_a_policy_about_egress_are_an_error() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/tutorial");
        let line = format!("egress -n shop --network-policy -f {folder}/authorization.yaml");
        assert_eq!(code(run(&parsed(&line).unwrap())), ExitCode::from(2));
    }
}
