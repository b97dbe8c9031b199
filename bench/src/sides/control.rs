//! The real controller for the mesh sides. Its catalog has one Service with one endpoint, and ports
//! with routes; its keys are generated for the run.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde_json::json;

use super::{copy_for_proxy_user, write_readable};
use crate::{
    cases::Routes,
    config::Programs,
    network::{CLIENT, CLUSTER, ControlNetwork, NamespaceSet, Pair, SERVER},
    process::{Meter, Process, Program},
    server::{HTTP_PORT, SINK_PORT},
    tokens,
};

const ADMIN_PORT: u16 = 8081;

/// Running controller, shared by both mesh sides, whose pods have the same names and addresses.
pub struct Control {
    network: ControlNetwork,
    controller: Process,
}

impl Control {
    /// Writes catalog and keys, starts the controller and waits until it is ready.
    pub fn start(programs: &Programs, namespaces: &NamespaceSet) -> Result<Self> {
        let network = ControlNetwork::create(namespaces)?;
        let catalog = programs.state.join("catalog");
        fs::create_dir_all(&catalog).with_context(|| format!("create {}", catalog.display()))?;
        write_readable(&catalog.join("bench.yaml"), &objects())?;
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

/// Writes a token for each workload and returns the key set that verifies them.
fn tokens(state: &Path) -> Result<String> {
    let issuer = tokens::Issuer::new()?;
    for workload in Workload::BOTH {
        write_readable(&workload.token_file(state), &issuer.token(&workload.pod())?)?;
    }
    issuer.key_set()
}

/// The Service, its EndpointSlice and the pods.
fn objects() -> String {
    let mut ports = vec![
        ("http".to_string(), Routes::None.port(), HTTP_PORT),
        ("bytes".to_string(), SINK_PORT, SINK_PORT),
    ];
    ports.extend(Routes::ALL.map(|routes| {
        let port = routes.port();
        (format!("http-{port}"), port, HTTP_PORT)
    }));
    let mut items: Vec<_> = Workload::BOTH
        .iter()
        .map(|&workload| pod(workload))
        .collect();
    items.push(json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "http-server", "namespace": "http-server" },
        "spec": {
            "type": "ClusterIP", "clusterIP": CLUSTER, "clusterIPs": [CLUSTER], "ipFamilies": ["IPv4"],
            "selector": { "app": "http-server" },
            "ports": ports.iter().map(|(name, port, target)| json!({ "name": name, "port": port, "targetPort": target, "protocol": "TCP" })).collect::<Vec<_>>(),
        },
    }));
    items.push(json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": "http-server-bench", "namespace": "http-server", "labels": { "kubernetes.io/service-name": "http-server" },
        },
        "endpoints": [{
            "addresses": [SERVER], "conditions": { "ready": true, "serving": true, "terminating": false },
            "targetRef": { "kind": "Pod", "name": "http-server", "namespace": "http-server" },
        }],
        "ports": ports.iter().map(|(name, _, target)| json!({ "name": name, "port": target, "protocol": "TCP" })).collect::<Vec<_>>(),
    }));
    items.extend(Routes::ALL.into_iter().flat_map(http_routes));
    let documents: Vec<_> = items.iter().map(ToString::to_string).collect();
    documents.join("\n---\n")
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
                let path = match at == number {
                    true => "/".to_string(),
                    false => format!("/bench/page-{at}"),
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
