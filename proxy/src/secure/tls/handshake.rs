//! TLS handshakes: moves bytes between the socket and rustls' state connection, then extracts the
//! keys for the session (`session.rs`). `mod.rs` configures handshakes and authenticates the peer.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::CertificateDer;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, UnbufferedStatus};
use rustls::{CipherSuite, CommonState, HandshakeKind, NamedGroup};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::session::{Buffered, Kernel, Session};
use super::turns::Turns;
use crate::error::Failure;
use crate::limits::memory::Charge;

/// The maximum input of a handshake. rustls accepts messages of 64 KiB, and keeps their records until
/// a message is complete: with a record for each byte of it, these would be a thousand times as large.
const MAX_INPUT: usize = 96 * 1024;

/// The first byte of a TLS record, from change_cipher_spec to application_data (RFC 8446, section 5.1).
const CONTENT_TYPES: RangeInclusive<u8> = 20..=23;

/// The outcome of a handshake.
pub struct Negotiated {
    /// Leaf certificate of the peer.
    pub certificate: Option<CertificateDer<'static>>,
    /// The application protocol (RFC 7301).
    pub alpn: Option<Vec<u8>>,
    /// Key exchange group.
    pub group: Option<NamedGroup>,
    /// Cipher suite.
    pub suite: Option<CipherSuite>,
    /// Full or resumed.
    pub kind: Option<HandshakeKind>,
}

/// For logs: `X25519MLKEM768 TLS13_AES_128_GCM_SHA256 Resumed`.
impl fmt::Display for Negotiated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            group: Some(group),
            suite: Some(suite),
            kind: Some(kind),
            ..
        } = self
        else {
            return f.write_str("no session");
        };
        write!(f, "{group:?} {suite:?} {kind:?}")
    }
}

/// A handshake in progress.
pub struct Handshake {
    connection: Connection,
    /// Unprocessed input.
    incoming: BytesMut,
    /// Pending output.
    outgoing: BytesMut,
    /// Whether the peer has sent close_notify.
    peer_closed: bool,
    /// The number of bytes that the peer has sent.
    received: usize,
    /// Charged for what the handshake holds.
    memory: Charge,
    turns: Turns,
}

enum Connection {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// State of the handshake when rustls needs input or output.
enum State {
    /// More input is required.
    Handshaking,
    /// Application data can be sent.
    Done,
    /// Both sides are closed.
    Closed,
}

impl Handshake {
    /// A handshake of a client.
    pub fn client(connection: UnbufferedClientConnection, memory: Charge) -> Self {
        Self::new(Connection::Client(connection), BytesMut::new(), memory)
    }

    /// A handshake of a server. `incoming` is the input read so far.
    pub fn server(
        connection: UnbufferedServerConnection,
        incoming: BytesMut,
        memory: Charge,
    ) -> Self {
        Self::new(Connection::Server(connection), incoming, memory)
    }

    /// Takes turns with the other handshakes of the worker.
    pub fn in_turn(self, turns: &Turns) -> Self {
        Self {
            turns: turns.clone(),
            ..self
        }
    }

    fn new(connection: Connection, incoming: BytesMut, memory: Charge) -> Self {
        Self {
            turns: Turns::default(),
            received: incoming.len(),
            memory,
            connection,
            incoming,
            outgoing: BytesMut::new(),
            peer_closed: false,
        }
    }

    /// Runs the handshake. Appends application data that follows it to `plaintext`. The last
    /// messages of this side are sent with the first write of the session, or before its first
    /// read.
    pub async fn run(
        mut self,
        stream: &mut TcpStream,
        plaintext: &mut BytesMut,
    ) -> io::Result<(Negotiated, Session)> {
        self.exchange_messages(stream, plaintext).await?;
        let Self {
            connection,
            incoming,
            outgoing,
            peer_closed,
            memory: _memory,
            ..
        } = self;
        let negotiated = connection.negotiated();
        let (secrets, kernel) = match connection {
            Connection::Client(connection) => {
                let (secrets, kernel) = connection
                    .dangerous_into_kernel_connection()
                    .map_err(invalid_data)?;
                (secrets, Kernel::Client(kernel))
            }
            Connection::Server(connection) => {
                let (secrets, kernel) = connection
                    .dangerous_into_kernel_connection()
                    .map_err(invalid_data)?;
                (secrets, Kernel::Server(kernel))
            }
        };
        let buffered = Buffered {
            incoming,
            outgoing,
            peer_closed,
        };
        let session = Session::new(kernel, &secrets, buffered)
            .ok_or_else(|| io::Error::other("unsupported cipher suite"))?;
        Ok((negotiated, session))
    }

    async fn exchange_messages(
        &mut self,
        stream: &mut TcpStream,
        plaintext: &mut BytesMut,
    ) -> io::Result<()> {
        loop {
            if !self.incoming.is_empty() {
                self.turns.next().await;
            }
            let state = match self.advance(plaintext) {
                Ok(state) => state,
                Err(error) => {
                    // The output of rustls is an alert, if it has any for this error. Without
                    // output, another step would continue with the input. Sends the alert if the
                    // socket accepts it now.
                    while self.connection.common().wants_write() {
                        let _ = self.step(plaintext).1;
                    }
                    poll_fn(|cx| Poll::Ready(self.poll_flush(cx, stream).is_ready())).await;
                    return Err(invalid_data(error));
                }
            };
            match state {
                State::Done => return Ok(()),
                State::Closed => return Err(unexpected_eof()),
                State::Handshaking => {}
            }
            self.check_memory()?;
            poll_fn(|cx| self.poll_flush(cx, stream)).await?;
            poll_fn(|cx| self.poll_read(cx, stream)).await?;
        }
    }

    fn poll_read(&mut self, cx: &mut Context<'_>, stream: &mut TcpStream) -> Poll<io::Result<()>> {
        let mut piece = [0; 4096];
        let mut buf = ReadBuf::new(&mut piece);
        ready!(Pin::new(&mut *stream).poll_read(cx, &mut buf))?;
        if buf.filled().is_empty() {
            return Poll::Ready(Err(unexpected_eof()));
        }
        if self.received == 0 && self.is_answered_in_plaintext(buf.filled()) {
            let peer = stream.peer_addr()?;
            return Poll::Ready(Err(io::Error::other(Failure::PlaintextAnswer(peer))));
        }
        self.received += buf.filled().len();
        self.incoming.extend_from_slice(buf.filled());
        Poll::Ready(Ok(()))
    }

    /// Whether the first bytes of a server are no TLS record.
    fn is_answered_in_plaintext(&self, first: &[u8]) -> bool {
        let is_record = |byte: &u8| CONTENT_TYPES.contains(byte);
        matches!(self.connection, Connection::Client(_)) && !first.first().is_some_and(is_record)
    }

    /// Charges what the handshake holds while it waits: the buffers, and the messages that rustls
    /// keeps.
    fn check_memory(&mut self) -> io::Result<()> {
        let Self {
            incoming,
            outgoing,
            received,
            memory,
            ..
        } = self;
        if *received > MAX_INPUT {
            let reason = format!("the peer sent more than {MAX_INPUT} bytes in the TLS handshake");
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        let held = *received + incoming.capacity() + outgoing.capacity();
        memory.hold(held).map_err(io::Error::other)
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>, stream: &mut TcpStream) -> Poll<io::Result<()>> {
        while !self.outgoing.is_empty() {
            let written = ready!(Pin::new(&mut *stream).poll_write(cx, &self.outgoing))?;
            self.outgoing.advance(written);
        }
        Poll::Ready(Ok(()))
    }

    /// Processes input until rustls needs more. Output goes to `outgoing`.
    fn advance(&mut self, plaintext: &mut BytesMut) -> Result<State, rustls::Error> {
        loop {
            let (used, step) = self.step(plaintext);
            self.incoming.advance(used);
            match step? {
                Step::Continue => {}
                Step::PeerClosed => self.peer_closed = true,
                Step::Blocked(stand) => return Ok(stand),
            }
        }
    }

    fn step(&mut self, plaintext: &mut BytesMut) -> (usize, Result<Step, rustls::Error>) {
        let Self {
            connection,
            incoming,
            outgoing,
            ..
        } = self;
        match connection {
            Connection::Client(connection) => step(
                connection.process_tls_records(incoming),
                plaintext,
                outgoing,
            ),
            Connection::Server(connection) => step(
                connection.process_tls_records(incoming),
                plaintext,
                outgoing,
            ),
        }
    }
}

impl Connection {
    fn common(&self) -> &CommonState {
        match self {
            Self::Client(connection) => connection,
            Self::Server(connection) => connection,
        }
    }

    fn negotiated(&self) -> Negotiated {
        let common = self.common();
        Negotiated {
            certificate: common
                .peer_certificates()
                .and_then(|chain| chain.first())
                .map(|leaf| leaf.clone().into_owned()),
            alpn: common.alpn_protocol().map(<[u8]>::to_vec),
            group: common
                .negotiated_key_exchange_group()
                .map(|group| group.name()),
            suite: common.negotiated_cipher_suite().map(|suite| suite.suite()),
            kind: common.handshake_kind(),
        }
    }
}

/// Result of one step of rustls' state connection.
enum Step {
    Continue,
    PeerClosed,
    Blocked(State),
}

fn step<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    plaintext: &mut BytesMut,
    outgoing: &mut BytesMut,
) -> (usize, Result<Step, rustls::Error>) {
    let UnbufferedStatus {
        mut discard, state, ..
    } = status;
    let step = state.and_then(|state| match state {
        ConnectionState::ReadTraffic(mut traffic) => {
            while let Some(record) = traffic.next_record() {
                let record = record?;
                discard += record.discard;
                plaintext.extend_from_slice(record.payload);
            }
            Ok(Step::Continue)
        }
        ConnectionState::EncodeTlsData(mut data) => {
            let at = outgoing.len();
            if let Err(EncodeError::InsufficientSize(size)) = data.encode(&mut []) {
                outgoing.resize(at + size.required_size, 0);
                data.encode(&mut outgoing[at..])
                    .map_err(|error| rustls::Error::General(error.to_string()))?;
            }
            Ok(Step::Continue)
        }
        ConnectionState::TransmitTlsData(data) => {
            data.done();
            Ok(Step::Continue)
        }
        ConnectionState::PeerClosed => Ok(Step::PeerClosed),
        ConnectionState::Closed => Ok(Step::Blocked(State::Closed)),
        ConnectionState::BlockedHandshake => Ok(Step::Blocked(State::Handshaking)),
        ConnectionState::WriteTraffic(_) => Ok(Step::Blocked(State::Done)),
        // Early data is disabled.
        other => Err(rustls::Error::General(format!(
            "unexpected state of the TLS handshake: {other:?}"
        ))),
    });
    (discard, step)
}

fn invalid_data(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// The peer closed the connection without close_notify.
pub fn unexpected_eof() -> io::Error {
    io::Error::new(
        io::ErrorKind::UnexpectedEof,
        "connection closed without TLS close_notify",
    )
}
