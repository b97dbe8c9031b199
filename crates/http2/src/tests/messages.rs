//! Heads of messages: which are malformed, and how fields become requests and responses.

use fastrand::Rng;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderMap, Method};

use super::bench::*;
use super::*;
use crate::Connection;
use crate::frame::setting;
use crate::hpack::{Decoder, Encoder, Field};
use crate::message::{Section, write_request};

type Pair = (&'static str, &'static str);

const METHOD: Pair = (":method", "GET");
const SCHEME: Pair = (":scheme", "http");
const PATH: Pair = (":path", "/");
const AUTHORITY: Pair = (":authority", "test");
const CONNECT: Pair = (":method", "CONNECT");
const WEBSOCKET: Pair = (":protocol", "websocket");
const STATUS: Pair = (":status", "200");
const LENGTH_0: Pair = ("content-length", "0");
const LENGTH_1: Pair = ("content-length", "1");

/// Heads that have one reaction, with their names.
#[derive(Default)]
struct Heads(Vec<(&'static str, Vec<Pair>)>);

impl Heads {
    fn add(&mut self, heads: &[(&'static str, &[Pair])]) {
        let heads = heads.iter().map(|(name, fields)| (*name, fields.to_vec()));
        self.0.extend(heads);
    }

    /// Adds heads of these fields and one more. Each row has a name, and the last field.
    fn add_with(&mut self, fields: &[Pair], rows: &[(&'static str, &'static str, &'static str)]) {
        for (name, field, value) in rows {
            let fields = [fields, &[(*field, *value)]].concat();
            self.0.push((name, fields));
        }
    }

    /// Adds requests that have this value of a pseudo-header field.
    fn add_pseudo(&mut self, field: &'static str, rows: &[(&'static str, &'static str)]) {
        for (name, value) in rows {
            let mut fields = [METHOD, SCHEME, PATH, AUTHORITY];
            let replaced = fields.iter_mut().find(|known| known.0 == field);
            replaced.expect("a pseudo-header field").1 = value;
            self.0.push((name, fields.to_vec()));
        }
    }

    /// Fails unless each head is reset with PROTOCOL_ERROR, or none is.
    fn check(&self, role: Role, is_malformed: bool) {
        let mut failures = Vec::new();
        for (name, fields) in &self.0 {
            let mut bench = Bench::new(role);
            if role == Role::Client {
                bench.open("GET", false);
            }
            bench.take();
            bench.feed(headers(1, flag::END_STREAM, fields));
            let resets = resets(&bench.take());
            let expected = &[(1, ErrorCode::PROTOCOL_ERROR)][..usize::from(is_malformed)];
            if resets != expected || bench.result.is_err() || !bench.is_alive() {
                failures.push(format!("{name}: {resets:?}"));
            }
        }
        assert!(failures.is_empty(), "\n{}", failures.join("\n"));
    }
}

/// Fields that make a message malformed, with their names.
const MALFORMED_FIELDS: [(&str, &str, &str); 26] = [
    ("an uppercase name", "A", "b"),
    ("an empty name", "", "b"),
    ("a name with a space", "a b", "c"),
    ("a name with a colon", "a:", "b"),
    ("a name with a line break", "a\r\nb", "c"),
    ("a name with a zero", "a\0", "b"),
    ("a value with a line break", "a", "b\r\nc: d"),
    ("a value with a line feed", "a", "b\nc"),
    ("a value with a carriage return", "a", "b\rc"),
    ("a value with a zero", "a", "b\0c"),
    ("a value after a space", "a", " b"),
    ("a value before a space", "a", "b "),
    ("a value before a tab", "a", "b\t"),
    ("connection", "connection", "close"),
    ("keep-alive", "keep-alive", "1"),
    ("proxy-connection", "proxy-connection", "close"),
    ("transfer-encoding", "transfer-encoding", "chunked"),
    ("upgrade", "upgrade", "websocket"),
    ("te other than trailers", "te", "gzip"),
    ("te with trailers and others", "te", "trailers, gzip"),
    ("no number", "content-length", "a"),
    ("a number with a sign", "content-length", "+0"),
    ("a negative number", "content-length", "-1"),
    ("an empty number", "content-length", ""),
    ("two numbers", "content-length", "0, 0"),
    ("a number of 65 bits", "content-length", BITS_65),
];

/// The smallest number that needs 65 bits.
const BITS_65: &str = "18446744073709551616";

#[test]
fn malformed_requests_are_reset() {
    let mut heads = Heads::default();
    heads.add(&[
        ("nothing", &[]),
        ("no method", &[SCHEME, PATH, AUTHORITY]),
        ("no scheme", &[METHOD, PATH, AUTHORITY]),
        ("no path", &[METHOD, SCHEME, AUTHORITY]),
        ("two methods", &[METHOD, METHOD, SCHEME, PATH, AUTHORITY]),
        ("two schemes", &[METHOD, SCHEME, SCHEME, PATH, AUTHORITY]),
        ("two paths", &[METHOD, SCHEME, PATH, PATH, AUTHORITY]),
        ("CONNECT with a path", &[CONNECT, PATH, AUTHORITY]),
        ("CONNECT with a scheme", &[CONNECT, SCHEME, AUTHORITY]),
        ("CONNECT without an authority", &[CONNECT]),
    ]);
    let paths = [
        ("an empty path", ""),
        ("a path without a slash", "a"),
        ("a query without a path", "?a"),
        ("a URI as the path", "http://a/"),
        ("a path with a fragment", "/#a"),
        ("a path with a space", "/ HTTP/1.1"),
    ];
    heads.add_pseudo(":path", &paths);
    let authorities = [
        ("an authority with a space", "a b"),
        ("an authority with a path", "a/b"),
    ];
    heads.add_pseudo(":authority", &authorities);
    let methods = [
        ("an empty method", ""),
        ("a method with a space", "GET /"),
        ("a method with a line break", "GET\r\n"),
    ];
    heads.add_pseudo(":method", &methods);
    let schemes = [("an empty scheme", ""), ("a scheme with a colon", "http:")];
    heads.add_pseudo(":scheme", &schemes);
    let pseudo = [
        ("two authorities", ":authority", "test"),
        ("a status", ":status", "200"),
        ("an unknown pseudo-header field", ":a", "b"),
    ];
    heads.add_with(&[METHOD, SCHEME, PATH, AUTHORITY], &pseudo);
    let late = [("a pseudo-header field after others", ":authority", "test")];
    heads.add_with(&[METHOD, SCHEME, PATH, ("a", "b")], &late);
    let disabled = "CONNECT with a protocol, which is disabled";
    let rows = [(disabled, ":protocol", "websocket")];
    heads.add_with(&[CONNECT, SCHEME, PATH, AUTHORITY], &rows);
    heads.add_with(&[METHOD, SCHEME, PATH], &MALFORMED_FIELDS);
    let different = [("numbers that differ", "content-length", "1")];
    heads.add_with(&[METHOD, SCHEME, PATH, LENGTH_0], &different);
    heads.check(Role::Server, true);
}

#[test]
fn unusual_requests_are_accepted() {
    let mut heads = Heads::default();
    let reordered = [PATH, AUTHORITY, SCHEME, METHOD];
    let all = [(":method", "OPTIONS"), SCHEME, (":path", "*"), AUTHORITY];
    heads.add(&[
        ("no authority", &[METHOD, SCHEME, PATH]),
        ("pseudo-header fields in another order", &reordered),
        ("all resources", &all),
        ("CONNECT", &[CONNECT, (":authority", "test:443")]),
    ]);
    heads.add_pseudo(":method", &[("an unknown method", "A-B")]);
    heads.add_pseudo(":scheme", &[("an unknown scheme", "coap+tcp")]);
    let fields = [
        ("te", "te", "trailers"),
        ("an empty value", "a", ""),
        ("a value with a space and a tab", "a", "b \tc"),
        ("a value beyond ASCII", "a", "\u{fc}"),
        ("no bytes", "content-length", "0"),
    ];
    heads.add_with(&[METHOD, SCHEME, PATH], &fields);
    let equal = [("equal numbers", "content-length", "0")];
    heads.add_with(&[METHOD, SCHEME, PATH, LENGTH_0], &equal);
    let cookies = [("several cookies", "cookie", "c=d")];
    heads.add_with(&[METHOD, SCHEME, PATH, ("cookie", "a=b")], &cookies);
    heads.check(Role::Server, false);
}

#[test]
fn malformed_responses_are_reset() {
    let mut heads = Heads::default();
    let statuses = [
        ("an empty status", ":status", ""),
        ("a status of two digits", ":status", "20"),
        ("a status of four digits", ":status", "2000"),
        ("a status below 100", ":status", "099"),
        ("a status with a text", ":status", "200 OK"),
        ("status 101", ":status", "101"),
        ("no status", "a", "b"),
    ];
    heads.add_with(&[], &statuses);
    let late = [("a status after others", ":status", "200")];
    heads.add_with(&[("a", "b")], &late);
    let fields = [
        ("two statuses", ":status", "200"),
        ("an unknown pseudo-header field", ":a", "b"),
        ("a method", ":method", "GET"),
        ("a scheme", ":scheme", "http"),
        ("a path", ":path", "/"),
        ("an authority", ":authority", "test"),
        ("a protocol", ":protocol", "websocket"),
        ("an uppercase name", "A", "b"),
        ("a value with a line break", "a", "b\r\nc: d"),
        ("connection", "connection", "close"),
        ("transfer-encoding", "transfer-encoding", "chunked"),
        ("upgrade", "upgrade", "websocket"),
        ("no number", "content-length", "a"),
    ];
    heads.add_with(&[STATUS], &fields);
    heads.add(&[("numbers that differ", &[STATUS, LENGTH_0, LENGTH_1])]);
    heads.check(Role::Client, true);
}

#[test]
fn extended_connect_is_announced_and_accepted() {
    let mut bench = Bench::bare(Config {
        enable_connect_protocol: true,
        ..config(Role::Server)
    });
    let setting = &settings(&[(setting::ENABLE_CONNECT_PROTOCOL, 1)])[9..];
    let mut sent = bench.frames[0].payload.chunks(6);
    assert!(sent.any(|sent| sent == setting));
    bench.feed([PREFACE, &settings(&[])].concat());
    let path = (":path", "/chat");
    let fields = [CONNECT, WEBSOCKET, SCHEME, path, AUTHORITY];
    bench.feed(headers(1, 0, &fields));
    let request = &bench.streams[0].request;
    assert_eq!(request.protocol(), Some(&b"websocket"[..]));
    let target = (request.method.as_str(), request.path());
    assert_eq!(target, ("CONNECT", Some(&b"/chat"[..])));
    bench.take();
    // RFC 8441, section 4: the other pseudo-header fields are required.
    bench.feed(headers(3, 0, &[CONNECT, WEBSOCKET, AUTHORITY]));
    let without_connect = [METHOD, WEBSOCKET, SCHEME, PATH, AUTHORITY];
    bench.feed(headers(5, 0, &without_connect));
    let expected = [3, 5].map(|stream| (stream, ErrorCode::PROTOCOL_ERROR));
    assert_eq!(resets(&bench.take()), expected);
    // It may be enabled later.
    let mut bench = Bench::new(Role::Server);
    bench.with(Connection::enable_connect_protocol);
    bench.with(Connection::enable_connect_protocol);
    let frames = bench.take();
    assert_eq!((frames.len(), frames[0].payload == setting), (1, true));
    bench.feed(settings_ack());
    bench.feed(headers(1, 0, &fields));
    assert_eq!(bench.streams.len(), 1);
}

#[test]
fn a_client_learns_of_extended_connect() {
    let mut bench = Bench::new(Role::Client);
    assert!(!bench.with(|connection| connection.accepts_connect_protocol()));
    bench.feed(settings(&[(setting::ENABLE_CONNECT_PROTOCOL, 1)]));
    assert!(bench.with(|connection| connection.accepts_connect_protocol()));
    let mut head = request("GET", &[]);
    head.set_protocol("websocket");
    bench.shared.open(&head, false).expect("a stream");
    let fields = decode(&bench.take()[1].payload);
    for (name, value) in [
        (":method", "CONNECT"),
        (":scheme", "http"),
        (":path", "/"),
        (":protocol", "websocket"),
    ] {
        let expected = (name.to_owned(), value.to_owned());
        assert!(fields.contains(&expected), "{name}: {fields:?}");
    }
}

/// The fields of a block that does not need a table.
fn decode(block: &[u8]) -> Vec<(String, String)> {
    let mut fields = Vec::new();
    let each = |field: &Field<'_>| {
        let text = |text: &[u8]| String::from_utf8_lossy(text).into_owned();
        fields.push((text(field.name), text(field.value)));
        true
    };
    let decoded = Decoder::new(4096).decode(block, each);
    decoded.expect("a field block");
    fields
}

/// HTTP/1 clients may send `GET http://test?a=b`.
#[test]
fn a_request_without_a_path_has_a_slash() {
    for (uri, path) in [
        ("http://test", "/"),
        ("http://test?a=b", "/?a=b"),
        ("http://test/?a", "/?a"),
    ] {
        let mut bench = Bench::new(Role::Client);
        let head = request_to(uri, "GET", &[]);
        bench.shared.open(&head, true).expect("a stream");
        let fields = decode(&bench.take()[0].payload);
        let expected = (":path".to_owned(), path.to_owned());
        assert!(fields.contains(&expected), "{uri}: {fields:?}");
    }
}

/// A name and a value.
type RawField = (Vec<u8>, Vec<u8>);

/// Requests with random faults have the same fields as with the types of the crate `http`, or are
/// malformed like these.
#[test]
fn heads_are_valid_as_in_the_crate_http() {
    let mut rng = Rng::with_seed(1);
    let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new(4096));
    let mut valid = 0;
    for round in 0..20_000 {
        let fields = random_head(&mut rng);
        let mut block = Vec::new();
        encoder.begin(&mut block);
        for (name, value) in &fields {
            encoder.field(name, value, name == b"cookie", &mut block);
        }
        let mut section = Section::default();
        let pushed = decoder.decode(&block, |field| section.push(field, 1 << 20));
        pushed.expect("a field block");
        let head = section.request().ok().map(|received| received.message);
        let expected = expected_fields(&fields);
        let map = head.as_ref().map(|head| HeaderMap::from(&head.fields));
        assert_eq!(map, expected, "{round}: {fields:?}");
        let Some(head) = head else { continue };
        valid += 1;
        // The next hop gets the fields in their order, and may index the same ones.
        let mut block = Vec::new();
        write_request(&mut Encoder::new(), &head.clone(), &mut block);
        let mut sent = Vec::new();
        let keep = |field: &Field<'_>| {
            assert_eq!(field.is_sensitive, field.name == b"cookie");
            sent.push((field.name.to_vec(), field.value.to_vec()));
            true
        };
        Decoder::new(4096).decode(&block, keep).expect("a block");
        // Pseudo-fields come first, in any order.
        let [sent, fields] = [sent, fields].map(|mut fields| {
            let is_header = |(name, _): &RawField| !name.starts_with(b":");
            let count = fields.iter().position(is_header).unwrap_or(fields.len());
            fields[..count].sort();
            fields
        });
        assert_eq!(sent, fields);
    }
    assert!((5000..15_000).contains(&valid), "{valid} valid heads");
}

/// A request, in most cases with one to three faults: another byte, or another place, or no place.
fn random_head(rng: &mut Rng) -> Vec<RawField> {
    let cookie = format!("c={}", rng.u8(..4));
    let mut fields = [
        METHOD,
        (":scheme", "https"),
        AUTHORITY,
        (":path", "/a?b"),
        ("te", "trailers"),
        ("cookie", "a=b"),
        ("x-name", "value"),
        ("cookie", &cookie),
    ]
    .map(|(name, value)| (name.as_bytes().to_vec(), value.as_bytes().to_vec()))
    .to_vec();
    for _ in 0..rng.usize(..4) {
        let at = rng.usize(..fields.len());
        let other = rng.usize(..fields.len());
        match rng.u8(..16) {
            0 => fields.swap(at, other),
            1 => fields.insert(other, fields[at].clone()),
            2 if fields.len() > 1 => drop(fields.remove(at)),
            3 => {
                let names = ["upgrade", "connection", "keep-alive", ":status", ":other"];
                fields[at].0 = names[rng.usize(..names.len())].into();
            }
            kind => {
                let text = if kind < 7 {
                    &mut fields[at].0
                } else {
                    &mut fields[at].1
                };
                let position = rng.usize(..=text.len());
                text.insert(position, rng.u8(..));
            }
        }
    }
    fields
}

/// The fields of a request by the crate `http` and RFC 9113, section 8, or `None` if it is malformed.
fn expected_fields(fields: &[RawField]) -> Option<HeaderMap> {
    let (mut map, mut pseudo) = (HeaderMap::new(), Vec::new());
    for (name, value) in fields {
        let is_valid = match &name[..] {
            b":method" => Method::from_bytes(value).is_ok(),
            b":scheme" => !value.is_empty() && Scheme::try_from(&value[..]).is_ok(),
            b":authority" => Authority::try_from(&value[..]).is_ok(),
            b":path" => {
                let is_path = value.starts_with(b"/") && !value.contains(&b'#');
                is_path && PathAndQuery::try_from(&value[..]).is_ok()
            }
            _ => {
                let name = HeaderName::from_lowercase(name).ok()?;
                let of_connection = ["upgrade", "connection", "keep-alive"];
                let is_te = name == "te" && !value.eq_ignore_ascii_case(b"trailers");
                let is_quoted = name.as_str().contains('"');
                if is_te || is_quoted || of_connection.contains(&name.as_str()) {
                    return None;
                }
                let is_space = |byte: Option<&u8>| matches!(byte, Some(b' ' | b'\t'));
                if is_space(value.first()) || is_space(value.last()) {
                    return None;
                }
                map.append(name, HeaderValue::from_bytes(value).ok()?);
                continue;
            }
        };
        if !is_valid || !map.is_empty() || pseudo.contains(&name) {
            return None;
        }
        pseudo.push(name);
    }
    let required = [":method", ":scheme", ":path"];
    let has = |required: &str| pseudo.iter().any(|name| **name == required.as_bytes());
    required.into_iter().all(has).then_some(map)
}
