//! Kubernetes Events about refused certificates and states of proxies, routes without a status, and
//! kinds that cannot be read. They are on the pod, the route and the Deployment of the controller.

use diy_mesh_control_plane::events::Events;
use k8s_openapi::api::core::v1::ObjectReference;

use crate::catalog::freshness::Unreadable;
use crate::catalog::resource;
use crate::index::excess::APPLIES_TO_ALL_PORTS;
use crate::object::{Condition, ObjectStatus, PodRef};

/// Queues an event about a pod, whose proxy called `action`.
pub fn of_pod(events: &Events, pod: &PodRef, reason: &str, action: &str, note: &str) {
    let object = ObjectReference {
        uid: Some(pod.uid.to_string()),
        ..reference("Pod", &pod.namespace, &pod.name)
    };
    events.warn(object, reason, action, note);
}

/// Queues an event about a condition of a route, or of the ports of a Service, that does not hold.
pub fn route_not_accepted(events: &Events, route: &ObjectStatus, condition: &Condition) {
    let object = ObjectReference {
        uid: Some(route.uid.to_string()).filter(|uid| !uid.is_empty()),
        api_version: Some(resource(route.kind).api_version),
        ..reference(route.kind.name(), &route.key.namespace, &route.key.name)
    };
    let note = format!("{}: {}", condition.reason, condition.message);
    let reason = match condition.kind {
        APPLIES_TO_ALL_PORTS => condition.reason,
        _ => "RouteNotAccepted",
    };
    events.warn(object, reason, "Route", &note);
}

/// Logs that a kind cannot be read, and queues an event about it on the Deployment of the
/// controller, which is in `namespace`.
pub fn kind_unreadable(events: &Events, namespace: &str, unreadable: &Unreadable) {
    let Unreadable { kind, error, .. } = unreadable;
    let consequence = match (unreadable.is_known, kind.is_optional()) {
        (true, _) => "its former objects stay in use",
        (false, true) => "this replica sends and writes nothing that depends on it",
        (false, false) => "this replica is not ready",
    };
    let note = format!(
        "{kind} cannot be read for a minute: {error}; {consequence}; repair the cause, or delete the \
         definition if nothing uses the kind"
    );
    tracing::error!("{note}");
    let object = ObjectReference {
        api_version: Some("apps/v1".into()),
        ..reference("Deployment", namespace, "controller")
    };
    events.warn(object, "KindUnreadable", "Watch", &note);
}

/// A reference to an object of the core group.
pub(crate) fn reference(kind: &str, namespace: &str, name: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some(kind.into()),
        namespace: Some(namespace.into()),
        name: Some(name.into()),
        ..ObjectReference::default()
    }
}
