//! Calls to outside of the cluster, and policies about them, for tests.

use diy_mesh_model::identity::TRUST_DOMAIN;
use diy_mesh_proto::mesh::v1::Edge;
use serde_json::{Value, json};

use crate::edges::Observed;
use crate::plan::tests;

/// The pods of `shop/cart`, with calls to these destinations on a day in 1970.
pub(crate) fn observed(destinations: &[&str]) -> Observed {
    let edge = |destination: &&str| Edge {
        destination: (*destination).to_owned(),
        ..Edge::default()
    };
    Observed {
        groups: vec![tests::group(destinations.iter().map(edge).collect())],
        trust_domain: TRUST_DOMAIN.to_owned(),
    }
}

/// A policy about the calls of all pods of a namespace.
pub(crate) fn policy(namespace: &str, name: &str, spec: Value) -> Value {
    let mut policy = json!({"apiVersion": "diy-service-mesh.dev/v1alpha1", "kind": "AuthorizationPolicy",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"direction": "Outbound", "targetRefs": [{"kind": "Pod", "selector": {}}]}});
    let fields = spec.as_object().unwrap().clone();
    policy["spec"].as_object_mut().unwrap().extend(fields);
    policy
}
