//! Tests of the rules: first bytes of many protocols.

use super::*;

const HTTP1: Option<Protocol> = Some(Protocol::Http1);
const OPAQUE: Option<Protocol> = Some(Protocol::Opaque);

fn classify(bytes: &[u8]) -> Option<Protocol> {
    Detector::new(Rules::Inner).update(bytes)
}

fn guess(bytes: &[u8]) -> Protocol {
    Detector::new(Rules::Inner).guess(bytes)
}

#[test]
fn inspects_each_byte_once() {
    for rules in [Rules::Inner, Rules::Inbound] {
        for (first, rest, expected) in [
            (&b"GET /aaaaaaaa"[..], &b" HTTP/1.1\r\n"[..], HTTP1),
            (b"\r\n\r\n\r\n\r\nGET", b" / HTTP/1.1\r\n", HTTP1),
            (b"hello this", b" is no request\n", OPAQUE),
        ] {
            let mut detector = Detector::new(rules);
            assert_eq!(detector.update(first), None);
            // Another line in place of the bytes that were inspected changes nothing.
            let other = if expected == HTTP1 { b'\0' } else { b'/' };
            let mut bytes = vec![other; first.len()];
            for byte in rest {
                assert_eq!(detector.pause_timeout(&bytes), PAUSE_TIMEOUT);
                bytes.push(*byte);
                let known = detector.update(&bytes);
                assert!(known.is_none() || known == expected, "{known:?}");
                if known.is_some() {
                    break;
                }
            }
            assert_eq!(detector.inspected, bytes.len());
        }
    }
}

#[test]
fn verdict_on_growing_bytes_is_that_on_all() {
    for (name, bytes) in OTHER_PROTOCOLS {
        for rules in [Rules::Inner, Rules::Inbound, Rules::InboundOpaque] {
            let mut growing = Detector::new(rules);
            let verdict = (1..=bytes.len()).find_map(|length| growing.update(&bytes[..length]));
            assert_eq!(verdict, Detector::new(rules).update(bytes), "{name}");
        }
    }
}

#[test]
fn detects_request_line_at_its_version() {
    let line = b"OPTIONS * HTTP/1.1\r\n";
    for length in 0..line.len() {
        let expected = if length < "OPTIONS * HTTP/".len() {
            None
        } else {
            HTTP1
        };
        assert_eq!(classify(&line[..length]), expected, "{length}");
    }
    assert_eq!(classify(b"GET /a b HTTP/1.0\n"), HTTP1);
    assert_eq!(classify(b"\r\nPURGE / HTTP/1.1\r\n"), HTTP1);
}

#[test]
fn needs_the_complete_http2_preface() {
    for length in 0..HTTP2_PREFACE.len() {
        assert_eq!(classify(&HTTP2_PREFACE[..length]), None, "{length}");
    }
    assert_eq!(classify(HTTP2_PREFACE), Some(Protocol::Http2));
}

#[test]
fn recognizes_http2_server_preface() {
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

/// The first bytes of clients of other protocols.
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
    ("Redis, inline lower case", b"get /key\r\n"),
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
fn classifies_other_protocols_as_opaque() {
    for (name, bytes) in OTHER_PROTOCOLS {
        assert_ne!(classify(bytes), HTTP1, "{name}");
        assert_eq!(guess(bytes), Protocol::Opaque, "{name}");
        let mut line = RequestLineDetector::default();
        let by_byte = bytes.iter().find_map(|byte| line.update(&[*byte]));
        assert_ne!(by_byte, HTTP1, "{name}, byte by byte");
        let has_line = bytes.contains(&b'\n');
        assert!(
            !has_line || classify(bytes) == OPAQUE,
            "{name}: the line is complete"
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
fn classifies_ambiguous_lines_as_http() {
    // docs/reference/http.md lists these protocols. Their ports must be declared opaque.
    for line in [
        &b"GET /a\r\n"[..], // Redis, inline
        b"127.0.0.1 - - [21/Nov/2026:10:00:00 +0000] \"GET /\" HTTP/1.1 200 12\n", // an access log
        b"92 <165>1 2026-11-21T10:00:00Z web nginx 12 - - GET /a HTTP/1.1\n", // syslog, RFC 6587
        b"SEARCH /a\n",     // a protocol with this command
    ] {
        assert_eq!(classify(line), HTTP1, "{}", line.escape_ascii());
    }
}

#[test]
fn never_classifies_request_for_lenient_server_as_opaque() {
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
                matches!(prefix, None | HTTP1),
                "{}: {prefix:?}",
                line[..length].escape_ascii()
            );
        }
    }
    assert_eq!(classify(b"PRI * HTTP/2.0\r\n\r\nXX"), HTTP1);
}

#[test]
fn recognizes_binary_protocols() {
    let anonymous_ldap_bind = b"0\x0c\x02\x01\x01\x60\x07\x02\x01\x03\x04\0\x80\0";
    for bytes in [
        &anonymous_ldap_bind[..],
        b"0032git-upload-pack /it.git\0host=here\0",
    ] {
        assert_eq!(
            (classify(bytes), is_binary(bytes)),
            (None, true),
            "{bytes:?}"
        );
        assert_eq!(guess(bytes), Protocol::Opaque, "{bytes:?}");
    }
    assert!(!is_binary(b"\r\nGET\t/caf\xe9 HTTP/1.1\r\n"));
}

#[test]
fn fragmented_request_line_with_forbidden_byte_is_http() {
    // A server that accepts \x0b as a space would parse a request, whose X-Called-By the proxy
    // has not removed.
    let line = b"GET /\x0b HTTP/1.1\r\n";
    for length in 0..line.len() {
        assert_ne!(classify(&line[..length]), OPAQUE, "{length}");
    }
    assert_eq!(classify(line), HTTP1);
}

#[test]
fn classifies_first_line_over_limit_by_its_start() {
    let mut line = [b"GET /".to_vec(), vec![b'a'; MAX_FIRST_LINE]].concat();
    assert_eq!(classify(&line), HTTP1);
    line.extend_from_slice(b" and no version\n");
    assert_eq!(classify(&line), HTTP1);
    assert_eq!(classify(&[b'a'; MAX_FIRST_LINE]), OPAQUE);
}

#[test]
fn request_line_detector_inspects_lines_of_any_length() {
    let long = vec![b'A'; 10 * MAX_FIRST_LINE];
    for (end, verdict) in [
        (&b" / HTTP/1.1\n"[..], HTTP1),
        (b" and so on\n", OPAQUE),
        (b"\n", OPAQUE),
        (b"/", OPAQUE),
    ] {
        let mut detector = RequestLineDetector::default();
        assert_eq!(detector.update(&long), None);
        assert_eq!(detector.update(end), verdict, "{end:?}");
    }
}

#[test]
fn guesses_protocol_of_incomplete_first_line() {
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
