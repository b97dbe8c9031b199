//! HTTP/1.1 client without pipelining.

use std::{convert::Infallible, net::SocketAddr, str};

use anyhow::{Context, Result, bail, ensure};
use memchr::memmem;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::Counter;
use crate::server::BODY_LENGTH;

/// Typical request.
pub(super) const REQUEST: &[u8] =
    b"GET /bench/page HTTP/1.1\r\nHost: http-server.http-server.svc.cluster.local\r\nUser-Agent: bench/1\r\nAccept: */*\r\n\r\n";

/// An open connection.
pub(super) struct Connection {
    stream: TcpStream,
    input: Vec<u8>,
}

impl Connection {
    pub(super) async fn open(target: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(target)
            .await
            .with_context(|| format!("connect to {target}"))?;
        stream.set_nodelay(true).context("set TCP_NODELAY")?;
        Ok(Connection {
            stream,
            input: Vec::with_capacity(4096),
        })
    }

    /// Sends one request and reads the complete response.
    pub(super) async fn request(&mut self) -> Result<()> {
        self.stream
            .write_all(REQUEST)
            .await
            .context("send a request")?;
        self.input.clear();
        loop {
            let read = self
                .stream
                .read_buf(&mut self.input)
                .await
                .context("read a response")?;
            ensure!(
                read > 0,
                "connection closed before the response was complete; received {:?}",
                text(&self.input)
            );
            if is_complete(&self.input)? {
                return Ok(());
            }
        }
    }
}

/// Sends requests on one connection until an error.
pub(super) async fn requests(target: SocketAddr, counter: Counter) -> Result<Infallible> {
    let mut connection = Connection::open(target).await?;
    loop {
        connection.request().await?;
        counter.set(counter.get() + 1);
    }
}

/// Opens connections with one request each until an error.
pub(super) async fn connections(target: SocketAddr, counter: Counter) -> Result<Infallible> {
    loop {
        Connection::open(target).await?.request().await?;
        counter.set(counter.get() + 1);
    }
}

/// Whether `input` is a complete response of the origin. Returns an error for any other response.
pub(super) fn is_complete(input: &[u8]) -> Result<bool> {
    let Some(end) = memmem::find(input, b"\r\n\r\n") else {
        return Ok(false);
    };
    let (head, body) = (&input[..end], &input[end + 4..]);
    ensure!(
        head.starts_with(b"HTTP/1.1 200 "),
        "response status is not 200: {:?}",
        text(head)
    );
    ensure!(
        content_length(head) == Some(BODY_LENGTH),
        "response has an unexpected content-length: {:?}",
        text(head)
    );
    if body.len() > BODY_LENGTH {
        bail!("{} bytes after the response", body.len() - BODY_LENGTH);
    }
    Ok(body.len() == BODY_LENGTH)
}

fn content_length(head: &[u8]) -> Option<usize> {
    const NAME: &[u8] = b"content-length:";
    let mut lines = head.split(|&byte| byte == b'\n');
    let line = lines.find(|line| {
        line.get(..NAME.len())
            .is_some_and(|name| name.eq_ignore_ascii_case(NAME))
    })?;
    str::from_utf8(&line[NAME.len()..])
        .ok()?
        .trim()
        .parse()
        .ok()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(400)]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(head: &str) -> Vec<u8> {
        [head.as_bytes(), &[b'x'; BODY_LENGTH]].concat()
    }

    #[test]
    fn response_is_complete_after_last_byte() {
        let whole = response("HTTP/1.1 200 OK\r\nContent-Length: 1024\r\n\r\n");
        assert!((0..whole.len()).all(|cut| !is_complete(&whole[..cut]).unwrap()));
        assert!(is_complete(&whole).unwrap());
    }

    #[test]
    fn header_names_are_case_insensitive() {
        assert!(
            is_complete(&response(
                "HTTP/1.1 200 OK\r\nserver: a\r\ncontent-length: 1024\r\n\r\n"
            ))
            .unwrap()
        );
    }

    #[test]
    fn error_status_is_an_error() {
        let error =
            is_complete(b"HTTP/1.1 503 Service Unavailable\r\nx-mesh-error: no endpoint\r\n\r\n")
                .unwrap_err();
        assert!(error.to_string().contains("no endpoint"), "{error}");
    }
}
