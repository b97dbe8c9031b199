//! The rotation of the CA: its phases, their conditions and transitions. Pure: takes state,
//! reports and the time; returns the next state, or the unmet conditions.
//!
//! ```text
//! steady ──start──▶ announcing ──all trust the next root──▶ switched ──no old leaf in use──▶ steady
//!    │                  │  ◀───────────── abandon ─────────────┘
//!    │                  └──abandon──▶ steady
//!    └──an operator writes another CA──▶ adopting ──all trust its root──▶ switched
//!
//! any ──force──▶ steady, with the new CA alone
//! ```
//!
//! In *announcing*, `current` signs and `next` is only trusted; in *adopting*, `previous` signs and
//! `current` is only trusted; in *switched*, `current` signs and `previous` is still trusted. So
//! proxies that have acknowledged the step before trust every leaf. The store contains the state.
//! Any replica may take the next step, and the store accepts one of concurrent writes.

use std::time::{Duration, SystemTime};

use diy_mesh_control_plane::clock::Verdict;

use super::ca::Ca;
use super::state::{CaState, Phase, StateError};
use crate::issuer::{BACKDATED as SKEW, Certificate};
use crate::replicas::reports::Observation;
use crate::unix_time::{seconds, time};

/// Time until all replicas have noticed a switch, including clock skew. Until then, a replica may
/// sign with the previous CA.
const REPLICA_LAG: Duration = Duration::from_secs(60);
/// After a switch, proxies renew their certificates within a tenth of their validity, and within
/// this time.
const MAX_RENEWAL_WINDOW: Duration = Duration::from_secs(10 * 60);

/// A namespace whose ConfigMap cannot be written, such as an immutable one, holds a rotation for
/// this time. Running proxies get the roots over their streams; only new pods need the ConfigMap.
const NAMESPACE_TIMEOUT: Duration = Duration::from_secs(10 * 60);

const START: &str = "start";
const ABANDON: &str = "abandon";
const FORCE: &str = "force";

/// The parameters of rotations.
#[derive(Clone, Debug)]
pub struct RotationPolicy {
    /// The trust domain in the name of a new CA.
    pub trust_domain: String,
    /// The lifetime of a new CA.
    pub ca_life: Duration,
    /// The lifetime of leaves.
    pub leaf_life: Duration,
    /// Time from the publication of a root until mounted files contain it.
    pub settle: Duration,
}

/// The next step.
#[derive(Debug, PartialEq)]
pub enum Step {
    /// Wait for these conditions.
    Wait(Vec<String>),
    /// Write this state.
    Write(Box<CaState>),
}

impl RotationPolicy {
    /// The next step without a request. The observation must be stable.
    pub fn next(
        &self,
        state: &CaState,
        observed: &Observation,
        verdict: &Verdict,
    ) -> Result<Step, StateError> {
        let (now, since) = (verdict.ca_time, time(state.rotation.since));
        // While the clocks are disputed, no time has passed.
        let is_past = |deadline| !verdict.is_disputed() && now >= deadline;
        let (waiting, next) = match state.rotation.phase {
            Phase::Steady => {
                let reason = due(&state.current, verdict);
                let next = reason.map(|reason| self.announce(state, now, reason));
                (Vec::new(), next.transpose()?)
            }
            Phase::Announcing
                if (state.next.iter()).any(|next| is_of_the_future(next, verdict)) =>
            {
                let reason = "the next CA is not valid yet";
                (Vec::new(), Some(self.announce(state, now, reason)?))
            }
            Phase::Announcing | Phase::Adopting => {
                // A proxy that was absent for the lifetime of a leaf starts with the new roots. One
                // that is connected and does not acknowledge must not hold the rotation for longer:
                // a tenant could keep a stolen key in use.
                let proxies_count = !is_past(since + self.leaf_life + SKEW);
                let namespaces_count = !is_past(since + NAMESPACE_TIMEOUT);
                let mut waiting = observed.not_acknowledged(proxies_count, namespaces_count);
                if let Ok(left) = (since + self.settle).duration_since(now)
                    && waiting.is_empty()
                    && !left.is_zero()
                {
                    let left = left.as_secs() + 1;
                    waiting.push(format!(
                        "mounted roots to follow their ConfigMaps, {left} s more"
                    ));
                }
                let reason = if waiting.is_empty() {
                    Some("all proxies trust the new root")
                } else if is_of_the_future(state.signer(), verdict) {
                    Some(
                        "the issuer is not valid yet, so the rotation proceeds without all proxies",
                    )
                } else if is_last_call(state.signer(), now) {
                    Some("the issuer expires soon, so the rotation proceeds without all proxies")
                } else {
                    None
                };
                (
                    waiting,
                    reason.map(|reason| self.switch(state, now, reason)),
                )
            }
            Phase::Switched => {
                let waiting = observed.not_renewed();
                let reason = if waiting.is_empty() {
                    Some("no certificate of the previous CA is in use")
                } else if is_past(time(state.rotation.old_leaves_end) + SKEW) {
                    Some("the last certificate of the previous CA has expired")
                } else {
                    None
                };
                (waiting, reason.map(|reason| finish(state, now, reason)))
            }
        };
        Ok(match next {
            Some(next) => Step::Write(Box::new(next)),
            None => Step::Wait(waiting),
        })
    }

    /// The state after a request (`start`, `abandon` or `force`), with its result in
    /// `rotation.answer`.
    pub fn request(
        &self,
        state: &CaState,
        request: &str,
        now: SystemTime,
    ) -> Result<CaState, StateError> {
        let abandoned = "the rotation was abandoned";
        let reverting = state.rotation.reverting;
        let mut next = state.clone();
        let result = match (request.trim(), state.rotation.phase) {
            (START, Phase::Steady) if !state.current.is_generated() => Err(
                "the CA comes from an operator; write its successor to tls.crt, tls.key and ca.crt to rotate it".to_owned(),
            ),
            (START, Phase::Steady) => {
                next = self.announce(state, now, "requested")?;
                Ok(format!("a new root is announced; {}", self.expectation()))
            }
            (START, Phase::Announcing) if reverting => {
                // Leaves of the old CA may be in use, so its root stays as long as before.
                next.previous = next.next.take();
                next.rotation.reverting = false;
                next.enter(Phase::Switched, now, "the rotation was resumed");
                Ok("the rotation continues".to_owned())
            }
            (START, _) => Err("a rotation is in progress".to_owned()),
            (ABANDON, Phase::Steady) => Err("no rotation is in progress".to_owned()),
            (ABANDON, Phase::Announcing) if reverting => {
                Err("the rotation is being reverted already".to_owned())
            }
            (ABANDON, Phase::Announcing) => {
                next.next = None;
                next.enter(Phase::Steady, now, abandoned);
                Ok("the next root is dropped".to_owned())
            }
            (ABANDON, Phase::Adopting) => Err(
                "the CA was replaced by an operator; write the previous one to tls.crt, tls.key and ca.crt to restore it".to_owned(),
            ),
            (ABANDON, Phase::Switched) if previous_can_sign(state) => {
                // All proxies trust both roots. They acknowledge them again, for proxies that have
                // connected since.
                next.next = next.previous.take();
                next.rotation.reverting = true;
                next.enter(Phase::Announcing, now, abandoned);
                Ok("the mesh reverts to the previous root".to_owned())
            }
            (ABANDON, Phase::Switched) => {
                Err("the key of the previous CA, previous.key, is missing".to_owned())
            }
            (FORCE, Phase::Steady) if !state.current.is_generated() => Err(
                "the CA comes from an operator; write its successor to tls.crt, tls.key and ca.crt, and then force the rotation".to_owned(),
            ),
            (FORCE, _) => {
                next = self.force(state, now)?;
                Ok("the new CA signs, and only its root is trusted".to_owned())
            }
            (other, _) => Err(format!(
                "{other:?} is not a request, expected `{START}`, `{ABANDON}` or `{FORCE}`"
            )),
        };
        next.rotation.answer = match result {
            Ok(result) => format!("granted: {result}"),
            Err(reason) => format!("refused: {reason}"),
        };
        Ok(next)
    }

    /// The time within which proxies renew their certificates after a switch.
    pub fn renew_within(&self) -> Duration {
        (self.leaf_life / 10).min(MAX_RENEWAL_WINDOW)
    }

    /// The state to write if `read` contains a CA that an operator, and no controller, has written
    /// since `memory`. A CA from an old backup counts as an operator's.
    pub fn adopt(&self, memory: &CaState, read: &CaState, now: SystemTime) -> Option<CaState> {
        let (old, new) = (memory.signer(), &read.current);
        let is_newer = read.rotation.generation > memory.rotation.generation;
        let is_ours = is_newer && read.rotation.current == new.certificate().fingerprint();
        if is_ours || new.certificate().der == old.certificate().der {
            return None;
        }
        let is_trusted = new.chains_to(&memory.acknowledged_roots());
        let needs_no_rotation = matches!(memory.rotation.phase, Phase::Steady | Phase::Announcing)
            && old.chains_to(&new.roots().iter().collect::<Vec<_>>());
        if is_trusted && needs_no_rotation {
            let reason = "tls.crt was replaced under the same root: the new CA signs at once";
            return Some(CaState::steady(new.clone(), now, reason));
        }
        let (phase, reason) = if is_trusted {
            (
                Phase::Switched,
                "tls.crt was replaced under a trusted root: the new CA signs at once",
            )
        } else {
            (
                Phase::Adopting,
                "tls.crt was replaced under another root: the previous CA signs until all proxies trust the new root",
            )
        };
        let kept = memory.acknowledged_roots().into_iter();
        let mut next = CaState {
            current: new.clone(),
            next: None,
            previous: Some(old.clone()),
            kept: kept.cloned().collect::<Vec<Certificate>>(),
            rotation: memory.rotation.clone(),
        };
        (next.rotation.reverting, next.rotation.forced) = (false, false);
        next.enter(phase, now, &format!("{reason}; {}", self.expectation()));
        self.extend_old_leaves(&mut next, old, now);
        Some(next)
    }

    /// The new CA signs at once, and its root is the only trusted one: certificates of a stolen key
    /// are worthless. The key of a next CA was stored beside the stolen one. The CA of an operator
    /// is its own successor.
    fn force(&self, state: &CaState, now: SystemTime) -> Result<CaState, StateError> {
        let current = if state.current.is_generated() {
            Ca::generate(&self.trust_domain, now, self.ca_life)?
        } else {
            state.current.clone()
        };
        let mut next = CaState::steady(current, now, "a rotation was forced");
        next.rotation.forced = true;
        Ok(next)
    }

    /// How long a rotation takes, and why.
    fn expectation(&self) -> String {
        let renewal = self.renew_within();
        let settle = match self.settle {
            Duration::ZERO => String::new(),
            settle => format!(
                "{} until mounted files contain the root, and ",
                minutes(settle)
            ),
        };
        format!(
            "the rotation takes about {}: {settle}up to {} in which proxies renew their certificates; longer while a meshed pod has no \
             connection to a controller or does not accept the root",
            minutes(self.settle + renewal),
            minutes(renewal)
        )
    }

    fn announce(
        &self,
        state: &CaState,
        now: SystemTime,
        reason: &str,
    ) -> Result<CaState, StateError> {
        let mut next = state.clone();
        next.next = Some(Ca::generate(&self.trust_domain, now, self.ca_life)?);
        (next.rotation.reverting, next.rotation.forced) = (false, false);
        let reason = format!("{reason}; {}", self.expectation());
        next.enter(Phase::Announcing, now, &reason);
        Ok(next)
    }

    /// The new CA signs.
    fn switch(&self, state: &CaState, now: SystemTime, reason: &str) -> CaState {
        let (mut next, old) = (state.clone(), state.signer());
        if let (Some(new), Phase::Announcing) = (next.next.take(), state.rotation.phase) {
            let before = next.previous.iter().flat_map(Ca::roots);
            next.kept.extend(before.cloned());
            next.previous = Some(old.clone());
            next.current = new;
        }
        next.enter(Phase::Switched, now, reason);
        self.extend_old_leaves(&mut next, old, now);
        next
    }

    /// Records the latest expiry of a leaf that `old` may have signed until now.
    fn extend_old_leaves(&self, state: &mut CaState, old: &Ca, now: SystemTime) {
        let end = (now + self.leaf_life).min(old.certificate().not_after) + REPLICA_LAG;
        let known = state.rotation.old_leaves_end;
        state.rotation.old_leaves_end = seconds(end).max(known);
    }
}

fn finish(state: &CaState, now: SystemTime, reason: &str) -> CaState {
    let mut next = CaState::steady(state.current.clone(), now, reason);
    next.rotation.answer.clone_from(&state.rotation.answer);
    next
}

fn previous_can_sign(state: &CaState) -> bool {
    state.previous.as_ref().and_then(Ca::issuer).is_some()
}

fn minutes(duration: Duration) -> String {
    match duration.as_secs() {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds => format!("{} min", seconds.div_ceil(60)),
    }
}

/// Why a generated CA must be replaced: two thirds of its lifetime have passed, or nine tenths while
/// the clocks are disputed; or its lifetime has not begun.
fn due(ca: &Ca, verdict: &Verdict) -> Option<&'static str> {
    let share = |thirtieths| ca.issued_at() + ca.lifetime() * thirtieths / 30;
    match verdict.ca_time {
        _ if !ca.is_generated() => None,
        _ if is_of_the_future(ca, verdict) => Some("the CA is not valid yet"),
        now if verdict.is_disputed() => {
            (now >= share(27)).then_some("nine tenths of the CA's lifetime have passed")
        }
        now => (now >= share(20)).then_some("two thirds of the CA's lifetime have passed"),
    }
}

/// Whether the lifetime of a generated CA has not begun: a replica whose clock was ahead has
/// generated it.
fn is_of_the_future(ca: &Ca, verdict: &Verdict) -> bool {
    let is_valid_later = verdict.ca_time < ca.certificate().not_before;
    ca.is_generated() && is_valid_later && !verdict.is_disputed()
}

/// Whether the CA expires so soon that the rotation must proceed without the remaining proxies.
fn is_last_call(ca: &Ca, now: SystemTime) -> bool {
    now + ca.lifetime() / 12 >= ca.not_after()
}

#[cfg(test)]
mod tests;
