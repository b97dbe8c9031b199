//! The fields of a head: what they say about this hop, and which of them go to the next one.

use std::cmp::Ordering;
use std::ops::Range;

use bytes::{Bytes, BytesMut};

use super::{Connection, Refused, Version};
use crate::http::authority;
use crate::http::edits::Edits;

/// The fields of a head, as ranges of its bytes.
#[derive(Debug)]
pub(super) struct Fields {
    pub(super) raw: Bytes,
    pub(super) spans: Vec<FieldSpan>,
}

#[derive(Debug)]
pub(super) struct FieldSpan {
    name: Range<u32>,
    value: Range<u32>,
    /// Applies to this hop only: not written for the next one.
    hop_by_hop: bool,
}

/// The result of one pass over the fields.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) hosts: usize,
    pub(super) length: Option<u64>,
    pub(super) chunked: bool,
    pub(super) connection: Connection,
}

impl Fields {
    pub(super) fn spans(
        raw: &[u8],
        parsed: &[httparse::Header<'_>],
        version: Version,
    ) -> Result<Vec<FieldSpan>, Refused> {
        let mut spans: Vec<FieldSpan> = parsed
            .iter()
            .map(|field| FieldSpan {
                name: span(raw, field.name.as_bytes()),
                value: span(raw, field.value),
                hop_by_hop: false,
            })
            .collect();
        let upgrade = version == Version::Http11 && asks_for_upgrade(parsed);
        for (span, field) in spans.iter_mut().zip(parsed) {
            span.hop_by_hop = match field.name.len() {
                2 => {
                    field.name.eq_ignore_ascii_case("te")
                        && !field.value.eq_ignore_ascii_case(b"trailers")
                }
                7 => field.name.eq_ignore_ascii_case("upgrade") && !upgrade,
                10 => {
                    field.name.eq_ignore_ascii_case("connection")
                        || field.name.eq_ignore_ascii_case("keep-alive")
                }
                14 => field.name.eq_ignore_ascii_case("http2-settings"),
                16 => field.name.eq_ignore_ascii_case("proxy-connection"),
                _ => false,
            };
        }
        mark_nominated(&mut spans, parsed)?;
        Ok(spans)
    }

    pub(super) fn examine(&self) -> Result<Seen, Refused> {
        let mut seen = Seen::default();
        let mut encodings = 0;
        let mut upgrade = false;
        for (span, (name, value)) in self.spans.iter().zip(self.iter()) {
            match name.len() {
                4 if name.eq_ignore_ascii_case(b"host") => {
                    seen.hosts += 1;
                    if !authority::is_text(value) {
                        return Err(Refused::Malformed("the Host field is not a host"));
                    }
                }
                7 if name.eq_ignore_ascii_case(b"upgrade") => upgrade |= !span.hop_by_hop,
                10 if name.eq_ignore_ascii_case(b"connection") => {
                    for option in list(value) {
                        seen.connection.close |= option.eq_ignore_ascii_case(b"close");
                        seen.connection.keep_alive |= option.eq_ignore_ascii_case(b"keep-alive");
                    }
                }
                14 if name.eq_ignore_ascii_case(b"content-length") => {
                    let length = parse_length(value)?;
                    if seen.length.replace(length).is_some() {
                        return Err(Refused::Malformed("Content-Length is repeated"));
                    }
                }
                17 if name.eq_ignore_ascii_case(b"transfer-encoding") => {
                    encodings += 1;
                    if encodings > 1 || !value.eq_ignore_ascii_case(b"chunked") {
                        return Err(Refused::Malformed(
                            "Transfer-Encoding is something else than chunked",
                        ));
                    }
                    seen.chunked = true;
                }
                _ => {}
            }
        }
        if seen.chunked && seen.length.is_some() {
            return Err(Refused::Malformed(
                "Transfer-Encoding together with Content-Length",
            ));
        }
        seen.connection.upgrade = upgrade;
        Ok(seen)
    }

    pub(super) fn slice(&self, span: &Range<u32>) -> &[u8] {
        &self.raw[span.start as usize..span.end as usize]
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.spans
            .iter()
            .map(|field| (self.slice(&field.name), self.slice(&field.value)))
    }

    /// Those that go to the next hop.
    pub(super) fn forwarded(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let spans = self.spans.iter().filter(|field| !field.hop_by_hop);
        spans.map(|field| (self.slice(&field.name), self.slice(&field.value)))
    }

    /// Does not forward the fields with this name.
    pub(super) fn remove(&mut self, name: &[u8]) {
        for at in 0..self.spans.len() {
            let matches = self.slice(&self.spans[at].name).eq_ignore_ascii_case(name);
            self.spans[at].hop_by_hop |= matches;
        }
    }

    pub(super) fn write(&self, out: &mut BytesMut, upgrade: bool, edits: Edits<'_>) {
        for field in &self.spans {
            let name = self.slice(&field.name);
            let value = edits.value(name, self.slice(&field.value));
            let Some(value) = value.filter(|_| !field.hop_by_hop) else {
                continue;
            };
            put_field(out, name, value);
        }
        for (name, value) in edits.appended() {
            put_field(out, name, value);
        }
        if upgrade {
            put_field(out, b"Connection", b"Upgrade");
        }
    }
}

pub(in crate::serve::http1) fn put_field(out: &mut BytesMut, name: &[u8], value: &[u8]) {
    for part in [name, b": ", value, b"\r\n"] {
        out.extend_from_slice(part);
    }
}

/// Whether the head requests an upgrade that the proxy forwards: any except to HTTP, in plaintext or
/// in TLS, whose requests would not be parsed.
fn asks_for_upgrade(fields: &[httparse::Header<'_>]) -> bool {
    let has = |name: &str, accept: fn(&[u8]) -> bool| {
        fields
            .iter()
            .filter(|field| field.name.eq_ignore_ascii_case(name))
            .flat_map(|field| list(field.value))
            .any(accept)
    };
    has("connection", |option| {
        option.eq_ignore_ascii_case(b"upgrade")
    }) && has("upgrade", |_| true)
        && !has("upgrade", is_http)
}

/// Whether a protocol of an Upgrade field carries HTTP: `h2c` (RFC 7540), `HTTP/2.0` (RFC 9110,
/// section 7.8), `TLS/1.0` (RFC 2817).
fn is_http(protocol: &[u8]) -> bool {
    [&b"h2"[..], b"http", b"tls"].iter().any(|name| {
        protocol
            .get(..name.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(name))
    })
}

/// Marks the fields that `Connection` nominates (RFC 9110, section 7.6.1). Fields that frame or route
/// a message must not be nominated.
fn mark_nominated(spans: &mut [FieldSpan], parsed: &[httparse::Header<'_>]) -> Result<(), Refused> {
    const KEPT: [&[u8]; 4] = [b"close", b"keep-alive", b"upgrade", b"te"];
    const NEVER: [&[u8]; 7] = [
        b"host",
        b"content-length",
        b"transfer-encoding",
        b"content-type",
        b"authorization",
        b"cookie",
        b"x-called-by",
    ];
    let mut index = None;
    for field in parsed
        .iter()
        .filter(|field| field.name.eq_ignore_ascii_case("connection"))
    {
        for option in list(field.value) {
            if KEPT.iter().any(|kept| option.eq_ignore_ascii_case(kept)) {
                continue;
            }
            if NEVER.iter().any(|never| option.eq_ignore_ascii_case(never)) {
                return Err(Refused::Malformed(
                    "Connection names a field that is not the connection's",
                ));
            }
            let index = index.get_or_insert_with(|| NameIndex::new(parsed, compare_names));
            index.each_named(option, |at| spans[at].hop_by_hop = true);
        }
    }
    Ok(())
}

/// The fields of a head, sorted by name. Comparing every option with every field would cost a
/// hundred times as much as parsing the head.
pub(super) struct NameIndex<'a, C> {
    fields: &'a [httparse::Header<'a>],
    order: Vec<usize>,
    /// For each index in `order`, whether it has been nominated.
    named: Vec<bool>,
    compare: C,
}

impl<'a, C: FnMut(&[u8], &[u8]) -> Ordering> NameIndex<'a, C> {
    pub(super) fn new(fields: &'a [httparse::Header<'a>], mut compare: C) -> Self {
        let mut order: Vec<usize> = (0..fields.len()).collect();
        order.sort_unstable_by(|one, other| {
            compare(fields[*one].name.as_bytes(), fields[*other].name.as_bytes())
        });
        Self {
            fields,
            named: vec![false; order.len()],
            order,
            compare,
        }
    }

    /// Calls `mark` for each field with this name, once: not again for a repeated option.
    pub(super) fn each_named(&mut self, name: &[u8], mut mark: impl FnMut(usize)) {
        let Self {
            fields,
            order,
            named,
            compare,
        } = self;
        let first = order.partition_point(|at| compare(fields[*at].name.as_bytes(), name).is_lt());
        for (at, named) in order.iter().zip(named).skip(first) {
            if *named || compare(fields[*at].name.as_bytes(), name).is_ne() {
                break;
            }
            *named = true;
            mark(*at);
        }
    }
}

/// The order of two names, without case.
pub(super) fn compare_names(one: &[u8], other: &[u8]) -> Ordering {
    one.iter()
        .map(u8::to_ascii_lowercase)
        .cmp(other.iter().map(u8::to_ascii_lowercase))
}

/// The members of a comma-separated list (RFC 9110, section 5.6.1).
fn list(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value
        .split(|byte| *byte == b',')
        .map(<[u8]>::trim_ascii)
        .filter(|member| !member.is_empty())
}

fn parse_length(value: &[u8]) -> Result<u64, Refused> {
    let digits = std::str::from_utf8(value)
        .ok()
        .filter(|text| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()));
    digits
        .and_then(|text| text.parse().ok())
        .ok_or(Refused::Malformed("Content-Length is not a number"))
}

/// The range of `part` in `whole`. `part` must be a slice of it.
pub(super) fn span(whole: &[u8], part: &[u8]) -> Range<u32> {
    if part.is_empty() {
        return 0..0;
    }
    let start = (part.as_ptr() as usize - whole.as_ptr() as usize) as u32;
    start..start + part.len() as u32
}
