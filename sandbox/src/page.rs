//! A page of an HTTP/1 server over an open stream: of the admin server of a pod, to which a node, a
//! port-forward or the socket of a demo leads. The server may be hostile: the length is bounded, and
//! the caller bounds the time.

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Request, StatusCode, client::conn::http1, header::HOST};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};

const MAX_BYTES: usize = 4 << 20;

/// A response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Page {
    /// The status code.
    pub status: u16,
    /// The text.
    pub body: String,
}

/// Why there is no page.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The path is invalid.
    #[error("invalid path: {0}")]
    Path(#[from] hyper::http::Error),
    /// There is no response.
    #[error("no response: {0}")]
    Response(#[from] hyper::Error),
    /// The body is incomplete or too long.
    #[error("no complete response: {0}")]
    Body(#[from] Box<dyn std::error::Error + Send + Sync>),
}

impl Page {
    /// The text, or an error with the status and the text.
    pub fn success(self) -> Result<String, String> {
        match StatusCode::from_u16(self.status) {
            Ok(status) if status.is_success() => Ok(self.body),
            Ok(status) => Err(format!("{status}: {}", self.body.trim())),
            Err(_) => Err(format!("invalid status {}", self.status)),
        }
    }
}

/// Reads the page at a path, with its query.
pub async fn read<S>(stream: S, path: &str) -> Result<Page, Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let request = Request::get(path).header(HOST, "proxy");
    let request = request.body(Empty::<Bytes>::new())?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // It ends when the sender is dropped.
    tokio::spawn(connection);
    let response = sender.send_request(request).await?;
    let status = response.status().as_u16();
    let body = Limited::new(response.into_body(), MAX_BYTES)
        .collect()
        .await;
    let body = String::from_utf8_lossy(&body?.to_bytes()).into_owned();
    Ok(Page { status, body })
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    /// Reads a page from a server that responds with these bytes.
    async fn response(bytes: Vec<u8>) -> Result<Page, Error> {
        let (client, mut server) = duplex(1024);
        tokio::spawn(async move {
            let _ = server.read(&mut [0; 1024]).await;
            // Fails if the client has enough.
            let _ = server.write_all(&bytes).await;
        });
        read(client, "/state?destination=a").await
    }

    #[tokio::test]
    async fn errors_have_the_status_and_the_text() {
        let page = response(b"HTTP/1.1 404 Not Found\r\n\r\nno such page\n".to_vec()).await;
        let error = page.expect("a page").success();
        assert_eq!(error, Err("404 Not Found: no such page".to_owned()));
        let page = response(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}".to_vec()).await;
        assert_eq!(page.expect("a page").success(), Ok("{}".to_owned()));
    }

    #[tokio::test]
    async fn long_and_incomplete_pages_are_rejected() {
        let head = b"HTTP/1.1 200 OK\r\n\r\n".to_vec();
        let longest = [head.clone(), vec![b'x'; MAX_BYTES]].concat();
        let page = response(longest.clone()).await.expect("a page");
        assert_eq!(page.body.len(), MAX_BYTES);
        let error = response([longest, vec![b'x']].concat()).await.unwrap_err();
        assert!(error.to_string().contains("length limit"), "{error}");
        let incomplete = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{".to_vec();
        assert!(matches!(response(incomplete).await, Err(Error::Body(_))));
        assert!(matches!(
            response(Vec::new()).await,
            Err(Error::Response(_))
        ));
    }
}
