//! Bodies of HTTP/1 responses that no client gets: read, or read and dropped, so that the connection
//! can carry another exchange.

use std::future::poll_fn;
use std::time::Instant;

use bytes::BytesMut;

use super::body::Relay;
use super::head::{Framing, ResponseHead, Version};
use crate::http::answer::Incomplete;
use crate::http::discard::{MAX_DISCARD, in_background};
use crate::limits::memory::Charge;
use crate::secure::io::Io;
use crate::upstream::balance::Endpoint;
use crate::upstream::connect::Upstream;

/// Drops the body of a response to a request of this version, in whose place another attempt
/// follows, and returns the connection to the pool of the endpoint.
pub fn response(
    mut upstream: Upstream,
    request: Version,
    head: &ResponseHead,
    endpoint: &Endpoint,
    mut memory: Charge,
) {
    if !head.persists_after(request) || head.framing == Framing::UntilClose {
        return;
    }
    let (pool, mut body) = (endpoint.pool(), Body::new(head.framing));
    let checkin = move |mut io: Io| {
        if io.unread().is_empty() {
            pool.checkin_http1(io, Instant::now());
        }
    };
    // Most bodies are short, and have arrived with the head.
    match body.drop_read(&mut upstream.io) {
        Ok(true) => checkin(upstream.io),
        Ok(false) if memory.hold(upstream.io.buffered()).is_ok() => {
            in_background(memory, async move {
                if (body.drop_rest(&mut upstream.io, MAX_DISCARD).await).is_ok() {
                    checkin(upstream.io);
                }
            });
        }
        _ => {}
    }
}

/// A body that no client gets.
pub struct Body(Relay);

impl Body {
    /// A body with this framing.
    pub fn new(framing: Framing) -> Self {
        Self(Relay::new(framing, BytesMut::new(), true))
    }

    /// Drops what has been read of it. Returns whether that is all.
    fn drop_read(&mut self, io: &mut Io) -> Result<bool, String> {
        let dropped = self.0.drop_buffered(io.unread());
        dropped.map_err(|error| error.to_string())?;
        Ok(self.0.is_read())
    }

    /// Reads it to its end, if at most `left` bytes are left.
    pub async fn drop_rest(&mut self, io: &mut Io, mut left: usize) -> Result<(), String> {
        while !self.drop_read(io)? {
            io.acknowledge();
            let read = fill(io).await?;
            left = left.checked_sub(read).ok_or("it is too long")?;
        }
        Ok(())
    }

    /// Reads it to its end, and keeps its first `max` bytes. Fails if it has more.
    pub async fn read(
        mut self,
        io: &mut Io,
        max: usize,
        kept: &mut BytesMut,
    ) -> Result<(), Incomplete> {
        loop {
            let decoded = self.0.decode_buffered(io.unread(), &mut |data| {
                let left = max - kept.len();
                kept.extend_from_slice(&data[..data.len().min(left)]);
            });
            decoded.map_err(|error| Incomplete(error.to_string()))?;
            if self.0.pending().len() > max {
                return Err(Incomplete("it is too long".to_owned()));
            }
            if self.0.is_read() {
                return Ok(());
            }
            io.acknowledge();
            let read = poll_fn(|cx| io.poll_fill(cx)).await;
            if read.map_err(|error| Incomplete(error.to_string()))? == 0 {
                let ended = self.0.end_of_stream();
                ended.map_err(|error| Incomplete(error.to_string()))?;
            }
        }
    }
}

/// Reads once, at least one byte.
pub async fn fill(io: &mut Io) -> Result<usize, String> {
    match poll_fn(|cx| io.poll_fill(cx)).await {
        Ok(0) => Err("end of stream".to_owned()),
        Ok(read) => Ok(read),
        Err(error) => Err(error.to_string()),
    }
}
