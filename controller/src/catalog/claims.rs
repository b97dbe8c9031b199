//! Claims of subscribers that they know later events of the cluster than this replica, and whether
//! the source has found these claims to be true. Plain values.
//!
//! A position is what a client says, and each claim of a later one costs a request to the API server.
//! So a caller whose claim was false causes none for ten minutes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::object::Kind;

/// Time for which a caller with a false claim causes no requests.
const SUSPENSION: Duration = Duration::from_secs(600);
/// The maximum number of suspended callers. Beyond it, the callers whose suspension ends first are
/// forgotten.
const MAX_SUSPENDED: usize = 4096;
/// Claims about one subject that have no answer yet. Later ones wait as if they were not made.
const MAX_PENDING: usize = 1024;

/// The subject of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Subject {
    /// The epoch of the resource versions.
    Epoch,
    /// The events of a kind.
    Kind(Kind),
}

/// The claims of all subscribers. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Claims(watch::Sender<State>);

#[derive(Debug, Default)]
struct State {
    /// The version that each caller claims to know.
    pending: HashMap<Subject, HashMap<Arc<str>, u64>>,
    /// The end of each suspension.
    suspended: HashMap<Arc<str>, Instant>,
}

impl Claims {
    /// Adds the claim of a caller to know a version.
    pub fn add(&self, caller: &Arc<str>, subject: Subject, version: u64) {
        let now = Instant::now();
        self.0.send_if_modified(|state| {
            let until = state.suspended.get(caller);
            if until.is_some_and(|until| now < *until) {
                return false;
            }
            let pending = state.pending.entry(subject).or_default();
            if pending.len() >= MAX_PENDING && !pending.contains_key(caller) {
                return false;
            }
            let claimed = pending.entry(caller.clone()).or_default();
            let is_new = version > *claimed;
            *claimed = version.max(*claimed);
            is_new
        });
    }

    /// Waits for a claim of a later version than `seen`. Cancel-safe.
    pub async fn later_than(&self, subject: Subject, seen: u64) {
        let mut receiver = self.0.subscribe();
        let has_later = |state: &State| state.has_later(subject, seen);
        // The sender lives as long as this value.
        let _ = receiver.wait_for(has_later).await;
    }

    /// Answers all claims about a subject: the cluster has no version later than `current`. Returns
    /// whether a claim of a later one than `seen` was true.
    pub fn answer(&self, subject: Subject, seen: u64, current: u64) -> bool {
        let until = Instant::now() + SUSPENSION;
        let mut is_behind = false;
        self.0.send_if_modified(|state| {
            for (caller, version) in state.pending.remove(&subject).unwrap_or_default() {
                is_behind |= version > seen && version <= current;
                if version > current {
                    state.suspend(caller, until);
                }
            }
            false
        });
        is_behind
    }

    /// Claims without an answer.
    #[cfg(test)]
    pub fn pending(&self, subject: Subject) -> usize {
        let state = self.0.borrow();
        state.pending.get(&subject).map_or(0, HashMap::len)
    }
}

impl State {
    fn has_later(&self, subject: Subject, seen: u64) -> bool {
        let pending = self.pending.get(&subject).into_iter().flatten();
        pending.into_iter().any(|(_, version)| *version > seen)
    }

    fn suspend(&mut self, caller: Arc<str>, until: Instant) {
        let is_full = self.suspended.len() >= MAX_SUSPENDED;
        if is_full && !self.suspended.contains_key(&caller) {
            let first = self.suspended.iter().min_by_key(|(_, until)| **until);
            if let Some(first) = first.map(|(caller, _)| caller.clone()) {
                self.suspended.remove(&first);
            }
        }
        tracing::info!(
            %caller,
            "a caller claims to know a resource version that the cluster does not have: its claims \
             cause no requests for {} minutes",
            SUSPENSION.as_secs() / 60
        );
        self.suspended.insert(caller, until);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const PODS: Subject = Subject::Kind(Kind::Pod);

    fn is_later(claims: &Claims, seen: u64) -> bool {
        claims.later_than(PODS, seen).now_or_never().is_some()
    }

    #[tokio::test(start_paused = true)]
    async fn caller_with_a_false_claim_causes_no_requests_for_ten_minutes() {
        let (claims, honest, liar) = (Claims::default(), "1".into(), "2".into());
        claims.add(&honest, PODS, 20);
        claims.add(&liar, PODS, 1_000);
        claims.add(&honest, Subject::Epoch, 7);
        assert!(is_later(&claims, 10) && is_later(&claims, 20) && !is_later(&claims, 1_000));
        assert!(claims.answer(PODS, 10, 20), "one was true");
        assert!(!is_later(&claims, 10));
        claims.add(&liar, PODS, 15);
        assert!(!is_later(&claims, 10), "also if the next one is true");
        claims.add(&honest, PODS, 30);
        assert!(is_later(&claims, 20));
        assert!(!claims.answer(PODS, 30, 40), "its event has arrived");
        tokio::time::advance(SUSPENSION).await;
        claims.add(&liar, PODS, 1_000);
        assert!(is_later(&claims, 30));
        assert_eq!(claims.pending(Subject::Epoch), 1);
    }

    #[tokio::test]
    async fn claims_are_bounded() {
        let claims = Claims::default();
        for number in 0..2 * MAX_SUSPENDED {
            claims.add(&number.to_string().into(), PODS, 100);
            if number % MAX_PENDING == 0 {
                claims.answer(PODS, 0, 1);
            }
        }
        assert!(claims.pending(PODS) <= MAX_PENDING);
        assert!(claims.0.borrow().suspended.len() <= MAX_SUSPENDED);
    }
}
