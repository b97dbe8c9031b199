//! One TLS session over a socket, after its handshake: what is read is opened, what is written is sealed, between buffers that all
//! connections of a worker share. A session at rest keeps no more than a record that has not fully come, or one that the socket
//! has not fully taken. Beside data, the peer may send tickets, new keys, and the end (RFC 8446, sections 4.6 and 6).
//!
//! The handshake is rustls' (`handshake.rs`), and so is all that has to do with keys; records are `record.rs`.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use rustls::ExtractedSecrets;
use rustls::client::ClientConnectionData;
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::handshake::cut_off;
use super::record::{Alert, Broken, Kind, MOST_PLAIN, OVERHEAD, Opener, Sealer, split};
use crate::scratch::Scratch;

/// The most that one write seals, in plain bytes: eight full records.
const MOST: usize = 8 * MOST_PLAIN;
/// What may wait to go out with the next write, at most: the end of a handshake.
const HELD: usize = 16 * 1024;
/// What a handshake message may take before it has fully come: a ticket holds the peer's certificates.
const MOST_MESSAGE: usize = 64 * 1024;
/// Records without a byte of data that the peer may send in a row: empty ones, tickets, new keys.
const MAX_RECORDS_WITHOUT_DATA: u8 = 32;

/// What one write takes to the socket, at most.
const MAX_SEALED: usize = HELD + 10 * OVERHEAD + MOST;

const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;

thread_local! {
    /// Opened bytes on their way to whoever reads.
    static PLAIN: Scratch = const { Scratch::new() };
    /// Sealed bytes on their way to the socket.
    static SEALED: Scratch = const { Scratch::new() };
}

/// One side of a session.
pub struct Session {
    kernel: Kernel,
    sealer: Sealer,
    opener: Opener,
    /// Came from the socket: the beginning of a record.
    incoming: BytesMut,
    /// Still to go to the socket.
    outgoing: BytesMut,
    /// `outgoing` may wait for the next write.
    held: bool,
    /// The beginning of a handshake message.
    message: Vec<u8>,
    /// The peer wants this side to take a new key before it writes more.
    update_owed: bool,
    /// Records since the peer last sent data.
    without_data: u8,
    /// The peer has said that it writes no more.
    peer_ended: bool,
    /// So has this side.
    ended: bool,
}

/// What rustls still does for a session: it makes new keys, and keeps tickets.
pub enum Kernel {
    /// On the side that began.
    Client(KernelConnection<ClientConnectionData>),
    /// On the other side.
    Server(KernelConnection<ServerConnectionData>),
}

/// What a handshake leaves to its session.
pub struct Leftover {
    /// The beginning of a record.
    pub incoming: BytesMut,
    /// The handshake's last words.
    pub outgoing: BytesMut,
    /// The peer has said that it writes no more.
    pub peer_ended: bool,
}

impl Session {
    /// None for a suite that is not one of TLS 1.3's.
    pub fn new(kernel: Kernel, secrets: &ExtractedSecrets, leftover: Leftover) -> Option<Self> {
        let Leftover {
            incoming,
            outgoing,
            peer_ended,
        } = leftover;
        Some(Self {
            kernel,
            sealer: Sealer::new(secrets.tx.0, &secrets.tx.1)?,
            opener: Opener::new(secrets.rx.0, &secrets.rx.1)?,
            incoming: if incoming.is_empty() {
                BytesMut::new()
            } else {
                incoming
            },
            outgoing,
            held: true,
            message: Vec::new(),
            update_owed: false,
            without_data: 0,
            peer_ended,
            ended: false,
        })
    }

    /// Reads until there are plain bytes, and gives them to `take`; none are the end. `scratch` is for the sealed ones.
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
        let read = |plain: &mut Vec<u8>| {
            loop {
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
                match self.open(&scratch[..before + read], plain) {
                    Ok(0) => {}
                    Ok(opened) => return Poll::Ready(Ok(take(&plain[..opened], cx))),
                    Err(error) => {
                        // The peer is told why, if the socket takes it.
                        let _ = self.poll_flush(cx, stream);
                        return Poll::Ready(Err(error));
                    }
                }
            }
        };
        PLAIN.with(|place| place.lend(0, read))
    }

    /// Whether anything came that was not expected of a connection that nobody uses: bytes, an end, an error. Tickets and new
    /// keys are taken in.
    pub fn has_spoken(&mut self, stream: &TcpStream, scratch: &mut [u8]) -> bool {
        loop {
            let before = self.incoming.len();
            scratch[..before].copy_from_slice(&self.incoming);
            match stream.try_read(&mut scratch[before..]) {
                Ok(read) if read > 0 => {
                    let opened = PLAIN.with(|place| {
                        place.lend(0, |plain| self.open(&scratch[..before + read], plain))
                    });
                    if !matches!(opened, Ok(0)) || self.peer_ended {
                        return true;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                _ => return true,
            }
        }
    }

    /// Seals some of `data` and writes it. What the socket does not take now is kept, and counts as written.
    pub fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut TcpStream,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.ended {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if !self.held || self.outgoing.len() > HELD {
            ready!(self.poll_flush(cx, stream))?;
        }
        let data = &data[..data.len().min(MOST)];
        let write = |sealed: &mut Vec<u8>| {
            let mut filled = self.outgoing.len();
            sealed[..filled].copy_from_slice(&self.outgoing);
            self.outgoing = BytesMut::new();
            self.held = false;
            for piece in data.chunks(MOST_PLAIN) {
                filled += self.seal(Kind::Data, piece, &mut sealed[filled..])?;
            }
            let mut rest = &sealed[..filled];
            while !rest.is_empty() {
                match Pin::new(&mut *stream).poll_write(cx, rest) {
                    Poll::Ready(Ok(written)) => rest = &rest[written..],
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending => break,
                }
            }
            if !rest.is_empty() {
                self.outgoing = BytesMut::from(rest);
            }
            Poll::Ready(Ok(data.len()))
        };
        SEALED.with(|place| place.lend(MAX_SEALED, write))
    }

    /// Writes what is still to go out.
    pub fn poll_flush(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut TcpStream,
    ) -> Poll<io::Result<()>> {
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
    pub fn poll_shutdown(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut TcpStream,
    ) -> Poll<io::Result<()>> {
        self.say_last(Alert::CloseNotify);
        ready!(self.poll_flush(cx, stream))?;
        Pin::new(stream).poll_shutdown(cx)
    }

    /// Nothing waits to be written.
    pub fn is_flushed(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// Opens all records that have fully come, and keeps the beginning of the next: how many plain bytes there are in `plain` now.
    /// What the peer says beside data is heeded; where it can't be, an alert says so to the peer.
    pub fn open(&mut self, mut sealed: &[u8], plain: &mut Vec<u8>) -> io::Result<usize> {
        if plain.len() < sealed.len() {
            plain.resize(sealed.len(), 0);
        }
        let mut filled = 0;
        let result = loop {
            match split(sealed) {
                Ok(Some((record, rest))) if !self.peer_ended => {
                    sealed = rest;
                    match self.open_one(record, &mut plain[filled..]) {
                        Ok(opened) => filled += opened,
                        Err(broken) => break Err(broken),
                    }
                }
                Ok(_) => break Ok(filled),
                Err(broken) => break Err(broken),
            }
        };
        // What follows an end is nothing.
        self.incoming = if sealed.is_empty() || self.peer_ended {
            BytesMut::new()
        } else {
            BytesMut::from(sealed)
        };
        result.map_err(|Broken(alert, reason)| {
            self.say_last(alert);
            io::Error::new(io::ErrorKind::InvalidData, reason)
        })
    }

    fn open_one(&mut self, record: &[u8], out: &mut [u8]) -> Result<usize, Broken> {
        let (kind, length) = self.opener.open(record, out)?;
        // A message of the two ends to each other is in records of its own (section 5.1).
        if !self.message.is_empty() && kind != Kind::Handshake {
            return Err(Broken(
                Alert::UnexpectedMessage,
                "the peer interrupts its own message",
            ));
        }
        self.without_data = if kind == Kind::Data && length > 0 {
            0
        } else {
            self.without_data.saturating_add(1)
        };
        if self.without_data > MAX_RECORDS_WITHOUT_DATA {
            return Err(Broken(
                Alert::UnexpectedMessage,
                "the peer sends too many records without data",
            ));
        }
        match kind {
            Kind::Data => Ok(length),
            Kind::Handshake => {
                self.message.extend_from_slice(&out[..length]);
                self.handle_post_handshake()?;
                Ok(0)
            }
            Kind::Alert => match out[..length] {
                // "user_canceled" comes before an end, and says nothing more (section 6.1).
                [_, 90] => Ok(0),
                [_, 0] => {
                    self.peer_ended = true;
                    Ok(0)
                }
                [_, _] => Err(Broken(Alert::CloseNotify, "the peer broke the session off")),
                _ => Err(Broken(Alert::DecodeError, "an alert is not readable")),
            },
        }
    }

    /// Does what the handshake messages ask for that have fully come (sections 4.6.1 and 4.6.3).
    fn handle_post_handshake(&mut self) -> Result<(), Broken> {
        const UNEXPECTED: Broken = Broken(
            Alert::UnexpectedMessage,
            "the peer says what has no place after the handshake",
        );
        let mut message = std::mem::take(&mut self.message);
        let mut rest = &message[..];
        while let Some((&[kind, high, middle, low], body)) = rest.split_first_chunk::<4>() {
            let length = u32::from_be_bytes([0, high, middle, low]) as usize;
            if length > MOST_MESSAGE {
                return Err(Broken(Alert::DecodeError, "a message is too long"));
            }
            let Some((body, after)) = body.split_at_checked(length) else {
                break;
            };
            rest = after;
            match (kind, &mut self.kernel, body) {
                (NEW_SESSION_TICKET, Kernel::Client(kernel), ticket) => {
                    kernel
                        .handle_new_session_ticket(ticket)
                        .map_err(|_| Broken(Alert::DecodeError, "a ticket is not readable"))?;
                }
                // Its next record has the next key, so this must have been the record's last word.
                (KEY_UPDATE, _, [wants @ (0 | 1)]) if rest.is_empty() => {
                    self.take_peers_next_key(*wants == 1)?
                }
                _ => return Err(UNEXPECTED),
            }
        }
        let handled = message.len() - rest.len();
        if handled < message.len() {
            // Moves nothing but what the last record has brought, or each record would cost as much as all before it.
            message.drain(..handled);
            self.message = message;
        }
        Ok(())
    }

    fn take_peers_next_key(&mut self, owed: bool) -> Result<(), Broken> {
        self.update_owed |= owed;
        let next = match &mut self.kernel {
            Kernel::Client(kernel) => kernel.update_rx_secret(),
            Kernel::Server(kernel) => kernel.update_rx_secret(),
        };
        let opener = next
            .ok()
            .and_then(|(used, secrets)| Opener::new(used, &secrets));
        self.opener = opener.ok_or(Broken(Alert::InternalError, "there is no next key"))?;
        Ok(())
    }

    /// Seals one record into `out`; before it, where it is time, the message that a new key follows.
    pub fn seal(&mut self, kind: Kind, plain: &[u8], out: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        if self.update_owed || self.sealer.is_worn() {
            filled = self
                .sealer
                .seal(Kind::Handshake, &[KEY_UPDATE, 0, 0, 1, 0], out)
                .map_err(internal)?;
            let next = match &mut self.kernel {
                Kernel::Client(kernel) => kernel.update_tx_secret(),
                Kernel::Server(kernel) => kernel.update_tx_secret(),
            };
            let sealer = next
                .ok()
                .and_then(|(used, secrets)| Sealer::new(used, &secrets));
            self.sealer = sealer.ok_or_else(|| io::Error::other("there is no next key"))?;
            self.update_owed = false;
        }
        Ok(filled
            + self
                .sealer
                .seal(kind, plain, &mut out[filled..])
                .map_err(internal)?)
    }

    /// The last that this side says; what it says after that is nothing.
    fn say_last(&mut self, alert: Alert) {
        const WARNING: u8 = 1;
        const FATAL: u8 = 2;
        if self.ended {
            return;
        }
        self.ended = true;
        let level = if alert == Alert::CloseNotify {
            WARNING
        } else {
            FATAL
        };
        let mut last = [0; 128];
        if let Ok(length) = self.seal(Kind::Alert, &[level, alert as u8], &mut last) {
            self.outgoing.extend_from_slice(&last[..length]);
        }
    }
}

#[cfg(test)]
impl Session {
    /// The key is worn after so many records more.
    pub fn wear(&mut self, left: u64) {
        self.sealer.wear(left);
    }

    /// As if the peer had asked for a new key.
    pub fn owe_update(&mut self) {
        self.update_owed = true;
    }

    /// What has come of a handshake message.
    pub fn message(&self) -> &[u8] {
        &self.message
    }

    /// Adds a record to what is to go out, whatever it says.
    pub fn say(&mut self, kind: Kind, plain: &[u8]) {
        let mut records = vec![0; plain.len() + 2 * OVERHEAD + 5];
        let length = self.seal(kind, plain, &mut records).unwrap();
        self.outgoing.extend_from_slice(&records[..length]);
    }
}

fn internal(Broken(_, reason): Broken) -> io::Error {
    io::Error::other(reason)
}
