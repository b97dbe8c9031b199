//! Kubernetes Events about roots that cannot be published, rotations without progress, and CAs that
//! expire. They are on the ConfigMap and the Secret.

use std::collections::BTreeMap;

use diy_mesh_control_plane::clock::Clock;
use diy_mesh_control_plane::events::Events;
use diy_mesh_proto::mesh::v1::get_identity_response::Rotation;
use tokio::sync::watch;

use super::publish::PublishStatus;
use super::publish::config_maps::CONFIG_MAP;
use super::state::Phase;
use super::status::Status;
use super::store::kubernetes::SECRET;
use crate::status::events::reference;
use crate::unix_time::seconds;

/// Time in one phase of a rotation until it counts as stuck, and between its events, in seconds.
const MAX_PHASE_DURATION: u64 = 3600;

/// Queues the events of an authority in Kubernetes, whose Secret is in `namespace`, until the
/// authority ends.
pub async fn observe(
    mut published: watch::Receiver<PublishStatus>,
    mut status: watch::Receiver<Status>,
    namespace: &str,
    clock: Clock,
    events: Events,
) {
    let (mut known, mut next_reminder) = (PublishStatus::default(), 0);
    let mut expiring = None;
    loop {
        let current = published.borrow_and_update().clone();
        for (namespace, error) in new_errors(&known.waiting, &current.waiting) {
            let object = reference("ConfigMap", namespace, CONFIG_MAP);
            let note = format!("cannot publish the trust roots: {error}");
            events.warn(object, "RootsNotPublished", "Publish", &note);
        }
        known = current;
        let now = seconds(clock.now());
        let current = status.borrow_and_update().clone();
        if let Some(note) = (current.expiring.as_ref()).filter(|_| current.expiring != expiring) {
            let object = reference("Secret", namespace, SECRET);
            events.warn(object, "AuthorityExpires", "Rotate", note);
        }
        expiring = current.expiring;
        let note = stuck(&current.rotation, now);
        if let Some(note) = note.filter(|_| now >= next_reminder) {
            let object = reference("Secret", namespace, SECRET);
            events.warn(object, "RotationStuck", "Rotate", &note);
            next_reminder = now + MAX_PHASE_DURATION;
        }
        tokio::select! {
            changed = published.changed() => if changed.is_err() { return },
            changed = status.changed() => if changed.is_err() { return },
        }
    }
}

/// The places with an error that they did not have before.
fn new_errors<'a>(
    before: &'a BTreeMap<String, String>,
    now: &'a BTreeMap<String, String>,
) -> impl Iterator<Item = (&'a String, &'a String)> {
    now.iter()
        .filter(|(place, error)| !error.is_empty() && before.get(*place) != Some(error))
}

/// A description of a rotation that has made no progress for too long.
fn stuck(rotation: &Rotation, now: u64) -> Option<String> {
    let is_stuck = rotation.phase != Phase::Steady.name()
        && !rotation.waiting.is_empty()
        && now.saturating_sub(rotation.since) >= MAX_PHASE_DURATION;
    is_stuck.then(|| {
        let hours = now.saturating_sub(rotation.since) / 3600;
        let (phase, mut waiting) = (&rotation.phase, rotation.waiting.join("; "));
        if rotation.waiting_omitted > 0 {
            waiting += &format!("; {} more", rotation.waiting_omitted);
        }
        format!("the rotation has been in the phase {phase} for {hours} h and waits for {waiting}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_errors_once() {
        let errors = |list: &[(&str, &str)]| -> BTreeMap<String, String> {
            let pairs = list.iter();
            pairs
                .map(|(place, error)| ((*place).into(), (*error).into()))
                .collect()
        };
        let before = errors(&[("a", "denied"), ("b", "denied"), ("c", "")]);
        let now = errors(&[
            ("a", "denied"),
            ("b", "timeout"),
            ("c", "denied"),
            ("d", ""),
        ]);
        let new: Vec<_> = new_errors(&before, &now)
            .map(|(place, _)| place.as_str())
            .collect();
        assert_eq!(new, ["b", "c"]);
    }

    #[tokio::test]
    async fn each_reminder_of_a_ca_that_expires_is_one_event_on_its_secret() {
        let (published, publications) = watch::channel(PublishStatus::default());
        let (status, statuses) = watch::channel(Status::default());
        let (events, mut queue) = Events::new();
        let clock = Clock::default();
        let observing = observe(publications, statuses, "service-mesh", clock, events);
        let observing = tokio::spawn(observing);
        let tell = |note: &str| {
            status.send_modify(|status| status.expiring = Some(note.to_owned()));
        };
        for note in ["in 6 h", "in 5 h"] {
            tell(note);
            let (object, event) = queue.recv().await.expect("an event");
            assert_eq!(object.name.as_deref(), Some(SECRET));
            assert_eq!(
                (&*event.reason, event.note.as_deref()),
                ("AuthorityExpires", Some(note))
            );
            // Another change of the status.
            published.send_replace(PublishStatus::default());
            tell(note);
        }
        drop((published, status));
        observing.await.expect("it ends with the authority");
        assert!(queue.recv().await.is_none());
    }

    #[test]
    fn rotation_is_stuck_after_an_hour_in_one_phase() {
        let mut rotation = Rotation {
            phase: Phase::Announcing.name().into(),
            since: 1000,
            waiting: vec!["shop/till to trust the current roots".into()],
            ..Rotation::default()
        };
        assert_eq!(stuck(&rotation, 1000 + MAX_PHASE_DURATION - 1), None);
        assert_eq!(
            stuck(&rotation, 1000 + 2 * MAX_PHASE_DURATION).as_deref(),
            Some(
                "the rotation has been in the phase announcing for 2 h and waits for shop/till to trust the current roots"
            )
        );
        rotation.waiting.clear();
        assert_eq!(stuck(&rotation, u64::MAX), None);
    }
}
