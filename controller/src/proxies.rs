//! The registry of connected proxies, with what they report on their Discover streams. Forgets a proxy
//! when its stream ends.

mod watches;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use diy_mesh_proto::mesh::v1::ProxyStatus;
use tokio::time::Instant;

use crate::authenticate::Caller;
use crate::index::Index;
use crate::object::PodRef;
use watches::Watches;

/// The time for which a report of traffic counts: proxies send one every 10 seconds.
const MAX_TRAFFIC_AGE: Duration = Duration::from_secs(25);

/// The registry. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Proxies(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    connected: BTreeMap<u64, ConnectedProxy>,
    last: u64,
    watches: Watches,
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
    /// The clock of the proxy ahead of the clock of the controller, in milliseconds, at that time.
    pub clock_skew: i64,
    /// The latest exceptions, encoded.
    pub exceptions: Bytes,
    /// The latest traffic, encoded, and the time of its arrival.
    pub traffic: Option<(Bytes, Instant)>,
}

impl ConnectedProxy {
    /// The traffic that the proxy has reported in the latest interval about its own pod, encoded.
    pub fn traffic(&self, now: Instant) -> Option<(&PodRef, &Bytes)> {
        let (traffic, at) = self.traffic.as_ref()?;
        let is_current = now.saturating_duration_since(*at) <= MAX_TRAFFIC_AGE;
        Some((self.pod.as_ref().filter(|_| is_current)?, traffic))
    }

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
        let pod = self.pod.as_ref();
        pod.is_some_and(|pod| index.meshed_pod(pod).is_some())
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
            traffic: None,
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

    /// Watches the traffic of a namespace for some seconds, if a proxy there is connected. Whether all
    /// streams are to be woken now.
    pub fn watch(&self, namespace: &str, now: Instant) -> bool {
        let mut inner = self.lock();
        let mut pods = inner.connected.values().flat_map(|proxy| &proxy.pod);
        pods.any(|pod| *pod.namespace == *namespace) && inner.watches.renew(namespace, now)
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
    /// Changes what is known of the proxy.
    pub fn change(&self, change: impl FnOnce(&mut ConnectedProxy)) {
        if let Some(known) = self.proxies.lock().connected.get_mut(&self.id) {
            change(known);
        }
    }

    /// Records the latest status of the proxy, and how far its clock is ahead, in milliseconds.
    pub fn update(&self, status: ProxyStatus, clock_skew: i64) {
        self.change(|known| {
            known.status = Some(status);
            known.clock_skew = clock_skew;
        });
    }

    /// The pod, if the token is bound to one.
    pub fn pod(&self) -> Option<PodRef> {
        self.proxies.lock().connected.get(&self.id)?.pod.clone()
    }

    /// For a stream whose proxy reports traffic as often as it is told.
    pub fn watched(&self) -> Option<Watched> {
        Some(Watched {
            proxies: self.proxies.clone(),
            namespace: self.pod()?.namespace,
            told: None,
        })
    }
}

/// The watch of the namespace of a stream's proxy, and its end as told to the proxy.
#[derive(Debug)]
pub struct Watched {
    proxies: Proxies,
    namespace: Arc<str>,
    told: Option<Instant>,
}

impl Watched {
    /// The seconds for which the namespace is watched, if the proxy has not been told.
    pub fn next(&mut self, now: Instant) -> Option<u32> {
        let until = self.proxies.lock().watches.until(&self.namespace)?;
        if until <= now || self.told.replace(until) == Some(until) {
            return None;
        }
        u32::try_from((until - now).as_millis().div_ceil(1000)).ok()
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
            traffic: None,
        };
        assert_eq!(proxy.to_string(), "proxy shop/web");
        proxy.pod = None;
        assert_eq!(proxy.to_string(), "proxy of tool");
    }

    #[test]
    fn traffic_counts_while_it_is_recent_and_of_a_pod() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let pod = PodRef {
            namespace: "shop".into(),
            name: "web".into(),
            uid: "uid".into(),
        };
        for (pod, is_known) in [(Some(pod), true), (None, false)] {
            let proxies = Proxies::default();
            let caller = Caller {
                user: "user".into(),
                pod,
            };
            let proxy = proxies.connect(&caller, SystemTime::UNIX_EPOCH);
            let has_traffic = |now| proxies.snapshot()[0].traffic(now).is_some();
            assert!(!has_traffic(start));
            proxy.change(|known| known.traffic = Some((Bytes::from_static(b"1"), start)));
            assert_eq!(
                (has_traffic(after(25)), has_traffic(after(26))),
                (is_known, false)
            );
            proxy.change(|known| known.traffic = None);
            assert!(!has_traffic(after(1)));
        }
    }

    #[test]
    fn proxies_of_a_watched_namespace_are_told_once() {
        let now = Instant::now();
        let proxies = Proxies::default();
        let connect = |namespace: &str| {
            let caller = Caller {
                user: "user".into(),
                pod: Some(PodRef {
                    namespace: namespace.into(),
                    name: "web".into(),
                    uid: "uid".into(),
                }),
            };
            proxies.connect(&caller, SystemTime::UNIX_EPOCH)
        };
        let (shop, front) = (connect("shop"), connect("front"));
        let mut told = [&shop, &front].map(|proxy| proxy.watched().expect("it is of a pod"));
        assert!(!proxies.watch("elsewhere", now) && proxies.watch("shop", now));
        let mut next = |now| told.each_mut().map(|one| one.next(now));
        assert_eq!(next(now), [Some(15), None]);
        assert_eq!(next(now), [None, None]);
        let later = now + Duration::from_secs(9);
        assert!(proxies.watch("shop", later));
        assert_eq!(next(later), [Some(15), None]);
        assert_eq!(shop.watched().and_then(|mut new| new.next(later)), Some(15));
    }
}
