//! The real controller for the mesh sides. Its catalog has one Service with one endpoint, and ports
//! with routes, and one whose endpoint has no proxy; its keys are generated for the run.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde_json::json;

use super::{copy_for_proxy_user, write_readable};
use crate::{
    cases::{CASES, Kind, Routes},
    config::Programs,
    network::{
        CLIENT, CLUSTER, ControlNetwork, NamespaceSet, PLAIN_CLUSTER, PLAIN_SERVER, Pair, SERVER,
    },
    process::{Meter, Process, Program},
    server::{CLIENT_FIRST_PORT, HTTP_PORT, SERVER_FIRST_PORT, SINK_PORT, TWO_WRITES_PORT},
    tokens,
};

const ADMIN_PORT: u16 = 8081;
/// The cluster IP of the collector of traces.
const COLLECTOR: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 99);

/// Running controller, shared by the mesh sides, whose pods have the same names and addresses.
pub struct Control {
    network: ControlNetwork,
    controller: Process,
}

impl Control {
    /// Writes catalog and keys, starts the controller and waits until it is ready. With `telemetry`,
    /// its pods trace a tenth of their requests and log all.
    pub fn start(programs: &Programs, namespaces: &NamespaceSet, telemetry: bool) -> Result<Self> {
        let name = if telemetry { "telemetry" } else { "control" };
        let network = ControlNetwork::create(name, namespaces)?;
        let catalog = programs.state.join("catalog");
        fs::create_dir_all(&catalog).with_context(|| format!("create {}", catalog.display()))?;
        write_readable(&catalog.join("bench.yaml"), &objects(telemetry))?;
        let keys = programs.state.join("jwks.json");
        write_readable(&keys, &tokens(&programs.state)?)?;
        let authority = authority(&programs.state);
        fs::create_dir_all(&authority)
            .with_context(|| format!("create {}", authority.display()))?;
        // The controller writes there; the proxies read from there.
        fs::set_permissions(&authority, fs::Permissions::from_mode(0o777))
            .with_context(|| format!("make {} writable", authority.display()))?;
        let (catalog, keys) = (
            format!("files:{}", catalog.display()),
            format!("jwks:{}", keys.display()),
        );
        let authority = format!("files:{}", authority.display());
        let arguments = [
            "--catalog",
            &catalog,
            "--authenticator",
            &keys,
            "--ca",
            &authority,
        ];
        let program = Program {
            name: "controller".to_string(),
            path: copy_for_proxy_user(&programs.controller, &programs.state)?,
            arguments: arguments.map(String::from).to_vec(),
            environment: vec![("POD_NAMESPACE", "service-mesh".to_string())],
            uid: 65532,
        };
        let mut controller = Process::start(program, &network.namespace, &programs.state)?;
        controller.wait_ready(
            &network.namespace,
            SocketAddr::from((Ipv4Addr::LOCALHOST, ADMIN_PORT)),
            "/ready",
        )?;
        Ok(Control {
            network,
            controller,
        })
    }

    /// Meter of its CPU time and memory.
    pub fn meter(&self) -> Meter {
        self.controller.meter()
    }

    /// Connects a side's pods to the controller.
    pub fn connect(&mut self, pair: &Pair) -> Result<()> {
        self.network.connect(&pair.client)?;
        self.network.connect(&pair.server)
    }
}

/// Directory of the certificate authority.
fn authority(state: &Path) -> PathBuf {
    state.join("ca")
}

/// File with the trust roots.
pub(super) fn roots_file(state: &Path) -> PathBuf {
    authority(state).join("roots.pem")
}

/// Workload of a proxy.
#[derive(Clone, Copy)]
pub(super) enum Workload {
    Client,
    Server,
}

impl Workload {
    const BOTH: [Workload; 2] = [Workload::Client, Workload::Server];

    /// Namespace, pod and service account name.
    pub(super) fn name(self) -> &'static str {
        match self {
            Workload::Client => "http-client",
            Workload::Server => "http-server",
        }
    }

    /// File with its token.
    pub(super) fn token_file(self, state: &Path) -> PathBuf {
        state.join(format!("{}.token", self.name()))
    }

    fn pod(self) -> tokens::Pod {
        let name = self.name().to_string();
        tokens::Pod {
            namespace: name.clone(),
            uid: format!("{name}-0000-4000-8000-000000000000"),
            name,
        }
    }

    fn address(self) -> Ipv4Addr {
        match self {
            Workload::Client => CLIENT,
            Workload::Server => SERVER,
        }
    }
}

/// Services with one address each, besides the Service of the other cases.
#[derive(Clone, Copy, Debug)]
pub enum Destinations {
    /// Without routes and policies.
    Plain,
    /// With an HTTPRoute and a TrafficPolicy each.
    WithPolicy,
}

impl Destinations {
    /// The addresses of so many of them.
    pub fn addresses(self, number: u16) -> impl Iterator<Item = SocketAddr> {
        let network = match self {
            Destinations::Plain => 97,
            Destinations::WithPolicy => 98,
        };
        let address = move |at: u16| {
            let [high, low] = at.to_be_bytes();
            (Ipv4Addr::new(10, network, high, low), Routes::None.port()).into()
        };
        (1..=number).map(address)
    }

    fn objects(self, number: u16) -> impl Iterator<Item = serde_json::Value> {
        let services = self.addresses(number).zip(1..);
        services.flat_map(move |(address, at): (SocketAddr, u16)| {
            let name = format!("{self:?}-{at}").to_lowercase();
            let ports = [("http".to_string(), address.port(), HTTP_PORT)];
            let mut objects = service(&name, address.ip(), SERVER, &ports);
            if let Destinations::WithPolicy = self {
                objects.extend(route_and_policy(&name));
            }
            objects
        })
    }
}

/// A route and a policy with all settings that concern clients.
fn route_and_policy(service: &str) -> [serde_json::Value; 2] {
    let metadata = json!({ "name": service, "namespace": "http-server" });
    let reference = json!({ "group": "", "kind": "Service", "name": service });
    [
        json!({
            "apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute", "metadata": metadata,
            "spec": {
                "parentRefs": [reference],
                "rules": [{
                    "matches": [{ "path": { "type": "PathPrefix", "value": "/" } }],
                    "filters": [{
                        "type": "RequestHeaderModifier",
                        "requestHeaderModifier": { "set": [{ "name": "x-bench", "value": "1" }] },
                    }],
                    "timeouts": { "request": "10s", "backendRequest": "2s" },
                    "retry": { "codes": [503], "attempts": 2, "backoff": "25ms" },
                    "backendRefs": [{ "name": service, "port": Routes::None.port() }],
                }],
            },
        }),
        json!({
            "apiVersion": "diy-service-mesh.dev/v1alpha1", "kind": "TrafficPolicy", "metadata": metadata,
            "spec": {
                "targetRefs": [reference],
                "loadBalancing": { "algorithm": "LeastRequest", "slowStart": "30s" },
                "connections": { "maxConnections": 100, "maxWaiting": 100, "connectTimeout": "1s" },
                "outlierDetection": { "consecutiveFailures": 5, "latencyPercent": 300 },
                "circuitBreaker": { "failurePercent": 50, "minRequests": 20 },
                "retry": { "budget": { "percent": 20 } },
                "faults": [{
                    "matches": [{ "headers": [{ "name": "x-fault", "value": "1" }] }],
                    "abort": { "status": 503 },
                }],
            },
        }),
    ]
}

/// Writes a token for each workload and returns the key set that verifies them.
fn tokens(state: &Path) -> Result<String> {
    let issuer = tokens::Issuer::new()?;
    for workload in Workload::BOTH {
        write_readable(&workload.token_file(state), &issuer.token(&workload.pod())?)?;
    }
    issuer.key_set()
}

/// The Services, their EndpointSlices and the pods.
fn objects(telemetry: bool) -> String {
    let mut ports = vec![
        ("http".to_string(), Routes::None.port(), HTTP_PORT),
        ("bytes".to_string(), SINK_PORT, SINK_PORT),
    ];
    ports.extend(
        [TWO_WRITES_PORT, CLIENT_FIRST_PORT, SERVER_FIRST_PORT]
            .map(|port| (format!("port-{port}"), port, port)),
    );
    ports.extend(Routes::ALL.map(|routes| {
        let port = routes.port();
        (format!("http-{port}"), port, HTTP_PORT)
    }));
    let mut items: Vec<_> = Workload::BOTH
        .iter()
        .map(|&workload| pod(workload))
        .collect();
    items.extend(service("http-server", CLUSTER.into(), SERVER, &ports));
    items.extend(service("plain", PLAIN_CLUSTER.into(), PLAIN_SERVER, &ports));
    items.extend(Routes::ALL.into_iter().flat_map(http_routes));
    if telemetry {
        items.extend(with_telemetry());
    }
    let numbers = CASES.iter().filter_map(|case| match case.kind {
        Kind::Destinations { number } => Some(number),
        _ => None,
    });
    for number in numbers {
        items.extend(Destinations::Plain.objects(number));
        items.extend(Destinations::WithPolicy.objects(number));
    }
    let documents: Vec<_> = items.iter().map(ToString::to_string).collect();
    documents.join("\n---\n")
}

/// Traces of a tenth of the requests of both pods, and access logs of all. The origin server is the
/// collector.
fn with_telemetry() -> Vec<serde_json::Value> {
    let port = [("http".to_string(), 80, HTTP_PORT)];
    let mut objects = service("collector", COLLECTOR.into(), SERVER, &port);
    objects.push(json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "name": "http-client", "namespace": "http-client" },
        "spec": { "clusterIP": "None", "selector": { "app": "http-client" } },
    }));
    objects.extend(Workload::BOTH.map(|workload| {
        let name = workload.name();
        json!({
            "apiVersion": "diy-service-mesh.dev/v1alpha1", "kind": "TrafficPolicy",
            "metadata": { "name": "telemetry", "namespace": name },
            "spec": {
                "targetRefs": [{ "group": "", "kind": "Service", "name": name }],
                "telemetry": {
                    "accessLogs": { "matches": "All" },
                    "tracing": {
                        "provider": { "endpoint": "collector.http-server.svc:80" },
                        "samplingRate": { "numerator": 10 },
                    },
                },
            },
        })
    }));
    objects
}

/// A Service and its EndpointSlice, with one endpoint: the pod of the server, or one that is no
/// pod. Each port has a name, a number and the number of the server's port.
fn service(
    name: &str,
    address: IpAddr,
    endpoint: Ipv4Addr,
    ports: &[(String, u16, u16)],
) -> Vec<serde_json::Value> {
    let pod = json!({ "kind": "Pod", "name": "http-server", "namespace": "http-server" });
    let numbered = |port: &dyn Fn(&(String, u16, u16)) -> serde_json::Value| -> Vec<_> {
        ports.iter().map(port).collect()
    };
    vec![
        json!({
            "apiVersion": "v1", "kind": "Service", "metadata": { "name": name, "namespace": "http-server" },
            "spec": {
                "type": "ClusterIP", "clusterIP": address, "clusterIPs": [address], "ipFamilies": ["IPv4"],
                "selector": { "app": "http-server" },
                "ports": numbered(&|(name, port, target)| {
                    json!({ "name": name, "port": port, "targetPort": target, "protocol": "TCP" })
                }),
            },
        }),
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {
                "name": format!("{name}-bench"), "namespace": "http-server",
                "labels": { "kubernetes.io/service-name": name },
            },
            "endpoints": [{
                "addresses": [endpoint], "conditions": { "ready": true, "serving": true, "terminating": false },
                "targetRef": (endpoint == SERVER).then_some(pod),
            }],
            "ports": numbered(&|(name, _, target)| {
                json!({ "name": name, "port": target, "protocol": "TCP" })
            }),
        }),
    ]
}

/// The HTTPRoutes of a Service port. The requests of the benchmark match the last one.
fn http_routes(routes: Routes) -> Vec<serde_json::Value> {
    let port = routes.port();
    let route = |number: u16, mut rule: serde_json::Value| {
        rule["backendRefs"] = json!([{ "name": "http-server", "port": port }]);
        json!({
            "apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
            "metadata": { "name": format!("bench-{port}-{number}"), "namespace": "http-server" },
            "spec": {
                "parentRefs": [{ "group": "", "kind": "Service", "name": "http-server", "port": port }],
                "rules": [rule],
            },
        })
    };
    match routes {
        Routes::None => Vec::new(),
        Routes::Paths(number) => (1..=number)
            .map(|at| {
                let path = if at == number {
                    "/".to_string()
                } else {
                    format!("/bench/page-{at}")
                };
                let path = json!({ "type": "PathPrefix", "value": path });
                route(at, json!({ "matches": [{ "path": path }] }))
            })
            .collect(),
        Routes::Retries => vec![route(
            1,
            json!({
                "retry": { "codes": [503], "attempts": 2, "backoff": "25ms" },
                "timeouts": { "request": "10s", "backendRequest": "2s" },
            }),
        )],
    }
}

fn pod(workload: Workload) -> serde_json::Value {
    let (name, address) = (workload.name(), workload.address());
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "namespace": name, "uid": workload.pod().uid, "labels": { "app": name },
        },
        "spec": { "serviceAccountName": name, "containers": [{ "name": name, "image": name }],
            "initContainers": [{ "name": "proxy", "env": [{ "name": "SERVICE_MESH_TOKEN_FILE" }] }] },
        "status": {
            "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }],
            "conditions": [{ "type": "Ready", "status": "True" }],
        },
    })
}
