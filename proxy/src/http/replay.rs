//! The start of a request's body, kept while another attempt may have to send it again: the same in
//! both versions of HTTP, with one bound.

use bytes::{Bytes, BytesMut};

/// The maximum number of bytes of one body that are kept. A request whose body is longer is not
/// sent again once a part of it was sent.
pub const MAX_REPLAY: usize = 16 * 1024;

/// The bytes of a body that were read so far, if they are within the bound.
pub struct Replay {
    /// The bytes that may still be kept. `None`: not everything is kept, or no attempt follows.
    left: Option<usize>,
    /// The first bytes are shared with the writer, further ones are copied.
    first: Bytes,
    rest: BytesMut,
}

impl Replay {
    /// Keeps a body, after a head of this length that is kept besides it.
    pub fn new(head: usize) -> Self {
        Self {
            left: Some(MAX_REPLAY + head),
            first: Bytes::new(),
            rest: BytesMut::new(),
        }
    }

    /// Keeps nothing.
    pub fn off() -> Self {
        Self {
            left: None,
            ..Self::new(0)
        }
    }

    /// Whether everything so far is kept.
    pub fn is_available(&self) -> bool {
        self.left.is_some()
    }

    /// Keeps the next bytes. Drops everything if they exceed the bound.
    pub fn keep(&mut self, bytes: &Bytes) {
        self.left = self.left.and_then(|left| left.checked_sub(bytes.len()));
        if self.left.is_none() {
            self.discard();
        } else if self.first.is_empty() {
            self.first = bytes.clone();
        } else {
            self.rest.extend_from_slice(bytes);
        }
    }

    /// Drops everything: no further attempt follows.
    pub fn discard(&mut self) {
        *self = Self::off();
    }

    /// The size of the bytes that are kept.
    pub fn buffered(&self) -> usize {
        self.first.len() + self.rest.capacity()
    }

    /// Everything so far, for another attempt, or `None` if it is not kept.
    pub fn bytes(&self) -> Option<Bytes> {
        self.left?;
        Some(if self.rest.is_empty() {
            self.first.clone()
        } else {
            [&self.first[..], &self.rest].concat().into()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_bytes_up_to_the_bound() {
        let mut replay = Replay::new(3);
        assert_eq!(replay.bytes().as_deref(), Some(&b""[..]));
        replay.keep(&Bytes::from_static(b"head"));
        replay.keep(&Bytes::from_static(b", body"));
        assert_eq!(replay.bytes().as_deref(), Some(&b"head, body"[..]));
        replay.keep(&vec![0; MAX_REPLAY + 3 - 10].into());
        assert_eq!(replay.bytes().map(|all| all.len()), Some(MAX_REPLAY + 3));
        replay.keep(&Bytes::from_static(b"x"));
        assert!(!replay.is_available() && replay.bytes().is_none());
        replay.keep(&Bytes::new());
        assert!(!replay.is_available(), "the start is gone");
    }
}
