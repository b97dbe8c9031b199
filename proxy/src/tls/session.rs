//! One TLS session over a socket: what is read is decrypted, what is written is encrypted, with rustls' state machine and no
//! buffers of its own. Like `io.rs`, which holds it, it works in buffers that all connections of a worker share: a session at
//! rest keeps no more than a record that has not fully come, or one that the socket has not fully taken.
//!
//! It knows nothing of identities: `mod.rs` sets sessions up and judges the peer.

use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use rustls::CommonState;
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// The most that one write encrypts, in plain bytes: eight full records.
const MOST: usize = 8 * RECORD;
/// The most plain bytes of a record (RFC 8446, section 5.1).
const RECORD: usize = 16 * 1024;
/// What a record has more than its plain bytes, with some to spare: head, content type, tag.
const OVERHEAD: usize = 64;
/// What may wait to go out with the next write, at most: the end of a handshake, a ticket.
const HELD: usize = 16 * 1024;

thread_local! {
    /// Decrypted bytes on their way to whoever reads.
    static PLAIN: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    /// Encrypted bytes on their way to the socket.
    static SEALED: RefCell<Vec<u8>> = RefCell::new(vec![0; MOST + 8 * OVERHEAD + HELD]);
}

/// One side of a session.
pub struct Session {
    machine: Machine,
    /// Came from the socket: the beginning of a record.
    incoming: BytesMut,
    /// Still to go to the socket.
    outgoing: BytesMut,
    /// `outgoing` may wait for the next write.
    held: bool,
    /// The peer has said that it writes no more.
    peer_ended: bool,
}

enum Machine {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// Where the state machine stands when it has nothing more to do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stand {
    /// It needs more bytes before it can go on with the handshake.
    Handshaking,
    /// Bytes can be sent.
    Established,
    /// Both sides have ended.
    Closed,
}

impl Session {
    /// A session that has not begun, on the side that begins.
    pub fn client(connection: UnbufferedClientConnection) -> Self {
        Self::new(Machine::Client(connection))
    }

    /// A session that has not begun, on the other side. `incoming` was read already.
    pub fn server(connection: UnbufferedServerConnection, incoming: BytesMut) -> Self {
        Self { incoming, ..Self::new(Machine::Server(connection)) }
    }

    fn new(machine: Machine) -> Self {
        Self { machine, incoming: BytesMut::new(), outgoing: BytesMut::new(), held: false, peer_ended: false }
    }

    /// What was agreed on.
    pub fn state(&self) -> &CommonState {
        match &self.machine {
            Machine::Client(connection) => connection,
            Machine::Server(connection) => connection,
        }
    }

    /// Runs the handshake. What the peer sent right after it is added to `plain`. The last words of this side leave with the
    /// first write, or before the first wait.
    pub fn poll_handshake(&mut self, cx: &mut Context<'_>, stream: &mut TcpStream, plain: &mut BytesMut) -> Poll<io::Result<()>> {
        loop {
            let mut incoming = std::mem::take(&mut self.incoming);
            let advanced = self.advance(&mut incoming, &mut |bytes| plain.extend_from_slice(bytes));
            let (used, stand) = match advanced {
                Ok(advanced) => advanced,
                Err(error) => {
                    // The peer is told why, if the socket takes it.
                    let _ = self.poll_flush(cx, stream);
                    return Poll::Ready(Err(error));
                }
            };
            incoming.advance(used);
            self.incoming = incoming;
            match stand {
                Stand::Established => {
                    self.held = true;
                    return Poll::Ready(Ok(()));
                }
                Stand::Closed => return Poll::Ready(Err(cut_off())),
                Stand::Handshaking => {}
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

    /// Reads until there are plain bytes, and gives them to `take`; none are the end. `scratch` is for the encrypted ones.
    pub fn poll_read<T>(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut TcpStream,
        scratch: &mut [u8],
        take: impl FnOnce(&[u8], &mut Context<'_>) -> T,
    ) -> Poll<io::Result<T>> {
        // What this side has said must not wait while it listens.
        if let Poll::Ready(Err(error)) = self.poll_flush(cx, stream) {
            return Poll::Ready(Err(error));
        }
        PLAIN.with_borrow_mut(|plain| {
            loop {
                plain.clear();
                if self.peer_ended {
                    return Poll::Ready(Ok(take(&[], cx)));
                }
                let before = self.incoming.len();
                scratch[..before].copy_from_slice(&self.incoming);
                let mut buf = ReadBuf::new(&mut scratch[before..]);
                ready!(Pin::new(&mut *stream).poll_read(cx, &mut buf))?;
                let read = buf.filled().len();
                if read == 0 {
                    return Poll::Ready(Err(cut_off()));
                }
                self.decrypt(&mut scratch[..before + read], plain)?;
                if !self.outgoing.is_empty()
                    && let Poll::Ready(Err(error)) = self.poll_flush(cx, stream)
                {
                    return Poll::Ready(Err(error));
                }
                if !plain.is_empty() {
                    return Poll::Ready(Ok(take(plain, cx)));
                }
            }
        })
    }

    /// Whether anything came that was not expected of a connection that nobody uses: bytes, an end, an error. Tickets and new
    /// keys are taken in.
    pub fn has_spoken(&mut self, stream: &TcpStream, scratch: &mut [u8]) -> bool {
        loop {
            let before = self.incoming.len();
            scratch[..before].copy_from_slice(&self.incoming);
            match stream.try_read(&mut scratch[before..]) {
                Ok(read) if read > 0 => {
                    let mut plain = Vec::new();
                    if self.decrypt(&mut scratch[..before + read], &mut plain).is_err() || !plain.is_empty() || self.peer_ended {
                        return true;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                _ => return true,
            }
        }
    }

    fn decrypt(&mut self, sealed: &mut [u8], plain: &mut Vec<u8>) -> io::Result<()> {
        let (used, _) = self.advance(sealed, &mut |bytes| plain.extend_from_slice(bytes))?;
        self.incoming = match &sealed[used..] {
            [] => BytesMut::new(),
            rest => BytesMut::from(rest),
        };
        Ok(())
    }

    /// Encrypts some of `data` and writes it. What the socket does not take now is kept, and counts as written.
    pub fn poll_write(&mut self, cx: &mut Context<'_>, stream: &mut TcpStream, data: &[u8]) -> Poll<io::Result<usize>> {
        if !self.held || self.outgoing.len() > HELD {
            ready!(self.poll_flush(cx, stream))?;
        }
        let data = &data[..data.len().min(MOST)];
        SEALED.with_borrow_mut(|sealed| {
            let mut filled = self.outgoing.len();
            sealed[..filled].copy_from_slice(&self.outgoing);
            self.outgoing.clear();
            self.held = false;
            filled += self.encrypt(data, &mut sealed[filled..])?;
            let mut rest = &sealed[..filled];
            while !rest.is_empty() {
                match Pin::new(&mut *stream).poll_write(cx, rest) {
                    Poll::Ready(Ok(written)) => rest = &rest[written..],
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending => break,
                }
            }
            self.outgoing = if rest.is_empty() { BytesMut::new() } else { BytesMut::from(rest) };
            Poll::Ready(Ok(data.len()))
        })
    }

    /// Writes what is still to go out.
    pub fn poll_flush(&mut self, cx: &mut Context<'_>, stream: &mut TcpStream) -> Poll<io::Result<()>> {
        self.held = false;
        while !self.outgoing.is_empty() {
            let written = ready!(Pin::new(&mut *stream).poll_write(cx, &self.outgoing))?;
            self.outgoing.advance(written);
        }
        if self.outgoing.capacity() > 0 {
            self.outgoing = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }

    /// Says that this side writes no more, and half-closes the socket.
    pub fn poll_shutdown(&mut self, cx: &mut Context<'_>, stream: &mut TcpStream) -> Poll<io::Result<()>> {
        let mut incoming = std::mem::take(&mut self.incoming);
        let mut last = [0; 128];
        let said = match &mut self.machine {
            Machine::Client(connection) => say_end(connection.process_tls_records(&mut incoming), &mut last),
            Machine::Server(connection) => say_end(connection.process_tls_records(&mut incoming), &mut last),
        };
        self.incoming = incoming;
        self.outgoing.extend_from_slice(&last[..said]);
        ready!(self.poll_flush(cx, stream))?;
        Pin::new(stream).poll_shutdown(cx)
    }

    /// Nothing waits to be written.
    pub fn is_flushed(&self) -> bool {
        self.outgoing.is_empty() || self.held
    }

    fn encrypt(&mut self, data: &[u8], sealed: &mut [u8]) -> io::Result<usize> {
        // What the machine itself has to say, new keys for one, goes first; a record that has begun to come stays what it is.
        let mut incoming = std::mem::take(&mut self.incoming);
        let result = self.advance(&mut incoming, &mut |_| {}).and_then(|_| {
            let before = self.outgoing.len();
            sealed[..before].copy_from_slice(&self.outgoing);
            self.outgoing.clear();
            let out = &mut sealed[before..];
            let encrypted = match &mut self.machine {
                Machine::Client(connection) => encrypt(connection.process_tls_records(&mut incoming), data, out),
                Machine::Server(connection) => encrypt(connection.process_tls_records(&mut incoming), data, out),
            };
            Ok(before + encrypted?)
        });
        self.incoming = incoming;
        result
    }

    /// Lets the machine work until it needs something: how much of `sealed` it is done with, and where it stands. Plain bytes
    /// go to `plain`, what it has to say to `outgoing`.
    fn advance(&mut self, sealed: &mut [u8], plain: &mut dyn FnMut(&[u8])) -> io::Result<(usize, Stand)> {
        let mut used = 0;
        loop {
            let (discard, turn) = match &mut self.machine {
                Machine::Client(connection) => turn(connection.process_tls_records(&mut sealed[used..]), plain, &mut self.outgoing),
                Machine::Server(connection) => turn(connection.process_tls_records(&mut sealed[used..]), plain, &mut self.outgoing),
            };
            used += discard;
            match turn {
                Ok(Turn::Again) => {}
                Ok(Turn::PeerEnded) => self.peer_ended = true,
                Ok(Turn::Stands(stand)) => return Ok((used, stand)),
                Err(error) => {
                    self.take_alert();
                    return Err(io::Error::new(io::ErrorKind::InvalidData, error));
                }
            }
        }
    }

    /// After an error: the alert that says so to the peer.
    fn take_alert(&mut self) {
        let out = &mut self.outgoing;
        // It ends with the same error, once the alert is out.
        let _ = match &mut self.machine {
            Machine::Client(connection) => turn(connection.process_tls_records(&mut []), &mut |_| {}, out),
            Machine::Server(connection) => turn(connection.process_tls_records(&mut []), &mut |_| {}, out),
        };
    }
}

enum Turn {
    Again,
    PeerEnded,
    Stands(Stand),
}

fn turn<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    plain: &mut dyn FnMut(&[u8]),
    outgoing: &mut BytesMut,
) -> (usize, Result<Turn, rustls::Error>) {
    let UnbufferedStatus { mut discard, state, .. } = status;
    let turn = state.and_then(|state| match state {
        ConnectionState::ReadTraffic(mut traffic) => {
            while let Some(record) = traffic.next_record() {
                let record = record?;
                discard += record.discard;
                plain(record.payload);
            }
            Ok(Turn::Again)
        }
        ConnectionState::EncodeTlsData(mut data) => {
            let at = outgoing.len();
            if let Err(EncodeError::InsufficientSize(size)) = data.encode(&mut []) {
                outgoing.resize(at + size.required_size, 0);
                data.encode(&mut outgoing[at..]).map_err(|error| rustls::Error::General(error.to_string()))?;
            }
            Ok(Turn::Again)
        }
        ConnectionState::TransmitTlsData(data) => {
            data.done();
            Ok(Turn::Again)
        }
        ConnectionState::PeerClosed => Ok(Turn::PeerEnded),
        ConnectionState::Closed => Ok(Turn::Stands(Stand::Closed)),
        ConnectionState::BlockedHandshake => Ok(Turn::Stands(Stand::Handshaking)),
        ConnectionState::WriteTraffic(_) => Ok(Turn::Stands(Stand::Established)),
        // Early data is not offered and not accepted.
        other => Err(rustls::Error::General(format!("an unexpected state: {other:?}"))),
    });
    (discard, turn)
}

fn encrypt<Data>(status: UnbufferedStatus<'_, '_, Data>, data: &[u8], out: &mut [u8]) -> io::Result<usize> {
    match status.state {
        Ok(ConnectionState::WriteTraffic(mut traffic)) => traffic.encrypt(data, out).map_err(|error| match error {
            EncryptError::InsufficientSize(size) => io::Error::other(format!("{} bytes for {}", out.len(), size.required_size)),
            EncryptError::EncryptExhausted => io::Error::other("the session's keys are used up"),
        }),
        Ok(_) => Err(io::ErrorKind::BrokenPipe.into()),
        Err(error) => Err(io::Error::new(io::ErrorKind::InvalidData, error)),
    }
}

fn say_end<Data>(status: UnbufferedStatus<'_, '_, Data>, out: &mut [u8]) -> usize {
    match status.state {
        // Said before: it is not said again.
        Ok(ConnectionState::WriteTraffic(mut traffic)) => traffic.queue_close_notify(out).unwrap_or(0),
        _ => 0,
    }
}

fn cut_off() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the connection ended before its TLS session did")
}
