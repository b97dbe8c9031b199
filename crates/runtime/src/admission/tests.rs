//! The rule in pure histories, and the signals between a connection and the one that it displaces.

use std::task::Context;

use super::*;

type Path = &'static [&'static str];

impl<K: Clone + Eq + Hash> Admission<K> {
    /// The number of holders in the tree.
    fn holders(&self) -> usize {
        let tree = self.tree();
        tree.nodes.len() - 1 - tree.free.len()
    }
}

fn admit(admission: &Arc<Admission<&'static str>>, path: Path, class: Class) -> Option<Open> {
    let slot = admission.admit(path)?;
    slot.set(class);
    Some(Open {
        path,
        slot,
        bytes: 0,
        wanted: 0,
    })
}

/// The use of bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Need {
    New,
    InProgress,
    Optional,
    Lasting,
}

/// An open connection of a test.
struct Open {
    path: Path,
    slot: Slot<&'static str>,
    bytes: usize,
    /// With what it asks for.
    wanted: usize,
}

impl Open {
    /// Changes the bytes.
    fn hold(&mut self, bytes: usize, need: Need) -> bool {
        let hold = match need {
            Need::New => Slot::begin,
            Need::InProgress => Slot::hold,
            Need::Optional => Slot::try_hold,
            Need::Lasting => Slot::hold_share,
        };
        let held = hold(&self.slot, self.bytes, bytes);
        if held {
            self.bytes = bytes;
        }
        held
    }
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
    assert_eq!((admission.used(&[]), admission.holders()), (0, 0));
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
            let serve = poll_fn(|_| {
                if ends_when_asked && http.slot.is_asked_to_end() {
                    Poll::Ready(())
                } else {
                    Poll::Pending
                }
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

/// A wait for a slot, in a test.
struct Waiting<'a> {
    path: Path,
    slot: Pin<Box<dyn Future<Output = Slot<&'static str>> + 'a>>,
}

impl<'a> Waiting<'a> {
    fn new(admission: &'a Arc<Admission<&'static str>>, path: Path) -> Self {
        let slot = Box::pin(admission.acquire(path));
        Self { path, slot }
    }

    fn poll(&mut self) -> Option<Open> {
        match self
            .slot
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
        {
            Poll::Ready(slot) => Some(Open {
                path: self.path,
                slot,
                bytes: 0,
                wanted: 0,
            }),
            Poll::Pending => None,
        }
    }
}

/// The waiting connections, in their order. Each has been polled once.
fn queue<'a>(
    admission: &'a Arc<Admission<&'static str>>,
    paths: &[Path],
) -> Vec<Option<Waiting<'a>>> {
    let mut queue: Vec<_> = paths
        .iter()
        .map(|path| Some(Waiting::new(admission, path)))
        .collect();
    assert!(granted(&mut queue).is_empty(), "it waits");
    queue
}

/// Those that have got a slot.
fn granted(queue: &mut [Option<Waiting<'_>>]) -> Vec<(usize, Open)> {
    let mut granted = Vec::new();
    for (index, waiting) in queue.iter_mut().enumerate() {
        if let Some(open) = waiting.as_mut().and_then(Waiting::poll) {
            *waiting = None;
            granted.push((index, open));
        }
    }
    granted
}

#[test]
fn released_slot_goes_to_the_waiting_holder_furthest_below_its_share() {
    let admission = Admission::new(8);
    let mut a = fill(&admission, &["n", "a"]);
    let mut b = fill(&admission, &["m", "b"]);
    let mut d = fill(&admission, &["n", "d"]);
    a.retain(|open| !open.slot.is_ended());
    assert_eq!((a.len(), b.len(), d.len()), (2, 4, 2));
    let paths: [Path; 5] = [
        &["n", "a"],
        &["n", "a"],
        &["m", "b"],
        &["n", "d"],
        &["m", "b"],
    ];
    let mut waiting = queue(&admission, &paths);
    let mut next = |released: &mut Vec<Open>| {
        drop(released.pop());
        let granted = granted(&mut waiting);
        assert_eq!(granted.len(), 1);
        granted.into_iter().next().unwrap()
    };
    // The namespace with fewer slots, and in it the holder with fewer slots.
    let first = next(&mut d);
    let second = next(&mut b);
    assert_eq!((first.0, second.0), (3, 2));
    // A flood of one holder waits before another one does.
    let third = next(&mut b);
    assert_eq!(third.0, 4);
    drop((a, b, d, first, second, third));
    assert_eq!(granted(&mut waiting).len(), 2);
    drop(waiting);
    assert_eq!((admission.used(&[]), admission.holders()), (0, 0));
}

#[test]
fn slots_of_waiters_that_have_gone_are_passed_on() {
    let admission = Admission::new(1);
    let only = admit(&admission, &["a"], Class::InUse);
    let mut waiting = queue(&admission, &[&["b"], &["b"], &["c"], &["d"]]);
    // One has not been polled since it got its slot.
    drop(only);
    assert_eq!(admission.used(&["b"]), 1);
    waiting[0] = None;
    waiting[2] = None;
    let second = granted(&mut waiting);
    assert_eq!(second[0].0, 1);
    drop(second);
    assert_eq!(granted(&mut waiting)[0].0, 3);
    assert_eq!((admission.used(&[]), admission.holders()), (0, 0));
}

#[test]
fn more_slots_are_for_those_that_wait() {
    let admission = Admission::new(1);
    let _one = admit(&admission, &["a"], Class::InUse);
    let mut waiting = queue(&admission, &[&["a"], &["a"], &["a"]]);
    admission.resize(3, usize::MAX);
    assert_eq!(granted(&mut waiting).len(), 2);
}

#[tokio::test(start_paused = true)]
async fn work_has_a_second_to_be_done_and_then_starts_again() {
    for (seconds, started_after, starts) in [(0.5, 0.5, 1), (5.0, 1.0, 2)] {
        let admission = Admission::new(2);
        let count = AtomicUsize::new(0);
        let work = || async {
            count.fetch_add(1, Relaxed);
            tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
        };
        let start = tokio::time::Instant::now();
        let other = async {
            tokio::task::yield_now().await;
            let started = admission.run(&["b"], async || start.elapsed().as_secs_f64());
            let started = started.await;
            assert!((started - started_after).abs() < 0.1, "{started}");
        };
        let both = async { tokio::join!(admission.run(&["a"], work), other) };
        tokio::select! {
            biased;
            _ = both => assert_eq!(count.load(Relaxed), starts),
            () = admission.run(&["a"], std::future::pending) => unreachable!(),
        }
        assert_eq!(admission.used(&[]), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn connection_that_has_released_its_slot_in_time_does_not_end() {
    let admission = Admission::new(2);
    let first = admit(&admission, &["a"], Class::BetweenExchanges).unwrap();
    let _second = admit(&admission, &["a"], Class::InUse);
    let other = admission.acquire(&["b"]).await;
    assert!(first.slot.is_asked_to_end());
    let starts = async { other.run(pin!(async { 7 })).await };
    let (started, ()) = tokio::join!(starts, async {
        tokio::task::yield_now().await;
        first.slot.release();
    });
    assert_eq!(started, Some(7));
    drop(other);
    let mut open_for_long = pin!(tokio::time::sleep(END_TIMEOUT * 3));
    assert_eq!(first.slot.run(open_for_long.as_mut()).await, Some(()));
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

/// At each level of a path: what the holder has of a resource, its share, and whether there are more
/// holders than the level has of it. Counted anew from the lists of open connections and of those that
/// wait.
fn levels(
    open: &[Open],
    waiting: &[Path],
    path: Path,
    uses: impl Fn(&Open) -> usize,
    limit: usize,
) -> Vec<(usize, usize, bool)> {
    let mut places = limit;
    let levels = (1..=path.len()).map(|length| {
        let above = &path[..length - 1];
        let of_level = |path: Path| path.len() >= length && path.starts_with(above);
        let below: Vec<_> = open
            .iter()
            .filter(|open| of_level(open.path))
            .map(|open| (open.path[length - 1], uses(open)))
            .collect();
        let mut holders: Vec<_> = below.iter().map(|(name, _)| *name).collect();
        let waiting = waiting.iter().filter(|path| of_level(path));
        holders.extend(waiting.chain([&path]).map(|path| path[length - 1]));
        holders.sort_unstable();
        holders.dedup();
        let is_crowded = holders.len() > places;
        places = (places / holders.len()).max(1);
        let own = below.iter().filter(|(name, _)| *name == path[length - 1]);
        (own.map(|(_, uses)| uses).sum(), places, is_crowded)
    });
    levels.collect()
}

/// Moves the connections that were told to end. Each of them was above its share of what is short,
/// or there are more holders than slots.
fn remove_ended(
    open: &mut Vec<Open>,
    ending: &mut Vec<Open>,
    uses: impl Fn(&Open) -> usize,
    limit: usize,
    context: &str,
) -> bool {
    for lost in open.iter().filter(|open| open.slot.is_asked_to_end()) {
        let holders: Vec<Path> = ending.iter().map(|open| open.path).collect();
        let levels = levels(open, &holders, lost.path, &uses, limit);
        let is_above = levels.iter().all(|(has, share, _)| has > share);
        let is_crowded = levels.iter().any(|(_, _, is_crowded)| *is_crowded);
        assert!(is_above || is_crowded, "{context}: {:?} lost", lost.path);
    }
    let before = ending.len();
    ending.extend(open.extract_if(.., |open| open.slot.is_asked_to_end()));
    ending.len() > before
}

#[test]
fn random_histories_follow_the_rule() {
    let (mut ended_for_bytes, mut refused_bytes, mut refused_for_ending) = (0, 0, 0);
    for seed in 0..200 {
        let mut random = Random(seed);
        let (limit, max_bytes) = (1 + random.below(40), 500 + random.below(5000));
        let admission = Admission::new(limit);
        admission.resize(limit, max_bytes);
        let max_bytes = admission.max_bytes();
        let reserve = max_bytes / (RESERVE - 1);
        let mut open: Vec<Open> = Vec::new();
        // Their tasks have not run.
        let mut ending: Vec<Open> = Vec::new();
        for step in 0..600 {
            let context = format!("seed {seed}, step {step}, limits {limit} and {max_bytes}");
            let path = PATHS[random.below(PATHS.len())];
            match random.below(16) {
                0..5 => {
                    let before = levels(&open, &[], path, |_| 1, limit);
                    let is_below = before.iter().all(|(has, share, _)| has < share);
                    let is_crowded = before.iter().any(|(_, _, is_crowded)| *is_crowded);
                    let new = admit(&admission, path, CLASSES[random.below(4)]);
                    assert!(
                        new.is_some() || !is_below || is_crowded,
                        "{context}: refused"
                    );
                    open.extend(new);
                    remove_ended(&mut open, &mut ending, |_| 1, limit, &context);
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
                7 if !open.is_empty() => {
                    let index = random.below(open.len());
                    open[index].slot.touch();
                }
                8..12 if !open.is_empty() => {
                    let index = random.below(open.len());
                    let (before, path) = (open[index].bytes, open[index].path);
                    let bytes = random.below(max_bytes / 4);
                    let need = [Need::New, Need::InProgress, Need::Optional][random.below(3)];
                    let is_optional = need == Need::Optional;
                    open[index].wanted = bytes;
                    let holders: Vec<Path> = ending.iter().map(|open| open.path).collect();
                    let levels = levels(&open, &holders, path, |open| open.wanted, max_bytes);
                    let is_within = levels.last().is_some_and(|(has, share, _)| has <= share);
                    let (used, ends) = (used_by(&open), used_by(&ending));
                    let held = open[index].hold(bytes, need);
                    refused_bytes += usize::from(!held);
                    assert!(held || bytes > before, "{context}: it does not grow");
                    let is_full = used + bytes > max_bytes / 4 + before;
                    let is_ending = ends > reserve;
                    assert!(
                        held || !is_within || is_ending || is_optional && is_full,
                        "{context}: {path:?} is refused {bytes} bytes"
                    );
                    refused_for_ending += usize::from(!held && is_within && !is_optional);
                    let uses = |open: &Open| open.wanted;
                    let ended = remove_ended(&mut open, &mut ending, uses, max_bytes, &context);
                    open.iter_mut().for_each(|open| open.wanted = open.bytes);
                    assert!(!ended || !is_optional, "{context}: optional");
                    assert!(!ended || !is_ending, "{context}: {ends} have not ended");
                    ended_for_bytes += usize::from(ended);
                }
                12..15 if !ending.is_empty() => {
                    let index = random.below(ending.len());
                    drop(ending.swap_remove(index));
                }
                15 if !ending.is_empty() => {
                    // It releases what it holds one after the other.
                    let index = random.below(ending.len());
                    let less = random.below(ending[index].bytes + 1);
                    assert!(ending[index].hold(less, Need::InProgress), "{context}");
                }
                _ => {}
            }
            assert_eq!(admission.used(&[]), open.len(), "{context}");
            let (used, ends) = (used_by(&open), used_by(&ending));
            assert_eq!(admission.used_bytes(&[]), used + ends, "{context}");
            assert!(open.len() <= limit, "{context}");
            // Ending connections belong to no holder. Beyond the limit, their bytes count against the reserve.
            let is_within = used <= max_bytes || used + ends <= max_bytes + reserve;
            assert!(is_within, "{context}: {used} and {ends}");
        }
        drop((open, ending));
        assert_eq!(admission.holders(), 0, "seed {seed}");
        assert_eq!(admission.used_bytes(&[]), 0, "seed {seed}");
    }
    let counts = (ended_for_bytes, refused_bytes, refused_for_ending);
    assert!(
        counts.0 > 1000 && counts.1 > 1000 && counts.2 > 100,
        "{counts:?}"
    );
}

fn used_by(open: &[Open]) -> usize {
    open.iter().map(|open| open.bytes).sum()
}

#[test]
fn bytes_of_a_holder_follow_the_rule_of_slots() {
    let admission = Admission::new(20);
    admission.resize(20, 800);
    assert_eq!(
        admission.max_bytes(),
        700,
        "an eighth is for those that end"
    );
    let mut large = admit(&admission, &["others", "a"], Class::InUse).unwrap();
    assert!(
        large.hold(700, Need::New) && !large.hold(701, Need::New),
        "alone, it has all"
    );
    let mut idle = admit(&admission, &["others", "a"], Class::Idle).unwrap();
    assert!(!idle.hold(1, Need::New), "its own holder is the largest");
    assert!(
        large.hold(690, Need::New) && idle.hold(10, Need::New) && !idle.hold(11, Need::Optional)
    );
    // The first to end is the connection of the largest holder without an exchange.
    assert!(large.hold(691, Need::New) && idle.slot.is_ended());
    drop(idle);
    let mut app = admit(&admission, &["app"], Class::InUse).unwrap();
    assert!(app.hold(9, Need::New) && !large.slot.is_ended());
    assert!(
        !app.hold(10, Need::Optional),
        "nothing ends for what it can do without"
    );
    assert!(app.hold(10, Need::New) && large.slot.is_ended());
    // Its bytes belong to no holder until it has gone.
    assert_eq!(
        (admission.used_bytes(&["others"]), admission.used_bytes(&[])),
        (0, 701)
    );
    assert!(!large.hold(792, Need::New) && large.hold(300, Need::New));
    assert_eq!(admission.used_bytes(&[]), 310);
    drop(large);
    assert_eq!(admission.used_bytes(&[]), 10);
}

#[test]
fn what_is_asked_for_again_ends_nothing_and_is_bounded() {
    let admission = Admission::new(5000);
    admission.resize(5000, 800);
    let name = |number: usize| &*Box::leak(number.to_string().into_boxed_str());
    let mut open = Vec::new();
    let mut take_all = |path: Path| {
        let mut one = admit(&admission, path, Class::Silent).unwrap();
        while one.hold(one.bytes + 1, Need::Lasting) {}
        open.push(one);
        open.last().map(|one| one.bytes)
    };
    assert_eq!(take_all(&["a", "1"]), Some(700), "alone, it has all");
    assert_eq!(take_all(&["a", "2"]), Some(350), "its share");
    for number in 3..1000 {
        take_all(Box::leak(Box::new(["a", name(number)])));
    }
    assert_eq!(admission.used_bytes(&["a"]), 1050, "half as much again");
    // Another group has its share, however many holders the first one has.
    assert_eq!(take_all(&["b", "1"]), Some(350));
    assert_eq!(
        (take_all(&["c", "1"]), admission.used_bytes(&[])),
        (Some(0), 1400)
    );
    assert_eq!(ended(&open), [0; 0]);
    drop(open.remove(0));
    assert_eq!(admission.used_bytes(&[]), 700);
    let last = open.last_mut().unwrap();
    assert!(!last.hold(234, Need::Lasting) && last.hold(233, Need::Lasting));
    // An ending connection gets no more bytes, and can return its bytes.
    let lost = admit(&admission, &["d"], Class::Silent);
    admission.resize(1, 800);
    let mut lost = open
        .into_iter()
        .chain(lost)
        .find(|one| one.slot.is_ended() && one.bytes > 0);
    let lost = lost.as_mut().unwrap();
    assert!(!lost.hold(lost.bytes + 1, Need::Lasting) && lost.hold(0, Need::Lasting));
}

#[test]
fn work_in_progress_gets_the_reserve() {
    let admission = Admission::new(20);
    admission.resize(20, 800);
    let mut large = admit(&admission, &["a"], Class::InUse).unwrap();
    assert!(large.hold(700, Need::New) && !large.hold(701, Need::New));
    assert!(large.hold(800, Need::InProgress) && !large.hold(801, Need::InProgress));
    let mut new = admit(&admission, &["b"], Class::InUse).unwrap();
    assert!(new.hold(50, Need::New) && large.slot.is_ended());
}

#[test]
fn bytes_that_are_not_released_yet_are_given_to_nobody() {
    let admission = Admission::new(20);
    admission.resize(20, 800);
    let open = |name| admit(&admission, name, Class::InUse).unwrap();
    let (mut a, mut b, mut c) = (open(&["a"]), open(&["b"]), open(&["c"]));
    assert!(a.hold(400, Need::New) && b.hold(200, Need::New) && c.hold(200, Need::New));
    assert!(a.slot.is_ended() && !b.slot.is_ended());
    // 400 bytes end: more than what is left for it.
    assert!(b.hold(400, Need::New) && c.hold(290, Need::New));
    assert!(!c.hold(305, Need::New) && !b.slot.is_ended());
    // Nor a holder within its share: until it has ended, what was told to end is still held.
    let mut d = open(&["d"]);
    assert!(!d.hold(30, Need::New));
    drop(a);
    assert!(d.hold(30, Need::New) && b.slot.is_ended());
}

#[test]
fn bytes_follow_the_connection_and_outlive_its_slot() {
    let admission = Admission::new(4);
    admission.resize(4, 800);
    let mut open = admit(&admission, &["unknown", "1"], Class::Silent).unwrap();
    assert!(open.hold(100, Need::New));
    let kept = open.slot.beside();
    open.slot.reassign(&["n", "a"]);
    assert!(kept.hold(0, 50));
    let used = |path: Path| (admission.used(path), admission.used_bytes(path));
    assert_eq!((used(&["unknown"]), used(&["n", "a"])), ((0, 50), (1, 100)));
    open.slot.release();
    assert_eq!(used(&[]), (0, 150));
    let number = kept.holder();
    drop((open, kept));
    assert_eq!((used(&[]), admission.holders()), ((0, 0), 0));
    let again = admit(&admission, &["unknown", "1"], Class::Silent).unwrap();
    assert!(again.slot.holder() != number);
}

#[test]
fn connections_beyond_smaller_limits_end() {
    let admission = Admission::new(4);
    admission.resize(4, 8000);
    let mut open = [&["a"], &["b"]].map(|path| admit(&admission, path, Class::InUse).unwrap());
    assert!(open[0].hold(3000, Need::New) && open[1].hold(100, Need::New));
    assert!(!open[0].slot.is_under_pressure());
    admission.resize(4, 800);
    assert_eq!(ended(&open), [0]);
    assert!(open[0].slot.is_under_pressure(), "it holds them still");
    admission.resize(0, 800);
    assert_eq!(admission.used(&[]), 1);
}

#[tokio::test(start_paused = true)]
async fn connection_that_is_asked_for_its_bytes_has_a_second() {
    let admission = Admission::new(4);
    admission.resize(4, 800);
    let mut http = admit(&admission, &["a"], Class::BetweenExchanges).unwrap();
    assert!(http.hold(400, Need::New));
    let mut new = admit(&admission, &["b"], Class::InUse).unwrap();
    let start = tokio::time::Instant::now();
    let served = async { http.slot.run(pin!(std::future::pending::<()>())).await };
    let grows = async {
        tokio::task::yield_now().await;
        assert!(new.hold(301, Need::New) && !new.slot.is_asked_to_end());
    };
    let (ended, ()) = tokio::join!(served, grows);
    assert!(ended.is_none() && start.elapsed() >= END_TIMEOUT);
    assert!(start.elapsed() < 2 * END_TIMEOUT);
}

/// The first in the queue of the holder with the fewest slots, at each level.
fn next(open: &[Open], waiting: &[Path]) -> Option<usize> {
    let mut candidates: Vec<usize> = (0..waiting.len()).collect();
    for length in 1..=3 {
        let holder = |index: usize| &waiting[index][..length.min(waiting[index].len())];
        let has = |index| {
            let of_holder = open
                .iter()
                .filter(|open| open.path.starts_with(holder(index)));
            of_holder.count()
        };
        let first = candidates
            .iter()
            .copied()
            .min_by_key(|index| (has(*index), *index))?;
        candidates.retain(|index| holder(*index) == holder(first));
    }
    candidates.first().copied()
}

#[test]
fn random_histories_of_those_that_wait_follow_the_rule() {
    let mut longest = 0;
    for seed in 0..60 {
        let mut random = Random(seed);
        let limit = 1 + random.below(30);
        let admission = Admission::new(limit);
        let mut open: Vec<Open> = Vec::new();
        let mut queue: Vec<Option<Waiting<'_>>> = Vec::new();
        for step in 0..400 {
            let context = format!("seed {seed}, step {step}, limit {limit}");
            let paths: Vec<Path> = queue.iter().flatten().map(|one| one.path).collect();
            match random.below(8) {
                0..4 => {
                    let path = PATHS[random.below(PATHS.len())];
                    let before = levels(&open, &paths, path, |_| 1, limit);
                    let is_below = before.iter().all(|(has, share, _)| has < share);
                    let is_crowded = before.iter().any(|(_, _, is_crowded)| *is_crowded);
                    let mut new = Waiting::new(&admission, path);
                    if let Some(new) = new.poll() {
                        new.slot.set(CLASSES[random.below(4)]);
                        open.push(new);
                    } else {
                        assert!(!is_below || is_crowded, "{context}: it waits");
                        queue.push(Some(new));
                    }
                    for lost in open.iter().filter(|open| open.slot.is_asked_to_end()) {
                        assert!(lost.path != path, "{context}: one of its own ended");
                        let levels = levels(&open, &paths, lost.path, |_| 1, limit);
                        let is_above = levels.iter().any(|(has, share, _)| has > share);
                        let is_crowded = levels.iter().any(|(_, _, is_crowded)| *is_crowded);
                        assert!(is_above || is_crowded, "{context}: {:?} lost", lost.path);
                    }
                    open.retain(|open| !open.slot.is_asked_to_end());
                }
                4..7 if !open.is_empty() => {
                    drop(open.swap_remove(random.below(open.len())));
                    let expected = next(&open, &paths);
                    let mut got = granted(&mut queue);
                    let index = got.first().map(|(index, _)| *index);
                    assert_eq!(
                        (index, got.len()),
                        (expected, got.len().min(1)),
                        "{context}"
                    );
                    open.extend(got.pop().map(|(_, open)| open));
                }
                _ if !queue.is_empty() => {
                    queue.remove(random.below(queue.len()));
                    assert!(granted(&mut queue).is_empty(), "{context}");
                }
                _ => {}
            }
            queue.retain(Option::is_some);
            longest = longest.max(queue.len());
            // Nobody waits below its share, or while a slot is free.
            let paths: Vec<Path> = queue.iter().flatten().map(|one| one.path).collect();
            assert!(paths.is_empty() || open.len() == limit, "{context}");
            for path in &paths {
                let levels = levels(&open, &paths, path, |_| 1, limit);
                let is_below = levels.iter().all(|(has, share, _)| has < share);
                let is_crowded = levels.iter().any(|(_, _, is_crowded)| *is_crowded);
                assert!(!is_below || is_crowded, "{context}: {path:?} waits");
            }
            assert_eq!(admission.used(&[]), open.len(), "{context}");
        }
        drop((open, queue));
        assert_eq!(admission.holders(), 0, "seed {seed}");
    }
    assert!(longest > 20, "{longest}");
}
