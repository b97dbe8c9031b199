//! The configuration of the proxy's own pod, as the controller sends it: validated, acknowledged or
//! rejected. Until the first one arrives, no client may call, and the pod may not call outside of the
//! cluster. With controllers that do not send it, the arguments of the proxy apply, which contain the
//! same values, except for the policies. No configuration weakens these.

use std::sync::Arc;

use diy_mesh_model::ports::{EXPECTED, PortSet};
use diy_mesh_proto::authorization::Authorization as Compiled;
use diy_mesh_proto::mesh::v1::discover_request::Action;
use diy_mesh_proto::mesh::v1::workload::InboundMode;
use diy_mesh_proto::mesh::v1::{
    self as proto, Acknowledgement, Authorization, ResourceType, Subscribe, Workload,
};
use diy_mesh_proto::telemetry::Telemetry;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::info;

use super::position::{Order, Position};
use super::{authorization, limits};
use crate::egress::Egress;
use crate::inbound::limit::RateLimits;
use crate::inbound::policy::Policy;
use crate::secure::control::SentPolicies;

/// The subscription to the own pod's configuration.
#[derive(Debug)]
pub(super) struct OwnPod {
    /// The policy of the proxy's arguments.
    pub(super) arguments: Policy,
    pub(super) policy: watch::Sender<Option<Arc<Policy>>>,
    /// The latest log line about the policy.
    logged: String,
    /// Whether a valid configuration has arrived.
    is_configured: bool,
    /// Version of the policy; empty if it has parts of several ones.
    pub(super) version: String,
    pub(super) order: Order,
    /// The policies in force, and the order of their states: they never go back.
    pub(super) policies: Policies,
    authorized: Order,
    /// The kinds of policies that the controller of the stream sends. Its messages say nothing about
    /// other kinds.
    sent: SentPolicies,
    /// A configuration that is older than the policy, from a replica that lags behind.
    refused: Option<Received>,
}

/// The AuthorizationPolicies of a configuration: about calls to the pod, and about its own.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Policies {
    pub authorization: Option<Authorization>,
    pub egress: Option<Authorization>,
}

/// A configuration, as a response has it.
#[derive(Debug)]
pub(super) struct Received {
    pub workload: Workload,
    pub version: String,
    pub position: Position,
}

impl OwnPod {
    pub fn new(arguments: Policy, policy: watch::Sender<Option<Arc<Policy>>>) -> Self {
        Self {
            arguments,
            policy,
            logged: String::new(),
            is_configured: false,
            version: String::new(),
            order: Order::default(),
            policies: Policies::default(),
            authorized: Order::default(),
            sent: SentPolicies::ALL,
            refused: None,
        }
    }

    /// Whether a valid configuration has arrived.
    pub fn is_configured(&self) -> bool {
        self.is_configured
    }

    /// The issuers of which tokens have named unknown keys since the last call.
    pub fn take_unknown_keys(&self) -> Vec<String> {
        let policy = self.policy.borrow().clone();
        let policies = policy.as_ref().and_then(|one| one.authorization.as_ref());
        let issuers = policies.map(|policies| policies.take_unknown_keys());
        issuers.into_iter().flatten().collect()
    }

    /// The controller sends no configuration: unless an earlier one did, the arguments apply.
    pub fn apply_arguments(&mut self) {
        if !self.is_configured {
            let policy = self.arguments.clone().from_controller(&self.arguments);
            self.policy.send_replace(Some(Arc::new(policy)));
        }
    }

    /// The subscription on a new stream.
    pub fn subscribe(&mut self, sent: SentPolicies, now: Instant) -> Action {
        self.sent = sent;
        self.refused = None;
        self.order.resume(now);
        Action::Subscribe(Subscribe {
            known_version: self.version.clone(),
            r#type: ResourceType::Self_.into(),
            known_position: self.order.known(now),
            ..Subscribe::default()
        })
    }

    /// Logs a configuration, unless only its rates have changed: replicas come and go.
    fn log(&mut self, policy: &Policy) {
        let limits: Vec<&str> = policy.rate_limits.0.iter().map(|one| &*one.name).collect();
        let logged = format!(
            "strict={} allow_connect={} opaque_ports={} rate_limits={limits:?} telemetry={:?}",
            policy.strict,
            policy.allow_connect,
            policy.opaque_ports,
            policy.telemetry.as_ref().map(|telemetry| &telemetry.name),
        );
        if self.logged != logged {
            info!("inbound configuration of this pod: {logged}");
            self.logged = logged;
        }
    }

    /// The stream has ended.
    pub fn pause(&mut self, now: Instant) {
        self.order.pause(now);
    }

    /// The version is current.
    pub fn confirm(&mut self, position: Position) {
        self.refused = None;
        self.authorized.advance(&position);
        self.order.confirm(position);
    }

    /// Applies a configuration, unless it is older than the policy. Returns its acknowledgement.
    pub fn receive(&mut self, mut received: Received, now: Instant) -> Option<Acknowledgement> {
        if !self.sent.authorization {
            received.workload.authorization = self.policies.authorization.clone();
        }
        if !self.sent.egress {
            received.workload.egress = self.policies.egress.clone();
        }
        let is_accepted = self.order.accepts(&received.position, now);
        if self.is_configured() && !(is_accepted && self.keeps_policies(&received)) {
            self.refused = Some(received);
            return None;
        }
        self.refused = None;
        Some(self.apply(received, now))
    }

    /// Applies the configuration that was refused for long enough: no replica sends a newer one.
    pub fn accept_refused(&mut self, now: Instant) -> Option<Acknowledgement> {
        let is_due = self.order.is_due(now);
        let refused = self.refused.take_if(|_| is_due)?;
        if self.keeps_policies(&refused) {
            return Some(self.apply(refused, now));
        }
        self.refused = Some(refused);
        None
    }

    /// Whether the policies of a configuration are those in force, or no older ones.
    fn keeps_policies(&self, received: &Received) -> bool {
        !self.authorized.is_older(&received.position)
            || Policies::of(&received.workload) == self.policies
    }

    /// Applies a valid configuration; an invalid one leaves the previous one in force, except for the
    /// authorization, of which every part is valid. The acknowledgement contains why it is rejected.
    fn apply(&mut self, received: Received, now: Instant) -> Acknowledgement {
        let Received {
            workload,
            version,
            position,
        } = received;
        let earlier = self.policy.borrow().clone();
        let policies = Policies::of(&workload);
        let in_force = earlier.as_deref();
        let authorization = if policies.authorization == self.policies.authorization {
            in_force.and_then(|policy| policy.authorization.clone())
        } else {
            let plain_paths = self.arguments.plain_paths;
            let message = policies.authorization.as_ref();
            message.map(|message| authorization::compile(message, plain_paths))
        };
        let egress = if policies.egress == self.policies.egress {
            in_force.and_then(|policy| policy.egress.clone())
        } else {
            let message = policies.egress.as_ref();
            message.map(|message| Egress::new(Compiled::compile(message)))
        };
        self.authorized.advance(&position);
        let limits = earlier.as_ref().map(|policy| &policy.rate_limits);
        let (policy, rejection) = match policy(&workload, limits, now.into_std()) {
            Ok(policy) => {
                self.is_configured = true;
                self.version = version.clone();
                self.order.apply(position);
                (policy.from_controller(&self.arguments), String::new())
            }
            Err(reason) => {
                let earlier = earlier.as_deref().unwrap_or(&self.arguments);
                (earlier.clone(), reason)
            }
        };
        let are_policies_new = policies != self.policies;
        self.policies = policies;
        if are_policies_new && !rejection.is_empty() {
            self.version.clear();
        }
        if are_policies_new || rejection.is_empty() {
            let policy = Policy {
                authorization,
                egress,
                ..policy
            };
            self.log(&policy);
            self.policy.send_replace(Some(Arc::new(policy)));
        }
        Acknowledgement {
            r#type: ResourceType::Self_.into(),
            version,
            rejection,
            ..Acknowledgement::default()
        }
    }
}

impl Policies {
    fn of(workload: &Workload) -> Self {
        Self {
            authorization: workload.authorization.clone(),
            egress: workload.egress.clone(),
        }
    }
}

/// Converts a configuration without its policies. Fails if a part is unknown to this proxy: it
/// cannot enforce it. The rate limits keep the fill of `earlier` ones.
fn policy(
    workload: &Workload,
    earlier: Option<&RateLimits>,
    now: std::time::Instant,
) -> Result<Policy, String> {
    let strict = match InboundMode::try_from(workload.inbound_mode) {
        Ok(InboundMode::Strict) => true,
        Ok(InboundMode::Permissive) => false,
        Ok(InboundMode::Unspecified) | Err(_) => {
            let mode = workload.inbound_mode;
            return Err(format!(
                "inbound mode {mode}: this version of the proxy knows permissive (1) and strict (2)"
            ));
        }
    };
    let ranges = workload.opaque_ports.iter();
    let opaque_ports = PortSet::from_ranges(ranges.map(|range| (range.first, range.last)));
    Ok(Policy {
        pending: false,
        strict,
        opaque_ports: opaque_ports
            .map_err(|(first, last)| format!("opaque ports {first}-{last}: {EXPECTED}"))?,
        allow_connect: workload.allow_connect,
        plain_paths: false,
        zone: workload.zone.clone(),
        rate_limits: match earlier {
            Some(earlier) => limits::parse(&workload.rate_limits, earlier, now)?,
            None => limits::parse(&workload.rate_limits, &RateLimits::default(), now)?,
        },
        authorization: None,
        egress: None,
        telemetry: workload.telemetry.as_ref().map(telemetry).transpose()?,
    })
}

fn telemetry(message: &proto::Telemetry) -> Result<Arc<Telemetry>, String> {
    let compiled = Telemetry::compile(message).map(Arc::new);
    compiled.map_err(|violation| format!("telemetry of {}: {violation}", message.name))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use diy_mesh_proto::mesh::v1::workload::PortRange;

    use super::super::position::MAX_REFUSAL;
    use super::*;

    fn received(workload: Workload, version: &str, pods: u64) -> Received {
        let position = proto::Position {
            epoch: "a".to_owned(),
            components: vec![proto::position::Component {
                kind: "Pod".to_owned(),
                resource_version: pods,
                ..proto::position::Component::default()
            }],
        };
        Received {
            workload,
            version: version.to_owned(),
            position: Some(position).into(),
        }
    }

    fn workload(mode: i32, opaque: (u32, u32)) -> Workload {
        Workload {
            inbound_mode: mode,
            opaque_ports: vec![PortRange {
                first: opaque.0,
                last: opaque.1,
            }],
            zone: "eu-1a".to_owned(),
            ..Workload::default()
        }
    }

    #[test]
    fn rejected_configuration_leaves_the_previous_one_in_force() {
        let (sender, receiver) = watch::channel(None);
        let arguments = Policy {
            opaque_ports: "25-26".parse().expect("ports"),
            ..Policy::default()
        };
        let mut own = OwnPod::new(arguments, sender);
        let mut apply = |workload, version: &str| {
            let acknowledgement = own
                .receive(received(workload, version, 0), Instant::now())
                .unwrap();
            assert_eq!(acknowledgement.version, version);
            (own.is_configured(), acknowledgement.rejection)
        };
        let (is_configured, reason) = apply(workload(7, (25, 25)), "1");
        assert!(
            !is_configured && reason.contains("inbound mode 7"),
            "{reason}"
        );
        assert_eq!(*receiver.borrow(), None);
        let (is_configured, _) = apply(workload(2, (25, 26)), "2");
        assert!(is_configured);
        for (wrong, expected) in [
            (workload(0, (25, 25)), "inbound mode 0"),
            (workload(2, (0, 25)), "opaque ports 0-25"),
            (workload(2, (26, 25)), "opaque ports 26-25"),
            (workload(2, (25, 65_536)), "opaque ports 25-65536"),
        ] {
            let (is_configured, reason) = apply(wrong, "3");
            assert!(is_configured && reason.contains(expected), "{reason}");
        }
        let policy = receiver.borrow().clone().unwrap();
        assert!(policy.strict && policy.opaque_ports.contains(26) && !policy.allow_connect);
        assert_eq!(policy.zone, "eu-1a");
        let Action::Subscribe(subscribe) = own.subscribe(SentPolicies::ALL, Instant::now()) else {
            panic!("expected a subscription");
        };
        assert_eq!(subscribe.known_version, "2");
    }

    /// Denies every call.
    fn denial() -> Option<proto::Authorization> {
        Some(proto::Authorization {
            deny_by_default: true,
            ..proto::Authorization::default()
        })
    }

    #[test]
    fn authorization_applies_also_with_a_part_that_is_rejected() {
        let (sender, receiver) = watch::channel(None);
        let (mut own, now) = (OwnPod::new(Policy::default(), sender), Instant::now());
        let denies = || {
            let policy = receiver.borrow().clone();
            policy.is_some_and(|policy| policy.authorization.is_some())
        };
        let version = |own: &mut OwnPod| match own.subscribe(SentPolicies::ALL, now) {
            Action::Subscribe(subscribe) => subscribe.known_version,
            other => panic!("{other:?}"),
        };
        own.receive(received(workload(1, (25, 25)), "1", 1), now);
        assert!(own.is_configured() && !denies());
        let rejected = Workload {
            authorization: denial(),
            ..workload(7, (25, 25))
        };
        let answer = own.receive(received(rejected.clone(), "2", 2), now);
        assert!(answer.is_some_and(|one| one.rejection.contains("inbound mode 7")));
        assert!(own.is_configured() && denies());
        // The first version would be without the policies.
        assert_eq!(version(&mut own), "");
        own.receive(received(workload(1, (25, 25)), "1", 3), now);
        assert!(!denies());
        assert_eq!(version(&mut own), "1");
        let (sender, receiver) = watch::channel(None);
        let mut own = OwnPod::new(Policy::default(), sender);
        own.receive(received(rejected, "2", 2), now);
        let policy = receiver.borrow().clone();
        assert!(policy.is_some_and(|policy| policy.authorization.is_some()));
        assert!(!own.is_configured());
    }

    #[test]
    fn authorization_never_goes_back_but_for_another_epoch() {
        let (sender, receiver) = watch::channel(None);
        let (mut own, start) = (OwnPod::new(Policy::default(), sender), Instant::now());
        let denies = || receiver.borrow().as_ref().unwrap().authorization.is_some();
        let state = |mode, authorization| Workload {
            authorization,
            ..workload(mode, (25, 25))
        };
        own.receive(received(state(1, denial()), "20", 20), start);
        own.pause(start);
        own.subscribe(SentPolicies::ALL, start);
        let due = start + MAX_REFUSAL;
        // The rest goes back with the same authorization, and no further.
        let same = received(state(2, denial()), "10", 10);
        assert!(own.receive(same, start).is_none());
        assert!(own.accept_refused(due).is_some() && denies());
        assert!(receiver.borrow().as_ref().unwrap().strict);
        for (version, pods) in [("9", 9), ("15", 15)] {
            let older = received(state(1, None), version, pods);
            assert!(own.receive(older, due).is_none());
            let later = due + 2 * MAX_REFUSAL;
            assert!(own.accept_refused(later).is_none() && denies());
        }
        let mut other_epoch = received(state(1, None), "1", 1);
        let epoch = proto::Position {
            epoch: "b".to_owned(),
            ..proto::Position::default()
        };
        other_epoch.position = Some(epoch).into();
        assert!(own.receive(other_epoch, due).is_some() && !denies());
    }

    #[test]
    fn controller_that_knows_no_policies_lifts_none() {
        let (sender, receiver) = watch::channel(None);
        let (mut own, now) = (OwnPod::new(Policy::default(), sender), Instant::now());
        let denies = || receiver.borrow().as_ref().unwrap().authorization.is_some();
        let denying = Workload {
            authorization: denial(),
            ..workload(1, (25, 25))
        };
        own.receive(received(denying, "20", 20), now);
        own.pause(now);
        own.subscribe(
            SentPolicies {
                authorization: false,
                ..SentPolicies::ALL
            },
            now,
        );
        let of_earlier_release = received(workload(2, (25, 25)), "30", 30);
        assert!(own.receive(of_earlier_release, now).is_some() && denies());
        assert!(receiver.borrow().as_ref().unwrap().strict);
        own.pause(now);
        own.subscribe(SentPolicies::ALL, now);
        let without = received(workload(2, (25, 25)), "40", 40);
        assert!(own.receive(without, now).is_some() && !denies());
    }

    #[test]
    fn lagging_replica_restores_an_older_configuration_only_if_no_newer_one_arrives() {
        let (sender, receiver) = watch::channel(None);
        let (mut own, start) = (OwnPod::new(Policy::default(), sender), Instant::now());
        let is_strict = || receiver.borrow().as_ref().is_some_and(|one| one.strict);
        let [strict, permissive] = [2, 1].map(|mode| workload(mode, (25, 25)));
        let newer = received(strict, "newer", 20);
        assert!(own.receive(newer, start).is_some() && is_strict());
        own.pause(start);
        let Action::Subscribe(subscribe) = own.subscribe(SentPolicies::ALL, start) else {
            panic!("expected a subscription");
        };
        let known = subscribe.known_position.unwrap();
        assert_eq!(known.components[0].resource_version, 20);
        let older = received(permissive.clone(), "older", 19);
        assert!(own.receive(older, start).is_none() && is_strict());
        let due = start + MAX_REFUSAL;
        assert!(own.accept_refused(due - Duration::from_millis(1)).is_none());
        let acknowledgement = own.accept_refused(due).unwrap();
        assert_eq!(acknowledgement.version, "older");
        assert!(!is_strict() && own.accept_refused(due).is_none());
        // A newer state of the replica, before the time has passed.
        let earlier = received(permissive, "earlier", 18);
        assert!(own.receive(earlier, due).is_none());
        let strict = received(workload(2, (25, 25)), "newer", 20);
        assert!(own.receive(strict, due).is_some() && is_strict());
        assert!(own.accept_refused(due + MAX_REFUSAL).is_none());
    }
}
