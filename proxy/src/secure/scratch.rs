//! Scratch buffers shared by all connections of a worker thread. A buffer is taken out while in
//! use, so a nested use gets another one: unlike a borrow, it does not fail.

use std::cell::Cell;

/// One scratch buffer, for a `thread_local!`.
pub struct Scratch(Cell<Vec<u8>>);

impl Scratch {
    /// A buffer that is allocated at the first use.
    pub const fn new() -> Self {
        Self(Cell::new(Vec::new()))
    }

    /// Runs `work` with a buffer of at least `length` bytes and arbitrary content.
    pub fn with_buffer<T>(&self, length: usize, work: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let mut buffer = self.0.take();
        if buffer.len() < length {
            // A new zeroed allocation uses no memory until it is written; a resized one would.
            buffer = vec![0; length];
        }
        let result = work(&mut buffer);
        self.0.set(buffer);
        result
    }
}
