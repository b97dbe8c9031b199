//! The rule in pure histories, and the signals between a connection and the one that it displaces.

use std::pin::pin;

use super::*;

type Path = &'static [&'static str];

fn admit(admission: &Arc<Admission<&'static str>>, path: Path, class: Class) -> Option<Open> {
    let slot = admission.admit(path)?;
    slot.set(class);
    Some(Open { path, slot })
}

/// An open connection of a test.
struct Open {
    path: Path,
    slot: Slot<&'static str>,
}

/// Admits connections in use until one is refused.
fn fill(admission: &Arc<Admission<&'static str>>, path: Path) -> Vec<Open> {
    std::iter::from_fn(|| admit(admission, path, Class::InUse)).collect()
}

fn ended(connections: &[Open]) -> Vec<usize> {
    let ended = connections.iter().enumerate();
    let ended = ended.filter(|(_, open)| open.slot.is_ended());
    ended.map(|(index, _)| index).collect()
}

#[test]
fn holder_alone_uses_all_and_others_get_their_shares_of_it() {
    let admission = Admission::new(12);
    let first = fill(&admission, &["others", "a", "x"]);
    assert_eq!(first.len(), 12);
    assert_eq!(fill(&admission, &["others", "b", "x"]).len(), 6);
    let same_group = fill(&admission, &["others", "a", "y"]);
    assert_eq!(
        (same_group.len(), admission.used(&["others", "a"])),
        (6, 12)
    );
    let app = fill(&admission, &["app"]);
    assert_eq!((app.len(), admission.used(&["others"])), (6, 6));
    assert_eq!(admission.used(&["others", "a", "x"]), 3);
    drop((first, same_group, app));
    assert_eq!((admission.used(&[]), admission.tree().nodes.len()), (0, 1));
}

#[test]
fn first_holders_keep_one_each_if_there_are_more_than_slots() {
    let admission = Admission::new(3);
    let names = ["a", "b", "c", "d"].map(|name| &*Box::leak(Box::new([name])));
    let open: Vec<_> = names
        .map(|path| admit(&admission, path, Class::InUse))
        .into();
    let admitted: Vec<_> = open.iter().map(Option::is_some).collect();
    assert_eq!(admitted, [true, true, true, false]);
    assert!(open.iter().flatten().all(|open| !open.slot.is_ended()));
    let one = Admission::new(0);
    let only = admit(&one, &["a"], Class::InUse);
    assert!(only.is_some() && admit(&one, &["b"], Class::Silent).is_none());
}

#[test]
fn connections_of_a_holder_end_in_the_order_of_their_use() {
    let admission = Admission::new(6);
    let classes = [
        Class::InUse,
        Class::BetweenExchanges,
        Class::Idle,
        Class::InUse,
        Class::Silent,
        Class::Silent,
    ];
    let open: Vec<_> = classes
        .iter()
        .filter_map(|class| admit(&admission, &["a"], *class))
        .collect();
    open[3].slot.touch();
    let mut others = Vec::new();
    let mut order = Vec::new();
    for path in [&["b"], &["c"], &["d"], &["e"], &["f"]] as [Path; 5] {
        others.push(admit(&admission, path, Class::InUse).expect("a new holder"));
        let told = (0..6).filter(|index| open[*index].slot.is_asked_to_end());
        order.extend(
            told.filter(|index| !order.contains(index))
                .collect::<Vec<_>>(),
        );
    }
    assert_eq!(order, [4, 5, 2, 1, 0], "the one with traffic is left");
    assert!(!open[1].slot.is_ended(), "it is asked to end");
    assert_eq!(ended(&others), [0; 0]);
}

#[test]
fn new_connection_of_the_largest_holder_ends_its_own_silent_one_or_is_refused() {
    let admission = Admission::new(2);
    let silent = admit(&admission, &["a"], Class::Silent).unwrap();
    let _used = admit(&admission, &["a"], Class::InUse).unwrap();
    let new = admit(&admission, &["a"], Class::InUse);
    assert!(new.is_some() && silent.slot.is_ended());
    assert!(admit(&admission, &["a"], Class::InUse).is_none());
    assert_eq!(admission.used(&["a"]), 2);
}

#[test]
fn authenticated_connection_belongs_to_its_identity_however_silent() {
    let admission = Admission::new(4);
    let open: Vec<_> = (0..4)
        .filter_map(|_| admit(&admission, &["unknown", "1"], Class::Silent))
        .collect();
    open.iter().for_each(|open| open.slot.reassign(&["n", "a"]));
    assert_eq!(admission.used(&["n", "a"]), 4);
    assert_eq!(admission.used(&["unknown"]), 0);
    let new = admit(&admission, &["unknown", "1"], Class::Silent);
    assert!(new.is_some_and(|new| !new.slot.is_ended()));
    assert_eq!(ended(&open), [0]);
    // It has lost its slot.
    open[0].slot.reassign(&["m", "b"]);
    assert_eq!((admission.used(&["m"]), admission.used(&[])), (0, 3));
}

#[tokio::test(start_paused = true)]
async fn new_connection_waits_until_the_one_between_exchanges_has_ended() {
    for ends_when_asked in [true, false] {
        let admission = Admission::new(1);
        let http = admit(&admission, &["a"], Class::BetweenExchanges).unwrap();
        let start = tokio::time::Instant::now();
        let old = async {
            let serve = poll_fn(|_| match ends_when_asked && http.slot.is_asked_to_end() {
                true => Poll::Ready(()),
                false => Poll::Pending,
            });
            let served = http.slot.run(pin!(serve)).await;
            assert_eq!(served.is_some(), ends_when_asked);
            drop(http);
        };
        let new = async {
            tokio::task::yield_now().await;
            let new = admission.admit(&["a"]).unwrap();
            assert_eq!(new.run(pin!(async { 7 })).await, Some(7));
        };
        tokio::join!(old, new);
        let expected = END_TIMEOUT * u32::from(!ends_when_asked);
        assert!(start.elapsed() >= expected && start.elapsed() < expected + END_TIMEOUT / 2);
    }
}

#[tokio::test(start_paused = true)]
async fn displaced_connection_ends_the_one_that_it_waits_for() {
    let admission = Admission::new(1);
    let http = admit(&admission, &["a"], Class::BetweenExchanges).unwrap();
    let waiting = admission.admit(&["a"]).unwrap();
    let newest = admission.admit(&["a"]).unwrap();
    assert!(waiting.is_ended() && !http.slot.is_ended());
    assert_eq!(waiting.run(pin!(async {})).await, None, "it never starts");
    drop(waiting);
    assert!(http.slot.is_ended());
    drop(http);
    assert_eq!(newest.run(pin!(async {})).await, Some(()));
}

#[test]
fn group_keeps_within_its_own_limit_while_slots_are_free() {
    let admission = Admission::new(100);
    let admit = |path: Path| admission.admit_within(path, 6);
    let first: Vec<_> = (0..9).filter_map(|_| admit(&["unknown", "1"])).collect();
    assert_eq!((first.len(), admission.used(&["unknown"])), (9, 6));
    let ended: Vec<_> = first.iter().map(Slot::is_ended).collect();
    assert_eq!(ended, [[true; 3].as_slice(), &[false; 6]].concat());
    let second: Vec<_> = (0..3).filter_map(|_| admit(&["unknown", "2"])).collect();
    assert_eq!(admission.used(&["unknown", "1"]), 3);
    assert!(second.iter().all(|slot| !slot.is_ended()));
}

#[test]
fn tells_clients_apart_by_the_network_of_their_address() {
    let network = |text: &str| super::network(text.parse().unwrap()).to_string();
    assert_eq!(network("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
    assert_eq!(network("::ffff:10.0.0.1"), "10.0.0.1");
    assert_eq!(network("10.0.0.1"), "10.0.0.1");
}

/// A small generator of random numbers (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((mixed ^ (mixed >> 31)) % limit as u64).unwrap()
    }
}

const PATHS: [Path; 9] = [
    &["app"],
    &["others", "unknown", "1"],
    &["others", "unknown", "2"],
    &["others", "unknown", "3"],
    &["others", "plaintext", "1"],
    &["others", "n", "a"],
    &["others", "n", "b"],
    &["others", "m", "a"],
    &["others", "o", "a"],
];

/// At each level of a path: what the holder has, its share, and the number of holders beyond slots.
/// Counted anew from the list of open connections.
fn levels(open: &[Open], path: Path, limit: usize) -> Vec<(usize, usize, bool)> {
    let mut slots = limit;
    let levels = (1..=path.len()).map(|length| {
        let above = &path[..length - 1];
        let below: Vec<_> = open
            .iter()
            .filter(|open| open.path.len() >= length && open.path.starts_with(above))
            .map(|open| open.path[length - 1])
            .collect();
        let mut holders: Vec<_> = below.iter().chain([&path[length - 1]]).collect();
        holders.sort_unstable();
        holders.dedup();
        let is_crowded = holders.len() > slots;
        slots = (slots / holders.len()).max(1);
        let has = below.iter().filter(|name| **name == path[length - 1]);
        (has.count(), slots, is_crowded)
    });
    levels.collect()
}

#[test]
fn random_histories_follow_the_rule() {
    for seed in 0..200 {
        let mut random = Random(seed);
        let limit = 1 + random.below(40);
        let admission = Admission::new(limit);
        let mut open: Vec<Open> = Vec::new();
        for step in 0..400 {
            let context = format!("seed {seed}, step {step}, limit {limit}");
            let path = PATHS[random.below(PATHS.len())];
            match random.below(8) {
                0..5 => {
                    let before = levels(&open, path, limit);
                    let is_below = before.iter().all(|(has, share, _)| has < share);
                    let is_crowded = before.iter().any(|(_, _, is_crowded)| *is_crowded);
                    let new = admit(&admission, path, CLASSES[random.below(4)]);
                    assert!(
                        new.is_some() || !is_below || is_crowded,
                        "{context}: refused"
                    );
                    open.extend(new);
                    // Whoever lost a slot was above its share at one level of its path, or there
                    // are more holders than slots.
                    for lost in open.iter().filter(|open| open.slot.is_asked_to_end()) {
                        let levels = levels(&open, lost.path, limit);
                        let is_above = levels.iter().any(|(has, share, _)| has > share);
                        let is_crowded = levels.iter().any(|(_, _, is_crowded)| *is_crowded);
                        assert!(is_above || is_crowded, "{context}: {:?} lost", lost.path);
                    }
                    open.retain(|open| !open.slot.is_asked_to_end());
                }
                5 if !open.is_empty() => {
                    let index = random.below(open.len());
                    drop(open.swap_remove(index));
                }
                6 if !open.is_empty() => {
                    let index = random.below(open.len());
                    open[index].slot.reassign(path);
                    open[index].path = path;
                }
                _ if !open.is_empty() => {
                    let index = random.below(open.len());
                    open[index].slot.touch();
                }
                _ => {}
            }
            assert_eq!(admission.used(&[]), open.len(), "{context}");
            assert!(open.len() <= limit, "{context}");
        }
        drop(open);
        assert_eq!(admission.tree().nodes.len(), 1, "seed {seed}");
    }
}
