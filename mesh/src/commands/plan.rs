//! `mesh plan`: tells what a policy, or strict mode, would have denied of the calls that proxies saw.
//! Changes nothing.

use std::{
    path::PathBuf,
    process::{ExitCode, Termination as _},
    time::Duration,
};

use anyhow::Result;
use clap::Args;
use diy_mesh_controller::explain;
use diy_mesh_controller::object::Kind;
use diy_mesh_proto::mesh::v1::get_edges_response::Group;
use serde_json::Value;

use super::authz;
use crate::terminal::{self, Colors, Output, TextStyle, plain};
use crate::{
    authorization::Outcome,
    controller,
    edges::Observed,
    files,
    plan::{self, Plan},
    time::{format_duration, now, parse_duration},
};

/// The arguments of `mesh plan`.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit codes: 0 nothing that was seen would be denied, 1 something would be, 2 error, \
    3 it depends on what was not recorded, or on an authorization server, 4 too little was seen: no pods of a policy, or not for long enough.\n\n\
    Examples:\n  mesh plan -f policy.yaml           what new or changed policies would have denied\n  \
    mesh plan -f policy.yaml -n shop   the same for the pods of one namespace only\n  \
    mesh plan --strict shop            the same for strict pods in the namespace shop\n  \
    mesh plan -f policy.yaml -o json | jq '.effects[] | select(.verdict == \"denied\")'"
)]
pub struct Arguments {
    /// File or folder with new or changed AuthorizationPolicies and Services; those under audit are
    /// judged as if they were enforced; repeatable
    #[arg(short, long, value_name = "FILE", required_unless_present = "strict")]
    filename: Vec<PathBuf>,
    /// Namespace whose pods become strict, or NAMESPACE/SERVICE-ACCOUNT; repeatable
    #[arg(long, value_name = "NAMESPACE")]
    strict: Vec<String>,
    /// File or folder with the present AuthorizationPolicies and Services, in place of the objects
    /// of the cluster; repeatable
    #[arg(long, value_name = "FILE")]
    current: Vec<PathBuf>,
    /// File with the calls, the JSON of GetEdgesResponse, in place of a controller
    #[arg(long, value_name = "FILE", requires = "current")]
    edges: Option<PathBuf>,
    /// Time for which all pods have to have been watched
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = parse_duration)]
    min_watch: Duration,
    #[command(flatten)]
    controller: controller::Arguments,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// Compares and prints.
pub async fn run(arguments: &Arguments) -> Result<ExitCode> {
    let (mut observed, mut objects) = read(arguments).await?;
    let changed = changed(arguments)?;
    let mesh = &*arguments.controller.cluster.mesh_namespace;
    let namespaces = namespaces(arguments, &changed);
    let is_concerned = |name: &str| namespaces.contains(&mesh) || namespaces.contains(&name);
    observed
        .groups
        .retain(|group| is_concerned(&group.namespace));
    let only = arguments.controller.cluster.namespace.as_deref();
    if let Some(only) = only {
        observed.groups.retain(|group| group.namespace == only);
    }
    let index = |objects: &[Value]| explain::index(objects, mesh, &observed.trust_domain);
    let (mut before, _) = index(&objects);
    objects.extend(changed.iter().cloned());
    let (mut after, mut problems) = index(&objects);
    problems.extend(explain::problems_of_authorization(&after));
    files::print(&problems);
    let is_strict = |group: &Group| {
        let account = format!("{}/{}", group.namespace, group.service_account);
        let mut strict = arguments.strict.iter();
        strict.any(|name| [&group.namespace, &account].contains(&name))
    };
    let mut plan = plan::plan(&observed, [&mut before, &mut after], is_strict, now());
    let policies = policies(&changed, only, mesh);
    let min_watch = arguments.min_watch.as_secs();
    plan.add_unseen(policies, arguments.strict.iter(), min_watch);
    let output = arguments.output;
    output.print(&plan, |colors| text(&plan, colors))?;
    Ok(match plan.outcome() {
        Outcome::Allowed if !plan.unseen.is_empty() => ExitCode::from(4),
        outcome => outcome.report(),
    })
}

/// The names of new and changed policies of a namespace, and of the mesh, or of all.
fn policies<'a>(
    changed: &'a [Value],
    only: Option<&'a str>,
    mesh: &'a str,
) -> impl Iterator<Item = String> {
    changed.iter().filter_map(move |object| {
        let namespace = files::namespace(object);
        let is_concerned = only.is_none_or(|only| [only, mesh].contains(&namespace));
        let is_policy = object["kind"] == Kind::Authorization.name();
        let name = object["metadata"]["name"].as_str()?;
        (is_policy && is_concerned).then(|| format!("AuthorizationPolicy {namespace}/{name}"))
    })
}

/// The namespaces that the change is about.
fn namespaces<'a>(arguments: &'a Arguments, changed: &'a [Value]) -> Vec<&'a str> {
    let strict = arguments.strict.iter();
    let strict = strict.filter_map(|name| name.split('/').next());
    strict.chain(changed.iter().map(files::namespace)).collect()
}

/// The calls, and the objects that are in force.
async fn read(arguments: &Arguments) -> Result<(Observed, Vec<Value>)> {
    let (controller, files) = (&arguments.controller, &arguments.current);
    let (only, mesh) = (
        controller.cluster.namespace.as_deref(),
        &*controller.cluster.mesh_namespace,
    );
    let edges = arguments.edges.as_ref();
    let observed = Observed::read(controller, edges, only.unwrap_or_default()).await?;
    let kinds = [Kind::Service, Kind::Authorization];
    let mut objects = files::read_or_list(files, "--current", controller, [only], &kinds).await?;
    // The policies of the mesh are about the pods of all namespaces.
    if files.is_empty() && only.is_some_and(|only| only != mesh) {
        let kinds = &kinds[1..];
        let of_mesh = files::read_or_list(&[], "--current", controller, [Some(mesh)], kinds);
        objects.extend(of_mesh.await?);
    }
    Ok((observed, objects))
}

/// The objects of the files, with policies that are enforced.
fn changed(arguments: &Arguments) -> Result<Vec<Value>> {
    let mut objects = files::read(&arguments.filename)?;
    for object in &mut objects {
        if object["kind"] == Kind::Authorization.name()
            && let Some(spec) = object["spec"].as_object_mut()
        {
            spec.remove("mode");
        }
    }
    Ok(objects)
}

fn text(plan: &Plan, colors: Colors) -> String {
    let mut rows = vec![terminal::headings([
        "VERDICT", "PODS", "PORT", "CALLS", "REASON",
    ])];
    rows.extend(plan.effects.iter().map(|effect| {
        let port = effect.port.to_string();
        let [pods, port, call, reason] =
            [&effect.pods, &port, &effect.call, &effect.verdict.reason].map(plain);
        let outcome = authz::outcome(effect.verdict.verdict);
        vec![outcome, pods, port, call, reason]
    }));
    rows.extend(plan.closed.iter().map(|closed| {
        let port = closed.port.map_or("-".to_owned(), |port| port.to_string());
        let (calls, reason) = match closed.port {
            Some(_) => ("all", " has no rule for the port"),
            None => (
                "all to outside of the cluster",
                ": rules have to allow them",
            ),
        };
        let reason = plain(format!("{}{reason}", closed.policy));
        let verdict = TextStyle::Warning.cell("closed");
        vec![
            verdict,
            plain(&closed.pods),
            plain(port),
            plain(calls),
            reason,
        ]
    }));
    rows.extend(plan.incomplete.iter().map(|pods| {
        let [port, calls] = ["-", "others"].map(plain);
        let reason = plain("there were more calls than are kept");
        vec![
            authz::outcome(Outcome::Unknown),
            plain(pods),
            port,
            calls,
            reason,
        ]
    }));
    let watched = match plan.watched {
        None => ", none of which has been watched".to_owned(),
        Some((shortest, longest)) => {
            let [shortest, longest] = [shortest, longest].map(format_duration);
            format!(
                ", watched for {shortest} to {longest}: {} kinds of calls",
                plan.calls
            )
        }
    };
    let summary = format!(
        "the change is about {} groups of pods{watched}\n",
        plan.groups
    );
    let unseen = plan.unseen.iter().map(|reason| {
        let reason = format!("too little was seen: {}", terminal::printable(reason));
        colors.paint(TextStyle::Warning, &reason) + "\n"
    });
    let unseen: String = unseen.collect();
    if rows.len() > 1 {
        colors.table(&rows) + &summary + &unseen
    } else if unseen.is_empty() {
        format!("{summary}nothing that was seen would be denied\n")
    } else {
        summary + &unseen
    }
}
