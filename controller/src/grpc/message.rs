//! Conversion of the values of the index to messages. Pure.

use bytes::{Bytes, BytesMut};
use diy_mesh_proto::mesh::v1 as proto;

use super::frames;
use crate::index::endpoints::{Delta, Endpoint, Endpoints};
use crate::index::state::{Target, TargetKind};
use crate::kinds::route::attach::Table;
use crate::object::Key;

/// A Service. One that does not exist has a name only and is marked as deleted.
pub(super) fn service(key: &Key, known: Option<proto::Service>) -> proto::Service {
    known.unwrap_or_else(|| proto::Service {
        name: key.name.to_string(),
        namespace: key.namespace.to_string(),
        deleted: true,
        ..proto::Service::default()
    })
}

/// The fields of a [`proto::Snapshot`] that have encodings of their own.
const SNAPSHOT_ENDPOINT: u32 = 5;
const SNAPSHOT_DRAINING: u32 = 8;
const SNAPSHOT_ROUTES: u32 = 10;
/// Endpoints in one message, about half a megabyte.
const MAX_PART_ENDPOINTS: usize = 4_000;

/// A target without its endpoints and routes.
pub(super) fn snapshot(target: &Target) -> proto::Snapshot {
    let kind = match target.kind {
        TargetKind::Pod => proto::snapshot::Kind::Pod,
        _ => proto::snapshot::Kind::Service,
    };
    let (ports, max_ports) = match &target.kind {
        TargetKind::UnknownPort(ports) => (ports.iter().map(|port| (*port).into()).collect(), 0),
        TargetKind::ExcessPort(supported) => {
            (vec![], u32::try_from(*supported).unwrap_or(u32::MAX))
        }
        _ => (vec![], 0),
    };
    let has_port = !matches!(
        target.kind,
        TargetKind::UnknownPort(_) | TargetKind::ExcessPort(_)
    );
    proto::Snapshot {
        kind: kind.into(),
        namespace: target.key.namespace.to_string(),
        name: target.key.name.to_string(),
        app_protocol: target.app_protocol.clone(),
        session_affinity_seconds: target.session_affinity,
        policy: target.policy.as_deref().cloned(),
        unknown_port: !has_port,
        ports,
        max_ports,
        ..proto::Snapshot::default()
    }
}

/// The routes of a snapshot, encoded once.
pub(super) fn routes(table: &Table) -> &Bytes {
    table.encoded(|routes| frames::field(SNAPSHOT_ROUTES, &routes))
}

/// The endpoints of a snapshot, in parts that fit into messages, encoded once.
pub(super) fn endpoints(endpoints: &Endpoints) -> &[Bytes] {
    endpoints.encoded(|all| {
        let part = |part: &[Endpoint]| {
            let mut bytes = BytesMut::new();
            for one in part {
                let field = if one.draining {
                    SNAPSHOT_DRAINING
                } else {
                    SNAPSHOT_ENDPOINT
                };
                prost::encoding::message::encode(field, &endpoint(one), &mut bytes);
            }
            bytes.freeze()
        };
        all.chunks(MAX_PART_ENDPOINTS).map(part).collect()
    })
}

/// The difference between two states of a resource.
pub(super) fn delta(delta: &Delta) -> proto::Delta {
    // For proxies that do not know draining endpoints, these are removed.
    let draining = delta.upserted.iter().filter(|endpoint| endpoint.draining);
    let removed = delta.removed.iter().copied();
    let removed = removed.chain(draining.map(|endpoint| endpoint.address));
    proto::Delta {
        upserted: with_draining(&delta.upserted, false),
        removed: removed.map(|address| address.to_string()).collect(),
        draining: with_draining(&delta.upserted, true),
    }
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
        outside: endpoint.outside,
        node_unready: endpoint.node_unready,
    }
}
