//! The proxies that are connected now: who they are, and what they last said of themselves. Beside
//! the Discover streams.
//!
//! It remembers nothing of a proxy that is gone, and decides nothing: who rotates the roots, and
//! people, read it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tokio::sync::watch;

use crate::authenticate::{Caller, PodRef};

/// The registry. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Proxies {
    inner: Arc<Mutex<Inner>>,
    changed: Arc<watch::Sender<()>>,
}

#[derive(Debug, Default)]
struct Inner {
    connected: HashMap<u64, ConnectedProxy>,
    next: u64,
}

/// A proxy whose stream is open.
#[derive(Clone, Debug, PartialEq)]
pub struct ConnectedProxy {
    /// Its pod, where its token is bound to one.
    pub pod: Option<PodRef>,
    /// Its user name.
    pub user: Arc<str>,
    /// Since when its stream is open.
    pub connected_since: SystemTime,
    /// What it last said of itself; none where it has not (yet).
    pub status: Option<Status>,
}

/// What a proxy says of itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Status {
    /// The version of the roots that it verifies its peers by.
    pub roots_version: String,
    /// From when its certificate is valid, in seconds since 1970.
    pub certificate_not_before: i64,
    /// Until when, in seconds since 1970.
    pub certificate_not_after: i64,
    /// Its certificate's serial number, hexadecimal.
    pub certificate_serial: String,
    /// The key identifier, hexadecimal, of the issuer of its certificate.
    pub certificate_issuer: String,
    /// Its version.
    pub proxy_version: String,
    /// How far its clock is ahead of ours, in milliseconds; behind: negative. The message's way
    /// here counts as behind.
    pub clock_skew: i64,
}

impl Proxies {
    /// Adds one, until the guard is dropped.
    pub fn connect(&self, caller: &Caller, now: SystemTime) -> ConnectedGuard {
        let proxy = ConnectedProxy {
            pod: caller.pod.clone(),
            user: caller.user.clone(),
            connected_since: now,
            status: None,
        };
        let mut inner = self.lock();
        inner.next += 1;
        let id = inner.next;
        inner.connected.insert(id, proxy);
        drop(inner);
        self.changed.send_replace(());
        ConnectedGuard {
            proxies: self.clone(),
            id,
        }
    }

    /// All of them now, in the order in which they came. One that is about to leave an old stream
    /// may be there twice.
    pub fn snapshot(&self) -> Vec<ConnectedProxy> {
        let mut all: Vec<_> = self
            .lock()
            .connected
            .iter()
            .map(|(id, proxy)| (*id, proxy.clone()))
            .collect();
        all.sort_unstable_by_key(|(id, _)| *id);
        all.into_iter().map(|(_, proxy)| proxy).collect()
    }

    /// Marked as changed whenever one comes, goes, or says something new.
    pub fn changed(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes a proxy from the registry when it is dropped.
#[derive(Debug)]
pub struct ConnectedGuard {
    proxies: Proxies,
    id: u64,
}

impl ConnectedGuard {
    /// Replaces the status of the proxy.
    pub fn update(&self, status: Status) {
        if let Some(proxy) = self.proxies.lock().connected.get_mut(&self.id) {
            proxy.status = Some(status);
        }
        self.proxies.changed.send_replace(());
    }
}

impl Drop for ConnectedGuard {
    fn drop(&mut self) {
        self.proxies.lock().connected.remove(&self.id);
        self.proxies.changed.send_replace(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(roots_version: &str) -> Status {
        Status {
            roots_version: roots_version.into(),
            certificate_not_before: 0,
            certificate_not_after: 0,
            certificate_serial: String::new(),
            certificate_issuer: String::new(),
            proxy_version: String::new(),
            clock_skew: 0,
        }
    }

    #[test]
    fn a_proxy_is_there_as_long_as_its_stream_and_says_the_latest() {
        let proxies = Proxies::default();
        let mut changed = proxies.changed();
        let caller = |user: &str| Caller {
            user: user.into(),
            pod: None,
        };
        let (one, other) = (
            proxies.connect(&caller("one"), SystemTime::UNIX_EPOCH),
            proxies.connect(&caller("other"), SystemTime::UNIX_EPOCH),
        );
        assert!(changed.has_changed().unwrap());
        changed.mark_unchanged();
        one.update(status("1"));
        one.update(status("2"));
        assert!(changed.has_changed().unwrap());
        let all = proxies.snapshot();
        assert_eq!(
            all.iter().map(|proxy| &*proxy.user).collect::<Vec<_>>(),
            ["one", "other"]
        );
        assert_eq!(
            (&all[0].status, &all[1].status),
            (&Some(status("2")), &None)
        );
        changed.mark_unchanged();
        drop(one);
        assert!(changed.has_changed().unwrap());
        assert_eq!(proxies.snapshot().len(), 1);
        drop(other);
        assert!(proxies.snapshot().is_empty());
    }
}
