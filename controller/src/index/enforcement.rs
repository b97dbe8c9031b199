//! The routes and policies that the proxy of a pod does not apply, because it is of an older release
//! and lacks a capability, or because the pod has too many rate limits. Pure.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::Index;
use super::object::{Key, Kind};
use crate::authenticate::PodRef;
use crate::policy::{Side, Target};
use crate::routes::attach::Table;

/// The capabilities that a proxy lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Missing {
    /// It applies no routes, and with them no timeouts and retries of policies.
    pub routes: bool,
    /// It applies no other sections of policies.
    pub policy: bool,
}

/// Why a proxy does not apply an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// It lacks a capability.
    Capability,
    /// Its pod has as many rate limits as it can have.
    RateLimits,
}

/// A route or a policy that is not applied at one of its targets.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Subject {
    /// The kind of the object.
    pub kind: Kind,
    /// Its namespace and name.
    pub key: Key,
    /// The Service or the namespace that it concerns.
    pub target: Target,
    /// Why.
    pub cause: Cause,
}

impl Index {
    /// The routes and policies that the proxy of a pod does not apply. `used` are the Services that
    /// it has subscribed to, with their routes. A pod that is not meshed, or no longer, has no
    /// proxy: every service account can open a stream.
    pub fn not_applied(
        &self,
        pod: &PodRef,
        missing: Missing,
        used: impl IntoIterator<Item = (Key, Option<Arc<Table>>)>,
    ) -> BTreeSet<Subject> {
        let known = self
            .pods
            .get(&pod.key())
            .filter(|known| known.uid == pod.uid && known.identity.is_some() && !known.terminating);
        let (Some(pod), true) = (known, missing != Missing::default()) else {
            return BTreeSet::new();
        };
        let mut subjects = BTreeSet::new();
        let cause = Cause::Capability;
        for (service, table) in used {
            subjects.extend(self.policies_of(&service, Side::Clients, cause));
            let table = table.filter(|_| missing.routes);
            let routes = table.iter().flat_map(|table| &table.routes);
            subjects.extend(routes.map(|(kind, key)| Subject {
                kind: *kind,
                key: key.clone(),
                target: Target::Service(service.clone()),
                cause,
            }));
        }
        for (service, _) in self.limiting(pod) {
            subjects.extend(self.policies_of(&service.key, Side::Pods, cause));
        }
        subjects
    }

    /// The policies with rate limits that a pod does not have, because they are too many.
    pub fn omitted_limits(&self, pod: &Key) -> BTreeSet<Subject> {
        let pod = self.pods.get(pod).into_iter();
        let services = pod.flat_map(|pod| self.rate_limits(pod).1);
        services
            .flat_map(|service| self.policies_of(service, Side::Pods, Cause::RateLimits))
            .collect()
    }

    /// The policies in force for a Service.
    fn policies_of(
        &self,
        service: &Key,
        side: Side,
        cause: Cause,
    ) -> impl Iterator<Item = Subject> + use<> {
        let sources = self.policies.sources(service, side).into_iter();
        sources.map(move |(key, target)| Subject {
            kind: Kind::TrafficPolicy,
            key,
            target,
            cause,
        })
    }
}
