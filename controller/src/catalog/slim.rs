//! The fields of Kubernetes objects that the catalog reads. All others are skipped while the text is
//! parsed: a Pod may have a megabyte of environment variables and managed fields. Plain values, with
//! the names of the API.

use std::borrow::Cow;
use std::collections::BTreeMap;

pub(super) use diy_mesh_control_plane::pods::{
    Condition, Container, ContainerPort, Named, PodSpec, PodStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::Deserialize;
use serde_json::value::RawValue;

macro_rules! slim {
    ($($(#[$doc:meta])* $name:ident { $($(#[$attribute:meta])* $field:ident: $type:ty,)* })*) => {
        $($(#[$doc])*
        #[derive(Clone, Debug, Default, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        pub(super) struct $name { $($(#[$attribute])* pub $field: $type,)* })*
    };
}

type List<T> = Option<Vec<T>>;
type Text = Option<String>;

slim! {
    /// The metadata of an object.
    Metadata {
        name: Text,
        namespace: Text,
        uid: Text,
        generation: Option<i64>,
        resource_version: Text,
        creation_timestamp: Option<Time>,
        deletion_timestamp: Option<Time>,
        labels: Option<BTreeMap<String, String>>,
        annotations: Option<Annotations>,
    }

    /// The annotations of a canary.
    Annotations {
        #[serde(rename = "diy-service-mesh/canary-of")]
        canary_of: Text,
        #[serde(rename = "diy-service-mesh/canary-weight")]
        canary_weight: Text,
    }

    /// The part of an object of any kind that names it.
    Outline {
        metadata: Metadata,
    }

    Service {
        metadata: Metadata,
        spec: Option<ServiceSpec>,
        status: Option<ServiceStatus>,
    }

    ServiceSpec {
        #[serde(rename = "clusterIP")]
        cluster_ip: Text,
        #[serde(rename = "clusterIPs")]
        cluster_ips: List<String>,
        #[serde(rename = "externalIPs")]
        external_ips: List<String>,
        external_name: Text,
        external_traffic_policy: Text,
        internal_traffic_policy: Text,
        load_balancer_source_ranges: List<String>,
        ports: List<ServicePort>,
        publish_not_ready_addresses: Option<bool>,
        selector: Option<BTreeMap<String, String>>,
        session_affinity: Text,
        session_affinity_config: Option<SessionAffinityConfig>,
        #[serde(rename = "type")]
        type_: Text,
    }

    SessionAffinityConfig {
        #[serde(rename = "clientIP")]
        client_ip: Option<ClientIpConfig>,
    }

    ClientIpConfig {
        timeout_seconds: Option<i32>,
    }

    ServicePort {
        app_protocol: Text,
        name: Text,
        node_port: Option<i32>,
        port: i32,
        protocol: Text,
        target_port: Option<IntOrString>,
    }

    ServiceStatus {
        load_balancer: Option<LoadBalancer>,
    }

    LoadBalancer {
        ingress: List<Ingress>,
    }

    Ingress {
        ip: Text,
        ip_mode: Text,
    }

    EndpointSlice {
        metadata: Metadata,
        address_type: String,
        endpoints: List<Endpoint>,
        ports: List<EndpointPort>,
    }

    EndpointPort {
        name: Text,
        port: Option<i32>,
        protocol: Text,
    }

    Endpoint {
        addresses: List<String>,
        conditions: Option<EndpointConditions>,
        hints: Option<EndpointHints>,
        node_name: Text,
        target_ref: Option<ObjectReference>,
        zone: Text,
    }

    EndpointConditions {
        ready: Option<bool>,
        serving: Option<bool>,
        terminating: Option<bool>,
    }

    EndpointHints {
        for_nodes: List<Named>,
        for_zones: List<Named>,
    }

    ObjectReference {
        kind: Text,
        name: Text,
        namespace: Text,
        uid: Text,
    }

    Pod {
        metadata: Metadata,
        spec: Option<PodSpec>,
        status: Option<PodStatus>,
    }

    Node {
        metadata: Metadata,
        status: Option<NodeStatus>,
    }

    NodeStatus {
        addresses: List<NodeAddress>,
        conditions: List<Condition>,
    }

    NodeAddress {
        address: String,
        #[serde(rename = "type")]
        type_: String,
    }

    /// The part of an object over the limit of bytes that has its status.
    References {
        metadata: Metadata,
        spec: ReferencesSpec,
    }

    /// Entries are read one by one, so that an invalid one is skipped.
    ReferencesSpec {
        parent_refs: List<Box<RawValue>>,
        target_refs: List<Box<RawValue>>,
    }
}

/// The annotation of `kubectl apply` of an object.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Applied<'a> {
    #[serde(borrow)]
    pub metadata: AppliedMetadata<'a>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct AppliedMetadata<'a> {
    #[serde(borrow)]
    pub annotations: Option<AppliedAnnotations<'a>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct AppliedAnnotations<'a> {
    #[serde(borrow, rename = "kubectl.kubernetes.io/last-applied-configuration")]
    pub last_applied: Option<Cow<'a, str>>,
}

/// A custom resource. Its spec and its status are parsed per kind.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Custom<'a> {
    pub metadata: Metadata,
    #[serde(borrow)]
    pub spec: Option<&'a RawValue>,
    #[serde(borrow)]
    pub status: Option<&'a RawValue>,
}
