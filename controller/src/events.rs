//! Kubernetes Events about refused certificates and states of proxies, and about roots that cannot
//! be published. Also about rotations without progress, CAs that expire, routes without a status,
//! and kinds that cannot be read. They are on the pod, the ConfigMap, the Secret, the route and the
//! Deployment of the controller.

use std::collections::BTreeMap;

use diy_mesh_control_plane::clock::Clock;
use diy_mesh_control_plane::events::Events;
use diy_mesh_proto::mesh::v1::get_identity_response::Rotation;
use k8s_openapi::api::core::v1::ObjectReference;
use tokio::sync::watch;

use crate::authority::publish::PublishStatus;
use crate::authority::publish::config_maps::CONFIG_MAP;
use crate::authority::state::{Phase, seconds};
use crate::authority::status::Status;
use crate::authority::store::kubernetes::SECRET;
use crate::catalog::freshness::Unreadable;
use crate::catalog::resource;
use crate::index::excess::APPLIES_TO_ALL_PORTS;
use crate::object::{Condition, ObjectStatus, PodRef};

/// Time in one phase of a rotation until it counts as stuck, and between its events, in seconds.
const MAX_PHASE_DURATION: u64 = 3600;

/// Queues an event about a pod, whose proxy called `action`.
pub fn of_pod(events: &Events, pod: &PodRef, reason: &str, action: &str, note: &str) {
    let object = ObjectReference {
        uid: Some(pod.uid.to_string()),
        ..reference("Pod", &pod.namespace, &pod.name)
    };
    events.warn(object, reason, action, note);
}

/// Queues an event about a condition of a route, or of the ports of a Service, that does not hold.
pub fn route_not_accepted(events: &Events, route: &ObjectStatus, condition: &Condition) {
    let object = ObjectReference {
        uid: Some(route.uid.to_string()).filter(|uid| !uid.is_empty()),
        api_version: Some(resource(route.kind).api_version),
        ..reference(route.kind.name(), &route.key.namespace, &route.key.name)
    };
    let note = format!("{}: {}", condition.reason, condition.message);
    let reason = match condition.kind {
        APPLIES_TO_ALL_PORTS => condition.reason,
        _ => "RouteNotAccepted",
    };
    events.warn(object, reason, "Route", &note);
}

/// Logs that a kind cannot be read, and queues an event about it on the Deployment of the
/// controller, which is in `namespace`.
pub fn kind_unreadable(events: &Events, namespace: &str, unreadable: &Unreadable) {
    let Unreadable { kind, error, .. } = unreadable;
    let consequence = match (unreadable.is_known, kind.is_optional()) {
        (true, _) => "its former objects stay in use",
        (false, true) => "this replica sends and writes nothing that depends on it",
        (false, false) => "this replica is not ready",
    };
    let note = format!(
        "{kind} cannot be read for a minute: {error}; {consequence}; repair the cause, or delete the \
         definition if nothing uses the kind"
    );
    tracing::error!("{note}");
    let object = ObjectReference {
        api_version: Some("apps/v1".into()),
        ..reference("Deployment", namespace, "controller")
    };
    events.warn(object, "KindUnreadable", "Watch", &note);
}

fn reference(kind: &str, namespace: &str, name: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some(kind.into()),
        namespace: Some(namespace.into()),
        name: Some(name.into()),
        ..ObjectReference::default()
    }
}

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
