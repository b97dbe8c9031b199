//! Tests of HTTP/1 heads.

use super::fields::{NameIndex, compare_names};
use super::*;
use crate::http::edits::MeshField;

fn request(text: &str) -> Result<RequestHead, Refused> {
    RequestHead::parse(Bytes::copy_from_slice(text.as_bytes()))
}

fn response(text: &str, method: &str) -> Result<ResponseHead, Refused> {
    ResponseHead::parse(Bytes::copy_from_slice(text.as_bytes()), method.as_bytes())
}

fn forwarded(text: &str) -> String {
    let mut out = BytesMut::new();
    let edits = [MeshField("x-called-by", None)];
    request(text).unwrap().write(&mut out, Edits::of(&edits));
    String::from_utf8(out.to_vec()).unwrap()
}

#[test]
fn keeps_case_order_and_repetition_of_fields() {
    let text = "GET /a?b HTTP/1.1\r\nhOsT: x\r\nX-One: 1\r\nx-two: 2\r\nX-One: again\r\n\r\n";
    assert_eq!(forwarded(text), text);
}

#[test]
fn hop_by_hop_fields_are_not_forwarded() {
    let text = "GET / HTTP/1.1\r\nHost: x\r\nConnection: close, X-Mine\r\nX-Mine: 1\r\nKeep-Alive: 5\r\nProxy-Connection: a\r\nX-Other: 2\r\n\r\n";
    assert_eq!(
        forwarded(text),
        "GET / HTTP/1.1\r\nHost: x\r\nX-Other: 2\r\n\r\n"
    );
    assert!(request(text).unwrap().connection.close);
}

#[test]
fn connect_asks_for_no_other_protocol() {
    for line in ["CONNECT x:80", "connect /"] {
        let start = format!("{line} HTTP/1.1\r\nHost: x:80\r\n");
        let text = format!("{start}Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n");
        let head = request(&text).unwrap();
        assert!(head.view().is_connect() && !head.connection.upgrade);
        assert_eq!(forwarded(&text), format!("{start}\r\n"));
    }
}

/// A head with these fields beside Host, and its options in `Connection` fields of so many
/// each.
fn head_with(names: &[String], options: &[String], each: usize) -> String {
    let fields: String = names.iter().map(|name| format!("{name}: 1\r\n")).collect();
    let connection: String = options
        .chunks(each)
        .map(|options| format!("Connection: {}\r\n", options.join(", ")))
        .collect();
    format!("GET / HTTP/1.1\r\nHost: x\r\n{fields}{connection}\r\n")
}

#[test]
fn removes_nominated_fields_in_any_case_and_number() {
    let mut rng = fastrand::Rng::with_seed(5);
    for _ in 0..500 {
        // Few names, so that fields and options repeat them.
        let mut name = |_| {
            let name = ["A", "ab", "X-A", "x-b", "Z", "hop", "hops"][rng.usize(0..7)];
            if rng.bool() {
                name.to_ascii_uppercase()
            } else {
                name.to_ascii_lowercase()
            }
        };
        let names: Vec<_> = (0..20).map(&mut name).collect();
        let mut options: Vec<_> = (0..5).map(&mut name).collect();
        options.extend(["close".to_owned(), "nothing".to_owned()]);
        let kept = names.iter().filter(|name| {
            !options
                .iter()
                .any(|option| option.eq_ignore_ascii_case(name))
        });
        let expected = head_with(&kept.cloned().collect::<Vec<_>>(), &[], 1);
        assert_eq!(
            forwarded(&head_with(&names, &options, 3)),
            expected,
            "{options:?}"
        );
    }
}

#[test]
fn connection_options_cost_is_linear() {
    let value = b"1";
    for names in [
        vec!["a"; MAX_FIELDS],
        (0..MAX_FIELDS)
            .map(|at| if at % 2 == 0 { "a" } else { "b" })
            .collect(),
    ] {
        let fields: Vec<_> = names
            .iter()
            .map(|name| httparse::Header { name, value })
            .collect();
        let (mut comparisons, mut marks) = (0, 0);
        let mut index = NameIndex::new(&fields, |one, other| {
            comparisons += 1;
            compare_names(one, other)
        });
        let options = MAX_SECTION / 2;
        for _ in 0..options {
            index.each_named(b"a", |_| marks += 1);
        }
        assert_eq!(marks, names.iter().filter(|name| **name == "a").count());
        assert!(comparisons < 10 * options, "{comparisons}");
    }
}

#[test]
fn removes_forged_x_called_by() {
    let text = "GET / HTTP/1.1\r\nHost: x\r\nX-Called-By: a\r\nx-cAlled-by: b\r\nx.called_by: d\r\nX-Called-Bye: c\r\n\r\n";
    assert_eq!(
        forwarded(text),
        "GET / HTTP/1.1\r\nHost: x\r\nX-Called-Bye: c\r\n\r\n"
    );
}

#[test]
fn forwards_websocket_upgrade_and_drops_upgrades_to_http() {
    let text = "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n\r\n";
    assert!(request(text).unwrap().connection.upgrade);
    assert_eq!(
        forwarded(text),
        "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    );
    let h2c = "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\nConnection: Upgrade, HTTP2-Settings\r\n\r\n";
    assert_eq!(forwarded(h2c), "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    for protocol in ["websocket, h2c", "HTTP/2.0", "TLS/1.2, HTTP/1.1", "h2c-14"] {
        let text = format!(
            "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: {protocol}\r\nConnection: Upgrade\r\n\r\n"
        );
        assert_eq!(
            forwarded(&text),
            "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            "{protocol}"
        );
    }
    let old = "GET / HTTP/1.0\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n";
    assert_eq!(
        forwarded(old),
        "GET / HTTP/1.0\r\nHost: x\r\n\r\n",
        "RFC 9110, section 7.8"
    );
}

#[test]
fn rejects_target_with_another_host_than_the_host_field() {
    let target = |line: &str| request(&format!("{line} HTTP/1.1\r\nHost: a\r\n\r\n")).map(|_| ());
    for passed in [
        "GET http://a/",
        "GET http://A:80/x",
        "GET https://a:443?x",
        "OPTIONS *",
        "CONNECT b:1",
        "GET //b/",
    ] {
        assert_eq!(target(passed), Ok(()), "{passed}");
    }
    let other_host = "the target and the Host field name different hosts";
    let no_host = "the target does not name a host, or has user information";
    for (line, reason) in [
        ("GET http://b/", other_host),
        ("GET http://a:81/", other_host),
        ("GET https://a:80/", other_host),
        ("GET http://b\\@a/", no_host),
        ("GET http:///x", no_host),
        ("GET http://a@b/", no_host),
        ("GET http://u:p@a/", no_host),
        ("GET http://x@a/", no_host),
    ] {
        assert_eq!(target(line), Err(Refused::Malformed(reason)), "{line}");
    }
    // Also without a Host field, and with the same one.
    for head in [
        "GET http://x@a/ HTTP/1.0\r\n\r\n",
        "GET http://x@a/ HTTP/1.1\r\nHost: x@a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: x@a\r\n\r\n",
    ] {
        assert!(request(head).is_err(), "{head}");
    }
    for none in [
        "GET *",
        "GET a",
        "GET http:a",
        "GET ?://a/",
        "CONNECT /",
        "CONNECT a",
        "CONNECT http://a:1/",
    ] {
        assert!(target(none).is_err(), "{none}");
    }
    assert!(request("CONNECT a:1 HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\n").is_err());
    assert!(
        request("GET http://a/ HTTP/1.0\r\n\r\n").is_ok(),
        "there is no Host to differ from"
    );
}

#[test]
fn rejects_target_with_a_fragment() {
    for target in [
        "/admin#",
        "/admin#/../b?c",
        "/a?b#c",
        "http://x#/admin",
        "http://x/#",
    ] {
        let text = format!("GET {target} HTTP/1.1\r\nHost: x\r\n\r\n");
        let refused = request(&text).map(|head| head.framing);
        assert_eq!(
            refused,
            Err(Refused::Malformed("the target has a fragment")),
            "{target}"
        );
    }
    assert!(request("GET /a%23b HTTP/1.1\r\nHost: x\r\n\r\n").is_ok());
}

#[test]
fn rejects_ambiguous_requests() {
    let refused = |fields: &str, why: &'static str| {
        let text = format!("POST / HTTP/1.1\r\n{fields}\r\n");
        assert_eq!(
            request(&text).map(|head| head.framing),
            Err(Refused::Malformed(why)),
            "{fields:?}"
        );
    };
    refused("", "the Host field is missing");
    refused("Host: a\r\nHost: a\r\n", "the Host field is repeated");
    refused("Host: a b\r\n", "the Host field is not a host");
    refused(
        "Host: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n",
        "Content-Length is repeated",
    );
    refused(
        "Host: a\r\nContent-Length: 1, 1\r\n",
        "Content-Length is not a number",
    );
    refused(
        "Host: a\r\nContent-Length: +1\r\n",
        "Content-Length is not a number",
    );
    refused(
        "Host: a\r\nContent-Length: 99999999999999999999\r\n",
        "Content-Length is not a number",
    );
    refused(
        "Host: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding together with Content-Length",
    );
    refused(
        "Host: a\r\nTransfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding is something else than chunked",
    );
    refused(
        "Host: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding is something else than chunked",
    );
    refused(
        "Host: a\r\nTransfer-Encoding: xchunked\r\n",
        "Transfer-Encoding is something else than chunked",
    );
    refused(
        "Host: a\r\nConnection: Content-Length\r\nContent-Length: 1\r\n",
        "Connection names a field that is not the connection's",
    );
    refused("Host : a\r\n", "a field's name is not a token");
    refused(
        "Host: a\r\nX: 1\r\n folded\r\n",
        "a field's name is not a token",
    );
    refused(
        "Host: a\r\nX: \0\r\n",
        "a field's value has a forbidden byte",
    );
    assert!(request("GET / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n").is_err());
    assert!(
        request("GET / HTTP/1.1\r\nHost: a\nX: 1\r\n\r\n").is_ok_and(|head| head
            .fields
            .iter()
            .count()
            == 2)
    );
}

#[test]
fn response_framing_follows_rfc_9112() {
    let framing = |text: &str, method: &str| response(text, method).unwrap().framing;
    assert_eq!(
        framing("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "GET"),
        Framing::Length(5)
    );
    assert_eq!(
        framing("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "HEAD"),
        Framing::None
    );
    assert_eq!(
        framing(
            "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
            "GET"
        ),
        Framing::None
    );
    assert_eq!(
        framing("HTTP/1.1 204 No Content\r\n\r\n", "GET"),
        Framing::None
    );
    assert_eq!(
        framing(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            "GET"
        ),
        Framing::Chunked
    );
    assert_eq!(
        framing("HTTP/1.1 200 OK\r\n\r\n", "GET"),
        Framing::UntilClose
    );
    assert_eq!(framing("HTTP/1.1 200 OK\r\n\r\n", "CONNECT"), Framing::None);
    assert!(
        response(
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
            "GET"
        )
        .is_err()
    );
}

#[test]
fn keeps_reason_phrase_and_sets_own_connection_field() {
    let mut out = BytesMut::new();
    let text = "HTTP/1.0 299 Fine By Me\r\nConnection: close\r\nX-A: b\r\n\r\n";
    response(text, "GET")
        .unwrap()
        .write(&mut out, Edits::default(), Some("close"));
    assert_eq!(
        &out[..],
        b"HTTP/1.1 299 Fine By Me\r\nX-A: b\r\nConnection: close\r\n\r\n"
    );
}

#[test]
fn keeps_reason_phrase_of_any_bytes() {
    for reason in [
        &b""[..],
        b"OK",
        b"\t  two  ",
        b"n\xe3o",
        "\u{a7} 3".as_bytes(),
    ] {
        for start in [&b"HTTP/1.1 451 "[..], b"\r\n\r\nHTTP/1.0 451 "] {
            let raw = [start, reason, b"\r\nX: y\r\n\r\n"].concat();
            let head = ResponseHead::parse(raw.into(), b"GET").unwrap();
            assert_eq!(head.reason(), reason);
        }
    }
    assert_eq!(
        response("HTTP/1.1 200\r\n\r\n", "GET").unwrap().reason(),
        b""
    );
}

#[test]
fn keeps_offered_upgrade_with_its_connection_field() {
    let text = "HTTP/1.1 426 Upgrade Required\r\nUpgrade: websocket\r\nConnection: upgrade\r\nContent-Length: 0\r\n\r\n";
    let mut out = BytesMut::new();
    response(text, "GET")
        .unwrap()
        .write(&mut out, Edits::default(), Some("close"));
    let expected = "Upgrade: websocket\r\nContent-Length: 0\r\nConnection: Upgrade\r\nConnection: close\r\n\r\n";
    assert_eq!(
        String::from_utf8_lossy(&out),
        format!("HTTP/1.1 426 Upgrade Required\r\n{expected}")
    );
}

#[test]
fn rejects_status_below_100() {
    for status in ["000", "099", "99", "1000", "abc"] {
        assert!(
            response(&format!("HTTP/1.1 {status} OK\r\n\r\n"), "GET").is_err(),
            "{status}"
        );
    }
    assert_eq!(
        response("HTTP/1.1 999 OK\r\n\r\n", "GET").unwrap().status,
        999
    );
}

#[test]
fn finds_complete_head_and_rejects_endless_one() {
    let find_end = |bytes: &[u8]| HeadSearch::default().find_end(bytes);
    let malformed = Err(Refused::Malformed("a line ends without CR LF"));
    for (bytes, expected) in [
        (&b"GET / HTTP/1.1\r\nHost: a\r\n\r"[..], Ok(None)),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\nrest\n\n", Ok(Some(27))),
        (b"\r\n\r\nGET / HTTP/1.1\r\n\r\n", Ok(Some(22))),
        (b"\r\n\r\n\r\n", Ok(None)),
        (b"\n\nGET / HTTP/1.1\r\n\r\n", Ok(Some(20))),
        (b"GET / HTTP/1.1\n\n", malformed),
        (b"GET / HTTP/1.1\r\n\nHost", malformed),
        (b"GET / HTTP/1.1\n\r\n", Ok(None)),
        (&[b'a'; MAX_SECTION], Ok(None)),
        (
            &[b'a'; MAX_SECTION + 1],
            Err(Refused::TooLarge(TooLarge::Header)),
        ),
        (
            &[b'\n'; MAX_SECTION + 1],
            Err(Refused::TooLarge(TooLarge::Header)),
        ),
    ] {
        let shown = &bytes[..bytes.len().min(40)];
        assert_eq!(find_end(bytes), expected, "{}", shown.escape_ascii());
        let mut search = HeadSearch::default();
        let mut growing = (0..=bytes.len()).map(|length| search.find_end(&bytes[..length]));
        let found = growing.find(|found| *found != Ok(None));
        assert_eq!(
            found.unwrap_or(Ok(None)),
            expected,
            "{}",
            shown.escape_ascii()
        );
    }
}

#[test]
fn searches_each_byte_of_a_head_once() {
    let mut search = HeadSearch::default();
    let head = b"GET / HTTP/1.1\r\nHost: a\r\n";
    assert_eq!(search.find_end(head), Ok(None));
    // Line ends in place of the bytes that were searched, other than those before the next one,
    // change nothing.
    let mut bytes = vec![b'\n'; head.len()];
    bytes[head.len() - 3..].copy_from_slice(b"a\r\n");
    bytes.extend_from_slice(b"\r");
    assert_eq!(search.find_end(&bytes), Ok(None));
    bytes.extend_from_slice(b"\nrest");
    assert_eq!(search.find_end(&bytes), Ok(Some(head.len() + 2)));

    let mut search = HeadSearch::default();
    let mut bytes = Vec::new();
    for _ in 0..1000 {
        bytes.extend_from_slice(b"\r\n");
        assert_eq!(search.find_end(&bytes), Ok(None));
        assert!(search.is_blank());
        bytes.fill(b'a');
    }
    bytes.extend_from_slice(b"GET");
    assert_eq!(search.find_end(&bytes), Ok(None));
    assert_eq!((search.is_blank(), search.blank), (false, 2000));
}
