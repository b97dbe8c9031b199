//! The registry of connected proxies, with the status that they report on their Discover streams.
//! Forgets a proxy when its stream ends.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use bytes::Bytes;
use diy_mesh_proto::mesh::v1::ProxyStatus;

use crate::authenticate::{Caller, PodRef};
use crate::index::Index;
use crate::index::object::Key;

/// The registry. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Proxies(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    connected: BTreeMap<u64, ConnectedProxy>,
    last: u64,
}

/// A proxy with an open stream.
#[derive(Clone, Debug, PartialEq)]
pub struct ConnectedProxy {
    /// The pod, if the token is bound to one.
    pub pod: Option<PodRef>,
    /// The user name.
    pub user: Arc<str>,
    /// The start of the stream.
    pub connected_since: SystemTime,
    /// The latest status, if the proxy has reported one.
    pub status: Option<ProxyStatus>,
    /// The clock of the proxy ahead of that of the controller, in milliseconds, at that time.
    pub clock_skew: i64,
    /// The latest exceptions, encoded.
    pub exceptions: Bytes,
}

impl ConnectedProxy {
    /// The version of the roots that verify peers, or an empty text.
    pub fn roots_version(&self) -> &str {
        let status = self.status.as_ref();
        status.map_or("", |status| &status.roots_version)
    }

    /// The key identifier of the certificate's issuer, or an empty text.
    pub fn certificate_issuer(&self) -> &str {
        let status = self.status.as_ref();
        status.map_or("", |status| &status.certificate_issuer)
    }

    /// Whether it is the proxy of a meshed pod in the catalog. Every service account can open a
    /// stream; only these proxies have certificates that a rotation concerns.
    pub fn is_meshed(&self, index: &Index) -> bool {
        self.pod.as_ref().is_some_and(|pod| {
            let known = index.pod(&Key::new(&pod.namespace, &pod.name));
            known.is_some_and(|known| known.uid == pod.uid && known.identity.is_some())
        })
    }
}

impl fmt::Display for ConnectedProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.pod {
            Some(pod) => write!(f, "proxy {pod}"),
            None => write!(f, "proxy of {}", self.user),
        }
    }
}

impl Proxies {
    /// Adds a proxy until the guard is dropped.
    pub fn connect(&self, caller: &Caller, now: SystemTime) -> ConnectedGuard {
        let proxy = ConnectedProxy {
            pod: caller.pod.clone(),
            user: caller.user.clone(),
            connected_since: now,
            status: None,
            clock_skew: 0,
            exceptions: Bytes::new(),
        };
        let mut inner = self.lock();
        inner.last += 1;
        let id = inner.last;
        inner.connected.insert(id, proxy);
        drop(inner);
        ConnectedGuard {
            proxies: self.clone(),
            id,
        }
    }

    /// All proxies in the order of their connection. A proxy that replaces its stream may be listed
    /// twice.
    pub fn snapshot(&self) -> Vec<ConnectedProxy> {
        self.lock().connected.values().cloned().collect()
    }

    /// At most `count` of the proxies that connected after the one with the number `after` and
    /// match, with their numbers.
    pub fn page(
        &self,
        after: u64,
        count: usize,
        matches: impl Fn(&ConnectedProxy) -> bool,
    ) -> Vec<(u64, ConnectedProxy)> {
        let inner = self.lock();
        let later = inner
            .connected
            .range((Bound::Excluded(after), Bound::Unbounded));
        let matching = later.filter(|(_, proxy)| matches(proxy)).take(count);
        matching.map(|(id, proxy)| (*id, proxy.clone())).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes a proxy from the registry when it is dropped.
#[derive(Debug)]
pub struct ConnectedGuard {
    proxies: Proxies,
    id: u64,
}

impl fmt::Display for ConnectedGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.proxies.lock().connected.get(&self.id) {
            Some(proxy) => proxy.fmt(f),
            None => f.write_str("proxy"),
        }
    }
}

impl ConnectedGuard {
    /// Replaces the status of the proxy.
    pub fn update(&self, status: ProxyStatus, clock_skew: i64) {
        if let Some(proxy) = self.proxies.lock().connected.get_mut(&self.id) {
            (proxy.status, proxy.clock_skew) = (Some(status), clock_skew);
        }
    }

    /// The pod, if the token is bound to one.
    pub fn pod(&self) -> Option<PodRef> {
        self.proxies.lock().connected.get(&self.id)?.pod.clone()
    }

    /// Replaces the exceptions of the proxy, whose length the caller has checked.
    pub fn set_exceptions(&self, exceptions: Bytes) {
        if let Some(proxy) = self.proxies.lock().connected.get_mut(&self.id) {
            proxy.exceptions = exceptions;
        }
    }
}

impl Drop for ConnectedGuard {
    fn drop(&mut self) {
        self.proxies.lock().connected.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(roots_version: &str) -> ProxyStatus {
        ProxyStatus {
            roots_version: roots_version.into(),
            ..ProxyStatus::default()
        }
    }

    #[test]
    fn lists_proxies_with_their_latest_status_until_their_stream_ends() {
        let proxies = Proxies::default();
        let caller = |user: &str| Caller {
            user: user.into(),
            pod: None,
        };
        let (one, other) = (
            proxies.connect(&caller("one"), SystemTime::UNIX_EPOCH),
            proxies.connect(&caller("other"), SystemTime::UNIX_EPOCH),
        );
        one.update(status("1"), 0);
        one.update(status("2"), 0);
        let all = proxies.snapshot();
        assert_eq!(
            all.iter().map(|proxy| &*proxy.user).collect::<Vec<_>>(),
            ["one", "other"]
        );
        assert_eq!(
            (&all[0].status, &all[1].status),
            (&Some(status("2")), &None)
        );
        drop(one);
        assert_eq!(proxies.snapshot().len(), 1);
        drop(other);
        assert!(proxies.snapshot().is_empty());
    }

    #[test]
    fn names_proxies_by_pod_or_user() {
        let mut proxy = ConnectedProxy {
            pod: Some(PodRef {
                namespace: "shop".into(),
                name: "web".into(),
                uid: "uid".into(),
            }),
            user: "tool".into(),
            connected_since: SystemTime::UNIX_EPOCH,
            status: None,
            clock_skew: 0,
            exceptions: Bytes::new(),
        };
        assert_eq!(proxy.to_string(), "proxy shop/web");
        proxy.pod = None;
        assert_eq!(proxy.to_string(), "proxy of tool");
    }
}
