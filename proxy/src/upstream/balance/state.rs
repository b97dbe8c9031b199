//! The state of a backend and of its endpoints, for the admin server. Changes nothing, but applies the
//! latest update of discovery.

use std::time::Instant;

use diy_mesh_model::exchange::milliseconds;
use diy_mesh_model::state::{self, Cut};

use super::{Backend, Member};

/// The bytes of the reason of a rejection.
const MAX_REASON: usize = 256;

impl Backend {
    /// The state in force, without its direction and version. Each list takes at most `max_bytes`.
    pub fn state(&self, max_bytes: usize, now: Instant) -> state::Destination {
        self.apply_updates();
        let state = self.state.borrow();
        let routes = state.target.routes.as_deref();
        let names = routes.map(|routes| routes.names()).unwrap_or_default();
        let rejection = routes.and_then(|routes| routes.rejection());
        let mut members: Vec<_> = state.members.iter().collect();
        members.sort_by_key(|member| member.is_ready(now));
        state::Destination {
            name: self.resource.to_string(),
            service: state.name.to_string(),
            kind: state.target.kind.name().to_owned(),
            protocol: state.app_protocol.map(|one| one.name().to_owned()),
            policy: state.target.policy.name.clone(),
            routes: Cut::of(names.iter(), &mut { max_bytes }, |name, _| name.to_string()),
            rejected_routes: rejection
                .map(|reason| reason[..reason.floor_char_boundary(MAX_REASON)].to_owned()),
            circuit_open_ms: self.health.detector.left(now).map(milliseconds),
            endpoints: Cut::of(members.into_iter(), &mut { max_bytes }, |member, _| {
                member.state(now)
            }),
            ..state::Destination::default()
        }
    }
}

impl Member {
    /// Whether requests and retries go to the endpoint.
    fn is_ready(&self, now: Instant) -> bool {
        self.endpoint.judgement.left(now).is_none() && !self.endpoint.refuses_retries(now)
    }

    fn state(&self, now: Instant) -> state::Endpoint {
        let (info, endpoint) = (&self.info, &self.endpoint);
        let (cause, left) = endpoint.judgement.left(now).unzip();
        state::Endpoint {
            address: info.address.to_string(),
            pod: info.pod.clone(),
            zone: info.zone.clone(),
            identity: info.identity.as_ref().map(ToString::to_string),
            opaque: info.opaque,
            in_flight: endpoint.in_flight(),
            latency_ms: endpoint.latency.usual(now).map(milliseconds),
            ejected: cause.map(|cause| cause.name().to_owned()),
            ejected_ms: left.map(milliseconds),
            no_retry_ms: endpoint.no_retry_left(now).map(milliseconds),
            pool: endpoint.pool().state(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::rc::Rc;
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::sync::watch;

    use super::super::policy::BackendPolicy;
    use super::super::{BreakerSettings, Pools};
    use super::*;
    use crate::discovery::{Target, TargetKind};
    use crate::endpoint::EndpointInfo;
    use crate::http::verdict::{Overload, Retryable, Verdict};
    use crate::route::{Routes, Rule};

    const MINUTE: Duration = Duration::from_secs(60);

    fn address(number: u16) -> SocketAddr {
        ([10, 1, (number >> 8) as u8, number as u8], 80).into()
    }

    /// A Service with so many endpoints, whose circuit opens at the second failure.
    fn backend(endpoints: u16, routes: Routes) -> Backend {
        let info = |number| EndpointInfo {
            pod: format!("shop/cart-{number}"),
            zone: "a".into(),
            ..EndpointInfo::bare(address(number))
        };
        let target = Target {
            kind: TargetKind::Service,
            namespace: "shop".into(),
            name: "cart".into(),
            endpoints: (0..endpoints)
                .map(|number| Arc::new(info(number)))
                .collect(),
            routes: Some(Arc::new(routes)),
            policy: Arc::new(BackendPolicy {
                name: "TrafficPolicy shop/cart".into(),
                breaker: Some(BreakerSettings {
                    failure_percent: 50,
                    min_requests: 2,
                    interval: MINUTE,
                    open_time: MINUTE,
                }),
                ..BackendPolicy::default()
            }),
            ..Target::default()
        };
        let updates = watch::channel(Arc::new(target)).1;
        let service = SocketAddr::from(([10, 96, 0, 7], 80));
        Backend::watched(service, updates, &Rc::<Pools>::default())
    }

    #[test]
    fn backend_tells_its_names_and_limits() {
        let rule = |name: &str| {
            Arc::new(Rule {
                name: name.into(),
                ..Rule::default()
            })
        };
        let rules = ["HTTPRoute shop/b", "HTTPRoute shop/a", "HTTPRoute shop/b"];
        let backend = backend(1, Routes::new(Vec::new(), rules.map(rule).to_vec()));
        let state = backend.state(10_000, Instant::now());
        assert_eq!(
            [&*state.name, &state.service, &state.kind, &state.policy],
            [
                "10.96.0.7:80",
                "shop/cart",
                "service",
                "TrafficPolicy shop/cart"
            ]
        );
        assert_eq!(state.routes.items, ["HTTPRoute shop/a", "HTTPRoute shop/b"]);
        let pool = &state.endpoints.items[0].pool;
        assert_eq!((pool.connections, pool.max_connections), (0, Some(4096)));
        assert_eq!(
            (pool.max_http2_connections, pool.max_requests),
            (Some(64), None)
        );
        let rejected = Routes::rejected("é".repeat(1000));
        let state = super::tests::backend(1, rejected).state(10_000, Instant::now());
        assert_eq!(state.rejected_routes.map(|reason| reason.len()), Some(256));
    }

    #[test]
    fn endpoint_is_ready_or_ejected_or_gets_no_retries() {
        let backend = backend(4, Routes::default());
        let endpoint = |number| backend.endpoint(address(number)).expect("an endpoint");
        endpoint(2).begin(Instant::now()).refused();
        let overload = Overload {
            retry: Retryable::Idempotent,
            retry_after: MINUTE,
        };
        let mut in_flight = endpoint(3).begin(Instant::now());
        in_flight.answered(Verdict::Overloaded(overload));
        let now = Instant::now();
        let state = backend.state(10_000, now);
        let endpoints = &state.endpoints.items;
        let order: Vec<_> = endpoints.iter().map(|one| one.pod.as_str()).collect();
        assert_eq!(
            order,
            ["shop/cart-2", "shop/cart-3", "shop/cart-0", "shop/cart-1"]
        );
        assert_eq!(endpoints[0].ejected.as_deref(), Some("refused"));
        let left = endpoints[0].ejected_ms;
        assert!(
            left.is_some_and(|left| (0.0..=1000.0).contains(&left)),
            "{left:?}"
        );
        assert!(endpoints[1].no_retry_ms.is_some_and(|left| left > 0.0));
        assert_eq!((endpoints[1].in_flight, &*endpoints[1].zone), (1, "a"));
        assert!(endpoints[2].ejected.is_none() && endpoints[2].no_retry_ms.is_none());
        assert_eq!(state.circuit_open_ms, None);
        // The time is over, and no request has decided yet.
        let later = backend.state(10_000, now + MINUTE);
        assert_eq!(later.endpoints.items[0].ejected_ms, Some(0.0));
        assert_eq!(later.endpoints.items[3].no_retry_ms, None);
    }

    #[test]
    fn open_circuit_tells_its_time() {
        let backend = backend(2, Routes::default());
        for number in [0, 1] {
            backend
                .endpoint(address(number))
                .expect("an endpoint")
                .begin(Instant::now())
                .failed();
        }
        let state = |now| backend.state(10_000, now).circuit_open_ms;
        let now = Instant::now();
        assert!(state(now).is_some_and(|left| (1000.0..=60_000.0).contains(&left)));
        assert_eq!(state(now + MINUTE), Some(0.0));
    }

    #[test]
    fn endpoints_are_cut_and_those_that_are_not_ready_stay() {
        let backend = backend(2000, Routes::default());
        backend
            .endpoint(address(1999))
            .expect("an endpoint")
            .begin(Instant::now())
            .refused();
        let endpoints = backend.state(10_000, Instant::now()).endpoints;
        assert_eq!(endpoints.items.len() + endpoints.omitted, 2000);
        assert!((10..100).contains(&endpoints.items.len()));
        assert_eq!(endpoints.items[0].pod, "shop/cart-1999");
    }
}
