//! Step 3: what a connection carries, told from the client's first bytes. [`classify`] is a pure function of them;
//! waiting for them is the caller's, who must not wait where the server speaks first.

use crate::discovery::AppProtocol;
use crate::tls::{self, Hello};

/// The longest line that detection waits for.
const MAX_LINE: usize = 16 * 1024;
/// What an HTTP/2 client sends first (RFC 9113, section 3.4).
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// More than this no HTTP/2 server says before it has heard its client.
const MAX_SETTINGS: usize = 16 * 1024;

/// What a connection carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.0 or HTTP/1.1.
    Http1,
    /// HTTP/2 with prior knowledge; gRPC among it.
    Http2,
    /// Anything else: bytes both ways. The app's own TLS is among it.
    Opaque,
    /// TLS of the mesh, which says itself what is inside. Only what comes to the pod is looked at for it.
    MeshTls,
}

/// What the first bytes tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Enough to know.
    Known(Protocol),
    /// It may become this or that yet.
    NeedMore,
}

/// What is known without a look at the bytes.
pub fn announced(protocol: AppProtocol) -> Option<Protocol> {
    match protocol {
        AppProtocol::Detect => None,
        AppProtocol::Http1 => Some(Protocol::Http1),
        AppProtocol::Http2 => Some(Protocol::Http2),
        AppProtocol::Opaque => Some(Protocol::Opaque),
    }
}

/// Tells HTTP/2 by its preface and HTTP/1 by its request line; everything else is opaque. A line that any server might read as a
/// request is HTTP, so that no request reaches an app unparsed: the strict parser refuses the malformed ones.
pub fn classify(bytes: &[u8]) -> Verdict {
    if bytes.starts_with(HTTP2_PREFACE) {
        return Verdict::Known(Protocol::Http2);
    }
    if HTTP2_PREFACE.starts_with(bytes) {
        return Verdict::NeedMore;
    }
    let within = &bytes[..bytes.len().min(MAX_LINE)];
    match RequestLineDetector::default().update(within) {
        Verdict::NeedMore if within.len() == MAX_LINE => Verdict::Known(guess(within)),
        verdict => verdict,
    }
}

/// As [`classify`], where a peer's proxy may be speaking.
pub fn classify_inbound(bytes: &[u8]) -> Verdict {
    match tls::inspect(bytes) {
        Hello::Mesh => Verdict::Known(Protocol::MeshTls),
        Hello::NeedMore => Verdict::NeedMore,
        Hello::Foreign => classify(bytes),
    }
}

/// As [`classify_inbound`] on a port that the pod declares opaque: everything but mesh TLS is opaque.
pub fn classify_inbound_opaque(bytes: &[u8]) -> Verdict {
    match tls::inspect(bytes) {
        Hello::Mesh => Verdict::Known(Protocol::MeshTls),
        Hello::NeedMore => Verdict::NeedMore,
        Hello::Foreign => Verdict::Known(Protocol::Opaque),
    }
}

/// The protocol of an unfinished first line whose client sends no more for now. The beginning of a request gets HTTP's answer to an
/// incomplete one; anything else is passed on, while an [`RequestLineDetector`] reads the rest of the line.
pub fn guess(bytes: &[u8]) -> Protocol {
    let mut line = RequestLineDetector::default();
    match line.update(bytes) {
        Verdict::Known(protocol) => protocol,
        Verdict::NeedMore if line.is_method_and_target() => Protocol::Http1,
        Verdict::NeedMore => Protocol::Opaque,
    }
}

/// Whether there are bytes that no text has.
pub fn is_binary(bytes: &[u8]) -> bool {
    bytes
        .iter()
        .any(|byte| byte.is_ascii_control() && !is_separator(byte))
}

/// Reads a connection's first line that is not blank, in whatever pieces it arrives, and tells whether it is a request line:
///
/// - the first word is a token (RFC 9110, section 5.6.2) and a later word begins with `HTTP/` in any case; or
/// - the first word is a registered method, the second begins with `/`, `*`, `http:` or `https:`, and the line does not end with
///   another protocol's version.
///
/// The rule covers every server, however lenient: it does not depend on where a server expects the version, nor on whether it wants
/// one. Once a line is HTTP, no further byte changes that; it is something else only when it has ended. So the verdict is the same
/// however the sender splits the line, and a sender that pauses within a request does not get it past the parser.
#[derive(Debug, Default)]
pub struct RequestLineDetector {
    /// Words that have begun, at most [`MANY_WORDS`].
    words: u8,
    within_word: bool,
    first: Prefix<LONGEST_METHOD>,
    second: Prefix<LONGEST_SCHEME>,
    /// The newest word.
    last: Prefix<LONGEST_VERSION>,
}

/// The count of words stops here: four words are already one too many for a request line.
const MANY_WORDS: u8 = 4;

impl RequestLineDetector {
    /// The verdict on everything so far, `bytes` being the newest.
    pub fn update(&mut self, bytes: &[u8]) -> Verdict {
        for byte in bytes {
            if is_separator(byte) {
                self.within_word = false;
                // Only LF ends a line for certain. A server may also split lines at the other vertical separators.
                if is_vertical(byte)
                    && self.is_method_and_target()
                    && !self.ends_with_another_version()
                {
                    return Verdict::Known(Protocol::Http1);
                }
                if *byte == b'\n' && self.words > 0 {
                    return Verdict::Known(Protocol::Opaque);
                }
                continue;
            }
            if !self.within_word {
                self.within_word = true;
                self.words = (self.words + 1).min(MANY_WORDS);
                self.last = Prefix::default();
            }
            self.last.push(*byte);
            match self.words {
                1 if !is_token(byte) => return Verdict::Known(Protocol::Opaque),
                1 => self.first.push(*byte),
                2 => self.second.push(*byte),
                _ => {}
            }
            if self.words > 1 && self.last.is(b"HTTP/") {
                return Verdict::Known(Protocol::Http1);
            }
        }
        Verdict::NeedMore
    }

    fn is_method_and_target(&self) -> bool {
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

    /// The line has three words, and the last one is the version of RTSP, SIP or ICAP.
    fn ends_with_another_version(&self) -> bool {
        let digits = |version: &[u8]| matches!(version, [b'0'..=b'9', b'.', b'0'..=b'9']);
        let word = self.last.get();
        self.words == 3
            && [&b"RTSP/"[..], b"SIP/", b"ICAP/"]
                .iter()
                .any(|name| word.strip_prefix(*name).is_some_and(digits))
    }
}

/// The beginning of a word: its first `N` bytes.
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

    /// The word so far, in any case.
    fn is(&self, word: &[u8]) -> bool {
        self.get().eq_ignore_ascii_case(word)
    }
}

/// The HTTP Method Registry (RFC 9110, section 16.1), in order, and QUERY. PRI is left out: it is no request's, but the preface's of
/// HTTP/2, which names its version.
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
/// One byte more than `UPDATEREDIRECTREF` has: a longer word is no method.
const LONGEST_METHOD: usize = 18;
/// `https:`
const LONGEST_SCHEME: usize = 6;
/// One byte more than `RTSP/1.0` has: a longer word is no version.
const LONGEST_VERSION: usize = 9;

/// Whether a server's first bytes are those of HTTP/2: its SETTINGS, which it sends without waiting for its client, as little as its
/// client waits for them (RFC 9113, section 3.4). So they don't mean that the server is the one to speak first.
pub fn is_http2_server(bytes: &[u8]) -> bool {
    bytes.len() <= MAX_SETTINGS && matches!(bytes, [_, _, _, 4, 0, 0, 0, 0, 0, ..])
}

/// What some server may take for the space between two words: white space of ASCII, of Latin-1 and, in UTF-8, of Unicode, and a byte
/// order mark. Every byte outside ASCII counts: no word that matters has one.
fn is_separator(byte: &u8) -> bool {
    matches!(byte, b'\t'..=b'\r' | 0x1c..=b' ' | 0x80..)
}

/// The separators at which some server may end a line.
fn is_vertical(byte: &u8) -> bool {
    is_separator(byte) && !matches!(byte, b'\t' | b' ')
}

/// RFC 9110, section 5.6.2.
fn is_token(byte: &u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HTTP1: Verdict = Verdict::Known(Protocol::Http1);
    const OPAQUE: Verdict = Verdict::Known(Protocol::Opaque);

    #[test]
    fn a_request_line_is_known_by_its_version_and_not_before() {
        let line = b"OPTIONS * HTTP/1.1\r\n";
        for length in 0..line.len() {
            let expected = if length < "OPTIONS * HTTP/".len() {
                Verdict::NeedMore
            } else {
                HTTP1
            };
            assert_eq!(classify(&line[..length]), expected, "{length}");
        }
        assert_eq!(classify(b"GET /a b HTTP/1.0\n"), HTTP1);
        assert_eq!(classify(b"\r\nPURGE / HTTP/1.1\r\n"), HTTP1);
    }

    #[test]
    fn each_prefix_of_the_preface_waits() {
        for length in 0..HTTP2_PREFACE.len() {
            assert_eq!(
                classify(&HTTP2_PREFACE[..length]),
                Verdict::NeedMore,
                "{length}"
            );
        }
        assert_eq!(classify(HTTP2_PREFACE), Verdict::Known(Protocol::Http2));
    }

    #[test]
    fn an_http2_servers_word_is_no_other_protocols() {
        assert!(is_http2_server(
            b"\0\0\x12\x04\0\0\0\0\0\0\x04\0\x10\0\0\0\x05\0\0\x40\0\0\x06\0\0\x40\0"
        ));
        for other in [
            &b"\x4a\0\0\0\x0a8.0.36\0"[..],
            b"220 mail.example ESMTP\r\n",
            b"SSH-2.0-OpenSSH_9\r\n",
            b"\0\0\0\x04",
            b"",
        ] {
            assert!(!is_http2_server(other), "{other:?}");
        }
    }

    /// The first words of clients of other protocols.
    const OTHER_PROTOCOLS: [(&str, &[u8]); 40] = [
        ("RTSP", b"OPTIONS rtsp://camera.example/1 RTSP/1.0\r\n"),
        ("RTSP, any stream", b"OPTIONS * RTSP/1.0\r\n"),
        ("RTSP 2, a path", b"SETUP /track1 RTSP/2.0\r\n"),
        ("SIP", b"INVITE sip:bob@biloxi.example SIP/2.0\r\n"),
        ("SIP, keep-alive", b"OPTIONS sip:proxy.example SIP/2.0\r\n"),
        (
            "ICAP",
            b"OPTIONS icap://scanner.example/avscan ICAP/1.0\r\n",
        ),
        ("ICAP, any service", b"OPTIONS * ICAP/1.0\r\n"),
        (
            "syslog, RFC 3164",
            b"<134>Nov 21 10:00:00 web nginx: 10.0.0.1 - - \"GET / HTTP/1.1\" 200 12\n",
        ),
        (
            "syslog, RFC 5424",
            b"<165>1 2026-11-21T10:00:00Z web nginx 12 - - \"GET /a HTTP/1.1\" 200\n",
        ),
        (
            "JSON lines",
            b"{\"request\":\"GET / HTTP/1.1\",\"status\":200}\n",
        ),
        (
            "JSON lines, spaced",
            b"{ \"request\": \"GET / HTTP/1.1\" }\n",
        ),
        ("memcached, get", b"get /index.html\r\n"),
        ("memcached, set", b"set /index.html 0 60 5\r\nhello\r\n"),
        ("memcached, meta", b"mg /a t v\r\n"),
        ("Redis, RESP", b"*1\r\n$4\r\nPING\r\n"),
        ("Redis, inline", b"PING\r\n"),
        ("Redis, inline key", b"GET key\r\n"),
        ("Redis, inline small letters", b"get /key\r\n"),
        ("SMTP", b"EHLO mail.example\r\n"),
        ("SMTP, old", b"HELO mail.example\r\n"),
        ("LMTP", b"LHLO mail.example\r\n"),
        ("FTP", b"USER anonymous\r\n"),
        ("IMAP", b"a1 LOGIN fred secret\r\n"),
        ("POP3", b"APOP mrose c4c9334bac560ecc979e58001b3e22fb\r\n"),
        ("NNTP", b"GROUP misc.test\r\n"),
        (
            "NATS",
            b"CONNECT {\"verbose\":false,\"lang\":\"go\"}\r\nPING\r\n",
        ),
        ("STOMP", b"CONNECT\naccept-version:1.2\nhost:broker\n\n\0"),
        ("STOMP 1.2", b"STOMP\naccept-version:1.2\n\n\0"),
        ("IRC", b"NICK fred\r\nUSER fred 0 * :Fred\r\n"),
        ("beanstalkd", b"put 0 0 60 5\r\nhello\r\n"),
        ("ZooKeeper, four letters", b"ruok\n"),
        ("Graphite", b"web.GET.200 12 1795341600\n"),
        (
            "InfluxDB lines",
            b"cpu,host=web usage=0.5 1795341600000000000\n",
        ),
        ("whois", b"example.org\r\n"),
        ("finger", b"/W fred\r\n"),
        ("gopher", b"/docs\tHTTP\r\n"),
        ("SSH", b"SSH-2.0-OpenSSH_9.2\r\n"),
        ("clamd", b"nINSTREAM\n"),
        ("git", b"0032git-upload-pack /it.git\0host=here\0"),
        ("AMQP", b"AMQP\0\0\x09\x01"),
    ];

    #[test]
    fn other_protocols_are_opaque() {
        for (name, bytes) in OTHER_PROTOCOLS {
            assert_ne!(classify(bytes), HTTP1, "{name}");
            assert_eq!(guess(bytes), Protocol::Opaque, "{name}");
            let by_byte = bytes.iter().fold(
                (RequestLineDetector::default(), Verdict::NeedMore),
                |(mut line, verdict), byte| {
                    let verdict = if verdict == Verdict::NeedMore {
                        line.update(&[*byte])
                    } else {
                        verdict
                    };
                    (line, verdict)
                },
            );
            assert_ne!(by_byte.1, HTTP1, "{name}, byte by byte");
            let has_line = bytes.contains(&b'\n');
            assert!(
                !has_line || classify(bytes) == OPAQUE,
                "{name}: its line has ended"
            );
        }
        for bytes in [
            &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
            b"\0\0\0\x01",
        ] {
            assert_eq!(
                (classify(bytes), guess(bytes)),
                (OPAQUE, Protocol::Opaque),
                "{bytes:?}"
            );
        }
        assert_eq!(guess(b"\r\n\r\n\r\n"), Protocol::Opaque);
    }

    #[test]
    fn lines_that_cannot_be_told_from_requests_are_http() {
        // docs/reference.md names them, and what to do: declare the port opaque.
        for line in [
            &b"GET /a\r\n"[..], // Redis, inline
            b"127.0.0.1 - - [21/Nov/2026:10:00:00 +0000] \"GET /\" HTTP/1.1 200 12\n", // an access log
            b"92 <165>1 2026-11-21T10:00:00Z web nginx 12 - - GET /a HTTP/1.1\n", // syslog, RFC 6587
            b"SEARCH /a\n", // any protocol with such a command
        ] {
            assert_eq!(classify(line), HTTP1, "{}", line.escape_ascii());
        }
    }

    #[test]
    fn what_a_lenient_server_might_read_as_a_request_is_never_opaque() {
        let blank = [&b"\r\n".repeat(9)[..], b"GET / HTTP/1.1\r\n"].concat();
        let long = [&[b'A'; 100][..], b" / HTTP/1.1\r\n"].concat();
        for line in [
            &blank[..],
            &long,
            b" GET / HTTP/1.1\n",
            b"GET\t/\tHTTP/1.1\r\n",
            b"GET / HTTP/1.1\x0b\r\n",
            b"GET\xa0/\xa0HTTP/1.1\r\n",
            b"GET\xc2\xa0/\xe2\x80\x83HTTP/1.1\r\n",
            b"\xef\xbb\xbfGET / HTTP/1.1\r\n",
            b"\xe3\x80\x80GET / HTTP/1.1\r\n",
            b"GET / http/1.1\r\n",
            b"GET / HTTP/1.10\r\n",
            b"GET / HTTP/2.0\r\n",
            b"GET / HTTP/1.1 x\r\n",
            b"GET / HTTP/1.1 RTSP/1.0\r\n",
            b"GET / x HTTP/\r\n",
            b"GET HTTP/1.1\r\n",
            b"GET /\0 HTTP/1.1\r\n",
            b"get / HTTP/1.1\r\n",
            b"X / HTTP/1.1\r\n",
            b"GET /\r\n",
            b"GET / x\r\n",
            b"GET / RTSP/1.0 x\r\n",
            b"GET / RTSP/\r\n",
            b"GET / RTSP/1.0x\r\n",
            b"GET / rtsp/1.0\r\n",
            b"GET /\rHost: a\r\r",
            b"GET /\x0bHost: a RTSP/1.0\n",
            b"POST HTTP://a/ x\n",
            b"GET https://a/\n",
            b"OPTIONS *\n",
            b"CONNECT /\n",
            b"CONNECT a:1 HTTP/1.1\n",
        ] {
            assert_eq!(classify(line), HTTP1, "{}", line.escape_ascii());
            for length in 0..line.len() {
                let prefix = classify(&line[..length]);
                assert!(
                    matches!(prefix, Verdict::NeedMore | HTTP1),
                    "{}: {prefix:?}",
                    line[..length].escape_ascii()
                );
            }
        }
        assert_eq!(classify(b"PRI * HTTP/2.0\r\n\r\nXX"), HTTP1);
    }

    #[test]
    fn methods_are_in_order() {
        assert!(METHODS.is_sorted(), "they are searched");
        assert!(METHODS.iter().all(|method| method.len() < LONGEST_METHOD));
    }

    #[test]
    fn what_is_no_text_need_not_be_waited_for() {
        let anonymous_ldap_bind = b"0\x0c\x02\x01\x01\x60\x07\x02\x01\x03\x04\0\x80\0";
        for bytes in [
            &anonymous_ldap_bind[..],
            b"0032git-upload-pack /it.git\0host=here\0",
        ] {
            assert_eq!(
                (classify(bytes), is_binary(bytes)),
                (Verdict::NeedMore, true),
                "{bytes:?}"
            );
            assert_eq!(guess(bytes), Protocol::Opaque, "{bytes:?}");
        }
        assert!(!is_binary(b"\r\nGET\t/caf\xe9 HTTP/1.1\r\n"));
    }

    #[test]
    fn a_forbidden_byte_in_a_request_line_does_not_get_the_request_past_http_when_it_comes_in_pieces()
     {
        // A server that takes \x0b for a space would read a request here, whose X-Called-By nobody has removed.
        let line = b"GET /\x0b HTTP/1.1\r\n";
        for length in 0..line.len() {
            assert_ne!(classify(&line[..length]), OPAQUE, "{length}");
        }
        assert_eq!(classify(line), HTTP1);
    }

    #[test]
    fn an_endless_request_line_is_http_however_it_goes_on() {
        let mut line = [b"GET /".to_vec(), vec![b'a'; MAX_LINE]].concat();
        assert_eq!(classify(&line), HTTP1);
        line.extend_from_slice(b" and no version\n");
        assert_eq!(classify(&line), HTTP1);
        assert_eq!(classify(&[b'a'; MAX_LINE]), OPAQUE);
    }

    #[test]
    fn request_line_detector_waits_for_the_end_of_however_long_a_line() {
        let long = vec![b'A'; 10 * MAX_LINE];
        for (end, verdict) in [
            (&b" / HTTP/1.1\n"[..], HTTP1),
            (b" and so on\n", OPAQUE),
            (b"\n", OPAQUE),
            (b"/", OPAQUE),
        ] {
            let mut detector = RequestLineDetector::default();
            assert_eq!(detector.update(&long), Verdict::NeedMore);
            assert_eq!(detector.update(end), verdict, "{end:?}");
        }
    }

    #[test]
    fn a_client_that_stops_midway_is_taken_for_what_it_looks_like() {
        for bytes in [
            &b"GET /hel"[..],
            b"PROPFIND /hel",
            b"CONNECT /",
            b"FOO x HTTP/1.1\rX: y\r",
        ] {
            assert_eq!(guess(bytes), Protocol::Http1, "{bytes:?}");
        }
        for bytes in [
            &b""[..],
            b"hello",
            b"PRI * HT",
            b"GET ke",
            b"ruok",
            b"0032git-upload-pack /it.git\0host=here\0",
        ] {
            assert_eq!(guess(bytes), Protocol::Opaque, "{bytes:?}");
        }
    }
}
