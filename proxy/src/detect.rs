//! Step 3: what a connection carries, told from the client's first bytes. [`classify`] is a pure function of them;
//! waiting for them is the caller's, who must not wait where the server speaks first.

use memchr::memchr;

use crate::discovery::AppProtocol;
use crate::tls::{self, Hello};

/// The longest request line that detection waits for before it takes a known method's word for it.
const MAX_LINE: usize = 16 * 1024;
/// The longest method that anybody has registered has 17 letters; a token that goes on is no method.
const MAX_METHOD: usize = 24;
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

/// Tells HTTP/1 by its whole request line, HTTP/2 by its preface; all else is opaque.
pub fn classify(bytes: &[u8]) -> Verdict {
    if bytes.starts_with(HTTP2_PREFACE) {
        return Verdict::Known(Protocol::Http2);
    }
    if HTTP2_PREFACE.starts_with(bytes) {
        return Verdict::NeedMore;
    }
    let blank = bytes.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
    if blank > 8 {
        return Verdict::Known(Protocol::Opaque);
    }
    let bytes = &bytes[blank..];
    match memchr(b' ', &bytes[..bytes.len().min(MAX_METHOD + 1)]) {
        Some(0) => Verdict::Known(Protocol::Opaque),
        Some(at) if bytes[..at].iter().all(is_token) => classify_line(&bytes[at + 1..]),
        None if bytes.len() <= MAX_METHOD && bytes.iter().all(is_token) => Verdict::NeedMore,
        _ => Verdict::Known(Protocol::Opaque),
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

/// What follows the method: a target and the version, up to the line's end. Nothing but its end tells, however the line comes: were one
/// verdict for a part of it and another for the whole, who sends it could choose by when the parts leave.
fn classify_line(bytes: &[u8]) -> Verdict {
    let within = &bytes[..bytes.len().min(MAX_LINE)];
    let line = match memchr(b'\n', within) {
        Some(end) => within[..end].trim_ascii_end(),
        None if within.len() == MAX_LINE => return Verdict::Known(Protocol::Http1),
        None => return Verdict::NeedMore,
    };
    let version = line.rsplit(|byte| *byte == b' ').next().unwrap_or_default();
    let http1 = version.starts_with(b"HTTP/1.") && version.len() == 8;
    Verdict::Known(if http1 { Protocol::Http1 } else { Protocol::Opaque })
}

/// What bytes are taken for that [`classify`] wants more of, when no more come: a line that begins as a request does
/// gets HTTP's answer to an incomplete one, anything else goes to whom it was for.
pub fn take_a_guess(bytes: &[u8]) -> Protocol {
    const METHODS: [&[u8]; 9] = [b"GET /", b"HEAD /", b"POST /", b"PUT /", b"DELETE /", b"PATCH /", b"OPTIONS /", b"TRACE /", b"CONNECT "];
    let http1 = METHODS.iter().any(|method| bytes.starts_with(method));
    if http1 { Protocol::Http1 } else { Protocol::Opaque }
}

/// Whether a server's first bytes are those of HTTP/2: its SETTINGS, which it sends without waiting for its client, as little as its
/// client waits for them (RFC 9113, section 3.4). So they don't mean that the server is the one to speak first.
pub fn is_http2_server(bytes: &[u8]) -> bool {
    bytes.len() <= MAX_SETTINGS && matches!(bytes, [_, _, _, 4, 0, 0, 0, 0, 0, ..])
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
        assert_eq!(classify(b"PRI * HTTP/2.0\r\n\r\nXX"), OPAQUE);
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
            b"EHLO mail.example\r\n",
            b"SSH-2.0-OpenSSH_9\r\n",
            b"\0\0\0\x01",
            b" GET",
        ] {
            assert_eq!(classify(bytes), OPAQUE, "{bytes:?}");
        }
        assert_eq!(classify(&[b'A'; MAX_METHOD + 1]), OPAQUE);
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
    }

    #[test]
    fn a_client_that_stops_midway_is_taken_for_what_it_looks_like() {
        assert_eq!(take_a_guess(b"GET /hel"), Protocol::Http1);
        for bytes in [&b""[..], b"hello", b"PRI * HT", b"GET ke"] {
            assert_eq!(take_a_guess(bytes), Protocol::Opaque, "{bytes:?}");
        }
    }
}
