//! Tests from the lines of containers to the output of the demo.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use diy_mesh_model::exchange::{self, Dump};
use serde_json::{Value, json};

use super::{
    check_only, request_json_dumps,
    screen::{Detail, Screen},
    story::{Item, Story},
    summary::Summary,
};
use diy_mesh_sandbox::{
    manifest,
    protocol::{LogLine, PodView, Source},
};

const CALLER: &str = "10.244.0.7";
const CALLEE: &str = "10.244.0.6";

/// A story with the pods `web-1` and `cart-1`, both with a proxy.
fn story() -> Story {
    let mut story = Story::default();
    for (workload, ip) in [("web", CALLER), ("cart", CALLEE)] {
        story.record_pod(&PodView {
            namespace: "shop".into(),
            name: format!("{workload}-1"),
            workload: workload.into(),
            ip: Some(ip.into()),
            injected: true,
            ..PodView::default()
        });
    }
    story
}

fn line(workload: &str, container: &str, line: impl ToString) -> LogLine {
    let source = Source {
        namespace: "shop".into(),
        pod: format!("{workload}-1"),
        workload: workload.into(),
        container: container.into(),
    };
    let line = line.to_string();
    LogLine { source, line }
}

fn part(start_line: &str, body: &str) -> Value {
    let text = (!body.is_empty()).then_some(body);
    json!({"start_line": start_line, "headers": [["Host", "cart"]], "body": text, "body_bytes": body.len()})
}

fn outbound() -> Value {
    json!({
        "time": "2026-11-21T10:00:00.100Z", "direction": "outbound", "peer": format!("{CALLER}:40000"),
        "destination": "10.96.0.12:80", "endpoint": format!("{CALLEE}:8080"), "protocol": "http1",
        "identity": "spiffe://cluster.local/ns/shop/sa/cart", "duration_ms": 1.25,
        "request": part("GET /items HTTP/1.1", ""), "response": part("HTTP/1.1 200 OK", "3 items\n"),
    })
}

fn inbound() -> Value {
    let mut dump = outbound();
    dump["time"] = "2026-11-21T10:00:00.101Z".into();
    dump["direction"] = "inbound".into();
    dump["destination"] = format!("{CALLEE}:8080").into();
    dump.as_object_mut().unwrap().remove("endpoint");
    dump
}

fn screen(detail: Detail, only: &[&str]) -> Screen {
    let only = only.iter().map(ToString::to_string).collect();
    Screen::new(detail, only, BTreeSet::new())
}

fn record_exchange(story: &mut Story, now: Instant) {
    story.record_line(line("cart", "proxy", inbound()), now);
    for text in ["Request #1", "GET /items HTTP/1.1"] {
        story.record_line(line("cart", "cart", text), now);
    }
    story.record_line(line("web", "proxy", outbound()), now);
    for text in ["Response #1", "HTTP/1.1 200 OK", "Response #2", "other"] {
        story.record_line(line("web", "web", text), now);
    }
}

#[test]
fn prints_first_exchange_as_block_and_the_next_as_line() {
    let (mut story, mut screen) = (story(), screen(Detail::Story, &[]));
    let mut now = Instant::now();
    let mut pages = Vec::new();
    for _ in 0..2 {
        record_exchange(&mut story, now);
        assert!(story.take_complete(now).is_empty());
        now += Duration::from_millis(250);
        let items = story.take_complete(now);
        pages.push(
            items
                .iter()
                .map(|item| screen.format(item, &story))
                .collect::<String>(),
        );
        now += Duration::from_secs(10);
        assert!(
            story
                .take_complete(now)
                .iter()
                .all(|item| screen.format(item, &story).is_empty()),
            "other output is not printed"
        );
    }
    let headline = "web -> cart  GET /items  200     1.2 ms  mTLS\n";
    assert_eq!(
        pages[0],
        format!(
            "{headline}  web[web]    Response #1
  web[web]    HTTP/1.1 200 OK
  web[proxy]  Outbound connection to 10.96.0.12:80
  web[proxy]  GET /items HTTP/1.1
  web[proxy]  Host: cart
  web[proxy]  \n  web[proxy]  HTTP/1.1 200 OK
  web[proxy]  Host: cart
  web[proxy]  \n  web[proxy]  3 items
  web[proxy]  \n  web[proxy]  [2026-11-21T10:00:00.100Z, 1.250 ms, endpoint 10.244.0.6:8080, mutual TLS with spiffe://cluster.local/ns/shop/sa/cart]
  cart[proxy] Inbound connection from 10.244.0.7:40000 to port: 8080
  cart[proxy] GET /items HTTP/1.1
  cart[proxy] Host: cart
  cart[proxy] \n  cart[proxy] HTTP/1.1 200 OK
  cart[proxy] Host: cart
  cart[proxy] \n  cart[proxy] 3 items
  cart[proxy] \n  cart[proxy] [2026-11-21T10:00:00.101Z, 1.250 ms, mutual TLS with spiffe://cluster.local/ns/shop/sa/cart]
  cart[cart]  Request #1
  cart[cart]  GET /items HTTP/1.1

"
        )
    );
    assert_eq!(pages[1], headline);
}

#[test]
fn only_shows_blocks_of_one_workload_and_its_other_output() {
    let (mut story, mut screen) = (story(), screen(Detail::Everything, &["web"]));
    record_exchange(&mut story, Instant::now());
    story.record_line(line("web", "web", "Response #3"), Instant::now());
    let items = story.take_all();
    let page: String = items
        .iter()
        .map(|item| screen.format(item, &story))
        .collect();
    assert!(page.starts_with("web -> cart  GET /items  200"), "{page}");
    assert!(
        page.contains("\n  web[proxy] Outbound connection"),
        "{page}"
    );
    assert!(page.contains("  web[web] Response #3\n"), "{page}");
    assert!(!page.contains("cart["), "{page}");
}

#[test]
fn requests_from_outside_the_pods_are_printed_only_on_request() {
    let mut request = inbound();
    request["peer"] = "10.244.0.1:50000".into();
    for (detail, expected) in [(Detail::Story, false), (Detail::Everything, true)] {
        let (mut story, mut screen) = (story(), screen(detail, &[]));
        story.record_line(line("cart", "proxy", &request), Instant::now());
        let items = story.take_all();
        assert_eq!(!screen.format(&items[0], &story).is_empty(), expected);
    }
}

#[test]
fn failure_without_other_side_names_its_cause() {
    let mut dump = outbound();
    dump["failure"] = json!({"code": "connect-failed", "message": "10.244.0.6 refuses"});
    dump["response"] = part("HTTP/1.1 502 Bad Gateway", "");
    dump.as_object_mut().unwrap().remove("identity");
    let (mut story, mut screen) = (story(), screen(Detail::Story, &[]));
    let now = Instant::now();
    story.record_line(line("web", "proxy", dump), now);
    let items = story.take_complete(now + Duration::from_secs(5));
    let page = screen.format(&items[0], &story);
    let expected =
        "web -> cart  GET /items  502     1.2 ms  plaintext  connect-failed: 10.244.0.6 refuses\n";
    assert!(page.starts_with(expected), "{page}");
}

#[test]
fn failure_names_the_command_that_explains_it() {
    let page = |change: &dyn Fn(&mut Value), is_served: bool| {
        let (mut story, mut screen) = (story(), screen(Detail::Story, &[]));
        if is_served {
            screen.name_why();
        }
        let mut dump = outbound();
        dump["id"] = "10.244.0.7-5f3a9c210b44".into();
        change(&mut dump);
        story.record_line(line("web", "proxy", dump), Instant::now());
        let page = screen.format(&story.take_all()[0], &story);
        page.lines().next().expect("a line").to_owned()
    };
    let command = "  mTLS  mesh why --demo 10.244.0.7-5f3a9c210b44";
    let grpc_error = |dump: &mut Value| {
        dump["response"]["trailers"] = json!([["grpc-status", "14"]]);
    };
    assert!(page(&grpc_error, true).ends_with(command));
    assert!(page(&grpc_error, false).ends_with("  mTLS"));
    assert!(page(&|_| {}, true).ends_with("  mTLS"));
    let open = |dump: &mut Value| dump["incomplete"] = exchange::STILL_OPEN.into();
    assert!(!page(&open, true).contains("mesh why"));
    let unknown = |dump: &mut Value| {
        grpc_error(dump);
        dump["id"] = Value::Null;
    };
    assert!(page(&unknown, true).ends_with("  mTLS"));
}

#[test]
fn exchange_that_the_proxy_of_the_callee_denied_failed() {
    let (mut story, mut screen) = (story(), screen(Detail::Story, &[]));
    screen.name_why();
    let (mut caller, mut callee) = (outbound(), inbound());
    for dump in [&mut caller, &mut callee] {
        dump["id"] = "10.244.0.7-5f3a9c210b44".into();
        dump["response"] = part("HTTP/1.1 403 Forbidden", "");
    }
    callee["failure"] = json!({"code": "denied", "message": "no rule matches"});
    story.record_line(line("web", "proxy", caller), Instant::now());
    story.record_line(line("cart", "proxy", callee), Instant::now());
    let items = story.take_all();
    let page = screen.format(&items[0], &story);
    let line = page.lines().next().expect("a line");
    assert!(
        line.contains(" 403 ") && line.contains("  mesh why --demo "),
        "{line}"
    );
    let mut summary = Summary::default();
    if let Item::Exchange(exchange) = &items[0] {
        summary.record_exchange(exchange, &story);
    }
    let text = summary.text(Duration::from_secs(30), None);
    assert!(text.contains("1 exchange, 1 failed"), "{text}");
}

#[test]
fn exchange_waits_for_the_late_output_of_an_application() {
    let (mut story, start) = (story(), Instant::now());
    let at = |milliseconds| start + Duration::from_millis(milliseconds);
    story.record_line(line("cart", "proxy", inbound()), start);
    story.record_line(line("web", "proxy", outbound()), start);
    for text in ["Request #1", "GET /items HTTP/1.1"] {
        story.record_line(line("cart", "cart", text), start);
    }
    assert!(story.take_complete(at(4900)).is_empty());
    for text in ["Response #1", "HTTP/1.1 200 OK"] {
        story.record_line(line("web", "web", text), at(4900));
    }
    let items = story.take_complete(at(4900));
    let [Item::Exchange(exchange)] = &items[..] else {
        panic!("{items:?}");
    };
    assert!(exchange.caller_output.is_some() && exchange.callee_output.is_some());
}

#[test]
fn exchanges_of_silent_applications_wait_once() {
    let (mut story, mut now) = (story(), Instant::now());
    for wait in [Duration::from_secs(5), Duration::from_millis(250)] {
        story.record_line(line("cart", "proxy", inbound()), now);
        story.record_line(line("web", "proxy", outbound()), now);
        assert!(story.take_complete(now + wait / 2).is_empty());
        now += wait;
        assert_eq!(story.take_complete(now).len(), 1);
    }
}

#[test]
fn dump_of_one_proxy_waits_for_the_other() {
    let mut story = story();
    let now = Instant::now();
    story.record_line(line("cart", "proxy", inbound()), now);
    assert!(
        story
            .take_complete(now + Duration::from_millis(4900))
            .is_empty()
    );
    let items = story.take_complete(now + Duration::from_secs(5));
    assert!(matches!(&items[..], [Item::Exchange(exchange)] if exchange.outbound.is_none()));
}

#[test]
fn dumps_of_different_exchanges_are_not_joined() {
    let change = |name: &str, value: &str| {
        let mut dump = inbound();
        dump[name] = value.into();
        dump
    };
    let mut other_request = inbound();
    other_request["request"]["start_line"] = "GET /other HTTP/1.1".into();
    for dump in [
        change("time", "2026-11-21T10:00:00.200Z"),
        change("time", "2026-11-21T10:00:00.090Z"),
        change("peer", "10.244.0.9:40000"),
        change("destination", "10.244.0.5:8080"),
        other_request,
    ] {
        let mut story = story();
        story.record_line(line("web", "proxy", outbound()), Instant::now());
        story.record_line(line("cart", "proxy", &dump), Instant::now());
        assert_eq!(story.take_all().len(), 2, "{dump}");
    }
}

#[test]
fn formats_dumps_as_the_proxy_does() {
    let text = |dump: Value| {
        let dump: Dump = serde_json::from_value(dump).expect("a record");
        dump.text().trim_end().to_owned()
    };
    let mut grpc = outbound();
    grpc["response"] = json!({
        "start_line": "HTTP/2 200", "headers": [], "headers_omitted": 2, "body_kind": "grpc", "messages": 1,
        "body_bytes": 50, "trailers": [["grpc-status", "4"]],
    });
    let page = text(grpc);
    let end = "HTTP/2 200\n[and 2 more]\n\n[1 gRPC message, 50 bytes]\n\ngrpc-status: 4 (DEADLINE_EXCEEDED)\n\n[2026-";
    assert!(page.contains(end), "{page}");
    let mut routed = outbound();
    routed["route"] = "HTTPRoute shop/cart".into();
    routed["backend"] = "shop/cart-v2:80".into();
    routed["fault"] = json!({"policy": "TrafficPolicy shop/cart", "delay_ms": 100.0});
    let page = text(routed);
    let first = "Outbound connection to 10.96.0.12:80 by HTTPRoute shop/cart to shop/cart-v2:80\n";
    assert!(page.starts_with(first), "{page}");
    let fault = "\n[fault of TrafficPolicy shop/cart, delayed by 100ms]\n";
    assert!(page.contains(fault), "{page}");
    let mut long = outbound();
    long["response"]["body"] = "ab\u{1b}[2J".into();
    long["response"]["body_bytes"] = 5000.into();
    let page = text(long);
    assert!(
        page.contains("ab\\x1b[2J\n[the first 6 of 5000 bytes]\n"),
        "{page}"
    );
    let opaque = json!({
        "time": "2026-11-21T10:00:00.100Z", "direction": "inbound", "peer": "10.0.0.1:1", "destination": "[fd00::7]:25",
        "protocol": "tcp", "duration_ms": 1500.0, "sent": 1, "received": 80,
    });
    let expected = "Inbound connection from 10.0.0.1:1 to port: 25\n[TCP: 1 byte sent, 80 bytes received, 1.500 s from 2026-11-21T10:00:00.100Z, no mutual TLS]";
    assert_eq!(text(opaque), expected);
}

#[test]
fn pods_print_json_unless_manifests_name_a_format() {
    let workload = |name: &str, annotations: Value| {
        json!({"kind": "Deployment", "metadata": {"name": name, "namespace": "shop"},
            "spec": {"template": {"metadata": {"annotations": annotations}}}})
    };
    let format = "diy-service-mesh/dump-format";
    let mut objects = vec![
        workload("web", Value::Null),
        workload("cart", json!({format: "JSON"})),
        workload("till", json!({format: "text"})),
        json!({"kind": "Service", "metadata": {"name": "web"}}),
    ];
    let json = request_json_dumps(&mut objects);
    assert_eq!(
        json,
        BTreeSet::from([("shop".to_owned(), "cart".to_owned())])
    );
    let annotation =
        |object: &Value| object["spec"]["template"]["metadata"]["annotations"][format].clone();
    let formats: Vec<Value> = objects.iter().map(annotation).collect();
    assert_eq!(
        formats,
        [json!("json"), json!("JSON"), json!("text"), Value::Null]
    );
    assert!(objects[3].get("spec").is_none());
}

#[test]
fn summary_counts_exchanges_of_workloads() {
    let (mut story, mut summary) = (story(), Summary::default());
    record_exchange(&mut story, Instant::now());
    for item in story.take_all() {
        if let Item::Exchange(exchange) = item {
            summary.record_exchange(&exchange, &story);
        }
    }
    let text = summary.text(Duration::from_secs(30), Some(Duration::from_millis(1234)));
    assert_eq!(
        text,
        "mesh demo: ran 30 s, all ready after 1.2 s; 0 pods, 0 of them with a proxy, 0 restarts\n  \
         web -> cart  1 exchange, 0 failed, 1 with mTLS, average 1.2 ms"
    );
}

#[test]
fn only_rejects_names_of_nothing() {
    let objects = manifest::embedded().objects().expect("valid manifests");
    let check = |name: &str| check_only(&[name.to_owned()], &objects);
    for name in [
        "http-client",
        "http-server-v1-abc-def",
        "service-mesh",
        "proxy",
    ] {
        assert!(check(name).is_ok(), "{name}");
    }
    let error = check("nobody")
        .expect_err("there is no such name")
        .to_string();
    assert!(
        error.contains("--only nobody") && error.contains("grpc-client, grpc-server"),
        "{error}"
    );
}
