//! Tests of the edges: reports of pods, bounds, days and replicas.

use std::time::{Duration, UNIX_EPOCH};

use proto::edge::Path;

use super::*;
use crate::kinds::pod::ContainerPort;
use crate::kinds::service::Transport;

const DAY: u64 = SECONDS_PER_DAY;

fn at(seconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(seconds)
}

fn edge(method: &str, segment: &str) -> proto::Edge {
    proto::Edge {
        caller: "spiffe://cluster.local/ns/shop/sa/web".into(),
        port: 8080,
        method: method.into(),
        path: Some(Path::Segment(segment.into())),
        ..proto::Edge::default()
    }
}

fn named(namespace: &str, app: &str) -> Message {
    Message {
        namespace: namespace.into(),
        service_account: "cart".into(),
        labels: [("app".to_owned(), app.to_owned())].into(),
        ..Message::default()
    }
}

fn report(edges: impl IntoIterator<Item = proto::Edge>) -> proto::Edges {
    proto::Edges {
        edges: edges.into_iter().collect(),
        incomplete: false,
    }
}

/// The edges of a group as "METHOD SEGMENT DAY".
fn lines(group: &Message) -> Vec<String> {
    let line = |seen: &Seen| {
        let edge = seen.edge.clone().unwrap_or_default();
        let Some(Path::Segment(segment)) = edge.path else {
            panic!("expected a segment: {edge:?}");
        };
        format!("{} {segment} {}", edge.method, seen.last_day)
    };
    group.edges.iter().map(line).collect()
}

#[test]
fn pods_that_differ_in_labels_of_their_controller_are_one_group() {
    let mut pod = crate::index::tests::pod("web-1", &[]);
    pod.labels = [("app", "web"), ("pod-template-hash", "7f9")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
    pod.inbound.ports = [ContainerPort {
        name: "http".into(),
        port: 8080,
        protocol: Transport::Tcp,
    }]
    .into();
    let first = group(&pod);
    pod.labels.insert("pod-template-hash".into(), "8a0".into());
    assert_eq!(group(&pod), first);
    assert_eq!(first.service_account, "web");
    assert_eq!((first.labels.len(), first.ports[0].port), (1, 8080));
    pod.labels.insert("version".into(), "2".into());
    assert_ne!(group(&pod), first);
}

#[test]
fn runs_of_a_job_are_one_group() {
    let edges = Edges::default();
    let run = |number: u64, labels: [&str; 2]| {
        let mut pod = crate::index::tests::pod("web-1", &[]);
        let of_run = labels.map(|label| (label.to_owned(), format!("report-{number}")));
        pod.labels = BTreeMap::from(of_run);
        pod.labels.insert("app".into(), "report".into());
        let mut of_run = group(&pod);
        // As an earlier release has stored it.
        if number > 2 {
            of_run.labels = pod.labels;
        }
        edges.report(of_run, proto::Edges::default(), at(number));
    };
    run(1, ["job-name", "controller-uid"]);
    run(
        2,
        [
            "batch.kubernetes.io/job-name",
            "batch.kubernetes.io/controller-uid",
        ],
    );
    run(3, ["job-name", "batch.kubernetes.io/job-name"]);
    let groups = edges.groups("shop");
    let labels = BTreeMap::from([("app".to_owned(), "report".to_owned())]);
    assert_eq!((groups.len(), &groups[0].labels), (1, &labels));
}

#[test]
fn edges_are_kept_for_seven_days_after_their_last_report() {
    let edges = Edges::default();
    let web = || named("shop", "web");
    edges.report(
        web(),
        report([edge("GET", "/a"), edge("GET", "/b")]),
        at(100),
    );
    edges.report(web(), report([edge("GET", "/b")]), at(2 * DAY));
    let groups = edges.groups("shop");
    assert_eq!(lines(&groups[0]), ["GET /a 0", "GET /b 2"]);
    assert_eq!((groups[0].since, groups[0].last_day), (100, 2));
    edges.expire(at(7 * DAY - 1));
    assert_eq!(edges.groups("shop"), groups);
    edges.expire(at(7 * DAY));
    assert_eq!(lines(&edges.groups("shop")[0]), ["GET /b 2"]);
    // A pod without calls reports too.
    edges.report(web(), report([]), at(8 * DAY));
    edges.expire(at(14 * DAY));
    let groups = edges.groups("shop");
    assert_eq!((groups[0].edges.len(), groups[0].last_day), (0, 8));
    edges.expire(at(15 * DAY));
    assert!(edges.namespaces().is_empty());
    assert_eq!(edges.counts(), (0, 0));
}

#[test]
fn hostile_pod_fills_only_its_group_and_pushes_nothing_out() {
    let edges = Edges::default();
    edges.report(named("shop", "web"), report([edge("GET", "/a")]), at(0));
    let hostile = |number: usize| edge("GET", &format!("/{number}-{}", "x".repeat(200)));
    let cut = edges.counts().0;
    edges.report(named("shop", "bad"), report((0..1000).map(hostile)), at(0));
    let groups = edges.groups("shop");
    let [bad, web] = &groups[..] else {
        panic!("expected two groups: {groups:?}");
    };
    assert!(bad.incomplete && bad.encoded_len() < MAX_GROUP_BYTES[0] + 4096);
    assert!(edges.counts().0 > cut);
    assert_eq!(
        (lines(web), web.incomplete),
        (vec!["GET /a 0".to_owned()], false)
    );
    // Invalid edges are cut, and do not make room.
    edges.report(named("shop", "web"), report([edge("get", "/a")]), at(0));
    edges.report(named("shop", "web"), report([edge("GET", "/b")]), at(0));
    let web = &edges.groups("shop")[1];
    assert_eq!(lines(web), ["GET /a 0", "GET /b 0"]);
    assert!(web.incomplete);
    // It is complete again when nothing was cut for seven days.
    edges.report(named("shop", "web"), report([edge("GET", "/b")]), at(DAY));
    edges.expire(at(7 * DAY));
    assert!(!edges.groups("shop")[0].incomplete);
}

#[test]
fn namespace_has_a_bound_and_says_that_groups_were_cut() {
    let edges = Edges::default();
    let large = |number: usize| edge("GET", &format!("/{number}-{}", "x".repeat(200)));
    edges.report(named("other", "web"), report([edge("GET", "/a")]), at(0));
    for app in 0..20 {
        let app = app.to_string();
        edges.report(named("shop", &app), report((0..512).map(large)), at(0));
        edges.report(named("shop", &"y".repeat(5000)), report([]), at(0));
    }
    let groups = edges.groups("shop");
    let bytes: usize = groups.iter().map(prost::Message::encoded_len).sum();
    assert!(bytes < MAX_NAMESPACE_BYTES[0] + 8192, "{bytes}");
    let cut = &groups[0];
    assert_eq!((&*cut.service_account, cut.incomplete), ("", true));
    assert_eq!(cut.edges.len() + cut.labels.len(), 0);
    let other = &edges.groups("other")[0];
    assert_eq!(
        (lines(other), other.incomplete),
        (vec!["GET /a 0".to_owned()], false)
    );
}

#[test]
fn all_namespaces_have_a_bound() {
    let edges = Edges::default();
    let large = |number: usize| edge("GET", &format!("/{number}-{}", "x".repeat(200)));
    for namespace in 0..80 {
        for app in ["a", "b", "c", "d"] {
            let group = named(&format!("n{namespace}"), app);
            edges.report(group, report((0..300).map(large)), at(0));
        }
    }
    let (cut, bytes) = edges.counts();
    assert!(
        cut > 0 && bytes <= MAX_BYTES[0] && bytes > MAX_BYTES[0] - 4096,
        "{bytes}"
    );
    assert_eq!(edges.namespaces().len(), 80);
    assert!(edges.groups("n79").iter().all(|group| group.incomplete));
}

fn to(destination: &str) -> proto::Edge {
    proto::Edge {
        destination: destination.into(),
        ..proto::Edge::default()
    }
}

/// The number of calls of a group, and of its destinations.
fn count(group: &Message) -> [usize; 2] {
    let edges = group.edges.iter().filter_map(|seen| seen.edge.as_ref());
    let (destinations, calls): (Vec<_>, Vec<_>) =
        edges.partition(|edge| !edge.destination.is_empty());
    [calls.len(), destinations.len()]
}

#[test]
fn destinations_are_stored_united_and_forgotten_as_calls() {
    let (one, other) = (Edges::default(), Edges::default());
    let web = || named("shop", "web");
    let destinations = ["api.example.com:443", "[2001:db8::7]:80"].map(to);
    one.report(web(), report([edge("GET", "/a"), to("a.example:1")]), at(0));
    other.report(web(), report(destinations.clone()), at(DAY));
    let now = at(DAY);
    let stored = one.unite("shop", other.unite("shop", vec![], now), now);
    assert_eq!(other.unite("shop", stored.clone(), now), stored);
    let group = &one.groups("shop")[0];
    let seen = group.edges.iter();
    let seen: Vec<_> = seen
        .filter_map(|seen| Some((&*seen.edge.as_ref()?.destination, seen.last_day)))
        .collect();
    let expected = [
        ("", 0),
        ("a.example:1", 0),
        ("[2001:db8::7]:80", 1),
        ("api.example.com:443", 1),
    ];
    assert_eq!((seen, group.incomplete), (expected.to_vec(), false));
    let bytes = one.counts().1;
    one.expire(now);
    assert_eq!(one.counts().1, bytes);
    one.expire(at(7 * DAY));
    assert_eq!(count(&one.groups("shop")[0]), [0, 2]);
    one.expire(at(8 * DAY));
    assert_eq!(one.counts(), (0, 0));
    // A destination with anything else is none.
    let mixed = proto::Edge {
        port: 443,
        ..to("api.example.com:443")
    };
    one.report(web(), report([mixed]), at(8 * DAY));
    assert_eq!(count(&one.groups("shop")[0]), [0, 0]);
    assert_eq!(one.counts().0, 1);
}

#[test]
fn destinations_and_calls_do_not_displace_each_other() {
    let edges = Edges::default();
    let long = |number: usize| format!("{number}-{}", "x".repeat(200));
    let calls = || report((0..1000).map(|number| edge("GET", &format!("/{}", long(number)))));
    let names = || report((0..1000).map(|number| to(&format!("{}.example:443", long(number)))));
    let full = |group: &Message| count(group).map(|count| count * (long(100).len() + 30));
    for (first, then) in [(names(), calls()), (calls(), names())] {
        for app in 0..8 {
            let app = app.to_string();
            edges.report(named("shop", &app), first.clone(), at(0));
        }
        for app in 0..8 {
            edges.report(named("shop", &app.to_string()), then.clone(), at(0));
        }
        let groups = edges.groups("shop");
        assert!(groups.iter().all(|group| group.incomplete));
        let most = groups.iter().map(full).fold([0, 0], |most, full| {
            [most[0].max(full[0]), most[1].max(full[1])]
        });
        let bytes: usize = groups.iter().map(prost::Message::encoded_len).sum();
        // Both fill their bytes of a group, and of the namespace.
        for kind in 0..2 {
            let (most, bound) = (most[kind], MAX_GROUP_BYTES[kind]);
            assert!((bound * 3 / 4..bound * 5 / 4).contains(&most), "{most}");
        }
        let bound: usize = MAX_NAMESPACE_BYTES.iter().sum();
        assert!((bound * 3 / 4..bound + 8192).contains(&bytes), "{bytes}");
        edges.expire(at(7 * DAY));
        assert_eq!(edges.counts().1, 0);
    }
}

#[test]
fn replicas_unite_what_they_know() {
    let (one, other) = (Edges::default(), Edges::default());
    one.report(named("shop", "web"), report([edge("GET", "/a")]), at(50));
    one.report(named("mail", "web"), report([]), at(DAY));
    other.report(named("shop", "web"), report([edge("GET", "/b")]), at(DAY));
    let incomplete = proto::Edges {
        incomplete: true,
        ..report([edge("GET", "/a")])
    };
    other.report(named("shop", "web"), incomplete, at(2 * DAY));
    let told = ["mail", "shop"].map(|name| [&one, &other].map(|edges| edges.groups(name)));
    let told = united(told.into_iter().flatten().flatten());
    let now = at(2 * DAY);
    let stored = one.unite("shop", other.unite("shop", vec![], now), now);
    assert_eq!(other.unite("shop", stored.clone(), now), stored);
    assert_eq!(one.groups("shop"), other.groups("shop"));
    assert_eq!(told, [one.groups("mail"), one.groups("shop")].concat());
    let web = &one.groups("shop")[0];
    assert_eq!(lines(web), ["GET /a 2", "GET /b 1"]);
    assert_eq!((web.since, web.last_day, web.incomplete), (50, 2, true));
    // Groups that another replica has stored are not new.
    assert!(one.take_unstored("shop") && !one.take_unstored("shop"));
    one.unite("shop", vec![named("shop", "else")], now);
    assert!(!one.take_unstored("shop"));
    // Groups that are too old to be kept are not added.
    let groups = one.groups("shop").len();
    one.unite("shop", vec![named("shop", "old")], at(9 * DAY));
    assert_eq!(one.groups("shop").len(), groups);
}
