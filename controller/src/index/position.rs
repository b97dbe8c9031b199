//! The position of the index in the history of the cluster, which orders states of replicas. Pure.
//!
//! A position has two resource versions of each kind: `latest`, of the latest event or list, and
//! `seen`, up to which all events are included. A bookmark raises only `seen`. A state lacks an event
//! of another one if its `seen` is below the other's `latest`, so replicas that have seen the same
//! events are not behind each other, whenever they have listed the objects. Resource versions are
//! compared as integers, and only within one kind:
//! <https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions>.
//!
//! After a restore of etcd, resource versions do not continue: a new epoch begins. A list is of the
//! epoch that is known when it arrives, and the source lists all kinds again in each epoch.

use std::sync::Arc;

use diy_mesh_proto::mesh::v1 as proto;

use crate::catalog::claims::Subject;
use crate::object::Kind;

const KINDS: usize = Kind::ALL.len();

/// A position in the history of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Position {
    /// Orders the positions of this replica.
    number: u64,
    cluster: Arc<str>,
    epoch: u64,
    kinds: [Versions; KINDS],
}

/// The epoch and the latest resource version that a subscriber knows of each kind on which a state
/// depends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known([(u64, u64); KINDS]);

/// A part of a known position that another position lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lack {
    /// The epoch.
    Epoch,
    /// Events of a kind.
    Kind(Kind),
}

/// The meaning of an event for the resource version of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All objects were listed.
    List,
    /// An object has changed.
    Change,
    /// There were no other events.
    Bookmark,
    /// There are no objects.
    NotInstalled,
}

/// The events of the Kubernetes API so far.
#[derive(Debug, Default)]
pub struct History {
    /// The latest epoch: the time of the restore in seconds since 1970. 0: the first one.
    epoch: Option<u64>,
    kinds: [Versions; KINDS],
    /// The number of the latest position.
    number: u64,
    /// Resource versions that are no integers have no order.
    is_unordered: bool,
}

/// The versions of a kind. 0: it was not listed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Versions {
    epoch: u64,
    latest: u64,
    seen: u64,
}

impl History {
    /// Records an event.
    pub fn record(&mut self, kind: Kind, progress: Progress, version: Option<u64>) {
        self.number += 1;
        let versions = &mut self.kinds[kind as usize];
        if progress == Progress::NotInstalled {
            *versions = Versions::default();
            return;
        }
        let Some(version) = version else {
            self.is_unordered = true;
            return;
        };
        let epoch = self.epoch.unwrap_or_default();
        // Without a new epoch, proxies refuse the states after a restore for a while.
        let begins = versions.epoch < epoch || version < versions.seen;
        if progress == Progress::List && begins {
            *versions = Versions {
                epoch,
                ..Versions::default()
            };
        }
        // Objects of one watch may arrive in another order than their versions.
        versions.seen = versions.seen.max(version);
        if progress != Progress::Bookmark {
            versions.latest = versions.latest.max(version);
        }
    }

    /// Records the epoch of the lists from now on.
    pub fn set_epoch(&mut self, epoch: u64) {
        self.number += 1;
        if self.epoch.is_none() {
            let kinds = self.kinds.iter_mut();
            kinds.for_each(|versions| versions.epoch = epoch);
        }
        self.epoch = self.epoch.max(Some(epoch));
    }

    /// The current position in the history of the cluster with this UID.
    pub fn position(&self, cluster: &str) -> Option<Position> {
        let mut required = Kind::ALL.into_iter().filter(|kind| !kind.is_optional());
        let is_complete = required.all(|kind| self.kinds[kind as usize].seen > 0);
        let epoch = self.epoch.filter(|_| is_complete && !self.is_unordered)?;
        Some(Position {
            number: self.number,
            cluster: cluster.into(),
            epoch,
            kinds: self.kinds,
        })
    }
}

impl Position {
    /// Whether this replica had this position later than the other one.
    pub fn is_after(&self, other: Option<&Position>) -> bool {
        other.is_none_or(|other| self.number > other.number)
    }

    /// The parts of `known` that a state at this position may lack. Kinds that this replica has not
    /// listed have no objects.
    pub fn lacks<'a>(&'a self, known: &'a Known) -> impl Iterator<Item = Lack> + 'a {
        Kind::ALL.into_iter().filter_map(|kind| {
            let (own, known) = (&self.kinds[kind as usize], known.0[kind as usize]);
            let is_behind = own.seen > 0 && (own.epoch, own.seen) < known;
            is_behind.then_some(if known.0 > self.epoch {
                Lack::Epoch
            } else {
                Lack::Kind(kind)
            })
        })
    }

    /// The message for a state that depends on these kinds.
    pub fn message(&self, kinds: &[Kind]) -> proto::Position {
        let listed = kinds.iter().map(|kind| (kind, &self.kinds[*kind as usize]));
        let listed = listed.filter(|(_, versions)| versions.seen > 0);
        let component = |(kind, versions): (&Kind, &Versions)| proto::position::Component {
            kind: kind.unique_name().to_owned(),
            resource_version: versions.latest,
            seen: versions.seen,
            restored: versions.epoch,
        };
        let components: Vec<_> = listed.map(component).collect();
        let epochs = components.iter().map(|component| component.restored);
        proto::Position {
            epoch: match epochs.max() {
                None | Some(0) => self.cluster.to_string(),
                Some(time) => format!("{}, restored at {time}", self.cluster),
            },
            components,
        }
    }
}

impl Known {
    /// The subject of a lack, and its version that is known.
    pub fn claim(&self, lack: Lack) -> (Subject, u64) {
        match lack {
            Lack::Epoch => {
                let epochs = self.0.iter().map(|(epoch, _)| *epoch);
                (Subject::Epoch, epochs.max().unwrap_or_default())
            }
            Lack::Kind(kind) => (Subject::Kind(kind), self.0[kind as usize].1),
        }
    }
}

/// Kinds of later releases have no meaning.
impl From<proto::Position> for Known {
    fn from(position: proto::Position) -> Known {
        let mut known = Known::default();
        for component in position.components {
            if let Some(kind) = Kind::ALL
                .iter()
                .find(|kind| kind.unique_name() == component.kind)
            {
                known.0[*kind as usize] = (component.restored, component.resource_version);
            }
        }
        known
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTS: [(Kind, u64); 3] = [(Kind::Service, 10), (Kind::Slice, 11), (Kind::Pod, 12)];

    fn history(lists: &[(Kind, u64)]) -> History {
        let mut history = History::default();
        history.set_epoch(0);
        list(&mut history, lists);
        history
    }

    fn list(history: &mut History, lists: &[(Kind, u64)]) {
        for (kind, version) in lists {
            history.record(*kind, Progress::List, Some(*version));
        }
    }

    fn known(history: &History) -> Known {
        let position = history.position("uid").unwrap();
        position.message(&Kind::ALL).into()
    }

    fn lacks(history: &History, known: &Known) -> Vec<Lack> {
        history.position("uid").unwrap().lacks(known).collect()
    }

    /// The epoch, and the versions of some kinds: the number of the restore, latest and seen.
    fn message(history: &History, kinds: &[Kind]) -> (String, Vec<(u64, u64, u64)>) {
        let message = history.position("uid").unwrap().message(kinds);
        let components = message.components.iter();
        let components = components.map(|one| (one.restored, one.resource_version, one.seen));
        (message.epoch, components.collect())
    }

    #[test]
    fn position_has_the_latest_event_and_what_was_seen_of_each_kind() {
        let incomplete = history(&LISTS[..2]);
        assert_eq!(incomplete.position("uid"), None, "pods are missing");
        let mut history = history(&LISTS);
        let before = history.position("uid").unwrap();
        for (progress, version) in [
            (Progress::Change, 20),
            // Objects of one watch may arrive in another order than their versions.
            (Progress::Change, 19),
            (Progress::Bookmark, 30),
        ] {
            history.record(Kind::Pod, progress, Some(version));
        }
        let expected = vec![(0, 20, 30), (0, 10, 10)];
        let kinds = [Kind::Pod, Kind::Service, Kind::Grant];
        assert_eq!(message(&history, &kinds), ("uid".to_owned(), expected));
        let position = history.position("uid").unwrap();
        assert!(position.is_after(Some(&before)) && !before.is_after(Some(&position)));
    }

    #[test]
    fn replica_lacks_only_events_that_it_may_not_have_seen() {
        let mut other = history(&LISTS);
        let mut ahead = history(&LISTS);
        // A replica that has started later, and an event.
        list(&mut ahead, &[(Kind::Service, 50), (Kind::Grant, 51)]);
        ahead.record(Kind::Pod, Progress::Change, Some(40));
        let known = known(&ahead);
        let expected = [Kind::Service, Kind::Pod].map(Lack::Kind);
        assert_eq!(
            lacks(&other, &known),
            expected,
            "no ReferenceGrants are known"
        );
        other.record(Kind::Service, Progress::Bookmark, Some(60));
        assert_eq!(lacks(&other, &known), [Lack::Kind(Kind::Pod)]);
        other.record(Kind::Pod, Progress::Change, Some(40));
        assert_eq!(lacks(&other, &known), []);
        other.record(Kind::Grant, Progress::List, Some(1));
        assert_eq!(lacks(&other, &known), [Lack::Kind(Kind::Grant)]);
        other.record(Kind::Grant, Progress::NotInstalled, None);
        assert_eq!(lacks(&other, &known), []);
    }

    #[test]
    fn each_kind_is_of_the_epoch_in_which_it_was_listed() {
        let (mut history, other) = (history(&LISTS), history(&LISTS));
        history.set_epoch(1000);
        // An event of a watch that was opened before.
        history.record(Kind::Pod, Progress::Change, Some(99));
        let kinds = [Kind::Service, Kind::Pod];
        let before = vec![(0, 10, 10), (0, 99, 99)];
        assert_eq!(message(&history, &kinds), ("uid".to_owned(), before));
        list(&mut history, &[(Kind::Pod, 7)]);
        let after = vec![(0, 10, 10), (1000, 7, 7)];
        let epoch = "uid, restored at 1000".to_owned();
        assert_eq!(message(&history, &kinds), (epoch, after));
        // The other replica does not know the epoch yet, then has not listed the kind again.
        let known = known(&history);
        assert_eq!(lacks(&other, &known), [Lack::Epoch]);
        let mut other = other;
        other.set_epoch(1000);
        assert_eq!(lacks(&other, &known), [Lack::Kind(Kind::Pod)]);
        list(&mut other, &[(Kind::Pod, 8)]);
        assert_eq!(lacks(&other, &known), []);
        // An earlier one is of a backup.
        other.set_epoch(0);
        list(&mut other, &[(Kind::Pod, 9)]);
        assert_eq!(message(&other, &[Kind::Pod]).1, [(1000, 9, 9)]);
    }

    #[test]
    fn lower_version_without_a_new_epoch_is_an_earlier_position() {
        let mut history = history(&LISTS);
        let before = known(&history);
        list(&mut history, &[(Kind::Pod, 7)]);
        assert_eq!(lacks(&history, &before), [Lack::Kind(Kind::Pod)]);
    }

    #[test]
    fn epoch_that_is_known_later_is_that_of_the_lists_before() {
        let mut history = History::default();
        list(&mut history, &LISTS);
        assert_eq!(history.position("uid"), None);
        history.set_epoch(1000);
        assert_eq!(message(&history, &[Kind::Pod]).1, [(1000, 12, 12)]);
    }

    #[test]
    fn versions_that_are_no_integers_have_no_order() {
        let mut history = history(&LISTS);
        history.record(Kind::Pod, Progress::Change, None);
        history.record(Kind::Pod, Progress::Change, Some(50));
        assert_eq!(history.position("uid"), None);
    }

    #[test]
    fn kinds_are_places_in_their_order() {
        for (place, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, place);
        }
    }
}
