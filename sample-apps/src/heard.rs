//! The last bytes that a connection brought, kept so that a dump can show a message's head letter by letter.
//!
//! hyper gives header names in lower case and keeps their real case to itself. What is found here is shown only where it says the same as
//! what hyper parsed; it is never acted upon.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use hyper::HeaderMap;
use hyper_util::client::legacy::connect::{Connected, Connection};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// How much of a connection is kept: a head that is longer is shown as hyper parsed it.
const KEPT: usize = 64 * 1024;

/// What a connection brought of late.
#[derive(Debug, Clone, Default)]
pub struct Heard(Arc<Mutex<Vec<u8>>>);

/// A connection that keeps what it reads in a [`Heard`].
#[derive(Debug)]
pub struct Hearing<T> {
    inner: T,
    heard: Heard,
}

impl Heard {
    /// The head that begins with `first_line` and has just these headers, line by line as it came; forgets it and all before it.
    pub fn take_head(&self, first_line: &str, headers: &HeaderMap) -> Option<String> {
        let mut bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut from = 0;
        while let Some(start) = find(&bytes[from..], first_line.as_bytes()).map(|at| from + at) {
            let end = start + find(&bytes[start..], b"\r\n\r\n")? + 4;
            if same_headers(&bytes[start..end - 4], headers) {
                let head = String::from_utf8_lossy(&bytes[start..end - 4]).replace("\r\n", "\n");
                bytes.drain(..end);
                return Some(head);
            }
            from = start + 1;
        }
        None
    }

    fn push(&self, new: &[u8]) {
        let mut bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        bytes.extend_from_slice(new);
        let surplus = bytes.len().saturating_sub(KEPT);
        bytes.drain(..surplus);
    }
}

impl<T> Hearing<T> {
    /// Starts to keep what `inner` reads.
    pub fn new(inner: T) -> Self {
        Self {
            inner,
            heard: Heard::default(),
        }
    }

    /// What has been read, shared.
    pub fn heard(&self) -> Heard {
        self.heard.clone()
    }
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

fn same_headers(head: &[u8], parsed: &HeaderMap) -> bool {
    let mut raw = Vec::new();
    for line in head.split(|byte| *byte == b'\n').skip(1) {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else {
            return false;
        };
        raw.push((
            line[..colon].to_ascii_lowercase(),
            line[colon + 1..].trim_ascii().to_vec(),
        ));
    }
    let mut parsed: Vec<_> = parsed
        .iter()
        .map(|(name, value)| (name.as_str().as_bytes().to_vec(), value.as_bytes().to_vec()))
        .collect();
    // Sorted by name alone and stably: the values of one name keep their order.
    raw.sort_by(|a, b| a.0.cmp(&b.0));
    parsed.sort_by(|a, b| a.0.cmp(&b.0));
    raw == parsed
}

impl<T: AsyncRead + Unpin> AsyncRead for Hearing<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let result = Pin::new(&mut this.inner).poll_read(cx, buf);
        if buf.filled().len() > before {
            this.heard.push(&buf.filled()[before..]);
        }
        result
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Hearing<T> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

impl<T: Connection> Connection for Hearing<T> {
    /// Puts the [`Heard`] into each response's extensions, where the client's dump finds it.
    fn connected(&self) -> Connected {
        self.inner.connected().extra(self.heard())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in pairs {
            map.append(*name, value.parse().expect("a header value"));
        }
        map
    }

    #[test]
    fn a_head_comes_back_as_it_was_sent() {
        let heard = Heard::default();
        heard
            .push(b"GET /hello HTTP/1.1\r\nHost: a\r\nx-Odd:  1 \r\nAccept: b\r\nX-ODD: 2\r\n\r\n");
        let parsed = headers(&[
            ("host", "a"),
            ("x-odd", "1"),
            ("x-odd", "2"),
            ("accept", "b"),
        ]);
        let head = heard
            .take_head("GET /hello HTTP/1.1", &parsed)
            .expect("found");
        assert_eq!(
            head,
            "GET /hello HTTP/1.1\nHost: a\nx-Odd:  1 \nAccept: b\nX-ODD: 2"
        );
        assert_eq!(
            heard.take_head("GET /hello HTTP/1.1", &parsed),
            None,
            "taken once"
        );
    }

    #[test]
    fn pipelined_heads_come_in_turn() {
        let heard = Heard::default();
        heard.push(b"GET / HTTP/1.1\r\nHost: one\r\n\r\nGET / HTTP/1.1\r\nHOST: two\r\n\r\n");
        assert_eq!(
            heard
                .take_head("GET / HTTP/1.1", &headers(&[("host", "one")]))
                .as_deref(),
            Some("GET / HTTP/1.1\nHost: one")
        );
        assert_eq!(
            heard
                .take_head("GET / HTTP/1.1", &headers(&[("host", "two")]))
                .as_deref(),
            Some("GET / HTTP/1.1\nHOST: two")
        );
    }

    #[test]
    fn a_body_that_looks_like_a_head_is_passed_over() {
        let heard = Heard::default();
        heard.push(b"5\r\nGET / HTTP/1.1\r\nHost: false\r\n\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: true\r\n\r\n");
        assert_eq!(
            heard
                .take_head("GET / HTTP/1.1", &headers(&[("host", "true")]))
                .as_deref(),
            Some("GET / HTTP/1.1\nHost: true")
        );
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let heard = Heard::default();
        for _ in 0..10 {
            heard.push(&[b'x'; KEPT]);
        }
        heard.push(b"GET / HTTP/1.1\r\n\r\n");
        assert_eq!(heard.0.lock().expect("not poisoned").len(), KEPT);
        assert!(
            heard
                .take_head("GET / HTTP/1.1", &HeaderMap::new())
                .is_some()
        );
    }
}
