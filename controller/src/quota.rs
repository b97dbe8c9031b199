//! What one caller may hold at the same time: connections, calls and subscriptions. A caller is a
//! pod, by its UID, or else a user. Never an address: a gateway or a node that translates addresses
//! is one address of many callers.
//!
//! Subscriptions, and answers that are not sent yet, are charged in bytes. A caller may have what is
//! free of the budget of the replica. When nothing is free, it may have its share: the budget,
//! divided by the namespaces of callers and by the callers in its own.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;

use crate::authenticate::Caller;

/// A proxy has one or two.
pub const MAX_CONNECTIONS: usize = 16;
/// A proxy has two or three: streams, and requests for certificates.
pub const MAX_CALLS: usize = 16;
/// The memory of a subscription, also of a name of a Service in WatchServices.
pub const SUBSCRIPTION_BYTES: usize = 1024;
/// Subscriptions of a stream, far more than the destinations of a pod. Locks are held while all of
/// them end.
pub const MAX_SUBSCRIPTIONS: usize = 10_000;
/// The budget of a replica for subscriptions and answers. Shares come on top of it, at most as much again.
const BUDGET_BYTES: usize = 256 * 1024 * 1024;

/// The quotas of all callers with open calls or connections. Cheap to clone.
#[derive(Clone)]
pub struct Quotas {
    callers: Arc<Mutex<HashMap<Arc<str>, Weak<Quota>>>>,
    budget: Arc<Budget>,
}

impl Default for Quotas {
    fn default() -> Self {
        Quotas {
            callers: Arc::default(),
            budget: Arc::new(Budget::new(BUDGET_BYTES)),
        }
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
    budget: Arc<Budget>,
    /// The namespace and the UID of the pod. Callers without a pod share one holder.
    holder: (Arc<str>, Arc<str>),
}

/// The bytes that callers share.
#[derive(Debug)]
struct Budget {
    bytes: usize,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    all: usize,
    /// By namespace and caller, without zeros.
    by_holder: HashMap<Arc<str>, HashMap<Arc<str>, usize>>,
}

impl Budget {
    fn new(bytes: usize) -> Budget {
        let used = Mutex::default();
        Budget { bytes, used }
    }

    /// Whether the holder may have these bytes more.
    fn take(&self, (namespace, caller): &(Arc<str>, Arc<str>), bytes: usize) -> bool {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let is_free = used.all + bytes <= self.bytes;
        let of_namespace = used.by_holder.get(namespace);
        let own = of_namespace
            .and_then(|callers| callers.get(caller))
            .copied();
        let namespaces = used.by_holder.len() + usize::from(of_namespace.is_none());
        let callers = of_namespace.map_or(0, HashMap::len) + usize::from(own.is_none());
        let is_within = own.unwrap_or(0) + bytes <= self.bytes / namespaces / callers;
        if is_free || is_within {
            used.all += bytes;
            let of_namespace = used.by_holder.entry(namespace.clone()).or_default();
            *of_namespace.entry(caller.clone()).or_default() += bytes;
        }
        is_free || is_within
    }

    fn give_back(&self, (namespace, caller): &(Arc<str>, Arc<str>), bytes: usize) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.all -= bytes;
        let Some(callers) = used.by_holder.get_mut(namespace) else {
            return;
        };
        let own = callers.get(caller).map_or(0, |own| own - bytes);
        match own {
            0 => drop(callers.remove(caller)),
            _ => drop(callers.insert(caller.clone(), own)),
        }
        if callers.is_empty() {
            used.by_holder.remove(namespace);
        }
    }
}

/// What a call holds, in bytes, which are charged until it is dropped.
#[derive(Debug)]
pub struct Charge {
    quota: Arc<Quota>,
    bytes: usize,
}

impl Charge {
    /// Nothing yet, of this caller.
    pub fn new(quota: Arc<Quota>) -> Charge {
        Charge { quota, bytes: 0 }
    }

    /// The quota of the caller.
    pub fn quota(&self) -> &Arc<Quota> {
        &self.quota
    }

    /// Charges further bytes, if the caller may have them.
    pub fn add(&mut self, bytes: usize) -> Result<(), Status> {
        let Quota { budget, holder, .. } = &*self.quota;
        if !budget.take(holder, bytes) {
            return Err(Status::resource_exhausted(format!(
                "the subscriptions and answers of all pods take {} MiB, the maximum of this \
                 replica, and this pod has its share; unsubscribe from idle destinations, read \
                 answers, or add replicas",
                budget.bytes / 1024 / 1024
            )));
        }
        self.bytes += bytes;
        Ok(())
    }

    /// Gives bytes back.
    pub fn remove(&mut self, bytes: usize) {
        let Quota { budget, holder, .. } = &*self.quota;
        budget.give_back(holder, bytes);
        self.bytes -= bytes;
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
        match charges.is_empty() {
            true => bytes,
            false => Bytes::from_owner(Charged { bytes, charges }),
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

#[cfg(test)]
impl Quotas {
    /// Quotas with a budget for this number of subscriptions.
    pub fn with_subscriptions(count: usize) -> Quotas {
        Quotas {
            budget: Arc::new(Budget::new(count * SUBSCRIPTION_BYTES)),
            ..Quotas::default()
        }
    }
}

impl Quotas {
    /// The charged bytes of all callers, and the budget.
    pub fn charged(&self) -> (usize, usize) {
        let used = self.budget.used.lock();
        let used = used.unwrap_or_else(PoisonError::into_inner).all;
        (used, self.budget.bytes)
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
            budget: self.budget.clone(),
            holder: holder.unwrap_or_else(|| ("".into(), "".into())),
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
}

fn exhausted(limit: usize, items: &str, remedy: &str) -> Status {
    Status::resource_exhausted(format!(
        "this pod or user has {limit} {items}, the maximum; {remedy}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authenticate::PodRef;

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

    fn of(quotas: &Quotas, namespace: &str, uid: &str) -> Charge {
        let mut caller = caller("web", Some(uid));
        if let Some(pod) = &mut caller.pod {
            pod.namespace = namespace.into();
        }
        Charge::new(quotas.of(&caller))
    }

    #[test]
    fn caller_may_have_what_is_free_and_else_its_share() {
        let quotas = Quotas::with_subscriptions(1200);
        // Twenty pods of one namespace take all.
        let mut hostile: Vec<Charge> = (0..20)
            .map(|uid| of(&quotas, "hostile", &uid.to_string()))
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
        let mut shop = ["a", "b"].map(|uid| of(&quotas, "shop", uid));
        shop[0].add(300 * SUBSCRIPTION_BYTES).unwrap();
        shop[1].add(300 * SUBSCRIPTION_BYTES).unwrap();
        assert!(shop[1].add(SUBSCRIPTION_BYTES).is_err());
        let mut other = of(&quotas, "other", "c");
        other.add(400 * SUBSCRIPTION_BYTES).unwrap();
        assert!(other.add(SUBSCRIPTION_BYTES).is_err());
        assert!(hostile[0].add(SUBSCRIPTION_BYTES).is_err());
        // What ends is free for all.
        hostile.truncate(1);
        hostile[0].add(100 * SUBSCRIPTION_BYTES).unwrap();
        drop((hostile, shop, other));
        let used = quotas.budget.used.lock().unwrap();
        assert_eq!((used.all, used.by_holder.len()), (0, 0));
    }
}
