//! Recognition of HTTP request lines, as strict and as lenient servers parse them. Pure.

use super::{Protocol, Verdict};

/// An incremental detector of HTTP request lines. It inspects the first line of a connection that
/// is not blank. The line is a request line if
///
/// - the first word is a token (RFC 9110, section 5.6.2) and a later word starts with `HTTP/`, in
///   any case; or
/// - the first word is a registered method, the second starts with `/`, `*`, `http:` or `https:`,
///   and the line does not end with the version of another protocol.
///
/// The rule covers all lenient servers: it does not depend on the position of the version, nor on
/// its presence. The verdict HTTP is final. The verdict opaque needs the end of the line, or a
/// first word that is not a token. The verdict therefore does not depend on how the sender splits
/// the line, and a pause within a request does not bypass the parser.
#[derive(Debug, Default)]
pub struct RequestLineDetector {
    /// The number of words so far, at most [`MAX_WORDS`].
    words: u8,
    in_word: bool,
    first: Prefix<MAX_METHOD_PREFIX>,
    second: Prefix<MAX_SCHEME_PREFIX>,
    /// The current word.
    last: Prefix<MAX_VERSION_PREFIX>,
}

/// The maximum number of words that are counted. A request line has three.
const MAX_WORDS: u8 = 4;

impl RequestLineDetector {
    /// Inspects the next bytes of the connection. Returns the verdict on all bytes so far.
    pub fn update(&mut self, bytes: &[u8]) -> Verdict {
        let known = bytes.iter().find_map(|byte| self.step(byte));
        known.map_or(Verdict::NeedMore, Verdict::Known)
    }

    fn step(&mut self, byte: &u8) -> Option<Protocol> {
        if is_separator(byte) {
            self.in_word = false;
            // Every server ends a line at LF. Some also end it at the other vertical separators.
            if is_vertical(byte) && self.is_method_and_target() && !self.ends_with_another_version()
            {
                return Some(Protocol::Http1);
            }
            return (*byte == b'\n' && self.words > 0).then_some(Protocol::Opaque);
        }
        if !self.in_word {
            self.in_word = true;
            self.words = (self.words + 1).min(MAX_WORDS);
            self.last = Prefix::default();
        }
        self.last.push(*byte);
        match self.words {
            1 if !is_token(byte) => return Some(Protocol::Opaque),
            1 => self.first.push(*byte),
            2 => self.second.push(*byte),
            _ => {}
        }
        (self.words > 1 && self.last.is(b"HTTP/")).then_some(Protocol::Http1)
    }

    /// A request without a version (RFC 1945, section 4.1), or a command of another protocol. The
    /// other words do not count: a server may split them at fewer separators.
    fn is_simple_request(&self) -> bool {
        self.first.get() == b"GET"
    }

    pub(super) fn is_method_and_target(&self) -> bool {
        let target = self.second.get();
        let is_url = |scheme: &[u8]| {
            target
                .get(..scheme.len())
                .is_some_and(|start| start.eq_ignore_ascii_case(scheme))
        };
        let is_target =
            matches!(target, [b'/' | b'*', ..]) || is_url(b"http:") || is_url(b"https:");
        is_target && METHODS.binary_search(&self.first.get()).is_ok()
    }

    /// Whether the line has three words, and the last one is the version of RTSP, SIP or ICAP.
    fn ends_with_another_version(&self) -> bool {
        let digits = |version: &[u8]| matches!(version, [b'0'..=b'9', b'.', b'0'..=b'9']);
        let word = self.last.get();
        self.words == 3
            && [&b"RTSP/"[..], b"SIP/", b"ICAP/"]
                .iter()
                .any(|name| word.strip_prefix(*name).is_some_and(digits))
    }
}

/// An incremental detector of requests in a connection that was classified as opaque. After the first
/// line it inspects the lines that follow a line with `GET`: some servers parse them as the fields of
/// a request without a version, while other protocols send no field line there.
#[derive(Debug, Default)]
pub struct RequestDetector {
    line: RequestLineDetector,
    field: Option<FieldLine>,
}

/// The part of a field line before its colon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FieldLine {
    Start,
    Name,
    AfterName,
    /// The line is no field line.
    Other,
}

impl RequestDetector {
    /// Inspects the next bytes of the connection. Returns the verdict on all bytes so far.
    pub fn update(&mut self, bytes: &[u8]) -> Verdict {
        for byte in bytes {
            self.field = match (self.field, byte) {
                (None, _) => match self.line.step(byte) {
                    None => None,
                    Some(Protocol::Opaque) if self.line.is_simple_request() => {
                        Some(FieldLine::Start)
                    }
                    Some(protocol) => return Verdict::Known(protocol),
                },
                // A blank line ends the fields.
                (Some(FieldLine::Start), b'\n') => return Verdict::Known(Protocol::Opaque),
                (Some(_), b'\n') => Some(FieldLine::Start),
                (Some(FieldLine::Name | FieldLine::AfterName), b':') => {
                    return Verdict::Known(Protocol::Http1);
                }
                (Some(FieldLine::Start | FieldLine::Name), byte) if is_token(byte) => {
                    Some(FieldLine::Name)
                }
                (Some(FieldLine::Start), byte) if is_separator(byte) => Some(FieldLine::Start),
                (Some(FieldLine::Name | FieldLine::AfterName), byte) if is_separator(byte) => {
                    Some(FieldLine::AfterName)
                }
                (Some(_), _) => Some(FieldLine::Other),
            };
        }
        Verdict::NeedMore
    }
}

/// The first `N` bytes of a word.
#[derive(Debug)]
struct Prefix<const N: usize> {
    bytes: [u8; N],
    length: u8,
}

impl<const N: usize> Default for Prefix<N> {
    fn default() -> Self {
        Self {
            bytes: [0; N],
            length: 0,
        }
    }
}

impl<const N: usize> Prefix<N> {
    fn push(&mut self, byte: u8) {
        if let Some(next) = self.bytes.get_mut(usize::from(self.length)) {
            *next = byte;
            self.length += 1;
        }
    }

    fn get(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }

    /// Compares the prefix with `text`, case-insensitively.
    fn is(&self, text: &[u8]) -> bool {
        self.get().eq_ignore_ascii_case(text)
    }
}

/// The HTTP Method Registry (RFC 9110, section 16.1) and QUERY, sorted. PRI is omitted: it occurs
/// only in the HTTP/2 preface.
const METHODS: [&[u8]; 39] = [
    b"ACL",
    b"BASELINE-CONTROL",
    b"BIND",
    b"CHECKIN",
    b"CHECKOUT",
    b"CONNECT",
    b"COPY",
    b"DELETE",
    b"GET",
    b"HEAD",
    b"LABEL",
    b"LINK",
    b"LOCK",
    b"MERGE",
    b"MKACTIVITY",
    b"MKCALENDAR",
    b"MKCOL",
    b"MKREDIRECTREF",
    b"MKWORKSPACE",
    b"MOVE",
    b"OPTIONS",
    b"ORDERPATCH",
    b"PATCH",
    b"POST",
    b"PROPFIND",
    b"PROPPATCH",
    b"PUT",
    b"QUERY",
    b"REBIND",
    b"REPORT",
    b"SEARCH",
    b"TRACE",
    b"UNBIND",
    b"UNCHECKOUT",
    b"UNLINK",
    b"UNLOCK",
    b"UPDATE",
    b"UPDATEREDIRECTREF",
    b"VERSION-CONTROL",
];
/// One byte more than `UPDATEREDIRECTREF`, to distinguish longer words.
const MAX_METHOD_PREFIX: usize = 18;
/// The length of `https:`.
const MAX_SCHEME_PREFIX: usize = 6;
/// One byte more than `RTSP/1.0`, to distinguish longer words.
const MAX_VERSION_PREFIX: usize = 9;

/// Whether a server may treat the byte as a separator of words: white space of ASCII, Latin-1 and,
/// in UTF-8, Unicode, and the byte order mark. All bytes outside ASCII count, because methods,
/// schemes and versions contain none.
pub(super) fn is_separator(byte: &u8) -> bool {
    matches!(byte, b'\t'..=b'\r' | 0x1c..=b' ' | 0x80..)
}

/// Whether a server may end a line at the byte.
fn is_vertical(byte: &u8) -> bool {
    is_separator(byte) && !matches!(byte, b'\t' | b' ')
}

/// Whether the byte is allowed in a token (RFC 9110, section 5.6.2).
fn is_token(byte: &u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_are_sorted() {
        assert!(METHODS.is_sorted(), "binary search needs the order");
        assert!(
            METHODS
                .iter()
                .all(|method| method.len() < MAX_METHOD_PREFIX)
        );
    }

    /// The verdicts on the bytes at once, and byte by byte.
    fn verdicts(bytes: &[u8]) -> [Verdict; 2] {
        let mut detector = RequestDetector::default();
        let known = bytes
            .iter()
            .find_map(|byte| match detector.update(&[*byte]) {
                Verdict::NeedMore => None,
                verdict => Some(verdict),
            });
        [
            RequestDetector::default().update(bytes),
            known.unwrap_or(Verdict::NeedMore),
        ]
    }

    #[test]
    fn fields_after_a_simple_request_are_a_request() {
        for bytes in [
            &b"GET a:1\r\nX-Called-By: forged\r\n\r\n"[..],
            b"GET key\nHost: a\n",
            b"GET a\xe9b\r\nX-Called-By: forged\r\n",
            b"GET \xe9\r\nX-Called-By: forged\r\n",
            b"GET key\r\nno field\r\n X-Called-By : forged\r\n",
        ] {
            let http1 = Verdict::Known(Protocol::Http1);
            assert_eq!(verdicts(bytes), [http1; 2], "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn commands_of_other_protocols_are_no_request() {
        for bytes in [
            &b"GET key\r\nGET other:key\r\nSET a:b \"c: d\"\r\n"[..],
            b"CONNECT {}\r\nPUB a 4\r\nb: c\r\n",
            b"get key\r\nhost: a\r\n",
            b"GET key\r\n\r\nhost: a\r\n",
        ] {
            for verdict in verdicts(bytes) {
                let http1 = Verdict::Known(Protocol::Http1);
                assert_ne!(verdict, http1, "{}", bytes.escape_ascii());
            }
        }
    }
}
