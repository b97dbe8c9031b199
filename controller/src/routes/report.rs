//! The conditions of routes in the log, where no Kubernetes API can store them: with a catalog of
//! files, and of objects without a status, which get Events too.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fmt;

use diy_mesh_control_plane::events::Events;

use super::attach::RouteId;
use super::statuses::{Statuses, take_changed, wait_changed};
use super::{Condition, ParentReference, ParentStatus, RouteStatus};
use crate::events;

/// Lines about one change of a cluster. The Service of many TrafficSplits may come and go.
const MAX_LINES: usize = 100;

/// Logs each change of the conditions of a route, until it is dropped.
pub async fn log_changes(statuses: &impl Statuses) -> Infallible {
    let mut logged = BTreeMap::new();
    let mut changed = statuses.with_status();
    loop {
        changed.append(&mut take_changed(statuses));
        log(&mut logged, current(statuses, &changed), usize::MAX);
        changed.clear();
        wait_changed(statuses).await;
    }
}

/// The current statuses of these objects, except those that are withheld.
pub(super) fn current(
    statuses: &impl Statuses,
    changed: &BTreeSet<RouteId>,
) -> BTreeMap<RouteId, Option<RouteStatus>> {
    let current = |id: &RouteId| Some((id.clone(), statuses.get(id).ok()?));
    changed.iter().filter_map(current).collect()
}

/// Logs what has changed, with a maximum of lines.
fn log(
    logged: &mut BTreeMap<RouteId, RouteStatus>,
    current: BTreeMap<RouteId, Option<RouteStatus>>,
    max_lines: usize,
) {
    for (line, is_error) in bounded(changes(logged, &current), max_lines) {
        if is_error {
            tracing::warn!("{line}")
        } else {
            tracing::info!("{line}")
        }
    }
    for (route, status) in current {
        match status {
            Some(status) => drop(logged.insert(route, status)),
            None => drop(logged.remove(&route)),
        }
    }
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

/// Logs each change, and queues Events about conditions that do not hold.
pub(super) fn announce(
    known: &mut BTreeMap<RouteId, RouteStatus>,
    current: BTreeMap<RouteId, Option<RouteStatus>>,
    events: &Events,
) {
    for (route, status) in with_status(&current) {
        let conditions = changed(known, route, status).flat_map(|parent| &parent.conditions);
        for condition in conditions.filter(|condition| condition.is_problem()) {
            events::route_not_accepted(events, status, condition);
        }
    }
    log(known, current, MAX_LINES);
}

/// A line per parent whose conditions have changed, and whether it contains an error.
fn changes(
    before: &BTreeMap<RouteId, RouteStatus>,
    current: &BTreeMap<RouteId, Option<RouteStatus>>,
) -> Vec<(String, bool)> {
    let mut lines = Vec::new();
    for (route, status) in with_status(current) {
        let (kind, key) = route;
        for parent in changed(before, route, status) {
            let is_error = parent.conditions.iter().any(Condition::is_problem);
            let line = format!("{kind} {key}, parent {}", described(parent));
            lines.push((line, is_error));
        }
    }
    lines
}

fn with_status(
    all: &BTreeMap<RouteId, Option<RouteStatus>>,
) -> impl Iterator<Item = (&RouteId, &RouteStatus)> {
    let all = all.iter();
    all.filter_map(|(route, status)| Some((route, status.as_ref()?)))
}

/// The parents whose conditions have changed, by more than a message that is not logged.
fn changed<'a>(
    before: &'a BTreeMap<RouteId, RouteStatus>,
    route: &RouteId,
    status: &'a RouteStatus,
) -> impl Iterator<Item = &'a ParentStatus> + use<'a> {
    let old = before.get(route).map(|old| old.parents.as_slice());
    let old = old.unwrap_or_default();
    let is_new = |parent: &&ParentStatus| {
        let described = described(parent);
        !old.iter().any(|old| self::described(old) == described)
    };
    status.parents.iter().filter(is_new)
}

fn described(parent: &ParentStatus) -> String {
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

impl fmt::Display for ParentReference {
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
    use crate::index::object::Key;
    use crate::routes::testing::{KIND, accepted, service, status};

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
        let lines = changes(&BTreeMap::new(), &one(true));
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
        assert_eq!(lines, expected);
        let known = |holds| {
            let known = one(holds).into_iter();
            known
                .filter_map(|(route, status)| Some((route, status?)))
                .collect()
        };
        assert_eq!(changes(&known(true), &one(true)), []);
        let lines = changes(&known(true), &one(false));
        assert_eq!(lines.len(), 1);
        assert!(
            lines[0].0.contains("web:80: Accepted=False") && lines[0].1,
            "{lines:?}"
        );
        assert_eq!(
            changes(&known(true), &BTreeMap::from([(route(), None)])),
            []
        );
        let many = vec![("line".to_owned(), false); 103];
        let lines = bounded(many, 100);
        let others = ("3 more routes have changed conditions".to_owned(), true);
        assert_eq!((lines.len(), &lines[100]), (101, &others));
        assert_eq!(bounded(lines.clone(), 101), lines);
    }
}
