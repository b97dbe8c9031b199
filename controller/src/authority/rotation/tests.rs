//! The conditions and the successor of each phase, also after a restart.

use std::collections::BTreeMap;

use diy_mesh_control_plane::clock::judge;

use super::super::testing::{TestCa, YEAR, operator_ca, secret, start};
use super::*;
use crate::replicas::reports::{self, BoundedNames, Pods, Report};

const DAY: Duration = Duration::from_secs(86_400);

fn policy() -> RotationPolicy {
    RotationPolicy {
        trust_domain: "cluster.local".into(),
        ca_life: YEAR,
        leaf_life: DAY,
        settle: Duration::from_secs(120),
    }
}

fn ours() -> CaState {
    CaState::generate("cluster.local", start(), YEAR).unwrap()
}

/// As the reconciler writes it.
fn later(mut state: CaState) -> CaState {
    state.rotation.generation += 1;
    state
}

/// As a replica reads it that starts now.
fn restarted(state: &CaState, now: SystemTime) -> CaState {
    let read = CaState::read(&state.write(), now).unwrap();
    assert_eq!(read, *state);
    read
}

/// One replica with one proxy that is up to date.
fn all_current() -> Observation {
    let report = Report {
        state: "s".into(),
        connected: 1,
        pods: Pods::new(0, vec![(1, true)]),
        ..Report::default()
    };
    Observation {
        state: "s".into(),
        reports: BTreeMap::from([("a".into(), report)]),
        pods: BTreeMap::from([(1, "shop/web".into())]),
        ..Observation::default()
    }
}

fn with(change: impl FnOnce(&mut Report)) -> Observation {
    let mut evidence = all_current();
    change(evidence.reports.get_mut("a").unwrap());
    evidence
}

/// The replica has no connections.
fn nobody(report: &mut Report) {
    report.pods = Pods::new(0, vec![]);
}

fn names(name: &str) -> BoundedNames {
    reports::bounded([name.to_owned()])
}

/// The clocks agree.
fn agreed(now: SystemTime) -> Verdict {
    judge(now, Some(now), &[])
}

fn waiting(state: &CaState, evidence: &Observation, now: SystemTime) -> Vec<String> {
    match policy()
        .next(&restarted(state, now), evidence, &agreed(now))
        .unwrap()
    {
        Step::Wait(waiting) => waiting,
        Step::Write(next) => panic!("it does not wait: {}", next.rotation.reason),
    }
}

fn written(state: &CaState, evidence: &Observation, now: SystemTime) -> CaState {
    match policy()
        .next(&restarted(state, now), evidence, &agreed(now))
        .unwrap()
    {
        Step::Wait(waiting) => panic!("it waits for {waiting:?}"),
        Step::Write(next) => restarted(&next, now),
    }
}

fn requested(state: &CaState, request: &str, now: SystemTime) -> (CaState, String) {
    let next = policy()
        .request(&restarted(state, now), request, now)
        .unwrap();
    let answer = next.rotation.answer.clone();
    (restarted(&next, now), answer)
}

fn minutes(count: u64) -> Duration {
    Duration::from_secs(60 * count)
}

fn trusts(state: &CaState, ca: &Ca) -> bool {
    state
        .roots()
        .iter()
        .any(|root| root.der == ca.certificate().der)
}

#[test]
fn rotates_to_a_new_root_that_all_proxies_trust_first() {
    let old = ours();
    assert!(waiting(&old, &all_current(), start()).is_empty());
    let (announced, answer) = requested(&old, START, start());
    assert!(answer.starts_with("granted"), "{answer}");
    let next = announced.next.clone().unwrap();
    assert_eq!(announced.rotation.phase, Phase::Announcing);
    assert!(
        announced.signer() == &old.current
            && trusts(&announced, &old.current)
            && trusts(&announced, &next)
    );

    // Files in pods follow their ConfigMaps late.
    assert!(waiting(&announced, &all_current(), start() + minutes(1))[0].contains("ConfigMaps"));
    let now = start() + minutes(3);
    let switched = written(&announced, &all_current(), now);
    assert_eq!(switched.rotation.phase, Phase::Switched);
    assert!(
        switched.signer() == &next && trusts(&switched, &old.current) && trusts(&switched, &next)
    );
    assert_eq!(
        switched.rotation.old_leaves_end,
        seconds(now + DAY + REPLICA_LAG)
    );

    let steady = written(&switched, &all_current(), now + minutes(10));
    assert_eq!(steady.rotation.phase, Phase::Steady);
    assert!(
        steady.signer() == &next && !trusts(&steady, &old.current) && steady.current.is_generated()
    );
    assert!(waiting(&steady, &all_current(), now + minutes(11)).is_empty());
}

#[test]
fn announcing_waits_for_replicas_namespaces_proxies_and_pods() {
    let (announced, _) = requested(&ours(), START, start());
    let now = start() + minutes(3);
    let said = |evidence: &Observation| waiting(&announced, evidence, now).join("; ");
    assert_eq!(
        said(&with(
            |report| report.not_acknowledged = names("proxy shop/web")
        )),
        "proxy shop/web to trust the current roots"
    );
    assert_eq!(
        said(&with(|report| report.namespaces = names("namespace shop"))),
        "namespace shop to hold the current roots"
    );
    assert!(
        said(&with(|report| report.state = "earlier".into()))
            .contains("replica a to load the current state")
    );
    assert_eq!(
        said(&with(nobody)),
        "pod shop/web to connect to the controller"
    );
    let many = with(|report| {
        report.not_acknowledged =
            reports::bounded((0..50).map(|number| format!("proxy shop/web-{number}")))
    });
    assert_eq!(waiting(&announced, &many, now).len(), 21);
    assert_eq!(
        waiting(&announced, &many, now)[20],
        "30 more to trust the current roots"
    );
}

#[test]
fn missing_connections_after_a_restart_do_not_count_as_agreement() {
    let (announced, _) = requested(&ours(), START, start());
    let switched = written(&announced, &all_current(), start() + minutes(3));
    let nobody = with(nobody);
    assert_eq!(
        waiting(&announced, &nobody, start() + minutes(3)),
        ["pod shop/web to connect to the controller"]
    );
    assert_eq!(
        waiting(&switched, &nobody, start() + minutes(4)),
        ["pod shop/web to connect to the controller"]
    );
}

#[test]
fn absent_pods_are_ignored_after_the_lifetime_of_a_certificate() {
    let (announced, _) = requested(&ours(), START, start());
    let away = with(nobody);
    waiting(&announced, &away, start() + DAY);
    let switched = written(&announced, &away, start() + DAY + minutes(6));
    let now = start() + DAY + minutes(7);
    assert_eq!(waiting(&switched, &away, now + DAY).len(), 1);
    assert_eq!(
        written(&switched, &away, now + DAY + minutes(10))
            .rotation
            .phase,
        Phase::Steady
    );
}

#[test]
fn proxy_that_does_not_acknowledge_is_ignored_after_the_lifetime_of_a_certificate() {
    let (announced, _) = requested(&ours(), START, start());
    let silent = with(|report| report.not_acknowledged = names("proxy shop/web"));
    assert_eq!(
        waiting(&announced, &silent, start() + DAY),
        ["proxy shop/web to trust the current roots"]
    );
    let switched = written(&announced, &silent, start() + DAY + minutes(6));
    assert_eq!(switched.rotation.phase, Phase::Switched);
    // A replica that has not loaded the state may still sign with another CA.
    let outdated = with(|report| report.state = "earlier".into());
    waiting(&announced, &outdated, start() + DAY * 30);
}

#[test]
fn switched_waits_until_old_certificates_are_renewed() {
    let (announced, _) = requested(&ours(), START, start());
    let now = start() + minutes(3);
    let switched = written(&announced, &all_current(), now);
    let old = with(|report| report.not_renewed = names("proxy shop/web"));
    assert_eq!(
        waiting(&switched, &old, now + minutes(10)),
        ["proxy shop/web to renew its certificate"]
    );
    assert_eq!(
        written(&switched, &old, now + DAY + minutes(7))
            .rotation
            .phase,
        Phase::Steady,
        "they have ended"
    );
}

#[test]
fn starts_after_two_thirds_of_the_lifetime_and_proceeds_before_expiry() {
    let old = ours();
    assert!(waiting(&old, &all_current(), start() + YEAR * 2 / 3 - DAY).is_empty());
    let now = start() + YEAR * 2 / 3;
    let announced = written(&old, &all_current(), now);
    assert_eq!(announced.rotation.phase, Phase::Announcing);
    let stuck = with(|report| report.state = "earlier".into());
    waiting(&announced, &stuck, start() + YEAR * 10 / 12);
    assert_eq!(
        written(&announced, &stuck, start() + YEAR * 11 / 12)
            .rotation
            .phase,
        Phase::Switched
    );
}

#[test]
fn short_lived_ca_is_not_due_at_its_creation() {
    let short = CaState::generate("cluster.local", start(), Duration::from_secs(60)).unwrap();
    assert!(waiting(&short, &all_current(), start() + Duration::from_secs(39)).is_empty());
    written(&short, &all_current(), start() + Duration::from_secs(40));
}

#[test]
fn abandon_before_the_switch_drops_the_next_root() {
    let old = ours();
    let (announced, _) = requested(&old, START, start());
    let (steady, answer) = requested(&announced, ABANDON, start() + minutes(1));
    assert_eq!(answer, "granted: the next root is dropped");
    assert_eq!(
        (steady.rotation.phase, steady.roots()),
        (Phase::Steady, old.roots())
    );
}

#[test]
fn abandon_after_the_switch_reverts_and_can_be_resumed() {
    let old = ours();
    let (announced, _) = requested(&old, START, start());
    let switched = written(&announced, &all_current(), start() + minutes(3));
    let now = start() + minutes(4);
    let (reverting, _) = requested(&switched, ABANDON, now);
    assert_eq!(
        (reverting.rotation.phase, reverting.rotation.reverting),
        (Phase::Announcing, true)
    );
    assert_eq!(
        reverting.roots(),
        switched.roots(),
        "leaves of both may be in use"
    );
    waiting(
        &reverting,
        &with(|report| report.not_acknowledged = names("proxy shop/web")),
        now + minutes(3),
    );
    let (_, answer) = requested(&reverting, ABANDON, now);
    assert!(answer.starts_with("refused"), "{answer}");

    let back = written(&reverting, &all_current(), now + minutes(3));
    assert!(back.signer() == &old.current && back.rotation.phase == Phase::Switched);
    let steady = written(&back, &all_current(), now + minutes(5));
    assert_eq!(
        (steady.rotation.phase, steady.roots()),
        (Phase::Steady, old.roots())
    );
    assert!(!steady.rotation.reverting && steady.current.is_generated());

    let (resumed, _) = requested(&reverting, START, now + minutes(1));
    assert!(resumed.signer() == &switched.current && resumed.rotation.phase == Phase::Switched);
    assert_eq!(
        resumed.rotation.old_leaves_end,
        switched.rotation.old_leaves_end
    );
    assert_eq!(
        written(&resumed, &all_current(), now + minutes(2))
            .roots()
            .len(),
        1
    );
}

#[test]
fn refuses_invalid_requests_with_the_reason() {
    let refused = |state: &CaState, request| {
        let (after, answer) = requested(state, request, start());
        assert!(answer.starts_with("refused: "), "{answer}");
        assert_eq!(
            (&after.current, after.rotation.phase),
            (&state.current, state.rotation.phase)
        );
        assert_eq!(after.rotation.answer, answer);
        answer
    };
    assert!(refused(&ours(), ABANDON).contains("no rotation"));
    let (announced, _) = requested(&ours(), START, start());
    assert!(refused(&announced, START).contains("in progress"));
    assert!(
        refused(
            &of(
                &operator_ca("theirs", None, &rcgen::PKCS_ED25519, |_| {}),
                None
            ),
            START
        )
        .contains("operator")
    );
    assert!(
        requested(&ours(), " start\n", start())
            .1
            .starts_with("granted")
    );
    assert!(refused(&ours(), "stop").contains("\"stop\" is not a request"));
}

/// An operator's CA, under a root or by itself, as the store has it.
fn of(issuer: &TestCa, root: Option<&TestCa>) -> CaState {
    CaState::read(
        &secret(&[issuer], &root.into_iter().collect::<Vec<_>>()),
        start(),
    )
    .unwrap()
}

fn p256(name: &str, by: Option<&TestCa>) -> TestCa {
    operator_ca(name, by, &rcgen::PKCS_ECDSA_P256_SHA256, |_| {})
}

#[test]
fn does_not_rotate_the_ca_of_an_operator() {
    let theirs = of(&p256("theirs", None), None);
    assert!(waiting(&theirs, &all_current(), start() + YEAR - DAY).is_empty());
}

#[test]
fn adopts_ca_under_the_same_root_at_once() {
    let root = p256("root", None);
    let (one, two) = (
        of(&p256("one", Some(&root)), Some(&root)),
        of(&p256("two", Some(&root)), Some(&root)),
    );
    let next = policy().adopt(&one, &two, start()).unwrap();
    assert_eq!(
        (next.rotation.phase, next.signer()),
        (Phase::Steady, &two.current)
    );
    assert!(
        policy()
            .adopt(&one, &later(next.clone()), start())
            .is_none(),
        "the other replicas follow"
    );
    assert!(
        policy()
            .adopt(&next, &restarted(&next, start()), start())
            .is_none(),
        "once is enough"
    );
}

#[test]
fn adopts_ca_under_another_root_when_it_is_trusted() {
    let (one, two) = (ours(), of(&p256("two", None), None));
    // The operator writes tls.crt and tls.key and leaves the rest as it is.
    let mut fields = one.write();
    fields.extend(
        two.write()
            .into_iter()
            .filter(|(name, _)| name.starts_with("tls.")),
    );
    let read = CaState::read(&fields, start()).unwrap();
    assert_eq!(read.current, two.current);
    let adopting = policy().adopt(&one, &read, start()).unwrap();
    let why = &adopting.rotation.reason;
    assert!(why.contains("under another root"), "{why}");
    assert_eq!(
        (adopting.rotation.phase, adopting.signer()),
        (Phase::Adopting, &one.current)
    );
    assert!(trusts(&adopting, &one.current) && trusts(&adopting, &two.current));
    assert!(
        policy()
            .adopt(&one, &later(adopting.clone()), start())
            .is_none(),
        "the other replicas follow"
    );
    assert!(
        requested(&adopting, ABANDON, start())
            .1
            .starts_with("refused")
    );

    let now = start() + minutes(3);
    waiting(
        &adopting,
        &with(|report| report.not_acknowledged = names("proxy shop/web")),
        now,
    );
    let switched = written(&adopting, &all_current(), now);
    assert_eq!(
        (switched.rotation.phase, switched.signer()),
        (Phase::Switched, &two.current)
    );
    let steady = written(&switched, &all_current(), now + minutes(10));
    assert_eq!(steady.roots().len(), 1);
}

#[test]
fn namespace_holds_the_rotation_for_ten_minutes() {
    let (announced, answer) = requested(&ours(), START, start());
    assert!(
        answer.contains("takes about 12 min: 2 min until"),
        "{answer}"
    );
    assert!(
        announced
            .rotation
            .reason
            .starts_with("requested; the rotation")
    );
    let immutable = with(|report| report.namespaces = names("namespace tenant"));
    assert_eq!(
        waiting(&announced, &immutable, start() + minutes(9)),
        ["namespace tenant to hold the current roots"]
    );
    let switched = written(&announced, &immutable, start() + minutes(10));
    assert_eq!(switched.rotation.phase, Phase::Switched);
}

#[test]
fn forced_rotation_trusts_only_the_new_root_at_once() {
    let old = ours();
    let (announced, _) = requested(&old, START, start());
    for state in [&old, &announced] {
        let (forced, answer) = requested(state, FORCE, start());
        assert!(answer.starts_with("granted"), "{answer}");
        assert_eq!(
            (forced.rotation.phase, forced.roots().len()),
            (Phase::Steady, 1)
        );
        assert!(forced.rotation.forced && forced.current.is_generated());
        assert!(!trusts(&forced, &old.current));
        // The key of the next CA was stored beside the key of the current one.
        assert!(
            announced
                .next
                .as_ref()
                .is_some_and(|next| !trusts(&forced, next))
        );
        assert!(
            policy()
                .adopt(state, &later(forced.clone()), start())
                .is_none()
        );
        let (again, _) = requested(&forced, START, start() + minutes(1));
        assert!(!again.rotation.forced);
    }

    let theirs = of(&p256("theirs", None), None);
    let (same, answer) = requested(&theirs, FORCE, start());
    assert!(answer.contains("refused: the CA comes from an operator"));
    assert_eq!(same.current, theirs.current);
    let adopting = policy().adopt(&old, &theirs, start()).unwrap();
    let (forced, _) = requested(&adopting, FORCE, start());
    assert_eq!(
        (forced.signer(), forced.roots().len()),
        (&theirs.current, 1)
    );
}

#[test]
fn adopts_ca_from_a_backup() {
    let old = ours();
    let (announced, _) = requested(&old, START, start());
    let switched = written(&later(announced), &all_current(), start() + minutes(3));
    let steady = later(later(written(
        &switched,
        &all_current(),
        start() + minutes(5),
    )));
    let adopting = policy().adopt(&steady, &old, start() + minutes(9)).unwrap();
    assert_eq!(
        (adopting.rotation.phase, adopting.signer()),
        (Phase::Adopting, &steady.current)
    );
    // A replica that was away for a whole rotation follows, on the other hand.
    assert!(
        policy()
            .adopt(&old, &steady, start() + minutes(9))
            .is_none()
    );
}

#[test]
fn adoption_during_a_rotation_keeps_roots_of_leaves_in_use() {
    let old = ours();
    let (announced, _) = requested(&old, START, start());
    let switched = written(&announced, &all_current(), start() + minutes(3));
    let theirs = of(&p256("theirs", None), None);
    let adopting = policy()
        .adopt(&switched, &theirs, start() + minutes(4))
        .unwrap();
    let adopting = restarted(&adopting, start() + minutes(4));
    for ca in [&old.current, &switched.current, &theirs.current] {
        assert!(trusts(&adopting, ca));
    }
    assert_eq!(adopting.signer(), &switched.current);
    assert!(adopting.rotation.old_leaves_end >= switched.rotation.old_leaves_end);
}

#[test]
fn adopts_ca_under_a_trusted_root_and_drops_the_old_root_last() {
    // Both roots are in ca.crt, so the new CA is trusted; then the operator leaves the old root
    // out.
    let (root, other) = (p256("root", None), p256("other", None));
    let (one, two) = (p256("one", Some(&root)), p256("two", Some(&other)));
    let both = CaState::read(&secret(&[&one], &[&root, &other]), start()).unwrap();
    let next = policy()
        .adopt(&both, &of(&two, Some(&other)), start())
        .unwrap();
    assert_eq!(
        (next.rotation.phase, next.signer()),
        (Phase::Switched, &of(&two, Some(&other)).current)
    );
    assert_eq!(next.roots().len(), 2);
    assert_eq!(
        written(&next, &all_current(), start() + minutes(3))
            .roots()
            .len(),
        1
    );
}

#[test]
fn ca_of_the_future_is_due_by_the_trusted_time_only() {
    for ahead in [DAY / 24, DAY, DAY * 30, YEAR * 2] {
        let future = CaState::generate("cluster.local", start() + ahead, YEAR).unwrap();
        let disputed = judge(start(), Some(start() - DAY), &[]);
        let step = policy().next(&restarted(&future, start()), &all_current(), &disputed);
        assert_eq!(step.unwrap(), Step::Wait(vec![]), "{ahead:?}");
        let announced = written(&future, &all_current(), start());
        assert_eq!(announced.rotation.phase, Phase::Announcing);
        // Certificates that it signs are worthless.
        let evidence = with(|report| report.not_acknowledged = names("proxy shop/web"));
        let switched = written(&announced, &evidence, start());
        assert_eq!(switched.rotation.phase, Phase::Switched);
        assert_eq!(switched.signer().issued_at(), start());
        assert!(trusts(&switched, &future.current));
        let steady = written(&switched, &all_current(), start() + minutes(10));
        assert!(steady.signer() == switched.signer() && !trusts(&steady, &future.current));
    }
}

#[test]
fn next_ca_of_the_future_is_replaced() {
    let (announced, _) = requested(&ours(), START, start());
    let future = Ca::generate("cluster.local", start() + DAY, YEAR).unwrap();
    let announced = CaState {
        next: Some(future),
        ..announced
    };
    let repaired = written(&announced, &all_current(), start() + minutes(3));
    assert_eq!(repaired.rotation.phase, Phase::Announcing);
    let next = repaired.next.unwrap();
    assert_eq!(next.issued_at(), start() + minutes(3));
}

#[test]
fn disputed_clocks_rotate_in_the_last_tenth_of_the_lifetime_by_the_api_server() {
    let (state, early) = (ours(), start() + YEAR / 10 * 8);
    let next = |own, server| {
        let verdict = judge(own, Some(server), &[]);
        let step = policy().next(&state, &all_current(), &verdict).unwrap();
        match step {
            Step::Wait(_) => None,
            Step::Write(next) => Some(next.next.unwrap().issued_at()),
        }
    };
    assert_eq!(next(early, early + minutes(6)), None);
    assert_eq!(next(early, early), Some(early), "they agree");
    let late = start() + YEAR / 100 * 91;
    for own in [late - DAY * 60, late + minutes(6), late + YEAR] {
        assert_eq!(next(own, late), Some(late), "{own:?}");
    }
}

#[test]
fn no_deadline_of_a_rotation_passes_while_the_clocks_are_disputed() {
    let (announced, _) = requested(&ours(), START, start());
    let evidence = with(|report| report.not_acknowledged = names("proxy shop/web"));
    let later = start() + DAY * 30;
    let disputed = judge(start(), Some(later), &[]);
    let step = policy().next(&announced, &evidence, &disputed).unwrap();
    assert!(matches!(step, Step::Wait(waiting) if waiting.len() == 1));
    let switched = written(&announced, &all_current(), start() + minutes(3));
    let evidence = with(|report| report.not_renewed = names("proxy shop/web"));
    let step = policy().next(&switched, &evidence, &disputed).unwrap();
    assert!(matches!(step, Step::Wait(waiting) if waiting.len() == 1));
    assert_eq!(
        written(&switched, &evidence, later).rotation.phase,
        Phase::Steady
    );
}
