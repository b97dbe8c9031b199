//! The trace of a request: W3C Trace Context, level 2, and the b3 fields of Zipkin, which are only
//! read. Values that are invalid, repeated or too long are ignored. Pure.

use http::HeaderValue;

use super::view::RequestView;

/// The field of W3C Trace Context.
pub const TRACEPARENT: &str = "traceparent";
/// The length of a `traceparent` of version 00.
const LENGTH: usize = 55;
/// The length of a later version.
const MAX_LENGTH: usize = 256;

/// A span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanContext {
    /// The id of the trace, not 0.
    pub trace: [u8; 16],
    /// The id of the span, not 0.
    pub span: [u8; 8],
    /// Whether it is sampled. `None`: its sender leaves the decision to others.
    pub sampled: Option<bool>,
}

impl SpanContext {
    /// The span that a request comes from.
    pub fn of(request: &RequestView<'_>) -> Option<Self> {
        let (mut traceparents, mut b3) = (0, B3::default());
        let mut traceparent = None;
        request.head.visit(&mut |name, value| {
            if name.eq_ignore_ascii_case(TRACEPARENT.as_bytes()) {
                traceparents += 1;
                traceparent = Self::parse(value);
            } else if let [b'x' | b'X', b'-', b'b' | b'B', b'3', ..] | [b'b' | b'B', b'3'] = name {
                b3.add(name, value);
            }
        });
        match traceparents {
            0 => b3.context(),
            1 => traceparent,
            _ => None,
        }
    }

    /// Parses a `traceparent`.
    pub fn parse(value: &[u8]) -> Option<Self> {
        let (known, rest) = value.split_at_checked(LENGTH)?;
        let is_known = rest.is_empty() || known[..2] != *b"00" && rest[0] == b'-';
        let [v1, v2, b'-', fields @ ..] = known else {
            return None;
        };
        let [version] = hex([*v1, *v2].as_slice())?;
        let (trace, fields) = fields.split_at(32);
        let (span, flags) = fields.split_at(17);
        let ([b'-', span @ ..], [b'-', flags @ ..]) = (span, flags) else {
            return None;
        };
        let [flags] = hex(flags)?;
        let context = Self::new(hex(trace)?, hex(span)?, Some(flags & 1 == 1))?;
        (is_known && version != 0xff && value.len() <= MAX_LENGTH).then_some(context)
    }

    fn new(trace: [u8; 16], span: [u8; 8], sampled: Option<bool>) -> Option<Self> {
        let is_valid = trace != [0; 16] && span != [0; 8];
        is_valid.then_some(Self {
            trace,
            span,
            sampled,
        })
    }

    /// The id of the trace as text.
    pub fn trace_id(&self) -> String {
        format!("{:032x}", u128::from_be_bytes(self.trace))
    }

    /// The value of `traceparent`.
    pub fn traceparent(&self) -> HeaderValue {
        let (trace, span) = (self.trace_id(), u64::from_be_bytes(self.span));
        let flags = u8::from(self.sampled == Some(true));
        let value = format!("00-{trace}-{span:016x}-{flags:02x}");
        HeaderValue::try_from(value).expect("hexadecimal digits and hyphens")
    }
}

/// The fields `b3`, and `x-b3-...`.
#[derive(Default)]
struct B3 {
    single: Option<SpanContext>,
    trace: Option<[u8; 16]>,
    span: Option<[u8; 8]>,
    sampled: Option<bool>,
    fields: [u8; 5],
}

impl B3 {
    fn add(&mut self, name: &[u8], value: &[u8]) {
        let is = |other: &str| name.eq_ignore_ascii_case(other.as_bytes());
        let field = if is("b3") {
            self.single = single(value);
            0
        } else if is("x-b3-traceid") {
            self.trace = trace(value);
            1
        } else if is("x-b3-spanid") {
            self.span = hex(value);
            2
        } else if is("x-b3-sampled") {
            self.sampled = self.sampled.or(sampled(value));
            3
        } else if is("x-b3-flags") {
            self.sampled = (value == b"1").then_some(true).or(self.sampled);
            4
        } else {
            return;
        };
        self.fields[field] = self.fields[field].saturating_add(1);
    }

    fn context(self) -> Option<SpanContext> {
        if self.fields.iter().any(|count| *count > 1) {
            return None;
        }
        let several = || SpanContext::new(self.trace?, self.span?, self.sampled);
        self.single.or_else(several)
    }
}

/// `TRACE-SPAN`, `TRACE-SPAN-SAMPLED` or `TRACE-SPAN-SAMPLED-PARENT`.
fn single(value: &[u8]) -> Option<SpanContext> {
    let mut parts = value.split(|byte| *byte == b'-');
    let (trace, span) = (trace(parts.next()?)?, hex(parts.next()?)?);
    let decision = match parts.next() {
        Some(decision) => Some(sampled(decision)?),
        None => None,
    };
    SpanContext::new(trace, span, decision).filter(|_| parts.count() <= 1)
}

/// An id of 64 or 128 bits.
fn trace(value: &[u8]) -> Option<[u8; 16]> {
    let short = |id: [u8; 8]| u128::from(u64::from_be_bytes(id)).to_be_bytes();
    hex(value).or_else(|| hex(value).map(short))
}

fn sampled(value: &[u8]) -> Option<bool> {
    match value {
        b"1" | b"d" | b"true" => Some(true),
        b"0" | b"false" => Some(false),
        _ => None,
    }
}

/// Bytes in hexadecimal digits, in lower case.
fn hex<const N: usize>(digits: &[u8]) -> Option<[u8; N]> {
    let digit = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    if digits.len() != 2 * N {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use http::HeaderName;

    use super::*;
    use crate::http::view::testing::request;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const SPAN: &str = "b7ad6b7169203331";

    fn of(fields: &[(&str, &str)]) -> Option<(String, Option<bool>)> {
        let head = http::Request::new(()).into_parts().0;
        let mut head = diy_mesh_http2::Request::from(&head);
        for (name, value) in fields {
            let name: HeaderName = name.parse().unwrap();
            head.fields.push(&name, &value.parse().unwrap());
        }
        let request = RequestView {
            head: &head,
            ..request("GET", "/")
        };
        let context = SpanContext::of(&request)?;
        Some((
            format!(
                "{}/{:016x}",
                context.trace_id(),
                u64::from_be_bytes(context.span)
            ),
            context.sampled,
        ))
    }

    fn parent(sampled: Option<bool>) -> Option<(String, Option<bool>)> {
        Some((format!("{TRACE}/{SPAN}"), sampled))
    }

    #[test]
    fn reads_traceparent() {
        let value = |version: &str, flags: &str| format!("{version}-{TRACE}-{SPAN}-{flags}");
        for (value, expected) in [
            (value("00", "01"), parent(Some(true))),
            (value("00", "00"), parent(Some(false))),
            (value("00", "03"), parent(Some(true))),
            (value("cc", "01"), parent(Some(true))),
            (value("cc", "01-later"), parent(Some(true))),
            (value("cc", "01later"), None),
            (value("00", "01-later"), None),
            (value("ff", "01"), None),
            (value("0G", "01"), None),
            (value("00", "1"), None),
            (value("00", "01").to_uppercase(), None),
            (value("00", "01").replace(TRACE, &"0".repeat(32)), None),
            (value("00", "01").replace(SPAN, &"0".repeat(16)), None),
            (value("00", "01").replace('-', "_"), None),
            (value("cc", &format!("01-{}", "a".repeat(300))), None),
            (String::new(), None),
        ] {
            assert_eq!(of(&[("Traceparent", &value)]), expected, "{value}");
        }
        let [one, other] = ["00", "01"].map(|flags| value("00", flags));
        assert_eq!(of(&[("traceparent", &one), ("traceparent", &other)]), None);
    }

    #[test]
    fn writes_what_it_reads() {
        let value = format!("00-{TRACE}-{SPAN}-01");
        let context = SpanContext::parse(value.as_bytes()).unwrap();
        assert_eq!(context.traceparent(), value);
    }

    #[test]
    fn reads_b3_only_without_traceparent() {
        let short = format!("{}-{SPAN}", &TRACE[16..]);
        let padded = format!("{}{}/{SPAN}", "0".repeat(16), &TRACE[16..]);
        for (value, expected) in [
            (format!("{TRACE}-{SPAN}-1"), parent(Some(true))),
            (format!("{TRACE}-{SPAN}-d"), parent(Some(true))),
            (format!("{TRACE}-{SPAN}-0-{SPAN}"), parent(Some(false))),
            (format!("{TRACE}-{SPAN}"), parent(None)),
            (short, Some((padded, None))),
            (format!("{TRACE}-{SPAN}-2"), None),
            (format!("{TRACE}-{SPAN}-1-{SPAN}-1"), None),
            ("0".to_owned(), None),
        ] {
            assert_eq!(of(&[("b3", &value)]), expected, "{value}");
        }
        let several = [("X-B3-TraceId", TRACE), ("x-b3-spanid", SPAN)];
        let with = |field| of(&[&several[..], &[field]].concat());
        assert_eq!(of(&several), parent(None));
        assert_eq!(with(("x-b3-sampled", "0")), parent(Some(false)));
        assert_eq!(with(("x-b3-flags", "1")), parent(Some(true)));
        assert_eq!(with(("x-b3-spanid", SPAN)), None);
        assert_eq!(with(("traceparent", "invalid")), None);
        assert_eq!(of(&several[..1]), None);
    }

    #[test]
    fn random_values_never_panic_and_are_read_as_they_are_written() {
        let mut rng = fastrand::Rng::with_seed(7);
        let valid = format!("00-{TRACE}-{SPAN}-01");
        let mut read = 0;
        for _ in 0..100_000 {
            let mut value = valid.clone().into_bytes();
            for _ in 0..rng.usize(..4) {
                match rng.u8(..3) {
                    0 => value.truncate(rng.usize(..60)),
                    1 if !value.is_empty() => {
                        let at = rng.usize(..value.len());
                        value[at] = rng.u8(..);
                    }
                    _ => value.push(rng.u8(..)),
                }
            }
            let _ = single(&value);
            let _ = trace(&value);
            if let Some(context) = SpanContext::parse(&value) {
                let again = context.traceparent();
                assert_eq!(SpanContext::parse(again.as_bytes()), Some(context));
                read += 1;
            }
        }
        assert!(read > 1000, "{read}");
    }
}
