//! One attempt of an exchange in HTTP/1: a request is sent to an endpoint, and its response relayed
//! to the client, both at once.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Instant, SystemTime};

use bytes::BytesMut;
use http::StatusCode;
use tokio::io::{AsyncWrite, AsyncWriteExt};

use super::body::{BodyError, Relay};
use super::head::{Framing, HeadSearch, Refused, ResponseHead, Version};
use super::{After, Exchange, MAX_PIPELINED, Outcome, discard};
use crate::context::flow::Flow;
use crate::error::Failure;
use crate::http::edits::{Edits, response_edits};
use crate::http::verdict::Verdict;
use crate::route::Plan;
use crate::secure::io::Io;
use crate::serve::attempts::{Attempt, AttemptError, Replayable};
use crate::upstream::balance::Endpoint;
use crate::upstream::connect::{Slot, Upstream};

impl Exchange<'_> {
    /// Connects to the endpoint, sends, and relays the response.
    pub(super) async fn attempt(
        &mut self,
        plan: &Plan,
        flow: &Flow,
        attempt: &mut Attempt<'_>,
    ) -> Result<Outcome, AttemptError> {
        self.client.end_passed_on = false;
        // 7. Connect.
        let endpoint = attempt.endpoint.clone();
        let (dialer, began_at) = (attempt.dialer(flow), attempt.in_flight.started_at());
        let is_idempotent = self.head.view().is_idempotent();
        // A body may be too long to be kept.
        let is_repeatable = is_idempotent && self.head.framing == Framing::None;
        let pool = endpoint.pool();
        let connected = pool.http1(dialer, began_at, is_repeatable).await;
        let mut upstream = connected.map_err(AttemptError::connect)?;
        if !upstream.reused {
            attempt.check_endpoint()?;
            attempt.in_flight.connected();
        }
        self.judge_again().map_err(AttemptError::last)?;
        if let Some(announced) = attempt.announced(upstream.io.is_peer(), self.record.id()) {
            self.client.upload.add_fields(announced);
        }
        // 8. Serve.
        let Some(head) = self.receive_head(&mut upstream, &endpoint).await? else {
            self.record.client_left();
            upstream.io.reset_on_drop();
            return Ok(Outcome::Ended(After::Closed));
        };
        let is_peer = upstream.io.is_peer();
        let verdict = Verdict::of(head.status, &head, is_peer, SystemTime::now);
        let request = Replayable {
            is_kept: self.client.upload.can_rewind(),
            is_idempotent,
        };
        let answered_at = match attempt.answered(head.status, verdict, request, flow) {
            Ok(answered_at) => answered_at,
            Err(error) => {
                if self.client.upload.is_done() && !self.client.has_ended {
                    let version = self.head.version;
                    discard::response(upstream, version, &head, &endpoint, flow.charge());
                }
                return Err(error);
            }
        };
        self.client.upload.discard_replay();
        let keep_alive = self.may_keep_alive(answered_at);
        let relayed = self.relay_response(upstream, plan, &endpoint, head, keep_alive);
        Ok(relayed.await)
    }

    /// Sends the request and relays interim responses until the final response's head has arrived.
    /// `None` if the client closes.
    async fn receive_head(
        &mut self,
        upstream: &mut Upstream,
        endpoint: &Endpoint,
    ) -> Result<Option<ResponseHead>, AttemptError> {
        let address = endpoint.address;
        let malformed = |reason| AttemptError::malformed(address, reason);
        loop {
            let mut search = HeadSearch::default();
            let received = poll_fn(|cx| self.poll_head(cx, &mut upstream.io, &mut search)).await;
            let head = match received {
                Ok(head) => head,
                Err(Ended::Client) => return Ok(None),
                Err(Ended::Failed(failure)) => return Err(AttemptError::last(failure)),
                Err(Ended::Malformed(reason)) => return Err(malformed(reason)),
                Err(Ended::Upstream(reason)) => {
                    let acceptance = upstream.io.acceptance();
                    let is_idempotent = self.head.view().is_idempotent();
                    let rejected =
                        AttemptError::handshake(address, &reason, acceptance, is_idempotent);
                    let is_untouched = !self.client.upload.is_written();
                    // A pooled connection may be closed just when it is used.
                    let is_stale = upstream.reused && upstream.io.unread().is_empty();
                    let is_safe = is_stale && (is_idempotent || is_untouched);
                    let closed = || {
                        if is_untouched && !upstream.reused {
                            AttemptError::connect(Failure::UpstreamClosed { address, reason })
                        } else {
                            AttemptError::closed(address, reason, is_safe)
                        }
                    };
                    return Err(rejected.unwrap_or_else(closed));
                }
            };
            let may_switch = self.head.connection.upgrade && self.client.upload.is_complete();
            if head.status == 101 && !may_switch {
                return Err(malformed(
                    "101, and the request did not ask for another protocol",
                ));
            }
            if !head.is_interim() {
                return Ok(Some(head));
            }
            if head.status == 100 && self.client.is_continued {
                continue;
            }
            let mut out = BytesMut::new();
            head.write(
                &mut out,
                Edits::of(response_edits(upstream.io.is_peer())),
                None,
            );
            // The attempt may end here.
            self.client.in_interim = true;
            if self.client.io.write_all(&out).await.is_err() {
                return Ok(None);
            }
            self.client.in_interim = false;
        }
    }

    fn poll_head(
        &mut self,
        cx: &mut Context<'_>,
        upstream: &mut Io,
        search: &mut HeadSearch,
    ) -> Poll<Result<ResponseHead, Ended>> {
        self.judge_again().map_err(Ended::Failed)?;
        let uploading = self.poll_upload(cx, upstream)?;
        loop {
            if let Some(end) = search.find_end(upstream.unread())? {
                let raw = upstream.unread().split_to(end).freeze();
                return Poll::Ready(Ok(ResponseHead::parse(raw, self.head.method())?));
            }
            match upstream.poll_fill(cx) {
                Poll::Ready(Ok(0)) => {
                    return Poll::Ready(Err(Ended::Upstream("end of stream".into())));
                }
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) => {
                    return Poll::Ready(Err(Ended::Upstream(error.to_string())));
                }
                Poll::Pending => break,
            }
        }
        if !upstream.unread().is_empty() {
            upstream.acknowledge();
        }
        if uploading.is_ready() {
            let _ = self.poll_client_end(cx, upstream)?;
        }
        self.charge(upstream, 0).map_err(|failure| {
            Ended::Failed(if self.client.upload.is_written() {
                // Another attempt would not be safe, as it is after [`Failure::Overloaded`].
                Failure::MemoryExhausted
            } else {
                failure
            })
        })?;
        Poll::Pending
    }

    /// Charges what the exchange holds while it waits.
    fn charge(&mut self, upstream: &Io, download: usize) -> Result<(), Failure> {
        let connections = self.client.io.buffered() + upstream.buffered();
        let relays = self.client.upload.buffered() + download;
        self.client
            .memory
            .hold(self.client.head_size + connections + relays)
    }

    /// Relays the request's body. An upstream that reads no more may have responded already: that
    /// is not an error yet.
    fn poll_upload(&mut self, cx: &mut Context<'_>, upstream: &mut Io) -> Result<Poll<()>, Ended> {
        if self.client.upload.is_done() {
            return Ok(Poll::Ready(()));
        }
        let record = &mut self.record;
        let seen = &mut |data: &[u8]| record.request_body(data);
        match self.client.upload.poll(cx, self.client.io, upstream, seen) {
            Poll::Pending => return Ok(Poll::Pending),
            Poll::Ready(Ok(())) => self.record.request_end(),
            Poll::Ready(Err(BodyError::Write(_))) => self.client.upload.stop(),
            Poll::Ready(Err(BodyError::SenderClosed | BodyError::SenderFailed(_))) => {
                return Err(Ended::Client);
            }
            Poll::Ready(Err(broken)) => return Err(Ended::Failed(request_failure(&broken))),
        }
        Ok(Poll::Ready(()))
    }

    /// After the request, while the application is silent: a half-close of the client is passed on,
    /// so that the application decides what it means. An error ends the exchange.
    fn poll_client_end(
        &mut self,
        cx: &mut Context<'_>,
        upstream: &mut Io,
    ) -> Poll<Result<(), Ended>> {
        while !self.client.has_ended && self.client.io.unread().len() < MAX_PIPELINED {
            match ready!(self.client.io.poll_fill(cx)) {
                Ok(read) => self.client.has_ended = read == 0,
                Err(_) => return Poll::Ready(Err(Ended::Client)),
            }
        }
        if self.client.has_ended && !self.client.end_passed_on {
            // An error means that the upstream has closed: the next read tells.
            self.client.end_passed_on = Pin::new(upstream).poll_shutdown(cx).is_ready();
        }
        Poll::Pending
    }

    /// Relays the response, and pools the upstream's connection if it can carry another exchange.
    async fn relay_response(
        &mut self,
        upstream: Upstream,
        plan: &Plan,
        endpoint: &Endpoint,
        mut head: ResponseHead,
        keep_alive: bool,
    ) -> Outcome {
        let Upstream {
            io: mut upstream,
            connection: slot,
            ..
        } = upstream;
        let status = StatusCode::from_u16(head.status).unwrap_or(StatusCode::BAD_GATEWAY);
        let session = plan.session_edit(endpoint.tag());
        let edits = plan.response_edits(response_edits(upstream.is_peer()), &session);
        self.record.response(status, head.reason(), &head, edits);
        let is_tunnel = head.status == 101
            || (self.head.method() == b"CONNECT" && (200..300).contains(&head.status));
        let to_http10 = self.head.version == Version::Http10;
        let until_close =
            head.framing == Framing::UntilClose || (to_http10 && head.framing == Framing::Chunked);
        let keep_alive = keep_alive && !is_tunnel && !until_close;
        if to_http10 {
            head.drop_chunks();
        }
        let mut out = BytesMut::new();
        let connection = match (is_tunnel, keep_alive) {
            (true, _) => None,
            (_, false) => Some("close"),
            (_, true) => to_http10.then_some("keep-alive"),
        };
        head.write(&mut out, edits, connection);
        let mut download = Relay::new(head.framing, out, to_http10);
        let flow = self.record.flow.clone();
        let mut expiry = None;
        let relayed = poll_fn(
            |cx| match self.poll_relay(cx, &mut upstream, &mut download) {
                Poll::Pending => {
                    let expiry =
                        expiry.get_or_insert_with(|| flow.expiry(self.client.io, &upstream));
                    Pin::new(expiry).poll(cx).map(|()| Err(BodyError::Expired))
                }
                relayed => relayed,
            },
        )
        .await;
        match relayed {
            Ok(()) if is_tunnel => {
                return Outcome::Tunnel((upstream, slot.filter(Slot::counts_opaque)));
            }
            Ok(()) => self.record.response_end(),
            Err(broken) => {
                self.record.cut_off(&broken.to_string());
                if matches!(broken, BodyError::ClientClosed) {
                    self.record.client_left();
                }
                // The client sees that the response is cut off, as without the mesh.
                upstream.reset_on_drop();
                if !until_close && matches!(broken, BodyError::SenderClosed) {
                    return Outcome::Ended(After::Close);
                }
                self.client.io.reset_on_drop();
                return Outcome::Ended(After::Closed);
            }
        }
        let reusable = head.persists_after(self.head.version)
            && !until_close
            && self.client.upload.is_complete()
            && !self.client.has_ended;
        if reusable && upstream.unread().is_empty() {
            endpoint.pool().checkin_http1(upstream, Instant::now());
        }
        let keep_alive = keep_alive && !self.client.has_ended;
        Outcome::Ended(if keep_alive {
            After::KeepAlive
        } else {
            After::Close
        })
    }

    /// Relays the response to the client, and the rest of the request to the upstream. A client
    /// that is gone resets the upstream: the application stops producing the response.
    fn poll_relay(
        &mut self,
        cx: &mut Context<'_>,
        upstream: &mut Io,
        download: &mut Relay,
    ) -> Poll<Result<(), BodyError>> {
        if let Err(failure) = self.judge_again() {
            self.record.fail(&failure);
            return Poll::Ready(Err(BodyError::Denied(failure.to_string())));
        }
        let uploading = match self.poll_upload(cx, upstream) {
            Err(Ended::Client) => return Poll::Ready(Err(BodyError::ClientClosed)),
            uploading => uploading.unwrap_or(Poll::Pending),
        };
        let record = &mut self.record;
        let seen = &mut |data: &[u8]| record.response_body(data);
        let relayed = download.poll(cx, upstream, self.client.io, seen);
        let client_is_gone = match &relayed {
            Poll::Pending if uploading.is_ready() => self.poll_client_end(cx, upstream).is_ready(),
            Poll::Ready(Err(BodyError::Write(_))) => true,
            _ => false,
        };
        if client_is_gone {
            return Poll::Ready(Err(BodyError::ClientClosed));
        }
        if relayed.is_pending()
            && let Err(failure) = self.charge(upstream, download.buffered())
        {
            self.record.fail(&failure);
            return Poll::Ready(Err(BodyError::Overloaded));
        }
        relayed
    }
}

/// How waiting for a response ends without one.
enum Ended {
    /// The client closed.
    Client,
    /// The request's body is malformed, or no memory is left to the client.
    Failed(Failure),
    /// The upstream closed.
    Upstream(String),
    /// The upstream's response is malformed.
    Malformed(&'static str),
}

impl From<Refused> for Ended {
    fn from(refused: Refused) -> Self {
        Self::Malformed(match refused {
            Refused::TooLarge(limit) => limit.message(),
            Refused::Malformed(reason) => reason,
        })
    }
}

pub(super) fn request_failure(broken: &BodyError) -> Failure {
    match broken {
        BodyError::Malformed(reason) => Failure::BadRequest(reason),
        _ => Failure::BadRequest("the request ended early"),
    }
}
