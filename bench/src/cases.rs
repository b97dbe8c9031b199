//! Benchmark cases, metrics, and goals as ratios to Envoy. Data only.

use clap::ValueEnum;

use crate::records::Implementation;
use crate::server::{CLIENT_FIRST_PORT, HTTP_PORT, SERVER_FIRST_PORT, TWO_WRITES_PORT};

/// Configuration under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum)]
pub enum Side {
    /// No proxy and no redirect rules: the client connects to the server.
    Direct,
    /// Our proxies, dumps off.
    Mesh,
    /// Our proxies with dumps, which are the default.
    Dumps,
    /// Our proxies with traces of a tenth of the requests and access logs of all, dumps off.
    Telemetry,
    /// Envoy, configured as a sidecar.
    Envoy,
    /// HAProxy, configured as a sidecar.
    Haproxy,
    /// Our proxy beside the client only, dumps off.
    MeshClient,
    /// Our proxy beside the server only, dumps off.
    MeshServer,
}

impl Side {
    /// All sides in measurement order.
    pub const ALL: [Side; 8] = [
        Side::Direct,
        Side::Mesh,
        Side::Dumps,
        Side::Telemetry,
        Side::Envoy,
        Side::Haproxy,
        Side::MeshClient,
        Side::MeshServer,
    ];

    /// The name in options, tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Side::Direct => "direct",
            Side::Mesh => "mesh",
            Side::Dumps => "dumps",
            Side::Telemetry => "telemetry",
            Side::Envoy => "envoy",
            Side::Haproxy => "haproxy",
            Side::MeshClient => "mesh-client",
            Side::MeshServer => "mesh-server",
        }
    }

    /// Whether our proxies carry the traffic.
    pub fn is_mesh(self) -> bool {
        !matches!(self, Side::Direct | Side::Envoy | Side::Haproxy)
    }

    /// Whether client and server have a proxy.
    pub fn ends(self) -> [bool; 2] {
        match self {
            Side::Direct => [false, false],
            Side::MeshClient => [true, false],
            Side::MeshServer => [false, true],
            _ => [true, true],
        }
    }
}

/// Application protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1 with keep-alive, one request at a time on a connection.
    Http1,
    /// HTTP/2 with prior knowledge.
    Http2,
    /// gRPC, unary calls.
    Grpc,
}

/// Closed loop: each stream sends its next request after the previous response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// Application protocol.
    pub protocol: Protocol,
    /// Concurrent connections.
    pub connections: usize,
    /// Requests in flight on each connection (1 for HTTP/1.1).
    pub streams: usize,
    /// Routes of the Service port.
    pub routes: Routes,
}

/// The routes of a Service port. Only our controller has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routes {
    /// No routes, as in all other cases.
    None,
    /// HTTPRoutes with a path each. The last one matches all requests of the benchmark.
    Paths(u16),
    /// One HTTPRoute that retries statuses that the server never sends, with timeouts.
    Retries,
}

impl Routes {
    /// The routes with a Service port of their own.
    pub const ALL: [Routes; 4] = [
        Routes::Paths(10),
        Routes::Paths(100),
        Routes::Paths(1000),
        Routes::Retries,
    ];

    /// The Service port.
    pub fn port(self) -> u16 {
        match self {
            Routes::None => 80,
            Routes::Paths(number) => 10_000 + number,
            Routes::Retries => 10_000,
        }
    }
}

/// The bytes of a connection that is not HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// Bytes that are no text.
    Binary,
    /// Words without a line end: they might be the start of a request line.
    Text,
}

impl Payload {
    /// A piece to send repeatedly.
    pub fn bytes(self) -> Vec<u8> {
        let pattern: &[u8] = match self {
            Payload::Binary => &[0xa5],
            Payload::Text => b"some words of text without a line end ",
        };
        pattern.repeat(256 * 1024 / pattern.len())
    }
}

/// The first messages of a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// A request of HTTP/1.1, and a response.
    Http1,
    /// Such a request to a server that writes head and body of the response separately.
    TwoWrites,
    /// Binary bytes of the client, as of a database's client, and the server's answer.
    ClientFirst,
    /// Binary bytes of the server.
    ServerFirst,
}

impl Exchange {
    /// The port of the server.
    pub fn server_port(self) -> u16 {
        match self {
            Exchange::Http1 => HTTP_PORT,
            Exchange::TwoWrites => TWO_WRITES_PORT,
            Exchange::ClientFirst => CLIENT_FIRST_PORT,
            Exchange::ServerFirst => SERVER_FIRST_PORT,
        }
    }

    /// The port of the Service.
    pub fn service_port(self) -> u16 {
        match self {
            Exchange::Http1 => 80,
            other => other.server_port(),
        }
    }
}

/// Kind of measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// New proxies: time until ready, idle memory, memory with idle connections.
    Start {
        /// Open connections after one request each.
        idle_connections: usize,
        /// Their protocol.
        protocol: Protocol,
    },
    /// Memory of destinations in a new proxy, then of others with routes and policies. Only our
    /// controller has them.
    Destinations {
        /// Destinations of each kind, with one request each.
        number: u16,
    },
    /// Maximum throughput.
    Closed(Traffic),
    /// Requests at a constant rate; a latency starts at the due time.
    Latency {
        /// Requests per second over all connections.
        rate: u32,
        /// Connections, used round robin.
        connections: u32,
    },
    /// New connections at a constant rate, each with its first messages.
    FirstAnswer {
        /// The messages.
        exchange: Exchange,
        /// Connections per second.
        rate: u32,
        /// Threads that open them, round robin.
        clients: u32,
    },
    /// New connections with one request each.
    Connect {
        /// Connections opened concurrently.
        workers: usize,
    },
    /// One non-HTTP connection, client to server.
    Tcp(Payload),
    /// Controller only: first certificates, each for a different pod.
    Certificates {
        /// Requests in flight during the throughput measurement.
        concurrency: usize,
        /// Requests per second during the latency measurement.
        rate: u32,
    },
    /// TLS records only: our implementation and another one, over loopback.
    Records(Implementation),
}

impl Kind {
    /// Whether the case measures no proxies. Such a case has no sides, and its goals are absolute.
    pub fn is_standalone(self) -> bool {
        matches!(self, Kind::Certificates { .. } | Kind::Records(_))
    }

    /// Whether only our proxies without dumps can carry the traffic.
    pub fn is_mesh_only(self) -> bool {
        match self {
            Kind::Destinations { .. } => true,
            Kind::Closed(traffic) => traffic.routes != Routes::None,
            _ => false,
        }
    }

    /// Whether the case compares this side.
    pub fn is_measured_on(self, side: Side) -> bool {
        let has_one_end = matches!(side, Side::MeshClient | Side::MeshServer);
        match self {
            Kind::FirstAnswer { .. } => has_one_end || matches!(side, Side::Direct | Side::Mesh),
            kind if kind.is_mesh_only() => side == Side::Mesh,
            _ => !has_one_end,
        }
    }
}

/// A benchmark case: one row group of the table.
#[derive(Debug)]
pub struct Case {
    /// Name in --only and --profile.
    pub name: &'static str,
    /// Heading in the table.
    pub title: &'static str,
    /// Kind of measurement.
    pub kind: Kind,
    /// Goals: ratios of mesh to Envoy, or absolute values for a standalone case.
    pub goals: &'static [(Metric, f64)],
}

/// Measured quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Metric {
    /// Certificates per second, with the client on the same machine.
    Certificates,
    /// CPU time of the controller per certificate.
    CertificateCpu,
    /// Certificates per second of CPU time.
    CertificatesPerCore,
    /// Completed requests per second.
    Requests,
    /// CPU time of both proxies / 2 / requests.
    Cpu,
    /// Resident memory of the client's proxy under load.
    LoadedMemory,
    /// Median latency.
    LatencyP50,
    /// 99th percentile of the latency.
    LatencyP99,
    /// Median latency minus the median latency of the direct side.
    AddedP50,
    /// 99th percentile minus the 99th percentile of the direct side.
    AddedP99,
    /// Throughput.
    Gigabits,
    /// CPU seconds of both proxies per 10^9 bytes.
    CpuPerGigabyte,
    /// Time from the start of the client's proxy until it is ready.
    Ready,
    /// Resident memory of the client's proxy after one request.
    IdleMemory,
    /// Additional memory with idle connections.
    IdleConnectionsMemory,
    /// Memory of a destination.
    DestinationMemory,
    /// Memory of a destination with a route and a policy.
    PolicyMemory,
    /// CPU time per request, as a ratio to the other implementation.
    CpuRatio,
    /// CPU time per 10^9 bytes, as a ratio to the other implementation.
    CpuPerGigabyteRatio,
    /// Memory of idle connections, as a ratio to the other implementation.
    MemoryRatio,
}

impl Metric {
    /// Name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Metric::Requests => "requests_per_second",
            Metric::Cpu => "cpu_us_per_request_and_proxy",
            Metric::LoadedMemory => "memory_loaded_mb",
            Metric::LatencyP50 => "latency_p50_us",
            Metric::LatencyP99 => "latency_p99_us",
            Metric::AddedP50 => "added_latency_p50_us",
            Metric::AddedP99 => "added_latency_p99_us",
            Metric::Gigabits => "gbit_per_second",
            Metric::CpuPerGigabyte => "cpu_s_per_gb_both_proxies",
            Metric::Ready => "start_to_ready_ms",
            Metric::IdleMemory => "memory_idle_mb",
            Metric::IdleConnectionsMemory => "memory_idle_connections_mb",
            Metric::DestinationMemory => "memory_destination_kb",
            Metric::PolicyMemory => "memory_destination_with_policy_kb",
            Metric::Certificates => "certificates_per_second",
            Metric::CertificateCpu => "cpu_us_per_certificate",
            Metric::CertificatesPerCore => "certificates_per_second_and_core",
            Metric::CpuRatio => "cpu_per_request_ratio",
            Metric::CpuPerGigabyteRatio => "cpu_per_gb_ratio",
            Metric::MemoryRatio => "memory_idle_connections_ratio",
        }
    }

    /// Label in the table, with unit.
    pub fn label(self) -> &'static str {
        match self {
            Metric::Requests => "requests/s",
            Metric::Cpu => "CPU, µs per request and proxy",
            Metric::LoadedMemory => "memory under load, MB",
            Metric::LatencyP50 => "p50, µs",
            Metric::LatencyP99 => "p99, µs",
            Metric::AddedP50 => "added to direct, p50, µs",
            Metric::AddedP99 => "added to direct, p99, µs",
            Metric::Gigabits => "Gbit/s",
            Metric::CpuPerGigabyte => "CPU, s per GB, both proxies",
            Metric::Ready => "start to ready, ms",
            Metric::IdleMemory => "memory idle, MB",
            Metric::IdleConnectionsMemory => "more with 1,000 connections, MB",
            Metric::DestinationMemory => "memory of each, kB",
            Metric::PolicyMemory => "with a route and a policy, kB",
            Metric::Certificates => "certificates/s",
            Metric::CertificateCpu => "CPU, µs per certificate",
            Metric::CertificatesPerCore => "certificates/s on one core",
            Metric::CpuRatio => "CPU per request, ratio",
            Metric::CpuPerGigabyteRatio => "CPU per GB, ratio",
            Metric::MemoryRatio => "memory of 1,000 idle, ratio",
        }
    }

    /// Decimal places in the table.
    pub fn decimals(self) -> usize {
        match self {
            Metric::Requests
            | Metric::LatencyP50
            | Metric::LatencyP99
            | Metric::AddedP50
            | Metric::AddedP99
            | Metric::Ready => 0,
            Metric::Certificates | Metric::CertificateCpu | Metric::CertificatesPerCore => 0,
            Metric::Cpu
            | Metric::LoadedMemory
            | Metric::Gigabits
            | Metric::IdleMemory
            | Metric::IdleConnectionsMemory
            | Metric::DestinationMemory
            | Metric::PolicyMemory => 1,
            Metric::CpuPerGigabyte
            | Metric::CpuRatio
            | Metric::CpuPerGigabyteRatio
            | Metric::MemoryRatio => 2,
        }
    }

    /// Whether higher values are better.
    pub fn higher_is_better(self) -> bool {
        matches!(
            self,
            Metric::Requests
                | Metric::Gigabits
                | Metric::Certificates
                | Metric::CertificatesPerCore
        )
    }
}

const fn closed(protocol: Protocol, connections: usize, streams: usize) -> Kind {
    Kind::Closed(Traffic {
        protocol,
        connections,
        streams,
        routes: Routes::None,
    })
}

const fn routed(routes: Routes) -> Kind {
    Kind::Closed(Traffic {
        protocol: Protocol::Http1,
        connections: 32,
        streams: 1,
        routes,
    })
}

const fn first_answer(exchange: Exchange) -> Kind {
    Kind::FirstAnswer {
        exchange,
        rate: 100,
        clients: 8,
    }
}

/// All cases in running order. `start` is first: it restarts the proxies.
pub const CASES: &[Case] = &[
    Case {
        name: "start",
        title: "Start and memory, client side",
        kind: Kind::Start {
            idle_connections: 1000,
            protocol: Protocol::Http1,
        },
        goals: &[
            (Metric::Ready, 20.0 / 133.0),
            (Metric::IdleMemory, 7.0 / 69.0),
            (Metric::IdleConnectionsMemory, 3.0 / 15.8),
        ],
    },
    Case {
        name: "start-h2",
        title: "Start and memory, client side, HTTP/2",
        kind: Kind::Start {
            idle_connections: 1000,
            protocol: Protocol::Http2,
        },
        goals: &[],
    },
    Case {
        name: "destinations",
        title: "1,000 destinations, client side",
        kind: Kind::Destinations { number: 1000 },
        goals: &[],
    },
    Case {
        name: "h1-1",
        title: "HTTP/1.1, 1 connection",
        kind: closed(Protocol::Http1, 1, 1),
        goals: &[(Metric::Cpu, 0.25)],
    },
    Case {
        name: "h1-32",
        title: "HTTP/1.1, 32 connections",
        kind: closed(Protocol::Http1, 32, 1),
        goals: &[(Metric::Cpu, 0.28)],
    },
    Case {
        name: "h1-256",
        title: "HTTP/1.1, 256 connections",
        kind: closed(Protocol::Http1, 256, 1),
        goals: &[(Metric::Cpu, 0.30)],
    },
    Case {
        name: "h2-1",
        title: "HTTP/2, 1 connection x 100 streams",
        kind: closed(Protocol::Http2, 1, 100),
        goals: &[(Metric::Cpu, 0.15)],
    },
    Case {
        name: "h2-32",
        title: "HTTP/2, 32 connections x 8 streams",
        kind: closed(Protocol::Http2, 32, 8),
        goals: &[],
    },
    Case {
        name: "h2-256",
        title: "HTTP/2, 256 connections x 1 stream",
        kind: closed(Protocol::Http2, 256, 1),
        goals: &[],
    },
    Case {
        name: "grpc",
        title: "gRPC unary, 1 connection x 100 calls",
        kind: closed(Protocol::Grpc, 1, 100),
        goals: &[(Metric::Cpu, 0.17)],
    },
    Case {
        name: "routes-10",
        title: "HTTP/1.1, 32 connections, 10 routes",
        kind: routed(Routes::Paths(10)),
        goals: &[],
    },
    Case {
        name: "routes-100",
        title: "HTTP/1.1, 32 connections, 100 routes",
        kind: routed(Routes::Paths(100)),
        goals: &[],
    },
    Case {
        name: "routes-1000",
        title: "HTTP/1.1, 32 connections, 1,000 routes",
        kind: routed(Routes::Paths(1000)),
        goals: &[],
    },
    Case {
        name: "routes-retries",
        title: "HTTP/1.1, 32 connections, retries and timeouts",
        kind: routed(Routes::Retries),
        goals: &[],
    },
    Case {
        name: "latency",
        title: "HTTP/1.1 at 1,000 requests/s, 8 connections",
        kind: Kind::Latency {
            rate: 1000,
            connections: 8,
        },
        goals: &[
            (Metric::AddedP50, 110.0 / 461.0),
            (Metric::AddedP99, 230.0 / 1_152.0),
        ],
    },
    Case {
        name: "two-writes",
        title: "Head and body in two writes, 100 new connections/s",
        kind: first_answer(Exchange::TwoWrites),
        goals: &[],
    },
    Case {
        name: "first-http1",
        title: "HTTP/1.1, 100 new connections/s",
        kind: first_answer(Exchange::Http1),
        goals: &[],
    },
    Case {
        name: "first-client",
        title: "TCP, client first, 100 new connections/s",
        kind: first_answer(Exchange::ClientFirst),
        goals: &[],
    },
    Case {
        name: "first-server",
        title: "TCP, server first, 100 new connections/s",
        kind: first_answer(Exchange::ServerFirst),
        goals: &[],
    },
    Case {
        name: "connect",
        title: "New connections, each one request",
        kind: Kind::Connect { workers: 32 },
        goals: &[(Metric::Requests, 12_000.0 / 4_120.0)],
    },
    Case {
        name: "tcp",
        title: "TCP, 1 connection, client to server",
        kind: Kind::Tcp(Payload::Binary),
        goals: &[(Metric::Gigabits, 1.3), (Metric::CpuPerGigabyte, 0.7)],
    },
    Case {
        name: "tcp-text",
        title: "TCP, 1 connection, text without line ends",
        kind: Kind::Tcp(Payload::Text),
        goals: &[(Metric::Gigabits, 1.3), (Metric::CpuPerGigabyte, 0.7)],
    },
    Case {
        name: "records-tokio",
        title: "TLS records only, ours to tokio-rustls",
        kind: Kind::Records(Implementation::TokioRustls),
        goals: &[
            (Metric::CpuRatio, 0.9),
            (Metric::CpuPerGigabyteRatio, 0.9),
            (Metric::MemoryRatio, 0.7),
        ],
    },
    Case {
        name: "records-unbuffered",
        title: "TLS records only, ours to unbuffered rustls",
        kind: Kind::Records(Implementation::RustlsUnbuffered),
        goals: &[],
    },
    Case {
        name: "certificates",
        title: "First certificates, each of another pod; timed at 250/s",
        kind: Kind::Certificates {
            concurrency: 32,
            rate: 250,
        },
        goals: &[
            (Metric::CertificatesPerCore, 1_000.0),
            (Metric::LatencyP99, 10_000.0),
        ],
    },
];

/// Selects cases by name or group (the part before the dash). An empty list selects all cases.
pub fn select(selected: &[String]) -> Result<Vec<&'static Case>, String> {
    let matches =
        |case: &Case, name: &str| case.name == name || case.name.split('-').next() == Some(name);
    if let Some(unknown) = selected
        .iter()
        .find(|name| !CASES.iter().any(|case| matches(case, name)))
    {
        let known: Vec<_> = CASES.iter().map(|case| case.name).collect();
        return Err(format!(
            "unknown case \"{unknown}\"; known: {}",
            known.join(", ")
        ));
    }
    Ok(CASES
        .iter()
        .filter(|case| selected.is_empty() || selected.iter().any(|name| matches(case, name)))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(selected: &[&str]) -> Vec<&'static str> {
        let selected: Vec<_> = selected.iter().map(|name| name.to_string()).collect();
        select(&selected)
            .unwrap()
            .iter()
            .map(|case| case.name)
            .collect()
    }

    #[test]
    fn a_group_names_all_its_cases() {
        assert_eq!(
            names(&["h1", "tcp"]),
            ["h1-1", "h1-32", "h1-256", "tcp", "tcp-text"]
        );
    }

    #[test]
    fn full_name_selects_one_case() {
        assert_eq!(names(&["h1-1"]), ["h1-1"]);
    }

    #[test]
    fn empty_selection_selects_all() {
        assert_eq!(names(&[]).len(), CASES.len());
    }

    #[test]
    fn unknown_name_lists_known_cases() {
        let error = select(&["h3".to_string()]).unwrap_err();
        assert!(
            error.contains("\"h3\"") && error.contains("h1-32"),
            "{error}"
        );
    }
}
