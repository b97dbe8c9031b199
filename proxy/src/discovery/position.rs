//! Positions of states in the history of the cluster, and which states of a resource apply: a
//! replica of the controller that lags behind sends older ones than the proxy already has. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use diy_mesh_proto::mesh::v1 as proto;
use tokio::time::Instant;

/// Time with a stream for which states that are older than the known one are refused.
pub const MAX_REFUSAL: Duration = Duration::from_secs(30);

/// The position of a state. Without an epoch, its order is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Position {
    epoch: String,
    versions: BTreeMap<String, Versions>,
}

/// The versions of a kind: of the latest event, and up to which all events are included. After a
/// restore of a backup, versions do not continue: each has the number of its restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Versions {
    latest: (u64, u64),
    seen: (u64, u64),
}

impl Position {
    /// Whether positions of controllers that do not know the order of epochs are of the same one.
    fn is_comparable(&self, other: &Position) -> bool {
        let mut versions = self.versions.values().chain(other.versions.values());
        self.epoch == other.epoch || versions.any(|versions| versions.latest.0 > 0)
    }

    /// Whether a state at this position lacks events of one at `known`.
    fn is_older_than(&self, known: &Position) -> bool {
        let lacks = |(kind, versions): (&String, &Versions)| {
            let known = known.versions.get(kind);
            known.is_some_and(|known| versions.seen < known.latest)
        };
        self.is_comparable(known) && self.versions.iter().any(lacks)
    }
}

impl From<Option<proto::Position>> for Position {
    fn from(position: Option<proto::Position>) -> Self {
        let Some(position) = position else {
            return Self::default();
        };
        let versions = position.components.into_iter().map(|component| {
            let (latest, restored) = (component.resource_version, component.restored);
            let versions = Versions {
                latest: (restored, latest),
                seen: (restored, latest.max(component.seen)),
            };
            (component.kind, versions)
        });
        Self {
            epoch: position.epoch,
            versions: versions.collect(),
        }
    }
}

/// The order of the states of one resource: the latest position of those that were applied.
#[derive(Clone, Debug, Default)]
pub struct Order {
    known: Position,
    /// How long a state has been missing that is not older, before the stream and since when on it.
    waited: Duration,
    waiting_since: Option<Instant>,
}

impl Order {
    /// The latest version of each kind, as a text.
    pub fn text(&self) -> String {
        let kinds = self.known.versions.iter();
        let kinds = kinds.map(|(kind, versions)| format!("{kind} {}", versions.latest.1));
        kinds.collect::<Vec<_>>().join(", ")
    }

    /// The known position, for a subscription. `None` if any state applies: no replica has to catch up.
    pub fn known(&self, now: Instant) -> Option<proto::Position> {
        let component = |(kind, versions): (&String, &Versions)| proto::position::Component {
            kind: kind.clone(),
            resource_version: versions.latest.1,
            seen: 0,
            restored: versions.latest.0,
        };
        let is_ordered = !self.known.versions.is_empty() && !self.is_due(now);
        is_ordered.then(|| proto::Position {
            epoch: self.known.epoch.clone(),
            components: self.known.versions.iter().map(component).collect(),
        })
    }

    /// A stream begins. From now on, a state is missing.
    pub fn resume(&mut self, now: Instant) {
        let since = now.checked_sub(std::mem::take(&mut self.waited));
        self.waiting_since = Some(since.unwrap_or(now));
    }

    /// The stream has ended. Another one continues the time.
    pub fn pause(&mut self, now: Instant) {
        if let Some(since) = self.waiting_since.take() {
            self.waited = now.saturating_duration_since(since);
        }
    }

    /// Whether a state at this position is older than those that were applied.
    pub fn is_older(&self, position: &Position) -> bool {
        position.is_older_than(&self.known)
    }

    /// The state that applies is also that at this position, unless it is older.
    pub fn advance(&mut self, position: &Position) {
        if !self.is_older(position) {
            self.apply(position.clone());
        }
    }

    /// Whether a state at this position applies: it is not older, or none that is not older has
    /// arrived for [`MAX_REFUSAL`].
    pub fn accepts(&mut self, position: &Position, now: Instant) -> bool {
        if !position.is_older_than(&self.known) {
            return true;
        }
        self.waiting_since.get_or_insert(now);
        self.is_due(now)
    }

    /// Whether a state that was refused applies now.
    pub fn is_due(&self, now: Instant) -> bool {
        let waited = self
            .waiting_since
            .map(|since| now.saturating_duration_since(since));
        waited.is_some_and(|waited| waited >= MAX_REFUSAL)
    }

    /// The state that applies is also that at this position.
    pub fn confirm(&mut self, position: Position) {
        if position.is_older_than(&self.known) {
            (self.waited, self.waiting_since) = (Duration::ZERO, None)
        } else {
            self.apply(position)
        }
    }

    /// A state at this position applies. From an older one, which was taken anyway, the order begins
    /// anew.
    pub fn apply(&mut self, position: Position) {
        (self.waited, self.waiting_since) = (Duration::ZERO, None);
        let mut earlier = std::mem::replace(&mut self.known, position);
        let has_order = !self.known.versions.is_empty() && self.known.is_comparable(&earlier);
        if !has_order || self.known.is_older_than(&earlier) {
            return;
        }
        for (kind, versions) in &mut self.known.versions {
            if let Some(before) = earlier.versions.remove(kind) {
                versions.latest = versions.latest.max(before.latest);
            }
        }
        // Other targets of the resource depend on other kinds.
        self.known.versions.append(&mut earlier.versions);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kind, the number of the restore, the latest version, and up to which all are seen.
    type Component = (&'static str, u64, u64, u64);

    fn at(epoch: &str, components: &[Component]) -> Position {
        let components = components.iter();
        let component = |(kind, restored, latest, seen): &Component| proto::position::Component {
            kind: (*kind).to_owned(),
            resource_version: *latest,
            seen: *seen,
            restored: *restored,
        };
        Position::from(Some(proto::Position {
            epoch: epoch.to_owned(),
            components: components.map(component).collect(),
        }))
    }

    #[test]
    fn state_is_older_if_it_may_lack_an_event_of_one_kind() {
        let known = at("a", &[("Pod", 5, 10, 0), ("Service", 5, 20, 25)]);
        for older in [
            at("a", &[("Pod", 5, 9, 0), ("Service", 5, 20, 0)]),
            // Each replica has one watch that is stalled.
            at("a", &[("Pod", 5, 9, 9), ("Service", 5, 99, 99)]),
            at("a", &[("Pod", 5, 9, 0)]),
            // Before a restore of which the other one has learned.
            at("b", &[("Pod", 4, 99, 0)]),
            at("b", &[("Pod", 0, 99, 0)]),
        ] {
            assert!(older.is_older_than(&known), "{older:?}");
        }
        for other in [
            known.clone(),
            at("a", &[("Pod", 5, 11, 0), ("Service", 5, 20, 0)]),
            // There were no events in between.
            at("a", &[("Pod", 5, 1, 10), ("Service", 5, 2, 20)]),
            // It does not depend on pods.
            at("a", &[("Service", 5, 20, 0)]),
            at("b", &[("Pod", 6, 1, 0)]),
            Position::default(),
        ] {
            assert!(!other.is_older_than(&known), "{other:?}");
        }
        // Positions of controllers of an earlier release.
        let [first, second] = ["a", "a, restored"].map(|epoch| at(epoch, &[("Pod", 0, 1, 0)]));
        assert!(!first.is_older_than(&second) && !second.is_older_than(&first));
        assert!(!first.is_comparable(&second));
        assert!(!first.is_older_than(&Position::default()));
    }

    #[test]
    fn latest_version_of_each_kind_counts() {
        let (mut order, now) = (Order::default(), Instant::now());
        order.apply(at("a", &[("Pod", 0, 10, 0), ("HTTPRoute", 0, 7, 0)]));
        // Another target of the address, which has no routes.
        order.apply(at("a", &[("Pod", 0, 9, 12)]));
        // A replica that lags behind has the same state.
        order.confirm(at("a", &[("Pod", 0, 8, 0)]));
        let expected = at("a", &[("HTTPRoute", 0, 7, 0), ("Pod", 0, 10, 0)]);
        assert_eq!(Position::from(order.known(now)), expected);
        order.apply(at("b", &[("Pod", 1, 3, 0)]));
        let expected = at("b", &[("HTTPRoute", 0, 7, 0), ("Pod", 1, 3, 0)]);
        assert_eq!(Position::from(order.known(now)), expected);
        order.apply(Position::default());
        assert_eq!(order.known(now), None);
    }

    #[test]
    fn time_without_a_newer_state_counts_over_streams_that_end() {
        let (start, mut order) = (Instant::now(), Order::default());
        assert_eq!(order.known(start), None);
        let [known, older, oldest] = [10, 9, 8].map(|pods| at("a", &[("Pod", 0, pods, 0)]));
        order.apply(known);
        let mut now = start;
        for _ in 0..9 {
            order.resume(now);
            assert!(!order.accepts(&older, now) && order.known(now).is_some());
            now += MAX_REFUSAL / 10;
            order.pause(now);
            // Without a stream, no state is refused.
            now += MAX_REFUSAL;
        }
        order.resume(now);
        now += MAX_REFUSAL / 10;
        assert!(!order.accepts(&older, now - Duration::from_millis(1)));
        assert!(order.accepts(&older, now) && order.known(now).is_none());
        order.apply(older);
        assert!(!order.accepts(&oldest, now));
    }
}
