//! Responses of the Kubernetes API as bytes: pages of a LIST, the lines of a watch, and one object.
//! Nothing is parsed here but the frame of a list.
//!
//! Objects are as large as their authors make them. So a page has a limit, beyond which the caller
//! requests fewer objects; and of all pages and of all long lines, only [`MAX_PAGES`] are in memory at
//! a time.

use std::sync::Arc;

use http::{Request, Response};
use http_body_util::BodyExt;
use kube::Client;
use kube::client::Body;
use kube::core::Status;
use serde::Deserialize;
use serde::de::Error;
use serde_json::value::RawValue;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::ApiError;

/// The length of a page, and of a line of a watch. One object has at most 1.5 MiB in etcd, and up to
/// 9 MiB in JSON, which escapes characters.
pub const MAX_PAGE_BYTES: usize = 16 * 1024 * 1024;
/// Pages and long lines in memory at a time.
const MAX_PAGES: usize = 2;
/// The length of a line that needs no permit.
const MAX_SHORT_LINE_BYTES: usize = 64 * 1024;
/// The length of the description of an error.
const MAX_ERROR_BYTES: usize = 64 * 1024;

/// Permits for what is in memory. Clones share them.
#[derive(Clone, Debug)]
pub struct Pages {
    permits: Arc<Semaphore>,
    max_bytes: usize,
}

impl Default for Pages {
    fn default() -> Self {
        Self::with_max_bytes(MAX_PAGE_BYTES)
    }
}

impl Pages {
    /// Pages, each of this length at most.
    pub fn with_max_bytes(max_bytes: usize) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(MAX_PAGES)),
            max_bytes,
        }
    }

    /// Waits for a permit, which the response needs that is read next.
    pub async fn permit(&self) -> Permit {
        let permit = self.permits.clone().acquire_owned().await;
        Permit {
            _permit: permit.expect("the semaphore is never closed"),
            max_bytes: self.max_bytes,
        }
    }
}

/// A permit for a page or for a long line.
pub struct Permit {
    _permit: OwnedSemaphorePermit,
    max_bytes: usize,
}

/// A complete text in memory.
pub struct Text {
    text: String,
    _permit: Option<Permit>,
}

impl Text {
    fn new(bytes: Vec<u8>, _permit: Option<Permit>) -> Result<Self, ApiError> {
        let text = String::from_utf8(bytes).map_err(serde_json::Error::custom)?;
        Ok(Self { text, _permit })
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

/// A page of a LIST. The texts of the items are slices of the text of the page.
#[derive(Deserialize)]
pub struct Page<'a> {
    /// The metadata.
    #[serde(default)]
    pub metadata: PageMetadata,
    /// The text of each object. `null` is an empty list.
    #[serde(borrow, default)]
    pub items: Option<Vec<&'a RawValue>>,
}

/// The metadata of a page.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PageMetadata {
    /// The token of the next page. Empty: there is none.
    #[serde(rename = "continue")]
    pub next: Option<String>,
    /// The version of the list.
    pub resource_version: Option<String>,
}

impl PageMetadata {
    /// The token of the next page.
    pub fn next(self) -> Option<String> {
        self.next.filter(|token| !token.is_empty())
    }
}

/// The head of a response. An error status is an error.
pub async fn send(client: &Client, request: Request<Vec<u8>>) -> Result<Response<Body>, ApiError> {
    let response = client.send(request.map(Body::from)).await?;
    let code = response.status();
    if !code.is_client_error() && !code.is_server_error() {
        return Ok(response);
    }
    let bytes = collect(response.into_body(), MAX_ERROR_BYTES).await?;
    let text = String::from_utf8_lossy(&bytes);
    let status = serde_json::from_str(&text);
    let status =
        status.unwrap_or_else(|_| Status::failure(text.trim(), "Unknown").with_code(code.as_u16()));
    Err(kube::Error::Api(Box::new(status)).into())
}

/// The text of a response. The permit is of it until the text is dropped.
pub async fn read(response: Response<Body>, permit: Permit) -> Result<Text, ApiError> {
    let bytes = collect(response.into_body(), permit.max_bytes).await?;
    Text::new(bytes, Some(permit))
}

/// Waits for the end of a response.
pub async fn discard(response: Response<Body>) -> Result<(), ApiError> {
    let mut body = response.into_body();
    while let Some(frame) = body.frame().await {
        frame?;
    }
    Ok(())
}

async fn collect(mut body: Body, max: usize) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else {
            continue;
        };
        if bytes.len() + data.len() > max {
            return Err(ApiError::TooLong);
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

/// The lines of a response that does not end.
pub struct Lines {
    body: Body,
    pages: Pages,
    /// The received bytes of the next lines.
    buffer: Vec<u8>,
    /// The part of the buffer without an end of a line.
    searched: usize,
    permit: Option<Permit>,
}

impl Lines {
    /// The lines of a response.
    pub fn new(response: Response<Body>, pages: Pages) -> Lines {
        Lines {
            body: response.into_body(),
            pages,
            buffer: Vec::new(),
            searched: 0,
            permit: None,
        }
    }

    /// The next line. `None` at the end; the rest is not complete. Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<Text>, ApiError> {
        loop {
            let rest = &self.buffer[self.searched..];
            if let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let following = self.buffer.split_off(self.searched + end + 1);
                let bytes = std::mem::replace(&mut self.buffer, following);
                self.searched = 0;
                return Text::new(bytes, self.permit.take()).map(Some);
            }
            self.searched = self.buffer.len();
            if self.buffer.len() > self.pages.max_bytes {
                return Err(ApiError::TooLong);
            }
            if self.buffer.len() > MAX_SHORT_LINE_BYTES && self.permit.is_none() {
                self.permit = Some(self.pages.permit().await);
            }
            let Some(frame) = self.body.frame().await else {
                return Ok(None);
            };
            if let Ok(data) = frame?.into_data() {
                self.buffer.extend_from_slice(&data);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(bytes: Vec<u8>) -> Response<Body> {
        Response::new(Body::from(bytes))
    }

    #[tokio::test]
    async fn response_over_the_limit_is_an_error() {
        let pages = Pages::default();
        let fits = read(response(vec![b' '; MAX_PAGE_BYTES]), pages.permit().await).await;
        assert_eq!(fits.unwrap().as_str().len(), MAX_PAGE_BYTES);
        let longer = response(vec![b' '; MAX_PAGE_BYTES + 1]);
        assert!(matches!(
            read(longer, pages.permit().await).await,
            Err(ApiError::TooLong)
        ));
    }

    #[tokio::test]
    async fn lines_are_complete_and_keep_their_order() {
        let mut lines = Lines::new(response(b"one\n\ntwo\nrest".to_vec()), Pages::default());
        for expected in ["one\n", "\n", "two\n"] {
            let line = lines.next().await.unwrap().unwrap();
            assert_eq!(line.as_str(), expected);
        }
        assert!(lines.next().await.unwrap().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn few_pages_are_in_memory_at_a_time() {
        let pages = Pages::default();
        let mut first = Vec::new();
        for _ in 0..MAX_PAGES {
            let text = read(response(vec![]), pages.permit().await).await;
            first.push(text.unwrap());
        }
        let mut next = std::pin::pin!(pages.permit());
        assert!(futures::poll!(next.as_mut()).is_pending());
        first.pop();
        next.await;
    }
}
