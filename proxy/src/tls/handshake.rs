//! The handshake of a session, which is rustls' from its first byte to its last: this file moves bytes between the socket and
//! rustls' state machine, and afterwards takes the keys out of it for the session (`session.rs`).
//!
//! It knows nothing of identities: `mod.rs` sets handshakes up and judges the peer.

use std::fmt;
use std::future::poll_fn;
use std::io;
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

use super::session::{Kernel, Leftover, Session};

/// The outcome of a handshake.
pub struct Negotiated {
    /// The peer's own certificate, where it has shown one.
    pub certificate: Option<CertificateDer<'static>>,
    /// The application protocol (RFC 7301).
    pub alpn: Option<Vec<u8>>,
    /// How they came by their keys.
    pub group: Option<NamedGroup>,
    /// What the records are sealed with.
    pub suite: Option<CipherSuite>,
    /// From the beginning, or by an earlier session's ticket.
    pub kind: Option<HandshakeKind>,
}

/// For people: `X25519MLKEM768 TLS13_AES_128_GCM_SHA256 Resumed`.
impl fmt::Display for Negotiated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            group: Some(group),
            suite: Some(suite),
            kind: Some(kind),
            ..
        } = self
        else {
            return f.write_str("nothing");
        };
        write!(f, "{group:?} {suite:?} {kind:?}")
    }
}

/// A handshake that has not ended.
pub struct Handshake {
    machine: Machine,
    /// Came from the socket.
    incoming: BytesMut,
    /// Still to go to the socket.
    outgoing: BytesMut,
    /// The peer has said that it writes no more.
    peer_ended: bool,
}

enum Machine {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// Where the state machine stands when it has nothing more to do.
enum Stand {
    /// It needs more bytes.
    Underway,
    /// Bytes can be sent.
    Done,
    /// Both sides have ended.
    Closed,
}

impl Handshake {
    /// On the side that begins.
    pub fn client(connection: UnbufferedClientConnection) -> Self {
        Self::new(Machine::Client(connection), BytesMut::new())
    }

    /// On the other side. `incoming` was read already.
    pub fn server(connection: UnbufferedServerConnection, incoming: BytesMut) -> Self {
        Self::new(Machine::Server(connection), incoming)
    }

    fn new(machine: Machine, incoming: BytesMut) -> Self {
        Self {
            machine,
            incoming,
            outgoing: BytesMut::new(),
            peer_ended: false,
        }
    }

    /// Runs the handshake. What the peer sent right after it is added to `plain`. The last words of this side leave with the
    /// session's first write, or before its first wait.
    pub async fn run(
        mut self,
        stream: &mut TcpStream,
        plain: &mut BytesMut,
    ) -> io::Result<(Negotiated, Session)> {
        poll_fn(|cx| self.poll(cx, stream, plain)).await?;
        let Self {
            machine,
            incoming,
            outgoing,
            peer_ended,
        } = self;
        let negotiated = machine.negotiated();
        let (secrets, kernel) = match machine {
            Machine::Client(connection) => {
                let (secrets, kernel) = connection
                    .dangerous_into_kernel_connection()
                    .map_err(broken)?;
                (secrets, Kernel::Client(kernel))
            }
            Machine::Server(connection) => {
                let (secrets, kernel) = connection
                    .dangerous_into_kernel_connection()
                    .map_err(broken)?;
                (secrets, Kernel::Server(kernel))
            }
        };
        let leftover = Leftover {
            incoming,
            outgoing,
            peer_ended,
        };
        let session = Session::new(kernel, &secrets, leftover)
            .ok_or_else(|| io::Error::other("a suite that is not TLS 1.3's"))?;
        Ok((negotiated, session))
    }

    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut TcpStream,
        plain: &mut BytesMut,
    ) -> Poll<io::Result<()>> {
        loop {
            let stand = match self.advance(plain) {
                Ok(stand) => stand,
                Err(error) => {
                    // The peer is told why, if the socket takes it: after an error the machine has one thing to say, the alert.
                    self.incoming.clear();
                    let _ = self.turn(plain).1;
                    let _ = self.poll_flush(cx, stream);
                    return Poll::Ready(Err(broken(error)));
                }
            };
            match stand {
                Stand::Done => return Poll::Ready(Ok(())),
                Stand::Closed => return Poll::Ready(Err(cut_off())),
                Stand::Underway => {}
            }
            ready!(self.poll_flush(cx, stream))?;
            let mut piece = [0; 4096];
            let mut buf = ReadBuf::new(&mut piece);
            ready!(Pin::new(&mut *stream).poll_read(cx, &mut buf))?;
            if buf.filled().is_empty() {
                return Poll::Ready(Err(cut_off()));
            }
            self.incoming.extend_from_slice(buf.filled());
        }
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>, stream: &mut TcpStream) -> Poll<io::Result<()>> {
        while !self.outgoing.is_empty() {
            let written = ready!(Pin::new(&mut *stream).poll_write(cx, &self.outgoing))?;
            self.outgoing.advance(written);
        }
        Poll::Ready(Ok(()))
    }

    /// Lets the machine work until it needs something. What it has to say goes to `outgoing`.
    fn advance(&mut self, plain: &mut BytesMut) -> Result<Stand, rustls::Error> {
        loop {
            let (used, turn) = self.turn(plain);
            self.incoming.advance(used);
            match turn? {
                Turn::Again => {}
                Turn::PeerEnded => self.peer_ended = true,
                Turn::Stands(stand) => return Ok(stand),
            }
        }
    }

    fn turn(&mut self, plain: &mut BytesMut) -> (usize, Result<Turn, rustls::Error>) {
        let Self {
            machine,
            incoming,
            outgoing,
            ..
        } = self;
        match machine {
            Machine::Client(connection) => {
                turn(connection.process_tls_records(incoming), plain, outgoing)
            }
            Machine::Server(connection) => {
                turn(connection.process_tls_records(incoming), plain, outgoing)
            }
        }
    }
}

impl Machine {
    fn negotiated(&self) -> Negotiated {
        let state: &CommonState = match self {
            Self::Client(connection) => connection,
            Self::Server(connection) => connection,
        };
        Negotiated {
            certificate: state
                .peer_certificates()
                .and_then(|chain| chain.first())
                .map(|leaf| leaf.clone().into_owned()),
            alpn: state.alpn_protocol().map(<[u8]>::to_vec),
            group: state
                .negotiated_key_exchange_group()
                .map(|group| group.name()),
            suite: state.negotiated_cipher_suite().map(|suite| suite.suite()),
            kind: state.handshake_kind(),
        }
    }
}

enum Turn {
    Again,
    PeerEnded,
    Stands(Stand),
}

fn turn<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    plain: &mut BytesMut,
    outgoing: &mut BytesMut,
) -> (usize, Result<Turn, rustls::Error>) {
    let UnbufferedStatus {
        mut discard, state, ..
    } = status;
    let turn = state.and_then(|state| match state {
        ConnectionState::ReadTraffic(mut traffic) => {
            while let Some(record) = traffic.next_record() {
                let record = record?;
                discard += record.discard;
                plain.extend_from_slice(record.payload);
            }
            Ok(Turn::Again)
        }
        ConnectionState::EncodeTlsData(mut data) => {
            let at = outgoing.len();
            if let Err(EncodeError::InsufficientSize(size)) = data.encode(&mut []) {
                outgoing.resize(at + size.required_size, 0);
                data.encode(&mut outgoing[at..])
                    .map_err(|error| rustls::Error::General(error.to_string()))?;
            }
            Ok(Turn::Again)
        }
        ConnectionState::TransmitTlsData(data) => {
            data.done();
            Ok(Turn::Again)
        }
        ConnectionState::PeerClosed => Ok(Turn::PeerEnded),
        ConnectionState::Closed => Ok(Turn::Stands(Stand::Closed)),
        ConnectionState::BlockedHandshake => Ok(Turn::Stands(Stand::Underway)),
        ConnectionState::WriteTraffic(_) => Ok(Turn::Stands(Stand::Done)),
        // Early data is not offered and not accepted.
        other => Err(rustls::Error::General(format!(
            "an unexpected state: {other:?}"
        ))),
    });
    (discard, turn)
}

fn broken(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// The peer has left without a word.
pub fn cut_off() -> io::Error {
    io::Error::new(
        io::ErrorKind::UnexpectedEof,
        "the connection ended before its TLS session did",
    )
}
