//! The response to a request of the proxy's own, as far as it has arrived.

use bytes::Bytes;
use http::{HeaderMap, StatusCode};

use crate::error::{Failure, Limit};

/// A response, whose status is known.
#[derive(Debug)]
pub struct Answer {
    /// The status.
    pub status: StatusCode,
    /// The fields, with the trailers. Fails with the reason if the head is not valid.
    pub fields: Result<HeaderMap, String>,
    /// The start of the body.
    pub body: Bytes,
    /// The reason why the rest of the body, or the trailers, are missing.
    pub missing: Option<String>,
}

impl Answer {
    /// The fields, if nothing of the response is missing.
    pub fn whole(&self) -> Result<&HeaderMap, String> {
        let fields = self.fields.as_ref().map_err(Clone::clone)?;
        self.missing.clone().map_or(Ok(fields), Err)
    }

    /// The body. Empty if a part of it is missing: a page that is cut off is of no use.
    pub fn whole_body(&self) -> Bytes {
        match self.missing {
            None => self.body.clone(),
            Some(_) => Bytes::new(),
        }
    }
}

/// The reason why the rest of a response is missing.
#[derive(Debug)]
pub struct Incomplete(pub String);

impl From<diy_mesh_http2::Error> for Incomplete {
    fn from(error: diy_mesh_http2::Error) -> Self {
        Self(error.to_string())
    }
}

impl From<Limit> for Incomplete {
    fn from(limit: Limit) -> Self {
        Self(Failure::Timeout(limit).to_string())
    }
}
