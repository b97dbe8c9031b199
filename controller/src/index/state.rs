//! The state of a resource, its version, and the difference between two states. Pure values.

use std::sync::Arc;

use diy_mesh_proto::mesh::v1::{self as proto, BackendPolicy, RateLimit, Telemetry};
use prost::Message;

use super::authorization::Authorization;
#[cfg(test)]
use super::endpoints::Delta;
use super::endpoints::Endpoints;
use super::position::Position;
use crate::kinds::pod::Inbound;
use crate::kinds::route::attach::Table;
use crate::object::Key;
use crate::object::version::{self, Digest, Version};

/// The state of a resource.
#[derive(Clone, Debug)]
pub struct State {
    /// The latest known position of an index with this state, if positions have an order.
    pub position: Option<Arc<Position>>,
    /// The version.
    pub version: Version,
    /// The digest of all but the endpoints.
    pub rest: Version,
    /// The target. `None`: neither a Service nor a pod, or a withheld state.
    pub target: Option<Target>,
    /// Without a target: it is the address of a node.
    pub is_node: bool,
    /// The state is not known yet. Subscribers keep what they have.
    pub is_withheld: bool,
}

/// The target of a resource.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// A Service or a pod.
    pub kind: TargetKind,
    /// Namespace and name of the Service or the pod.
    pub key: Key,
    /// The Service port's application protocol, or empty.
    pub app_protocol: String,
    /// How long a client keeps its endpoint after a request, in seconds. 0: not at all.
    pub session_affinity: u32,
    /// The endpoints that are ready, and those that drain.
    pub endpoints: Arc<Endpoints>,
    /// The Service whose routes and policy it has. For a pod: a headless Service that selects it.
    pub service: Option<Key>,
    /// The routes for the client, if there are any. Only destinations have routes.
    pub routes: Option<Arc<Table>>,
    /// How clients use the endpoints of the Service.
    pub policy: Option<Arc<BackendPolicy>>,
}

/// The kind of a target.
#[derive(Clone, Debug, PartialEq)]
pub enum TargetKind {
    /// A Service by its cluster IP.
    Service,
    /// A Service by its cluster IP that does not have the port, and the first TCP ports that it has.
    UnknownPort(Box<[u16]>),
    /// A TCP port of a Service over its limit, and the number of ports that have endpoints.
    ExcessPort(usize),
    /// A pod by its own IP.
    Pod,
    /// The inbound configuration of a pod.
    Workload(Box<Workload>),
}

/// The inbound configuration of a pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Workload {
    /// The inbound settings that its injector wrote.
    pub inbound: Inbound,
    /// The zone of its node, or empty.
    pub zone: Arc<str>,
    /// The limits of its requests.
    pub rate_limits: Vec<RateLimit>,
    /// The Services that they are of, and those whose limits are surplus.
    pub limiting: Vec<(Key, bool)>,
    /// The telemetry settings of its proxy.
    pub telemetry: Option<Arc<Telemetry>>,
    /// The Services whose telemetry is replaced by the telemetry of another Service.
    pub replaced: Vec<Key>,
    /// Who may call it.
    pub authorization: Authorization,
    /// The destinations that it may call outside of the cluster.
    pub egress: Authorization,
}

impl Workload {
    /// The inbound configuration of a pod.
    pub(crate) fn message(&self) -> proto::Workload {
        let inbound = &self.inbound;
        let mode = if inbound.strict {
            proto::workload::InboundMode::Strict
        } else {
            proto::workload::InboundMode::Permissive
        };
        let opaque = inbound.opaque_ports.ranges().iter();
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
            zone: self.zone.to_string(),
            rate_limits: self.rate_limits.clone(),
            authorization: self.authorization.message(),
            egress: self.egress.message(),
            telemetry: self.telemetry.as_deref().cloned(),
        }
    }
}

/// The update for a subscriber.
#[cfg(test)]
#[derive(Clone, Debug, PartialEq)]
pub enum Update {
    /// The whole state: the target has changed.
    Whole,
    /// The difference to the subscriber's state.
    Difference(Delta),
    /// The subscriber has the state.
    Nothing,
}

impl Target {
    /// A target without endpoints, routes and policy.
    pub fn new(kind: TargetKind, key: Key) -> Target {
        Target {
            kind,
            key,
            app_protocol: String::new(),
            session_affinity: 0,
            endpoints: Arc::default(),
            service: None,
            routes: None,
            policy: None,
        }
    }
}

/// Equal versions mean equal states. Their positions may differ.
impl PartialEq for State {
    fn eq(&self, other: &State) -> bool {
        self.version == other.version
    }
}

impl State {
    /// Sets the position, unless it is an earlier one.
    pub fn advance(state: &mut Arc<State>, position: Option<&Arc<Position>>) {
        if let Some(position) = position
            && position.is_after(state.position.as_deref())
        {
            Arc::make_mut(state).position = Some(position.clone());
        }
    }

    /// The state of a resource with this target.
    pub fn new(target: Option<Target>) -> State {
        let rest = digest_of_rest(target.as_ref());
        let endpoints = target.as_ref().map(|target| target.endpoints.version);
        State {
            position: None,
            version: version::of("state", &(rest, endpoints)),
            rest,
            target,
            is_node: false,
            is_withheld: false,
        }
    }

    /// The state of a resource that is not known yet.
    pub fn withheld() -> State {
        State {
            is_withheld: true,
            ..State::without_target("withheld")
        }
    }

    /// The state of an address of a node that is neither a Service nor a pod.
    pub fn of_node() -> State {
        State {
            is_node: true,
            ..State::without_target("node")
        }
    }

    fn without_target(what: &str) -> State {
        let rest = Digest::new(what).finish();
        State {
            version: rest,
            rest,
            ..State::new(None)
        }
    }

    /// The update for a subscriber with the state `before`.
    #[cfg(test)]
    pub fn since(&self, before: &State) -> Update {
        if self.version == before.version {
            return Update::Nothing;
        }
        match (&before.target, &self.target) {
            (Some(old), Some(new)) if self.rest == before.rest => {
                Update::Difference(new.endpoints.since(&old.endpoints))
            }
            _ => Update::Whole,
        }
    }
}

fn digest_of_rest(target: Option<&Target>) -> Version {
    let Some(target) = target else {
        return Digest::new("unknown").finish();
    };
    let mut digest = Digest::new(match target.kind {
        TargetKind::Service => "service",
        TargetKind::UnknownPort(_) => "unknown port",
        TargetKind::ExcessPort(_) => "excess port",
        TargetKind::Pod => "pod",
        TargetKind::Workload(_) => "workload",
    });
    if let TargetKind::Workload(workload) = &target.kind {
        digest_inbound(&mut digest, &workload.inbound);
        digest.text(&workload.zone);
        for limit in &workload.rate_limits {
            digest.text(&version::of("rate limit", &limit.encode_to_vec()).to_string());
        }
        // Reviews read them from the state.
        for (service, is_surplus) in &workload.limiting {
            digest.text(&service.namespace);
            digest.text(&service.name);
            digest.number((*is_surplus).into());
        }
        workload.authorization.digest(&mut digest);
        // Without any, the version is the same as in earlier releases.
        if workload.egress != Authorization::default() {
            digest.text("egress");
            workload.egress.digest(&mut digest);
        }
        if let Some(telemetry) = &workload.telemetry {
            let version = version::of("telemetry", &telemetry.encode_to_vec());
            digest.text(&version.to_string());
            for service in &workload.replaced {
                digest.text(&service.name);
            }
        }
    }
    if let TargetKind::UnknownPort(ports) = &target.kind {
        digest.number(ports.len() as u64);
        ports.iter().for_each(|port| digest.number((*port).into()));
    }
    if let TargetKind::ExcessPort(ports) = &target.kind {
        digest.number(*ports as u64);
    }
    digest.text(&target.key.namespace);
    digest.text(&target.key.name);
    digest.text(&target.app_protocol);
    digest.number(target.session_affinity.into());
    if let Some(routes) = &target.routes {
        digest.text(&routes.version.to_string());
    }
    if let Some(policy) = &target.policy {
        digest.text(&version::of("policy", policy).to_string());
    }
    digest.finish()
}

fn digest_inbound(digest: &mut Digest, inbound: &Inbound) {
    digest.number(u64::from(inbound.strict) | u64::from(inbound.allow_connect) << 1);
    digest.number(inbound.opaque_ports.ranges().len() as u64);
    for ports in inbound.opaque_ports.ranges() {
        digest.number((*ports.start()).into());
        digest.number((*ports.end()).into());
    }
    digest.number(inbound.ports.len() as u64);
    for port in &inbound.ports {
        digest.text(&port.name);
        digest.number(port.port.into());
        digest.text(port.protocol.name());
    }
}

#[cfg(test)]
mod tests {
    use super::super::endpoints::Endpoint;
    use super::*;

    fn endpoint(address: &str, zone: &str) -> Endpoint {
        Endpoint {
            address: address.parse().unwrap(),
            zone: zone.into(),
            pod: None,
            identity: None,
            opaque: false,
            draining: false,
            node_unready: false,
            outside: false,
        }
    }

    fn state(name: &str, endpoints: Vec<Endpoint>) -> State {
        let key = Key::new("shop", name);
        State::new(Some(Target {
            endpoints: Arc::new(Endpoints::new(endpoints)),
            ..Target::new(TargetKind::Service, key)
        }))
    }

    #[test]
    fn difference_contains_new_changed_and_removed_endpoints() {
        let before = state(
            "web",
            vec![
                endpoint("10.0.0.1:80", "a"),
                endpoint("10.0.0.2:80", "a"),
                endpoint("10.0.0.3:80", "a"),
            ],
        );
        let after = state(
            "web",
            vec![
                endpoint("10.0.0.2:80", "b"),
                endpoint("10.0.0.3:80", "a"),
                endpoint("10.0.0.4:80", "a"),
            ],
        );
        let Update::Difference(delta) = after.since(&before) else {
            panic!("a delta is enough")
        };
        assert_eq!(
            delta.upserted,
            [endpoint("10.0.0.2:80", "b"), endpoint("10.0.0.4:80", "a")]
        );
        assert_eq!(delta.removed, ["10.0.0.1:80".parse().unwrap()]);
        assert_eq!(after.since(&after.clone()), Update::Nothing);
    }

    #[test]
    fn another_target_requires_the_whole_state() {
        assert_eq!(
            state("web", vec![]).since(&state("api", vec![])),
            Update::Whole
        );
        assert_eq!(State::new(None).since(&state("web", vec![])), Update::Whole);
        assert_eq!(state("web", vec![]).since(&State::new(None)), Update::Whole);
    }

    #[test]
    fn versions_differ_for_each_field() {
        let mut versions = vec![
            State::new(None).version,
            state("web", vec![]).version,
            state("api", vec![]).version,
        ];
        versions.push(state("web", vec![endpoint("10.0.0.1:80", "")]).version);
        versions.push(state("web", vec![endpoint("10.0.0.1:81", "")]).version);
        versions.push(state("web", vec![endpoint("10.0.0.1:80", "a")]).version);
        versions.push(
            state(
                "web",
                vec![Endpoint {
                    pod: Some(Key::new("shop", "p")),
                    ..endpoint("10.0.0.1:80", "")
                }],
            )
            .version,
        );
        versions.push(
            state(
                "web",
                vec![Endpoint {
                    identity: Some("spiffe://x".into()),
                    ..endpoint("10.0.0.1:80", "")
                }],
            )
            .version,
        );
        versions.push(
            state(
                "web",
                vec![Endpoint {
                    opaque: true,
                    ..endpoint("10.0.0.1:80", "")
                }],
            )
            .version,
        );
        versions.push(
            state(
                "web",
                vec![Endpoint {
                    draining: true,
                    ..endpoint("10.0.0.1:80", "")
                }],
            )
            .version,
        );
        let mut sticky = state("web", vec![]).target.unwrap();
        sticky.session_affinity = 60;
        let sticky = State::new(Some(sticky));
        assert_eq!(sticky.since(&state("web", vec![])), Update::Whole);
        versions.push(sticky.version);
        for name in ["a", "b"] {
            let mut target = state("web", vec![]).target.unwrap();
            target.policy = Some(Arc::new(BackendPolicy {
                name: name.to_owned(),
                ..BackendPolicy::default()
            }));
            let with_policy = State::new(Some(target));
            assert_eq!(with_policy.since(&state("web", vec![])), Update::Whole);
            versions.push(with_policy.version);
        }
        let limit = |replicas| RateLimit {
            replicas,
            ..RateLimit::default()
        };
        for (zone, rate_limits) in [
            ("", vec![]),
            ("a", vec![]),
            ("", vec![limit(1)]),
            ("", vec![limit(2)]),
            ("", vec![limit(1), limit(2)]),
        ] {
            let mut target = state("web", vec![]).target.unwrap();
            target.kind = TargetKind::Workload(Box::new(Workload {
                zone: zone.into(),
                rate_limits,
                ..Workload::default()
            }));
            versions.push(State::new(Some(target)).version);
        }
        for ports in [vec![], vec![80], vec![80, 443]] {
            let target = Target {
                kind: TargetKind::UnknownPort(ports.into()),
                key: Key::new("shop", "web"),
                app_protocol: String::new(),
                session_affinity: 0,
                endpoints: Arc::default(),
                service: None,
                routes: None,
                policy: None,
            };
            versions.push(State::new(Some(target)).version);
        }
        for (position, version) in versions.iter().enumerate() {
            assert!(
                !versions[..position].contains(version),
                "version {position} is not unique"
            );
        }
    }
}
