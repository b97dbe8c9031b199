//! One TLS session over a socket after its handshake: opens what it reads and seals what it writes,
//! in buffers that all connections of a worker share. An idle session owns only incomplete records.
//! Besides data, it handles tickets, key updates and alerts (RFC 8446, sections 4.6 and 6).
//!
//! rustls does the handshake (`handshake.rs`) and derives keys; `record.rs` protects records.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use rustls::client::ClientConnectionData;
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use rustls::{ExtractedSecrets, ProtocolVersion};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::handshake::unexpected_eof;
use super::record::{Alert, ContentType, MAX_PLAINTEXT, OVERHEAD, Opener, RecordError, Sealer};
use crate::secure::scratch::Scratch;

/// Maximum plaintext of one write: eight full records.
const MAX_WRITE: usize = 8 * MAX_PLAINTEXT;
/// Maximum size of delayed output: the last messages of a handshake.
const MAX_DELAYED: usize = 16 * 1024;
/// Maximum size of a handshake message. Tickets contain the certificates of the peer.
const MAX_HANDSHAKE_MESSAGE: usize = 64 * 1024;
/// Maximum number of consecutive records without application data: empty records, tickets, key
/// updates.
const MAX_RECORDS_WITHOUT_DATA: u8 = 32;

/// Maximum output of one write.
const MAX_SEALED: usize = MAX_DELAYED + 12 * OVERHEAD + MAX_WRITE;

const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;

thread_local! {
    /// Plaintext of one read.
    static PLAINTEXT: Scratch = const { Scratch::new() };
    /// Records of one write.
    static SEALED: Scratch = const { Scratch::new() };
}

/// One side of a session.
pub struct Session {
    kernel: Kernel,
    sealer: Sealer,
    opener: Opener,
    /// Incomplete record from the socket.
    incoming: BytesMut,
    /// Pending output.
    outgoing: BytesMut,
    /// Plaintext bytes whose records are pending, or sent since the write that returned `Pending`.
    /// The next write reports them.
    unreported: usize,
    /// Whether `outgoing` may wait for the next write.
    delay_output: bool,
    /// Incomplete handshake message.
    message: Vec<u8>,
    /// Whether the peer has requested a key update.
    key_update_requested: bool,
    /// Consecutive records without application data.
    records_without_data: u8,
    acceptance: Acceptance,
    /// Whether the peer has sent close_notify.
    peer_closed: bool,
    /// Whether this side has sent an alert.
    closed: bool,
}

/// rustls state of a session: derives keys, stores tickets.
pub enum Kernel {
    /// Client side.
    Client(KernelConnection<ClientConnectionData>),
    /// Server side.
    Server(KernelConnection<ServerConnectionData>),
}

/// Whether the peer has accepted the handshake. A client completes it before the server has checked
/// the client's certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acceptance {
    /// The peer has sent nothing yet. A server sends its ticket with its first data at the latest,
    /// so it may have read a request.
    Unknown,
    /// The peer has sent data or a ticket.
    Accepted,
    /// The first record was an error alert: the peer has read no request.
    Rejected,
}

/// Buffers that a handshake passes to its session.
pub struct Buffered {
    /// Incomplete record.
    pub incoming: BytesMut,
    /// Last messages of the handshake.
    pub outgoing: BytesMut,
    /// Whether the peer has sent close_notify.
    pub peer_closed: bool,
}

impl Session {
    /// A session with the keys of a handshake. `None` for cipher suites that rustls does not have. TLS
    /// 1.2 has no key updates: a session of it ends with the last record of its key.
    pub fn new(kernel: Kernel, secrets: &ExtractedSecrets, buffered: Buffered) -> Option<Self> {
        let Buffered {
            incoming,
            outgoing,
            peer_closed,
        } = buffered;
        let version = match &kernel {
            Kernel::Client(kernel) => kernel.protocol_version(),
            Kernel::Server(kernel) => kernel.protocol_version(),
        };
        let is_tls12 = version == ProtocolVersion::TLSv1_2;
        Some(Self {
            kernel,
            sealer: Sealer::new(secrets.tx.0, &secrets.tx.1)?.of_version(is_tls12),
            opener: Opener::new(secrets.rx.0, &secrets.rx.1)?.of_version(is_tls12),
            incoming: if incoming.is_empty() {
                BytesMut::new()
            } else {
                incoming
            },
            outgoing,
            unreported: 0,
            delay_output: true,
            message: Vec::new(),
            key_update_requested: false,
            records_without_data: 0,
            // In TLS 1.2, the server sends the last message, unless it resumes a session.
            acceptance: if is_tls12 {
                Acceptance::Accepted
            } else {
                Acceptance::Unknown
            },
            peer_closed,
            closed: false,
        })
    }

    /// Reads until there is plaintext and passes it to `take`; an empty slice is the end. `scratch`
    /// receives the records.
    pub fn poll_read<T>(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut TcpStream,
        scratch: &mut [u8],
        take: impl FnOnce(&[u8], &mut Context<'_>) -> T,
    ) -> Poll<io::Result<T>> {
        // The peer may wait for pending output.
        if let Poll::Ready(Err(error)) = self.poll_flush(cx, stream) {
            return Poll::Ready(Err(error));
        }
        let read = |plain: &mut Vec<u8>| {
            loop {
                if self.peer_closed {
                    return Poll::Ready(Ok(take(&[], cx)));
                }
                let before = self.incoming.len();
                scratch[..before].copy_from_slice(&self.incoming);
                let mut buf = ReadBuf::new(&mut scratch[before..]);
                ready!(Pin::new(&mut *stream).poll_read(cx, &mut buf))?;
                let read = buf.filled().len();
                if read == 0 {
                    return Poll::Ready(Err(unexpected_eof()));
                }
                match self.open(&scratch[..before + read], plain) {
                    Ok(0) => {}
                    Ok(opened) => return Poll::Ready(Ok(take(&plain[..opened], cx))),
                    Err(error) => {
                        // Sends the alert, if the socket accepts it now.
                        let _ = self.poll_flush(cx, stream);
                        return Poll::Ready(Err(error));
                    }
                }
            }
        };
        PLAINTEXT.with(|buffer| buffer.with_buffer(0, read))
    }

    /// Whether an idle connection has received data, an end or an error. Handles tickets and key
    /// updates.
    pub fn has_received(&mut self, stream: &TcpStream, scratch: &mut [u8]) -> bool {
        loop {
            let before = self.incoming.len();
            scratch[..before].copy_from_slice(&self.incoming);
            match stream.try_read(&mut scratch[before..]) {
                Ok(read) if read > 0 => {
                    let opened = PLAINTEXT.with(|buffer| {
                        buffer.with_buffer(0, |plain| self.open(&scratch[..before + read], plain))
                    });
                    if !matches!(opened, Ok(0)) || self.peer_closed {
                        return true;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                _ => return true,
            }
        }
    }

    /// Seals a prefix of `data` and writes it. Ready when the socket has its records, so callers need
    /// no flush. Until then the records stay pending, and the next call must pass the same bytes.
    /// More bytes may follow them.
    pub fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut TcpStream,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.closed {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if !self.delay_output || self.outgoing.len() > MAX_DELAYED {
            ready!(self.poll_flush(cx, stream))?;
        }
        if self.unreported > data.len() {
            return Poll::Ready(Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a write to a TLS session does not continue the pending one",
            )));
        }
        if self.unreported > 0 {
            return Poll::Ready(Ok(std::mem::take(&mut self.unreported)));
        }
        let data = &data[..data.len().min(MAX_WRITE)];
        let write = |sealed: &mut Vec<u8>| {
            let mut filled = self.outgoing.len();
            sealed[..filled].copy_from_slice(&self.outgoing);
            self.outgoing = BytesMut::new();
            self.delay_output = false;
            for piece in data.chunks(MAX_PLAINTEXT) {
                filled += self.seal(ContentType::ApplicationData, piece, &mut sealed[filled..])?;
            }
            let mut rest = &sealed[..filled];
            while !rest.is_empty() {
                match Pin::new(&mut *stream).poll_write(cx, rest) {
                    Poll::Ready(Ok(written)) => rest = &rest[written..],
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending => {
                        self.outgoing = BytesMut::from(rest);
                        self.unreported = data.len();
                        return Poll::Pending;
                    }
                }
            }
            Poll::Ready(Ok(data.len()))
        };
        SEALED.with(|buffer| buffer.with_buffer(MAX_SEALED, write))
    }

    /// Writes pending output.
    pub fn poll_flush(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut TcpStream,
    ) -> Poll<io::Result<()>> {
        self.delay_output = false;
        while !self.outgoing.is_empty() {
            let written = ready!(Pin::new(&mut *stream).poll_write(cx, &self.outgoing))?;
            self.outgoing.advance(written);
        }
        if self.outgoing.capacity() > 0 {
            self.outgoing = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }

    /// Sends close_notify and half-closes the socket.
    pub fn poll_shutdown(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut TcpStream,
    ) -> Poll<io::Result<()>> {
        self.send_alert(Alert::CloseNotify);
        ready!(self.poll_flush(cx, stream))?;
        Pin::new(stream).poll_shutdown(cx)
    }

    /// Whether the peer has accepted the handshake.
    pub fn acceptance(&self) -> Acceptance {
        self.acceptance
    }

    /// The size of the buffers that the session owns.
    pub fn buffered(&self) -> usize {
        self.incoming.capacity() + self.outgoing.capacity() + self.message.capacity()
    }

    /// Whether no output is pending.
    pub fn is_flushed(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// Opens all complete records, keeps an incomplete one, and returns the length of the plaintext
    /// in `plain`. Handles messages other than data; queues an alert if a record is invalid.
    pub fn open(&mut self, mut sealed: &[u8], plain: &mut Vec<u8>) -> io::Result<usize> {
        if plain.len() < sealed.len() {
            plain.resize(sealed.len(), 0);
        }
        let mut filled = 0;
        let result = loop {
            match self.opener.split(sealed) {
                Ok(Some((record, rest))) if !self.peer_closed => {
                    sealed = rest;
                    match self.open_one(record, &mut plain[filled..]) {
                        Ok(opened) => filled += opened,
                        Err(error) => break Err(error),
                    }
                }
                Ok(_) => break Ok(filled),
                Err(error) => break Err(error),
            }
        };
        // Bytes after close_notify are ignored.
        self.incoming = if sealed.is_empty() || self.peer_closed {
            BytesMut::new()
        } else {
            BytesMut::from(sealed)
        };
        result.map_err(|RecordError(alert, reason)| {
            self.send_alert(alert);
            io::Error::new(io::ErrorKind::InvalidData, reason)
        })
    }

    fn open_one(&mut self, record: &[u8], out: &mut [u8]) -> Result<usize, RecordError> {
        let (content_type, length) = self.opener.open(record, out)?;
        // Handshake messages must not be interleaved with other records (section 5.1).
        if !self.message.is_empty() && content_type != ContentType::Handshake {
            return Err(RecordError(
                Alert::UnexpectedMessage,
                "peer interleaved a handshake message with another record",
            ));
        }
        self.records_without_data = if content_type == ContentType::ApplicationData && length > 0 {
            0
        } else {
            self.records_without_data.saturating_add(1)
        };
        if self.records_without_data > MAX_RECORDS_WITHOUT_DATA {
            return Err(RecordError(
                Alert::UnexpectedMessage,
                "peer sent too many records without data",
            ));
        }
        if content_type != ContentType::Alert {
            self.acceptance = Acceptance::Accepted;
        }
        match content_type {
            ContentType::ApplicationData => Ok(length),
            ContentType::Handshake => {
                self.message.extend_from_slice(&out[..length]);
                self.handle_post_handshake()?;
                Ok(0)
            }
            ContentType::Alert => match out[..length] {
                // user_canceled precedes close_notify (section 6.1).
                [_, 90] => Ok(0),
                [_, 0] => {
                    self.peer_closed = true;
                    Ok(0)
                }
                [_, description] => {
                    if self.acceptance == Acceptance::Unknown {
                        self.acceptance = Acceptance::Rejected;
                    }
                    Err(RecordError(Alert::CloseNotify, alert_text(description)))
                }
                _ => Err(RecordError(Alert::DecodeError, "invalid alert")),
            },
        }
    }

    /// Handles complete handshake messages (sections 4.6.1 and 4.6.3).
    fn handle_post_handshake(&mut self) -> Result<(), RecordError> {
        const UNEXPECTED: RecordError = RecordError(
            Alert::UnexpectedMessage,
            "peer sent an unexpected post-handshake message",
        );
        let mut message = std::mem::take(&mut self.message);
        let mut rest = &message[..];
        while let Some((&[kind, high, middle, low], body)) = rest.split_first_chunk::<4>() {
            let length = u32::from_be_bytes([0, high, middle, low]) as usize;
            if length > MAX_HANDSHAKE_MESSAGE {
                return Err(RecordError(
                    Alert::DecodeError,
                    "handshake message exceeds the maximum length",
                ));
            }
            let Some((body, after)) = body.split_at_checked(length) else {
                break;
            };
            rest = after;
            match (kind, &mut self.kernel, body) {
                (NEW_SESSION_TICKET, Kernel::Client(kernel), ticket) => {
                    kernel
                        .handle_new_session_ticket(ticket)
                        .map_err(|_| RecordError(Alert::DecodeError, "invalid session ticket"))?;
                }
                // The key changes with the next record, so nothing may follow in this one.
                (KEY_UPDATE, _, [request @ (0 | 1)]) if rest.is_empty() => {
                    self.update_receive_key(*request == 1)?
                }
                _ => return Err(UNEXPECTED),
            }
        }
        let handled = message.len() - rest.len();
        if handled < message.len() {
            // Moves only bytes of the last record: the cost of a message is linear in its size.
            message.drain(..handled);
            self.message = message;
        }
        Ok(())
    }

    fn update_receive_key(&mut self, request: bool) -> Result<(), RecordError> {
        self.key_update_requested |= request;
        let next = match &mut self.kernel {
            Kernel::Client(kernel) => kernel.update_rx_secret(),
            Kernel::Server(kernel) => kernel.update_rx_secret(),
        };
        let opener = next
            .ok()
            .and_then(|(used, secrets)| Opener::new(used, &secrets));
        self.opener = opener.ok_or(RecordError(Alert::InternalError, "key update failed"))?;
        Ok(())
    }

    /// Seals one record into `out`, preceded by a key update if one is due.
    pub fn seal(
        &mut self,
        content_type: ContentType,
        plain: &[u8],
        out: &mut [u8],
    ) -> io::Result<usize> {
        let mut filled = 0;
        if self.key_update_requested || self.sealer.needs_key_update() {
            filled = self
                .sealer
                .seal(ContentType::Handshake, &[KEY_UPDATE, 0, 0, 1, 0], out)
                .map_err(internal)?;
            let next = match &mut self.kernel {
                Kernel::Client(kernel) => kernel.update_tx_secret(),
                Kernel::Server(kernel) => kernel.update_tx_secret(),
            };
            let sealer = next
                .ok()
                .and_then(|(used, secrets)| Sealer::new(used, &secrets));
            self.sealer = sealer.ok_or_else(|| io::Error::other("key update failed"))?;
            self.key_update_requested = false;
        }
        Ok(filled
            + self
                .sealer
                .seal(content_type, plain, &mut out[filled..])
                .map_err(internal)?)
    }

    /// Queues an alert, after which nothing can be written.
    fn send_alert(&mut self, alert: Alert) {
        const WARNING: u8 = 1;
        const FATAL: u8 = 2;
        if self.closed {
            return;
        }
        self.closed = true;
        let level = if alert == Alert::CloseNotify {
            WARNING
        } else {
            FATAL
        };
        let mut record = [0; 128];
        if let Ok(length) = self.seal(ContentType::Alert, &[level, alert as u8], &mut record) {
            self.outgoing.extend_from_slice(&record[..length]);
        }
    }
}

/// The alerts that a peer sends if it rejects a certificate (RFC 8446, section 6.2).
fn alert_text(description: u8) -> &'static str {
    match description {
        42 => "peer sent the alert bad_certificate",
        43 => "peer sent the alert unsupported_certificate",
        44 => "peer sent the alert certificate_revoked",
        45 => "peer sent the alert certificate_expired",
        46 => "peer sent the alert certificate_unknown",
        48 => "peer sent the alert unknown_ca",
        49 => "peer sent the alert access_denied",
        116 => "peer sent the alert certificate_required",
        _ => "peer sent an alert",
    }
}

fn internal(RecordError(_, reason): RecordError) -> io::Error {
    io::Error::other(reason)
}

#[cfg(test)]
mod testing;
