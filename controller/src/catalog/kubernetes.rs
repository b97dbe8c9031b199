//! The catalog of a Kubernetes cluster: watches of all Services, EndpointSlices, Pods and Nodes,
//! of the routes and grants of the Gateway API, and of TrafficPolicies, where they are installed.
//!
//! Each kind has its own watch (`watch.rs`). After an error, the watch logs the cause
//! and the required permissions and retries with back-off. Only the fields that the index needs are
//! kept.

use k8s_openapi::api::core::v1::{Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{Api, Client};
use tokio::sync::mpsc;

use super::freshness::Freshness;
use super::gateway::{
    GatewayObject, GrpcRoute, HttpRoute, ReferenceGrant, TcpRoute, TrafficPolicy,
};
use super::smi::{RouteGroup, TrafficSplit};
use super::watch::{Context, Timing, watch};
use crate::index::object::Event;

/// Sends the objects of the cluster, then changes, until the receiver is dropped.
pub async fn run(
    client: Client,
    trust_domain: &str,
    freshness: &Freshness,
    changes: mpsc::Sender<Event>,
) {
    // Finished pods own no address. The watch reports them as deleted.
    let running = Some("status.phase!=Succeeded,status.phase!=Failed");
    let context = Context {
        trust_domain,
        freshness,
        changes: &changes,
        timing: Timing::default(),
    };
    tokio::join!(
        watch(vec![Api::<Service>::all(client.clone())], None, context),
        watch(
            vec![Api::<EndpointSlice>::all(client.clone())],
            None,
            context
        ),
        watch(vec![Api::<Pod>::all(client.clone())], running, context),
        watch(vec![Api::<Node>::all(client.clone())], None, context),
        watch(GatewayObject::<HttpRoute>::apis(&client), None, context),
        watch(GatewayObject::<GrpcRoute>::apis(&client), None, context),
        watch(GatewayObject::<TcpRoute>::apis(&client), None, context),
        watch(
            GatewayObject::<ReferenceGrant>::apis(&client),
            None,
            context
        ),
        watch(GatewayObject::<TrafficPolicy>::apis(&client), None, context),
        watch(GatewayObject::<TrafficSplit>::apis(&client), None, context),
        watch(GatewayObject::<RouteGroup>::apis(&client), None, context),
    );
}
