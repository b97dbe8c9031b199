//! The state in force of one proxy, the response to `/state` at its admin port. This JSON form is the
//! format: the reference links here for its members. It contains no secrets, and its lists are cut.

use serde::{Deserialize, Serialize};

/// The state of a proxy.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// The version of the program.
    pub version: String,
    /// Namespace and name.
    pub pod: String,
    /// The certificate, or `None` if the proxy has no certificate.
    pub certificate: Option<Certificate>,
    /// Why the latest attempt to get one failed, if it did.
    #[serde(default)]
    pub certificate_failure: Option<String>,
    /// The state of the discovery stream, or `None` if discovery has not responded in time.
    pub discovery: Option<Discovery>,
    /// The inbound configuration, or `None` if discovery has not responded in time.
    pub inbound: Option<Inbound>,
    /// The kubelet's probes that failed in the last minute: which one, how often, and why.
    #[serde(default)]
    pub failed_probes: Vec<String>,
    /// In order.
    pub workers: Vec<Worker>,
    /// The number of workers that have not responded in time.
    pub silent_workers: usize,
}

/// The certificate, without its key.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Certificate {
    /// SPIFFE ID.
    pub identity: String,
    /// In RFC 3339.
    pub not_after: String,
    /// The number of roots that verify peers.
    pub trust_roots: usize,
    /// Their version.
    pub roots_version: String,
}

/// The discovery stream.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Discovery {
    /// The stream is open.
    pub connected: bool,
    /// The time since the latest message, or `None` before the first one.
    pub message_age_ms: Option<f64>,
    /// Destinations and backends.
    pub subscriptions: usize,
    /// Destinations for which there was no room, since the start.
    pub refused: u64,
    /// Why the proxy is not ready.
    pub unready: Option<String>,
}

/// The inbound configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Inbound {
    /// Nothing has arrived from the controller yet: no client may call.
    pub pending: bool,
    /// The version of the resource `self`. Empty without the resource, and if parts come from several
    /// versions.
    pub version: String,
    /// The resource version of the latest event of each kind.
    pub position: String,
    /// Only authenticated peers are accepted.
    pub strict: bool,
    /// As in the annotation of the pod.
    pub opaque_ports: String,
    /// CONNECT requests are forwarded to the application.
    pub allow_connect: bool,
    /// The zone of the pod's node. Empty: unknown.
    pub zone: String,
    /// The AuthorizationPolicies about calls to the application. `None` permits all callers.
    pub authorization: Option<Cut<String>>,
    /// The AuthorizationPolicies about the application's calls to outside of the cluster. `None`
    /// permits all destinations.
    pub egress: Option<Cut<String>>,
    /// The limits of its requests: the object, the name there, and what it counts together.
    pub rate_limits: Cut<String>,
}

/// One worker thread.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Worker {
    /// Open connections, of both directions.
    pub connections: usize,
    /// Their limit.
    pub max_connections: usize,
    /// The memory that they hold.
    pub bytes: usize,
    /// Its limit.
    pub max_bytes: usize,
    /// In the order of their names.
    pub destinations: Cut<Destination>,
}

/// A backend, with its endpoints.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Destination {
    /// It is the pod's own application.
    pub inbound: bool,
    /// `ADDRESS:PORT`, `NAMESPACE/SERVICE:PORT` or a host outside of the cluster.
    pub name: String,
    /// Namespace and name of the Service or the pod, else the name.
    pub service: String,
    /// The kind of the destination: `service`, `pod`, `unknown`, ...
    pub kind: String,
    /// The declared protocol, `http1`, `http2` or `opaque`, or `None` if the proxy detects it.
    pub protocol: Option<String>,
    /// A digest of the state in force.
    pub version: String,
    /// The resource version of the latest event of each kind.
    pub position: String,
    /// The TrafficPolicy. Empty: the defaults.
    pub policy: String,
    /// The names of the routes.
    pub routes: Cut<String>,
    /// Why HTTP requests fail: the routes of the controller are invalid.
    pub rejected_routes: Option<String>,
    /// The circuit is open for so long. 0: the next request decides.
    pub circuit_open_ms: Option<f64>,
    /// Those that are not ready first, then in the order of their addresses.
    pub endpoints: Cut<Endpoint>,
}

/// An endpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Address and port.
    pub address: String,
    /// Namespace and name. Empty: it is no pod.
    pub pod: String,
    /// Empty: unknown.
    pub zone: String,
    /// The identity that the endpoint must prove, or `None` if it is not meshed.
    pub identity: Option<String>,
    /// The pod declares the port opaque.
    pub opaque: bool,
    /// Requests, and opaque connections.
    pub in_flight: u32,
    /// The mean latency of the latest responses, or `None` if there are too few.
    pub latency_ms: Option<f64>,
    /// Why requests avoid it: `refused`, `consecutive`, `percent` or `latency`.
    pub ejected: Option<String>,
    /// For how long they avoid it. 0: the next request decides.
    pub ejected_ms: Option<f64>,
    /// It is overloaded, and gets no retries for so long.
    pub no_retry_ms: Option<f64>,
    /// Its connections, which backends with the same limits share.
    pub pool: Pool,
}

/// The connections to an endpoint, and the worker's share of its limits. A limit of `None` is
/// unlimited.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pool {
    /// HTTP/1 with an exchange. Opaque ones, if they are limited.
    pub connections: u32,
    /// Their limit.
    pub max_connections: Option<u32>,
    /// HTTP/1 without an exchange.
    pub idle: usize,
    /// HTTP/2.
    pub http2_connections: usize,
    /// Their limit, or `None` for the application, where each caller has its own limit.
    pub max_http2_connections: Option<u32>,
    /// The limit of requests in flight.
    pub max_requests: Option<u32>,
    /// Requests that wait for a limit.
    pub waiting: usize,
}

/// The first values of a list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cut<T> {
    /// In order.
    pub items: Vec<T>,
    /// The number of further ones.
    pub omitted: usize,
}

impl<T> Default for Cut<T> {
    fn default() -> Self {
        Self {
            items: Vec::new(),
            omitted: 0,
        }
    }
}

impl<T: Serialize> Cut<T> {
    /// The first values, as long as their JSON fits `budget`, which it takes. `render` makes a value
    /// whose own lists get a part of what is left.
    pub fn of<S>(
        sources: impl ExactSizeIterator<Item = S>,
        budget: &mut usize,
        render: impl Fn(S, usize) -> T,
    ) -> Self {
        let (count, mut items) = (sources.len(), Vec::new());
        for source in sources {
            let item = render(source, *budget / 4);
            let length = serde_json::to_vec(&item).map_or(usize::MAX, |json| json.len() + 1);
            let Some(rest) = budget.checked_sub(length) else {
                break;
            };
            *budget = rest;
            items.push(item);
        }
        Self {
            omitted: count - items.len(),
            items,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_is_cut_at_its_budget_and_says_what_is_left_out() {
        let texts = ["one", "\n\n\n\n", "three"];
        for (bytes, kept, rest) in [(100, 3, 75), (24, 2, 7), (17, 2, 0), (16, 1, 10), (0, 0, 0)] {
            let mut budget = bytes;
            let cut = Cut::of(texts.iter(), &mut budget, |text, _| (*text).to_owned());
            assert_eq!(cut.items, texts[..kept], "{bytes} bytes");
            assert_eq!((cut.omitted, budget), (3 - kept, rest), "{bytes} bytes");
        }
    }
}
