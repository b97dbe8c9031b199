//! The metrics that the record of an exchange updates.

use std::time::{Duration, Instant};

use diy_mesh_model::exchange::Direction;

use super::{ConnectionRecord, ExchangeRecord};
use crate::context::flow::Flow;
use crate::labels::{Peer, TlsKind};
use crate::observe::ended::Attempt;
use crate::observe::metrics::{ConnectionLabels, OpenConnection, RequestLabels};
use crate::upstream::balance::Backend;

impl ExchangeRecord {
    /// Counts the exchange, which took so long and has ended now.
    pub(super) fn count(&self, took: Duration, now: Instant) {
        let flow = &*self.flow;
        let rule = self.ended.rule.as_ref();
        let labels = RequestLabels {
            direction: flow.direction,
            route: rule.map(|(rule, _)| rule.name.clone()),
            peer: self.peer(),
            method: self.method,
            status: self.ended.status.map_or(0, |status| status.as_u16()),
            grpc: self.grpc.status(),
            error: self.error_type(),
            tls: self.ended.tls,
        };
        let bytes = [self.ended.transfer.sent, self.ended.transfer.received];
        let metrics = &flow.worker.metrics;
        metrics.request(&flow.counted, labels, bytes, took, now);
    }

    /// The verified caller, or the backend. Nothing that a request says.
    pub(super) fn peer(&self) -> Peer {
        peer(&self.flow, self.backend.as_deref())
    }
}

impl ConnectionRecord {
    /// Counts the connection as open, until the returned value is dropped.
    pub(super) fn count_open(&self) -> OpenConnection {
        let flow = &*self.flow;
        let labels = ConnectionLabels {
            direction: flow.direction,
            peer: peer(flow, None),
        };
        let tls = tls(flow, self.ended.attempt.as_ref());
        let requests = &flow.worker.metrics.requests;
        requests.connect(&labels, tls, self.ended.started)
    }
}

fn peer(flow: &Flow, backend: Option<&Backend>) -> Peer {
    let caller = || flow.caller.identity().map(Peer::caller);
    match flow.direction {
        Direction::Inbound => flow.counted.caller(|| caller().unwrap_or_default()),
        Direction::Outbound => backend.unwrap_or(&flow.destination).peer(),
    }
}

/// How the other side of the proxy has authenticated.
pub(super) fn tls(flow: &Flow, attempt: Option<&Attempt>) -> TlsKind {
    match (flow.direction, attempt.map(|attempt| &attempt.endpoint)) {
        (Direction::Inbound, _) if flow.caller.identity().is_some() => TlsKind::Mutual,
        (Direction::Outbound, Some(to)) if to.server_tls().is_some() => TlsKind::Server,
        (Direction::Outbound, Some(to)) if to.identity.is_some() => TlsKind::Mutual,
        _ => TlsKind::None,
    }
}
