//! Targets of destinations, and their conversion from the controller's messages. Pure.

use crate::endpoint::EndpointInfo;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_proto::mesh::v1::{Delta, Endpoint, Snapshot, snapshot};

use super::affinity::Affinity;
use super::resource::Resource;
use super::subset::Subset;
use crate::protocol::Protocol;
use crate::route::Routes;
use crate::upstream::balance::maglev::Table;
use crate::upstream::balance::policy::{Algorithm, BackendPolicy};

/// The bytes of routes that count as an endpoint: half of what that takes, because the allocator adds
/// to them, and workers to their expressions.
pub(super) const BYTES_OF_ENDPOINT: usize = 400;

/// The resolution of a destination, or of a backend of routes: where its connections may go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// The kind of the destination.
    pub kind: TargetKind,
    /// Where it is, if its kind is unknown.
    pub place: Place,
    /// The namespace of the Service or the pod.
    pub namespace: String,
    /// The name of the Service or the pod.
    pub name: String,
    /// The protocol of the port that the Service declares, or `None` if it is detected.
    pub app_protocol: Option<Protocol>,
    /// The pod, or the ready endpoints of the Service, sorted by address, without duplicates.
    pub endpoints: Endpoints,
    /// Endpoints that terminate and still serve, or whose node is unready, sorted by address, without duplicates.
    pub draining: Endpoints,
    /// The endpoint that requests keep, if the Service has session affinity.
    pub affinity: Option<Arc<Affinity>>,
    /// The routes of HTTP requests, if there are any. A pod has the routes of its headless Service, and
    /// stays the backend.
    pub routes: Option<Arc<Routes>>,
    /// How the endpoints are used.
    pub policy: Arc<BackendPolicy>,
    /// The table of the usable endpoints, for consistent hashes. Workers share it.
    pub table: Arc<Table>,
    /// The endpoints of the Service that the proxy keeps.
    pub subset: Subset,
}

/// The kind of a target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TargetKind {
    /// Neither a Service nor a pod, or no response yet: connections go to the original destination.
    #[default]
    Unknown,
    /// Formerly meshed, or possibly, and the controller has not sent a current target: unreachable.
    Withheld,
    /// A host outside of the cluster without usable addresses.
    Unresolved {
        /// The host.
        host: Arc<str>,
        /// Why.
        reason: String,
    },
    /// There is no room for it: unreachable, because the destination may be meshed.
    Refused,
    /// A port of a Service: balanced over its endpoints.
    Service,
    /// An address of a Service that does not have the port: unreachable.
    UnknownPort {
        /// The TCP ports that it has.
        ports: Vec<u16>,
        /// Not 0: it has the port, but not among these first TCP ports that the mesh supports.
        max_ports: u32,
    },
    /// A port of a pod: connections go there.
    Pod,
}

impl TargetKind {
    /// The name in the state of the proxy.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Withheld => "withheld",
            Self::Unresolved { .. } => "unresolved",
            Self::Refused => "refused",
            Self::Service => "service",
            Self::UnknownPort { .. } => "unknown-port",
            Self::Pod => "pod",
        }
    }
}

/// Where an address is that is neither of a Service nor of a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Place {
    /// There is no response yet.
    #[default]
    Unanswered,
    /// The address of a node.
    Node,
    /// Outside of the cluster.
    Outside,
}

/// Endpoints in the order of their addresses.
type Endpoints = Vec<Arc<EndpointInfo>>;

impl From<TargetKind> for Target {
    fn from(kind: TargetKind) -> Self {
        Self {
            kind,
            ..Self::default()
        }
    }
}

impl Target {
    /// The target of a resource that the controller does not know.
    pub(super) fn unknown(resource: &Resource, is_node: bool) -> Self {
        match resource.service() {
            None => Self {
                place: if is_node { Place::Node } else { Place::Outside },
                ..Self::default()
            },
            Some((namespace, name)) => Self {
                kind: TargetKind::Service,
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                ..Self::default()
            },
        }
    }

    /// Whether connections require mutual TLS.
    pub fn is_meshed(&self) -> bool {
        let mut all = self.endpoints.iter().chain(&self.draining);
        matches!(self.kind, TargetKind::Withheld | TargetKind::Refused)
            || all.any(|endpoint| endpoint.identity.is_some())
    }

    /// The endpoints for new requests: draining ones only while none is ready (KEP-1669).
    pub fn usable(&self) -> &[Arc<EndpointInfo>] {
        if self.endpoints.is_empty() {
            &self.draining
        } else {
            &self.endpoints
        }
    }

    /// Whether this is a Service without usable endpoints.
    pub fn is_without_endpoint(&self) -> bool {
        matches!(
            self.kind,
            TargetKind::Service | TargetKind::UnknownPort { .. }
        ) && self.usable().is_empty()
    }

    /// Whether an endpoint may follow soon, as for each Service at first.
    pub fn awaits_endpoint(&self) -> bool {
        self.kind == TargetKind::Service && self.usable().is_empty() && self.routes.is_none()
    }

    fn has_name_of(&self, other: &Self) -> bool {
        (&self.namespace, &self.name) == (&other.namespace, &other.name)
    }

    /// Adds the routes of a snapshot. If they are invalid, the valid ones of `before` stay in force;
    /// without any, HTTP requests fail.
    pub(super) fn set_routes(&mut self, routes: Option<Result<Routes, String>>, before: &Self) {
        self.routes = routes.map(|routes| match (routes, &before.routes) {
            (Ok(routes), _) => Arc::new(routes),
            (Err(_), Some(valid)) if self.has_name_of(before) && !valid.is_rejected() => {
                valid.clone()
            }
            (Err(reason), _) => Arc::new(Routes::rejected(reason)),
        });
    }

    /// Adds the policy of a snapshot. If it is invalid, the policy of `before` stays in force.
    pub(super) fn set_policy(
        &mut self,
        policy: Option<Result<BackendPolicy, String>>,
        before: &Self,
    ) {
        self.policy = match policy {
            Some(Ok(policy)) => Arc::new(policy),
            Some(Err(_)) if self.has_name_of(before) => before.policy.clone(),
            Some(Err(_)) | None => Arc::default(),
        };
    }

    /// Computes the table of the usable endpoints, if the policy needs it. Discovery does so before
    /// workers get the target: no request waits for it. The table is small if the usual one takes more
    /// than half of `max` without the rest of the target. The size of a usual table in `before` is
    /// allowed too: else keys would move with each change of other Services.
    pub fn with_table(mut self, before: &Self, max: usize) -> Self {
        let rest = self.endpoint_count() + self.weight_of_routes();
        let half = max.saturating_sub(rest) / 2;
        let max = if before.table.is_small() {
            half
        } else {
            before.table.weight().max(half)
        };
        let addresses = self.usable().iter().map(|endpoint| endpoint.address);
        self.table = match self.policy.balancing.algorithm {
            Algorithm::ConsistentHash(_) if self.kind == TargetKind::Service => {
                Arc::new(Table::new(addresses, max))
            }
            _ => Arc::default(),
        };
        self
    }

    /// Keeps at most so many endpoints.
    pub(super) fn reduce(&mut self, max_endpoints: usize) {
        (self.subset).reduce(&mut self.endpoints, &mut self.draining, max_endpoints);
    }

    /// Continues the session affinity of an earlier target of the same Service.
    pub(super) fn inherit_affinity(&mut self, before: &Self) {
        if self.has_name_of(before) && self.affinity == before.affinity {
            self.affinity.clone_from(&before.affinity);
        }
    }

    /// The number of endpoints that it holds.
    pub fn endpoint_count(&self) -> usize {
        self.endpoints.len() + self.draining.len()
    }

    /// The number of endpoints that it holds, with those that take as much memory as its table and
    /// its routes.
    pub fn weight(&self) -> usize {
        self.endpoint_count() + self.table.weight() + self.weight_of_routes()
    }

    /// The number of endpoints that take as much memory as its routes.
    pub fn weight_of_routes(&self) -> usize {
        self.routes.as_deref().map_or(0, weight_of)
    }

    /// The number of endpoints, if some of the Service are left out.
    pub fn part(&self) -> Option<usize> {
        (self.subset.is_partial()).then(|| self.endpoint_count())
    }
}

impl EndpointInfo {
    /// An address of which nothing is known: its own endpoint.
    pub fn bare(address: SocketAddr) -> Self {
        Self {
            address,
            zone: String::new(),
            pod: String::new(),
            identity: None,
            opaque: false,
            outside: true,
            node_unready: false,
            external: None,
        }
    }
}

/// The number of endpoints that take as much memory as these routes.
pub(super) fn weight_of(routes: &Routes) -> usize {
    routes.size() / BYTES_OF_ENDPOINT
}

/// Parses `appProtocol` of a Service port: names of Kubernetes, IANA and other meshes. `None` if it
/// declares nothing, or HTTP of any version.
fn parse_app_protocol(text: &str) -> Option<Protocol> {
    let text = text.trim().to_ascii_lowercase();
    match text.strip_prefix("kubernetes.io/").unwrap_or(&text) {
        "h2c" | "http2" | "http/2" | "grpc" => Some(Protocol::Http2),
        "ws" | "http1" | "http/1" | "http/1.1" => Some(Protocol::Http1),
        // TLS of the application.
        "https" | "wss" | "tls" | "ssl" | "grpcs" | "ldaps" | "imaps" | "pop3s" | "smtps"
        | "submissions" | "amqps" | "mqtts" | "secure-mqtt" => Some(Protocol::Opaque),
        "tcp" | "opaque" | "redis" | "mysql" | "mariadb" | "postgres" | "postgresql" | "mongo"
        | "mongodb" | "mssql" | "ms-sql-s" | "oracle" | "cassandra" | "memcache" | "memcached"
        | "kafka" | "nats" | "amqp" | "rabbitmq" | "mqtt" | "zookeeper" | "smtp" | "submission"
        | "imap" | "pop3" | "ftp" | "ssh" | "sftp" | "telnet" | "ldap" | "nntp" | "irc" | "vnc"
        | "rfb" | "rsync" => Some(Protocol::Opaque),
        _ => None,
    }
}

/// Converts a snapshot of `resource`, without its routes and its policy. Reports and skips
/// invalid endpoints. Fails if the snapshot is unusable.
pub(super) fn from_snapshot(
    resource: &Resource,
    snapshot: Snapshot,
    subset: Subset,
    report: &mut dyn FnMut(String),
) -> Result<Target, String> {
    let kind = snapshot.kind();
    let app_protocol = parse_app_protocol(&snapshot.app_protocol);
    let Snapshot {
        namespace,
        name,
        endpoints,
        unknown_port,
        ports,
        draining,
        session_affinity_seconds,
        max_ports,
        ..
    } = snapshot;
    let mut target = Target {
        namespace,
        name,
        ..Target::default()
    };
    match kind {
        snapshot::Kind::Service if unknown_port => {
            let ports = ports.into_iter().filter_map(|port| port.try_into().ok());
            target.kind = TargetKind::UnknownPort {
                ports: ports.collect(),
                max_ports,
            };
            return Ok(target);
        }
        snapshot::Kind::Service => {
            target.kind = TargetKind::Service;
            target.endpoints = parse_endpoints(endpoints, report);
            target.draining = parse_endpoints(draining, report);
            target.subset = subset;
            let timeout = Duration::from_secs(session_affinity_seconds.into());
            target.affinity = (!timeout.is_zero()).then(|| Arc::new(Affinity::new(timeout)));
        }
        snapshot::Kind::Pod => {
            target.kind = TargetKind::Pod;
            let mut endpoints = endpoints.into_iter();
            let endpoint = endpoints.find_map(|endpoint| parse_endpoint(endpoint, report));
            let Some(endpoint) = endpoint else {
                let Target {
                    namespace, name, ..
                } = target;
                return Err(format!("pod {namespace}/{name} without an endpoint"));
            };
            target.endpoints = vec![endpoint_of_pod(endpoint, resource.address())?];
        }
        snapshot::Kind::Unspecified => {
            return Err("snapshot of neither a service nor a pod".to_owned());
        }
    }
    target.app_protocol = app_protocol;
    Ok(target)
}

/// The target after a delta. Reports and skips invalid parts: one invalid part does not prevent a
/// removal. Fails if no delta applies to this kind of target.
pub(super) fn with_delta(
    before: &Target,
    delta: Delta,
    max_endpoints: usize,
    report: &mut dyn FnMut(String),
) -> Result<Target, String> {
    let mut target = before.clone();
    match target.kind {
        TargetKind::Service => target.apply(delta, max_endpoints, report),
        TargetKind::Pod => {
            if !delta.removed.is_empty() {
                return Err("delta removes the only endpoint of a pod".to_owned());
            }
            let upserted = delta.upserted.into_iter();
            let changed = upserted.filter_map(|endpoint| parse_endpoint(endpoint, report));
            if let Some(endpoint) = changed.last() {
                let known = target.endpoints.first().map(|known| known.address);
                target.endpoints = vec![endpoint_of_pod(endpoint, known)?];
            }
        }
        _ => return Err("delta before a snapshot".to_owned()),
    }
    Ok(target)
}

impl Target {
    fn apply(&mut self, mut delta: Delta, max_endpoints: usize, report: &mut dyn FnMut(String)) {
        let Self {
            endpoints,
            draining,
            subset,
            ..
        } = self;
        for address in delta.removed {
            match address.parse::<SocketAddr>() {
                // An unknown endpoint is already removed.
                Ok(address) => {
                    remove(endpoints, address);
                    remove(draining, address);
                }
                Err(_) => report(format!(
                    "removed endpoint {address:?}: expected ADDRESS:PORT"
                )),
            }
        }
        subset.retain(&mut delta.upserted);
        subset.retain(&mut delta.draining);
        for endpoint in delta.upserted {
            if let Some(endpoint) = parse_endpoint(endpoint, report) {
                remove(draining, endpoint.address);
                upsert(endpoints, endpoint);
            }
        }
        for endpoint in delta.draining {
            if let Some(endpoint) = parse_endpoint(endpoint, report) {
                remove(endpoints, endpoint.address);
                upsert(draining, endpoint);
            }
        }
        // A Service that grows slowly is not reduced at each change.
        if self.endpoint_count() > max_endpoints.saturating_add(max_endpoints / 2) {
            self.reduce(max_endpoints);
        }
    }
}

/// The endpoint of a pod, which has the address of the destination.
fn endpoint_of_pod(
    endpoint: Arc<EndpointInfo>,
    expected: Option<SocketAddr>,
) -> Result<Arc<EndpointInfo>, String> {
    if expected == Some(canonical(endpoint.address)) {
        Ok(endpoint)
    } else {
        Err(format!(
            "pod endpoint {} differs from the destination",
            endpoint.address
        ))
    }
}

fn remove(endpoints: &mut Endpoints, address: SocketAddr) {
    if let Ok(at) = endpoints.binary_search_by_key(&address, |known| known.address) {
        endpoints.remove(at);
    }
}

fn upsert(endpoints: &mut Endpoints, endpoint: Arc<EndpointInfo>) {
    match endpoints.binary_search_by_key(&endpoint.address, |known| known.address) {
        Ok(at) => endpoints[at] = endpoint,
        Err(at) => endpoints.insert(at, endpoint),
    }
}

/// The canonical form of an address: IPv4-mapped IPv6 addresses as IPv4, without flow label and
/// scope.
pub(super) fn canonical(address: SocketAddr) -> SocketAddr {
    let ip: IpAddr = address.ip().to_canonical();
    SocketAddr::new(ip, address.port())
}

/// Sorts endpoints. The last of several with one address wins, as in a delta.
fn parse_endpoints(all: Vec<Endpoint>, report: &mut dyn FnMut(String)) -> Endpoints {
    let parse = |endpoint| parse_endpoint(endpoint, report);
    let mut endpoints: Endpoints = all.into_iter().rev().filter_map(parse).collect();
    endpoints.sort_by_key(|endpoint| endpoint.address);
    endpoints.dedup_by_key(|endpoint| endpoint.address);
    endpoints
}

fn parse_endpoint(endpoint: Endpoint, report: &mut dyn FnMut(String)) -> Option<Arc<EndpointInfo>> {
    let Ok(address) = endpoint.address.parse::<SocketAddr>() else {
        report(format!(
            "endpoint {:?}: expected ADDRESS:PORT",
            endpoint.address
        ));
        return None;
    };
    if address.port() == 0 || address.ip().is_unspecified() || address.ip().is_multicast() {
        report(format!(
            "endpoint {address}: expected a unicast address and a port"
        ));
        return None;
    }
    let pod = if endpoint.pod_name.is_empty() {
        String::new()
    } else {
        format!("{}/{}", endpoint.pod_namespace, endpoint.pod_name)
    };
    let identity = match endpoint.identity.as_str() {
        "" => None,
        // Without a valid identity the endpoint cannot be authenticated: it must not be used.
        text => match text.parse() {
            Ok(identity) => Some(identity),
            Err(error) => {
                report(format!(
                    "endpoint {address}: invalid identity {text:?}: {error}"
                ));
                return None;
            }
        },
    };
    Some(Arc::new(EndpointInfo {
        address,
        zone: endpoint.zone,
        pod,
        identity,
        opaque: endpoint.opaque,
        outside: endpoint.outside,
        node_unready: endpoint.node_unready,
        external: None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_app_protocol() {
        let cases = [
            (
                None,
                &[
                    "",
                    "http",
                    "HTTP",
                    "kubernetes.io/http",
                    "grpc-web",
                    "com.example/own",
                    "quic",
                ][..],
            ),
            (
                Some(Protocol::Http1),
                &["kubernetes.io/ws", "ws", "http/1.1"],
            ),
            (
                Some(Protocol::Http2),
                &["kubernetes.io/h2c", "h2c", "grpc", "gRPC", "http2", " h2c "],
            ),
            (
                Some(Protocol::Opaque),
                &[
                    "tcp",
                    "redis",
                    "mysql",
                    "postgres",
                    "postgresql",
                    "mongo",
                    "smtp",
                    "https",
                    "TLS",
                    "kubernetes.io/wss",
                ],
            ),
        ];
        for (expected, texts) in cases {
            for text in texts {
                assert_eq!(parse_app_protocol(text), expected, "{text:?}");
            }
        }
    }
}
