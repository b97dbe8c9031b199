//! What one caller may hold at the same time: connections, calls and subscriptions. A caller is a
//! pod, by its UID, or else a user. Never an address: a gateway or a node that translates addresses
//! is one address of many callers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;

use crate::authenticate::Caller;

/// A proxy has one or two.
pub const MAX_CONNECTIONS: usize = 16;
/// A proxy has two or three: streams, and requests for certificates.
pub const MAX_CALLS: usize = 16;
/// Far more than the destinations of a pod; proxies unsubscribe from idle ones. Also the names of
/// Services in WatchServices.
pub const MAX_SUBSCRIPTIONS: usize = 10_000;

/// The quotas of all callers with open calls or connections. Cheap to clone.
#[derive(Clone, Default)]
pub struct Quotas(Arc<Mutex<HashMap<Arc<str>, Weak<Quota>>>>);

/// A place in a quota, until it is dropped. Keeps the quota in use.
pub struct Counted(
    #[expect(dead_code)] OwnedSemaphorePermit,
    #[expect(dead_code)] Arc<Quota>,
);

/// The quota of one caller.
pub struct Quota {
    connections: Arc<Semaphore>,
    calls: Arc<Semaphore>,
    subscriptions: Arc<Semaphore>,
}

impl Quotas {
    /// The quota of a caller, which its calls and connections share.
    pub fn of(&self, caller: &Caller) -> Arc<Quota> {
        let pod = caller.pod.as_ref().map(|pod| &pod.uid);
        let key = pod.unwrap_or(&caller.user);
        let mut quotas = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(quota) = quotas.get(key).and_then(Weak::upgrade) {
            return quota;
        }
        if quotas.len() == quotas.capacity() {
            quotas.retain(|_, quota| quota.strong_count() > 0);
        }
        let quota = Arc::new(Quota::default());
        quotas.insert(key.clone(), Arc::downgrade(&quota));
        quota
    }
}

impl Default for Quota {
    fn default() -> Self {
        Quota {
            connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
            calls: Arc::new(Semaphore::new(MAX_CALLS)),
            subscriptions: Arc::new(Semaphore::new(MAX_SUBSCRIPTIONS)),
        }
    }
}

impl Quota {
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

    /// Subscriptions, until the permit is dropped.
    pub fn subscriptions(&self, count: usize) -> Result<OwnedSemaphorePermit, Status> {
        let many = u32::try_from(count).unwrap_or(u32::MAX);
        let permit = self.subscriptions.clone().try_acquire_many_owned(many);
        permit.map_err(|_| {
            exhausted(
                MAX_SUBSCRIPTIONS,
                "subscriptions",
                "unsubscribe from idle destinations",
            )
        })
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
            quotas.0.lock().unwrap().len() < 100,
            "unused ones are removed"
        );
        assert_eq!(Arc::as_ptr(&quotas.of(&caller("web", Some("1")))), address);
        drop(connection);
    }

    #[test]
    fn permits_return_to_the_quota() {
        let quota = Quota::default();
        let all = quota.subscriptions(MAX_SUBSCRIPTIONS).unwrap();
        let status = quota.subscriptions(1).unwrap_err();
        assert_eq!(status.code(), tonic::Code::ResourceExhausted);
        drop(all);
        assert!(quota.subscriptions(1).is_ok());
    }
}
