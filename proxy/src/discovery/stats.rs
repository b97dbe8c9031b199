//! Counters of discovery: the main thread's task writes them, the admin server prints them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What the admin server prints of discovery.
#[derive(Debug)]
pub struct DiscoveryStats {
    started: Instant,
    pub(super) subscriptions: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) broken: AtomicU64,
    pub(super) reconnects: AtomicU64,
    pub(super) connected: AtomicBool,
    /// Milliseconds since `started`, plus one; 0: none came.
    last_message: AtomicU64,
}

impl DiscoveryStats {
    pub(super) fn new() -> Self {
        Self {
            started: Instant::now(),
            subscriptions: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            broken: AtomicU64::new(0),
            reconnects: AtomicU64::new(0),
            connected: AtomicBool::new(false),
            last_message: AtomicU64::new(0),
        }
    }

    /// Destinations that are subscribed to now.
    pub fn subscriptions(&self) -> u64 {
        self.subscriptions.load(Ordering::Relaxed)
    }

    /// Times that a destination was refused because too many were in use.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Things in the controller's answers that made no sense.
    pub fn broken(&self) -> u64 {
        self.broken.load(Ordering::Relaxed)
    }

    /// Tries to open the stream after the first one.
    pub fn reconnects(&self) -> u64 {
        self.reconnects.load(Ordering::Relaxed)
    }

    /// Whether the stream stands.
    pub fn connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }

    /// How long ago the controller last sent an answer; `None`: never.
    pub fn last_message_age(&self) -> Option<Duration> {
        let at = self.last_message.load(Ordering::Relaxed).checked_sub(1)?;
        Some(
            self.started
                .elapsed()
                .saturating_sub(Duration::from_millis(at)),
        )
    }

    /// An answer came.
    pub(super) fn note_message(&self) {
        let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX - 1);
        self.last_message.store(now + 1, Ordering::Relaxed);
    }
}
