//! The endpoints of a Service for a client, by the client's node and zone: `internalTrafficPolicy`
//! and topology hints, as kube-proxy applies them. The routes, by its namespace. Pure.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::object::SliceEndpoint;
use super::state::Endpoint;

/// The namespace, the node and the zone of a client. Empty if unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Location {
    /// The namespace of the pod, which routes depend on.
    pub namespace: Arc<str>,
    /// The name of the node.
    pub node: Arc<str>,
    /// The zone of the node.
    pub zone: Arc<str>,
}

/// The part of a client's location that a state depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// The part of the cluster.
    pub area: Area,
    /// The namespaces whose clients have states of their own: those with consumer routes.
    pub namespaces: Option<Arc<BTreeSet<Arc<str>>>>,
}

/// The part of the cluster that a state is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Area {
    /// All of it.
    #[default]
    Cluster,
    /// The zone.
    Zone,
    /// The node.
    Node,
}

impl Location {
    /// The part of the location that a scope covers. Clients with equal parts share a state.
    pub fn within(&self, scope: &Scope) -> Location {
        let namespaces = scope.namespaces.iter();
        let mut own = namespaces.filter_map(|namespaces| namespaces.get(&self.namespace));
        let namespace = own.next().cloned().unwrap_or_default();
        let (node, zone) = match scope.area {
            Area::Cluster => Default::default(),
            Area::Zone => ("".into(), self.zone.clone()),
            Area::Node => (self.node.clone(), self.zone.clone()),
        };
        Location {
            namespace,
            node,
            zone,
        }
    }
}

/// An endpoint, and the endpoint of a slice that it comes from.
pub(super) struct Candidate<'a> {
    pub endpoint: Endpoint,
    pub slice: &'a SliceEndpoint,
}

/// The endpoints for a client. With `local_only`, those of its node, whether or not there are any.
/// Otherwise those with a hint for its node, else for its zone, if all ready endpoints have such
/// hints and one is for the client.
pub(super) fn select(
    all: Vec<Candidate<'_>>,
    local_only: bool,
    client: &Location,
) -> (Area, Vec<Endpoint>) {
    let on_node = |one: &Candidate<'_>| one.slice.node == client.node;
    let for_node = |one: &Candidate<'_>| one.slice.node_hints.contains(&client.node);
    let for_zone = |one: &Candidate<'_>| one.slice.zone_hints.contains(&client.zone);
    let ready = || all.iter().filter(|one| !one.endpoint.draining);
    let has_ready = ready().next().is_some();
    let node_hints = has_ready && ready().all(|one| !one.slice.node_hints.is_empty());
    let zone_hints = has_ready && ready().all(|one| !one.slice.zone_hints.is_empty());
    let area = match (local_only || node_hints, zone_hints) {
        (true, _) => Area::Node,
        (false, true) => Area::Zone,
        (false, false) => Area::Cluster,
    };
    let is_selected: &dyn Fn(&Candidate<'_>) -> bool = if local_only {
        &on_node
    } else if node_hints && ready().any(for_node) {
        &for_node
    } else if zone_hints && ready().any(for_zone) {
        &for_zone
    } else {
        &|_| true
    };
    let selected = all.iter().filter(|one| is_selected(one));
    let endpoints = selected.map(|one| one.endpoint.clone()).collect();
    (area, endpoints)
}
