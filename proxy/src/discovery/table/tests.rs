//! The table of destinations, response by response.

use super::super::position::MAX_REFUSAL;
use super::shares::Weight;
use super::*;
use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_proto::mesh::v1::snapshot::Kind;
use diy_mesh_proto::mesh::v1::{Delta, Endpoint, Snapshot, Unchanged, Unknown};

const MINUTE: Duration = Duration::from_secs(60);

fn table() -> Table {
    Table::new(100, usize::MAX)
}

fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

fn endpoint(address: &str) -> Endpoint {
    Endpoint {
        address: address.to_owned(),
        pod_name: "pod".to_owned(),
        pod_namespace: "shop".to_owned(),
        ..Endpoint::default()
    }
}

fn snapshot(kind: Kind, addresses: &[&str]) -> Update {
    let endpoints = addresses.iter().map(|address| endpoint(address)).collect();
    let (namespace, name) = ("shop".to_owned(), "cart".to_owned());
    Update::Snapshot(Snapshot {
        kind: kind.into(),
        namespace,
        name,
        app_protocol: String::new(),
        endpoints,
        ..Snapshot::default()
    })
}

fn delta(upserted: &[&str], removed: &[&str]) -> Update {
    let upserted = upserted.iter().map(|address| endpoint(address)).collect();
    Update::Delta(Delta {
        upserted,
        removed: removed.iter().map(ToString::to_string).collect(),
        draining: Vec::new(),
    })
}

/// Applies a response about 10.96.0.7:80 and returns the errors.
fn apply(table: &mut Table, version: &str, update: impl Into<Option<Update>>) -> Vec<String> {
    let mut errors = Vec::new();
    let response = DiscoverResponse {
        name: "10.96.0.7:80".to_owned(),
        version: version.to_owned(),
        update: update.into(),
        ..DiscoverResponse::default()
    };
    table.apply(response, Instant::now(), &mut |error| errors.push(error));
    errors
}

fn addresses(receiver: &watch::Receiver<Arc<Target>>) -> Vec<String> {
    let target = receiver.borrow();
    let addresses = target.endpoints.iter();
    let addresses = addresses.map(|endpoint| endpoint.address.to_string());
    match target.kind {
        TargetKind::Unknown => vec!["unknown".to_owned()],
        TargetKind::Withheld => vec!["withheld".to_owned()],
        TargetKind::UnknownPort { .. } => vec!["unknown port".to_owned()],
        TargetKind::Refused => vec!["refused".to_owned()],
        TargetKind::Unresolved { .. } => vec!["unresolved".to_owned()],
        TargetKind::Service => addresses.collect(),
        TargetKind::Pod => addresses.map(|address| format!("pod {address}")).collect(),
    }
}

/// Sorted requests in short form: "+10.96.0.7:80@version", "-10.96.0.7:80".
fn short(requests: impl IntoIterator<Item = Action>) -> Vec<String> {
    let mut texts: Vec<_> = requests
        .into_iter()
        .map(|request| match request {
            Action::Subscribe(subscribe) => {
                format!("+{}@{}", subscribe.name, subscribe.known_version)
            }
            Action::Unsubscribe(unsubscribe) => format!("-{}", unsubscribe.name),
            other => panic!("the table does not send {other:?}"),
        })
        .collect();
    texts.sort();
    texts
}

fn watch(table: &mut Table) -> watch::Receiver<Arc<Target>> {
    table
        .watch(address("10.96.0.7:80"))
        .expect("room")
        .0
        .receiver
}

#[test]
fn applies_snapshot_then_deltas() {
    let mut table = table();
    let receiver = watch(&mut table);
    assert_eq!(addresses(&receiver), ["unknown"]);
    assert!(
        apply(
            &mut table,
            "1",
            snapshot(
                Kind::Service,
                &["10.0.0.2:8080", "10.0.0.1:8080", "10.0.0.2:8080"]
            )
        )
        .is_empty()
    );
    assert_eq!(addresses(&receiver), ["10.0.0.1:8080", "10.0.0.2:8080"]);
    assert!(
        apply(
            &mut table,
            "2",
            delta(
                &["10.0.0.3:8080", "[fd00::1]:8080", "10.0.0.0:8080"],
                &["10.0.0.1:8080", "10.0.0.9:1"]
            )
        )
        .is_empty()
    );
    assert_eq!(
        addresses(&receiver),
        [
            "10.0.0.0:8080",
            "10.0.0.2:8080",
            "10.0.0.3:8080",
            "[fd00::1]:8080"
        ]
    );
    assert!(apply(&mut table, "3", Update::Unknown(Unknown::default())).is_empty());
    assert_eq!(addresses(&receiver), ["unknown"]);
}

#[test]
fn updates_opaque_flag_of_an_endpoint() {
    let mut table = table();
    let receiver = watch(&mut table);
    let opaque = || {
        let target = receiver.borrow();
        let endpoints = target.endpoints.iter();
        endpoints
            .map(|endpoint| endpoint.opaque)
            .collect::<Vec<_>>()
    };
    apply(
        &mut table,
        "1",
        snapshot(Kind::Service, &["10.0.0.1:80", "10.0.0.2:80"]),
    );
    assert_eq!(opaque(), [false, false]);
    let upserted = vec![Endpoint {
        opaque: true,
        ..endpoint("10.0.0.2:80")
    }];
    apply(
        &mut table,
        "2",
        Update::Delta(Delta {
            upserted,
            ..Delta::default()
        }),
    );
    assert_eq!(opaque(), [false, true]);
}

#[test]
fn draining_endpoints_are_usable_only_while_none_is_ready() {
    let mut table = table();
    let receiver = watch(&mut table);
    let usable = || {
        let target = receiver.borrow();
        let addresses = target.usable().iter();
        let addresses = addresses.map(|endpoint| endpoint.address.to_string());
        addresses.collect::<Vec<_>>()
    };
    let Update::Snapshot(ready) = snapshot(Kind::Service, &["10.0.0.2:80"]) else {
        panic!("it is a snapshot");
    };
    let draining = vec![endpoint("10.0.0.3:80"), endpoint("10.0.0.1:80")];
    let both = Snapshot { draining, ..ready };
    assert!(apply(&mut table, "1", Update::Snapshot(both)).is_empty());
    assert_eq!(usable(), ["10.0.0.2:80"]);
    let drain = |address: &str| {
        Update::Delta(Delta {
            removed: vec![address.to_owned()],
            draining: vec![endpoint(address)],
            ..Delta::default()
        })
    };
    assert!(apply(&mut table, "2", drain("10.0.0.2:80")).is_empty());
    assert_eq!(usable(), ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"]);
    assert!(apply(&mut table, "3", delta(&[], &["10.0.0.1:80"])).is_empty());
    assert_eq!(usable(), ["10.0.0.2:80", "10.0.0.3:80"]);
    assert!(apply(&mut table, "4", delta(&["10.0.0.3:80"], &[])).is_empty());
    assert_eq!(usable(), ["10.0.0.3:80"]);
    assert!(apply(&mut table, "5", delta(&[], &["10.0.0.3:80"])).is_empty());
    assert_eq!(usable(), ["10.0.0.2:80"]);
}

#[test]
fn session_affinity_continues_after_another_snapshot() {
    let mut table = table();
    let receiver = watch(&mut table);
    let affinity = || receiver.borrow().affinity.clone();
    let sticky = |session_affinity_seconds| {
        let Update::Snapshot(snapshot) = snapshot(Kind::Service, &["10.0.0.1:80"]) else {
            panic!("it is a snapshot");
        };
        Update::Snapshot(Snapshot {
            session_affinity_seconds,
            ..snapshot
        })
    };
    apply(&mut table, "1", sticky(60));
    let first = affinity().expect("the Service has affinity");
    apply(&mut table, "2", delta(&["10.0.0.2:80"], &[]));
    apply(&mut table, "3", sticky(60));
    assert!(Arc::ptr_eq(&first, &affinity().expect("the same")));
    apply(&mut table, "4", sticky(30));
    assert!(!Arc::ptr_eq(&first, &affinity().expect("another timeout")));
    apply(&mut table, "5", sticky(0));
    assert!(affinity().is_none());
}

#[test]
fn delta_replaces_only_the_upserted_endpoint() {
    let mut table = table();
    let receiver = watch(&mut table);
    let endpoints = |receiver: &watch::Receiver<Arc<Target>>| receiver.borrow().endpoints.clone();
    apply(
        &mut table,
        "1",
        snapshot(Kind::Service, &["10.0.0.1:80", "10.0.0.2:80"]),
    );
    let before = endpoints(&receiver);
    apply(&mut table, "2", delta(&["10.0.0.2:80"], &[]));
    let after = endpoints(&receiver);
    assert!(Arc::ptr_eq(&before[0], &after[0]) && !Arc::ptr_eq(&before[1], &after[1]));
}

#[test]
fn subscribes_once_per_canonical_address() {
    let mut table = table();
    let (_first, request) = table.watch(address("10.96.0.7:80")).expect("room");
    assert_eq!(short(request), ["+10.96.0.7:80@"]);
    let (_second, request) = table.watch(address("[::ffff:10.96.0.7]:80")).expect("room");
    assert_eq!((request, table.len()), (Vec::new(), 1));
}

#[test]
fn resumes_from_known_versions() {
    let (mut table, now) = (table(), Instant::now());
    let receiver = watch(&mut table);
    apply(&mut table, "7", snapshot(Kind::Service, &["10.0.0.1:80"]));
    let _other = table.watch(address("10.96.0.8:80")).expect("room");
    assert_eq!(
        short(table.resume(now, MINUTE)),
        ["+10.96.0.7:80@7", "+10.96.0.8:80@"]
    );
    assert_eq!(addresses(&receiver), ["10.0.0.1:80"]);
    assert!(apply(&mut table, "7", Update::Unchanged(Unchanged {})).is_empty());
    assert!(apply(&mut table, "8", delta(&["10.0.0.2:80"], &[])).is_empty());
    assert_eq!(addresses(&receiver), ["10.0.0.1:80", "10.0.0.2:80"]);
}

#[test]
fn keeps_target_and_resubscribes_after_invalid_response() {
    let bad: [(&str, Option<Update>); 5] = [
        (
            "delta before a snapshot",
            Some(delta(&["10.0.0.1:80"], &[])),
        ),
        (
            "unchanged, but no version is known",
            Some(Update::Unchanged(Unchanged {})),
        ),
        (
            "neither a service nor a pod",
            Some(snapshot(Kind::Unspecified, &["10.0.0.1:80"])),
        ),
        ("without an endpoint", Some(snapshot(Kind::Pod, &[]))),
        (
            "differs from the destination",
            Some(snapshot(Kind::Pod, &["10.96.0.8:80"])),
        ),
    ];
    for (expected, update) in bad {
        let (mut table, now) = (table(), Instant::now());
        let mut receiver = watch(&mut table);
        let errors = apply(&mut table, "1", update);
        assert!(
            errors.len() == 1 && errors[0].contains(expected),
            "{errors:?}"
        );
        assert!(
            receiver.has_changed().expect("open"),
            "ends the wait for a response"
        );
        receiver.mark_unchanged();
        // One resubscription for any number of invalid responses.
        assert_eq!(apply(&mut table, "2", delta(&[], &[])), [""; 0]);
        assert_eq!(
            short(table.sweep(now, MINUTE)),
            ["+10.96.0.7:80@", "-10.96.0.7:80"]
        );
        assert_eq!(short(table.sweep(now, MINUTE)), [""; 0]);
        assert!(apply(&mut table, "3", snapshot(Kind::Service, &["10.0.0.1:80"])).is_empty());
        assert_eq!(addresses(&receiver), ["10.0.0.1:80"]);
    }
}

#[test]
fn skips_invalid_endpoints_and_applies_the_others() {
    let mut table = table();
    let receiver = watch(&mut table);
    let wrong = [
        "nonsense",
        "10.0.0.1",
        "10.0.0.1:0",
        "0.0.0.0:80",
        "224.0.0.1:80",
        "10.0.0.1:99999",
    ];
    for address in wrong {
        let errors = apply(
            &mut table,
            "1",
            snapshot(Kind::Service, &["10.0.0.1:80", address, "10.0.0.2:80"]),
        );
        assert!(
            errors.len() == 1 && errors[0].contains(address),
            "{errors:?}"
        );
        assert_eq!(addresses(&receiver), ["10.0.0.1:80", "10.0.0.2:80"]);
    }
    assert_eq!(
        apply(
            &mut table,
            "2",
            delta(&["nonsense"], &["10.0.0.1:80", "more nonsense"])
        )
        .len(),
        2
    );
    assert_eq!(addresses(&receiver), ["10.0.0.2:80"]);
    assert_eq!(
        short(table.sweep(Instant::now(), MINUTE)),
        ["+10.96.0.7:80@", "-10.96.0.7:80"]
    );
}

#[test]
fn applies_pod_snapshot_and_identity_delta() {
    let mut table = table();
    let receiver = watch(&mut table);
    assert!(apply(&mut table, "1", snapshot(Kind::Pod, &["10.96.0.7:80"])).is_empty());
    assert_eq!(addresses(&receiver), ["pod 10.96.0.7:80"]);
    let meshed = Endpoint {
        identity: "spiffe://cluster.local/ns/shop/sa/cart".to_owned(),
        ..endpoint("10.96.0.7:80")
    };
    assert!(
        apply(
            &mut table,
            "2",
            Update::Delta(Delta {
                upserted: vec![meshed],
                ..Delta::default()
            })
        )
        .is_empty()
    );
    assert_eq!(receiver.borrow().kind, TargetKind::Pod);
    assert!(receiver.borrow().endpoints[0].identity.is_some());
    assert_eq!(
        apply(&mut table, "3", delta(&[], &["10.96.0.7:80"])).len(),
        1
    );
    assert_eq!(addresses(&receiver), ["pod 10.96.0.7:80"]);
}

#[test]
fn withholds_a_pod_whose_identity_cannot_be_read() {
    let mut table = table();
    let receiver = watch(&mut table);
    let Update::Snapshot(mut pod) = snapshot(Kind::Pod, &["10.96.0.7:80"]) else {
        panic!("it is a snapshot");
    };
    pod.endpoints[0].identity = "https://not-spiffe".to_owned();
    assert!(!apply(&mut table, "1", Update::Snapshot(pod)).is_empty());
    assert_eq!(addresses(&receiver), ["withheld"]);
}

#[test]
fn removes_unused_destination_after_idle_timeout() {
    let (mut table, start) = (table(), Instant::now());
    let receiver = watch(&mut table);
    assert_eq!(short(table.sweep(start, MINUTE)), [""; 0]);
    drop(receiver);
    assert_eq!(short(table.sweep(start, MINUTE)), [""; 0]);
    let again = watch(&mut table);
    assert_eq!(short(table.sweep(start + MINUTE, MINUTE)), [""; 0]);
    drop(again);
    assert_eq!(short(table.sweep(start + MINUTE, MINUTE)), [""; 0]);
    assert_eq!(
        short(table.sweep(start + 2 * MINUTE, MINUTE)),
        ["-10.96.0.7:80"]
    );
    assert_eq!(table.len(), 0);
    // A response that crossed the unsubscription is valid.
    assert!(apply(&mut table, "2", delta(&["10.0.0.2:80"], &[])).is_empty());
}

fn meshed() -> Update {
    let meshed = Endpoint {
        identity: "spiffe://cluster.local/ns/shop/sa/cart".to_owned(),
        ..endpoint("10.0.0.1:80")
    };
    Update::Delta(Delta {
        upserted: vec![meshed],
        ..Delta::default()
    })
}

/// Expires all destinations without receivers.
fn expire(table: &mut Table) {
    let start = Instant::now();
    table.sweep(start, MINUTE);
    table.sweep(start + MINUTE, MINUTE);
    assert_eq!(table.len(), 0);
}

#[test]
fn withholds_a_formerly_meshed_destination_until_its_target_changes() {
    let mut table = table();
    drop(watch(&mut table));
    apply(&mut table, "1", snapshot(Kind::Service, &[]));
    apply(&mut table, "2", meshed());
    expire(&mut table);
    for _ in 0..2 {
        assert_eq!(addresses(&watch(&mut table)), ["withheld"]);
        expire(&mut table);
    }
    drop(watch(&mut table));
    // A replica that lags behind does not know the destination.
    apply(&mut table, "3", Update::Unknown(Unknown::default()));
    let receiver = watch(&mut table);
    apply(&mut table, "3", Update::Unknown(Unknown::default()));
    assert_eq!(addresses(&receiver), ["withheld"]);
    drop(receiver);
    expire(&mut table);
    assert_eq!(addresses(&watch(&mut table)), ["withheld"]);
    apply(&mut table, "4", snapshot(Kind::Service, &["10.0.0.9:80"]));
    expire(&mut table);
    assert_eq!(addresses(&watch(&mut table)), ["unknown"]);
}

#[test]
fn service_without_endpoints_keeps_its_meshed_state() {
    let mut table = table();
    drop(watch(&mut table));
    apply(&mut table, "1", snapshot(Kind::Service, &[]));
    apply(&mut table, "2", meshed());
    apply(&mut table, "3", delta(&[], &["10.0.0.1:80"]));
    expire(&mut table);
    assert_eq!(addresses(&watch(&mut table)), ["withheld"]);
    apply(&mut table, "4", snapshot(Kind::Service, &["10.0.0.2:80"]));
    expire(&mut table);
    assert_eq!(
        addresses(&watch(&mut table)),
        ["unknown"],
        "the endpoints left the mesh"
    );
}

#[test]
fn withholds_every_destination_beyond_the_remembered_limit() {
    let mut table = table();
    table.were_meshed.limit = 1;
    let destinations = ["10.96.0.1:80", "10.96.0.2:80", "10.96.0.3:80"].map(address);
    for destination in &destinations[..2] {
        drop(table.watch(*destination).expect("room"));
        for update in [snapshot(Kind::Service, &[]), meshed()] {
            let destination = destination.to_string();
            let response = DiscoverResponse {
                name: destination,
                version: "1".to_owned(),
                update: Some(update),
                ..DiscoverResponse::default()
            };
            table.apply(response, Instant::now(), &mut |error| panic!("{error}"));
        }
    }
    expire(&mut table);
    let mut watch = |destination: SocketAddr| table.watch(destination).expect("room").0.receiver;
    for receiver in destinations.map(&mut watch) {
        assert_eq!(addresses(&receiver), ["withheld"]);
    }
    let receiver = watch(address("10.96.0.7:80"));
    apply(&mut table, "1", Update::Unknown(Unknown::default()));
    assert_eq!(
        addresses(&receiver),
        ["unknown"],
        "as sent by the controller"
    );
}

#[test]
fn full_table_refuses_destinations_until_a_sweep() {
    let (mut table, now) = (Table::new(1, usize::MAX), Instant::now());
    let receiver = watch(&mut table);
    apply(&mut table, "1", snapshot(Kind::Service, &[]));
    apply(&mut table, "2", meshed());
    assert!(table.watch(address("10.96.0.8:80")).is_err());
    assert!(table.watch(address("10.96.0.7:80")).is_ok());
    drop(receiver);
    assert!(
        table.watch(address("10.96.0.8:80")).is_err(),
        "a meshed destination is kept without a stream"
    );
    assert_eq!(short(table.sweep(now, MINUTE)), ["-10.96.0.7:80"]);
    assert!(table.watch(address("10.96.0.8:80")).is_ok());
    assert_eq!(short(table.sweep(now, MINUTE)), ["-10.96.0.8:80"]);
    assert_eq!(addresses(&watch(&mut table)), ["withheld"]);
}

#[test]
fn full_table_replaces_unused_plaintext_destinations() {
    let mut table = Table::new(3, usize::MAX);
    let receiver = watch(&mut table);
    apply(&mut table, "1", snapshot(Kind::Service, &["10.0.0.1:80"]));
    for unwatched in ["10.96.0.8:80", "10.96.0.9:80"] {
        drop(table.watch(address(unwatched)).expect("room"));
    }
    let (_watched, requests) = table
        .watch(address("10.96.0.10:80"))
        .expect("room after eviction");
    assert_eq!(
        short(requests),
        ["+10.96.0.10:80@", "-10.96.0.8:80", "-10.96.0.9:80"]
    );
    apply(&mut table, "2", delta(&["10.0.0.2:80"], &[]));
    assert_eq!(addresses(&receiver), ["10.0.0.1:80", "10.0.0.2:80"]);
}

/// Applies a response of a replica that has processed these events, at `now`. Returns whether
/// the state is refused.
fn apply_at(
    table: &mut Table,
    now: Instant,
    position: (&str, u64, u64),
    version: &str,
    update: Update,
) -> bool {
    let (epoch, pods, slices) = position;
    let components = [("Pod", pods), ("EndpointSlice", slices)];
    let component = |(kind, resource_version): (&str, u64)| proto::position::Component {
        kind: kind.to_owned(),
        resource_version,
        ..proto::position::Component::default()
    };
    let response = DiscoverResponse {
        name: "10.96.0.7:80".to_owned(),
        version: version.to_owned(),
        update: Some(update),
        position: Some(proto::Position {
            epoch: epoch.to_owned(),
            components: components.map(component).into(),
        }),
        ..DiscoverResponse::default()
    };
    let applied = table.apply(response, now, &mut |error| panic!("{error}"));
    assert!(!applied.is_older || applied.acknowledgement.is_none());
    applied.is_older
}

#[test]
fn lagging_replica_does_not_restore_an_older_state() {
    let (mut table, start) = (table(), Instant::now());
    let receiver = watch(&mut table);
    let new = snapshot(Kind::Service, &["10.0.0.9:80"]);
    assert!(!apply_at(&mut table, start, ("a", 50, 60), "new", new));
    // Another replica, which lags.
    let requests = table.resume(start, MINUTE);
    assert_eq!(short(requests), ["+10.96.0.7:80@new"]);
    let old = snapshot(Kind::Service, &["10.0.0.1:80", "10.0.0.2:80"]);
    assert!(apply_at(&mut table, start, ("a", 50, 40), "old", old));
    assert_eq!(addresses(&receiver), ["10.0.0.9:80"]);
    // Its deltas apply to its own state, until that is not older.
    let update = delta(&["10.0.0.3:80"], &["10.0.0.1:80"]);
    assert!(apply_at(&mut table, start, ("a", 50, 50), "older", update));
    assert_eq!(addresses(&receiver), ["10.0.0.9:80"]);
    let update = delta(&["10.0.0.9:80"], &["10.0.0.2:80"]);
    assert!(!apply_at(&mut table, start, ("a", 50, 61), "newer", update));
    assert_eq!(addresses(&receiver), ["10.0.0.3:80", "10.0.0.9:80"]);
    assert_eq!(short(table.resume(start, MINUTE)), ["+10.96.0.7:80@newer"]);
}

fn chunk(numbers: std::ops::Range<u32>, more: bool) -> DiscoverResponse {
    let endpoints = numbers.map(|number| {
        let address = std::net::Ipv4Addr::from_bits(0x0a00_0000 + number);
        endpoint(&format!("{address}:80"))
    });
    let snapshot = Snapshot {
        kind: Kind::Service.into(),
        endpoints: endpoints.collect(),
        ..Snapshot::default()
    };
    DiscoverResponse {
        name: "10.96.0.7:80".to_owned(),
        update: Some(Update::Snapshot(snapshot)),
        more,
        ..DiscoverResponse::default()
    }
}

#[test]
fn part_of_a_large_service_is_kept_and_follows_its_changes() {
    let mut table = Table::new(100, 2000);
    let receiver = watch(&mut table);
    let apply = |table: &mut Table, response| {
        table.apply(response, Instant::now(), &mut |error| panic!("{error}"))
    };
    // A snapshot without an end is within the bounds.
    for number in 0..50 {
        apply(&mut table, chunk(number * 4000..(number + 1) * 4000, true));
        let entry = &table.entries[&Resource::from(address("10.96.0.7:80"))];
        let (partial, subset) = entry.partial.as_ref().unwrap();
        assert!(partial.endpoints.len() == 1004 && subset.is_partial());
    }
    let applied = apply(&mut table, chunk(200_000..200_001, false));
    let kept = applied.kept.expect("a part").1;
    assert!((1003..=1004).contains(&kept), "{kept}");
    let known = addresses(&receiver);
    assert_eq!(known.len(), kept);
    // Only changes of this part count.
    for number in 300_000..302_000 {
        let address = std::net::Ipv4Addr::from_bits(0x0a00_0000 + number);
        let update = delta(&[&format!("{address}:80")], &[]);
        apply_at(&mut table, Instant::now(), ("", 0, 0), "2", update);
    }
    let added = addresses(&receiver).len() - kept;
    // One in 200: 10 on average.
    assert!(added < 40, "{added}");
    // Another Service of the namespace has two thirds of the rest, of another one half of it.
    let limit = |namespace| table.shares.limit(namespace, &Charge::default()).more;
    let (max, of_other) = (limit(""), limit("other"));
    assert!((300..=333).contains(&max), "{max}");
    assert!((480..=500).contains(&of_other), "{of_other}");
    // A part that is almost used up is replaced.
    let removed = addresses(&receiver);
    let removed: Vec<&str> = removed.iter().skip(15).map(String::as_str).collect();
    let update = delta(&[], &removed);
    apply_at(&mut table, Instant::now(), ("", 0, 0), "3", update);
    assert_eq!(addresses(&receiver).len(), 15);
    let requests = table.sweep(Instant::now(), MINUTE);
    assert_eq!(short(requests), ["+10.96.0.7:80@", "-10.96.0.7:80"]);
}

/// Every Service has a consistent hash. Their tables were 64 MiB of a proxy that may have 32.
#[test]
fn tables_of_hashes_are_limited_with_the_endpoints() {
    let max = crate::limits::memory::Memory::new(32 << 20).max_endpoints(1);
    let mut table = Table::new(10_000, max);
    let mut receivers = Vec::new();
    let hashed = |endpoints: &[&str]| {
        let Update::Snapshot(mut next) = snapshot(Kind::Service, endpoints) else {
            unreachable!("a snapshot")
        };
        next.policy = Some(proto::BackendPolicy {
            balancing: Some(proto::Balancing {
                algorithm: proto::balancing::Algorithm::ConsistentHash.into(),
                hash_key: Some(proto::HashKey {
                    kind: Some(proto::hash_key::Kind::Header("x-user".to_owned())),
                }),
                ..proto::Balancing::default()
            }),
            ..proto::BackendPolicy::default()
        });
        Update::Snapshot(next)
    };
    let small = std::cell::Cell::new(0);
    let name = |number| format!("{}:80", std::net::Ipv4Addr::from_bits(0x0a60_0000 + number));
    let apply_to = |table: &mut Table, number: u32, update| {
        let response = DiscoverResponse {
            name: name(number),
            update: Some(update),
            ..DiscoverResponse::default()
        };
        let applied = table.apply(response, Instant::now(), &mut |error| panic!("{error}"));
        small.set(small.get() + usize::from(applied.small_table.is_some()));
    };
    for number in 0..60 {
        let (watched, _) = table.watch(address(&name(number))).unwrap();
        receivers.push(watched);
        apply_to(&mut table, number, hashed(&["10.0.0.1:80", "10.0.0.2:80"]));
    }
    let has_small = |receiver: &Watched| receiver.receiver.borrow().table.is_small();
    let kept = receivers.iter().take_while(|one| !has_small(one)).count();
    assert!((30..60).contains(&kept), "{kept}");
    assert!(receivers[kept..].iter().all(has_small));
    // Its endpoints have 4 MiB.
    let bytes = |one: &Watched| (one.receiver.borrow().weight() - 2) * 800;
    let bytes: usize = receivers.iter().map(bytes).sum();
    assert!(bytes < 5 << 20, "{bytes}");
    // Changes of the Service keep its table, and its keys, also where less is left than at first.
    for number in 0..60 {
        let update = delta(&["10.0.0.3:80"], &["10.0.0.2:80"]);
        apply_to(&mut table, number, update);
    }
    assert!(receivers[..kept].iter().all(|one| !has_small(one)));
    assert_eq!(small.get(), 60 - kept, "reported once");
    // Others get what is released.
    receivers.drain(..kept);
    table.sweep(Instant::now(), Duration::ZERO);
    apply_to(&mut table, 59, hashed(&["10.0.0.1:80"]));
    assert!(!has_small(receivers.last().unwrap()));
    drop(receivers);
    table.sweep(Instant::now(), Duration::ZERO);
    assert_eq!(table.shares.total(), Weight::default());
}

/// Routes with matches and expressions of about so many bytes.
fn routes(bytes: usize) -> proto::Routes {
    let one = |number: usize| proto::RouteMatch {
        path: Some(proto::PathMatch {
            kind: Some(proto::path_match::Kind::Prefix(format!("/{number}"))),
        }),
        ..proto::RouteMatch::default()
    };
    proto::Routes {
        matches: (0..bytes / 400).map(one).collect(),
        rules: vec![proto::RouteRule {
            to_destination: true,
            ..proto::RouteRule::default()
        }],
        ..proto::Routes::default()
    }
}

/// A Service of a namespace.
fn service(namespace: &str, endpoints: usize, routes: Option<proto::Routes>) -> Update {
    let endpoint = |number: usize| {
        let address = std::net::Ipv4Addr::from_bits(0x0a00_0000 + number as u32);
        endpoint(&format!("{address}:80"))
    };
    Update::Snapshot(Snapshot {
        kind: Kind::Service.into(),
        namespace: namespace.to_owned(),
        name: "cart".to_owned(),
        endpoints: (0..endpoints).map(endpoint).collect(),
        routes,
        ..Snapshot::default()
    })
}

/// Subscribes to the destination with this number, and applies a state if there is room. Returns
/// the receiver and what is reported.
fn add(table: &mut Table, number: u32, update: Update) -> Option<(Watched, Vec<String>)> {
    let name = format!("{}:80", std::net::Ipv4Addr::from_bits(0x0a60_0000 + number));
    let (watched, _) = table.watch(address(&name)).ok()?;
    let mut errors = Vec::new();
    let response = DiscoverResponse {
        name,
        version: "1".to_owned(),
        update: Some(update),
        ..DiscoverResponse::default()
    };
    table.apply(response, Instant::now(), &mut |error| errors.push(error));
    let Weight { least, more } = table.shares.total();
    assert!(least.max(more) <= table.shares.max);
    Some((watched, errors))
}

/// Each of 10,000 destinations had 64 endpoints and large routes, whatever the memory, or one
/// tenant's Services took memory that the Services of others needed.
#[test]
fn destinations_of_a_namespace_leave_memory_to_others() {
    let max = crate::limits::memory::Memory::new(32 << 20).max_endpoints(1);
    let hostile = [
        service("hostile", 0, None),
        service("hostile", 5000, None),
        service("hostile", 200, Some(routes(100_000))),
        service("hostile", 0, Some(routes(1_000_000))),
    ];
    for (case, update) in hostile.into_iter().enumerate() {
        let (mut table, mut receivers, mut others) = (Table::new(10_000, max), vec![], vec![]);
        for number in 0..600 {
            receivers.extend(add(&mut table, number, update.clone()));
        }
        for number in 0..25 {
            let update = service(&format!("other-{}", number / 5), 5, Some(routes(4000)));
            let added = add(&mut table, 10_000 + number, update);
            let (watched, errors) = added.unwrap_or_else(|| panic!("{case}: no room for {number}"));
            assert_eq!(errors, [""; 0], "{case}, {number}");
            let kept = watched.receiver.borrow().endpoint_count();
            assert_eq!(kept, 5, "{case}, {number}");
            others.push(watched);
        }
        // Those that were refused are gone.
        table.sweep(Instant::now(), MINUTE);
        let taken = table.shares.total();
        assert!(
            taken.least <= max / 4 * 3 + 25 * MIN_WEIGHT,
            "{case}: {taken:?}"
        );
        assert!(taken.more <= max / 4 * 3 + 1000, "{case}: {taken:?}");
        // The weight of unused destinations is released.
        drop((receivers, others));
        table.sweep(Instant::now(), Duration::ZERO);
        assert_eq!(
            (table.len(), table.shares.total()),
            (0, Weight::default()),
            "{case}"
        );
    }
}

#[test]
fn destination_without_room_is_refused_until_the_next_sweep() {
    let mut table = Table::new(1000, 2000);
    let mut receivers = vec![];
    let refused = loop {
        let number = receivers.len() as u32;
        let (watched, _) = add(&mut table, number, service("shop", 300, None)).unwrap();
        if watched.receiver.borrow().kind == TargetKind::Refused {
            break watched;
        }
        receivers.push(watched);
    };
    assert!(
        (115..=125).contains(&receivers.len()),
        "{}",
        receivers.len()
    );
    let known = table.len();
    // Also while a connection uses it: its next one subscribes again.
    let requests = short(table.sweep(Instant::now(), MINUTE));
    assert_eq!((requests.len(), table.len()), (1, known - 1));
    assert!(requests[0].starts_with('-') && refused.receiver.has_changed().is_err());
    // Those in use keep their endpoints, and have others after a change.
    let update = service("shop", 2, None);
    let (last, _) = add(&mut table, receivers.len() as u32 - 1, update).unwrap();
    assert_eq!(last.receiver.borrow().endpoint_count(), 2);
    receivers.remove(0);
    table.sweep(Instant::now(), Duration::ZERO);
    let (watched, _) = add(&mut table, 999, service("shop", 2, None)).unwrap();
    assert_eq!(watched.receiver.borrow().endpoint_count(), 2);
}

#[test]
fn routes_beyond_the_memory_are_rejected_until_there_is_some() {
    let mut table = Table::new(100, 2000);
    let (first, _) = add(&mut table, 0, service("shop", 900, None)).unwrap();
    let (large, errors) = add(&mut table, 1, service("shop", 2, Some(routes(400_000)))).unwrap();
    let [error] = &errors[..] else {
        panic!("{errors:?}")
    };
    assert!(
        error.contains("the memory limit of the proxy leaves"),
        "{error}"
    );
    let is_rejected = || {
        large
            .receiver
            .borrow()
            .routes
            .as_ref()
            .unwrap()
            .is_rejected()
    };
    assert!(is_rejected() && large.receiver.borrow().endpoint_count() == 2);
    assert_eq!(short(table.sweep(Instant::now(), MINUTE)), [""; 0]);
    drop(first);
    table.sweep(Instant::now(), Duration::ZERO);
    let requests = short(table.sweep(Instant::now(), MINUTE));
    assert_eq!(requests, ["+10.96.0.1:80@", "-10.96.0.1:80"]);
    let (_, errors) = add(&mut table, 1, service("shop", 2, Some(routes(400_000)))).unwrap();
    assert!(errors.is_empty() && !is_rejected(), "{errors:?}");
    // Others leave less than these routes take: a change of them applies.
    let _others: Vec<_> = (2..90)
        .map(|number| add(&mut table, number, service("shop", 300, None)))
        .collect();
    let (_, errors) = add(&mut table, 1, service("shop", 3, Some(routes(390_000)))).unwrap();
    assert!(errors.is_empty() && !is_rejected(), "{errors:?}");
    assert_eq!(large.receiver.borrow().endpoint_count(), 3);
}

#[test]
fn namespace_beyond_its_share_expires_no_destination_of_others() {
    let mut table = Table::new(1000, 2000);
    drop(add(&mut table, 0, service("other", 2, None)).unwrap());
    let mut receivers = Vec::new();
    for number in 1..400 {
        receivers.extend(add(&mut table, number, service("hostile", 0, None)));
    }
    let is_refused = |one: &(Watched, _)| one.0.receiver.borrow().kind == TargetKind::Refused;
    assert!(receivers.iter().filter(|one| is_refused(one)).count() > 10);
    table.sweep(Instant::now(), MINUTE);
    let other = Resource::from(address("10.96.0.0:80"));
    assert!(table.entries.contains_key(&other));
}

/// Each of many Services has routes that fit if the others have none.
#[test]
fn rejected_routes_are_not_asked_for_again_and_again() {
    let mut table = Table::new(1000, 2000);
    let update = || service("hostile", 0, Some(routes(400_000)));
    let mut receivers: Vec<_> = (0..20)
        .map(|number| add(&mut table, number, update()))
        .collect();
    for round in 0..5 {
        let requests = table.sweep(Instant::now(), MINUTE);
        let asked = short(requests).len() / 2;
        assert!(asked == 0 || round == 0, "{asked} in round {round}");
        receivers.extend((0..asked as u32).map(|number| add(&mut table, number, update())));
    }
    let in_force = |number: &u32| {
        let name = std::net::Ipv4Addr::from_bits(0x0a60_0000 + number);
        let entry = &table.entries[&Resource::from(address(&format!("{name}:80")))];
        let target = entry.sender.borrow().clone();
        target
            .routes
            .as_ref()
            .is_some_and(|routes| !routes.is_rejected())
    };
    assert!((1..4).contains(&(0..20).filter(in_force).count()));
}

/// Namespaces and destinations in any order, with states of any size.
#[test]
fn destinations_never_take_more_than_the_memory() {
    for seed in 0..20 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mut table, mut receivers) = (Table::new(1000, 4000), HashMap::new());
        for _ in 0..200 {
            let number = rng.u32(..60);
            let namespace = format!("n{}", rng.u32(..6));
            let size = 1 << rng.u32(..12);
            let rules = rng.bool().then(|| routes(1 << rng.u32(10..20)));
            match rng.u32(..10) {
                0 => drop(receivers.remove(&number)),
                1 => drop(table.sweep(Instant::now(), Duration::ZERO)),
                2 => drop(table.resume(Instant::now(), Duration::ZERO)),
                _ => {
                    let update = service(&namespace, rng.usize(..size), rules);
                    if let Some((watched, _)) = add(&mut table, number, update) {
                        receivers.insert(number, watched);
                    }
                }
            }
            let weights = table.entries.values().map(|entry| entry.weight().more);
            assert_eq!(
                table.shares.total().more,
                weights.sum::<usize>(),
                "seed {seed}"
            );
            let least = table.len() * MIN_WEIGHT;
            assert_eq!(table.shares.total().least, least, "seed {seed}");
        }
        receivers.clear();
        table.sweep(Instant::now(), Duration::ZERO);
        table.sweep(Instant::now(), Duration::ZERO);
        assert_eq!(
            (table.len(), table.shares.total()),
            (0, Weight::default()),
            "seed {seed}"
        );
    }
}

#[test]
fn service_that_grows_by_deltas_is_reduced() {
    let mut table = Table::new(100, 2000);
    let receiver = watch(&mut table);
    apply(&mut table, "1", snapshot(Kind::Service, &["10.0.0.1:80"]));
    let mut largest = 0;
    for number in 1..=100 {
        let response = chunk(number * 100..(number + 1) * 100, false);
        let Some(Update::Snapshot(next)) = response.update else {
            unreachable!()
        };
        let delta = Delta {
            upserted: next.endpoints,
            ..Delta::default()
        };
        apply(&mut table, "2", Update::Delta(delta));
        largest = largest.max(receiver.borrow().endpoint_count());
    }
    assert!((1400..=1506).contains(&largest), "{largest}");
    assert!(receiver.borrow().part().is_some());
    let known = addresses(&receiver).len();
    assert!((900..=1506).contains(&known), "{known}");
}

#[test]
fn states_without_order_apply() {
    let (mut table, start) = (table(), Instant::now());
    let receiver = watch(&mut table);
    for (position, endpoint) in [
        (("a", 50, 60), "10.0.0.3:80"),
        // The cluster was restored from a backup.
        (("a, restored", 1, 1), "10.0.0.4:80"),
        // A catalog of files.
        (("", 0, 0), "10.0.0.5:80"),
        (("", 0, 0), "10.0.0.6:80"),
    ] {
        let update = snapshot(Kind::Service, &[endpoint]);
        assert!(!apply_at(&mut table, start, position, "1", update));
        assert_eq!(addresses(&receiver), [endpoint]);
    }
}

#[test]
fn replicas_with_one_stalled_watch_each_do_not_take_turns() {
    let (mut table, start) = (table(), Instant::now());
    let receiver = watch(&mut table);
    let [first, second] = ["10.0.0.1:80", "10.0.0.2:80"].map(|one| snapshot(Kind::Service, &[one]));
    assert!(!apply_at(
        &mut table,
        start,
        ("a", 50, 60),
        "1",
        first.clone()
    ));
    for stream in 0..10 {
        let now = start + MAX_REFUSAL / 10 * stream;
        let Some(Action::Subscribe(request)) = table.resume(now, MINUTE).pop() else {
            panic!("expected a subscription");
        };
        let known = request.known_position.unwrap().components;
        let known: Vec<_> = known.iter().map(|kind| kind.resource_version).collect();
        assert_eq!(known, [60, 50], "EndpointSlice, Pod");
        // It lacks the latest events of pods, and has later ones of slices.
        assert!(apply_at(
            &mut table,
            now,
            ("a", 40, 70),
            "2",
            second.clone()
        ));
        assert_eq!(addresses(&receiver), ["10.0.0.1:80"]);
        table.pause(start + MAX_REFUSAL / 10 * (stream + 1));
    }
    // The time passes, although no stream has lasted as long.
    let now = start + MAX_REFUSAL;
    table.resume(now, MINUTE);
    assert!(!apply_at(&mut table, now, ("a", 40, 70), "2", second));
    assert_eq!(addresses(&receiver), ["10.0.0.2:80"]);
}

#[test]
fn older_state_applies_if_no_newer_one_arrives() {
    let (mut table, start) = (table(), Instant::now());
    let receiver = watch(&mut table);
    let known = snapshot(Kind::Service, &["10.0.0.1:80"]);
    apply_at(&mut table, start, ("a", 50, 60), "known", known);
    let mut old = snapshot(Kind::Service, &["10.0.0.2:80"]);
    if let Update::Snapshot(old) = &mut old {
        old.policy = Some(proto::BackendPolicy::default());
    }
    assert!(apply_at(&mut table, start, ("a", 1, 1), "old", old));
    let later = start + MAX_REFUSAL / 2;
    let update = delta(&["10.0.0.3:80"], &[]);
    assert!(apply_at(&mut table, later, ("a", 2, 2), "less old", update));
    let due = start + MAX_REFUSAL;
    assert!(
        table
            .accept_refused(due - Duration::from_millis(1))
            .is_empty()
    );
    // Only now is its policy in force.
    let acknowledgement = proto::Acknowledgement {
        name: "10.96.0.7:80".to_owned(),
        version: "old".to_owned(),
        ..proto::Acknowledgement::default()
    };
    let accepted = (address("10.96.0.7:80").into(), Some(acknowledgement));
    assert_eq!(table.accept_refused(due), [accepted]);
    assert_eq!(addresses(&receiver), ["10.0.0.2:80", "10.0.0.3:80"]);
    assert!(table.accept_refused(due).is_empty());
    // From there on, the order counts from that state.
    let update = delta(&[], &["10.0.0.2:80"]);
    assert!(!apply_at(&mut table, due, ("a", 3, 3), "3", update));
    assert_eq!(addresses(&receiver), ["10.0.0.3:80"]);
}

#[test]
fn ignores_responses_without_update_or_address() {
    let mut table = table();
    let receiver = watch(&mut table);
    apply(&mut table, "1", snapshot(Kind::Service, &["10.0.0.1:80"]));
    assert_eq!(apply(&mut table, "2", None).len(), 1);
    let mut errors = Vec::new();
    let invalid = |name: &str, r#type| DiscoverResponse {
        name: name.to_owned(),
        r#type,
        ..DiscoverResponse::default()
    };
    for response in [invalid("nowhere", 0), invalid("10.96.0.7:80", 77)] {
        table.apply(response, Instant::now(), &mut |error| errors.push(error));
    }
    assert_eq!(
        (errors.len(), addresses(&receiver)),
        (2, vec!["10.0.0.1:80".to_owned()])
    );
}
