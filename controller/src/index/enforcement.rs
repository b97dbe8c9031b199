//! The routes and policies that the proxy of a pod does not apply, because it is of an older release
//! and lacks a capability. Pure.

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

/// A route or a policy at one of its targets.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Subject {
    /// The kind of the object.
    pub kind: Kind,
    /// Its namespace and name.
    pub key: Key,
    /// The Service or the namespace that it concerns.
    pub target: Target,
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
        let policies = |service: &Key, side| {
            let sources = self.policies.sources(service, side).into_iter();
            sources.map(|(key, target)| Subject {
                kind: Kind::TrafficPolicy,
                key,
                target,
            })
        };
        for (service, table) in used {
            subjects.extend(policies(&service, Side::Clients));
            let table = table.filter(|_| missing.routes);
            let routes = table.iter().flat_map(|table| &table.routes);
            subjects.extend(routes.map(|(kind, key)| Subject {
                kind: *kind,
                key: key.clone(),
                target: Target::Service(service.clone()),
            }));
        }
        for (service, _) in self.limiting(pod) {
            subjects.extend(policies(&service.key, Side::Pods));
        }
        subjects
    }
}
