//! The position of the index in the history of the cluster, which orders states of replicas. Pure.
//!
//! A state that includes a change has processed its event, so its position is at least the resource
//! version of that event. A state of a replica that lags is from a lower one. Resource versions are
//! compared as integers, and only within one kind:
//! <https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions>.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::object::Kind;

/// A position: the resource version of the latest event of each kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Position {
    /// The history that the resource versions belong to.
    pub epoch: Arc<str>,
    /// The resource version of the latest event by kind.
    pub versions: BTreeMap<Kind, u64>,
}

/// The events of the Kubernetes API so far.
#[derive(Debug, Default)]
pub(super) struct History {
    versions: BTreeMap<Kind, u64>,
    /// Resource versions that are no integers have no order.
    is_unordered: bool,
    /// The resource version at which the cluster was restored, as far as this replica has seen it.
    restored_at: Option<u64>,
}

impl History {
    /// Records an event. A list that is older than an earlier event shows that the cluster was
    /// restored from a backup: a new history begins.
    pub fn record(&mut self, kind: Kind, is_list: bool, version: Option<u64>) {
        let Some(version) = version else {
            self.is_unordered = true;
            return;
        };
        let latest = self.versions.get(&kind).copied().unwrap_or_default();
        if version < latest {
            if !is_list {
                return;
            }
            self.versions.clear();
            self.restored_at = Some(version);
        }
        self.versions.insert(kind, version);
    }

    /// The current position in the history of the cluster with this UID.
    pub fn position(&self, cluster: &str) -> Option<Position> {
        let is_complete = Kind::ALL
            .iter()
            .all(|kind| kind.is_optional() || self.versions.contains_key(kind));
        (is_complete && !self.is_unordered).then(|| Position {
            epoch: match self.restored_at {
                None => cluster.into(),
                Some(version) => format!("{cluster}, restored at {version}").into(),
            },
            versions: self.versions.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(events: &[(Kind, bool, u64)]) -> History {
        let mut history = History::default();
        for (kind, is_list, version) in events {
            history.record(*kind, *is_list, Some(*version));
        }
        history
    }

    const LISTS: [(Kind, bool, u64); 3] = [
        (Kind::Service, true, 10),
        (Kind::Slice, true, 11),
        (Kind::Pod, true, 12),
    ];

    #[test]
    fn position_has_the_latest_event_of_each_kind() {
        assert_eq!(
            history(&LISTS[..2]).position("uid"),
            None,
            "pods are missing"
        );
        let mut history = history(&LISTS);
        // Objects of one watch may arrive in another order than their versions.
        for version in [20, 19] {
            history.record(Kind::Pod, false, Some(version));
        }
        let position = history.position("uid").unwrap();
        assert_eq!(&*position.epoch, "uid");
        let versions = [(Kind::Service, 10), (Kind::Slice, 11), (Kind::Pod, 20)];
        assert_eq!(position.versions, versions.into());
    }

    #[test]
    fn list_of_an_earlier_version_begins_another_epoch() {
        let mut history = history(&LISTS);
        history.record(Kind::Pod, true, Some(7));
        assert_eq!(
            history.position("uid"),
            None,
            "others are to be listed again"
        );
        for kind in [Kind::Service, Kind::Slice] {
            history.record(kind, true, Some(8));
        }
        let position = history.position("uid").unwrap();
        assert_eq!(&*position.epoch, "uid, restored at 7");
        assert_eq!(position.versions[&Kind::Pod], 7);
    }

    #[test]
    fn versions_that_are_no_integers_have_no_order() {
        let mut history = history(&LISTS);
        history.record(Kind::Pod, false, None);
        history.record(Kind::Pod, false, Some(50));
        assert_eq!(history.position("uid"), None);
    }
}
