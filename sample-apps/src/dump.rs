//! Text format of HTTP messages: first line, headers, an empty line, the body. Names of HTTP/1
//! headers have their canonical case (`Content-Type`), whatever case the peer uses.

use std::fmt::Write;

use hyper::ext::ReasonPhrase;
use hyper::header::CONTENT_ENCODING;
use hyper::http::{request, response};
use hyper::{HeaderMap, Version};

/// Limit of body bytes in a dump.
const MAX_BODY_BYTES: usize = 16 * 1024;

/// Formats a request.
pub fn request(parts: &request::Parts, body: &[u8]) -> String {
    let mut text = if parts.version == Version::HTTP_2 {
        let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
        let authority = parts.uri.authority();
        let authority = authority.map(|name| format!("\n:authority: {name}"));
        let authority = authority.unwrap_or_default();
        format!("{} {path} {:?}{authority}", parts.method, parts.version)
    } else {
        format!("{} {} {:?}", parts.method, parts.uri, parts.version)
    };
    write_message(&mut text, parts.version, &parts.headers, body);
    text
}

/// Formats a response.
pub fn response(parts: &response::Parts, body: &[u8]) -> String {
    let received = parts.extensions.get::<ReasonPhrase>();
    let received = received.map(|reason| String::from_utf8_lossy(reason.as_bytes()));
    let canonical = parts.status.canonical_reason().unwrap_or_default();
    let reason = received.unwrap_or_else(|| canonical.into());
    let mut text = format!("{:?} {} {reason}", parts.version, parts.status.as_str());
    write_message(&mut text, parts.version, &parts.headers, body);
    text
}

/// Formats a gRPC message after its path and metadata.
pub fn grpc_message(path: &str, metadata: &HeaderMap, message: &str) -> String {
    let mut text = path.to_owned();
    write_message(&mut text, Version::HTTP_2, metadata, message.as_bytes());
    text
}

/// Appends the headers, each on a new line, the empty line that ends the head, and the body.
fn write_message(text: &mut String, version: Version, headers: &HeaderMap, body: &[u8]) {
    for (name, value) in headers {
        let name = match version {
            Version::HTTP_2 => name.to_string(),
            _ => canonical_name(name.as_str()),
        };
        let value = String::from_utf8_lossy(value.as_bytes());
        write!(text, "\n{name}: {value}").expect("writing to a String never fails");
    }
    write_body(text, headers, body);
}

/// `x-called-by` as `X-Called-By`.
fn canonical_name(name: &str) -> String {
    let word = |word: &str| word[..1].to_ascii_uppercase() + &word[1..];
    let words = name.split('-').map(|text| match text {
        "" => String::new(),
        text => word(text),
    });
    words.collect::<Vec<_>>().join("-")
}

/// Appends the empty line that ends the head, then the body, or its size if it is not plain text.
fn write_body(text: &mut String, headers: &HeaderMap, body: &[u8]) {
    text.push_str("\n\n");
    if body.is_empty() {
        return;
    }
    let prefix = &body[..body.len().min(MAX_BODY_BYTES)];
    let readable = match std::str::from_utf8(prefix) {
        Ok(all) => Some(all),
        // The limit may split the last character.
        Err(error) if error.error_len().is_none() && prefix.len() < body.len() => {
            std::str::from_utf8(&prefix[..error.valid_up_to()]).ok()
        }
        Err(_) => None,
    };
    let encoding = headers
        .get(CONTENT_ENCODING)
        .map(|value| String::from_utf8_lossy(value.as_bytes()));
    match (encoding, readable) {
        (Some(encoding), _) => write!(text, "({} bytes, {encoding})", body.len()),
        (None, Some(readable))
            if readable
                .chars()
                .all(|c| !c.is_control() || matches!(c, '\n' | '\r' | '\t')) =>
        {
            text.push_str(readable);
            match body.len() - readable.len() {
                0 => Ok(()),
                more => write!(text, "\n({more} more bytes)"),
            }
        }
        _ => write!(text, "({} bytes that are not text)", body.len()),
    }
    .expect("writing to a String never fails");
    if !text.ends_with('\n') {
        text.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use hyper::{Request, Response};

    use super::*;

    fn parts_of(request: Request<()>) -> request::Parts {
        request.into_parts().0
    }

    #[test]
    fn request_without_body_ends_with_empty_line() {
        let parts = parts_of(
            Request::get("/hello?x=1")
                .header("host", "a")
                .body(())
                .expect("valid"),
        );
        assert_eq!(request(&parts, b""), "GET /hello?x=1 HTTP/1.1\nHost: a\n\n");
    }

    #[test]
    fn http2_request_shows_authority() {
        let parts = parts_of(
            Request::get("http://a.b/hello")
                .version(Version::HTTP_2)
                .body(())
                .expect("valid"),
        );
        assert_eq!(
            request(&parts, b""),
            "GET /hello HTTP/2.0\n:authority: a.b\n\n"
        );
    }

    #[test]
    fn response_shows_status_headers_and_body() {
        let (parts, ()) = Response::builder()
            .status(500)
            .header("x-a", "1")
            .body(())
            .expect("valid")
            .into_parts();
        assert_eq!(
            response(&parts, b"no\n"),
            "HTTP/1.1 500 Internal Server Error\nX-A: 1\n\nno\n"
        );
    }

    #[test]
    fn shows_size_of_binary_bodies() {
        let (parts, ()) = Response::builder().body(()).expect("valid").into_parts();
        assert!(response(&parts, &[0, 1, 2]).ends_with("\n\n(3 bytes that are not text)\n"));
        assert!(
            response(&parts, b"\x1b[2J").ends_with("(4 bytes that are not text)\n"),
            "no terminal escape sequences"
        );
        let (parts, ()) = Response::builder()
            .header("content-encoding", "gzip")
            .body(())
            .expect("valid")
            .into_parts();
        assert!(response(&parts, b"abc").ends_with("(3 bytes, gzip)\n"));
    }

    #[test]
    fn truncates_long_body_at_character_boundary() {
        let (parts, ()) = Response::builder().body(()).expect("valid").into_parts();
        let body = format!("x{}", "ä".repeat(MAX_BODY_BYTES));
        let text = response(&parts, body.as_bytes());
        assert!(
            text.ends_with(&format!(
                "ä\n({} more bytes)\n",
                body.len() - (MAX_BODY_BYTES - 1)
            )),
            "{}",
            &text[text.len() - 40..]
        );
    }
}
