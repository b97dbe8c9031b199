//! The definitions of the Service Mesh Interface on a cluster, as far as the mesh reads them.

use anyhow::Result;
use serde_json::{Value, json};

use super::{kubectl, kubectl_with_input, wait_for};

const KINDS: [(&str, &str, &str); 2] = [
    ("split.smi-spec.io", "trafficsplits", "TrafficSplit"),
    ("specs.smi-spec.io", "httproutegroups", "HTTPRouteGroup"),
];

/// The definitions that the cluster did not have, until they are dropped.
pub struct Definitions(Vec<String>);

impl Definitions {
    /// Installs the missing ones.
    pub fn install() -> Result<Self> {
        let mut this = Self(Vec::new());
        for (group, plural, kind) in KINDS {
            let name = format!("{plural}.{group}");
            if kubectl(&["get", "crd", &name]).is_ok() {
                continue;
            }
            let text = definition(group, plural, kind).to_string();
            kubectl_with_input(&["create", "-f", "-"], &text)?;
            this.0.push(name.clone());
            wait_for(&format!("{name} is served"), || {
                kubectl(&["get", &name, "--all-namespaces"]).map(Some)
            })?;
        }
        Ok(this)
    }
}

impl Drop for Definitions {
    fn drop(&mut self) {
        for name in &self.0 {
            if let Err(error) = kubectl(&["delete", "crd", name]) {
                eprintln!("cannot delete the definition {name}: {error:#}");
            }
        }
    }
}

fn definition(group: &str, plural: &str, kind: &str) -> Value {
    let schema = json!({"type": "object", "properties": {
        "spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}});
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.{group}")},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": plural, "singular": kind.to_lowercase(), "kind": kind, "listKind": format!("{kind}List")},
            "versions": [{"name": "v1alpha4", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema}}],
        },
    })
}
