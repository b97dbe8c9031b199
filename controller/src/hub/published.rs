//! A published state of a resource, with its encodings, which all subscribers share. It is
//! independent of the encoding.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use bytes::Bytes;

use crate::index::state::{Delta, State, Update};
use crate::index::version::Version;

/// Earlier states that differences are computed from. A subscriber that is further behind gets the
/// whole state.
const MAX_EARLIER_STATES: usize = 16;
/// The forms of a whole state.
pub const FORMS: usize = 4;
/// Endpoints in these states, except for the latest one.
const MAX_EARLIER_ENDPOINTS: usize = 10_000;

/// A published state.
#[derive(Debug)]
pub struct Published {
    /// The state.
    pub state: Arc<State>,
    /// The states before, the latest one last.
    earlier: Vec<Arc<State>>,
    whole: [OnceLock<Bytes>; FORMS],
    /// By the version of the earlier state.
    differences: Mutex<HashMap<Version, Bytes>>,
}

impl Published {
    /// The next state of a resource: the current one, if the versions are equal.
    pub fn next(current: Option<&Arc<Published>>, state: State) -> Arc<Published> {
        match current {
            Some(current) if current.state.version == state.version => current.clone(),
            Some(current) => Arc::new(current.successor(state)),
            None => Arc::new(Published::after(Vec::new(), state)),
        }
    }

    fn successor(&self, state: State) -> Published {
        if !state.differs_in_endpoints(&self.state) {
            // Other routes, for example, or limits of a pod, require the whole state.
            return Published::after(Vec::new(), state);
        }
        let mut earlier = self.earlier.clone();
        earlier.push(self.state.clone());
        let (mut kept, mut endpoints) = (0, 0);
        for state in earlier.iter().rev().take(MAX_EARLIER_STATES) {
            endpoints += state
                .target
                .as_ref()
                .map_or(0, |target| target.endpoints.len());
            if kept > 0 && endpoints > MAX_EARLIER_ENDPOINTS {
                break;
            }
            kept += 1;
        }
        earlier.drain(..earlier.len() - kept);
        Published::after(earlier, state)
    }

    fn after(earlier: Vec<Arc<State>>, state: State) -> Published {
        Published {
            state: Arc::new(state),
            earlier,
            whole: Default::default(),
            differences: Mutex::default(),
        }
    }

    /// The state in a form, less than `FORMS`, as `encode` encodes it, the first time only.
    pub fn whole(&self, form: usize, encode: impl FnOnce() -> Bytes) -> Bytes {
        self.whole[form].get_or_init(encode).clone()
    }

    /// The difference to an earlier state, if it is known and the whole state is not required.
    pub fn since(&self, version: Version) -> Option<Delta> {
        let before = self
            .earlier
            .iter()
            .rev()
            .find(|state| state.version == version)?;
        match self.state.since(before) {
            Update::Difference(delta) => Some(delta),
            Update::Whole | Update::Nothing => None,
        }
    }

    /// The difference to an earlier state as `encode` encodes it, the first time only.
    pub fn difference(
        &self,
        version: Version,
        encode: impl FnOnce(&Delta) -> Bytes,
    ) -> Option<Bytes> {
        let mut differences = self
            .differences
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(bytes) = differences.get(&version) {
            return Some(bytes.clone());
        }
        let bytes = encode(&self.since(version)?);
        differences.insert(version, bytes.clone());
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::object::Key;
    use crate::index::state::{Endpoint, Target, TargetKind, Workload};
    use diy_mesh_proto::mesh::v1::RateLimit;

    fn state(endpoints: u16) -> State {
        let endpoint = |port| Endpoint {
            address: ([10, 0, 0, 1], port).into(),
            zone: "".into(),
            pod: None,
            identity: None,
            opaque: false,
            draining: false,
        };
        State::new(Some(Target {
            kind: TargetKind::Service,
            key: Key::new("shop", "web"),
            app_protocol: String::new(),
            session_affinity: 0,
            endpoints: (1..=endpoints).map(endpoint).collect(),
            service: None,
            routes: None,
            policy: None,
        }))
    }

    /// The states with 1, 2, ... endpoints.
    fn published(sizes: impl IntoIterator<Item = u16>) -> Arc<Published> {
        let add = |published: Option<Arc<Published>>, size| {
            Some(Published::next(published.as_ref(), state(size)))
        };
        sizes.into_iter().fold(None, add).unwrap()
    }

    #[test]
    fn encodes_each_difference_once() {
        let latest = published([1, 2, 3]);
        let encode = |delta: &Delta| Bytes::from(format!("{} new", delta.upserted.len()));
        for (before, text) in [(1, "2 new"), (2, "1 new")] {
            let version = state(before).version;
            let first = latest.difference(version, encode).unwrap();
            let second = latest
                .difference(version, |_| panic!("encoded before"))
                .unwrap();
            assert_eq!(
                (&*first, first.as_ptr()),
                (text.as_bytes(), second.as_ptr())
            );
        }
        assert_eq!(latest.since(state(4).version), None, "an unknown version");
    }

    #[test]
    fn keeps_no_earlier_states_without_a_difference() {
        let limited = |requests| {
            let limit = RateLimit {
                requests,
                ..RateLimit::default()
            };
            let workload = Workload {
                rate_limits: vec![limit],
                ..Workload::default()
            };
            let target = Target {
                kind: TargetKind::Workload(Box::new(workload)),
                ..state(0).target.unwrap()
            };
            State::new(Some(target))
        };
        let first = Published::next(None, limited(1));
        let second = Published::next(Some(&first), limited(2));
        assert!(second.earlier.is_empty());
        assert_eq!(published([1, 2]).earlier.len(), 1);
    }

    #[test]
    fn keeps_a_bounded_number_of_earlier_states() {
        let latest = published(1..=100);
        let known = (1..100).filter(|size| latest.since(state(*size).version).is_some());
        assert_eq!(known.collect::<Vec<_>>(), (84..100).collect::<Vec<_>>());
        let latest = published([20_000, 20_001, 20_002]);
        assert!(
            latest.since(state(20_001).version).is_some(),
            "the latest one"
        );
        assert!(latest.since(state(20_000).version).is_none());
    }
}
