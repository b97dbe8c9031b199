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

/// Tells HTTP/2 by its preface and HTTP/1 by its whole request line; all else is opaque. Whatever some server might read as a request
/// counts as one, so that none gets to an app unread: those that the book does not allow are refused later.
pub fn classify(bytes: &[u8]) -> Verdict {
    if bytes.starts_with(HTTP2_PREFACE) {
        return Verdict::Known(Protocol::Http2);
    }
    if HTTP2_PREFACE.starts_with(bytes) {
        return Verdict::NeedMore;
    }
    let within = &bytes[..bytes.len().min(MAX_LINE)];
    match Onlooker::default().look(within) {
        Verdict::NeedMore if within.len() == MAX_LINE => Verdict::Known(take_a_guess(within)),
        verdict => verdict,
    }
}

/// As [`classify`], where a peer's proxy may be speaking.
pub fn classify_inbound(bytes: &[u8]) -> Verdict {
    match tls::look(bytes) {
        Hello::Mesh => Verdict::Known(Protocol::MeshTls),
        Hello::NeedMore => Verdict::NeedMore,
        Hello::Foreign => classify(bytes),
    }
}

/// What bytes are taken for that [`classify`] wants more of, when no more come: a line that begins as a request does
/// gets HTTP's answer to an incomplete one, anything else goes to whom it was for, while an [`Onlooker`] looks on.
pub fn take_a_guess(bytes: &[u8]) -> Protocol {
    let mut words = bytes.split(is_space).filter(|word| !word.is_empty());
    let http1 = match (words.next(), words.next()) {
        (Some(b"CONNECT"), Some(_)) => true,
        (Some(method), Some(target)) => {
            method.iter().all(u8::is_ascii_uppercase) && target.starts_with(b"/") || is_version(target) || words.any(is_version)
        }
        _ => false,
    };
    if http1 { Protocol::Http1 } else { Protocol::Opaque }
}

/// Whether there are bytes that no text has.
pub fn is_binary(bytes: &[u8]) -> bool {
    bytes.iter().any(|byte| byte.is_ascii_control() && !is_space(byte))
}

/// Reads a connection's first line that is not blank. Nothing but its end tells what it is, however it comes: were one verdict for a
/// part of it and another for the whole, who sends it could choose by when the parts leave. So it also looks on where the bytes were
/// let go before the line had ended: who pauses within a request does not make another protocol of it, and gets nothing to the app that
/// the proxy would have removed.
#[derive(Debug, Default)]
pub struct Onlooker {
    /// How many words have begun; what comes after the third is all the same.
    words: u8,
    within_word: bool,
    /// The first word begins with this.
    first: Beginning,
    /// And so does the newest.
    last: Beginning,
}

/// As much of a word as matters.
type Beginning = ([u8; 5], usize);

impl Onlooker {
    /// What all bytes so far are, these being the newest. What only some servers might read as a request counts as one.
    pub fn look(&mut self, bytes: &[u8]) -> Verdict {
        for byte in bytes {
            match byte {
                b'\n' if self.words > 0 => {
                    return Verdict::Known(if self.is_request() { Protocol::Http1 } else { Protocol::Opaque });
                }
                _ if is_space(byte) => self.within_word = false,
                _ => {
                    if !self.within_word {
                        self.within_word = true;
                        self.words = (self.words + 1).min(3);
                        self.last = Beginning::default();
                    }
                    push(&mut self.last, *byte);
                    if self.words == 1 {
                        if !is_token(byte) {
                            return Verdict::Known(Protocol::Opaque);
                        }
                        push(&mut self.first, *byte);
                    }
                }
            }
        }
        Verdict::NeedMore
    }

    fn is_request(&self) -> bool {
        let [first, last] = [&self.first, &self.last].map(|(bytes, length)| &bytes[..*length]);
        // HTTP/0.9 has no fields, but some servers read them. In other protocols, commands are mostly in small letters.
        self.words == 2 && first == b"GET" && last.starts_with(b"/") || self.words > 1 && is_version(last)
    }
}

fn push((bytes, length): &mut Beginning, byte: u8) {
    if let Some(next) = bytes.get_mut(*length) {
        *next = byte;
        *length += 1;
    }
}

/// Whether a server's first bytes are those of HTTP/2: its SETTINGS, which it sends without waiting for its client, as little as its
/// client waits for them (RFC 9113, section 3.4). So they don't mean that the server is the one to speak first.
pub fn is_http2_server(bytes: &[u8]) -> bool {
    bytes.len() <= MAX_SETTINGS && matches!(bytes, [_, _, _, 4, 0, 0, 0, 0, 0, ..])
}

/// HTTP's name, however it goes on.
fn is_version(word: &[u8]) -> bool {
    word.get(..5).is_some_and(|name| name.eq_ignore_ascii_case(b"HTTP/"))
}

/// What lenient servers take for a space: RFC 9112, section 3, allows several; the rest is what Unicode calls so in Latin-1. An end of
/// line among it, which who reads a line looks for first.
fn is_space(byte: &u8) -> bool {
    matches!(byte, b'\t'..=b'\r' | 0x1c..=b' ' | 0x85 | 0xa0)
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
    fn each_prefix_of_a_request_line_waits_and_the_whole_line_decides() {
        let line = b"OPTIONS * HTTP/1.1\r\n";
        for length in 0..line.len() {
            assert_eq!(classify(&line[..length]), Verdict::NeedMore, "{length}");
        }
        assert_eq!(classify(line), HTTP1);
        assert_eq!(classify(b"GET /a b HTTP/1.0\n"), HTTP1);
        assert_eq!(classify(b"\r\nPURGE / HTTP/1.1\r\n"), HTTP1);
    }

    #[test]
    fn each_prefix_of_the_preface_waits() {
        for length in 0..HTTP2_PREFACE.len() {
            assert_eq!(classify(&HTTP2_PREFACE[..length]), Verdict::NeedMore, "{length}");
        }
        assert_eq!(classify(HTTP2_PREFACE), Verdict::Known(Protocol::Http2));
    }

    #[test]
    fn an_http2_servers_word_is_no_other_protocols() {
        assert!(is_http2_server(b"\0\0\x12\x04\0\0\0\0\0\0\x04\0\x10\0\0\0\x05\0\0\x40\0\0\x06\0\0\x40\0"));
        for other in [&b"\x4a\0\0\0\x0a8.0.36\0"[..], b"220 mail.example ESMTP\r\n", b"SSH-2.0-OpenSSH_9\r\n", b"\0\0\0\x04", b""] {
            assert!(!is_http2_server(other), "{other:?}");
        }
    }

    #[test]
    fn what_only_looks_like_http_is_opaque() {
        let tls = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03";
        for bytes in [
            &tls[..],
            b"*1\r\n$4\r\nPING\r\n",
            b"PING\r\n",
            b"GET key\r\n",
            b"get /key\r\n",
            b"EHLO mail.example\r\n",
            b"OPTIONS rtsp://camera RTSP/1.0\r\n",
            b"SSH-2.0-OpenSSH_9\r\n",
            b"AMQP\0\0\x09\x01",
            b"\0\0\0\x01",
            b"\r\n\r\n\r\n",
        ] {
            assert_ne!(classify(bytes), HTTP1, "{bytes:?}");
            assert_eq!(take_a_guess(bytes), Protocol::Opaque, "{bytes:?}");
            assert!(classify(bytes) == OPAQUE || bytes.trim_ascii().is_empty(), "{bytes:?}");
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
            b"GET / http/1.1\r\n",
            b"GET / HTTP/1.10\r\n",
            b"GET / HTTP/2.0\r\n",
            b"GET HTTP/1.1\r\n",
            b"GET /\0 HTTP/1.1\r\n",
            b"GET /\r\n",
        ] {
            for length in 0..line.len() {
                assert_eq!(classify(&line[..length]), Verdict::NeedMore, "{:?}", &line[..length]);
            }
            assert_eq!(classify(line), HTTP1, "{line:?}");
        }
        assert_eq!(classify(b"PRI * HTTP/2.0\r\n\r\nXX"), HTTP1);
    }

    #[test]
    fn what_is_no_text_need_not_be_waited_for() {
        let anonymous_ldap_bind = b"0\x0c\x02\x01\x01\x60\x07\x02\x01\x03\x04\0\x80\0";
        for bytes in [&anonymous_ldap_bind[..], b"0032git-upload-pack /it.git\0host=here\0"] {
            assert_eq!((classify(bytes), is_binary(bytes)), (Verdict::NeedMore, true), "{bytes:?}");
            assert_eq!(take_a_guess(bytes), Protocol::Opaque, "{bytes:?}");
        }
        assert!(!is_binary(b"\r\nGET\t/caf\xe9 HTTP/1.1\r\n"));
    }

    #[test]
    fn a_forbidden_byte_in_a_request_line_does_not_get_the_request_past_http_when_it_comes_in_pieces() {
        // A server that takes \x0b for a space would read a request here, whose X-Called-By nobody has removed.
        let line = b"GET /\x0b HTTP/1.1\r\n";
        for length in 0..line.len() - 1 {
            assert_eq!(classify(&line[..length]), Verdict::NeedMore, "{length}");
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
    fn an_onlooker_waits_for_the_end_of_however_long_a_line() {
        let long = vec![b'A'; 10 * MAX_LINE];
        for (end, verdict) in [(&b" / HTTP/1.1\n"[..], HTTP1), (b" and so on\n", OPAQUE), (b"\n", OPAQUE), (b"/", OPAQUE)] {
            let mut onlooker = Onlooker::default();
            assert_eq!(onlooker.look(&long), Verdict::NeedMore);
            assert_eq!(onlooker.look(end), verdict, "{end:?}");
        }
    }

    #[test]
    fn a_client_that_stops_midway_is_taken_for_what_it_looks_like() {
        for bytes in [&b"GET /hel"[..], b"PROPFIND /hel", b"CONNECT mail.ex", b"FOO x HTTP/1.1\rX: y\r"] {
            assert_eq!(take_a_guess(bytes), Protocol::Http1, "{bytes:?}");
        }
        for bytes in [&b""[..], b"hello", b"PRI * HT", b"GET ke", b"ruok", b"0032git-upload-pack /it.git\0host=here\0"] {
            assert_eq!(take_a_guess(bytes), Protocol::Opaque, "{bytes:?}");
        }
    }
}
