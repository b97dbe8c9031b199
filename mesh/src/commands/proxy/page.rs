//! The text of `mesh proxy`. Pure. Data of a proxy may be hostile: the tables escape it.

use diy_mesh_model::state::{Certificate, Cut, Destination, Discovery, Endpoint, Inbound, State};

use super::terminal::{Cell, Colors, TextStyle, headings, plain};

const MEBIBYTE: f64 = 1024.0 * 1024.0;

/// One page.
pub fn page(state: &State, colors: Colors) -> String {
    let mut rows = proxy(state);
    rows.extend(certificate(state.certificate.as_ref()));
    let failure = state.certificate_failure.as_ref();
    rows.extend(failure.map(|reason| row("failed", reason)));
    match (&state.discovery, &state.inbound) {
        (Some(stream), Some(configuration)) => {
            rows.extend(discovery(stream));
            rows.extend(inbound(configuration));
        }
        _ => rows.push(row("Discovery", "no response in time")),
    }
    let mut page = colors.table(&rows);
    for (number, worker) in state.workers.iter().enumerate() {
        let all = &worker.destinations;
        let title = format!("Destinations of worker {number}: {}", all.items.len());
        page += &format!("\n{}\n", colors.paint(TextStyle::Bold, &title));
        all.items
            .iter()
            .for_each(|one| page += &destination(one, colors));
        page += &colors.table(&omitted(all.omitted, "  ").map_or_else(Vec::new, |row| vec![row]));
    }
    page
}

/// A section, or a value in it.
fn row(name: &str, value: impl Into<String>) -> Vec<Cell> {
    let is_title = name.starts_with(char::is_uppercase);
    let style = if is_title {
        TextStyle::Bold
    } else {
        TextStyle::Ok
    };
    let indent = if is_title { "" } else { "  " };
    vec![style.cell(format!("{indent}{name}")), plain(value)]
}

fn proxy(state: &State) -> Vec<Vec<Cell>> {
    let mut rows = vec![row("Proxy", &state.pod), row("version", &state.version)];
    for worker in &state.workers {
        let memory = [worker.bytes, worker.max_bytes].map(|bytes| bytes as f64 / MEBIBYTE);
        let (open, max, [used, limit]) = (worker.connections, worker.max_connections, memory);
        let text = format!("{open} of {max} connections, {used:.1} of {limit:.1} MiB");
        rows.push(row("worker", text));
    }
    rows.extend(state.failed_probes.iter().map(|text| row("probes", text)));
    if state.silent_workers > 0 {
        let text = format!("{} more did not respond in time", state.silent_workers);
        rows.push(row("worker", text));
    }
    rows
}

fn certificate(certificate: Option<&Certificate>) -> Vec<Vec<Cell>> {
    let Some(one) = certificate else {
        return vec![row("Certificate", "none that is valid")];
    };
    let roots = format!("{}, version {}", one.trust_roots, one.roots_version);
    vec![
        row("Certificate", &one.identity),
        row("not after", &one.not_after),
        row("trust roots", roots),
    ]
}

fn discovery(stream: &Discovery) -> Vec<Vec<Cell>> {
    let state = if stream.connected {
        "connected"
    } else {
        "not connected"
    };
    let age = stream.message_age_ms;
    let age = age.map_or("no message yet".into(), |age| {
        format!("latest message {} ago", seconds(age))
    });
    let subscriptions = format!("{}, {} refused", stream.subscriptions, stream.refused);
    let mut rows = vec![
        row("Discovery", format!("{state}, {age}")),
        row("subscriptions", subscriptions),
    ];
    rows.extend(stream.unready.iter().map(|reason| row("not ready", reason)));
    rows
}

fn inbound(inbound: &Inbound) -> Vec<Vec<Cell>> {
    let mode = match (inbound.pending, inbound.strict) {
        (true, _) => "no configuration yet: no client may call",
        (false, true) => "strict: only callers with mesh TLS",
        (false, false) => "permissive: callers with and without mesh TLS",
    };
    let connect = if inbound.allow_connect {
        "forwarded"
    } else {
        "rejected"
    };
    let policies =
        |policies: &Option<_>| policies.as_ref().map_or("none: all allowed".into(), list);
    let mut rows = vec![row("Inbound", mode)];
    for (name, text) in [
        ("version", inbound.version.clone()),
        ("zone", inbound.zone.clone()),
        ("opaque ports", inbound.opaque_ports.clone()),
        ("CONNECT", connect.into()),
        ("policies", policies(&inbound.authorization)),
        ("egress", policies(&inbound.egress)),
        ("rate limits", list(&inbound.rate_limits)),
    ] {
        rows.extend((!text.is_empty()).then(|| row(name, text)));
    }
    rows
}

fn list(names: &Cut<String>) -> String {
    let more = (names.omitted > 0).then(|| format!("{} more", names.omitted));
    let names: Vec<_> = names.items.iter().cloned().chain(more).collect();
    names.join(", ")
}

fn destination(destination: &Destination, colors: Colors) -> String {
    let Destination {
        name,
        service,
        kind,
        policy,
        version,
        ..
    } = destination;
    let mut title = if name == service {
        name.clone()
    } else {
        format!("{service} ({name})")
    };
    title += &format!(
        ": {}",
        if destination.inbound {
            "the application"
        } else {
            kind
        }
    );
    for (name, text) in [
        ("protocol", destination.protocol.as_ref()),
        ("policy", Some(policy)),
        ("routes", Some(&list(&destination.routes))),
        ("invalid routes:", destination.rejected_routes.as_ref()),
        ("version", Some(version)),
    ] {
        let text = text.filter(|text| !text.is_empty());
        title += &text.map_or_else(String::new, |text| format!(", {name} {text}"));
    }
    let all = &destination.endpoints;
    let mut rows = vec![headings([
        "    ENDPOINT",
        "POD",
        "ZONE",
        "IDENTITY",
        "IN FLIGHT",
        "LATENCY",
        "CONNECTIONS",
        "STATE",
    ])];
    let circuit = destination.circuit_open_ms;
    rows.extend(all.items.iter().map(|one| endpoint(one, circuit)));
    rows.extend(omitted(all.omitted, "    "));
    if rows.len() == 1 {
        rows = vec![vec![plain("    no endpoints")]];
    }
    colors.table(&[vec![plain(format!("  {title}"))]]) + &colors.table(&rows)
}

fn omitted(count: usize, indent: &str) -> Option<Vec<Cell>> {
    let text = format!("{indent}{count} more are not shown");
    (count > 0).then(|| vec![plain(text)])
}

fn endpoint(endpoint: &Endpoint, circuit_open_ms: Option<f64>) -> Vec<Cell> {
    // The part of "spiffe://DOMAIN/ns/NAMESPACE/sa/ACCOUNT" that differs.
    let identity = endpoint.identity.as_deref().unwrap_or_default();
    let identity = identity
        .split_once("/ns/")
        .map_or(identity, |(_, rest)| rest);
    let latency = endpoint
        .latency_ms
        .map(|latency| format!("{latency:.1} ms"));
    let pool = &endpoint.pool;
    let connections = pool.connections as usize + pool.http2_connections + pool.idle;
    let states = states(endpoint, circuit_open_ms);
    let state = if states.is_empty() {
        plain("ready")
    } else {
        TextStyle::Warning.cell(states.join("; "))
    };
    let opaque = if endpoint.opaque { " opaque" } else { "" };
    let or_none = |text: &str| plain(if text.is_empty() { "-" } else { text });
    vec![
        plain(format!("    {}{opaque}", endpoint.address)),
        or_none(&endpoint.pod),
        or_none(&endpoint.zone),
        or_none(identity),
        plain(endpoint.in_flight.to_string()),
        or_none(&latency.unwrap_or_default()),
        plain(connections.to_string()),
        state,
    ]
}

/// Why requests, or some of them, do not go to the endpoint.
fn states(endpoint: &Endpoint, circuit_open_ms: Option<f64>) -> Vec<String> {
    let left = |time: f64| {
        let ended = (time == 0.0).then(|| "until a request succeeds".to_owned());
        ended.unwrap_or_else(|| format!("for {}", seconds(time)))
    };
    let circuit = circuit_open_ms.map(|time| format!("circuit open {}", left(time)));
    let ejected = endpoint.ejected.as_ref().zip(endpoint.ejected_ms);
    let ejected = ejected.map(|(cause, time)| format!("ejected ({cause}) {}", left(time)));
    let overloaded = endpoint.no_retry_ms;
    let overloaded = overloaded.map(|time| format!("no retries for {}", seconds(time)));
    let waiting = Some(endpoint.pool.waiting).filter(|waiting| *waiting > 0);
    let waiting = waiting.map(|waiting| format!("at its limit, {waiting} requests wait"));
    [circuit, ejected, overloaded, waiting]
        .into_iter()
        .flatten()
        .collect()
}

fn seconds(milliseconds: f64) -> String {
    format!("{:.1} s", milliseconds / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use diy_mesh_model::state::{Pool, Worker};

    fn cut<T>(items: Vec<T>, omitted: usize) -> Cut<T> {
        Cut { items, omitted }
    }

    fn endpoint(address: &str) -> Endpoint {
        Endpoint {
            address: address.into(),
            pod: "shop/cart-1".into(),
            zone: "a".into(),
            identity: Some("spiffe://cluster.local/ns/shop/sa/cart".into()),
            ..Endpoint::default()
        }
    }

    fn cart() -> Destination {
        let ejected = Endpoint {
            ejected: Some("refused".into()),
            ejected_ms: Some(800.0),
            ..endpoint("10.1.0.1:80")
        };
        let ready = Endpoint {
            in_flight: 3,
            latency_ms: Some(1.25),
            opaque: true,
            pool: Pool {
                connections: 2,
                idle: 1,
                ..Pool::default()
            },
            ..endpoint("10.1.0.2:80")
        };
        Destination {
            name: "10.96.0.7:80".into(),
            service: "shop/cart".into(),
            kind: "service".into(),
            protocol: Some("http2".into()),
            version: "4f".into(),
            policy: "TrafficPolicy shop/cart".into(),
            routes: cut(vec!["HTTPRoute shop/cart".into()], 2),
            endpoints: cut(vec![ejected, ready], 7),
            ..Destination::default()
        }
    }

    fn state() -> State {
        State {
            version: "1.2.3".into(),
            pod: "shop/web-1".into(),
            certificate: Some(Certificate {
                identity: "spiffe://cluster.local/ns/shop/sa/web".into(),
                not_after: "2026-11-28T17:00:00.000Z".into(),
                trust_roots: 2,
                roots_version: "r1".into(),
            }),
            certificate_failure: None,
            discovery: Some(Discovery {
                connected: true,
                message_age_ms: Some(3210.0),
                subscriptions: 12,
                ..Discovery::default()
            }),
            inbound: Some(Inbound {
                strict: true,
                version: "9a".into(),
                authorization: Some(cut(vec!["AuthorizationPolicy shop/a (audit)".into()], 1)),
                rate_limits: cut(vec!["TrafficPolicy shop/web all per caller".into()], 0),
                ..Inbound::default()
            }),
            failed_probes: vec!["2 of 2 failed, TCP port 80: connect-failed".into()],
            workers: vec![Worker {
                connections: 12,
                max_connections: 2048,
                bytes: 1 << 20,
                max_bytes: 24 << 20,
                destinations: cut(vec![cart()], 1),
            }],
            silent_workers: 0,
        }
    }

    /// The lines of the page, with single spaces between words.
    fn lines(state: &State) -> Vec<String> {
        let page = page(state, Colors::DISABLED);
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        page.lines().map(words).collect()
    }

    #[track_caller]
    fn assert_shows(state: &State, expected: &[&str]) {
        let lines = lines(state);
        for line in expected {
            assert!(
                lines.iter().any(|other| other == line),
                "{line}\n{lines:#?}"
            );
        }
    }

    #[test]
    fn page_shows_what_is_in_force() {
        assert_shows(
            &state(),
            &[
                "Proxy shop/web-1",
                "worker 12 of 2048 connections, 1.0 of 24.0 MiB",
                "probes 2 of 2 failed, TCP port 80: connect-failed",
                "Certificate spiffe://cluster.local/ns/shop/sa/web",
                "not after 2026-11-28T17:00:00.000Z",
                "trust roots 2, version r1",
                "Discovery connected, latest message 3.2 s ago",
                "subscriptions 12, 0 refused",
                "Inbound strict: only callers with mesh TLS",
                "version 9a",
                "policies AuthorizationPolicy shop/a (audit), 1 more",
                "egress none: all allowed",
                "rate limits TrafficPolicy shop/web all per caller",
                "Destinations of worker 0: 1",
                "shop/cart (10.96.0.7:80): service, protocol http2, policy TrafficPolicy shop/cart, \
                 routes HTTPRoute shop/cart, 2 more, version 4f",
                "10.1.0.1:80 shop/cart-1 a shop/sa/cart 0 - 0 ejected (refused) for 0.8 s",
                "10.1.0.2:80 opaque shop/cart-1 a shop/sa/cart 3 1.2 ms 3 ready",
                "7 more are not shown",
                "1 more are not shown",
            ],
        );
    }

    #[test]
    fn endpoint_says_why_it_gets_no_requests() {
        let mut endpoint = endpoint("10.1.0.1:80");
        assert!(states(&endpoint, None).is_empty());
        (endpoint.ejected, endpoint.ejected_ms) = (Some("latency".into()), Some(0.0));
        endpoint.no_retry_ms = Some(2000.0);
        endpoint.pool.waiting = 4;
        assert_eq!(
            states(&endpoint, Some(30_000.0)),
            [
                "circuit open for 30.0 s",
                "ejected (latency) until a request succeeds",
                "no retries for 2.0 s",
                "at its limit, 4 requests wait",
            ]
        );
    }

    #[test]
    fn what_is_missing_is_said() {
        let mut empty = State {
            silent_workers: 1,
            certificate_failure: Some("the new certificate expired 1200s ago".into()),
            workers: vec![Worker::default(); 2],
            ..State::default()
        };
        empty.workers[1].destinations.items = vec![Destination {
            inbound: true,
            name: "10.1.0.9:8080".into(),
            service: "10.1.0.9:8080".into(),
            rejected_routes: Some("no".into()),
            ..Destination::default()
        }];
        assert_shows(
            &empty,
            &[
                "worker 1 more did not respond in time",
                "Certificate none that is valid",
                "failed the new certificate expired 1200s ago",
                "Discovery no response in time",
                "Destinations of worker 0: 0",
                "Destinations of worker 1: 1",
                "10.1.0.9:8080: the application, invalid routes: no",
                "no endpoints",
            ],
        );
        empty.discovery = Some(Discovery {
            unready: Some("no response".into()),
            ..Discovery::default()
        });
        empty.inbound = Some(Inbound {
            pending: true,
            ..Inbound::default()
        });
        assert_shows(
            &empty,
            &[
                "Discovery not connected, no message yet",
                "not ready no response",
                "Inbound no configuration yet: no client may call",
            ],
        );
    }

    #[test]
    fn hostile_texts_add_no_lines_and_control_no_terminal() {
        let hostile = || "x\n\u{1b}[2Jfake".to_owned();
        let mut state = state();
        state.certificate_failure = Some("no".into());
        let before = lines(&state).len();
        (state.pod, state.certificate_failure) = (hostile(), Some(hostile()));
        let inbound = state.inbound.as_mut().expect("a configuration");
        inbound.rate_limits.items[0] = hostile();
        let cart = &mut state.workers[0].destinations.items[0];
        (cart.name, cart.policy, cart.routes.items[0]) = (hostile(), hostile(), hostile());
        cart.endpoints.items[0].pod = hostile();
        let page = page(&state, Colors::DISABLED);
        assert_eq!(page.lines().count(), before);
        assert!(!page.contains('\u{1b}'), "{page}");
    }
}
