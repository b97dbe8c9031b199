//! Readiness: named conditions, each with the reason why it is not met. Ready if all are met and
//! the process is not draining.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// The conditions of a process. Clones share them.
#[derive(Clone, Default)]
pub struct Readiness(Arc<Mutex<Vec<(&'static str, Check)>>>);

/// Returns the reason why a condition is not met, or `None`.
type Check = Arc<dyn Fn() -> Option<String> + Send + Sync>;

/// A condition that its owner sets: the reason why it is not met, or `None`.
pub type Condition = watch::Sender<Option<String>>;

impl Readiness {
    /// Adds a condition that is evaluated for each request. `check` returns the reason why it is
    /// not met; it must not block.
    pub fn check(
        &self,
        name: &'static str,
        check: impl Fn() -> Option<String> + Send + Sync + 'static,
    ) {
        self.checks().push((name, Arc::new(check)));
    }

    /// Adds a condition that is not met until its owner says so.
    pub fn condition(&self, name: &'static str, reason: impl Into<String>) -> Condition {
        let (condition, reason) = watch::channel(Some(reason.into()));
        self.check(name, move || reason.borrow().clone());
        condition
    }

    /// Marks the process as shutting down, for good.
    pub fn drain(&self) {
        let draining = || Some("the process is shutting down".to_owned());
        self.checks().insert(0, ("draining", Arc::new(draining)));
    }

    /// The conditions that are not met, as lines `name: reason`. Empty if the process is ready.
    pub fn unmet(&self) -> String {
        let checks = self.checks().clone();
        checks
            .iter()
            .filter_map(|(name, check)| check().map(|reason| format!("{name}: {reason}\n")))
            .collect()
    }

    /// Each update is one insertion, so the list is valid even after a panic.
    fn checks(&self) -> MutexGuard<'_, Vec<(&'static str, Check)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
        listeners.send_replace(None);
        assert_eq!(readiness.unmet(), "catalog: not synced\n");
        listeners.send_replace(Some("closed".into()));
        readiness.drain();
        assert_eq!(
            readiness.unmet(),
            "draining: the process is shutting down\nlisteners: closed\ncatalog: not synced\n"
        );
    }
}
