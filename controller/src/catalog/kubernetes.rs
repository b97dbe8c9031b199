//! The catalog of a Kubernetes cluster: watches of all Services, EndpointSlices, Pods and Nodes,
//! of the routes and grants of the Gateway API, and of TrafficPolicies, where they are installed.
//!
//! Each kind has its own watch (`watch.rs`). After an error, the watch logs the cause
//! and the required permissions and retries with back-off. Only the fields that the index needs are
//! kept.

use futures::future::join_all;
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::{Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{Api, Client};
use tokio::sync::mpsc;

use super::freshness::Freshness;
use super::resources::{LAST_VALID_LABEL, apis};
use super::watch::{ALL, Context, Selector, Timing, watch};
use crate::index::object::{Event, Kind};

/// Sends the objects of the cluster, then changes, until the receiver is dropped. `namespace` is that
/// of the mesh.
pub async fn run(
    client: Client,
    namespace: &str,
    trust_domain: &str,
    freshness: &Freshness,
    changes: mpsc::Sender<Event>,
) {
    // Finished pods own no address. The watch reports them as deleted.
    let running = Selector {
        fields: Some("status.phase!=Succeeded,status.phase!=Failed"),
        labels: None,
    };
    let last_valid = Selector {
        fields: None,
        labels: Some(LAST_VALID_LABEL),
    };
    let context = Context {
        trust_domain,
        freshness,
        changes: &changes,
        timing: Timing::default(),
    };
    let core = async {
        let client = || client.clone();
        let revisions: Api<ControllerRevision> = Api::namespaced(client(), namespace);
        tokio::join!(
            watch::<Service>(Kind::Service, vec![Api::all(client())], ALL, context),
            watch::<EndpointSlice>(Kind::Slice, vec![Api::all(client())], ALL, context),
            watch::<Pod>(Kind::Pod, vec![Api::all(client())], running, context),
            watch::<Node>(Kind::Node, vec![Api::all(client())], ALL, context),
            watch(Kind::Revision, vec![revisions], last_valid, context),
        )
    };
    let custom = Kind::ALL.into_iter().filter(|kind| kind.is_custom());
    let custom = custom.map(|kind| watch(kind, apis(&client, kind), ALL, context));
    tokio::join!(core, join_all(custom));
}
