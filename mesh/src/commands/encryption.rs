//! `mesh encryption`: which Services get requests or connections without mutual TLS, and which have
//! endpoints without a proxy. Changes nothing.

use std::{collections::BTreeSet, process::ExitCode};

use anyhow::Result;
use clap::Args;
use diy_mesh_proto::mesh::v1::Service;
use serde::Serialize;

use super::services::sort;
use crate::terminal::{self, Cell, Colors, Output, TextStyle, plain};
use crate::{
    controller::{self, Controllers},
    sample,
    traffic::{Sample, peer},
};

/// The arguments of `mesh encryption`.
#[derive(Args, Debug)]
#[command(
    after_help = "An answer is about what proxies saw in their last 10 seconds: strict pods refuse the rest. TLS of the \
    applications themselves does not count.\n\n\
    Exit codes: 0 no Service is known not to be encrypted; 1 one is; 2 error.\n\n\
    Examples:\n  mesh encryption                    all Services of the cluster\n  \
    mesh encryption -n shop            those of a namespace\n  \
    mesh encryption -o json | jq '.services[] | select(.encrypted == \"no\")'"
)]
pub struct Arguments {
    #[command(flatten)]
    controller: controller::Arguments,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

#[derive(Debug, Serialize)]
struct Report {
    services: Vec<Answer>,
    /// Notes about missing data.
    notes: Vec<String>,
}

/// Whether a Service is encrypted.
#[derive(Debug, PartialEq, Serialize)]
struct Answer {
    service: String,
    encrypted: Encrypted,
    why: String,
}

/// The least encrypted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum Encrypted {
    No,
    /// Nobody called it.
    Unknown,
    Yes,
}

/// Prints an answer for each Service.
pub async fn run(arguments: &Arguments) -> Result<ExitCode> {
    let only = arguments.controller.cluster.namespace.as_deref();
    let controllers = Controllers::new(&arguments.controller).await?;
    let mut services = controllers.connect().await?.services(vec![]).await?;
    services.retain(|service| only.is_none_or(|only| service.namespace == only));
    sort(&mut services);
    let source = sample::Arguments::of(&arguments.controller);
    let mut sampler = source.sampler(only.unwrap_or_default(), false).await?;
    let report = report(&services, &sampler.sample().await?);
    let output = arguments.output;
    output.print(&report, |colors| text(&report, colors))?;
    let mut answers = report.services.iter();
    Ok(if answers.any(|one| one.encrypted == Encrypted::No) {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

fn report(services: &[Service], sample: &Sample) -> Report {
    let mut services: Vec<_> = services
        .iter()
        .filter_map(|one| answer(one, sample))
        .collect();
    services.sort_by_key(|one| one.encrypted);
    Report {
        services,
        notes: sample.notes.clone(),
    }
}

/// The answer for a Service. `None`: it has no endpoints.
fn answer(service: &Service, sample: &Sample) -> Option<Answer> {
    let Service {
        namespace,
        name,
        endpoints,
        ..
    } = service;
    let without_proxy = endpoints
        .iter()
        .filter(|one| one.identity.is_empty())
        .count();
    let pods = sample.pods.iter();
    let pods = pods.filter(|pod| pod.namespace == *namespace && pod.services.contains(name));
    let flows = pods.flat_map(|pod| pod.traffic.flows.iter().filter(|flow| flow.inbound));
    let (mut total, mut requests, mut connections) = (0_u64, 0_u64, 0_u64);
    let mut callers = BTreeSet::new();
    for flow in flows {
        total = total
            .saturating_add(flow.requests)
            .saturating_add(flow.connections);
        let plain = [
            flow.requests.saturating_sub(flow.mutual_tls),
            flow.connections.saturating_sub(flow.connections_mutual_tls),
        ];
        requests = requests.saturating_add(plain[0]);
        connections = connections.saturating_add(plain[1]);
        if plain != [0, 0] {
            callers.insert(peer(flow));
        }
    }
    let (encrypted, why) = match () {
        () if endpoints.is_empty() => return None,
        () if without_proxy > 0 => {
            let of = endpoints.len();
            let why = format!("{without_proxy} of {of} endpoints have no proxy, or bypass it");
            (Encrypted::No, why)
        }
        () if !callers.is_empty() => {
            let callers = Vec::from_iter(callers).join(", ");
            let why = format!(
                "{requests} requests and {connections} connections of {total} without mutual TLS, by {callers}"
            );
            (Encrypted::No, why)
        }
        () if total == 0 => (
            Encrypted::Unknown,
            "no request and no connection".to_owned(),
        ),
        () => {
            let why = format!("{total} requests and connections, all with mutual TLS");
            (Encrypted::Yes, why)
        }
    };
    Some(Answer {
        service: format!("{namespace}/{name}"),
        encrypted,
        why,
    })
}

fn text(report: &Report, colors: Colors) -> String {
    let rows = report.services.iter().map(|one| {
        let encrypted = match one.encrypted {
            Encrypted::No => TextStyle::Error.cell("no"),
            Encrypted::Unknown => TextStyle::Dim.cell("unknown"),
            Encrypted::Yes => TextStyle::Ok.cell("yes"),
        };
        vec![
            TextStyle::Bold.cell(&one.service),
            encrypted,
            plain(&one.why),
        ]
    });
    let headings = terminal::headings(["SERVICE", "ENCRYPTED", "WHY"]);
    let rows: Vec<Vec<Cell>> = [headings].into_iter().chain(rows).collect();
    let notes = report
        .notes
        .iter()
        .map(|note| terminal::printable(note) + "\n");
    colors.table(&rows) + &notes.collect::<String>()
}

#[cfg(test)]
mod tests {
    use diy_mesh_proto::mesh::v1::{service::Endpoint, traffic::Flow};

    use super::*;
    use crate::traffic::testing::{flow, pod};

    fn service(name: &str, identities: &[&str]) -> Service {
        let endpoint = |identity: &&str| Endpoint {
            identity: (*identity).to_owned(),
            ..Endpoint::default()
        };
        Service {
            namespace: "shop".to_owned(),
            name: name.to_owned(),
            endpoints: identities.iter().map(endpoint).collect(),
            ..Service::default()
        }
    }

    #[test]
    fn answers_count_requests_connections_and_endpoints_without_a_proxy() {
        let mutual = |requests| Flow {
            mutual_tls: requests,
            ..flow(true, "shop/web", requests)
        };
        let redis = |peer: &str, connections, mutual_tls| Flow {
            connections,
            connections_mutual_tls: mutual_tls,
            ..flow(true, peer, 0)
        };
        let behind = |service: &str, flows| {
            let mut pod = pod(&format!("shop/{service}-v1"), flows);
            pod.services = vec![service.to_owned()];
            pod
        };
        let sample = Sample {
            pods: vec![
                behind("web", vec![mutual(4), redis("shop/web", 2, 2)]),
                behind("mixed", vec![mutual(4), flow(true, "", 2), redis("", 3, 0)]),
                behind("redis", vec![redis("shop/web", 2, 2), redis("", 1, 0)]),
                behind("idle", vec![flow(false, "shop/web", 2)]),
                behind("half", vec![mutual(4)]),
            ],
            notes: vec!["1 replica is missing".to_owned()],
        };
        let services = ["web", "mixed", "redis", "idle"].map(|name| service(name, &["spiffe://a"]));
        let others = [service("half", &["spiffe://a", ""]), service("none", &[])];
        let report = report(&[&services[..], &others].concat(), &sample);
        assert_eq!(
            text(&report, Colors::DISABLED),
            "SERVICE     ENCRYPTED  WHY\n\
             shop/mixed  no         1 requests and 3 connections of 9 without mutual TLS, by (no identity)\n\
             shop/redis  no         0 requests and 1 connections of 3 without mutual TLS, by (no identity)\n\
             shop/half   no         1 of 2 endpoints have no proxy, or bypass it\n\
             shop/idle   unknown    no request and no connection\n\
             shop/web    yes        6 requests and connections, all with mutual TLS\n\
             1 replica is missing\n"
        );
    }
}
