//! Who may call a pod, or the pods of a Service, as their proxies are told. Pure.

use std::collections::BTreeSet;

use diy_mesh_proto::mesh::v1::get_authorization_response::Pod as Row;

use crate::index::limits::target_ports;
use crate::index::state::{Target, TargetKind};
use crate::index::{Index, Resource};
use crate::kinds::Pod;
use crate::kinds::pod::workload::workload;
use crate::kinds::service::Transport;
use crate::object::Key;

/// The pods that a name is about: those with a proxy that the Service selects, else the pod, else
/// those with a proxy of the workload. `None`: there is nothing of this name.
pub fn pods(index: &Index, target: &Key) -> Option<BTreeSet<Key>> {
    let first = Key::new(&target.namespace, "");
    let meshed = index.meshed_pods_after(&first);
    let meshed = meshed.take_while(|pod| pod.key.namespace == target.namespace);
    if let Some(service) = index.service_object(target) {
        let selected = meshed.filter(|pod| service.selects(pod));
        return Some(selected.map(|pod| pod.key.clone()).collect());
    }
    if let Some(pod) = index.pod(target) {
        return Some([pod.key.clone()].into());
    }
    let is_of_workload = |pod: &&Pod| {
        let label = |name: &str| pod.labels.get(name).map(String::as_str);
        *workload(&pod.key.name, label) == *target.name
    };
    let pods = meshed.filter(is_of_workload);
    let pods: BTreeSet<Key> = pods.map(|pod| pod.key.clone()).collect();
    Some(pods).filter(|pods| !pods.is_empty())
}

/// A pod of the target. `None`: it does not exist any more.
pub fn pod(index: &Index, target: &Key, port: u32, key: &Key) -> Option<Row> {
    let pod = index.pod(key)?;
    let resource = Resource::Workload(key.clone(), pod.uid.clone());
    let (_, state) = index.resolve(&resource, &index.location(key, &pod.uid));
    let workload = match &state.target {
        Some(Target {
            kind: TargetKind::Workload(workload),
            ..
        }) => Some(workload.message()),
        _ => None,
    };
    let ports = ports(index, target, port, pod);
    let is_bypassed =
        |port: &u32| u16::try_from(*port).is_ok_and(|port| pod.bypassed.contains(port));
    Some(Row {
        namespace: key.namespace.to_string(),
        name: key.name.to_string(),
        identity: pod.identity.as_deref().unwrap_or_default().to_owned(),
        bypassed: ports.iter().copied().filter(is_bypassed).collect(),
        ports,
        workload,
    })
}

/// The ports of a pod behind a port of the target, or behind all of them.
fn ports(index: &Index, target: &Key, port: u32, pod: &Pod) -> Vec<u32> {
    if let Some(service) = index.service_object(target) {
        let ports = service.tcp_ports();
        return target_ports(
            ports.filter(|one| [0, one.port.into()].contains(&port)),
            pod,
        );
    }
    let declared = pod.inbound.ports.iter();
    let tcp = declared.filter(|one| port == 0 && one.protocol == Transport::Tcp);
    let named = (port > 0).then_some(port);
    tcp.map(|one| one.port.into()).chain(named).collect()
}

#[cfg(test)]
mod tests {
    use diy_mesh_model::identity::TRUST_DOMAIN;
    use serde_json::{Value, json};

    use super::*;

    fn objects() -> Vec<Value> {
        let pod = |name: &str, proxy: Value| {
            json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "shop", "labels": {"app": "web"}},
            "spec": {"serviceAccountName": "web", "initContainers": proxy, "containers": [{
                "name": "app",
                "ports": [{"name": "http", "containerPort": 8080}, {"containerPort": 53, "protocol": "UDP"}],
            }]}})
        };
        let proxy = json!([
            {"name": "proxy", "env": [{"name": "SERVICE_MESH_TOKEN_FILE"}]},
            {"name": "proxy-init", "args": ["--skip-inbound-ports=9090"]},
        ]);
        let policy = json!({"apiVersion": "diy-service-mesh.dev/v1alpha1", "kind": "AuthorizationPolicy",
            "metadata": {"name": "nobody", "namespace": "shop"},
            "spec": {"targetRefs": [{"kind": "Pod", "selector": {}}], "action": "ALLOW"}});
        let service = json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "web", "namespace": "shop"},
        "spec": {"selector": {"app": "web"}, "clusterIP": "10.0.0.1", "ports": [
            {"name": "http", "port": 80, "targetPort": "http"}, {"name": "m", "port": 9090},
        ]}});
        vec![
            pod("web-1", proxy.clone()),
            pod("web-2", proxy),
            pod("plain", json!([])),
            policy,
            service,
        ]
    }

    #[test]
    fn service_is_about_its_pods_with_a_proxy_at_its_target_ports() {
        let (index, problems) = super::super::index(&objects(), "", TRUST_DOMAIN);
        assert_eq!(problems, [""; 0]);
        let web = Key::new("shop", "web");
        let pods = pods(&index, &web).unwrap();
        let names: Vec<String> = pods.iter().map(Key::to_string).collect();
        assert_eq!(names, ["shop/web-1", "shop/web-2"]);
        let of = |port| pod(&index, &web, port, &Key::new("shop", "web-1")).unwrap();
        assert_eq!(
            (of(0).ports, of(0).bypassed),
            (vec![8080, 9090], vec![9090])
        );
        assert_eq!((of(80).ports, of(81).ports), (vec![8080], vec![]));
        let row = of(80);
        assert_eq!(row.identity, "spiffe://cluster.local/ns/shop/sa/web");
        let policies = row.workload.unwrap().authorization.unwrap().policies;
        assert_eq!(policies[0].name, "AuthorizationPolicy shop/nobody");
    }

    #[test]
    fn workload_is_about_its_pods_with_a_proxy() {
        let mut objects = objects();
        for (at, name) in ["batch-7f9-x2x4z", "batch-7f9-k8k4z"]
            .into_iter()
            .enumerate()
        {
            objects[at]["metadata"]["name"] = name.into();
            objects[at]["metadata"]["labels"] = json!({"app": "batch", "pod-template-hash": "7f9"});
        }
        let (index, _) = super::super::index(&objects, "", TRUST_DOMAIN);
        let batch = Key::new("shop", "batch");
        let names = pods(&index, &batch).unwrap();
        let names: Vec<String> = names.iter().map(Key::to_string).collect();
        assert_eq!(names, ["shop/batch-7f9-k8k4z", "shop/batch-7f9-x2x4z"]);
        assert_eq!(pods(&index, &Key::new("shop", "bat")), None);
        let row = pod(&index, &batch, 0, &Key::new("shop", "batch-7f9-x2x4z"));
        assert_eq!(row.unwrap().ports, [8080]);
    }

    #[test]
    fn pod_is_about_a_port_or_those_that_it_declares() {
        let (index, _) = super::super::index(&objects(), "", TRUST_DOMAIN);
        let key = Key::new("shop", "web-1");
        assert_eq!(pods(&index, &key).unwrap().len(), 1);
        assert_eq!(pod(&index, &key, 0, &key).unwrap().ports, [8080]);
        assert_eq!(pod(&index, &key, 1, &key).unwrap().ports, [1]);
        let plain = Key::new("shop", "plain");
        let row = pod(&index, &plain, 80, &plain).unwrap();
        assert_eq!((&*row.identity, row.workload), ("", None));
        assert_eq!(pods(&index, &Key::new("shop", "none")), None);
    }
}
