//! The page of metrics, sample by sample.

use std::time::UNIX_EPOCH;

use diy_mesh_model::code::{Code, GRPC_STATUSES};
use http::StatusCode;

use super::testing::request;
use super::*;
use crate::error::Scope;
use crate::labels::{ErrorType, OTHER, TlsKind};
use crate::observe::exceptions::{Event, Kind};

/// The most samples of a scrape.
const MAX_SAMPLES: usize = 1500;

impl Metrics {
    fn counted(&self, labels: &RequestLabels) {
        let took = Duration::from_millis(3);
        let now = Instant::now();
        self.request(&Counted::default(), labels.clone(), [1, 2], took, now);
    }
}

/// Parses a page into samples: name with labels, and value. Panics if the page is not in the
/// OpenMetrics text format.
fn parse(page: &str) -> std::collections::HashMap<String, f64> {
    let page = page.strip_suffix("# EOF\n").expect("an end marker");
    let mut family = String::new();
    let mut samples = std::collections::HashMap::new();
    for line in page.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            family = help.split_once(' ').expect("a help text").0.to_owned();
            let is_convention = ["http_", "rpc_"]
                .iter()
                .any(|start| family.starts_with(start));
            assert!(
                is_convention || family.starts_with("diy_mesh_proxy_"),
                "{line}"
            );
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').expect("a type");
            assert_eq!(name, family, "TYPE follows HELP");
            match kind {
                "counter" => family.push_str("_total"),
                "gauge" | "histogram" => {}
                _ => panic!("unexpected type: {line}"),
            }
        } else {
            let (name, value) = line.rsplit_once(' ').expect("a value");
            let sample = name.split('{').next().expect("a name");
            let of_family = sample.strip_prefix(family.as_str()).expect("its family");
            let is_known = ["", "_bucket", "_sum", "_count"].contains(&of_family);
            assert!(is_known, "samples follow their family: {line}");
            if let Some((_, labels)) = name.split_once('{') {
                for label in labels.strip_suffix('}').expect("closed labels").split(',') {
                    let (label, value) = label.split_once('=').expect("a label");
                    assert!(
                        label
                            .bytes()
                            .all(|byte| byte.is_ascii_lowercase() || byte == b'_')
                            && value.len() >= 2
                            && value.starts_with('"')
                            && value.ends_with('"')
                    );
                }
            }
            assert!(
                samples
                    .insert(name.to_owned(), value.parse().expect("a number"))
                    .is_none(),
                "duplicate sample: {line}"
            );
        }
    }
    samples
}

#[test]
fn renders_counted_values() {
    let metrics = Metrics::new();
    let open = metrics.connection(Direction::Inbound);
    drop(metrics.connection(Direction::Inbound));
    let counted = Counted::default();
    for (millis, status) in [(1, 404), (2, 503), (60_000, 503)] {
        let labels = RequestLabels {
            status,
            error: ErrorType::of(None, StatusCode::from_u16(status).ok(), "", true),
            ..request(
                Direction::Outbound,
                "HTTPRoute shop/a \"b\"",
                ("shop", "web"),
            )
        };
        let took = Duration::from_millis(millis);
        metrics.request(&counted, labels, [5, 7], took, Instant::now());
    }
    metrics.failure(Direction::Outbound, &Failure::NoEndpoint("a/b".into()));
    metrics.opaque(Direction::Inbound, 10, 20);
    let samples = parse(&metrics.render());
    let sample = |name: &str| samples[&format!("diy_mesh_proxy_{name}")];
    assert_eq!(sample("connections_total{direction=\"inbound\"}"), 2.0);
    assert_eq!(sample("connections_open{direction=\"inbound\"}"), 1.0);
    let peer = "http_route=\"HTTPRoute shop/a \\\"b\\\"\",service_peer_name=\"web\",\
                service_peer_namespace=\"shop\"";
    let requests = |status, error| {
        let more = format!("rpc_response_status_code=\"\",error_type=\"{error}\",tls=\"mtls\"");
        sample(&format!(
            "requests_total{{direction=\"outbound\",{peer},http_request_method=\"GET\",\
             http_response_status_code=\"{status}\",{more}}}"
        ))
    };
    assert_eq!((requests("404", ""), requests("503", "503")), (1.0, 2.0));
    let name = "http_client_request_duration_seconds";
    for (suffix, value) in [
        (format!("bucket{{le=\"0.0005\",{peer}}}"), 0.0),
        (format!("bucket{{le=\"0.001\",{peer}}}"), 1.0),
        (format!("bucket{{le=\"0.0025\",{peer}}}"), 2.0),
        (format!("bucket{{le=\"10.0\",{peer}}}"), 2.0),
        (format!("bucket{{le=\"+Inf\",{peer}}}"), 3.0),
        (format!("sum{{{peer}}}"), 60.003),
        (format!("count{{{peer}}}"), 3.0),
    ] {
        assert_eq!(samples[&format!("{name}_{suffix}")], value, "{suffix}");
    }
    assert_eq!(
        sample("http_bytes_total{direction=\"outbound\",way=\"received\"}"),
        21.0
    );
    assert_eq!(
        sample("failures_total{direction=\"outbound\",code=\"no-endpoint\"}"),
        1.0
    );
    assert_eq!(
        sample("opaque_bytes_total{direction=\"inbound\",way=\"received\"}"),
        20.0
    );
    assert!(sample("resident_memory_bytes") > 100_000.0 && sample("start_time_seconds") > 1.7e9);
    drop(open);
    let samples = parse(&metrics.render());
    assert_eq!(
        samples["diy_mesh_proxy_connections_open{direction=\"inbound\"}"],
        0.0
    );
}

#[test]
fn omits_unknown_times_until_they_are_recorded() {
    let metrics = Metrics::new();
    let names = [
        "diy_mesh_proxy_certificate_end_time_seconds",
        "diy_mesh_proxy_discovery_last_message_age_seconds",
    ];
    let samples = parse(&metrics.render());
    assert!(names.iter().all(|name| !samples.contains_key(*name)));
    metrics
        .identity
        .issued(UNIX_EPOCH + Duration::from_secs(2_000_000_000));
    metrics.discovery.message_received();
    let samples = parse(&metrics.render());
    assert_eq!(samples[names[0]], 2e9);
    assert!(samples[names[1]] < 60.0);
}

#[test]
fn a_connection_keeps_the_sets_of_its_latest_request() {
    let (metrics, counted) = (Metrics::new(), Counted::default());
    let count = |labels| {
        let took = Duration::ZERO;
        metrics.request(&counted, labels, [0; 2], took, Instant::now());
    };
    for name in ["a", "a", "b", "a"] {
        count(request(Direction::Inbound, "", ("shop", name)));
    }
    let samples = parse(&metrics.render());
    for (name, expected) in [("a", 3.0), ("b", 1.0)] {
        let label = format!("service_peer_name=\"{name}\"");
        let is_count = |sample: &str| sample.contains("requests_total{") && sample.contains(&label);
        let counts: Vec<_> = samples.iter().filter(|(name, _)| is_count(name)).collect();
        assert_eq!((counts.len(), *counts[0].1), (1, expected));
    }
}

#[test]
fn names_of_policies_are_bounded() {
    let metrics = Metrics::new();
    let name = |number| format!("TrafficPolicy shop/{number}").into();
    for number in 0..100 {
        metrics.fault(FaultKind::Abort, &name(number));
        metrics.fault(FaultKind::Abort, &name(0));
    }
    metrics.fault(FaultKind::Abort, &"TrafficPolicy other/0".into());
    let text = metrics.render();
    let sample = |policy: &str, count: usize| {
        let labels = format!("{{kind=\"abort\",policy=\"{policy}\"}}");
        let line = format!("diy_mesh_proxy_faults_total{labels} {count}\n");
        assert!(text.contains(&line), "{line}: {text}");
    };
    sample("TrafficPolicy shop/0", 101);
    sample("TrafficPolicy shop/19", 1);
    sample("TrafficPolicy other/0", 1);
    sample(OTHER, 80);
    assert!(!text.contains("shop/20"), "{text}");
}

/// Fills every table, with all that peers, routes and policies can name.
fn fill(metrics: &Metrics) {
    for number in 0..10_000 {
        let namespace = format!("team-{}", number / 10);
        let (name, route) = (format!("service-{number}"), format!("HTTPRoute a/{number}"));
        let to = request(Direction::Outbound, &route, (&namespace, &name));
        metrics.counted(&to);
        metrics.counted(&RequestLabels { grpc: "OK", ..to });
        let from = request(Direction::Inbound, "", (&namespace, &name));
        metrics.counted(&RequestLabels {
            grpc: "OK",
            ..from.clone()
        });
        metrics.counted(&from);
    }
    let grpc = GRPC_STATUSES.into_iter().chain(["", "_OTHER"]);
    for (grpc, status) in
        grpc.flat_map(|grpc| (0..1000).step_by(20).map(move |status| (grpc, status)))
    {
        let directions = [Direction::Inbound, Direction::Outbound];
        for (direction, tls) in directions.into_iter().flat_map(|direction| {
            let kinds = [TlsKind::None, TlsKind::Mutual, TlsKind::Server];
            kinds.map(|tls| (direction, tls))
        }) {
            let known = StatusCode::from_u16(status).ok();
            for code in [None, Some(Code::ALL[0].label())] {
                metrics.counted(&RequestLabels {
                    status: known.map_or(0, |known| known.as_u16()),
                    grpc,
                    error: ErrorType::of(code, known, grpc, status % 40 == 0),
                    tls,
                    ..request(direction, "", ("evil", "a"))
                });
            }
        }
    }
    for number in 0..300 {
        let name: Arc<str> = format!("TrafficPolicy team-{number}/{number}").into();
        metrics.fault(FaultKind::Abort, &name);
        metrics.fault(FaultKind::Delay, &name);
        for scope in [Scope::Service, Scope::Caller] {
            metrics.rate_limited(scope, &name);
        }
        let destination = format!("shop/{number}");
        for kind in [
            Kind::Requests,
            Kind::Addresses,
            Kind::Inbound,
            Kind::Ejected,
            Kind::Probe,
        ] {
            let event = Event {
                kind,
                destination: &destination,
                endpoint: "",
                reason: "x",
            };
            metrics.exceptions.record(event, 1, Instant::now());
        }
    }
    metrics.identity.issued(SystemTime::now());
    metrics.discovery.message_received();
}

#[test]
fn a_scrape_stays_within_its_budget_whatever_peers_do() {
    let metrics = Metrics::new();
    fill(&metrics);
    let page = metrics.render();
    let samples = parse(&page);
    assert!(samples.len() <= MAX_SAMPLES, "{}", samples.len());
    // Nothing is lost.
    let sum = |start: &str| -> f64 {
        let found = samples.iter().filter(|(name, _)| name.starts_with(start));
        found.map(|(_, value)| value).sum()
    };
    let requests = 40_000.0 + 19.0 * 50.0 * 12.0;
    assert_eq!(sum("diy_mesh_proxy_requests_total"), requests);
    let durations = ["http_server", "http_client"]
        .map(|kind| sum(&format!("{kind}_request_duration_seconds_count")));
    let calls = ["rpc_server", "rpc_client"]
        .map(|kind| sum(&format!("{kind}_call_duration_seconds_count")));
    assert_eq!(durations.iter().chain(&calls).sum::<f64>(), requests);
    assert_eq!(sum("diy_mesh_proxy_faults_total"), 600.0);
    // Failed and successful requests are distinguished without a place of their own, too.
    let other = "service_peer_name=\"other\"";
    for error in ["error_type=\"\"", "error_type=\"_OTHER\""] {
        assert!(
            page.lines()
                .any(|line| line.contains(other) && line.contains(error))
        );
    }
}

#[test]
fn traffic_has_the_totals_by_direction_route_and_peer() {
    let start = Instant::now();
    let metrics = Metrics::new();
    let cart = request(Direction::Outbound, "route", ("shop", "cart"));
    metrics.counted(&cart);
    metrics.counted(&RequestLabels {
        status: 503,
        error: ErrorType::Status,
        tls: TlsKind::None,
        ..cart.clone()
    });
    // A call has a histogram of its own.
    metrics.counted(&RequestLabels { grpc: "OK", ..cart });
    metrics.counted(&request(Direction::Inbound, "", ("shop", "web")));
    let traffic = metrics.requests.traffic(start + Duration::from_secs(3600));
    assert!((3_590_000..=3_600_000).contains(&traffic.milliseconds));
    let [inbound, outbound] = &*traffic.flows else {
        panic!("{traffic:?}");
    };
    assert_eq!((inbound.inbound, &*inbound.peer), (true, "web"));
    let expected = diy_mesh_proto::traffic::Flow {
        inbound: false,
        route: "route".into(),
        peer_namespace: "shop".into(),
        peer: "cart".into(),
        requests: 3,
        failures: 1,
        mutual_tls: 2,
        durations: [vec![0, 0, 0, 3], vec![0; 11]].concat(),
        ..diy_mesh_proto::traffic::Flow::default()
    };
    assert_eq!(*outbound, expected);
}
