//! What discovery says of a destination, as values of our own, and the reading of the controller's messages into them.
//! Pure: no stream, no clock. Together with `control.rs` the only place that sees generated types.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use diy_mesh_proto::Identity;
use diy_mesh_proto::mesh::v1::snapshot::Kind;
use diy_mesh_proto::mesh::v1::{Delta, Endpoint, Snapshot};

/// Where a connection to some destination may go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Neither a service's nor a pod's address, or nobody could be asked: it goes where it was going.
    Unknown,
    /// It led to meshed pods when it was last heard of, or may have, and nobody has said anything of it since: it is not reached.
    Withheld,
    /// Too many destinations are in use to ask about this one: it is not reached, for it may lead to meshed pods.
    Refused,
    /// A Service by cluster IP: balanced over its endpoints.
    Service(ServiceTarget),
    /// A pod by its own IP: reached as it is.
    Pod(PodTarget),
}

impl Target {
    /// Whether any connection to it has to be mutual TLS.
    pub fn is_meshed(&self) -> bool {
        match self {
            Self::Unknown => false,
            Self::Withheld | Self::Refused => true,
            Self::Service(service) => service
                .endpoints
                .iter()
                .any(|endpoint| endpoint.identity.is_some()),
            Self::Pod(pod) => pod.endpoint.identity.is_some(),
        }
    }
}

/// A port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceTarget {
    /// The Service's namespace.
    pub namespace: String,
    /// The Service's name.
    pub name: String,
    /// What the port speaks.
    pub app_protocol: AppProtocol,
    /// Those that may take new connections, in the order of their addresses, each address once.
    pub endpoints: Vec<Arc<EndpointInfo>>,
}

/// A port of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodTarget {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// What the port speaks.
    pub app_protocol: AppProtocol,
    /// The pod.
    pub endpoint: Arc<EndpointInfo>,
}

/// What a port speaks, where its Service says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AppProtocol {
    /// Nobody said, or no more than "HTTP": the first bytes tell.
    #[default]
    Detect,
    /// HTTP/1.
    Http1,
    /// HTTP/2 in cleartext, with prior knowledge.
    Http2,
    /// Bytes that the proxy does not read: the server may speak first.
    Opaque,
}

/// One endpoint, as announced. A new announcement is a new `Arc`, though nothing in it may differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointInfo {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its zone; empty where it has none.
    pub zone: String,
    /// The pod, as namespace/name; empty where the endpoint is no pod.
    pub pod: String,
    /// The SPIFFE ID to expect where it is meshed.
    pub identity: Option<Identity>,
    /// Whether the pod declares the port opaque.
    pub opaque: bool,
}

impl Target {
    /// A Service that nothing stands behind now.
    pub fn is_without_endpoint(&self) -> bool {
        matches!(self, Self::Service(service) if service.endpoints.is_empty())
    }
}

impl EndpointInfo {
    /// An endpoint of which no more than its address is known.
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

impl AppProtocol {
    /// Reads a Service port's appProtocol: Kubernetes' own names, IANA's, and those that other meshes taught people.
    pub fn parse(text: &str) -> Self {
        let text = text.trim().to_ascii_lowercase();
        match text.strip_prefix("kubernetes.io/").unwrap_or(&text) {
            "h2c" | "http2" | "http/2" | "grpc" => Self::Http2,
            "ws" | "http1" | "http/1" | "http/1.1" => Self::Http1,
            // TLS of the app's own: there is nothing to read in it.
            "https" | "wss" | "tls" | "ssl" | "grpcs" | "ldaps" | "imaps" | "pop3s" | "smtps"
            | "submissions" | "amqps" | "mqtts" | "secure-mqtt" => Self::Opaque,
            "tcp" | "opaque" | "redis" | "mysql" | "mariadb" | "postgres" | "postgresql"
            | "mongo" | "mongodb" | "mssql" | "ms-sql-s" | "oracle" | "cassandra" | "memcache"
            | "memcached" | "kafka" | "nats" | "amqp" | "rabbitmq" | "mqtt" | "zookeeper"
            | "smtp" | "submission" | "imap" | "pop3" | "ftp" | "ssh" | "sftp" | "telnet"
            | "ldap" | "nntp" | "irc" | "vnc" | "rfb" | "rsync" => Self::Opaque,
            _ => Self::Detect,
        }
    }
}

/// Reads a snapshot about `destination`. What is wrong with single endpoints goes to `report`, and they are left out; `Err` where
/// nothing is left to go by.
pub(super) fn from_snapshot(
    destination: SocketAddr,
    snapshot: Snapshot,
    report: &mut dyn FnMut(String),
) -> Result<Target, String> {
    let kind = snapshot.kind();
    let app_protocol = AppProtocol::parse(&snapshot.app_protocol);
    let Snapshot {
        namespace,
        name,
        endpoints,
        ..
    } = snapshot;
    match kind {
        Kind::Service => {
            let mut endpoints: Vec<_> = endpoints
                .into_iter()
                .filter_map(|endpoint| read_or_report(endpoint, report))
                .collect();
            // Of two that say the same address the later one counts, as it would in a delta.
            endpoints.reverse();
            endpoints.sort_by_key(|endpoint| endpoint.address);
            endpoints.dedup_by_key(|endpoint| endpoint.address);
            Ok(Target::Service(ServiceTarget {
                namespace,
                name,
                app_protocol,
                endpoints,
            }))
        }
        Kind::Pod => {
            let endpoint = endpoints
                .into_iter()
                .filter_map(|endpoint| read_or_report(endpoint, report))
                .next();
            let endpoint = endpoint
                .ok_or_else(|| format!("a pod, {namespace}/{name}, without its endpoint"))?;
            if canonical(endpoint.address) != destination {
                return Err(format!("a pod's endpoint elsewhere: {}", endpoint.address));
            }
            Ok(Target::Pod(PodTarget {
                namespace,
                name,
                app_protocol,
                endpoint,
            }))
        }
        Kind::Unspecified => Err("a snapshot that says neither service nor pod".to_owned()),
    }
}

/// Applies a delta to the state before it. `Err` where that state is none that it can apply to. What is wrong with single
/// endpoints goes to `report`, the rest counts: a removal is never missed because of its neighbour.
pub(super) fn with_delta(
    before: &Target,
    delta: Delta,
    report: &mut dyn FnMut(String),
) -> Result<Target, String> {
    match before {
        Target::Service(service) => {
            let mut service = service.clone();
            for address in delta.removed {
                match address.parse::<SocketAddr>() {
                    // One that is not there has been removed already.
                    Ok(address) => {
                        let at = service
                            .endpoints
                            .binary_search_by_key(&address, |known| known.address);
                        let _ = at.map(|at| service.endpoints.remove(at));
                    }
                    Err(_) => report(format!("removes {address:?}, which is no address")),
                }
            }
            for endpoint in delta
                .upserted
                .into_iter()
                .filter_map(|endpoint| read_or_report(endpoint, report))
            {
                match service
                    .endpoints
                    .binary_search_by_key(&endpoint.address, |known| known.address)
                {
                    Ok(at) => service.endpoints[at] = endpoint,
                    Err(at) => service.endpoints.insert(at, endpoint),
                }
            }
            Ok(Target::Service(service))
        }
        Target::Pod(pod) => {
            if !delta.removed.is_empty() {
                return Err("a delta that removes a pod's only endpoint".to_owned());
            }
            let changed = delta
                .upserted
                .into_iter()
                .filter_map(|endpoint| read_or_report(endpoint, report))
                .last();
            match changed {
                Some(endpoint) if endpoint.address != pod.endpoint.address => {
                    Err(format!("a pod's endpoint elsewhere: {}", endpoint.address))
                }
                Some(endpoint) => Ok(Target::Pod(PodTarget {
                    endpoint,
                    ..pod.clone()
                })),
                None => Ok(before.clone()),
            }
        }
        Target::Unknown | Target::Withheld | Target::Refused => {
            Err("a delta before any snapshot".to_owned())
        }
    }
}

/// The one spelling of an address: IPv4 as IPv4, without what only this host's kernel cares for. Two connections to the same
/// destination share one subscription.
pub(super) fn canonical(address: SocketAddr) -> SocketAddr {
    let ip: IpAddr = address.ip().to_canonical();
    SocketAddr::new(ip, address.port())
}

fn read_or_report(endpoint: Endpoint, report: &mut dyn FnMut(String)) -> Option<Arc<EndpointInfo>> {
    let Ok(address) = endpoint.address.parse::<SocketAddr>() else {
        report(format!(
            "has an endpoint {:?}, which is no address",
            endpoint.address
        ));
        return None;
    };
    if address.port() == 0 || address.ip().is_unspecified() || address.ip().is_multicast() {
        report(format!(
            "has an endpoint {address}, which nobody can connect to"
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
        // Whom to expect can't be known, so nobody can prove to be it: better not to go there.
        text => match text.parse() {
            Ok(identity) => Some(identity),
            Err(problem) => {
                report(format!(
                    "has an endpoint {address} of the identity {text:?}: {problem}"
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
    fn app_protocols_are_read_as_people_write_them() {
        let cases = [
            (
                AppProtocol::Detect,
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
            (AppProtocol::Http1, &["kubernetes.io/ws", "ws", "http/1.1"]),
            (
                AppProtocol::Http2,
                &["kubernetes.io/h2c", "h2c", "grpc", "gRPC", "http2", " h2c "],
            ),
            (
                AppProtocol::Opaque,
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
                assert_eq!(AppProtocol::parse(text), expected, "{text:?}");
            }
        }
    }
}
