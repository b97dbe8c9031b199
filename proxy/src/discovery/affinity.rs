//! Session affinity of a Service port: the endpoint that the requests of this pod keep.
//!
//! Kubernetes defines it per client address (`sessionAffinity: ClientIP`), and all clients of this
//! proxy are in one pod. The workers share the value.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The endpoint of the last request, and when it was used.
#[derive(Debug)]
pub struct Affinity {
    timeout: Duration,
    last: Mutex<Option<(SocketAddr, Instant)>>,
}

impl Affinity {
    /// Affinity that ends when `timeout` passes between two requests.
    pub fn new(timeout: Duration) -> Self {
        Self {
            timeout,
            last: Mutex::default(),
        }
    }

    /// Selects the endpoint of the last request if it is `usable`, else the result of `pick`, and
    /// keeps it.
    pub fn select<T>(
        &self,
        now: Instant,
        usable: impl FnOnce(SocketAddr) -> Option<T>,
        pick: impl FnOnce() -> Option<(SocketAddr, T)>,
    ) -> Option<T> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let is_recent = |at: Instant| now.saturating_duration_since(at) < self.timeout;
        let kept = last.filter(|(_, at)| is_recent(*at));
        let kept = kept.and_then(|(address, _)| Some((address, usable(address)?)));
        let (address, selected) = kept.or_else(pick)?;
        *last = Some((address, now));
        Some(selected)
    }
}

impl PartialEq for Affinity {
    fn eq(&self, other: &Self) -> bool {
        self.timeout == other.timeout
    }
}

impl Eq for Affinity {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_is_kept_while_it_is_usable_and_requests_follow_in_time() {
        let affinity = Affinity::new(Duration::from_secs(60));
        let start = Instant::now();
        let select = |seconds, usable: bool, next: u16| {
            affinity.select(
                start + Duration::from_secs(seconds),
                |address| usable.then(|| address.port()),
                || Some((SocketAddr::from(([10, 0, 0, 1], next)), next)),
            )
        };
        assert_eq!(select(0, true, 1), Some(1));
        assert_eq!(select(59, true, 2), Some(1));
        assert_eq!(select(118, true, 3), Some(1));
        assert_eq!(select(178, true, 4), Some(4), "too late");
        assert_eq!(select(179, false, 5), Some(5), "the endpoint is gone");
        assert_eq!(select(180, true, 6), Some(5));
        let none = affinity.select(start, |_| None, || None::<(SocketAddr, u16)>);
        assert_eq!(none, None);
        assert_eq!(select(181, true, 7), Some(5));
    }
}
