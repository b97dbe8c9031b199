//! Positions of states in the history of the cluster. A replica of the controller that lags behind
//! sends older states than the proxy already knows. Pure.

use std::collections::BTreeMap;

use diy_mesh_proto::mesh::v1 as proto;

/// The position of a state. Without an epoch, its order is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Position {
    epoch: String,
    versions: BTreeMap<String, u64>,
}

impl Position {
    /// Whether the state at `self` is older than the one at `other`: no component is greater, and
    /// one is smaller. Positions of different epochs have no order.
    pub fn is_older_than(&self, other: &Position) -> bool {
        let version = |position: &Position, kind| position.versions.get(kind).copied().unwrap_or(0);
        let kinds = || self.versions.keys().chain(other.versions.keys());
        !self.epoch.is_empty()
            && self.epoch == other.epoch
            && kinds().all(|kind| version(self, kind) <= version(other, kind))
            && kinds().any(|kind| version(self, kind) < version(other, kind))
    }
}

impl From<Option<proto::Position>> for Position {
    fn from(position: Option<proto::Position>) -> Self {
        let Some(position) = position else {
            return Self::default();
        };
        let components = position.components.into_iter();
        Self {
            epoch: position.epoch,
            versions: components
                .map(|component| (component.kind, component.resource_version))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(epoch: &str, versions: &[(&str, u64)]) -> Position {
        let versions = versions
            .iter()
            .map(|(kind, version)| (kind.to_string(), *version));
        Position {
            epoch: epoch.to_owned(),
            versions: versions.collect(),
        }
    }

    #[test]
    fn compares_by_component_within_one_epoch() {
        let known = at("a", &[("Pod", 10), ("Service", 20)]);
        for older in [
            at("a", &[("Pod", 9), ("Service", 20)]),
            at("a", &[("Pod", 9), ("Service", 19)]),
            at("a", &[("Pod", 10)]),
            at("a", &[]),
        ] {
            assert!(older.is_older_than(&known) && !known.is_older_than(&older));
        }
        for other in [
            known.clone(),
            at("a", &[("Pod", 9), ("Service", 21)]),
            at("a", &[("Pod", 11), ("Service", 20)]),
            at("b", &[("Pod", 1), ("Service", 1)]),
            Position::default(),
        ] {
            assert!(!other.is_older_than(&known), "{other:?}");
        }
        assert!(!Position::default().is_older_than(&at("", &[("Pod", 1)])));
    }
}
