//! `mesh services`: lists what the controller says about Services, with GetServices or, for
//! `--watch`, with WatchServices. Changes nothing.

use std::{io, process::ExitCode};

use anyhow::{Result, bail};
use clap::Args;
use diy_mesh_proto::mesh::v1::{Service, service::Endpoint};
use futures::future::join_all;
use serde_json::{Value, json};

use crate::controller::{self, Controller, Controllers, Rejected};
use crate::terminal::{self, Cell, Colors, Output, TextStyle, plain};

/// The arguments of `mesh services`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  mesh services                        all Services of the cluster\n  \
    mesh services -n shop                those of a namespace\n  \
    mesh services --account shop/viewer  those of namespace shop, with the token of an account there\n  \
    mesh services shop/cart --watch      one Service and its changes\n  \
    mesh services -o json | jq '.[] | select(.endpoints == [])'"
)]
pub struct Arguments {
    /// Services to list [default: all]
    #[arg(value_name = "[NAMESPACE/]NAME")]
    services: Vec<String>,
    /// Print each change until Ctrl-C
    #[arg(short, long)]
    watch: bool,
    #[command(flatten)]
    controller: controller::Arguments,
    /// Output format; with --watch, JSON is one object per line
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// Lists the Services.
pub async fn run(arguments: &Arguments) -> Result<ExitCode> {
    let cluster = &arguments.controller.cluster;
    let names = arguments.services.iter();
    let names = join_all(names.map(|name| cluster.full_name(name))).await;
    // Names have theirs.
    let only = cluster.namespace.as_ref().filter(|_| names.is_empty());
    let is_listed = |service: &Service| only.is_none_or(|only| service.namespace == *only);
    let controllers = Controllers::new(&arguments.controller).await?;
    let mut controller = controllers.connect().await?;
    if arguments.watch {
        return watch(&mut controller, names, is_listed, arguments.output).await;
    }
    let mut services = controller.services(names).await?;
    services.retain(is_listed);
    sort(&mut services);
    let all: Value = services.iter().map(json).collect();
    let output = arguments.output;
    output.print(&all, |colors| table(&mut services, colors))?;
    Ok(if services.iter().any(|service| service.deleted) {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// Prints the table of the initial state, then the rows of each changed Service.
async fn watch(
    controller: &mut Controller,
    names: Vec<String>,
    is_listed: impl Fn(&Service) -> bool,
    output: Output,
) -> Result<ExitCode> {
    let mut stream = controller.watch_services(names).await?;
    let mut initial = Some(Vec::new());
    while let Some(response) = stream.message().await.map_err(Rejected)? {
        let mut changed: Vec<Service> = response.service.into_iter().filter(&is_listed).collect();
        match (output, &mut initial) {
            (Output::Json, _) => {
                changed.iter().try_for_each(|service| {
                    terminal::print(&terminal::json(&json(service).to_string()))
                })?;
                continue;
            }
            (Output::Text, Some(services)) => services.append(&mut changed),
            (Output::Text, None) => {}
        }
        if response.synced {
            changed = initial.take().unwrap_or_default();
        }
        if !changed.is_empty() {
            terminal::print(&table(&mut changed, Colors::of(&io::stdout())))?;
        }
    }
    bail!("the controller has ended the watch; run the command again to reach another replica")
}

/// By namespace and name.
pub(super) fn sort(services: &mut [Service]) {
    services
        .sort_by(|one, other| (&one.namespace, &one.name).cmp(&(&other.namespace, &other.name)));
}

fn table(services: &mut [Service], colors: Colors) -> String {
    sort(services);
    let mut rows = vec![terminal::headings([
        "SERVICE", "ADDRESS", "PORTS", "ENDPOINT", "POD", "STATE", "IDENTITY",
    ])];
    rows.extend(services.iter().flat_map(rows_of));
    colors.table(&rows)
}

/// One row per endpoint and canary, at least one. Only the first names the Service.
fn rows_of(service: &Service) -> Vec<Vec<Cell>> {
    let name = format!("{}/{}", service.namespace, service.name);
    let heads = [
        TextStyle::Bold.cell(name),
        plain(address(service)),
        plain(ports(service)),
    ];
    let mut details: Vec<Vec<Cell>> = service.endpoints.iter().map(endpoint_cells).collect();
    details.extend(service.canaries.iter().map(|canary| {
        let namespace = if canary.namespace.is_empty() {
            &service.namespace
        } else {
            &canary.namespace
        };
        let text = format!(
            "canary {namespace}/{}, weight {}",
            canary.name, canary.weight
        );
        vec![plain(text)]
    }));
    if details.is_empty() {
        details.push(vec![if service.deleted {
            TextStyle::Error.cell("not found")
        } else if service.external_name.is_empty() {
            TextStyle::Warning.cell("no endpoints")
        } else {
            TextStyle::Dim.cell("")
        }]);
    }
    terminal::headed(heads, details)
}

fn address(service: &Service) -> String {
    match () {
        () if service.deleted => "-".into(),
        () if !service.external_name.is_empty() => service.external_name.clone(),
        () if service.cluster_ips.is_empty() => "headless".into(),
        () => service.cluster_ips.join(","),
    }
}

/// `80/TCP,53/UDP`, with the declared application protocol.
fn ports(service: &Service) -> String {
    let ports = service.ports.iter().map(|port| {
        let separator = if port.app_protocol.is_empty() {
            ""
        } else {
            " "
        };
        format!(
            "{}/{}{separator}{}",
            port.port, port.protocol, port.app_protocol
        )
    });
    ports.collect::<Vec<_>>().join(",")
}

fn endpoint_cells(endpoint: &Endpoint) -> Vec<Cell> {
    let mut ports: Vec<String> = endpoint.ports.values().map(ToString::to_string).collect();
    ports.sort();
    let addresses =
        endpoint
            .addresses
            .iter()
            .map(|address| match (ports.is_empty(), address.contains(':')) {
                (true, _) => address.clone(),
                (false, true) => format!("[{address}]:{}", ports.join(",")),
                (false, false) => format!("{address}:{}", ports.join(",")),
            });
    let state = match endpoint {
        endpoint if endpoint.terminating => TextStyle::Warning.cell("terminating"),
        endpoint if endpoint.ready => plain("ready"),
        _ => TextStyle::Warning.cell("not ready"),
    };
    let identity = match endpoint.identity.as_str() {
        // The controller knows the identity of a port.
        "" if ports.is_empty() => TextStyle::Warning.cell("has no port of the Service"),
        "" => TextStyle::Dim.cell("not meshed"),
        identity => plain(identity),
    };
    let addresses = plain(addresses.collect::<Vec<_>>().join(" "));
    vec![addresses, plain(&endpoint.pod_name), state, identity]
}

fn json(service: &Service) -> Value {
    let endpoint = |endpoint: &Endpoint| {
        json!({
            "addresses": endpoint.addresses, "ports": endpoint.ports, "pod": endpoint.pod_name, "ready": endpoint.ready,
            "terminating": endpoint.terminating, "zone": endpoint.zone, "identity": endpoint.identity,
        })
    };
    let ports = service.ports.iter().map(|port| {
        let target = if port.target_port_name.is_empty() {
            json!(port.target_port)
        } else {
            json!(port.target_port_name)
        };
        json!({
            "name": port.name, "port": port.port, "targetPort": target, "protocol": port.protocol,
            "appProtocol": port.app_protocol,
        })
    });
    let canaries = service.canaries.iter().map(|canary| {
        json!({"namespace": canary.namespace, "name": canary.name, "port": canary.port, "weight": canary.weight})
    });
    json!({
        "namespace": service.namespace, "name": service.name, "clusterIPs": service.cluster_ips,
        "externalName": service.external_name, "deleted": service.deleted, "ports": ports.collect::<Value>(),
        "endpoints": service.endpoints.iter().map(endpoint).collect::<Value>(), "canaries": canaries.collect::<Value>(),
    })
}

#[cfg(test)]
mod tests {
    use diy_mesh_proto::mesh::v1::service::{Canary, Port};

    use super::*;

    fn services() -> Vec<Service> {
        let endpoint = |address: &str, pod: &str, ready, identity: &str| Endpoint {
            addresses: vec![address.into()],
            ready,
            pod_name: pod.into(),
            ports: [("http".to_owned(), 8080)].into(),
            identity: identity.into(),
            ..Endpoint::default()
        };
        let service = |namespace: &str, name: &str| Service {
            namespace: namespace.into(),
            name: name.into(),
            cluster_ips: vec!["10.96.0.7".into()],
            ports: vec![Port {
                name: "http".into(),
                port: 80,
                target_port_name: "web".into(),
                protocol: "TCP".into(),
                ..Port::default()
            }],
            ..Service::default()
        };
        let web = Service {
            endpoints: vec![
                endpoint(
                    "10.244.0.6",
                    "web-1",
                    true,
                    "spiffe://cluster.local/ns/shop/sa/web",
                ),
                endpoint("fd00::7", "web-2", false, ""),
            ],
            canaries: vec![Canary {
                name: "web-new".into(),
                weight: 20,
                ..Canary::default()
            }],
            ..service("shop", "web")
        };
        let gone = Service {
            deleted: true,
            ..Service {
                namespace: "shop".into(),
                name: "gone".into(),
                ..Service::default()
            }
        };
        vec![web, gone, service("bank", "empty")]
    }

    #[test]
    fn table_lists_endpoints_identities_and_canaries() {
        assert_eq!(
            table(&mut services(), Colors::DISABLED),
            "\
SERVICE     ADDRESS    PORTS   ENDPOINT                        POD    STATE      IDENTITY
bank/empty  10.96.0.7  80/TCP  no endpoints
shop/gone   -                  not found
shop/web    10.96.0.7  80/TCP  10.244.0.6:8080                 web-1  ready      spiffe://cluster.local/ns/shop/sa/web
                               [fd00::7]:8080                  web-2  not ready  not meshed
                               canary shop/web-new, weight 20
"
        );
    }

    #[test]
    fn endpoint_without_a_port_is_not_called_unmeshed() {
        let endpoint = Endpoint {
            addresses: vec!["10.244.0.6".into()],
            ..Endpoint::default()
        };
        let cells = endpoint_cells(&endpoint).into_iter().map(|(_, text)| text);
        let expected = ["10.244.0.6", "", "not ready", "has no port of the Service"];
        assert_eq!(Vec::from_iter(cells), expected);
    }

    #[test]
    fn json_has_the_fields_of_the_contract() {
        let web = json(&services()[0]);
        assert_eq!(web["clusterIPs"], json!(["10.96.0.7"]));
        assert_eq!(web["ports"][0]["targetPort"], "web");
        assert_eq!(
            web["endpoints"][0]["identity"],
            "spiffe://cluster.local/ns/shop/sa/web"
        );
        assert_eq!(web["endpoints"][1]["ready"], false);
        assert_eq!(web["canaries"][0]["weight"], 20);
    }
}
