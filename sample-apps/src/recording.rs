//! Recording of received bytes, which lets a dump show a message head with its original header case
//! and order.
//!
//! hyper normalizes header names to lower case. A recorded head is used for dumps only, and only if
//! it equals what hyper parsed.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use hyper::HeaderMap;
use hyper_util::client::legacy::connect::{Connected, Connection};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Limit of recorded bytes for each connection. A longer head is shown as parsed by hyper.
const MAX_RECORDED_BYTES: usize = 64 * 1024;

/// The bytes that a connection received last.
#[derive(Debug, Clone, Default)]
pub struct ReceivedBytes(Arc<Mutex<Vec<u8>>>);

/// Connection that records what it reads in [`ReceivedBytes`].
#[derive(Debug)]
pub struct RecordingStream<T> {
    inner: T,
    received: ReceivedBytes,
}

impl ReceivedBytes {
    /// Removes and returns the recorded head that starts with `first_line` and has these headers;
    /// discards all bytes before it.
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
        let excess = bytes.len().saturating_sub(MAX_RECORDED_BYTES);
        bytes.drain(..excess);
    }
}

impl<T> RecordingStream<T> {
    /// Wraps a connection.
    pub fn new(inner: T) -> Self {
        Self {
            inner,
            received: ReceivedBytes::default(),
        }
    }

    /// A shared handle to the recording.
    pub fn received(&self) -> ReceivedBytes {
        self.received.clone()
    }
}

fn find(bytes: &[u8], needle: &[u8]) -> Option<usize> {
    bytes
        .windows(needle.len())
        .position(|window| window == needle)
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
    // A stable sort by name keeps the order of values of one name.
    raw.sort_by(|a, b| a.0.cmp(&b.0));
    parsed.sort_by(|a, b| a.0.cmp(&b.0));
    raw == parsed
}

impl<T: AsyncRead + Unpin> AsyncRead for RecordingStream<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let result = Pin::new(&mut this.inner).poll_read(cx, buf);
        if buf.filled().len() > before {
            this.received.push(&buf.filled()[before..]);
        }
        result
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for RecordingStream<T> {
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
}

impl<T: Connection> Connection for RecordingStream<T> {
    /// Adds the [`ReceivedBytes`] to the extensions of each response.
    fn connected(&self) -> Connected {
        self.inner.connected().extra(self.received())
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
    fn returns_head_as_received() {
        let received = ReceivedBytes::default();
        received
            .push(b"GET /hello HTTP/1.1\r\nHost: a\r\nx-Odd:  1 \r\nAccept: b\r\nX-ODD: 2\r\n\r\n");
        let parsed = headers(&[
            ("host", "a"),
            ("x-odd", "1"),
            ("x-odd", "2"),
            ("accept", "b"),
        ]);
        let head = received
            .take_head("GET /hello HTTP/1.1", &parsed)
            .expect("found");
        assert_eq!(
            head,
            "GET /hello HTTP/1.1\nHost: a\nx-Odd:  1 \nAccept: b\nX-ODD: 2"
        );
        assert_eq!(
            received.take_head("GET /hello HTTP/1.1", &parsed),
            None,
            "taken once"
        );
    }

    #[test]
    fn returns_pipelined_heads_in_order() {
        let received = ReceivedBytes::default();
        received.push(b"GET / HTTP/1.1\r\nHost: one\r\n\r\nGET / HTTP/1.1\r\nHOST: two\r\n\r\n");
        assert_eq!(
            received
                .take_head("GET / HTTP/1.1", &headers(&[("host", "one")]))
                .as_deref(),
            Some("GET / HTTP/1.1\nHost: one")
        );
        assert_eq!(
            received
                .take_head("GET / HTTP/1.1", &headers(&[("host", "two")]))
                .as_deref(),
            Some("GET / HTTP/1.1\nHOST: two")
        );
    }

    #[test]
    fn skips_body_that_looks_like_a_head() {
        let received = ReceivedBytes::default();
        received.push(b"5\r\nGET / HTTP/1.1\r\nHost: false\r\n\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: true\r\n\r\n");
        assert_eq!(
            received
                .take_head("GET / HTTP/1.1", &headers(&[("host", "true")]))
                .as_deref(),
            Some("GET / HTTP/1.1\nHost: true")
        );
    }

    #[test]
    fn recording_is_bounded() {
        let received = ReceivedBytes::default();
        for _ in 0..10 {
            received.push(&[b'x'; MAX_RECORDED_BYTES]);
        }
        received.push(b"GET / HTTP/1.1\r\n\r\n");
        assert_eq!(
            received.0.lock().expect("not poisoned").len(),
            MAX_RECORDED_BYTES
        );
        assert!(
            received
                .take_head("GET / HTTP/1.1", &HeaderMap::new())
                .is_some()
        );
    }
}
