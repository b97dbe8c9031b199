//! The conditions of routes in the log, where no Kubernetes API can store them: with a catalog of
//! files, and of objects without a status, which get Events too.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fmt;

use diy_mesh_control_plane::events::Events;

use super::events;
use super::statuses::{Statuses, take_changed, wait_changed};
use crate::object::{Condition, ObjectId, ObjectStatus, TargetReference, TargetStatus};

/// Lines about one change of a cluster. The Service of many TrafficSplits may come and go.
const MAX_LINES: usize = 100;

/// The statuses that are known from the log.
type Known = BTreeMap<ObjectId, ObjectStatus>;

/// Logs each change of the conditions of a route, until it is dropped.
pub async fn log_changes(statuses: &impl Statuses) -> Infallible {
    let (mut known, mut changed) = (Known::new(), statuses.with_status());
    loop {
        changed.append(&mut take_changed(statuses));
        let current = current(statuses, std::mem::take(&mut changed));
        log(&changes(&mut known, current), usize::MAX);
        wait_changed(statuses).await;
    }
}

/// Logs each change, and queues Events about conditions that do not hold.
pub(super) fn announce(
    known: &mut Known,
    statuses: &impl Statuses,
    changed: BTreeSet<ObjectId>,
    events: &Events,
) {
    let changes = changes(known, current(statuses, changed));
    for status in &changes {
        let conditions = status.parents.iter().flat_map(|parent| &parent.conditions);
        for condition in conditions.filter(|condition| condition.is_problem()) {
            events::route_not_accepted(events, status, condition);
        }
    }
    log(&changes, MAX_LINES);
}

/// The current statuses of these objects, except those that are withheld.
fn current(
    statuses: &impl Statuses,
    changed: BTreeSet<ObjectId>,
) -> impl Iterator<Item = (ObjectId, Option<ObjectStatus>)> {
    changed.into_iter().filter_map(|id| {
        let status = statuses.get(&id).ok()?;
        Some((id, status))
    })
}

/// Records statuses as known. Returns each status with only the parents whose conditions have
/// changed, by more than a message that is not logged.
fn changes(
    known: &mut Known,
    current: impl IntoIterator<Item = (ObjectId, Option<ObjectStatus>)>,
) -> Vec<ObjectStatus> {
    let mut changes = Vec::new();
    for (id, status) in current {
        let before = known
            .remove(&id)
            .map_or_else(Vec::new, |before| before.parents);
        let before: Vec<String> = before.iter().map(described).collect();
        if let Some(mut status) = status {
            known.insert(id, status.clone());
            status
                .parents
                .retain(|parent| !before.contains(&described(parent)));
            changes.push(status);
        }
    }
    changes
}

/// Logs a line per parent, with a maximum of lines.
fn log(changes: &[ObjectStatus], max_lines: usize) {
    for (line, is_error) in bounded(lines(changes), max_lines) {
        if is_error {
            tracing::warn!("{line}")
        } else {
            tracing::info!("{line}")
        }
    }
}

/// A line per parent, and whether it contains an error.
fn lines(changes: &[ObjectStatus]) -> Vec<(String, bool)> {
    let mut lines = Vec::new();
    for status in changes {
        let (kind, key) = (status.kind, &status.key);
        for parent in &status.parents {
            let line = format!("{kind} {key}, parent {}", described(parent));
            lines.push((line, parent.conditions.iter().any(Condition::is_problem)));
        }
    }
    lines
}

/// The first lines, and one with the number of the others.
fn bounded(mut lines: Vec<(String, bool)>, max: usize) -> Vec<(String, bool)> {
    let others = lines.len().saturating_sub(max);
    if others > 0 {
        lines.truncate(max);
        lines.push((
            format!("{others} more routes have changed conditions"),
            true,
        ));
    }
    lines
}

fn described(parent: &TargetStatus) -> String {
    let conditions: Vec<String> = parent.conditions.iter().map(describe).collect();
    format!("{}: {}", parent.parent, conditions.join("; "))
}

fn describe(condition: &Condition) -> String {
    let status = format!("{}={}", condition.kind, condition.status());
    if condition.is_problem() {
        format!("{status}, {}: {}", condition.reason, condition.message)
    } else {
        status
    }
}

impl fmt::Display for TargetReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.kind.as_deref().unwrap_or("Gateway"))?;
        self.namespace
            .iter()
            .try_for_each(|namespace| write!(f, "{namespace}/"))?;
        f.write_str(&self.name)?;
        self.port.iter().try_for_each(|port| write!(f, ":{port}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::Key;
    use crate::status::testing::{KIND, accepted, service, status};

    #[test]
    fn changed_conditions_are_lines_and_others_are_not() {
        let route = || (KIND, Key::new("shop", "web"));
        let one = |holds| {
            let mut unresolved = accepted(false);
            (unresolved.kind, unresolved.message) = ("ResolvedRefs", "no Service x".into());
            let parents = vec![
                service("web", Some(80), vec![accepted(holds)]),
                service("other", None, vec![accepted(true), unresolved]),
            ];
            BTreeMap::from([(route(), Some(status(1, parents)))])
        };
        let lines = |known: &mut Known, current| lines(&changes(known, current));
        let mut known = Known::new();
        let expected = [
            (
                format!("{KIND} shop/web, parent Service web:80: Accepted=True"),
                false,
            ),
            (
                format!(
                    "{KIND} shop/web, parent Service other: Accepted=True; \
                     ResolvedRefs=False, UnsupportedValue: no Service x"
                ),
                true,
            ),
        ];
        assert_eq!(lines(&mut known, one(true)), expected);
        assert_eq!(lines(&mut known, one(true)), []);
        let changed = lines(&mut known, one(false));
        assert_eq!(changed.len(), 1);
        assert!(
            changed[0].0.contains("web:80: Accepted=False") && changed[0].1,
            "{changed:?}"
        );
        assert_eq!(lines(&mut known, BTreeMap::from([(route(), None)])), []);
        assert_eq!(known, Known::new());
        let many = vec![("line".to_owned(), false); 103];
        let lines = bounded(many, 100);
        let others = ("3 more routes have changed conditions".to_owned(), true);
        assert_eq!((lines.len(), &lines[100]), (101, &others));
        assert_eq!(bounded(lines.clone(), 101), lines);
    }
}
