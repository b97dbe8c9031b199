//! Requests for tests.

use diy_mesh_model::exchange::Direction;

use super::RequestLabels;
use crate::labels::{ErrorType, Peer, TlsKind};

/// A request that succeeded.
pub(crate) fn request(direction: Direction, route: &str, peer: (&str, &str)) -> RequestLabels {
    RequestLabels {
        direction,
        route: (!route.is_empty()).then(|| route.into()),
        peer: Peer::new(peer.1, peer.0),
        method: "GET",
        status: 200,
        grpc: "",
        error: ErrorType::None,
        tls: TlsKind::Mutual,
    }
}
