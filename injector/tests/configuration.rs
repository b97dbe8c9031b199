//! Consistency of manifests/webhook.yaml with the webhook: the API server calls its path, and only
//! pods that request injection depend on the webhook.

use std::fs;
use std::path::Path;

use diy_mesh_injector::webhook::PATH;
use serde_json::{Value, json};

const EPHEMERAL_CONTAINERS: &str = "ephemeral-containers.injector.diy-service-mesh.dev";

fn webhooks() -> Vec<Value> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/webhook.yaml");
    let configuration: Value =
        serde_yaml_ng::from_str(&fs::read_to_string(file).expect("the manifest")).expect("YAML");
    assert_eq!(
        configuration["metadata"]["name"],
        "diy-service-mesh-injector"
    );
    configuration["webhooks"]
        .as_array()
        .expect("a list")
        .clone()
}

/// Whether a webhook selects namespaces by this expression.
fn selects(webhook: &Value, label: &str, operator: &str, value: &str) -> bool {
    let expressions = webhook["namespaceSelector"]["matchExpressions"]
        .as_array()
        .expect("a list");
    expressions.contains(&json!({"key": label, "operator": operator, "values": [value]}))
}

#[test]
fn webhooks_call_the_path_for_new_pods_and_ephemeral_containers_only() {
    for webhook in webhooks() {
        let service = json!({"name": "injector", "namespace": "service-mesh", "path": PATH});
        assert_eq!(webhook["clientConfig"], json!({ "service": service }));
        let (operation, resource) = if webhook["name"] == EPHEMERAL_CONTAINERS {
            ("UPDATE", "pods/ephemeralcontainers")
        } else {
            ("CREATE", "pods")
        };
        let rules = json!([{"operations": [operation], "apiGroups": [""], "apiVersions": ["v1"], "resources": [resource], "scope": "Namespaced"}]);
        assert_eq!(webhook["rules"], rules);
        assert_eq!(
            (&webhook["sideEffects"], &webhook["admissionReviewVersions"]),
            (&json!("NoneOnDryRun"), &json!(["v1"]))
        );
    }
}

#[test]
fn fail_closed_webhooks_have_match_conditions_and_exclude_system_namespaces() {
    let webhooks = webhooks();
    let (fail_closed, others): (Vec<_>, Vec<_>) = webhooks
        .iter()
        .partition(|webhook| webhook["failurePolicy"] == "Fail");
    assert_eq!((fail_closed.len(), others.len()), (3, 1));
    for webhook in fail_closed {
        let conditions = if webhook["name"] == EPHEMERAL_CONTAINERS {
            1
        } else {
            2
        };
        assert!(
            webhook["matchConditions"]
                .as_array()
                .is_some_and(|list| list.len() == conditions),
            "{}",
            webhook["name"]
        );
        assert_eq!(webhook["timeoutSeconds"], 5);
    }
    for webhook in &webhooks {
        let excluded = &webhook["namespaceSelector"]["matchExpressions"][0];
        assert_eq!(
            (&excluded["key"], &excluded["operator"]),
            (&json!("kubernetes.io/metadata.name"), &json!("NotIn"))
        );
        assert!(
            excluded["values"]
                .as_array()
                .is_some_and(|values| values.contains(&json!("kube-system"))),
            "{}",
            webhook["name"]
        );
        // The label of all objects of the mesh, its namespace included.
        assert!(
            selects(
                webhook,
                "app.kubernetes.io/part-of",
                "NotIn",
                "diy-service-mesh"
            ),
            "{}",
            webhook["name"]
        );
    }
}
