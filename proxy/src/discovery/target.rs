//! Targets of destinations, and their conversion from the controller's messages. Pure.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_proto::Identity;
use diy_mesh_proto::mesh::v1::snapshot::Kind;
use diy_mesh_proto::mesh::v1::{Delta, Endpoint, Snapshot};

use super::affinity::Affinity;
use super::resource::Resource;
use super::subset::Subset;
use crate::balance::maglev::Table;
use crate::balance::policy::{Algorithm, BackendPolicy};
use crate::detect::Protocol;
use crate::route::Routes;

/// The bytes of routes that count as an endpoint: half of what that takes, because the allocator adds
/// to them, and workers to their expressions.
pub(super) const BYTES_OF_ENDPOINT: usize = 400;

/// Target of a destination: where its connections may go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Neither a Service nor a pod, or no response yet: connections go to the original destination.
    Unknown,
    /// Formerly meshed, or possibly, and the controller has not sent a current target: unreachable.
    Withheld,
    /// Over the limit of subscriptions: unreachable, because the destination may be meshed.
    Refused,
    /// A cluster IP of a Service: balanced over its endpoints.
    Service(ServiceTarget),
    /// An address of a Service that does not have the port: unreachable.
    UnknownPort(UnknownPort),
    /// An IP of a pod: connections go there.
    Pod(PodTarget),
}

/// A port of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceTarget {
    /// The Service's namespace.
    pub namespace: String,
    /// The Service's name.
    pub name: String,
    /// The protocol of the port that the Service declares. None: it is detected.
    pub app_protocol: Option<Protocol>,
    /// Ready endpoints, sorted by address, without duplicates.
    pub endpoints: Endpoints,
    /// Endpoints that terminate and still serve, sorted by address, without duplicates.
    pub draining: Endpoints,
    /// The endpoint that requests keep, if the Service has session affinity.
    pub affinity: Option<Arc<Affinity>>,
    /// The routes of HTTP requests, if there are any.
    pub routes: Option<Arc<Routes>>,
    /// How the endpoints are used.
    pub policy: Arc<BackendPolicy>,
    /// Of the usable endpoints, for consistent hashes. Workers share it.
    pub table: Arc<Table>,
    /// The endpoints that the proxy keeps.
    pub subset: Subset,
}

/// Endpoints in the order of their addresses.
type Endpoints = Vec<Arc<EndpointInfo>>;

impl ServiceTarget {
    /// The endpoints for new requests: draining ones only while none is ready (KEP-1669).
    pub fn usable(&self) -> &[Arc<EndpointInfo>] {
        match self.endpoints.is_empty() {
            true => &self.draining,
            false => &self.endpoints,
        }
    }
}

/// A Service without the port of the destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownPort {
    /// The Service's namespace.
    pub namespace: String,
    /// The Service's name.
    pub name: String,
    /// The TCP ports that it has.
    pub ports: Vec<u16>,
    /// Not 0: it has the port, but not among these first TCP ports that the mesh supports.
    pub max_ports: u32,
}

/// A port of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodTarget {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The protocol of the port that the Service declares. None: it is detected.
    pub app_protocol: Option<Protocol>,
    /// The only endpoint.
    pub endpoint: Arc<EndpointInfo>,
    /// The routes of HTTP requests to a headless Service of the pod. The pod stays the backend.
    pub routes: Option<Arc<Routes>>,
    /// How the pod is used: the policy of the headless Service.
    pub policy: Arc<BackendPolicy>,
}

/// One endpoint. Each announcement is a new `Arc`, even without changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointInfo {
    /// Address and port.
    pub address: SocketAddr,
    /// Topology zone; empty if unknown.
    pub zone: String,
    /// Pod as "namespace/name"; empty if the endpoint is not a pod.
    pub pod: String,
    /// Expected SPIFFE ID; `None` if the endpoint is not meshed.
    pub identity: Option<Identity>,
    /// Whether the pod declares the port opaque.
    pub opaque: bool,
}

impl Target {
    /// Whether connections require mutual TLS.
    pub fn is_meshed(&self) -> bool {
        match self {
            Self::Unknown | Self::UnknownPort(_) => false,
            Self::Withheld | Self::Refused => true,
            Self::Service(service) => {
                let mut all = service.endpoints.iter().chain(&service.draining);
                all.any(|endpoint| endpoint.identity.is_some())
            }
            Self::Pod(pod) => pod.endpoint.identity.is_some(),
        }
    }

    /// The target of a resource that the controller does not know.
    pub(super) fn unknown(resource: &Resource) -> Self {
        match resource.service() {
            None => Self::Unknown,
            Some((namespace, name)) => Self::Service(ServiceTarget {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                ..ServiceTarget::default()
            }),
        }
    }

    /// The target with the routes of a snapshot. If they are invalid, the valid ones of `before`
    /// stay in force; without any, HTTP requests fail.
    pub(super) fn with_routes(
        mut self,
        routes: Option<Result<Routes, String>>,
        before: &Self,
    ) -> Self {
        let routes = routes.map(|routes| match (routes, before.routes()) {
            (Ok(routes), _) => Arc::new(routes),
            (Err(_), Some(valid)) if self.name() == before.name() && !valid.is_rejected() => {
                valid.clone()
            }
            (Err(reason), _) => Arc::new(Routes::rejected(reason)),
        });
        match &mut self {
            Self::Service(service) => service.routes = routes,
            Self::Pod(pod) => pod.routes = routes,
            _ => {}
        }
        self
    }

    /// The target with the policy of a snapshot. If it is invalid, that of `before` stays in force.
    pub(super) fn with_policy(
        mut self,
        policy: Option<Result<BackendPolicy, String>>,
        before: &Self,
    ) -> Self {
        let policy = match policy {
            Some(Ok(policy)) => Arc::new(policy),
            Some(Err(_)) if self.name() == before.name() => before.policy(),
            Some(Err(_)) | None => Arc::default(),
        };
        match &mut self {
            Self::Service(service) => service.policy = policy,
            Self::Pod(pod) => pod.policy = policy,
            _ => {}
        }
        self
    }

    /// Computes the table of the usable endpoints, if the policy needs it. Discovery does so before
    /// workers get the target: no request waits for it. The table is small if the usual one takes more
    /// than half of what the rest leaves of `max`, unless that of `before` takes as much: keys would
    /// move with each change of other Services.
    pub fn with_table(mut self, before: &Self, max: usize) -> Self {
        let left = max.saturating_sub(self.endpoints() + self.weight_of_routes());
        let left = match before {
            Self::Service(before) if !before.table.is_small() => {
                before.table.weight().max(left / 2)
            }
            _ => left / 2,
        };
        if let Self::Service(service) = &mut self {
            let is_hashed = matches!(
                service.policy.balancing.algorithm,
                Algorithm::ConsistentHash(_)
            );
            let addresses = service.usable().iter().map(|endpoint| endpoint.address);
            service.table = match is_hashed {
                true => Arc::new(Table::new(addresses, left)),
                false => Arc::default(),
            };
        }
        self
    }

    /// Whether its table is smaller than usual.
    pub fn has_small_table(&self) -> bool {
        matches!(self, Self::Service(service) if service.table.is_small())
    }

    /// How the endpoints are used.
    pub fn policy(&self) -> Arc<BackendPolicy> {
        match self {
            Self::Service(service) => service.policy.clone(),
            Self::Pod(pod) => pod.policy.clone(),
            _ => Arc::default(),
        }
    }

    /// The routes of HTTP requests.
    pub fn routes(&self) -> Option<&Arc<Routes>> {
        match self {
            Self::Service(service) => service.routes.as_ref(),
            Self::Pod(pod) => pod.routes.as_ref(),
            _ => None,
        }
    }

    /// Namespace and name of the Service or the pod.
    pub fn name(&self) -> Option<(&str, &str)> {
        match self {
            Self::Service(service) => Some((&service.namespace, &service.name)),
            Self::UnknownPort(unknown) => Some((&unknown.namespace, &unknown.name)),
            Self::Pod(pod) => Some((&pod.namespace, &pod.name)),
            Self::Unknown | Self::Withheld | Self::Refused => None,
        }
    }

    /// Keeps at most so many endpoints.
    pub fn reduce(&mut self, max_endpoints: usize) {
        if let Self::Service(service) = self {
            let ServiceTarget {
                endpoints,
                draining,
                subset,
                ..
            } = service;
            subset.reduce(endpoints, draining, max_endpoints);
        }
    }

    /// Continues the session affinity of an earlier target of the same Service.
    pub fn inherit_affinity(&mut self, before: &Self) {
        if let (Self::Service(service), Self::Service(before)) = (self, before)
            && (&service.namespace, &service.name) == (&before.namespace, &before.name)
            && service.affinity == before.affinity
        {
            service.affinity.clone_from(&before.affinity);
        }
    }

    /// The number of endpoints that it holds.
    pub fn endpoints(&self) -> usize {
        match self {
            Self::Service(service) => service.endpoints.len() + service.draining.len(),
            _ => 0,
        }
    }

    /// The number of endpoints that it holds, with those that take as much memory as its table and
    /// its routes.
    pub fn weight(&self) -> usize {
        let table = match self {
            Self::Service(service) => service.table.weight(),
            _ => 0,
        };
        self.endpoints() + table + self.weight_of_routes()
    }

    /// The number of endpoints that take as much memory as its routes.
    pub fn weight_of_routes(&self) -> usize {
        self.routes().map_or(0, |routes| weight_of(routes))
    }

    /// The number of endpoints, if some of the Service are left out.
    pub fn part(&self) -> Option<usize> {
        let is_part = matches!(self, Self::Service(service) if service.subset.is_partial());
        is_part.then(|| self.endpoints())
    }

    /// Whether this is a Service without usable endpoints.
    pub fn is_without_endpoint(&self) -> bool {
        match self {
            Self::Service(service) => service.usable().is_empty(),
            target => matches!(target, Self::UnknownPort(_)),
        }
    }

    /// Whether an endpoint may follow soon, as for each Service at first.
    pub fn awaits_endpoint(&self) -> bool {
        matches!(self, Self::Service(service)
            if service.usable().is_empty() && service.routes.is_none())
    }
}

impl EndpointInfo {
    /// An endpoint without metadata.
    pub fn bare(address: SocketAddr) -> Self {
        Self {
            address,
            zone: String::new(),
            pod: String::new(),
            identity: None,
            opaque: false,
        }
    }
}

/// The number of endpoints that take as much memory as these routes.
pub(super) fn weight_of(routes: &Routes) -> usize {
    routes.size() / BYTES_OF_ENDPOINT
}

/// Parses `appProtocol` of a Service port: names of Kubernetes, IANA and other meshes. None if it
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
    match kind {
        Kind::Service if unknown_port => Ok(Target::UnknownPort(UnknownPort {
            namespace,
            name,
            ports: ports
                .into_iter()
                .filter_map(|port| port.try_into().ok())
                .collect(),
            max_ports,
        })),
        Kind::Service => {
            let endpoints = parse_endpoints(endpoints, report);
            let draining = parse_endpoints(draining, report);
            Ok(Target::Service(ServiceTarget {
                namespace,
                name,
                app_protocol,
                endpoints,
                draining,
                affinity: (session_affinity_seconds > 0).then(|| {
                    let timeout = Duration::from_secs(session_affinity_seconds.into());
                    Arc::new(Affinity::new(timeout))
                }),
                routes: None,
                policy: Arc::default(),
                table: Arc::default(),
                subset,
            }))
        }
        Kind::Pod => {
            let endpoint = endpoints
                .into_iter()
                .filter_map(|endpoint| parse_endpoint(endpoint, report))
                .next();
            let endpoint =
                endpoint.ok_or_else(|| format!("pod {namespace}/{name} without an endpoint"))?;
            if Resource::from(canonical(endpoint.address)) != *resource {
                return Err(format!(
                    "pod endpoint {} differs from the destination",
                    endpoint.address
                ));
            }
            Ok(Target::Pod(PodTarget {
                namespace,
                name,
                app_protocol,
                endpoint,
                routes: None,
                policy: Arc::default(),
            }))
        }
        Kind::Unspecified => Err("snapshot of neither a service nor a pod".to_owned()),
    }
}

impl ServiceTarget {
    /// Applies a delta. Reports and skips invalid parts: one invalid part does not prevent a
    /// removal.
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
        if endpoints.len() + draining.len() > max_endpoints.saturating_add(max_endpoints / 2) {
            subset.reduce(endpoints, draining, max_endpoints);
        }
    }
}

/// Applies a delta to a target. Fails if the delta does not apply to this kind of target.
pub(super) fn with_delta(
    before: &Target,
    delta: Delta,
    max_endpoints: usize,
    report: &mut dyn FnMut(String),
) -> Result<Target, String> {
    match before {
        Target::Service(service) => {
            let mut service = service.clone();
            service.apply(delta, max_endpoints, report);
            Ok(Target::Service(service))
        }
        Target::Pod(pod) => {
            if !delta.removed.is_empty() {
                return Err("delta removes the only endpoint of a pod".to_owned());
            }
            let changed = delta
                .upserted
                .into_iter()
                .filter_map(|endpoint| parse_endpoint(endpoint, report))
                .last();
            match changed {
                Some(endpoint) if endpoint.address != pod.endpoint.address => Err(format!(
                    "pod endpoint {} differs from the destination",
                    endpoint.address
                )),
                Some(endpoint) => Ok(Target::Pod(PodTarget {
                    endpoint,
                    ..pod.clone()
                })),
                None => Ok(before.clone()),
            }
        }
        Target::Unknown | Target::UnknownPort(_) | Target::Withheld | Target::Refused => {
            Err("delta before a snapshot".to_owned())
        }
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
