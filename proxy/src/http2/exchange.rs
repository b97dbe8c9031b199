//! Steps 5 to 8 for one stream: a request, its response, and both bodies at the same time. Whichever side resets its stream, the
//! other side hears of it at once and with the same code: gRPC's cancellation and deadlines depend on it.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use h2::client::ResponseFuture;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::request::Parts;
use http::{Method, Request, Response};

use super::Stream;
use super::head::{self, Answer};
use super::relay::{Broken, Relay, Way, reason};
use super::upstream::{Connections, Lease};
use crate::balance::{Endpoint, InFlight};
use crate::dump::{Direction, ExchangeDump};
use crate::error::Failure;
use crate::metrics::Protocol;
use crate::policy::{Admission, RequestView, is_mesh_error};

/// Endpoints that one request is tried on at most.
const MAX_TRIES: usize = 3;

/// Carries one request to an endpoint, and the response back.
pub(super) async fn carry(
    request: Request<RecvStream>,
    respond: SendResponse<Bytes>,
    client: Stream,
) {
    let (mut parts, body) = request.into_parts();
    let malformed = head::malformed(&parts);
    head::prepare(&mut parts, client.flow.called_by());
    let mut dump = client.flow.dump();
    if let Some(dump) = &mut dump {
        dump.request_parts(&parts);
    }
    let mut exchange = Exchange {
        client,
        respond,
        upload: Relay::new(body, Way::Request),
        dump,
        grpc: head::is_grpc(&parts.headers),
        head_only: parts.method == Method::HEAD,
        idempotent: parts.method.is_idempotent(),
        interim: parts.headers.contains_key(http::header::EXPECT),
        is_probe: false,
    };
    if let Some(reason) = malformed {
        return exchange.refuse(&Failure::BadRequest(reason));
    }
    let request = RequestView {
        method: parts.method.as_str().as_bytes(),
        target: parts
            .uri
            .path_and_query()
            .map_or("", |path| path.as_str())
            .as_bytes(),
        http2: true,
        has_body: !exchange.upload.is_done(),
        upgrade: head::extended_protocol(&parts)
            .is_some_and(|protocol| protocol.eq_ignore_ascii_case("websocket")),
    };
    match exchange.client.flow.authorize_request(&request) {
        // An exempt probe is the only exchange of its connection.
        Ok(Admission::Probe) if exchange.client.has_probed.replace(true) => {
            return exchange.refuse(&Failure::MtlsRequired);
        }
        Ok(admission) => exchange.is_probe = admission == Admission::Probe,
        Err(refused) => return exchange.refuse(&refused),
    }
    exchange.run(parts).await;
}

/// One request and its response.
struct Exchange {
    client: Stream,
    respond: SendResponse<Bytes>,
    upload: Relay,
    dump: Option<ExchangeDump>,
    grpc: bool,
    head_only: bool,
    idempotent: bool,
    /// The client waits for an interim response.
    interim: bool,
    /// It is a probe that a strict pod takes from anybody: the only exchange of its connections.
    is_probe: bool,
}

/// An attempt under way. Fields are dropped in this order: the stream before its place on the connection.
struct Attempt {
    response: ResponseFuture,
    to_upstream: SendStream<Bytes>,
    lease: Lease,
    endpoint: Rc<Endpoint>,
}

/// Why an attempt came to nothing.
enum Stopped {
    /// The client has gone or reset its stream: nobody waits for an answer.
    Cancelled,
    /// The upstream reset the stream by itself: the client gets to see its code.
    Reset(Reason),
    Failed {
        failure: Failure,
        /// The request did not reach an app, or may reach it twice: another attempt does no harm.
        again: bool,
        /// Do not choose this endpoint again.
        avoid: Option<SocketAddr>,
    },
}

/// How waiting for a response can end without one.
enum Ended {
    Client(Reason),
    Upstream(h2::Error),
}

impl Exchange {
    /// Tries endpoints until one has answered, or there is no point in trying more.
    async fn run(mut self, parts: Parts) {
        let mut next = Some(parts);
        let mut avoid = Vec::new();
        for tried in 1.. {
            let Some(parts) = next.take() else { return };
            let last = tried >= MAX_TRIES;
            next = (!last).then(|| parts.clone());
            match self.attempt(parts, &avoid).await {
                Ok(()) => return self.client.has_ended(),
                Err(Stopped::Cancelled) => return self.client.was_reset(),
                Err(Stopped::Reset(code)) => return self.pass_reset(code),
                Err(Stopped::Failed {
                    failure,
                    again,
                    avoid: address,
                }) => {
                    if last || !again || !self.upload.rewind() {
                        return self.refuse(&failure);
                    }
                    tracing::debug!(destination = %self.client.flow.destination.name(), "trying again: {failure}");
                    avoid.extend(address);
                }
            }
        }
    }

    /// Steps 5 to 8 on one endpoint.
    async fn attempt(&mut self, parts: Parts, avoid: &[SocketAddr]) -> Result<(), Stopped> {
        let flow = self.client.flow.clone();
        let picked = flow
            .destination
            .pick(avoid, &mut flow.worker.rng.borrow_mut());
        let endpoint = picked.map_err(|failure| Stopped::Failed {
            failure,
            again: false,
            avoid: None,
        })?;
        let lease = match self.lease(&endpoint).await? {
            Ok(lease) => lease,
            Err(failure) => {
                let refused = matches!(
                    failure,
                    Failure::Connect { .. } | Failure::ConnectTimeout(_)
                );
                if refused {
                    endpoint.quarantine(Instant::now());
                }
                let again = refused && flow.destination.endpoints_len() > avoid.len() + 1;
                return Err(Stopped::Failed {
                    failure,
                    again,
                    avoid: Some(endpoint.address),
                });
            }
        };
        if head::extended_protocol(&parts).is_some() && !lease.takes_extended_connect() {
            let reason = "it does not take extended CONNECT requests".to_owned();
            let failure = Failure::UpstreamMalformed {
                address: endpoint.address,
                reason,
            };
            return Err(Stopped::Failed {
                failure,
                again: false,
                avoid: None,
            });
        }
        let mut in_flight = endpoint.begin();
        let sent = lease.send(Request::from_parts(parts, ()), self.upload.is_done());
        let (response, to_upstream) = sent.map_err(|error| self.broke(&error, &endpoint, true))?;
        let mut attempt = Attempt {
            response,
            to_upstream,
            lease,
            endpoint,
        };
        let response = match poll_fn(|cx| self.poll_response(cx, &mut attempt)).await {
            Ok(response) => response,
            Err(Ended::Client(code)) => {
                attempt.to_upstream.send_reset(code);
                self.cut_off("the client went away", code);
                return Err(Stopped::Cancelled);
            }
            Err(Ended::Upstream(error)) => {
                in_flight.failed();
                return Err(self.broke(&error, &attempt.endpoint, attempt.lease.is_reused()));
            }
        };
        if attempt.lease.takes_extended_connect() {
            flow.destination.takes_extended_connect.set(true);
        }
        let (mut parts, body) = response.into_parts();
        // Only a peer's proxy, which has proven itself, speaks for the mesh.
        let is_peer = attempt.lease.is_secured();
        if !is_peer {
            head::remove(&mut parts.headers, is_mesh_error);
        }
        if flow.direction == Direction::Outbound
            && head::says_not_delivered(&parts)
            && flow.destination.endpoints_len() > 1
        {
            in_flight.failed();
            attempt.endpoint.quarantine(Instant::now());
            if self.upload.rewind() {
                let failure = Failure::UpstreamClosed {
                    address: attempt.endpoint.address,
                    reason: "its app accepts no connection".into(),
                };
                return Err(Stopped::Failed {
                    failure,
                    again: true,
                    avoid: Some(attempt.endpoint.address),
                });
            }
        }
        in_flight.answered();
        self.upload.settle();
        self.pass_response(Response::from_parts(parts, body), attempt, in_flight)
            .await
    }

    /// A place on a connection to the endpoint, unless the client goes away meanwhile.
    async fn lease(&mut self, endpoint: &Rc<Endpoint>) -> Result<Result<Lease, Failure>, Stopped> {
        let worker = self.client.flow.worker.clone();
        let mut leasing = std::pin::pin!(async {
            if self.is_probe {
                Connections::lease_new(endpoint, &worker).await
            } else {
                Connections::lease(endpoint, &worker).await
            }
        });
        poll_fn(|cx| match leasing.as_mut().poll(cx) {
            Poll::Ready(leased) => Poll::Ready(Ok(leased)),
            Poll::Pending => self.respond.poll_reset(cx).map(|_| Err(Stopped::Cancelled)),
        })
        .await
    }

    /// Sends the request's body while the response has not begun.
    fn poll_response(
        &mut self,
        cx: &mut Context<'_>,
        attempt: &mut Attempt,
    ) -> Poll<Result<Response<RecvStream>, Ended>> {
        self.client.note_progress();
        if let Err(code) = self.poll_upload(cx, &mut attempt.to_upstream) {
            return Poll::Ready(Err(Ended::Client(code)));
        }
        while self.interim {
            match attempt.response.poll_informational(cx) {
                // A client that is gone is noticed below.
                Poll::Ready(Some(Ok(mut interim))) => {
                    if !attempt.lease.is_secured() {
                        head::remove(interim.headers_mut(), is_mesh_error);
                    }
                    drop(self.respond.send_informational(interim));
                }
                Poll::Ready(_) => self.interim = false,
                Poll::Pending => break,
            }
        }
        if let Poll::Ready(response) = Pin::new(&mut attempt.response).poll(cx) {
            return Poll::Ready(response.map_err(Ended::Upstream));
        }
        self.respond
            .poll_reset(cx)
            .map(|reset| Err(Ended::Client(reset.unwrap_or(Reason::CANCEL))))
    }

    /// Moves the request's body along. Fails with the client's code; an upstream that takes no more may have answered already.
    fn poll_upload(
        &mut self,
        cx: &mut Context<'_>,
        to_upstream: &mut SendStream<Bytes>,
    ) -> Result<(), Reason> {
        if self.upload.is_done() {
            return Ok(());
        }
        match self.upload.poll(cx, to_upstream, &mut self.dump) {
            Poll::Pending | Poll::Ready(Ok(())) => {}
            Poll::Ready(Err(Broken::To)) => self.upload.stop(),
            Poll::Ready(Err(Broken::From(error))) => return Err(reason(&error)),
        }
        Ok(())
    }

    /// Passes the response on, and what is left of the request.
    async fn pass_response(
        &mut self,
        response: Response<RecvStream>,
        mut attempt: Attempt,
        in_flight: InFlight,
    ) -> Result<(), Stopped> {
        let flow = &self.client.flow;
        let (parts, body) = response.into_parts();
        flow.worker
            .metrics
            .request(flow.direction, Protocol::Http2, parts.status);
        if let Some(dump) = &mut self.dump {
            dump.response_parts(&parts);
        }
        let mut download = Relay::new(
            body,
            Way::Response {
                from_proxy: attempt.lease.is_secured(),
            },
        );
        let grpc = self.grpc && head::is_grpc(&parts.headers);
        let Ok(mut to_client) = self
            .respond
            .send_response(Response::from_parts(parts, ()), download.is_done())
        else {
            attempt.to_upstream.send_reset(Reason::CANCEL);
            return Err(Stopped::Cancelled);
        };
        let passed = poll_fn(|cx| {
            self.poll_pass(cx, &mut attempt.to_upstream, &mut download, &mut to_client)
        })
        .await;
        drop(in_flight);
        match passed {
            Ok(()) => {
                if let Some(dump) = &mut self.dump {
                    dump.response_end();
                    if self.upload.is_whole() {
                        dump.request_end();
                    }
                }
                Ok(())
            }
            Err(Ended::Client(code)) => {
                attempt.to_upstream.send_reset(code);
                self.cut_off("the client went away", code);
                Err(Stopped::Cancelled)
            }
            Err(Ended::Upstream(error)) => {
                self.break_off(&error, &attempt.endpoint, grpc, &mut to_client);
                Ok(())
            }
        }
    }

    /// Both bodies on their ways. Ready when both have ended.
    fn poll_pass(
        &mut self,
        cx: &mut Context<'_>,
        to_upstream: &mut SendStream<Bytes>,
        download: &mut Relay,
        to_client: &mut SendStream<Bytes>,
    ) -> Poll<Result<(), Ended>> {
        self.client.note_progress();
        if let Err(code) = self.poll_upload(cx, to_upstream) {
            return Poll::Ready(Err(Ended::Client(code)));
        }
        if !download.is_done() {
            match download.poll(cx, to_client, &mut self.dump) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(Broken::From(error))) => {
                    return Poll::Ready(Err(Ended::Upstream(error)));
                }
                // Where the client's stream is closed, the following tells how.
                Poll::Ready(Err(Broken::To)) | Poll::Pending => {
                    return to_client
                        .poll_reset(cx)
                        .map(|reset| Err(Ended::Client(reset.unwrap_or(Reason::CANCEL))));
                }
            }
        }
        if !self.upload.is_done() {
            // The response is over. The upstream may still want the rest of the request, until it says that it does not.
            if to_upstream.poll_reset(cx).is_pending() {
                return Poll::Pending;
            }
            self.upload.stop();
        }
        Poll::Ready(Ok(()))
    }

    /// What a stream or a connection that broke before the response means for the request.
    fn broke(&self, error: &h2::Error, endpoint: &Endpoint, reused: bool) -> Stopped {
        let address = endpoint.address;
        let text = error.to_string();
        // The peer says that it has not looked at this stream.
        let untouched = error.is_remote()
            && (error.is_go_away() || error.reason() == Some(Reason::REFUSED_STREAM));
        if untouched {
            return Stopped::Failed {
                failure: Failure::UpstreamClosed {
                    address,
                    reason: text,
                },
                again: true,
                avoid: None,
            };
        }
        match error.reason() {
            Some(code) if error.is_remote() => Stopped::Reset(code),
            Some(_) if error.is_library() => Stopped::Failed {
                failure: Failure::UpstreamMalformed {
                    address,
                    reason: text,
                },
                again: false,
                avoid: None,
            },
            _ => Stopped::Failed {
                failure: Failure::UpstreamClosed {
                    address,
                    reason: text,
                },
                again: reused && self.idempotent,
                avoid: None,
            },
        }
    }

    /// The upstream broke off in the middle of its response.
    fn break_off(
        &mut self,
        error: &h2::Error,
        endpoint: &Endpoint,
        grpc: bool,
        to_client: &mut SendStream<Bytes>,
    ) {
        let code = reason(error);
        if error.is_reset() && error.is_remote() {
            self.cut_off("the app reset the stream", code);
            return to_client.send_reset(code);
        }
        let failure = Failure::UpstreamClosed {
            address: endpoint.address,
            reason: error.to_string(),
        };
        let flow = &self.client.flow;
        flow.worker.metrics.failure(flow.direction, &failure);
        tracing::debug!(peer = %flow.peer, destination = %flow.destination.name(), code = failure.code(), "{failure}");
        if let Some(dump) = &mut self.dump {
            dump.cut_off(&format!("cut off before the response ended: {error}"));
        }
        if !grpc
            || to_client
                .send_trailers(head::grpc_failure(&failure))
                .is_err()
        {
            to_client.send_reset(Reason::INTERNAL_ERROR);
        }
    }

    fn pass_reset(mut self, code: Reason) {
        self.cut_off("the app reset the stream", code);
        self.respond.send_reset(code);
    }

    /// Answers in the app's place.
    fn refuse(mut self, failure: &Failure) {
        let flow = &self.client.flow;
        flow.worker.metrics.failure(flow.direction, failure);
        tracing::debug!(peer = %flow.peer, destination = %flow.destination.name(), code = failure.code(), "{failure}");
        let answer = Answer::new(failure, self.grpc, self.head_only);
        if let Some(dump) = &mut self.dump {
            dump.failure(failure);
            dump.response_answer(&answer.head, &answer.body);
        }
        // Dropped, the stream tells the client that the rest of its request is not wanted.
        drop(answer.send(&mut self.respond));
    }

    fn cut_off(&mut self, what: &str, code: Reason) {
        if let Some(dump) = &mut self.dump {
            dump.cut_off(&format!("{what}: {code:?}"));
        }
    }
}
