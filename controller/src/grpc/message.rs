//! Conversion of the values of the index to messages. Pure.

use diy_mesh_proto::mesh::v1 as proto;
use proto::discover_response::Update;

use super::routes;
use crate::index::excess::MAX_PORTS;
use crate::index::object::{Key, Kind, ServicePort, TargetPort};
use crate::index::position::Position;
use crate::index::state::{Delta, Endpoint, State, TargetKind, Workload};
use crate::index::view::{EndpointView, ServiceView};

/// A Service. One that does not exist has a name only and is marked as deleted.
pub(super) fn service(key: &Key, view: Option<&ServiceView>) -> proto::Service {
    let mut message = proto::Service {
        name: key.name.to_string(),
        namespace: key.namespace.to_string(),
        ..proto::Service::default()
    };
    let Some(view) = view else {
        return proto::Service {
            deleted: true,
            ..message
        };
    };
    message.ports = view.service.ports.iter().map(port).collect();
    message.cluster_ips = view
        .service
        .cluster_ips
        .iter()
        .map(ToString::to_string)
        .collect();
    message.endpoints = view.endpoints.iter().map(service_endpoint).collect();
    message.canaries = view.canaries.iter().map(canary).collect();
    message.external_name = view.service.external_name.to_string();
    message
}

/// The whole state of a resource.
pub(super) fn whole(state: &State) -> Update {
    let Some(target) = &state.target else {
        return Update::Unknown(proto::Unknown {});
    };
    let mut snapshot = proto::Snapshot {
        kind: proto::snapshot::Kind::Service.into(),
        namespace: target.key.namespace.to_string(),
        name: target.key.name.to_string(),
        app_protocol: target.app_protocol.clone(),
        endpoints: with_draining(&target.endpoints, false),
        draining: with_draining(&target.endpoints, true),
        session_affinity_seconds: target.session_affinity,
        routes: target.routes.as_deref().map(routes::routes),
        policy: target.policy.as_deref().cloned(),
        ..proto::Snapshot::default()
    };
    match &target.kind {
        TargetKind::Workload(one) => return Update::Workload(workload(one)),
        TargetKind::Service => {}
        TargetKind::UnknownPort(ports) => {
            snapshot.unknown_port = true;
            snapshot.ports = ports.iter().map(|port| (*port).into()).collect();
        }
        TargetKind::ExcessPort => {
            snapshot.unknown_port = true;
            snapshot.max_ports = MAX_PORTS as u32;
        }
        TargetKind::Pod => snapshot.kind = proto::snapshot::Kind::Pod.into(),
    }
    Update::Snapshot(snapshot)
}

fn workload(workload: &Workload) -> proto::Workload {
    let inbound = &workload.inbound;
    let mode = match inbound.strict {
        true => proto::workload::InboundMode::Strict,
        false => proto::workload::InboundMode::Permissive,
    };
    let opaque = inbound.opaque_ports.iter();
    let ports = inbound.ports.iter();
    proto::Workload {
        inbound_mode: mode.into(),
        opaque_ports: opaque
            .map(|range| proto::workload::PortRange {
                first: (*range.start()).into(),
                last: (*range.end()).into(),
            })
            .collect(),
        allow_connect: inbound.allow_connect,
        ports: ports
            .map(|port| proto::workload::Port {
                name: port.name.to_string(),
                port: port.port.into(),
                protocol: port.protocol.name().to_owned(),
            })
            .collect(),
        zone: workload.zone.to_string(),
        rate_limits: workload.rate_limits.clone(),
    }
}

/// The position of a state.
pub(super) fn position(position: &Position) -> proto::Position {
    let component = |(kind, version): (&Kind, &u64)| proto::position::Component {
        kind: kind.name().to_owned(),
        resource_version: *version,
    };
    proto::Position {
        epoch: position.epoch.to_string(),
        components: position.versions.iter().map(component).collect(),
    }
}

/// The difference between two states of a resource.
pub(super) fn delta(delta: &Delta) -> Update {
    // For proxies that do not know draining endpoints, these are removed.
    let draining = delta.upserted.iter().filter(|endpoint| endpoint.draining);
    let removed = delta.removed.iter().copied();
    let removed = removed.chain(draining.map(|endpoint| endpoint.address));
    Update::Delta(proto::Delta {
        upserted: with_draining(&delta.upserted, false),
        removed: removed.map(|address| address.to_string()).collect(),
        draining: with_draining(&delta.upserted, true),
    })
}

/// The endpoints that drain, or the others.
fn with_draining(endpoints: &[Endpoint], draining: bool) -> Vec<proto::Endpoint> {
    let endpoints = endpoints.iter();
    let endpoints = endpoints.filter(|endpoint| endpoint.draining == draining);
    endpoints.map(endpoint).collect()
}

fn endpoint(endpoint: &Endpoint) -> proto::Endpoint {
    let pod = endpoint.pod.as_ref();
    proto::Endpoint {
        address: endpoint.address.to_string(),
        zone: endpoint.zone.to_string(),
        pod_name: pod.map(|pod| pod.name.to_string()).unwrap_or_default(),
        pod_namespace: pod.map(|pod| pod.namespace.to_string()).unwrap_or_default(),
        identity: endpoint.identity.as_deref().unwrap_or_default().to_owned(),
        opaque: endpoint.opaque,
    }
}

fn canary((key, percent): &(Key, u32)) -> proto::service::Canary {
    proto::service::Canary {
        name: key.name.to_string(),
        weight: i32::try_from(*percent).expect("100 at most"),
        ..proto::service::Canary::default()
    }
}

fn port(port: &ServicePort) -> proto::service::Port {
    let (target_port, target_port_name) = match &port.target {
        TargetPort::Number(number) => ((*number).into(), String::new()),
        TargetPort::Name(name) => (0, name.clone()),
    };
    proto::service::Port {
        name: port.name.clone(),
        port: port.port.into(),
        target_port,
        protocol: port.protocol.name().to_owned(),
        target_port_name,
        app_protocol: port.app_protocol.clone(),
    }
}

fn service_endpoint(endpoint: &EndpointView) -> proto::service::Endpoint {
    proto::service::Endpoint {
        addresses: endpoint.addresses.iter().map(ToString::to_string).collect(),
        ready: endpoint.ready,
        pod_name: endpoint.pod_name.to_string(),
        terminating: endpoint.terminating,
        zone: endpoint.zone.to_string(),
        ports: endpoint
            .ports
            .iter()
            .map(|(name, number)| (name.clone(), (*number).into()))
            .collect(),
        identity: endpoint.identity.as_deref().unwrap_or_default().to_owned(),
    }
}
