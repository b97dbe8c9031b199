//! Each phase: what it waits for, what comes then, and that it is the same after a restart.

use std::collections::BTreeMap;

use super::super::material::tests::{Made, operators, secret, start};
use super::super::reports::{self, Connected, Few, Report};
use super::*;

const DAY: Duration = Duration::from_secs(86_400);
const YEAR: Duration = Duration::from_secs(365 * 86_400);

fn rules() -> Rules {
    Rules {
        trust_domain: "cluster.local".into(),
        ca_life: YEAR,
        leaf_life: DAY,
        settle: Duration::from_secs(120),
    }
}

fn ours() -> Material {
    Material::make("cluster.local", start(), YEAR).unwrap()
}

/// As the keeper writes it.
fn later(mut material: Material) -> Material {
    material.progress.generation += 1;
    material
}

/// As a replica reads it that starts now.
fn restarted(material: &Material, now: SystemTime) -> Material {
    let read = Material::read(&material.write(), now).unwrap();
    assert_eq!(read, *material);
    read
}

/// One replica, with one proxy, that is where it should be.
fn all_well() -> Evidence {
    let report = Report {
        state: "s".into(),
        connected: 1,
        pods: ["web".to_owned()].into(),
        ..Report::default()
    };
    Evidence {
        state: "s".into(),
        reports: BTreeMap::from([("a".into(), report)]),
        pods: BTreeMap::from([("web".into(), "shop/web".into())]),
    }
}

fn but(change: impl FnOnce(&mut Report)) -> Evidence {
    let mut evidence = all_well();
    change(evidence.reports.get_mut("a").unwrap());
    evidence
}

fn few(name: &str) -> Few {
    reports::few([name.to_owned()])
}

fn waiting(material: &Material, evidence: &Evidence, now: SystemTime) -> Vec<String> {
    match rules()
        .next(&restarted(material, now), evidence, now)
        .unwrap()
    {
        Step::Stay(waiting) => waiting,
        Step::Write(_, why) => panic!("it does not wait: {why}"),
    }
}

fn written(material: &Material, evidence: &Evidence, now: SystemTime) -> Material {
    match rules()
        .next(&restarted(material, now), evidence, now)
        .unwrap()
    {
        Step::Stay(waiting) => panic!("it waits for {waiting:?}"),
        Step::Write(next, _) => restarted(&next, now),
    }
}

fn asked(material: &Material, request: Request, now: SystemTime) -> (Material, String) {
    let (next, answer) = rules()
        .request(&restarted(material, now), request, now)
        .unwrap();
    (restarted(&next, now), answer)
}

fn minutes(count: u64) -> Duration {
    Duration::from_secs(60 * count)
}

fn trusts(material: &Material, ca: &Ca) -> bool {
    material
        .roots()
        .iter()
        .any(|root| root.der == ca.issuer().der)
}

#[test]
fn a_rotation_goes_from_one_root_to_the_next_and_what_signs_is_always_trusted_before() {
    let old = ours();
    assert!(waiting(&old, &all_well(), start()).is_empty());
    let (announced, answer) = asked(&old, Request::Start, start());
    assert!(answer.starts_with("granted"), "{answer}");
    let next = announced.next.clone().unwrap();
    assert_eq!(announced.progress.phase, Phase::Announcing);
    assert!(
        announced.signer() == &old.current
            && trusts(&announced, &old.current)
            && trusts(&announced, &next)
    );

    // Files in pods follow their ConfigMaps late.
    assert!(waiting(&announced, &all_well(), start() + minutes(1))[0].contains("ConfigMaps"));
    let now = start() + minutes(3);
    let switched = written(&announced, &all_well(), now);
    assert_eq!(switched.progress.phase, Phase::Switched);
    assert!(
        switched.signer() == &next && trusts(&switched, &old.current) && trusts(&switched, &next)
    );
    assert_eq!(
        switched.progress.old_leaves_end,
        seconds(now + DAY + REPLICA_LAG)
    );

    let steady = written(&switched, &all_well(), now + minutes(10));
    assert_eq!(steady.progress.phase, Phase::Steady);
    assert!(steady.signer() == &next && !trusts(&steady, &old.current) && steady.current.is_ours());
    assert!(waiting(&steady, &all_well(), now + minutes(11)).is_empty());
}

#[test]
fn announcing_waits_for_replicas_namespaces_proxies_and_pods_and_names_them() {
    let (announced, _) = asked(&ours(), Request::Start, start());
    let now = start() + minutes(3);
    let said = |evidence: &Evidence| waiting(&announced, evidence, now).join("; ");
    assert_eq!(
        said(&but(
            |report| report.not_acknowledged = few("proxy shop/web")
        )),
        "proxy shop/web to trust the current roots"
    );
    assert_eq!(
        said(&but(|report| report.namespaces = few("namespace shop"))),
        "namespace shop to hold the current roots"
    );
    assert!(said(&but(|report| report.state = "earlier".into())).contains("replica a to follow"));
    assert_eq!(
        said(&but(|report| report.pods.clear())),
        "pod shop/web to connect to the controller"
    );
    let many = but(|report| {
        report.not_acknowledged =
            reports::few((0..50).map(|number| format!("proxy shop/web-{number}")))
    });
    assert_eq!(waiting(&announced, &many, now).len(), 21);
    assert_eq!(
        waiting(&announced, &many, now)[20],
        "30 more to trust the current roots"
    );
}

#[test]
fn a_controller_that_restarts_takes_no_silence_for_consent() {
    let (announced, _) = asked(&ours(), Request::Start, start());
    let switched = written(&announced, &all_well(), start() + minutes(3));
    let nobody = but(|report| (report.connected, report.pods) = (0, [].into()));
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
fn who_is_away_for_the_whole_life_of_a_certificate_is_waited_for_no_longer() {
    let (announced, _) = asked(&ours(), Request::Start, start());
    let away = but(|report| report.pods.clear());
    waiting(&announced, &away, start() + DAY);
    let switched = written(&announced, &away, start() + DAY + minutes(6));
    let now = start() + DAY + minutes(7);
    assert_eq!(waiting(&switched, &away, now + DAY).len(), 1);
    assert_eq!(
        written(&switched, &away, now + DAY + minutes(10))
            .progress
            .phase,
        Phase::Steady
    );
    // Whoever is connected and does not acknowledge is waited for all the same.
    waiting(
        &announced,
        &but(|report| report.not_acknowledged = few("proxy shop/web")),
        start() + DAY * 30,
    );
}

#[test]
fn switched_waits_for_certificates_of_the_old_ca_to_go() {
    let (announced, _) = asked(&ours(), Request::Start, start());
    let now = start() + minutes(3);
    let switched = written(&announced, &all_well(), now);
    let old = but(|report| report.not_renewed = few("proxy shop/web"));
    assert_eq!(
        waiting(&switched, &old, now + minutes(10)),
        ["proxy shop/web to renew its certificate"]
    );
    assert_eq!(
        written(&switched, &old, now + DAY + minutes(7))
            .progress
            .phase,
        Phase::Steady,
        "they have ended"
    );
}

#[test]
fn it_begins_by_itself_at_two_thirds_of_the_cas_life_and_at_the_end_waits_for_nobody() {
    let old = ours();
    assert!(waiting(&old, &all_well(), start() + YEAR * 2 / 3 - DAY).is_empty());
    let now = start() + YEAR * 2 / 3;
    let announced = written(&old, &all_well(), now);
    assert_eq!(announced.progress.phase, Phase::Announcing);
    let stuck = but(|report| report.not_acknowledged = few("proxy shop/web"));
    waiting(&announced, &stuck, start() + YEAR * 10 / 12);
    assert_eq!(
        written(&announced, &stuck, start() + YEAR * 11 / 12)
            .progress
            .phase,
        Phase::Switched
    );
}

#[test]
fn a_ca_of_seconds_is_not_due_when_it_is_made() {
    let short = Material::make("cluster.local", start(), Duration::from_secs(60)).unwrap();
    assert!(waiting(&short, &all_well(), start() + Duration::from_secs(39)).is_empty());
    written(&short, &all_well(), start() + Duration::from_secs(40));
}

#[test]
fn abandoned_before_the_switch_the_next_root_is_dropped() {
    let old = ours();
    let (announced, _) = asked(&old, Request::Start, start());
    let (steady, answer) = asked(&announced, Request::Abandon, start() + minutes(1));
    assert_eq!(answer, "granted: the next root is dropped");
    assert_eq!(
        (steady.progress.phase, steady.roots()),
        (Phase::Steady, old.roots())
    );
}

#[test]
fn abandoned_after_the_switch_it_goes_back_the_same_way_and_can_be_resumed() {
    let old = ours();
    let (announced, _) = asked(&old, Request::Start, start());
    let switched = written(&announced, &all_well(), start() + minutes(3));
    let now = start() + minutes(4);
    let (reverting, _) = asked(&switched, Request::Abandon, now);
    assert_eq!(
        (reverting.progress.phase, reverting.progress.reverting),
        (Phase::Announcing, true)
    );
    assert_eq!(
        reverting.roots(),
        switched.roots(),
        "leaves of both may be in use"
    );
    waiting(
        &reverting,
        &but(|report| report.not_acknowledged = few("proxy shop/web")),
        now + minutes(3),
    );
    let (_, answer) = asked(&reverting, Request::Abandon, now);
    assert!(answer.starts_with("refused"), "{answer}");

    let back = written(&reverting, &all_well(), now + minutes(3));
    assert!(back.signer() == &old.current && back.progress.phase == Phase::Switched);
    let steady = written(&back, &all_well(), now + minutes(5));
    assert_eq!(
        (steady.progress.phase, steady.roots()),
        (Phase::Steady, old.roots())
    );
    assert!(!steady.progress.reverting && steady.current.is_ours());

    let (resumed, _) = asked(&reverting, Request::Start, now + minutes(1));
    assert!(resumed.signer() == &switched.current && resumed.progress.phase == Phase::Switched);
    assert_eq!(
        resumed.progress.old_leaves_end,
        switched.progress.old_leaves_end
    );
    assert_eq!(
        written(&resumed, &all_well(), now + minutes(2))
            .roots()
            .len(),
        1
    );
}

#[test]
fn requests_that_make_no_sense_are_refused_with_the_reason() {
    let refused = |material: &Material, request| {
        let (after, answer) = asked(material, request, start());
        assert!(answer.starts_with("refused: "), "{answer}");
        assert_eq!(
            (&after.current, after.progress.phase),
            (&material.current, material.progress.phase)
        );
        assert_eq!(after.progress.answer, answer);
        answer
    };
    assert!(refused(&ours(), Request::Abandon).contains("no rotation"));
    let (announced, _) = asked(&ours(), Request::Start, start());
    assert!(refused(&announced, Request::Start).contains("under way"));
    assert!(
        refused(
            &of(
                &operators("theirs", None, &rcgen::PKCS_ED25519, |_| {}),
                None
            ),
            Request::Start
        )
        .contains("operator")
    );
    assert!(Request::read(" start\n").is_ok() && Request::read("stop").is_err());
}

/// An operator's CA, under a root or by itself, as the store has it.
fn of(issuer: &Made, root: Option<&Made>) -> Material {
    Material::read(
        &secret(&[issuer], &root.into_iter().collect::<Vec<_>>()),
        start(),
    )
    .unwrap()
}

fn p256(name: &str, by: Option<&Made>) -> Made {
    operators(name, by, &rcgen::PKCS_ECDSA_P256_SHA256, |_| {})
}

#[test]
fn an_operators_ca_is_never_rotated_by_itself() {
    let theirs = of(&p256("theirs", None), None);
    assert!(waiting(&theirs, &all_well(), start() + YEAR - DAY).is_empty());
}

#[test]
fn replaced_by_hand_under_the_same_root_the_new_ca_signs_at_once() {
    let root = p256("root", None);
    let (one, two) = (
        of(&p256("one", Some(&root)), Some(&root)),
        of(&p256("two", Some(&root)), Some(&root)),
    );
    let (next, _) = rules().by_hand(&one, &two, start()).unwrap();
    assert_eq!(
        (next.progress.phase, next.signer()),
        (Phase::Steady, &two.current)
    );
    assert!(
        rules()
            .by_hand(&one, &later(next.clone()), start())
            .is_none(),
        "the other replicas follow"
    );
    assert!(
        rules()
            .by_hand(&next, &restarted(&next, start()), start())
            .is_none(),
        "once is enough"
    );
}

#[test]
fn replaced_by_hand_under_another_root_the_new_ca_waits_until_it_is_trusted() {
    let (one, two) = (ours(), of(&p256("two", None), None));
    // The operator writes tls.crt and tls.key and leaves the rest as it is.
    let mut fields = one.write();
    fields.extend(
        two.write()
            .into_iter()
            .filter(|(name, _)| name.starts_with("tls.")),
    );
    let read = Material::read(&fields, start()).unwrap();
    assert_eq!(read.current, two.current);
    let (adopting, why) = rules().by_hand(&one, &read, start()).unwrap();
    assert!(why.contains("under another root"), "{why}");
    assert_eq!(
        (adopting.progress.phase, adopting.signer()),
        (Phase::Adopting, &one.current)
    );
    assert!(trusts(&adopting, &one.current) && trusts(&adopting, &two.current));
    assert!(
        rules()
            .by_hand(&one, &later(adopting.clone()), start())
            .is_none(),
        "the other replicas follow"
    );
    assert!(
        asked(&adopting, Request::Abandon, start())
            .1
            .starts_with("refused")
    );

    let now = start() + minutes(3);
    waiting(
        &adopting,
        &but(|report| report.not_acknowledged = few("proxy shop/web")),
        now,
    );
    let switched = written(&adopting, &all_well(), now);
    assert_eq!(
        (switched.progress.phase, switched.signer()),
        (Phase::Switched, &two.current)
    );
    let steady = written(&switched, &all_well(), now + minutes(10));
    assert_eq!(steady.roots().len(), 1);
}

#[test]
fn a_backup_that_somebody_puts_back_is_no_step_of_a_rotation() {
    let old = ours();
    let (announced, _) = asked(&old, Request::Start, start());
    let switched = written(&later(announced), &all_well(), start() + minutes(3));
    let steady = later(later(written(&switched, &all_well(), start() + minutes(5))));
    let (adopting, _) = rules()
        .by_hand(&steady, &old, start() + minutes(9))
        .unwrap();
    assert_eq!(
        (adopting.progress.phase, adopting.signer()),
        (Phase::Adopting, &steady.current)
    );
    // A replica that was away for a whole rotation follows, on the other hand.
    assert!(
        rules()
            .by_hand(&old, &steady, start() + minutes(9))
            .is_none()
    );
}

#[test]
fn replaced_by_hand_in_the_midst_of_a_rotation_no_root_with_leaves_is_lost() {
    let old = ours();
    let (announced, _) = asked(&old, Request::Start, start());
    let switched = written(&announced, &all_well(), start() + minutes(3));
    let theirs = of(&p256("theirs", None), None);
    let (adopting, _) = rules()
        .by_hand(&switched, &theirs, start() + minutes(4))
        .unwrap();
    let adopting = restarted(&adopting, start() + minutes(4));
    for ca in [&old.current, &switched.current, &theirs.current] {
        assert!(trusts(&adopting, ca));
    }
    assert_eq!(adopting.signer(), &switched.current);
    assert!(adopting.progress.old_leaves_end >= switched.progress.old_leaves_end);
}

#[test]
fn replaced_by_hand_under_a_trusted_root_that_shall_go_the_old_one_goes_last() {
    // Both roots are in ca.crt, so the new CA is trusted; then the operator leaves the old root
    // out.
    let (root, other) = (p256("root", None), p256("other", None));
    let (one, two) = (p256("one", Some(&root)), p256("two", Some(&other)));
    let both = Material::read(&secret(&[&one], &[&root, &other]), start()).unwrap();
    let (next, _) = rules()
        .by_hand(&both, &of(&two, Some(&other)), start())
        .unwrap();
    assert_eq!(
        (next.progress.phase, next.signer()),
        (Phase::Switched, &of(&two, Some(&other)).current)
    );
    assert_eq!(next.roots().len(), 2);
    assert_eq!(
        written(&next, &all_well(), start() + minutes(3))
            .roots()
            .len(),
        1
    );
}

#[test]
fn the_names_of_connected_proxies_are_told() {
    let pod = Some(("shop".to_owned(), "web".to_owned(), "uid".to_owned()));
    let all = [
        Connected {
            pod,
            ..Connected::default()
        },
        Connected {
            user: "tool".into(),
            ..Connected::default()
        },
    ];
    assert_eq!(
        Connected::few(&all, |_| true).names,
        ["proxy shop/web", "proxy of tool"]
    );
}
