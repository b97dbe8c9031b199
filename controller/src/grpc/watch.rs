//! One WatchServices stream: the existing Services, then each change. A response is made when the
//! one before it can be sent, from the latest state of a Service.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use diy_mesh_proto::mesh::v1 as proto;
use futures::{Stream, stream};
use prost::Message;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::consume_budget;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::message;
use crate::authenticate::Namespaces;
use crate::object::Key;
use crate::object::version::{self, Version};
use crate::publish::{CatalogError, Hub};
use crate::quota::{Charge, Unsent};

/// The account to which responses are charged until they have been sent.
pub(super) struct Account {
    /// The charge of the connection, without bytes.
    pub charge: Charge,
    pub unsent: Unsent,
}

impl Account {
    fn charge(
        &self,
        response: proto::WatchServicesResponse,
    ) -> Result<proto::WatchServicesResponse, Status> {
        let mut charge = self.charge.beside();
        charge.add(response.encoded_len())?;
        self.unsent.push(charge);
        Ok(response)
    }
}

/// The responses of a stream until `stopping`.
pub(super) fn responses(
    watch: Watch,
    account: Account,
    stopping: CancellationToken,
) -> impl Stream<Item = Result<proto::WatchServicesResponse, Status>> + Send + 'static {
    let state = (watch, account, stopping);
    stream::unfold(state, |(mut watch, account, stopping)| async move {
        let response = tokio::select! {
            response = watch.next() => account.charge(response),
            () = stopping.cancelled() => Err(CatalogError::Stopping.into()),
        };
        Some((response, (watch, account, stopping)))
    })
}

/// The Services that a client watches.
pub(super) struct Watch {
    hub: Hub,
    /// Empty: all in these namespaces.
    names: BTreeSet<Key>,
    namespaces: Namespaces,
    changes: Receiver<Arc<BTreeSet<Key>>>,
    /// The Services at the time of the call that are to be sent. `None`: the client knows that it
    /// has all.
    initial: Option<BTreeSet<Key>>,
    changed: BTreeSet<Key>,
    sent: HashMap<Key, Option<Version>>,
}

impl Watch {
    /// These Services, or all in these namespaces if `names` is empty.
    pub(super) fn new(hub: &Hub, names: BTreeSet<Key>, namespaces: Namespaces) -> Watch {
        let changes = hub.changed_services();
        let mut watch = Watch {
            hub: hub.clone(),
            names,
            namespaces,
            changes,
            initial: None,
            changed: BTreeSet::new(),
            sent: HashMap::new(),
        };
        watch.initial = Some(watch.all());
        watch
    }

    /// The number of initial Services that are not sent yet.
    pub(super) fn pending(&self) -> usize {
        self.initial.as_ref().map_or(0, BTreeSet::len)
    }

    fn all(&self) -> BTreeSet<Key> {
        if !self.names.is_empty() {
            return self.names.clone();
        }
        let mut all = self.hub.service_keys();
        all.retain(|key| self.namespaces.contains(&key.namespace));
        all
    }

    fn concerns(&self, key: &Key) -> bool {
        if self.names.is_empty() {
            self.namespaces.contains(&key.namespace)
        } else {
            self.names.contains(key)
        }
    }

    /// The next response. Cancel-safe.
    async fn next(&mut self) -> proto::WatchServicesResponse {
        loop {
            if self.initial.take_if(|initial| initial.is_empty()).is_some() {
                return proto::WatchServicesResponse {
                    service: None,
                    synced: true,
                };
            }
            let initial = self.initial.as_mut().and_then(BTreeSet::pop_first);
            let Some(key) = initial.or_else(|| self.changed.pop_first()) else {
                self.receive().await;
                continue;
            };
            let known = self.hub.service(&key);
            let encoded = known.as_ref().map(Message::encode_to_vec);
            let version = encoded.map(|encoded| version::of("service", &encoded));
            if self.sent.get(&key) == Some(&version) {
                // All Services of a client that lags are compared: other tasks run in between.
                consume_budget().await;
                continue;
            }
            let service = message::service(&key, known);
            // Deleted Services are remembered only if the client named them, which bounds the
            // memory.
            if version.is_none() && self.names.is_empty() {
                self.sent.remove(&key);
            } else {
                self.sent.insert(key, version);
            }
            return proto::WatchServicesResponse {
                service: Some(service),
                synced: false,
            };
        }
    }

    /// Waits for changes. For a client that has missed some, all Services may have changed.
    async fn receive(&mut self) {
        let changed = match self.changes.recv().await {
            Ok(keys) => {
                let keys = keys.iter().filter(|key| self.concerns(key));
                keys.cloned().collect()
            }
            Err(RecvError::Lagged(_)) => {
                let sent = self.sent.keys().cloned();
                self.all().into_iter().chain(sent).collect()
            }
            // The hub holds the sender.
            Err(RecvError::Closed) => std::future::pending().await,
        };
        self.changed = changed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::pin::pin;

    use futures::StreamExt as _;

    use crate::catalog::Change;
    use crate::index::tests::service_with_pods;
    use crate::object::Kind;
    use crate::quota::Quotas;

    #[tokio::test]
    async fn responses_are_made_when_the_client_reads_them() {
        let hub = Hub::default();
        let apply = |name, pod: &str| {
            let objects = service_with_pods(name, "10.96.0.1", &[pod]).into_iter();
            hub.apply(objects.map(Change::Apply));
        };
        apply("a", "10.0.0.1");
        apply("b", "10.0.0.2");
        let stopping = CancellationToken::new();
        let services = Watch::new(&hub, BTreeSet::new(), Namespaces::All);
        let account = Account {
            charge: Quotas::default().connect("", ""),
            unsent: Unsent::default(),
        };
        let mut responses = pin!(responses(services, account, stopping.clone()));
        let mut next = async || {
            let response = responses.next().await.unwrap()?;
            Ok::<_, Status>(response.service.map(|service| {
                let endpoints = service.endpoints.iter();
                let addresses: Vec<_> = endpoints.flat_map(|one| one.addresses.clone()).collect();
                (service.name, addresses)
            }))
        };
        let service = |name: &str, pod: &str| Some((name.to_owned(), vec![pod.to_owned()]));
        assert_eq!(next().await.unwrap(), service("a", "10.0.0.1"));
        apply("b", "10.0.0.3");
        assert_eq!(next().await.unwrap(), service("b", "10.0.0.3"));
        assert_eq!(next().await.unwrap(), None, "synced");
        stopping.cancel();
        let status = next().await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::Unavailable);
    }

    #[tokio::test]
    async fn client_that_lags_gets_what_it_missed_and_holds_up_nobody() {
        let hub = Hub::default();
        let apply = |name: &str, pod: &str| {
            let objects = service_with_pods(name, "10.96.0.1", &[pod]).into_iter();
            hub.apply(objects.map(Change::Apply));
        };
        for number in 0..500 {
            apply(&format!("s{number}"), "10.0.0.1");
        }
        let mut watch = Watch::new(&hub, BTreeSet::new(), Namespaces::All);
        while !watch.next().await.synced {}
        apply("s7", "10.0.0.2");
        for number in 0..20 {
            hub.apply([Change::Delete(Kind::Service, Key::new("shop", "z"))]);
            apply("z", &format!("10.0.1.{number}"));
        }
        let mut turns_of_others = 0;
        let mut missed = Vec::new();
        while missed.len() < 2 {
            tokio::select! {
                biased;
                response = watch.next() => {
                    let service = response.service.expect("a change");
                    missed.push((service.name, service.endpoints[0].addresses.clone()));
                }
                () = std::future::ready(()) => {
                    turns_of_others += 1;
                    tokio::task::yield_now().await;
                }
            }
        }
        let expected = [("s7", "10.0.0.2"), ("z", "10.0.1.19")];
        let expected = expected.map(|(name, pod)| (name.to_owned(), vec![pod.to_owned()]));
        assert_eq!(missed, expected);
        assert!(turns_of_others > 0);
    }

    #[tokio::test]
    async fn response_is_charged_until_its_bytes_are_gone() {
        let hub = Hub::default();
        let pods: Vec<String> = (0..100).map(|pod| format!("10.0.0.{pod}")).collect();
        let pods: Vec<&str> = pods.iter().map(String::as_str).collect();
        let objects = service_with_pods("a", "10.96.0.1", &pods).into_iter();
        hub.apply(objects.map(Change::Apply));
        // For one response, and not for two.
        let quotas = Quotas::with_subscriptions(8);
        let unsent = Unsent::default();
        let stream = || {
            let services = Watch::new(&hub, BTreeSet::new(), Namespaces::All);
            let account = Account {
                charge: quotas.connect("", ""),
                unsent: unsent.clone(),
            };
            Box::pin(responses(services, account, CancellationToken::new()))
        };
        let mut unread = stream();
        let first = unread.next().await.unwrap().unwrap();
        let bytes = first.encoded_len();
        assert!((8 << 10..16 << 10).contains(&bytes), "{bytes}");
        let on_the_way = unsent.attach(first.encode_to_vec().into());
        // hyper asks for the next response before the first one has been sent.
        assert!(unread.next().await.unwrap().unwrap().synced);
        drop(unread);
        let rejected = stream().next().await.unwrap().unwrap_err();
        assert_eq!(rejected.code(), tonic::Code::ResourceExhausted);
        drop(on_the_way);
        stream().next().await.unwrap().unwrap();
    }
}
