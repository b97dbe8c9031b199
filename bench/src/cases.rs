//! What is measured: the cases, their metrics, and the goals of the design as ratios to Envoy. Values only, nothing runs here.

use clap::ValueEnum;

/// Who carries the traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum)]
pub enum Side {
    /// No proxy and no redirect rules: the client dials the server.
    Direct,
    /// Our proxies, dumps off.
    Mesh,
    /// Our proxies as they come: dumps on.
    Dumps,
    /// Envoy, configured as a sidecar would be.
    Envoy,
}

impl Side {
    /// All sides, in the order in which they are measured and printed.
    pub const ALL: [Side; 4] = [Side::Direct, Side::Mesh, Side::Dumps, Side::Envoy];

    /// The name in options, tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Side::Direct => "direct",
            Side::Mesh => "mesh",
            Side::Dumps => "dumps",
            Side::Envoy => "envoy",
        }
    }

    /// Whether two of our proxies carry the traffic.
    pub fn is_mesh(self) -> bool {
        matches!(self, Side::Mesh | Side::Dumps)
    }
}

/// What the client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1 with keep-alive, one request at a time on a connection.
    Http1,
    /// HTTP/2 without TLS, prior knowledge.
    Http2,
    /// gRPC, unary calls.
    Grpc,
}

/// A closed loop: each stream sends its next request when the last one was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// What the client speaks.
    pub protocol: Protocol,
    /// Connections, all open at once.
    pub connections: usize,
    /// Requests in flight on each connection (1 for HTTP/1.1).
    pub streams: usize,
}

/// How a case is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Fresh proxies: time until ready, memory idle, memory with so many idle connections.
    Start {
        /// Connections that have made one request and stay open.
        idle_connections: usize,
    },
    /// As many requests as go through.
    Closed(Traffic),
    /// Requests at a constant rate, each timed from when it was due.
    Latency {
        /// Requests a second, over all connections.
        rate: u32,
        /// Connections that take turns.
        connections: u32,
    },
    /// New connections, each with one request.
    Connect {
        /// Connections being opened at the same time.
        workers: usize,
    },
    /// One stream of bytes, client to server, not HTTP.
    Tcp,
    /// The controller alone: first certificates, each for another pod.
    Certificates {
        /// Proxies that ask at the same time, as many certificates as go through.
        askers: usize,
        /// Certificates a second while each is timed.
        rate: u32,
    },
}

impl Kind {
    /// Whether it is about our controller and nothing else: there are no sides to compare, and its goals are plain figures.
    pub fn is_alone(self) -> bool {
        matches!(self, Kind::Certificates { .. })
    }
}

/// One row group of the table.
#[derive(Debug)]
pub struct Case {
    /// The name for --only and --profile.
    pub name: &'static str,
    /// The heading in the table.
    pub title: &'static str,
    /// How it is measured.
    pub kind: Kind,
    /// The goals, as ratios of ours to Envoy's; of what stands alone, as it is.
    pub goals: &'static [(Metric, f64)],
}

/// One measured quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Metric {
    /// Certificates a second, beside those who ask for them.
    Certificates,
    /// CPU of the controller for each.
    CertificateCpu,
    /// What one core's time is enough for.
    CertificatesPerCore,
    /// Answered requests a second.
    Requests,
    /// CPU of both proxies / 2 / requests.
    Cpu,
    /// Resident memory of the client's proxy while the load runs.
    LoadedMemory,
    /// Median time to an answer.
    LatencyP50,
    /// 99th percentile of the time to an answer.
    LatencyP99,
    /// Median, minus the direct one.
    AddedP50,
    /// 99th percentile, minus the direct one.
    AddedP99,
    /// Throughput.
    Gigabits,
    /// CPU seconds of both proxies for each 10^9 bytes.
    CpuPerGigabyte,
    /// From the start of the client's proxy until it says that it is ready.
    Ready,
    /// Resident memory of the client's proxy, one request after its start.
    IdleMemory,
    /// What idle connections add to it.
    IdleConnectionsMemory,
}

impl Metric {
    /// The name in JSON.
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
            Metric::Certificates => "certificates_per_second",
            Metric::CertificateCpu => "cpu_us_per_certificate",
            Metric::CertificatesPerCore => "certificates_per_second_and_core",
        }
    }

    /// The label in the table, with its unit.
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
            Metric::Certificates => "certificates/s",
            Metric::CertificateCpu => "CPU, µs per certificate",
            Metric::CertificatesPerCore => "certificates/s on one core",
        }
    }

    /// Digits after the point in the table.
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
            | Metric::IdleConnectionsMemory => 1,
            Metric::CpuPerGigabyte => 2,
        }
    }

    /// Whether more is better.
    pub fn more_is_better(self) -> bool {
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
    })
}

/// Every case, in the order in which it runs. `start` is first: it wants fresh proxies, and leaves them for the others.
pub const CASES: &[Case] = &[
    Case {
        name: "start",
        title: "Start and memory, client side",
        kind: Kind::Start {
            idle_connections: 1000,
        },
        goals: &[
            (Metric::Ready, 50.0 / 95.0),
            (Metric::IdleMemory, 6.0 / 67.0),
            (Metric::IdleConnectionsMemory, 4.0 / 16.0),
        ],
    },
    Case {
        name: "h1-1",
        title: "HTTP/1.1, 1 connection",
        kind: closed(Protocol::Http1, 1, 1),
        goals: &[(Metric::Cpu, 36.0 / 119.6)],
    },
    Case {
        name: "h1-32",
        title: "HTTP/1.1, 32 connections",
        kind: closed(Protocol::Http1, 32, 1),
        goals: &[(Metric::Cpu, 13.7 / 25.3)],
    },
    Case {
        name: "h1-256",
        title: "HTTP/1.1, 256 connections",
        kind: closed(Protocol::Http1, 256, 1),
        goals: &[],
    },
    Case {
        name: "h2-1",
        title: "HTTP/2, 1 connection x 100 streams",
        kind: closed(Protocol::Http2, 1, 100),
        goals: &[(Metric::Cpu, 8.0 / 16.7)],
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
        goals: &[(Metric::Cpu, 9.5 / 21.9)],
    },
    Case {
        name: "latency",
        title: "HTTP/1.1 at 1,000 requests/s, 8 connections",
        kind: Kind::Latency {
            rate: 1000,
            connections: 8,
        },
        goals: &[
            (Metric::AddedP50, 70.0 / 228.0),
            (Metric::AddedP99, 160.0 / 440.0),
        ],
    },
    Case {
        name: "connect",
        title: "New connections, each one request",
        kind: Kind::Connect { workers: 32 },
        goals: &[(Metric::Requests, 15_000.0 / 6_850.0)],
    },
    Case {
        name: "tcp",
        title: "TCP, 1 connection, client to server",
        kind: Kind::Tcp,
        goals: &[
            (Metric::Gigabits, 12.0 / 7.9),
            (Metric::CpuPerGigabyte, 0.8 / 1.4),
        ],
    },
    Case {
        name: "certificates",
        title: "First certificates, each of another pod; timed at 250/s",
        kind: Kind::Certificates {
            askers: 32,
            rate: 250,
        },
        goals: &[
            (Metric::CertificatesPerCore, 1_000.0),
            (Metric::LatencyP99, 10_000.0),
        ],
    },
];

/// The cases that `wanted` names, each by its name or by the part before its dash; all when nothing is named.
pub fn select(wanted: &[String]) -> Result<Vec<&'static Case>, String> {
    let matches =
        |case: &Case, name: &str| case.name == name || case.name.split('-').next() == Some(name);
    if let Some(unknown) = wanted
        .iter()
        .find(|name| !CASES.iter().any(|case| matches(case, name)))
    {
        let known: Vec<_> = CASES.iter().map(|case| case.name).collect();
        return Err(format!(
            "there is no case \"{unknown}\"; known: {}",
            known.join(", ")
        ));
    }
    Ok(CASES
        .iter()
        .filter(|case| wanted.is_empty() || wanted.iter().any(|name| matches(case, name)))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(wanted: &[&str]) -> Vec<&'static str> {
        let wanted: Vec<_> = wanted.iter().map(|name| name.to_string()).collect();
        select(&wanted)
            .unwrap()
            .iter()
            .map(|case| case.name)
            .collect()
    }

    #[test]
    fn a_group_names_all_its_cases() {
        assert_eq!(names(&["h1", "tcp"]), ["h1-1", "h1-32", "h1-256", "tcp"]);
    }

    #[test]
    fn a_full_name_is_one_case() {
        assert_eq!(names(&["h1-1"]), ["h1-1"]);
    }

    #[test]
    fn nothing_named_is_everything() {
        assert_eq!(names(&[]).len(), CASES.len());
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        let problem = select(&["h3".to_string()]).unwrap_err();
        assert!(
            problem.contains("\"h3\"") && problem.contains("h1-32"),
            "{problem}"
        );
    }
}
