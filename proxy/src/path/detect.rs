//! Step 3: protocol detection from the first bytes of the client or of the server. While the client
//! is silent, the proxy connects to the upstream, so that server-first protocols (SMTP, MySQL, SSH)
//! are not delayed. The rules ([`Detector`] and below) are pure, and inspect each byte once.

#[cfg(test)]
mod tests;

use std::future::{Future, poll_fn, ready};
use std::pin::Pin;
use std::task::{Poll, ready};
use std::time::Duration;

use tokio::task::spawn_local;
use tokio::time::{Instant, timeout, timeout_at};

use crate::http::request_line::{RequestLineDetector, is_separator};

use crate::context::flow::Flow;
use crate::error::Failure;
use crate::inbound::policy::Caller;
use crate::limits::memory::PENDING_COST;
use crate::limits::timeouts::TimeoutKind;
use crate::protocol::Protocol;
use crate::secure::io::Io;
use crate::secure::tls::{self, Alpn, Hello};
use crate::serve::opaque::{self, Dialed};

/// How long a client may be silent before the proxy dials. A client that sends first does so
/// sooner.
const CLIENT_FIRST_TIMEOUT: Duration = Duration::from_millis(2);
/// The same if the client may be another proxy, whose ClientHello may still be in transit: the
/// application's first bytes would cross with it.
const PEER_FIRST_TIMEOUT: Duration = Duration::from_millis(100);
/// The same if another proxy has completed a handshake from the client's address lately. Its
/// ClientHello may be late because of a lost packet, or of a proxy without CPU time.
const KNOWN_PEER_FIRST_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a client may pause within its first line.
const PAUSE_TIMEOUT: Duration = Duration::from_millis(300);
/// How long a client may pause within its ClientHello.
const CLIENT_HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client that has to authenticate may be silent.
const UNAUTHENTICATED_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client may be silent after the proxy failed to connect. If the client sends a
/// request, the proxy replies to it in the client's protocol.
const LATE_CLIENT_TIMEOUT: Duration = Duration::from_secs(1);

/// The maximum length of a first line that detection waits for.
const MAX_FIRST_LINE: usize = 16 * 1024;
/// The client's connection preface (RFC 9113, section 3.4).
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The maximum number of bytes that an HTTP/2 server sends before it reads the client's preface.
const MAX_SERVER_PREFACE: usize = 16 * 1024;

/// Waits until the first bytes of the client or of the server determine the protocol. Leaves an
/// upstream connection that was opened in the meantime in `dialed`. Fails if the proxy cannot
/// connect, or if the client closes. `alpn` is the protocol of the client's TLS session.
pub async fn detect(
    client: &mut Io,
    flow: &Flow,
    declared: Option<Protocol>,
    alpn: Option<Alpn>,
    dialed: &mut Option<Dialed>,
) -> Result<Protocol, Failure> {
    // Another proxy sends first. The proxy terminates its TLS on opaque ports too.
    let peer_timeout = if flow.worker.tls.is_known(flow.peer.ip()) {
        KNOWN_PEER_FIRST_TIMEOUT
    } else {
        PEER_FIRST_TIMEOUT
    };
    let (rules, first_timeout) = match (&flow.caller, declared) {
        (Caller::Unauthenticated, Some(_)) => (Rules::InboundOpaque, peer_timeout),
        (Caller::Unauthenticated, None) => (Rules::Inbound, peer_timeout),
        (_, Some(protocol)) => return Ok(protocol),
        (_, None) if alpn == Some(Alpn::Inspected) => (Rules::Inspected, CLIENT_FIRST_TIMEOUT),
        (_, None) => (Rules::Inner, CLIENT_FIRST_TIMEOUT),
    };
    let mut detector = Detector::new(rules);
    let mut allowed = flow.allowed();
    if let Err(refused) = flow.authorize_silent_client() {
        // The application gets no connection for a client that has to authenticate first, or that may
        // only send requests.
        let protocol = timeout(UNAUTHENTICATED_TIMEOUT, detector.read(client, flow)).await;
        return protocol.unwrap_or_else(|_| {
            flow.count_timeout(TimeoutKind::SilentClient);
            Err(refused)
        });
    }
    if let Ok(protocol) = timeout(first_timeout, detector.read(client, flow)).await {
        return protocol;
    }
    let mut reading = Box::pin(detector.read(client, flow));
    let mut dialing = dial(flow, dialed.take());
    let first = poll_fn(|cx| match reading.as_mut().poll(cx) {
        Poll::Ready(protocol) => Poll::Ready(First::Client(protocol)),
        Poll::Pending => {
            let dialed = dialing.as_mut().poll(cx);
            dialed.map(|dialed| First::Connected(dialed.map(Box::new)))
        }
    });
    match first.await {
        First::Client(protocol) => {
            match protocol {
                Ok(Protocol::Http1) => drop(spawn_local(async move {
                    if let Ok(dialed) = dialing.await {
                        opaque::pool(dialed).await;
                    }
                })),
                // An opaque connection needs this upstream connection. After a failure, the proxy
                // dials again.
                Ok(Protocol::Opaque) => *dialed = dialing.await.ok(),
                _ => {}
            }
            protocol
        }
        First::Connected(Err(failure)) => timeout(LATE_CLIENT_TIMEOUT, reading)
            .await
            .unwrap_or(Err(failure)),
        First::Connected(Ok(new)) => {
            let upstream = &mut dialed.insert(*new).upstream;
            let first = poll_fn(|cx| match reading.as_mut().poll(cx) {
                Poll::Pending => loop {
                    flow.judge_again(&mut allowed, || None)?;
                    match ready!(upstream.poll_fill(cx)) {
                        Ok(1..) if declared.is_none() && is_http2_server(upstream.unread()) => {}
                        // The copy forwards the bytes, the end or the error.
                        _ => return Poll::Ready(Ok(Protocol::Opaque)),
                    }
                },
                protocol => protocol,
            });
            let silent_timeout = flow.worker.config.timeouts.silent_client;
            if let Ok(protocol) = timeout(silent_timeout, first).await {
                return protocol;
            }
            drop(reading);
            if !client.unread().is_empty() {
                return detector.read(client, flow).await;
            }
            flow.count_timeout(TimeoutKind::SilentClient);
            Err(Failure::RequestTimeout)
        }
    }
}

/// A connection attempt.
type Dialing = Pin<Box<dyn Future<Output = Result<Dialed, Failure>>>>;

/// The connection that was dialed before, or a new one. The attempt may outlive detection.
fn dial(flow: &Flow, dialed: Option<Dialed>) -> Dialing {
    match dialed {
        Some(dialed) => Box::pin(ready(Ok(dialed))),
        None => {
            let flow = flow.clone();
            Box::pin(async move { opaque::dial(&flow, Alpn::Inspected, None).await })
        }
    }
}

enum First {
    Client(Result<Protocol, Failure>),
    /// Boxed: few connections get here, and each would have the size of this variant.
    Connected(Result<Box<Dialed>, Failure>),
}

/// The protocols that the client's bytes may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rules {
    /// The protocols of the application, or inside mesh TLS.
    Inner,
    /// Inside mesh TLS, from a proxy that has waited for the rest of a first line.
    Inspected,
    /// Also mesh TLS: the client may be another proxy.
    Inbound,
    /// On a port that the pod declares opaque: everything except mesh TLS is opaque.
    InboundOpaque,
}

/// The detection of one client's protocol, while its first bytes arrive.
#[derive(Debug)]
pub struct Detector {
    rules: Rules,
    line: RequestLineDetector,
    /// The number of bytes that `line` has inspected.
    inspected: usize,
    /// They contain a control character that does not occur in text.
    is_binary: bool,
}

impl Detector {
    /// A detector that has no bytes yet.
    pub fn new(rules: Rules) -> Self {
        Self {
            rules,
            line: RequestLineDetector::default(),
            inspected: 0,
            is_binary: false,
        }
    }

    /// Reads until the bytes determine the protocol. They stay unread in `client`. Some may be unread
    /// already, such as those that have followed a handshake.
    async fn read(&mut self, client: &mut Io, flow: &Flow) -> Result<Protocol, Failure> {
        let (mut deadline, mut memory) = (None, None);
        loop {
            let mut pause = None;
            if !client.unread().is_empty() {
                if let Some(protocol) = self.update(client.unread()) {
                    return Ok(protocol);
                }
                // The rest is charged with the connection.
                if let Some(more) = client.buffered().checked_sub(PENDING_COST) {
                    let memory = memory.get_or_insert_with(|| flow.charge());
                    memory.hold(more)?;
                }
                match self.pause_timeout(client.unread()) {
                    Duration::ZERO => return Ok(self.guess(client.unread())),
                    allowed => pause = Some(Instant::now() + allowed),
                }
            }
            let filling = poll_fn(|cx| client.poll_fill(cx));
            let filled = match pause {
                None => Ok(filling.await),
                Some(pause) => {
                    // One deadline for all bytes: a byte now and then does not extend it.
                    let timeout = flow.worker.config.timeouts.detect;
                    let deadline = *deadline.get_or_insert(Instant::now() + timeout);
                    let filled = timeout_at(deadline.min(pause), filling).await;
                    if filled.is_err() && deadline <= pause {
                        flow.count_timeout(TimeoutKind::Detect);
                    }
                    filled
                }
            };
            match filled {
                // After a half-close without a byte the server may still have something to send.
                Err(_) | Ok(Ok(0)) => return Ok(self.guess(client.unread())),
                Ok(Ok(_)) => {}
                Ok(Err(error)) => {
                    tracing::debug!("the client closed during protocol detection: {error}");
                    let reason = "the client closed during protocol detection";
                    return Err(Failure::BadRequest(reason));
                }
            }
        }
    }

    /// Recognizes HTTP/2 by its preface and HTTP/1 by its request line. All other bytes are opaque. A
    /// line that a lenient server might parse as a request line is HTTP, so that no request reaches an
    /// application unparsed. The strict parser then rejects the malformed ones. `None` while the bytes
    /// are a prefix of more than one protocol. `bytes` contains the bytes of earlier calls, and more.
    pub fn update(&mut self, bytes: &[u8]) -> Option<Protocol> {
        if matches!(self.rules, Rules::Inbound | Rules::InboundOpaque) {
            match tls::inspect(bytes) {
                Hello::Mesh => return Some(Protocol::MeshTls),
                Hello::NeedMore => return None,
                Hello::Foreign if self.rules == Rules::InboundOpaque => {
                    return Some(Protocol::Opaque);
                }
                Hello::Foreign => {}
            }
        }
        if bytes.starts_with(HTTP2_PREFACE) {
            return Some(Protocol::Http2);
        }
        if HTTP2_PREFACE.starts_with(bytes) {
            return None;
        }
        let line = &bytes[..bytes.len().min(MAX_FIRST_LINE)];
        match self.inspect(line) {
            None if line.len() == MAX_FIRST_LINE => Some(self.guess(line)),
            known => known,
        }
    }

    /// The protocol of an incomplete first line after which the client pauses. A method with the
    /// start of a target is HTTP/1: the HTTP parser replies to the incomplete request. All other
    /// bytes are opaque and are forwarded, while a `RequestDetector` inspects the rest of the line.
    pub fn guess(&mut self, bytes: &[u8]) -> Protocol {
        match self.inspect(bytes) {
            _ if self.rules == Rules::InboundOpaque => Protocol::Opaque,
            Some(protocol) => protocol,
            None if self.line.is_method_and_target() => Protocol::Http1,
            None => Protocol::Opaque,
        }
    }

    /// Inspects the bytes that are new.
    fn inspect(&mut self, bytes: &[u8]) -> Option<Protocol> {
        let new = bytes.get(self.inspected..)?;
        self.inspected = bytes.len();
        self.is_binary |= is_binary(new);
        self.line.update(new)
    }

    /// How long the client may pause after these bytes. A prefix of a request line may be a complete
    /// message of another protocol, in particular if it is binary. A prefix of a ClientHello is not.
    fn pause_timeout(&self, begun: &[u8]) -> Duration {
        match tls::inspect(begun) {
            _ if self.rules == Rules::Inspected => Duration::ZERO,
            Hello::NeedMore => CLIENT_HELLO_TIMEOUT,
            _ if self.is_binary => Duration::ZERO,
            _ => PAUSE_TIMEOUT,
        }
    }
}

/// Whether the bytes contain a control character that does not occur in text.
fn is_binary(bytes: &[u8]) -> bool {
    bytes
        .iter()
        .any(|byte| byte.is_ascii_control() && !is_separator(byte))
}

/// Whether a server's first bytes are an HTTP/2 SETTINGS frame. Server and client send their
/// prefaces without waiting for each other (RFC 9113, section 3.4), so the frame does not indicate
/// a server-first protocol.
pub fn is_http2_server(bytes: &[u8]) -> bool {
    bytes.len() <= MAX_SERVER_PREFACE && matches!(bytes, [_, _, _, 4, 0, 0, 0, 0, 0, ..])
}
