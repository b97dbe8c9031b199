//! Requests of the proxy's own: copies of requests, and questions about them. Each is sent whole, to
//! one endpoint of its backend after another until one takes it.

use std::pin::pin;
use std::sync::Arc;

use bytes::Bytes;
use diy_mesh_http2::Request;

use crate::context::flow::Flow;
use crate::error::Failure;
use crate::http::answer::Answer;
use crate::limits::deadline::Deadline;
use crate::route::AttemptSettings;
use crate::serve::attempts::{Attempt, AttemptError, Attempts, Replayable, Step};
use crate::serve::{http1, http2};

/// The head of a request.
#[derive(Clone, Debug)]
pub enum CallHead {
    /// As it is written.
    Http1 {
        /// Up to the empty line.
        head: Bytes,
        /// GET, POST, ...
        method: Bytes,
        /// The body is sent in chunks.
        chunked: bool,
    },
    /// In HTTP/2.
    Http2(Box<Request>),
}

/// A request, and what is done with its response.
pub struct Call {
    /// The head.
    pub head: CallHead,
    /// The body.
    pub body: Bytes,
    /// Sending it twice has the effect of sending it once.
    pub is_repeatable: bool,
    /// The most bytes of the response's body that are read. `None`: the body is dropped.
    pub max_answer: Option<usize>,
}

impl CallHead {
    /// The memory of the head.
    pub fn size(&self) -> usize {
        match self {
            Self::Http1 { head, .. } => head.len(),
            Self::Http2(head) => head.fields.memory(),
        }
    }
}

impl Call {
    /// Sends it for the pod to the backend with this name, and reads the response. Fails without a
    /// status: a response that ends early, or that is too long, is an answer.
    pub async fn send(
        &self,
        flow: &Flow,
        backend: &Arc<str>,
        deadline: Deadline,
    ) -> Result<Answer, Failure> {
        let backend = flow.worker.destinations.backend(backend).await;
        let settings = AttemptSettings {
            deadline,
            ..AttemptSettings::default()
        };
        // Its caller is the pod itself, which may send to others.
        let permit = flow.authorize_connection()?;
        let mut attempts = Attempts::new(flow, &backend, settings, permit);
        loop {
            let mut attempt = attempts.begin(flow)?;
            let deadline = attempt.deadline();
            let sent = deadline.limit(pin!(self.attempt(&mut attempt, flow))).await;
            let error = match sent {
                Ok(response) => return Ok(response),
                Err(error) => error,
            };
            if let Step::Done(failure) = attempt.next(error, flow, || true) {
                return Err(failure);
            }
        }
    }

    /// Sends it to one endpoint.
    async fn attempt(
        &self,
        attempt: &mut Attempt<'_>,
        flow: &Flow,
    ) -> Result<Answer, AttemptError> {
        match &self.head {
            CallHead::Http1 {
                head,
                method,
                chunked,
            } => {
                let message = http1::call::message(head, &self.body, *chunked);
                http1::call::attempt(self, &message, method, attempt, flow).await
            }
            CallHead::Http2(head) => http2::call::attempt(self, head, attempt, flow).await,
        }
    }

    /// Whether, and where, it may be sent again.
    pub fn replayable(&self) -> Replayable {
        Replayable {
            is_kept: self.is_repeatable,
            is_idempotent: self.is_repeatable,
        }
    }
}
