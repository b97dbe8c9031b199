//! The limits of one caller: connections, calls and bytes at the same time. A caller is a pod, by
//! its UID, or else a user. It is never an address: a gateway or a node that translates addresses
//! is one address of many callers.
//!
//! Subscriptions, and answers that are not sent yet, are charged in bytes to the slot of their
//! connection, in the tree of `crates/runtime/src/admission.rs`: to the pod within its namespace. A
//! caller may have what is free of the budget of the replica, and when all is in use its share. Beyond
//! that it is refused, and keeps what it has. Nothing ends: a proxy subscribes again to all that it had
//! as soon as it has lost its connection, so callers that end each other's connections never stop. The
//! cost is that a caller below its share may be refused when callers of several namespaces have used up
//! twice the budget.

mod log;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use diy_mesh_control_plane::tls::{ConnectionSlot, Connections, connections};
pub use log::Lines;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tonic::Status;

use crate::authenticate::Caller;

/// The maximum number of connections of a replica. A proxy has one or two.
const MAX_ALL_CONNECTIONS: usize = 50_000;
/// A proxy has one or two.
pub const MAX_CONNECTIONS: usize = 16;
/// A proxy has two or three: streams, and requests for certificates.
pub const MAX_CALLS: usize = 16;
/// Calls of a caller that fail at once, and the time after which a further one may fail. Beyond that,
/// its calls are refused without work.
const MAX_FAILURES: u32 = 20;
const FAILURE_INTERVAL: Duration = Duration::from_secs(1);
/// The memory of a subscription whose state is not shared, such as the state of an unknown address;
/// also the memory of a Service in WatchServices.
pub const SUBSCRIPTION_BYTES: usize = 2048;
/// Subscriptions of a stream, far more than the destinations of a pod. Locks are held while all of
/// them end.
pub const MAX_SUBSCRIPTIONS: usize = 10_000;
/// The budget of a replica for subscriptions and answers. Shares come on top of it, at most as much again.
const BUDGET_BYTES: usize = 256 * 1024 * 1024;

/// The quotas of all callers with open calls or connections. Cheap to clone.
#[derive(Clone)]
pub struct Quotas {
    callers: Arc<Mutex<HashMap<Arc<str>, Weak<Quota>>>>,
    connections: Arc<Connections>,
    lines: Lines,
}

impl Default for Quotas {
    fn default() -> Self {
        Quotas::new(BUDGET_BYTES)
    }
}

/// A place in a quota, until it is dropped. Keeps the quota in use.
pub struct Counted(
    #[expect(dead_code)] OwnedSemaphorePermit,
    #[expect(dead_code)] Arc<Quota>,
);

/// The quota of one caller.
#[derive(Debug)]
pub struct Quota {
    connections: Arc<Semaphore>,
    calls: Arc<Semaphore>,
    /// The namespace and the UID of the pod. Callers without a pod share one holder.
    holder: (Arc<str>, Arc<str>),
    failures: Mutex<Failures>,
}

/// A bucket of tokens: each failed call takes one.
#[derive(Debug)]
struct Failures {
    left: u32,
    /// The time of the latest token.
    refilled: Instant,
}

/// Bytes that a connection holds, which are charged until they are dropped.
#[derive(Debug)]
pub struct Charge {
    slot: Arc<ConnectionSlot>,
    bytes: usize,
}

impl Charge {
    /// Nothing yet, of this connection.
    pub fn new(slot: Arc<ConnectionSlot>) -> Charge {
        Charge { slot, bytes: 0 }
    }

    /// A further charge of the same connection, of nothing yet.
    pub fn beside(&self) -> Charge {
        Charge::new(self.slot.clone())
    }

    /// Charges further bytes, if the caller may have them.
    pub fn add(&mut self, bytes: usize) -> Result<(), Status> {
        self.change(&mut 0, bytes)
    }

    /// Gives bytes back.
    pub fn remove(&mut self, bytes: usize) {
        // Never fails: it does not grow.
        let _ = self.change(&mut { bytes }, 0);
    }

    /// Changes a part of the charge, unless it grows and the caller may not have more.
    pub fn change(&mut self, part: &mut usize, to: usize) -> Result<(), Status> {
        if !self.slot.hold_share(*part, to) {
            return Err(Status::resource_exhausted(format!(
                "the subscriptions and answers of all pods take more than {} MiB, the budget of \
                 this replica, and this pod has its share; unsubscribe from idle destinations, \
                 read answers, or add replicas",
                BUDGET_BYTES / 1024 / 1024
            )));
        }
        self.bytes = self.bytes - *part + to;
        *part = to;
        Ok(())
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.remove(self.bytes);
    }
}

/// The charges of a call's responses, until their encoded bytes are known. hyper reads a response
/// ahead of what it sends, and keeps what it has read: only the bytes know when they have been sent.
#[derive(Clone, Debug, Default)]
pub struct Unsent(Arc<Mutex<Vec<Charge>>>);

impl Unsent {
    /// Adds the charge of a response, which is encoded next.
    pub fn push(&self, charge: Charge) {
        self.lock().push(charge);
    }

    /// The encoded bytes of these responses, which are charged until they have been sent.
    pub fn attach(&self, bytes: Bytes) -> Bytes {
        let charges = std::mem::take(&mut *self.lock());
        if charges.is_empty() {
            bytes
        } else {
            Bytes::from_owner(Charged { bytes, charges })
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Charge>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Charged {
    bytes: Bytes,
    #[expect(dead_code)]
    charges: Vec<Charge>,
}

impl AsRef<[u8]> for Charged {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Quotas {
    /// Quotas with a budget of this many bytes.
    fn new(budget: usize) -> Quotas {
        // An eighth of the bytes is for what ends.
        let bytes = budget * 8 / 7;
        Quotas {
            callers: Arc::default(),
            connections: connections(MAX_ALL_CONNECTIONS, bytes),
            lines: Lines::default(),
        }
    }

    /// The slots of all connections.
    pub fn connections(&self) -> &Arc<Connections> {
        &self.connections
    }

    /// The log lines about callers.
    pub fn lines(&self) -> &Lines {
        &self.lines
    }

    /// The charged bytes of all callers, and the budget.
    pub fn charged(&self) -> (usize, usize) {
        let connections = &self.connections;
        (connections.used_bytes(&[]), connections.max_bytes())
    }

    /// The quota of a caller, which its calls and connections share.
    pub fn of(&self, caller: &Caller) -> Arc<Quota> {
        let pod = caller.pod.as_ref().map(|pod| &pod.uid);
        let key = pod.unwrap_or(&caller.user);
        let mut quotas = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(quota) = quotas.get(key).and_then(Weak::upgrade) {
            return quota;
        }
        if quotas.len() == quotas.capacity() {
            quotas.retain(|_, quota| quota.strong_count() > 0);
        }
        let holder = caller.pod.as_ref();
        let holder = holder.map(|pod| (pod.namespace.clone(), pod.uid.clone()));
        let quota = Arc::new(Quota {
            connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
            calls: Arc::new(Semaphore::new(MAX_CALLS)),
            holder: holder.unwrap_or_else(|| ("".into(), "".into())),
            failures: Mutex::new(Failures {
                left: MAX_FAILURES,
                refilled: Instant::now(),
            }),
        });
        quotas.insert(key.clone(), Arc::downgrade(&quota));
        quota
    }
}

impl Quota {
    /// Who holds what is shared: a namespace, and the UID of a pod in it.
    pub fn holder(&self) -> &(Arc<str>, Arc<str>) {
        &self.holder
    }

    /// Counts a connection.
    pub fn connection(self: &Arc<Self>) -> Result<Counted, Status> {
        let permit = self.connections.clone().try_acquire_owned();
        let permit =
            permit.map_err(|_| exhausted(MAX_CONNECTIONS, "connections", "close idle ones"))?;
        Ok(Counted(permit, self.clone()))
    }

    /// Counts a call.
    pub fn call(self: &Arc<Self>) -> Result<Counted, Status> {
        let permit = self.calls.clone().try_acquire_owned();
        let permit = permit.map_err(|_| exhausted(MAX_CALLS, "open calls", "end some of them"))?;
        Ok(Counted(permit, self.clone()))
    }

    /// Refuses a call if too many have failed of late.
    pub fn check_failures(&self) -> Result<(), Status> {
        if self.failures().left > 0 {
            return Ok(());
        }
        Err(Status::resource_exhausted(format!(
            "the last {MAX_FAILURES} calls of this pod or user have failed; try again in a few seconds"
        )))
    }

    /// A call has failed.
    pub fn record_failure(&self) {
        let mut failures = self.failures();
        failures.left = failures.left.saturating_sub(1);
    }

    fn failures(&self) -> MutexGuard<'_, Failures> {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let since = now.duration_since(failures.refilled);
        let new = (since.as_nanos() / FAILURE_INTERVAL.as_nanos()).min(MAX_FAILURES.into());
        let new = u32::try_from(new).unwrap_or(MAX_FAILURES);
        if new > 0 {
            failures.left = (failures.left + new).min(MAX_FAILURES);
            failures.refilled = now;
        }
        failures
    }
}

fn exhausted(limit: usize, items: &str, remedy: &str) -> Status {
    Status::resource_exhausted(format!(
        "this pod or user has {limit} {items}, the maximum; {remedy}"
    ))
}

#[cfg(test)]
pub mod testing {
    //! Connections without a server.

    use diy_mesh_control_plane::tls::Holder;

    use super::*;

    impl Quotas {
        /// Quotas with a budget for this number of subscriptions.
        pub fn with_subscriptions(count: usize) -> Quotas {
            Quotas::new(count * SUBSCRIPTION_BYTES)
        }

        /// A connection of a pod, which holds nothing yet.
        pub fn connect(&self, namespace: &str, uid: &str) -> Charge {
            let holder = [Holder::Namespace(namespace.into()), Holder::Pod(uid.into())];
            let slot = self.connections.admit(&holder).expect("a slot is free");
            Charge::new(Arc::new(slot))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::PodRef;

    fn caller(user: &str, uid: Option<&str>) -> Caller {
        Caller {
            user: user.into(),
            pod: uid.map(|uid| PodRef {
                namespace: "shop".into(),
                name: "web".into(),
                uid: uid.into(),
            }),
        }
    }

    #[test]
    fn quotas_belong_to_pods_or_users_while_in_use() {
        let quotas = Quotas::default();
        let pod = quotas.of(&caller("web", Some("1")));
        let address = Arc::as_ptr(&pod);
        assert!(Arc::ptr_eq(&pod, &quotas.of(&caller("other", Some("1")))));
        assert!(!Arc::ptr_eq(&pod, &quotas.of(&caller("web", Some("2")))));
        assert!(!Arc::ptr_eq(&pod, &quotas.of(&caller("web", None))));
        for uid in 0..10_000 {
            quotas.of(&caller("web", Some(&uid.to_string())));
        }
        let connection = pod.connection().unwrap();
        drop(pod);
        assert!(
            quotas.callers.lock().unwrap().len() < 100,
            "unused ones are removed"
        );
        assert_eq!(Arc::as_ptr(&quotas.of(&caller("web", Some("1")))), address);
        drop(connection);
    }

    #[tokio::test(start_paused = true)]
    async fn calls_are_refused_after_many_that_failed() {
        let quota = Quotas::default().of(&caller("web", Some("1")));
        for _ in 0..MAX_FAILURES {
            quota.check_failures().unwrap();
            quota.record_failure();
        }
        let refused = quota.check_failures().unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        tokio::time::advance(FAILURE_INTERVAL).await;
        quota.check_failures().unwrap();
        quota.record_failure();
        quota.check_failures().unwrap_err();
        tokio::time::advance(FAILURE_INTERVAL * 1000).await;
        (0..MAX_FAILURES).for_each(|_| quota.record_failure());
        quota.check_failures().unwrap_err();
    }

    #[test]
    fn caller_may_have_what_is_free_and_else_its_share() {
        let quotas = Quotas::with_subscriptions(1200);
        // Twenty pods of one namespace take all.
        let mut hostile: Vec<Charge> = (0..20)
            .map(|uid| quotas.connect("hostile", &uid.to_string()))
            .collect();
        for one in &mut hostile {
            one.add(60 * SUBSCRIPTION_BYTES).unwrap();
        }
        for one in &mut hostile {
            assert_eq!(
                one.add(SUBSCRIPTION_BYTES).unwrap_err().code(),
                tonic::Code::ResourceExhausted
            );
        }
        // Pods of other namespaces have their shares nevertheless.
        let mut shop = ["a", "b"].map(|uid| quotas.connect("shop", uid));
        shop[0].add(300 * SUBSCRIPTION_BYTES).unwrap();
        shop[1].add(300 * SUBSCRIPTION_BYTES).unwrap();
        assert!(shop[1].add(SUBSCRIPTION_BYTES).is_err());
        let mut other = quotas.connect("other", "c");
        other.add(400 * SUBSCRIPTION_BYTES).unwrap();
        assert!(other.add(SUBSCRIPTION_BYTES).is_err());
        assert!(hostile[0].add(SUBSCRIPTION_BYTES).is_err());
        assert_eq!(
            quotas.charged(),
            (2200 * SUBSCRIPTION_BYTES, 1200 * SUBSCRIPTION_BYTES)
        );
        // The bytes of ended streams are free for all.
        hostile.truncate(1);
        drop((shop, other));
        hostile[0].add(100 * SUBSCRIPTION_BYTES).unwrap();
        drop(hostile);
        assert_eq!(quotas.charged().0, 0);
    }

    /// A pod that subscribes to what it meets, and again after it has lost its connection.
    struct Pod {
        namespace: usize,
        uid: String,
        wanted: usize,
        held: usize,
        charge: Option<Charge>,
    }

    impl Pod {
        /// Subscribes to one more destination. Whether it got it.
        fn subscribe(&mut self, quotas: &Quotas) -> bool {
            let namespace = format!("n{}", self.namespace);
            let connect = || quotas.connect(&namespace, &self.uid);
            let charge = self.charge.get_or_insert_with(connect);
            assert!(!charge.slot.is_asked_to_end(), "nothing ends");
            let is_held = self.held < self.wanted && charge.add(SUBSCRIPTION_BYTES).is_ok();
            self.held += usize::from(is_held);
            is_held
        }

        fn disconnect(&mut self) {
            (self.charge, self.held) = (None, 0);
        }
    }

    /// One round of all pods, in random order, in the five seconds between two requests for refused
    /// resources. Returns whether something has changed.
    fn round(pods: &mut [Pod], quotas: &Quotas, random: &mut fastrand::Rng) -> bool {
        let held = |pods: &[Pod]| pods.iter().map(|pod| pod.held).sum::<usize>();
        let before = held(pods);
        let mut asking: Vec<usize> = (0..pods.len()).collect();
        while !asking.is_empty() {
            let next = random.usize(..asking.len());
            let some = random.usize(1..40);
            if !(0..some).all(|_| pods[asking[next]].subscribe(quotas)) {
                asking.swap_remove(next);
            }
        }
        held(pods) != before
    }

    #[test]
    fn random_pods_settle_and_have_what_is_free_or_their_share() {
        let (mut refused, mut beyond) = (0, 0);
        for seed in 0..100 {
            let mut random = fastrand::Rng::with_seed(seed);
            let (namespaces, budget) = (random.usize(1..8), random.usize(200..2000));
            let quotas = Quotas::with_subscriptions(budget);
            let mut pods: Vec<Pod> = (0..random.usize(2..40))
                .map(|uid| Pod {
                    namespace: random.usize(..namespaces),
                    uid: uid.to_string(),
                    wanted: 0,
                    held: 0,
                    charge: None,
                })
                .collect();
            for _ in 0..20 {
                for pod in &mut pods {
                    match random.u8(..6) {
                        0 => pod.disconnect(),
                        1 => pod.wanted = random.usize(..budget / 2),
                        _ => {}
                    }
                }
                round(&mut pods, &quotas, &mut random);
                let used: usize = pods.iter().map(|pod| pod.held).sum();
                assert_eq!(quotas.charged().0, used * SUBSCRIPTION_BYTES);
                assert!(used <= 2 * budget, "seed {seed}: {used} of {budget}");
            }
            // From now on, the demand of the pods stays. Pods without a connection come back.
            let lost = pods.iter_mut().filter(|_| random.bool());
            lost.for_each(Pod::disconnect);
            round(&mut pods, &quotas, &mut random);
            // Each has asked since all were there.
            round(&mut pods, &quotas, &mut random);
            assert!(!round(&mut pods, &quotas, &mut random), "seed {seed}");
            for pod in pods.iter().filter(|pod| pod.held < pod.wanted) {
                let of = |namespace| pods.iter().filter(move |one| one.namespace == namespace);
                let count = (0..namespaces).filter(|one| of(*one).count() > 0).count();
                let share = budget / count;
                let used: usize = pods.iter().map(|pod| pod.held).sum();
                let of_namespace: usize = of(pod.namespace).map(|pod| pod.held).sum();
                assert!(used + 1 > budget, "seed {seed}: some is free");
                let is_bounded =
                    used + 1 > 2 * budget || of_namespace + 1 > budget + share.min(budget / 2);
                let own_share = share / of(pod.namespace).count();
                assert!(
                    pod.held + 1 > own_share || is_bounded,
                    "seed {seed}: {} of {}, the share is {own_share}",
                    pod.held,
                    pod.wanted
                );
                refused += 1;
                beyond += usize::from(used > budget);
            }
        }
        assert!(refused > 500 && beyond > 500, "{refused} {beyond}");
    }
}
