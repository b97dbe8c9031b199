//! HTTP messages as a person reads them: first line, headers, an empty line, the body. Pure text, nothing is printed here.

use std::fmt::Write;

use hyper::header::CONTENT_ENCODING;
use hyper::http::{request, response};
use hyper::{HeaderMap, Version};

use crate::heard::Heard;

/// How much of a body is shown.
const SHOWN: usize = 16 * 1024;

/// A request. HTTP/1 heads are shown as `heard` has them, which keeps the case and the order of the headers.
pub fn request(parts: &request::Parts, body: &[u8], heard: Option<&Heard>) -> String {
    let target = if parts.version == Version::HTTP_2 {
        path(parts)
    } else {
        parts.uri.to_string()
    };
    let first_line = format!("{} {target} {:?}", parts.method, parts.version);
    let mut text = match heard.and_then(|heard| heard.take_head(&first_line, &parts.headers)) {
        Some(head) => head,
        None => {
            let mut head = first_line;
            if parts.version == Version::HTTP_2
                && let Some(authority) = parts.uri.authority()
            {
                write_header(&mut head, ":authority", authority.as_str());
            }
            write_headers(&mut head, &parts.headers);
            head
        }
    };
    write_body(&mut text, &parts.headers, body);
    text
}

/// A response, in the same manner.
pub fn response(parts: &response::Parts, body: &[u8]) -> String {
    let first_line = format!("{:?} {}", parts.version, parts.status.as_str());
    let heard = parts.extensions.get::<Heard>();
    let mut text = match heard.and_then(|heard| heard.take_head(&first_line, &parts.headers)) {
        Some(head) => head,
        None => {
            let mut head = format!(
                "{first_line} {}",
                parts.status.canonical_reason().unwrap_or_default()
            );
            write_headers(&mut head, &parts.headers);
            head
        }
    };
    write_body(&mut text, &parts.headers, body);
    text
}

/// Headers alone, one a line, each line begun with a line break.
pub fn write_headers(text: &mut String, headers: &HeaderMap) {
    for (name, value) in headers {
        write_header(
            text,
            name.as_str(),
            &String::from_utf8_lossy(value.as_bytes()),
        );
    }
}

/// A gRPC message's text: an empty line ends the metadata, then it is shown on lines of its own, cut where it is long.
pub fn write_message(text: &mut String, message: &str) {
    write_body(text, &HeaderMap::new(), message.as_bytes());
}

fn write_header(text: &mut String, name: &str, value: &str) {
    write!(text, "\n{name}: {value}").expect("a String takes every write");
}

fn path(parts: &request::Parts) -> String {
    parts
        .uri
        .path_and_query()
        .map_or("/", |path| path.as_str())
        .to_owned()
}

/// Ends the head with its empty line, then shows the body, or says what it is where showing it would help nobody.
fn write_body(text: &mut String, headers: &HeaderMap, body: &[u8]) {
    text.push_str("\n\n");
    if body.is_empty() {
        return;
    }
    let shown = &body[..body.len().min(SHOWN)];
    let readable = match std::str::from_utf8(shown) {
        Ok(all) => Some(all),
        // The limit may have cut a letter in two.
        Err(error) if error.error_len().is_none() && shown.len() < body.len() => {
            std::str::from_utf8(&shown[..error.valid_up_to()]).ok()
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
    .expect("a String takes every write");
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
    fn a_request_without_a_body_ends_with_an_empty_line() {
        let parts = parts_of(
            Request::get("/hello?x=1")
                .header("host", "a")
                .body(())
                .expect("valid"),
        );
        assert_eq!(
            request(&parts, b"", None),
            "GET /hello?x=1 HTTP/1.1\nhost: a\n\n"
        );
    }

    #[test]
    fn an_http2_request_shows_its_authority() {
        let parts = parts_of(
            Request::get("http://a.b/hello")
                .version(Version::HTTP_2)
                .body(())
                .expect("valid"),
        );
        assert_eq!(
            request(&parts, b"", None),
            "GET /hello HTTP/2.0\n:authority: a.b\n\n"
        );
    }

    #[test]
    fn a_response_shows_status_headers_and_body() {
        let (parts, ()) = Response::builder()
            .status(500)
            .header("x-a", "1")
            .body(())
            .expect("valid")
            .into_parts();
        assert_eq!(
            response(&parts, b"no\n"),
            "HTTP/1.1 500 Internal Server Error\nx-a: 1\n\nno\n"
        );
    }

    #[test]
    fn bodies_that_are_no_text_are_named() {
        let (parts, ()) = Response::builder().body(()).expect("valid").into_parts();
        assert!(response(&parts, &[0, 1, 2]).ends_with("\n\n(3 bytes that are not text)\n"));
        assert!(
            response(&parts, b"\x1b[2J").ends_with("(4 bytes that are not text)\n"),
            "a terminal must not be steered"
        );
        let (parts, ()) = Response::builder()
            .header("content-encoding", "gzip")
            .body(())
            .expect("valid")
            .into_parts();
        assert!(response(&parts, b"abc").ends_with("(3 bytes, gzip)\n"));
    }

    #[test]
    fn a_long_body_is_cut_between_letters() {
        let (parts, ()) = Response::builder().body(()).expect("valid").into_parts();
        let body = format!("x{}", "ä".repeat(SHOWN));
        let text = response(&parts, body.as_bytes());
        assert!(
            text.ends_with(&format!("ä\n({} more bytes)\n", body.len() - (SHOWN - 1))),
            "{}",
            &text[text.len() - 40..]
        );
    }
}
