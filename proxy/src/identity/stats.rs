//! Counters of the identity: the main thread's task writes them, the admin server prints them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// What the admin server prints of the certificate.
#[derive(Debug, Default)]
pub struct IdentityStats {
    issued: AtomicU64,
    failed: AtomicU64,
    /// Seconds since 1970; 0: there was no certificate yet.
    not_after: AtomicU64,
}

impl IdentityStats {
    /// Certificates that were had.
    pub fn certificates(&self) -> u64 {
        self.issued.load(Ordering::Relaxed)
    }

    /// Tries that failed.
    pub fn failures(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// When the newest certificate ends or ended, in seconds since 1970; `None`: there was none yet.
    pub fn not_after(&self) -> Option<u64> {
        Some(self.not_after.load(Ordering::Relaxed)).filter(|time| *time > 0)
    }

    pub(super) fn issued(&self, not_after: SystemTime) {
        self.issued.fetch_add(1, Ordering::Relaxed);
        self.not_after.store(
            not_after
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs(),
            Ordering::Relaxed,
        );
    }

    pub(super) fn failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }
}
