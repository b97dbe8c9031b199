//! The rotation of the CA: its phases, their conditions and transitions. Pure: takes state, reports
//! and the time; returns the next state, or the unmet conditions.
//!
//! ```text
//! steady ──start──▶ announcing ──all trust the next root──▶ switched ──the last old leaf has gone──▶ steady
//!    │                  │  ◀───────────── abandon ─────────────┘
//!    │                  └──abandon──▶ steady
//!    └──an operator has put another CA there──▶ adopting ──all trust its root──▶ switched
//! ```
//!
//! In *announcing*, `current` signs and `next` is only trusted; in *adopting*, `previous` signs and
//! `current` is only trusted; in
//! *switched*, `current` signs and `previous` is still trusted. So whatever is signed at any moment is trusted by all proxies that have
//! acknowledged the step before. The state lies in the store, and any replica may take the next
//! step: the store lets one of them.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::material::{Ca, Material, Unusable};
use super::reports::Evidence;
use crate::issuer::BACKDATED as SKEW;

/// Clocks differ, and replicas hear of a switch at different moments: for so long a replica may
/// still sign by the old CA.
const REPLICA_LAG: Duration = Duration::from_secs(60);

/// After a switch, proxies renew their certificates within this time or a tenth of their life,
/// whichever is less.
const MAX_RENEWAL_WINDOW: Duration = Duration::from_secs(10 * 60);

/// How far a rotation has got.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// One CA, and nothing to do.
    #[default]
    Steady,
    /// The next root is being distributed.
    Announcing,
    /// The root of a CA that an operator has put there is being distributed; the CA before it
    /// signs.
    Adopting,
    /// The new CA signs; leaves of the old one are still in use.
    Switched,
}

impl Phase {
    /// Every phase.
    pub const ALL: [Phase; 4] = [
        Phase::Steady,
        Phase::Announcing,
        Phase::Adopting,
        Phase::Switched,
    ];

    /// As it is written in the store, in JSON and in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Steady => "steady",
            Phase::Announcing => "announcing",
            Phase::Adopting => "adopting",
            Phase::Switched => "switched",
        }
    }
}

/// What the field rotation.json holds. Times are seconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Progress {
    /// The phase.
    pub phase: Phase,
    /// Since when.
    pub since: u64,
    /// Why it is in this phase, for people.
    pub reason: String,
    /// One more with each write of a controller: a lower number is an earlier state.
    pub generation: u64,
    /// The fingerprint of the issuer in tls.crt when a controller wrote last: another one there was
    /// put there by hand.
    pub current: String,
    /// It goes back to the CA that signed before.
    pub reverting: bool,
    /// When the last leaf of the CA that does not sign any more ends, at the latest.
    pub old_leaves_end: u64,
    /// What became of the last request, for people.
    pub answer: String,
}

impl Progress {
    /// In no rotation.
    pub fn steady(now: SystemTime, reason: &str, current: &Ca) -> Progress {
        Progress {
            since: seconds(now),
            reason: reason.to_owned(),
            current: current.issuer().fingerprint(),
            ..Progress::default()
        }
    }

    fn enter(&self, phase: Phase, now: SystemTime, reason: &str, current: &Ca) -> Progress {
        Progress {
            phase,
            since: seconds(now),
            reason: reason.to_owned(),
            current: current.issuer().fingerprint(),
            ..self.clone()
        }
    }
}

/// What somebody asks of the rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Rotate the root, or go on with a rotation that was abandoned.
    Start,
    /// Go back to the root before.
    Abandon,
}

impl Request {
    /// As the store has it.
    pub fn read(text: &str) -> Result<Request, String> {
        match text.trim() {
            "start" => Ok(Request::Start),
            "abandon" => Ok(Request::Abandon),
            other => Err(format!(
                "{other:?} is no request; there are `start` and `abandon`"
            )),
        }
    }
}

/// What the steps depend on beside the state.
#[derive(Clone, Debug)]
pub struct Rules {
    /// The trust domain, for the name of a new CA.
    pub trust_domain: String,
    /// How long a new CA lives.
    pub ca_life: Duration,
    /// How long leaves live.
    pub leaf_life: Duration,
    /// How long a root must have been published before its CA signs: files in pods follow late.
    pub settle: Duration,
}

/// What to do next.
#[derive(Debug, PartialEq)]
pub enum Step {
    /// No step, and the conditions that the phase waits for.
    Stay(Vec<String>),
    /// Write this, for this reason.
    Write(Box<Material>, String),
}

impl Rules {
    /// What is to be done by itself at this time. The evidence must have been the same for two
    /// heartbeats of each replica.
    pub fn next(
        &self,
        material: &Material,
        evidence: &Evidence,
        now: SystemTime,
    ) -> Result<Step, Unusable> {
        let Progress { phase, since, .. } = material.progress;
        match phase {
            Phase::Steady if is_due(&material.current, now) => {
                let next = self.begin(material, now, "two thirds of the CA's life are over")?;
                Ok(Step::Write(
                    Box::new(next),
                    "two thirds of the CA's life are over: its successor's root is announced"
                        .to_owned(),
                ))
            }
            Phase::Steady => Ok(Step::Stay(Vec::new())),
            Phase::Announcing | Phase::Adopting => {
                let settled = time(since) + self.settle;
                // Whoever was away for a leaf's whole life has none any more; a new one comes with
                // the new roots.
                let absent_count = now < time(since) + self.leaf_life + SKEW;
                let mut waiting = evidence.not_acknowledged(absent_count);
                if waiting.is_empty() && now < settled {
                    let left = settled.duration_since(now).unwrap_or_default().as_secs() + 1;
                    waiting.push(format!(
                        "the pods' files of roots to follow their ConfigMaps, {left} s more"
                    ));
                }
                if waiting.is_empty() {
                    return Ok(self.switch(material, now, "all proxies trust the new root"));
                }
                if is_last_call(material.signer(), now) {
                    return Ok(self.switch(
                        material,
                        now,
                        "the CA that signs ends soon, so it waits no longer",
                    ));
                }
                Ok(Step::Stay(waiting))
            }
            Phase::Switched => {
                let waiting = evidence.not_renewed();
                if waiting.is_empty() {
                    return Ok(finish(
                        material,
                        now,
                        "nobody uses a certificate of the old CA any more",
                    ));
                }
                if now > time(material.progress.old_leaves_end) + SKEW {
                    return Ok(finish(
                        material,
                        now,
                        "the last certificate of the old CA has ended",
                    ));
                }
                Ok(Step::Stay(waiting))
            }
        }
    }

    /// What becomes of a request. Where it cannot be granted, the answer says why.
    pub fn request(
        &self,
        material: &Material,
        request: Request,
        now: SystemTime,
    ) -> Result<(Material, String), Unusable> {
        let (phase, reverting) = (material.progress.phase, material.progress.reverting);
        let refused = |why: &str| {
            let answer = format!("refused: {why}");
            let progress = Progress {
                answer: answer.clone(),
                ..material.progress.clone()
            };
            Ok((
                Material {
                    progress,
                    ..material.clone()
                },
                answer,
            ))
        };
        let (mut next, answer) = match (request, phase) {
            (Request::Start, Phase::Steady) if !material.current.is_ours() => {
                return refused(
                    "the CA is an operator's own; put its successor into tls.crt, tls.key and ca.crt, and the mesh moves to it",
                );
            }
            (Request::Start, Phase::Steady) => (
                self.begin(material, now, "requested")?,
                "granted: a new root is announced",
            ),
            (Request::Start, Phase::Announcing) if reverting => {
                (resume(material, now), "granted: the rotation goes on")
            }
            (Request::Start, _) => return refused("a rotation is under way"),
            (Request::Abandon, Phase::Steady) => return refused("no rotation is under way"),
            (Request::Abandon, Phase::Announcing) if reverting => {
                return refused("the rotation is being undone already");
            }
            (Request::Abandon, Phase::Announcing) => (
                drop_next(material, now),
                "granted: the next root is dropped",
            ),
            (Request::Abandon, Phase::Adopting) => {
                return refused(
                    "the CA was replaced by hand; put the former one back into tls.crt, tls.key and ca.crt",
                );
            }
            (Request::Abandon, Phase::Switched) => {
                match material.previous.as_ref().and_then(Ca::signs) {
                    Some(_) => (
                        revert(material, now),
                        "granted: the mesh goes back to the root before",
                    ),
                    None => return refused("the key of the CA before, previous.key, is not there"),
                }
            }
        };
        next.progress.answer = answer.to_owned();
        Ok((next, answer.to_owned()))
    }

    /// Within what time proxies renew their certificates after a switch.
    pub fn renew_within(&self) -> Duration {
        (self.leaf_life / 10).min(MAX_RENEWAL_WINDOW)
    }

    fn begin(
        &self,
        material: &Material,
        now: SystemTime,
        reason: &str,
    ) -> Result<Material, Unusable> {
        let next = Some(Ca::make(&self.trust_domain, now, self.ca_life)?);
        let progress = Progress {
            reverting: false,
            ..material
                .progress
                .enter(Phase::Announcing, now, reason, &material.current)
        };
        Ok(Material {
            next,
            progress,
            ..material.clone()
        })
    }

    /// From now on the new CA signs.
    fn switch(&self, material: &Material, now: SystemTime, reason: &str) -> Step {
        let old = material.signer();
        let switched = match &material.next {
            Some(next) if material.progress.phase == Phase::Announcing => Material {
                current: next.clone(),
                next: None,
                kept: material
                    .kept
                    .iter()
                    .chain(material.previous.iter().flat_map(Ca::roots))
                    .cloned()
                    .collect(),
                previous: Some(old.clone()),
                progress: material.progress.clone(),
            },
            _ => Material {
                next: None,
                ..material.clone()
            },
        };
        let progress = switched
            .progress
            .enter(Phase::Switched, now, reason, &switched.current);
        let progress = Progress {
            old_leaves_end: self.last_end(old, now).max(progress.old_leaves_end),
            ..progress
        };
        Step::Write(
            Box::new(Material {
                progress,
                ..switched
            }),
            format!("{reason}: the new CA signs from now on"),
        )
    }

    /// What an operator has done by hand, if that is what tells `read` from what was in memory;
    /// what to write, and why. By hand is what no controller has written, or had written long ago:
    /// a backup.
    pub fn by_hand(
        &self,
        memory: &Material,
        read: &Material,
        now: SystemTime,
    ) -> Option<(Material, String)> {
        let (old, new) = (memory.signer(), &read.current);
        let newer = read.progress.generation > memory.progress.generation;
        let written_by_us = newer && read.progress.current == new.issuer().fingerprint();
        if written_by_us || new.issuer().der == old.issuer().der {
            return None;
        }
        let trusted = new.leads_to(&memory.acknowledged_roots());
        let nothing_to_wait_for =
            matches!(memory.progress.phase, Phase::Steady | Phase::Announcing)
                && old.leads_to(&new.roots().iter().collect::<Vec<_>>());
        if trusted && nothing_to_wait_for {
            let progress = Progress::steady(
                now,
                "an operator has replaced the CA, under the same root",
                new,
            );
            let material = Material {
                current: new.clone(),
                next: None,
                previous: None,
                kept: Vec::new(),
                progress,
            };
            return Some((
                material,
                "tls.crt was replaced by hand, under the same root: the new CA signs at once"
                    .to_owned(),
            ));
        }
        let (phase, reason) = if trusted {
            (
                Phase::Switched,
                "tls.crt was replaced by hand, under a root that is trusted already: the new CA signs at once",
            )
        } else {
            (
                Phase::Adopting,
                "tls.crt was replaced by hand, under another root: the former CA signs until all proxies trust the new root",
            )
        };
        let progress = Progress {
            reverting: false,
            ..memory.progress.enter(phase, now, reason, new)
        };
        let progress = Progress {
            old_leaves_end: self.last_end(old, now).max(progress.old_leaves_end),
            ..progress
        };
        let kept = memory.acknowledged_roots().into_iter().cloned().collect();
        Some((
            Material {
                current: new.clone(),
                next: None,
                previous: Some(old.clone()),
                kept,
                progress,
            },
            reason.to_owned(),
        ))
    }

    /// When the last leaf ends that a CA may have signed until now.
    fn last_end(&self, ca: &Ca, now: SystemTime) -> u64 {
        seconds((now + self.leaf_life).min(ca.issuer().not_after) + REPLICA_LAG)
    }
}

/// Whether a CA of ours has used up two thirds of its life.
fn is_due(ca: &Ca, now: SystemTime) -> bool {
    ca.is_ours() && now >= ca.begins() + ca.life() * 2 / 3
}

/// Whether the CA expires so soon that the rotation must proceed without the remaining proxies.
fn is_last_call(ca: &Ca, now: SystemTime) -> bool {
    now + ca.life() / 12 >= ca.ends()
}

fn drop_next(material: &Material, now: SystemTime) -> Material {
    let progress = material.progress.enter(
        Phase::Steady,
        now,
        "the rotation was abandoned",
        &material.current,
    );
    Material {
        next: None,
        progress,
        ..material.clone()
    }
}

/// All proxies trust both roots. They acknowledge them again, for proxies that connected in the
/// meantime.
fn revert(material: &Material, now: SystemTime) -> Material {
    let progress = material.progress.enter(
        Phase::Announcing,
        now,
        "the rotation was abandoned",
        &material.current,
    );
    Material {
        next: material.previous.clone(),
        previous: None,
        progress: Progress {
            reverting: true,
            ..progress
        },
        ..material.clone()
    }
}

/// Leaves of the old CA may be in use all the same, so its root stays as long as it would have
/// stayed.
fn resume(material: &Material, now: SystemTime) -> Material {
    let progress = material.progress.enter(
        Phase::Switched,
        now,
        "the rotation was resumed",
        &material.current,
    );
    Material {
        previous: material.next.clone(),
        next: None,
        progress: Progress {
            reverting: false,
            ..progress
        },
        ..material.clone()
    }
}

fn finish(material: &Material, now: SystemTime, reason: &str) -> Step {
    let progress = Progress::steady(now, reason, &material.current);
    let progress = Progress {
        answer: material.progress.answer.clone(),
        ..progress
    };
    let steady = Material {
        previous: None,
        next: None,
        kept: Vec::new(),
        progress,
        ..material.clone()
    };
    Step::Write(
        Box::new(steady),
        format!("{reason}: the old root is dropped"),
    )
}

/// Seconds since 1970.
pub fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}

/// The other way round.
pub fn time(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

#[cfg(test)]
mod tests;
