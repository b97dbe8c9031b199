//! Recognition of HTTP request lines, as strict and as lenient servers parse them. Pure.

use crate::protocol::Protocol;

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
/// the line, and a pause within a request does not bypass the parser. A line over 2 MiB is opaque.
#[derive(Debug, Default)]
pub struct RequestLineDetector {
    /// The length of the line so far.
    length: usize,
    /// The number of words so far, at most [`MAX_WORDS`].
    words: u8,
    in_word: bool,
    first: Prefix<MAX_METHOD_PREFIX>,
    /// Whether the first word is a method. Set when it is complete.
    has_method: bool,
    second: Prefix<MAX_SCHEME_PREFIX>,
    /// The current word.
    last: Prefix<MAX_VERSION_PREFIX>,
}

/// The maximum number of words that are counted. A request line has three.
const MAX_WORDS: u8 = 4;
/// The length of a line from which it is opaque: twice what the most lenient servers accept (Go
/// reads 1 MiB). The end of text without line ends is not inspected.
const MAX_REQUEST_LINE: usize = 2 * 1024 * 1024;
/// The start of a version.
const VERSION: &[u8] = b"HTTP/";

impl RequestLineDetector {
    /// Inspects the next bytes of the connection. Returns the protocol once all bytes so far
    /// determine it.
    pub fn update(&mut self, mut bytes: &[u8]) -> Option<Protocol> {
        self.advance(&mut bytes)
    }

    /// Inspects `bytes` up to the byte that determines the protocol, and removes them.
    fn advance(&mut self, bytes: &mut &[u8]) -> Option<Protocol> {
        *bytes = &bytes[self.skip(bytes)..];
        while let Some((byte, rest)) = bytes.split_first() {
            *bytes = rest;
            let known = self.step(byte);
            if known.is_some() {
                return known;
            }
            if *byte == b'/' || is_separator(byte) {
                *bytes = &bytes[self.skip(bytes)..];
            }
        }
        None
    }

    /// Skips bytes that cannot determine the protocol, and returns their number. If the line needs a
    /// version, these are the ones before the next version, and before the next LF.
    fn skip(&mut self, bytes: &[u8]) -> usize {
        if !self.needs_version() {
            return 0;
        }
        let (name, _) = VERSION.split_at(VERSION.len() - 1);
        let next = memchr::memchr2_iter(b'/', b'\n', bytes).find(|at| {
            let before = bytes[..*at].last_chunk::<4>();
            bytes[*at] == b'\n' || before.is_none_or(|before| before.eq_ignore_ascii_case(name))
        });
        let next = next.unwrap_or(bytes.len());
        // A version, and the separator before it, are left for `step`.
        let skipped = next
            .saturating_sub(VERSION.len())
            .min(MAX_REQUEST_LINE - self.length);
        if let Some(byte) = bytes[..skipped].last() {
            self.length += skipped;
            self.in_word = !is_separator(byte);
            self.last = Prefix::OTHER;
        }
        skipped
    }

    /// Whether the line is not a method and a target, whatever follows.
    fn needs_version(&self) -> bool {
        match self.words {
            0 | 1 => false,
            2 => !self.has_method,
            _ => !self.is_method_and_target(),
        }
    }

    fn step(&mut self, byte: &u8) -> Option<Protocol> {
        if self.length >= MAX_REQUEST_LINE {
            return Some(Protocol::Opaque);
        }
        self.length += 1;
        if self.words == 0 && matches!(byte, b'\r' | b'\n') {
            self.length = 0;
        }
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
            if self.words == 1 {
                self.has_method = METHODS.binary_search(&self.first.get()).is_ok();
            }
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
        (self.words > 1 && self.last.is(VERSION)).then_some(Protocol::Http1)
    }

    /// A request without a version (RFC 1945, section 4.1), or a command of another protocol. The
    /// other words do not count: a server may split them at fewer separators.
    fn is_simple_request(&self) -> bool {
        self.first.get() == b"GET"
    }

    pub(crate) fn is_method_and_target(&self) -> bool {
        let target = self.second.get();
        let is_url = |scheme: &[u8]| {
            target
                .get(..scheme.len())
                .is_some_and(|start| start.eq_ignore_ascii_case(scheme))
        };
        let is_target =
            matches!(target, [b'/' | b'*', ..]) || is_url(b"http:") || is_url(b"https:");
        is_target && self.has_method
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
    /// The length of the field line so far.
    length: usize,
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
    /// Inspects the next bytes of the connection. Returns the protocol once all bytes so far
    /// determine it.
    pub fn update(&mut self, mut bytes: &[u8]) -> Option<Protocol> {
        let mut field = match self.field {
            Some(field) => field,
            None => match self.line.advance(&mut bytes) {
                Some(Protocol::Opaque) if self.line.is_simple_request() => FieldLine::Start,
                result => return result,
            },
        };
        while !bytes.is_empty() {
            if field == FieldLine::Other {
                let skipped = memchr::memchr(b'\n', bytes).unwrap_or(bytes.len());
                let skipped = skipped.min(MAX_REQUEST_LINE - self.length);
                self.length += skipped;
                bytes = &bytes[skipped..];
            }
            let Some((byte, rest)) = bytes.split_first() else {
                break;
            };
            bytes = rest;
            if self.length >= MAX_REQUEST_LINE {
                return Some(Protocol::Opaque);
            }
            self.length = if *byte == b'\n' { 0 } else { self.length + 1 };
            field = match field.step(*byte) {
                Ok(next) => next,
                Err(protocol) => return Some(protocol),
            };
        }
        self.field = Some(field);
        None
    }
}

impl FieldLine {
    /// The state after the next byte, or the protocol.
    fn step(self, byte: u8) -> Result<Self, Protocol> {
        match (self, byte) {
            // A blank line ends the fields.
            (Self::Start, b'\n') => Err(Protocol::Opaque),
            (_, b'\n') => Ok(Self::Start),
            (Self::Name | Self::AfterName, b':') => Err(Protocol::Http1),
            (Self::Start | Self::Name, byte) if is_token(&byte) => Ok(Self::Name),
            (Self::Start, byte) if is_separator(&byte) => Ok(Self::Start),
            (Self::Name | Self::AfterName, byte) if is_separator(&byte) => Ok(Self::AfterName),
            _ => Ok(Self::Other),
        }
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
    /// A word that no text is equal to.
    const OTHER: Self = Self {
        bytes: [0; N],
        length: N as u8,
    };

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
pub(crate) fn is_separator(byte: &u8) -> bool {
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
    fn verdicts(bytes: &[u8]) -> [Option<Protocol>; 2] {
        let mut detector = RequestDetector::default();
        let by_byte = bytes.iter().find_map(|byte| detector.update(&[*byte]));
        [RequestDetector::default().update(bytes), by_byte]
    }

    #[test]
    fn verdict_does_not_depend_on_the_split() {
        let pieces = [
            "HTTP/",
            "http/1.1",
            "HTT",
            "P",
            "/",
            " ",
            "\t",
            "\r",
            "\n",
            ":",
            "GET",
            "GET /",
            "POST",
            "a",
            "word",
            "a longer piece of text",
            "\u{e9}",
            "\u{1}",
        ];
        let mut rng = fastrand::Rng::with_seed(5);
        for _ in 0..50_000 {
            let text: String = (0..rng.usize(0..12))
                .map(|_| pieces[rng.usize(0..pieces.len())])
                .collect();
            let [whole, by_byte] = verdicts(text.as_bytes());
            assert_eq!(whole, by_byte, "{text:?}");
            let (mut detector, mut split) = (RequestDetector::default(), None);
            let mut rest = text.as_bytes();
            while !rest.is_empty() && split.is_none() {
                let (piece, after) = rest.split_at(rng.usize(1..=rest.len()));
                (split, rest) = (detector.update(piece), after);
            }
            assert_eq!(whole, split, "{text:?}");
        }
    }

    #[test]
    fn text_over_the_maximum_length_is_opaque() {
        let opaque = Some(Protocol::Opaque);
        for text in [
            &b"two words "[..],
            b"word",
            b"GET /",
            b"GET a/",
            b" ",
            b"GET k\nname",
            b"GET k\n a b",
        ] {
            let piece = text.repeat(64 * 1024 / text.len());
            let mut detector = RequestDetector::default();
            let mut verdict = detector.update(text);
            let mut length = 0;
            while verdict.is_none() && length <= 2 * MAX_REQUEST_LINE {
                // Without another line end.
                let piece: Vec<u8> = piece.iter().map(|byte| (*byte).max(b' ')).collect();
                verdict = detector.update(&piece);
                length += piece.len();
            }
            assert_eq!(verdict, opaque, "{}", text.escape_ascii());
            assert!(length >= MAX_REQUEST_LINE - 64 * 1024);
        }
    }

    #[test]
    fn requests_that_servers_accept_are_http_whatever_their_length() {
        // Go accepts 1 MiB and 4 kB.
        let long = "a".repeat(1024 * 1024 + 4096);
        let blank_lines = "\r\n".repeat(2 * MAX_REQUEST_LINE);
        let lines = format!("a b {long}\n").repeat(4);
        for request in [
            format!("GET a{long} HTTP/1.1\r\n"),
            format!("GET  /{long}\r\n"),
            format!("{}{long} / HTTP/1.1\r\n", " ".repeat(4096)),
            format!("{blank_lines}GET / HTTP/1.1\r\n"),
            format!("GET k\r\n{lines}X-Called-By: forged\r\n"),
        ] {
            let http1 = Some(Protocol::Http1);
            assert_eq!(RequestDetector::default().update(request.as_bytes()), http1);
        }
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
            let http1 = Some(Protocol::Http1);
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
                let http1 = Some(Protocol::Http1);
                assert_ne!(verdict, http1, "{}", bytes.escape_ascii());
            }
        }
    }
}
