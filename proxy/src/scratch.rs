//! Scratch buffers that all connections of a worker thread share. A buffer leaves its place while it is in use, so a nested use finds
//! the place empty and gets a buffer of its own: unlike a borrow, it can't fail. It knows nothing of connections.

use std::cell::Cell;

/// The place of one scratch buffer, for a `thread_local!`.
pub struct Scratch(Cell<Vec<u8>>);

impl Scratch {
    /// A place whose buffer is allocated at the first use.
    pub const fn new() -> Self {
        Self(Cell::new(Vec::new()))
    }

    /// Runs `work` with a buffer of at least `length` bytes. Its content is whatever the last use has left.
    pub fn lend<T>(&self, length: usize, work: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let mut buffer = self.0.take();
        if buffer.len() < length {
            // The allocator's zero pages take no memory until they are written, which a resized buffer's would.
            buffer = vec![0; length];
        }
        let result = work(&mut buffer);
        self.0.set(buffer);
        result
    }
}
