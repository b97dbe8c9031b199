//! Facts for tests.

use serde::de::DeserializeOwned;

use super::*;

pub(crate) const NOW: u64 = 1_800_000_000;

pub(crate) fn object<T: DeserializeOwned>(value: Value) -> T {
    json::read(&value).expect("test objects are valid")
}

pub(crate) fn unknown_facts() -> Facts {
    fn unknown<T>() -> Fact<T> {
        Err("not allowed".into())
    }
    Facts {
        namespace: "service-mesh".into(),
        only: None,
        now: NOW,
        version: object(
            json!({"major": "1", "minor": "34", "gitVersion": "v1.34.1", "buildDate": "", "compiler": "", "gitCommit": "",
            "gitTreeState": "", "goVersion": "", "platform": ""}),
        ),
        nodes: unknown(),
        namespaces: unknown(),
        pods: unknown(),
        ready_pages: BTreeMap::new(),
        services: unknown(),
        workloads: unknown(),
        deployments: unknown(),
        webhook: unknown(),
        serving: unknown(),
        roots: unknown(),
        identity: unknown(),
        permissions: unknown(),
        definitions: unknown(),
        routes: unknown(),
        policies: unknown(),
        judgement: unknown(),
        traffic: unknown(),
        traces: BTreeMap::new(),
        dry_run: unknown(),
    }
}

/// These pods, and the namespace `shop` with these labels.
pub(crate) fn facts(pods: Vec<Pod>, labels: Value) -> Facts {
    let namespace = json!({"metadata": {"name": "shop", "labels": labels}});
    Facts {
        pods: Ok(pods),
        namespaces: Ok(vec![object(namespace)]),
        ..unknown_facts()
    }
}

/// A pod in namespace `shop`.
pub(crate) fn pod(name: &str, annotations: Value) -> Pod {
    object(json!({
        "metadata": {"namespace": "shop", "name": name, "annotations": annotations, "creationTimestamp": "2020-01-01T00:00:00Z"},
        "spec": {"containers": []}, "status": {"phase": "Running"},
    }))
}

/// An injected pod with this status of its proxy.
pub(crate) fn meshed(name: &str, proxy: Value) -> Pod {
    let mut pod = pod(
        name,
        json!({"diy-service-mesh/inject": "true", "diy-service-mesh/status": "injected"}),
    );
    let spec = pod.spec.as_mut().expect("pod() sets it");
    spec.init_containers = Some(vec![object(
        json!({"name": "proxy", "image": "diy-sm-proxy:1.0", "restartPolicy": "Always"}),
    )]);
    pod.status
        .as_mut()
        .expect("pod() sets it")
        .init_container_statuses = Some(vec![object(proxy)]);
    pod
}

/// The status of a ready proxy.
pub(crate) fn ready() -> Value {
    json!({"name": "proxy", "ready": true, "started": true, "restartCount": 0, "image": "", "imageID": "", "state": {"running": {}}})
}

pub(crate) fn deployment(name: &str, available: i32, env: Value) -> Deployment {
    object(json!({
        "metadata": {"name": name},
        "spec": {"replicas": 2, "selector": {}, "template": {"metadata": {"labels": {"app": name}}, "spec": {"containers": [
            {"name": name, "image": format!("diy-sm-{name}:1.0"), "env": env}]}}},
        "status": {"availableReplicas": available},
    }))
}
