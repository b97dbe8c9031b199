//! The inbound configuration of the proxy's own pod, as the controller sends it: validated,
//! acknowledged or rejected. Until the first one arrives, and with controllers that do not send it,
//! the arguments of the proxy apply, which contain the same values.

use std::sync::Arc;
use std::time::Instant;

use diy_mesh_proto::mesh::v1::discover_request::Action;
use diy_mesh_proto::mesh::v1::workload::InboundMode;
use diy_mesh_proto::mesh::v1::{Acknowledgement, ResourceType, Subscribe, Workload};
use tokio::sync::watch;
use tracing::info;

use super::limits;
use crate::policy::Policy;
use crate::ports::PortSet;

/// The subscription to the own pod's configuration.
#[derive(Debug)]
pub(super) struct OwnPod {
    policy: watch::Sender<Option<Arc<Policy>>>,
    /// What was logged of it.
    logged: String,
    /// Version of the policy; empty if there is none.
    version: String,
}

impl OwnPod {
    pub fn new(policy: watch::Sender<Option<Arc<Policy>>>) -> Self {
        Self {
            policy,
            logged: String::new(),
            version: String::new(),
        }
    }

    /// Whether a valid configuration has arrived.
    pub fn is_configured(&self) -> bool {
        !self.version.is_empty()
    }

    /// The subscription on a new stream.
    pub fn subscribe(&self) -> Action {
        Action::Subscribe(Subscribe {
            known_version: self.version.clone(),
            r#type: ResourceType::Self_.into(),
            ..Subscribe::default()
        })
    }

    /// Logs a configuration, unless only its rates have changed: replicas come and go.
    fn log(&mut self, policy: &Policy) {
        let limits: Vec<&str> = policy.rate_limits.0.iter().map(|one| &*one.name).collect();
        let logged = format!(
            "strict={} allow_connect={} opaque_ports={} rate_limits={limits:?}",
            policy.strict, policy.allow_connect, policy.opaque_ports
        );
        if self.logged != logged {
            info!("inbound configuration of this pod: {logged}");
            self.logged = logged;
        }
    }

    /// Applies a valid configuration; an invalid one leaves the previous one in force. The
    /// acknowledgement contains why it is rejected.
    pub fn apply(&mut self, workload: Workload, version: String) -> Acknowledgement {
        let earlier = self.policy.borrow().clone().unwrap_or_default();
        let rejection = match policy(&workload, &earlier, Instant::now()) {
            Ok(policy) => {
                self.log(&policy);
                self.policy.send_replace(Some(Arc::new(policy)));
                self.version = version.clone();
                String::new()
            }
            Err(reason) => reason,
        };
        Acknowledgement {
            r#type: ResourceType::Self_.into(),
            version,
            rejection,
            ..Acknowledgement::default()
        }
    }
}

/// Converts a configuration. Fails if a part is unknown to this proxy: it cannot enforce it. The
/// rate limits keep the fill of `earlier` ones.
fn policy(workload: &Workload, earlier: &Policy, now: Instant) -> Result<Policy, String> {
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
    let port = |number: u32| u16::try_from(number).ok().filter(|port| *port != 0);
    let ranges = workload.opaque_ports.iter().map(|range| {
        let ports = port(range.first).zip(port(range.last));
        let ports = ports.filter(|(first, last)| first <= last);
        ports.map(|(first, last)| first..=last).ok_or_else(|| {
            let (first, last) = (range.first, range.last);
            format!("opaque ports {first}-{last}: expected ports from 1 to 65535")
        })
    });
    Ok(Policy {
        strict,
        opaque_ports: ranges.collect::<Result<PortSet, _>>()?,
        allow_connect: workload.allow_connect,
        zone: workload.zone.clone(),
        rate_limits: limits::parse(&workload.rate_limits, &earlier.rate_limits, now)?,
    })
}

#[cfg(test)]
mod tests {
    use diy_mesh_proto::mesh::v1::workload::PortRange;

    use super::*;

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
        let mut own = OwnPod::new(sender);
        let mut apply = |workload, version: &str| {
            let acknowledgement = own.apply(workload, version.to_owned());
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
        let Action::Subscribe(subscribe) = own.subscribe() else {
            panic!("expected a subscription");
        };
        assert_eq!(subscribe.known_version, "2");
    }
}
