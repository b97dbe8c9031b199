//! Routes for tests.

use super::*;

/// HTTPRoute shop/canary with Service shop/web as parent, and a status.
pub(crate) fn route(status: Value) -> Value {
    json!({
        "apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
        "metadata": {"namespace": "shop", "name": "canary", "generation": 2},
        "spec": {
            "parentRefs": [
                {"group": "", "kind": "Service", "name": "web", "port": 80}, {"name": "edge"},
            ],
            "rules": [
                {"backendRefs": [{"name": "web-v1", "port": 80, "weight": 90}, {"name": "web-v2", "port": 80, "weight": 10}]},
                {"backendRefs": [{"kind": "Bucket", "group": "x.y", "name": "files", "namespace": "data"}]},
            ],
        },
        "status": {"parents": [{
            "parentRef": {"group": "", "kind": "Service", "namespace": "shop", "name": "web", "port": 80},
            "controllerName": CONTROLLER_NAME, "conditions": status,
        }]},
    })
}

pub(crate) fn condition(kind: &str, status: &str, reason: &str) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "message": "what to do",
        "observedGeneration": 2})
}
