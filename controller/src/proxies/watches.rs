//! The namespaces whose traffic people watch: their proxies report it every second. Pure: the caller
//! passes the time.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

/// The time for which one call watches a namespace.
const WATCH_TIME: Duration = Duration::from_secs(15);
/// A watch is renewed when less of it is left.
const RENEW_BEFORE: Duration = Duration::from_secs(10);
/// Time between two notifications of the streams, which are notified all together.
const NOTIFY_INTERVAL: Duration = Duration::from_secs(2);

/// The watched namespaces.
#[derive(Debug, Default)]
pub(super) struct Watches {
    until: BTreeMap<String, Instant>,
    /// Some streams have not been notified.
    is_pending: bool,
    next_notification: Option<Instant>,
}

impl Watches {
    /// Watches a namespace with a proxy. Whether the streams are to be notified now: if it is too
    /// early, a later call does it.
    pub(super) fn renew(&mut self, namespace: &str, now: Instant) -> bool {
        self.until.retain(|_, until| *until > now);
        let left = |until: &Instant| *until - now;
        if self.until.get(namespace).map(left) <= Some(RENEW_BEFORE) {
            self.until.insert(namespace.to_owned(), now + WATCH_TIME);
            self.is_pending = true;
        }
        if !self.is_pending || self.next_notification.is_some_and(|at| now < at) {
            return false;
        }
        self.is_pending = false;
        self.next_notification = Some(now + NOTIFY_INTERVAL);
        true
    }

    /// The end of the watch of a namespace.
    pub(super) fn until(&self, namespace: &str) -> Option<Instant> {
        self.until.get(namespace).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_renew_a_watch_and_notify_seldom() {
        let start = Instant::now();
        let mut watches = Watches::default();
        let after = |milliseconds| start + Duration::from_millis(milliseconds);
        let end = |watches: &Watches, name| {
            let until = watches.until(name)?;
            Some(until.duration_since(start).as_millis())
        };
        assert!(watches.renew("shop", start));
        assert_eq!(
            (end(&watches, "shop"), end(&watches, "front")),
            (Some(15_000), None)
        );
        // Another namespace waits for the next call of anyone.
        assert!(!watches.renew("front", after(1_000)));
        assert!(!watches.renew("shop", after(1_900)));
        assert!(watches.renew("shop", after(2_000)));
        assert_eq!(
            (end(&watches, "shop"), end(&watches, "front")),
            (Some(15_000), Some(16_000))
        );
        let calls = (2_100..60_000).step_by(100);
        let notified = calls.filter(|at| watches.renew("shop", after(*at))).count();
        assert_eq!(notified, 11);
        // Nobody watches it any more.
        assert_eq!(end(&watches, "front"), None);
    }
}
