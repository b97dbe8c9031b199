//! The objects of the fake cluster: one large Service, small ones, and their pods. Pure.
//!
//! Each change of the large Service replaces its oldest endpoint by the endpoint of a spare pod.
//! The address of an endpoint contains the number of its pod, which tells a subscriber the latest
//! change that it has received.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde_json::{Value, json};

use crate::tokens;

/// Paths of the collections in the Kubernetes API.
pub const SERVICES: &str = "/api/v1/services";
/// See [`SERVICES`].
pub const SLICES: &str = "/apis/discovery.k8s.io/v1/endpointslices";
/// See [`SERVICES`].
pub const PODS: &str = "/api/v1/pods";
/// Collection of all Namespaces.
pub const NAMESPACES: &str = "/api/v1/namespaces";

/// Endpoints of an EndpointSlice: the maximum of the EndpointSlice controller.
const SLICE_LENGTH: usize = 100;
const SMALL_SERVICES: usize = 100;
const SMALL_SERVICE_ENDPOINTS: usize = 3;
/// Small Services that a proxy subscribes to.
const SUBSCRIPTIONS: usize = 10;
const NAMESPACE: &str = "shop";
const PORT: u16 = 80;
const TARGET_PORT: u16 = 8080;
/// The network of the endpoints: a /11. The host part of an address is the number of the pod.
const ENDPOINT_NETWORK: u32 = u32::from_be_bytes([10, 64, 0, 0]);
const SUBSCRIBER_NETWORK: u32 = u32::from_be_bytes([10, 128, 0, 0]);

/// The large Service and its pods.
pub struct Cluster {
    /// The pod of each endpoint.
    endpoints: Vec<usize>,
    spare_pods: usize,
    changes: usize,
}

/// A collection and an object in it.
pub type Object = (&'static str, Value);

impl Cluster {
    /// A cluster with so many endpoints of the large Service and pods to replace them.
    pub fn new(endpoints: usize, spare_pods: usize) -> Cluster {
        Cluster {
            endpoints: (0..endpoints).collect(),
            spare_pods,
            changes: 0,
        }
    }

    /// All objects, with the pods of so many subscribers.
    pub fn objects(&self, subscribers: usize) -> Vec<Object> {
        let pods = self.endpoints.len() + self.spare_pods;
        let mut objects: Vec<Object> = (0..pods)
            .map(|number| (PODS, endpoint_pod(number)))
            .chain((0..subscribers).map(|number| (PODS, subscriber_pod(number))))
            .collect();
        objects.push((SERVICES, service("hot", hot().ip())));
        let slices = self.endpoints.chunks(SLICE_LENGTH).enumerate();
        objects.extend(slices.map(|(number, pods)| (SLICES, slice("hot", number, pods))));
        for number in 0..SMALL_SERVICES {
            let name = format!("small-{number}");
            let first = number * SMALL_SERVICE_ENDPOINTS;
            let all = self.endpoints.len();
            let pods: Vec<_> = (first..first + SMALL_SERVICE_ENDPOINTS)
                .map(|pod| pod % all)
                .collect();
            objects.push((SERVICES, service(&name, small(number).ip())));
            objects.push((SLICES, slice(&name, 0, &pods)));
        }
        objects
    }

    /// Replaces the oldest endpoint of the large Service. Returns the changed slice.
    pub fn change(&mut self) -> Object {
        let all = self.endpoints.len();
        let position = self.changes % all;
        self.endpoints[position] = all + self.changes;
        self.changes += 1;
        let number = position / SLICE_LENGTH;
        let pods = self.endpoints.chunks(SLICE_LENGTH).nth(number);
        (SLICES, slice("hot", number, pods.unwrap_or_default()))
    }

    /// The addresses of the large Service, ascending.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        let mut addresses: Vec<_> = self.endpoints.iter().map(|pod| endpoint(*pod)).collect();
        addresses.sort();
        addresses
    }
}

/// The destination of the large Service.
pub fn hot() -> SocketAddr {
    SocketAddr::from(([10, 96, 0, 10], PORT))
}

fn small(number: usize) -> SocketAddr {
    SocketAddr::from(([10, 97, 0, number as u8], PORT))
}

/// The destinations of a subscriber, the large Service first.
pub fn destinations(subscriber: usize) -> Vec<SocketAddr> {
    let step = SMALL_SERVICES / SUBSCRIPTIONS;
    let small =
        (0..SUBSCRIPTIONS).map(|number| small((subscriber + number * step) % SMALL_SERVICES));
    [hot()].into_iter().chain(small).collect()
}

/// The number of the latest change that an endpoint of the large Service shows, or 0.
pub fn change_of(address: SocketAddr, endpoints: usize) -> usize {
    let IpAddr::V4(ip) = address.ip() else {
        return 0;
    };
    let pod = (ip.to_bits() - ENDPOINT_NETWORK) as usize;
    (pod + 1).saturating_sub(endpoints)
}

fn endpoint(pod: usize) -> SocketAddr {
    let ip = Ipv4Addr::from_bits(ENDPOINT_NETWORK + pod as u32);
    SocketAddr::from((ip, TARGET_PORT))
}

fn pod_name(number: usize) -> String {
    format!("till-6d4cf56db6-{number:05}")
}

fn endpoint_pod(number: usize) -> Value {
    let name = pod_name(number);
    let uid = format!("00000000-0000-4000-8000-{number:012}");
    pod(NAMESPACE, &name, &uid, endpoint(number).ip())
}

/// The pod of a subscriber, as in its token.
pub fn subscriber(number: usize) -> tokens::Pod {
    tokens::Pod {
        namespace: format!("caller-{}", number % 50),
        name: format!("caller-7c9d8b6f5-{number:05}"),
        uid: format!("00000000-0000-4000-9000-{number:012}"),
    }
}

fn subscriber_pod(number: usize) -> Value {
    let tokens::Pod {
        namespace,
        name,
        uid,
    } = subscriber(number);
    let ip = Ipv4Addr::from_bits(SUBSCRIBER_NETWORK + number as u32);
    pod(&namespace, &name, &uid, ip.into())
}

/// An injected pod that is ready.
fn pod(namespace: &str, name: &str, uid: &str, ip: IpAddr) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "namespace": namespace, "uid": uid, "labels": { "app": namespace },
            "creationTimestamp": "2026-11-22T00:00:00Z",
            "annotations": { "diy-service-mesh/inject": "true", "diy-service-mesh/status": "injected" },
        },
        "spec": {
            "serviceAccountName": namespace, "nodeName": "node-1",
            "initContainers": [{
                "name": "proxy", "image": "diy-sm-proxy", "restartPolicy": "Always",
                "env": [{ "name": "SERVICE_MESH_TOKEN_FILE", "value": "/var/run/secrets/diy-service-mesh/token" }],
                "args": ["--inbound-port=4000", "--outbound-port=5000", "--admin-port=4001"],
                "ports": [{ "name": "mesh-admin", "containerPort": 4001, "protocol": "TCP" }],
            }],
            "containers": [{ "name": "app", "image": "app", "ports": [{ "containerPort": TARGET_PORT }] }],
        },
        "status": {
            "phase": "Running", "podIP": ip, "podIPs": [{ "ip": ip }],
            "conditions": [{ "type": "Ready", "status": "True" }],
        },
    })
}

fn service(name: &str, ip: IpAddr) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": name, "namespace": NAMESPACE },
        "spec": {
            "type": "ClusterIP", "clusterIP": ip, "clusterIPs": [ip], "ipFamilies": ["IPv4"],
            "selector": { "app": NAMESPACE },
            "ports": [{ "name": "http", "port": PORT, "targetPort": TARGET_PORT, "protocol": "TCP" }],
        },
    })
}

fn slice(service: &str, number: usize, pods: &[usize]) -> Value {
    let endpoints: Vec<_> = pods
        .iter()
        .map(|&pod| {
            json!({
                "addresses": [endpoint(pod).ip()], "nodeName": "node-1", "zone": format!("zone-{}", pod % 3),
                "conditions": { "ready": true, "serving": true, "terminating": false },
                "targetRef": { "kind": "Pod", "name": pod_name(pod), "namespace": NAMESPACE },
            })
        })
        .collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": format!("{service}-{number}"), "namespace": NAMESPACE, "labels": { "kubernetes.io/service-name": service },
        },
        "endpoints": endpoints,
        "ports": [{ "name": "http", "port": TARGET_PORT, "protocol": "TCP" }],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn change_replaces_one_endpoint_whose_address_has_its_number() {
        let mut cluster = Cluster::new(250, 300);
        for change in 1..=300 {
            let before = cluster.addresses();
            cluster.change();
            let after = cluster.addresses();
            let new: Vec<_> = after.iter().filter(|new| !before.contains(new)).collect();
            assert_eq!((new.len(), after.len()), (1, 250));
            assert_eq!(change_of(*new[0], 250), change);
        }
        assert_eq!(change_of(endpoint(249), 250), 0);
    }

    #[test]
    fn subscriber_has_distinct_destinations_of_existing_services() {
        let services: Vec<_> = Cluster::new(10, 0)
            .objects(0)
            .into_iter()
            .filter(|(collection, _)| *collection == SERVICES)
            .map(|(_, service)| service["spec"]["clusterIP"].to_string())
            .collect();
        let destinations = destinations(4999);
        let distinct: std::collections::BTreeSet<_> = destinations.iter().collect();
        assert_eq!(distinct.len(), 1 + SUBSCRIPTIONS);
        for destination in destinations {
            assert!(services.contains(&format!("\"{}\"", destination.ip())));
        }
    }
}
