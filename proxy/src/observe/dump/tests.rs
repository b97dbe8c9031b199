//! Dumps from the handle to the output.

mod telemetry;

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use diy_mesh_model::exchange::{Direction, Protocol, Transfer};
use http::{HeaderMap, HeaderName, Request, StatusCode, Version};

use super::*;
use crate::endpoint::EndpointInfo;
use crate::error::Failure;
use crate::http::edits::Edits;
use crate::http::view::{self, RequestView};
use crate::observe::ended::{Attempt, testing::ended};
use crate::route::Rule;
use crate::serve::http1::head::{RequestHead, ResponseHead};

const FLUSH_TIMEOUT: Duration = Duration::from_secs(20);

/// Shared output; each write is one piece.
#[derive(Clone, Default)]
struct Output(Arc<Mutex<Vec<String>>>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = String::from_utf8(bytes.to_vec()).map_err(io::Error::other)?;
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(piece);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Output {
    fn pieces(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

fn start(mode: Mode, format: Format) -> (Dumps, Output, Arc<Metrics>) {
    let (output, metrics) = (Output::default(), Metrics::new());
    let dumps = Dumps::start(
        DumpConfig {
            mode,
            format,
            out: Box::new(output.clone()),
        },
        metrics.clone(),
    )
    .unwrap();
    (dumps, output, metrics)
}

fn header_map(fields: &[(&str, &str)]) -> HeaderMap {
    let parse = |(name, value): &(&str, &str)| (name.parse().unwrap(), value.parse().unwrap());
    let mut headers = HeaderMap::new();
    fields
        .iter()
        .map(parse)
        .for_each(|(name, value): (HeaderName, _)| {
            headers.append(name, value);
        });
    headers
}

fn request(dump: &mut ExchangeDump, head: &'static str) {
    let head = RequestHead::parse(head.into()).unwrap();
    dump.fill(|record| record.request_head(&head.view(), Edits::default()));
}

fn respond(dump: &mut ExchangeDump, status: StatusCode, reason: &[u8], fields: &dyn view::Fields) {
    dump.fill(|record| record.response_head(status, reason, fields, Edits::default()));
}

fn hello(dump: &mut ExchangeDump) {
    request(
        dump,
        "POST /hello?a=b HTTP/1.1\r\nHost: http-server\r\nX-CaSe: kept\r\n\
         AUTHORIZATION: Bearer secret\r\n\r\n",
    );
    dump.fill(|record| record.request.body.append(b"ping"));
    dump.fill(|record| record.request.ended = true);
    let head =
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nSet-Cookie: id=secret; Path=/\r\n\r\n";
    let head = ResponseHead::parse(head.into(), b"POST").unwrap();
    respond(dump, StatusCode::OK, head.reason(), &head);
    dump.fill(|record| record.response.body.append(b"po"));
    dump.fill(|record| record.response.body.append(b"ng\n"));
    dump.fill(|record| record.response.ended = true);
}

/// Output of one exchange.
fn written(
    mode: Mode,
    format: Format,
    direction: Direction,
    fill: impl FnOnce(&mut ExchangeDump),
) -> String {
    written_of(ended(direction), mode, format, fill)
}

/// Output of an exchange that ended so.
fn written_of(
    ended: Ended,
    mode: Mode,
    format: Format,
    fill: impl FnOnce(&mut ExchangeDump),
) -> String {
    let (dumps, output, _) = start(mode, format);
    let mut dump = dumps.exchange(None, None).unwrap();
    fill(&mut dump);
    dump.write(&Arc::new(ended), false);
    dumps.flush(FLUSH_TIMEOUT);
    let [piece] = output.pieces().try_into().expect("one piece");
    piece
}

/// Output of one exchange as text, and its last line, without the brackets.
fn text(
    mode: Mode,
    direction: Direction,
    fill: impl FnOnce(&mut ExchangeDump),
) -> (String, String) {
    let text = written(mode, Format::Text, direction, fill);
    let (exchange, details) = text.trim_end().rsplit_once('\n').unwrap();
    let details = details.trim_matches(['[', ']']).to_owned();
    (format!("{exchange}\n"), details)
}

#[test]
fn renders_exchange_as_text() {
    let (text, details) = text(Mode::Full, Direction::Inbound, hello);
    let (time, details) = details.split_once(", ").unwrap();
    let (duration, details) = details.split_once(" ms, ").unwrap();
    assert!(time.starts_with("20") && time.ends_with('Z'), "{time}");
    assert!(duration.parse::<f64>().unwrap() < 60_000.0, "{duration}");
    assert_eq!(details, "no mutual TLS");
    assert_eq!(
        text,
        "Inbound connection from 10.0.0.7:41234 to port: 8080\n\
         POST /hello?a=b HTTP/1.1\nHost: http-server\nX-CaSe: kept\nAUTHORIZATION: Bearer ***\n\nping\n\n\
         HTTP/1.1 200 OK\nContent-Type: text/plain\nSet-Cookie: id=***; Path=/\n\npong\n\n"
    );
}

#[test]
fn headers_mode_omits_bodies_and_query_strings() {
    let text = written(Mode::Headers, Format::Text, Direction::Outbound, hello);
    assert!(
        text.starts_with("Outbound connection to 10.0.0.9:8080\nPOST /hello?*** HTTP/1.1\n"),
        "{text}"
    );
    assert!(
        text.contains("[a body, 4 bytes]") && text.contains("[a body, 5 bytes]"),
        "{text}"
    );
    assert!(
        !text.contains("ping") && !text.contains("pong") && !text.contains("secret"),
        "{text}"
    );
    let line = written(Mode::Headers, Format::Json, Direction::Outbound, hello);
    assert!(line.contains("\"POST /hello?*** HTTP/1.1\""), "{line}");
}

#[test]
fn renders_grpc_metadata_message_counts_and_status() {
    let (text, _) = text(Mode::Full, Direction::Outbound, |dump| {
        let head = Request::post("http://grpc-server:80/echo.v1.EchoService/Echo")
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        let head = diy_mesh_http2::Request::from(&head.body(()).unwrap().into_parts().0);
        let request = RequestView {
            head: &head,
            version: Version::HTTP_2,
            ..view::testing::request("POST", "/echo.v1.EchoService/Echo")
        };
        dump.fill(|record| record.request_head(&request, Edits::default()));
        dump.fill(|record| record.request.body.append(b"\0\0\0\0\x02hi"));
        dump.fill(|record| record.request.ended = true);
        let fields = [("content-type", "application/grpc")];
        respond(dump, StatusCode::OK, b"", &header_map(&fields));
        dump.fill(|record| record.response.body.append(b"\0\0\0\0\x02hi\0\0"));
        dump.fill(|record| record.response.body.append(b"\0\0\x02ho"));
        let trailers = [("grpc-status", "5"), ("grpc-message", "no such echo")];
        dump.fill(|record| record.response.set_trailers(&header_map(&trailers)));
        dump.fill(|record| record.response.ended = true);
    });
    assert_eq!(
        text,
        "Outbound connection to 10.0.0.9:8080\n\
         POST /echo.v1.EchoService/Echo HTTP/2\nhost: grpc-server:80\ncontent-type: application/grpc\nte: trailers\n\n\
         [1 gRPC message, 7 bytes]\n\n\
         HTTP/2 200\ncontent-type: application/grpc\n\n[2 gRPC messages, 14 bytes]\n\n\
         grpc-status: 5 (NOT_FOUND)\ngrpc-message: no such echo\n\n"
    );
}

#[test]
fn reports_aborted_exchange() {
    let (aborted, _) = text(Mode::Full, Direction::Inbound, |dump| {
        request(dump, "GET / HTTP/1.1\r\nHost: a\r\n\r\n");
        dump.fill(|record| record.request.ended = true);
    });
    assert!(
        aborted.ends_with("GET / HTTP/1.1\nHost: a\n\n[cut off before the response began]\n\n"),
        "{aborted}"
    );
    let (text, _) = text(Mode::Full, Direction::Inbound, |dump| {
        request(dump, "GET / HTTP/1.1\r\nHost: a\r\n\r\n");
        dump.fill(|record| record.request.ended = true);
        respond(dump, StatusCode::OK, b"OK", &HeaderMap::new());
        dump.fill(|record| record.cut_off = Some("the client\x1b went away".to_owned()));
    });
    assert!(
        text.ends_with("HTTP/1.1 200 OK\n\n[the client\\x1b went away]\n\n"),
        "{text}"
    );
}

/// A request without a response.
fn get(dump: &mut ExchangeDump) {
    request(dump, "GET / HTTP/1.1\r\nHost: a\r\n\r\n");
}

#[test]
fn renders_failure_before_its_response() {
    let ended = Ended {
        failure: Some((&Failure::NoEndpoint("shop/cart".into())).into()),
        is_local_reply: true,
        ..ended(Direction::Outbound)
    };
    let text = written_of(ended, Mode::Full, Format::Text, |dump| {
        get(dump);
        let status = StatusCode::SERVICE_UNAVAILABLE;
        respond(dump, status, b"Service Unavailable", &HeaderMap::new());
    });
    let end = "[answered by the proxy: no-endpoint: service shop/cart has no ready endpoint]\nHTTP/1.1 503 Service Unavailable\n\n[";
    assert!(text.contains(end), "{text}");
}

/// Text and JSON of a request that ended so.
fn both(ended: impl Fn() -> Ended) -> (String, serde_json::Value) {
    let text = written_of(ended(), Mode::Full, Format::Text, get);
    let json = written_of(ended(), Mode::Full, Format::Json, get);
    (text, serde_json::from_str(&json).unwrap())
}

#[test]
fn names_the_route_and_its_backend() {
    let (text, json) = both(|| {
        let rule = Rule {
            name: "HTTPRoute shop/web".into(),
            ..Rule::default()
        };
        Ended {
            rule: Some((rule.into(), Some("shop/web-v2:80".into()))),
            ..ended(Direction::Outbound)
        }
    });
    let line = "Outbound connection to 10.0.0.9:8080 by HTTPRoute shop/web to shop/web-v2:80\n";
    assert!(text.starts_with(line), "{text}");
    assert_eq!(json["route"], "HTTPRoute shop/web");
    assert_eq!(json["backend"], "shop/web-v2:80");
}

#[test]
fn names_the_policy_of_a_fault() {
    for (delay, line, milliseconds) in [
        (
            Some(Duration::from_millis(100)),
            "[fault of TrafficPolicy shop/web, delayed by 100ms]\n",
            serde_json::json!(100.0),
        ),
        (
            None,
            "[fault of TrafficPolicy shop/web]\n",
            serde_json::Value::Null,
        ),
    ] {
        let (text, json) = both(|| Ended {
            fault: Some(("TrafficPolicy shop/web".into(), delay)),
            ..ended(Direction::Outbound)
        });
        assert!(text.contains(line), "{text}");
        assert_eq!(json["fault"]["policy"], "TrafficPolicy shop/web");
        assert_eq!(json["fault"]["delay_ms"], milliseconds);
    }
}

#[test]
fn names_the_policy_under_audit_that_would_deny() {
    let reason = "AuthorizationPolicy shop/web, rules[0]";
    let (text, json) = both(|| Ended {
        would_deny: Some(reason.into()),
        ..ended(Direction::Inbound)
    });
    let line = format!("[would be denied by {reason}]\n");
    assert!(text.contains(&line), "{text}");
    assert_eq!(json["would_deny"], reason);
}

#[test]
fn truncates_large_headers() {
    let text = written(Mode::Full, Format::Text, Direction::Inbound, |dump| {
        let value = "v".repeat(1000);
        let fields: Vec<_> = (0..60).map(|_| ("name", &*value)).collect();
        respond(dump, StatusCode::OK, b"OK", &header_map(&fields));
    });
    assert!(
        text.contains("[and 44 more]") && text.len() < 20_000,
        "{} bytes: {text}",
        text.len()
    );
}

#[test]
fn renders_one_json_object_per_line() {
    let line = written(Mode::Full, Format::Json, Direction::Inbound, hello);
    assert_eq!(line.matches('\n').count(), 1);
    let object: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(object["direction"], "inbound");
    assert_eq!(object["request"]["start_line"], "POST /hello?a=b HTTP/1.1");
    assert_eq!(
        object["request"]["headers"][2],
        serde_json::json!(["AUTHORIZATION", "Bearer ***"])
    );
    assert_eq!(object["response"]["body"], "pong\n");
    assert_eq!(object["response"]["body_bytes"], 5);
    assert!(object["time"].as_str().unwrap().ends_with('Z') && object.get("incomplete").is_none());
}

/// The latest attempt, to an endpoint with this identity.
fn attempt(identity: &str) -> Option<Attempt> {
    let bare = EndpointInfo::bare(([10, 244, 0, 6], 8080).into());
    let endpoint = EndpointInfo {
        identity: identity.parse().ok(),
        ..bare
    };
    Some(Attempt {
        endpoint: endpoint.into(),
        began: Instant::now(),
    })
}

#[test]
fn both_formats_name_endpoint_and_identity() {
    let identity = "spiffe://cluster.local/ns/shop/sa/cart";
    let (text, json) = both(|| Ended {
        attempt: attempt(identity),
        ..ended(Direction::Outbound)
    });
    let end = format!(" ms, endpoint 10.244.0.6:8080, mutual TLS with {identity}]\n\n");
    assert!(text.ends_with(&end), "{text}");
    assert_eq!(json["endpoint"], "10.244.0.6:8080");
    assert_eq!(json["identity"], identity);
}

#[test]
fn counts_exchanges_beyond_the_budget_and_resets_it_each_second() {
    let (dumps, output, metrics) = start(Mode::Full, Format::Text);
    let dumped = (0..100).filter_map(|_| dumps.exchange(None, None)).count();
    // The budget may be reset meanwhile.
    assert!(
        (MAX_DUMPS_PER_SECOND as usize..=2 * MAX_DUMPS_PER_SECOND as usize).contains(&dumped),
        "{dumped}"
    );
    assert_eq!(metrics.dumps_suppressed.get() as usize, 100 - dumped);
    let deadline = std::time::Instant::now() + FLUSH_TIMEOUT;
    let more = loop {
        let told: usize = output
            .pieces()
            .iter()
            .filter_map(|piece| {
                piece
                    .strip_prefix('[')?
                    .split(' ')
                    .next()?
                    .parse::<usize>()
                    .ok()
            })
            .sum();
        if told == 100 - dumped || std::time::Instant::now() > deadline {
            break told;
        }
        std::thread::yield_now();
    };
    assert_eq!(more, 100 - dumped);
    assert!(dumps.exchange(None, None).is_some());
}

#[test]
fn renders_opaque_connection_on_one_line() {
    let (dumps, output, _) = start(Mode::Full, Format::Text);
    let opaque = |direction| {
        let ended = ended(direction);
        Arc::new(Ended {
            protocol: Protocol::Tcp,
            ended: ended.started + Duration::from_millis(1500),
            transfer: Transfer {
                sent: 1,
                received: 2345,
            },
            attempt: attempt("spiffe://cluster.local/ns/shop/sa/cart"),
            ..ended
        })
    };
    dumps.opaque(&opaque(Direction::Outbound), None);
    dumps.flush(FLUSH_TIMEOUT);
    let [text] = output.pieces().try_into().expect("one piece");
    let first = "Outbound connection to 10.0.0.9:8080\n[TCP: 1 byte sent, 2345 bytes received, 1.500 s from 20";
    let end =
        "Z, endpoint 10.244.0.6:8080, mutual TLS with spiffe://cluster.local/ns/shop/sa/cart]\n\n";
    assert!(text.starts_with(first) && text.ends_with(end), "{text}");
    let (dumps, output, _) = start(Mode::Headers, Format::Json);
    dumps.opaque(&opaque(Direction::Inbound), None);
    dumps.flush(FLUSH_TIMEOUT);
    let object: serde_json::Value = serde_json::from_str(&output.pieces()[0]).unwrap();
    assert_eq!(
        (
            &object["protocol"],
            &object["received"],
            &object["duration_ms"]
        ),
        (&"tcp".into(), &2345.into(), &1500.0.into())
    );
}

#[test]
fn limits_concurrent_dumps() {
    let (dumps, _, metrics) = start(Mode::Full, Format::Text);
    let shared = dumps.shared.clone().unwrap();
    shared.concurrent.store(MAX_CONCURRENT, Ordering::Relaxed);
    assert!(dumps.exchange(None, None).is_none());
    assert_eq!(metrics.dumps_suppressed.get(), 1);
    shared
        .concurrent
        .store(MAX_CONCURRENT - 1, Ordering::Relaxed);
    assert!(dumps.exchange(None, None).is_some());
    assert_eq!(
        shared.concurrent.load(Ordering::Relaxed),
        MAX_CONCURRENT - 1,
        "dropped dumps are released"
    );
}

/// A closed output.
struct Closed;

impl Write for Closed {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn closed_output_stops_dumps() {
    let dumps = Dumps::start(
        DumpConfig {
            mode: Mode::Full,
            format: Format::Text,
            out: Box::new(Closed),
        },
        Metrics::new(),
    )
    .unwrap();
    let deadline = std::time::Instant::now() + FLUSH_TIMEOUT;
    while let Some(dump) = dumps.exchange(None, None) {
        drop(dump);
        assert!(std::time::Instant::now() < deadline, "dumps continue");
    }
    dumps.flush(FLUSH_TIMEOUT);
    assert!(dumps.exchange(None, None).is_none());
}

#[test]
fn off_mode_dumps_nothing() {
    let (dumps, output, metrics) = start(Mode::Off, Format::Text);
    assert!(dumps.exchange(None, None).is_none());
    dumps.opaque(&Arc::new(ended(Direction::Inbound)), None);
    assert_eq!(
        (output.pieces().len(), metrics.dumps_suppressed.get()),
        (0, 0)
    );
}

#[test]
fn writes_long_lived_stream_once() {
    let (dumps, output, _) = start(Mode::Full, Format::Text);
    let mut dump = dumps.exchange(None, None).unwrap();
    request(&mut dump, "GET /watch HTTP/1.1\r\nHost: a\r\n\r\n");
    dump.fill(|record| record.request.ended = true);
    respond(&mut dump, StatusCode::OK, b"OK", &HeaderMap::new());
    dump.fill(|record| record.response.body.append(b"first, second"));
    assert!(!dump.is_long_lived());
    dump.started -= exchange::MAX_OPEN_TIME + Duration::from_secs(1);
    assert!(dump.is_long_lived());
    let ended = Arc::new(ended(Direction::Outbound));
    dump.write(&ended, true);
    assert!(!dump.is_long_lived());
    dumps.flush(FLUSH_TIMEOUT);
    let written = output.pieces();
    let end = "first, second\n\n[still open; what follows is not shown]\n\n[20";
    assert!(written.concat().contains(end), "{written:?}");
    dump.write(&ended, false);
    dumps.flush(FLUSH_TIMEOUT);
    assert_eq!(output.pieces(), written, "written once");
}

#[test]
fn formats_times_as_rfc3339() {
    let at = |milliseconds| rfc3339(SystemTime::UNIX_EPOCH + Duration::from_millis(milliseconds));
    assert_eq!(at(0), "1970-01-01T00:00:00.000Z");
    assert_eq!(at(951_782_400_000), "2000-02-29T00:00:00.000Z");
    assert_eq!(at(1_709_251_199_999), "2024-02-29T23:59:59.999Z");
    assert_eq!(at(1_709_251_200_000), "2024-03-01T00:00:00.000Z");
    assert_eq!(at(1_795_305_599_001), "2026-11-21T23:59:59.001Z");
    assert_eq!(at(4_107_542_400_000), "2100-03-01T00:00:00.000Z");
}
