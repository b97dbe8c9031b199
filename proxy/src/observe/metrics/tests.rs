//! The page of metrics, sample by sample.

use super::*;

/// Parses a page into samples: name with labels, and value. Panics if the page is not in the
/// OpenMetrics text format.
fn parse(page: &str) -> std::collections::HashMap<String, f64> {
    let page = page.strip_suffix("# EOF\n").expect("an end marker");
    let mut family = String::new();
    let mut samples = std::collections::HashMap::new();
    for line in page.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            family = help.split_once(' ').expect("a help text").0.to_owned();
            assert!(family.starts_with("diy_mesh_proxy_"), "{line}");
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').expect("a type");
            assert_eq!(name, family, "TYPE follows HELP");
            match kind {
                "counter" => family.push_str("_total"),
                "gauge" => {}
                _ => panic!("unexpected type: {line}"),
            }
        } else {
            let (name, value) = line.rsplit_once(' ').expect("a value");
            assert_eq!(
                name.split('{').next(),
                Some(family.as_str()),
                "samples follow their family"
            );
            if let Some((_, labels)) = name.split_once('{') {
                for label in labels.strip_suffix('}').expect("closed labels").split(',') {
                    let (label, value) = label.split_once('=').expect("a label");
                    assert!(
                        label.bytes().all(|byte| byte.is_ascii_lowercase())
                            && value.len() > 2
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
    metrics.request(
        Direction::Outbound,
        HttpVersion::Http2,
        StatusCode::NOT_FOUND,
    );
    metrics.failure(Direction::Outbound, &Failure::NoEndpoint("a/b".into()));
    metrics.opaque(Direction::Inbound, 10, 20);
    let samples = parse(&metrics.render());
    let sample = |name: &str| samples[&format!("diy_mesh_proxy_{name}")];
    assert_eq!(sample("connections_total{direction=\"inbound\"}"), 2.0);
    assert_eq!(sample("connections_open{direction=\"inbound\"}"), 1.0);
    assert_eq!(
        sample("requests_total{direction=\"outbound\",protocol=\"http2\",class=\"4xx\"}"),
        1.0
    );
    assert_eq!(
        sample("requests_total{direction=\"outbound\",protocol=\"http1\",class=\"4xx\"}"),
        0.0
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
fn names_of_policies_are_bounded() {
    let metrics = Metrics::new();
    for number in 0..2 * MAX_NAMES {
        let name = format!("TrafficPolicy shop/{number}");
        metrics.fault(FaultKind::Abort, &name);
        metrics.fault(FaultKind::Abort, "TrafficPolicy shop/0");
    }
    let text = metrics.render();
    let sample = |policy: &str, count: usize| {
        let labels = format!("{{kind=\"abort\",policy=\"{policy}\"}}");
        let line = format!("diy_mesh_proxy_faults_total{labels} {count}\n");
        assert!(text.contains(&line), "{line}: {text}");
    };
    sample("TrafficPolicy shop/0", 2 * MAX_NAMES + 1);
    sample("TrafficPolicy shop/99", 1);
    sample(OTHER, MAX_NAMES);
    assert!(!text.contains("shop/100"), "{text}");
}
