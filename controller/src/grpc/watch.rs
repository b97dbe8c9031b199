//! One WatchServices stream: the existing Services, then each change. A response is made when the
//! one before it can be sent, from the latest state of a Service.

use std::collections::HashMap;

use diy_mesh_proto::mesh::v1 as proto;
use futures::{Stream, stream};
use prost::Message as _;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::message;
use crate::hub::{CatalogError, Services};
use crate::index::object::Key;
use crate::index::version::Version;
use crate::quota::{Charge, Unsent};

/// What responses are charged to until they have been sent.
pub(super) struct Account {
    /// Of the connection, without bytes.
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
    subscriber: Services,
    account: Account,
    stopping: CancellationToken,
) -> impl Stream<Item = Result<proto::WatchServicesResponse, Status>> + Send + 'static {
    let watch = Watch {
        // Notifications keep their order, so these are the Services at the time of the call.
        unsynced: Some(subscriber.pending()),
        subscriber,
        sent: HashMap::new(),
        account,
    };
    stream::unfold((watch, stopping), |(mut watch, stopping)| async move {
        let response = tokio::select! {
            response = watch.next() => watch.account.charge(response),
            () = stopping.cancelled() => Err(CatalogError::Stopping.into()),
        };
        Some((response, (watch, stopping)))
    })
}

struct Watch {
    subscriber: Services,
    /// The number of initial Services that are not sent yet.
    unsynced: Option<usize>,
    sent: HashMap<Key, Option<Version>>,
    account: Account,
}

impl Watch {
    async fn next(&mut self) -> proto::WatchServicesResponse {
        loop {
            if self.unsynced == Some(0) {
                self.unsynced = None;
                return proto::WatchServicesResponse {
                    service: None,
                    synced: true,
                };
            }
            self.subscriber.wait().await;
            let Some((key, view)) = self.subscriber.next() else {
                continue;
            };
            self.unsynced = self.unsynced.map(|left| left - 1);
            let version = view.as_ref().map(|view| view.version());
            if self.sent.get(&key) == Some(&version) {
                continue;
            }
            let service = message::service(&key, view.as_ref());
            // Deleted Services are remembered only if the client named them, which bounds the
            // memory.
            if version.is_none() && self.subscriber.watches_all() {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::collections::BTreeSet;
    use std::pin::pin;

    use futures::StreamExt as _;

    use crate::authenticate::Namespaces;
    use crate::hub::Hub;
    use crate::index::object::Change;
    use crate::index::tests::service_with_pods;
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
        let services = hub.watch_services(&BTreeSet::new(), Namespaces::All);
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
            let services = hub.watch_services(&BTreeSet::new(), Namespaces::All);
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
