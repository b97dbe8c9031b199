//! Readiness: named conditions, each with the reason why it is not met. Ready if all are met and
//! the process is not draining.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The conditions of a process. Clones share them.
#[derive(Clone, Default)]
pub struct Readiness {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    checks: Vec<(&'static str, Check)>,
    draining: bool,
}

/// Returns the reason why a condition is not met, or `None`.
type Check = Arc<dyn Fn() -> Option<String> + Send + Sync>;

/// A condition that its owner sets.
#[derive(Debug)]
pub struct Condition(Arc<Mutex<Option<String>>>);

impl Readiness {
    /// Adds a condition that is evaluated for each request. `check` returns the reason why it is
    /// not met; it must not block.
    pub fn check(
        &self,
        name: &'static str,
        check: impl Fn() -> Option<String> + Send + Sync + 'static,
    ) {
        lock(&self.state).checks.push((name, Arc::new(check)));
    }

    /// Adds a condition that is not met until its owner says so.
    pub fn condition(&self, name: &'static str, reason: impl Into<String>) -> Condition {
        let unmet = Arc::new(Mutex::new(Some(reason.into())));
        let condition = Condition(unmet.clone());
        self.check(name, move || lock(&unmet).clone());
        condition
    }

    /// Marks the process as shutting down, for good.
    pub fn drain(&self) {
        lock(&self.state).draining = true;
    }

    /// The conditions that are not met, as lines `name: reason`. Empty if the process is ready.
    pub fn unmet(&self) -> String {
        let (draining, checks) = {
            let state = lock(&self.state);
            (state.draining, state.checks.clone())
        };
        let draining = draining.then(|| "draining: the process is shutting down\n".to_owned());
        let unmet = checks
            .iter()
            .filter_map(|(name, check)| check().map(|reason| format!("{name}: {reason}\n")));
        draining.into_iter().chain(unmet).collect()
    }
}

impl fmt::Debug for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Readiness").field(&self.unmet()).finish()
    }
}

impl Condition {
    /// Marks the condition as met.
    pub fn met(&self) {
        *lock(&self.0) = None;
    }

    /// Marks the condition as not met.
    pub fn unmet(&self, reason: impl Into<String>) {
        *lock(&self.0) = Some(reason.into());
    }
}

/// Each update is one assignment, so the state is valid even after a panic.
fn lock<T>(state: &Mutex<T>) -> MutexGuard<'_, T> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_ready_while_all_conditions_are_met_until_it_drains() {
        let readiness = Readiness::default();
        assert_eq!(readiness.unmet(), "");
        let listeners = readiness.condition("listeners", "not bound");
        readiness.check("catalog", || Some("not synced".into()));
        assert_eq!(
            readiness.unmet(),
            "listeners: not bound\ncatalog: not synced\n"
        );
        listeners.met();
        assert_eq!(readiness.unmet(), "catalog: not synced\n");
        listeners.unmet("closed");
        readiness.drain();
        assert_eq!(
            readiness.unmet(),
            "draining: the process is shutting down\nlisteners: closed\ncatalog: not synced\n"
        );
    }
}
