//! The shares of callers, of their groups, and of attackers with many names.

use super::*;
use crate::memory::max_read;

const MIB: usize = 1024 * 1024;

/// A workload in a namespace of its own.
fn peer(namespace: usize) -> Holder {
    service_account(namespace, 0)
}

fn service_account(namespace: usize, name: usize) -> Holder {
    let identity = format!("spiffe://cluster.local/ns/n{namespace}/sa/a{name}");
    Holder::Peer(Rc::new(identity.parse().unwrap()))
}

fn address(last: u8) -> IpAddr {
    [10, 0, 0, last].into()
}

/// Takes one at a time until the holder gets no more.
fn take(budget: &Rc<Budget>, holder: Holder) -> Charge {
    let mut charge = Charge::new(budget.account(holder));
    while charge.try_grow(charge.amount() + 1) {}
    charge
}

#[test]
fn charges_are_released_and_reads_become_small_under_pressure() {
    let (budget, other) = (Budget::bytes(100), Budget::bytes(100));
    let charge = || Charge::new(budget.account(Holder::App));
    let (mut one, mut two) = (charge(), charge());
    one.set(70);
    assert!(!budget.is_under_pressure() && max_read(MIB) == MIB);
    two.set(20);
    assert!(budget.is_under_pressure() && !budget.is_exhausted());
    assert!(max_read(MIB) < MIB && max_read(10) == 10);
    assert!(!two.try_grow(31) && two.try_grow(30));
    assert!(budget.is_exhausted() && !other.is_exhausted());
    one.set(10);
    assert_eq!((budget.used(), max_read(MIB)), (40, MIB));
    drop((one, two));
    assert_eq!(budget.used(), 0);
    assert!(budget.accounts.borrow().is_empty());
}

#[test]
fn holders_leave_some_to_others() {
    let budget = Budget::bytes(1000);
    let first = take(&budget, peer(0));
    assert_eq!(first.amount(), 571, "alone, a workload gets 4/7");
    let held: Vec<_> = (1..6).map(|name| take(&budget, peer(name))).collect();
    let amounts: Vec<_> = held.iter().map(Charge::amount).collect();
    assert_eq!(amounts, [245, 105, 45, 19, 8]);
    drop(first);
    let sixth = take(&budget, peer(6));
    assert!(sixth.amount() > 300, "{}", sixth.amount());
}

#[test]
fn many_service_accounts_of_a_namespace_leave_a_third_to_others() {
    for accounts in [5, 50] {
        let budget = Budget::bytes(10_000);
        let flood: Vec<_> = (0..accounts)
            .map(|name| take(&budget, service_account(0, name)))
            .collect();
        assert_eq!(flood[0].amount(), 5714);
        let second = flood[1].amount();
        assert!(second > 800, "another one of the namespace gets {second}");
        assert!(budget.used() <= 6667, "{accounts}: {}", budget.used());
        let other = take(&budget, peer(1));
        assert!(other.amount() > 1900, "{accounts}: {}", other.amount());
        drop((flood, other));
        assert!(budget.accounts.borrow().is_empty());
    }
}

#[test]
fn same_namespace_of_another_trust_domain_is_another_group() {
    let budget = Budget::bytes(1000);
    let holders = ["a", "b"].map(|domain| {
        let identity = format!("spiffe://{domain}/ns/shop/sa/web");
        take(&budget, Holder::Peer(Rc::new(identity.parse().unwrap())))
    });
    assert_eq!(holders.map(|holder| holder.amount()), [571, 245]);
}

#[test]
fn attacker_with_many_names_of_three_kinds_leaves_some_to_others() {
    let budget = Budget::bytes(10_000);
    let names = (0..50).flat_map(|name| {
        let address = address(name);
        let account = service_account(0, name.into());
        [
            account,
            Holder::Plaintext(address),
            Holder::Pending(address),
        ]
    });
    let _attacker: Vec<_> = names.map(|name| take(&budget, name)).collect();
    let other = take(&budget, peer(1));
    assert!(other.amount() > 200, "{}", other.amount());
}

#[test]
fn attacker_with_three_names_leaves_some_to_its_namespace_and_to_others() {
    let budget = Budget::bytes(10_000);
    let names = [
        peer(0),
        Holder::Plaintext(address(0)),
        Holder::Pending(address(0)),
    ];
    let attacker = names.map(|name| take(&budget, name));
    let left = budget.limit() - budget.used();
    let flood: Vec<_> = (1..50)
        .map(|name| take(&budget, service_account(0, name)))
        .collect();
    let first = flood[0].amount();
    assert!(first >= left / 7, "{first} of {left}");
    let by_flood = left - (budget.limit() - budget.used());
    assert!(by_flood <= left / 5, "{by_flood} of {left}");
    let other = take(&budget, peer(1));
    assert!(other.amount() > 300, "{}", other.amount());
    drop((attacker, flood, other));
    assert_eq!(budget.used(), 0);
}

#[test]
fn work_of_a_large_holder_does_not_grow_into_the_last_eighth() {
    let budget = Budget::bytes(800);
    let charge = |holder| Charge::new(budget.account(holder));
    for [large, small, other] in [
        [0, 1, 2].map(|last| Holder::Plaintext(address(last))),
        [0, 1, 2].map(|name| service_account(0, name)),
    ] {
        // A member leaves some of two thirds to other members of its group.
        let [mut large, mut small, mut other] = [large, small, other].map(charge);
        assert!(large.hold(461).is_ok() && large.hold(462).is_err());
        assert!(large.hold(462).is_ok(), "it does not grow");
        assert!(small.hold(100).is_ok() && large.hold(450).is_ok());
        // All but the largest one leave the last eighth to other groups if they use much.
        assert!(other.hold(100).is_ok(), "together they use a quarter");
        let mut outside = charge(peer(1));
        assert!(outside.hold(50).is_ok() && small.hold(101).is_err());
        assert!(small.hold(100).is_ok() && outside.hold(100).is_ok());
        assert!(large.hold(451).is_err());
    }
    let mut app = charge(Holder::App);
    assert!(app.hold(800).is_ok(), "there is no other holder");
}

#[test]
fn holder_without_anything_gets_the_last_byte() {
    let budget = Budget::bytes(1);
    let only = take(&budget, Holder::Plaintext(address(1)));
    assert_eq!((only.amount(), take(&budget, peer(0)).amount()), (1, 0));
    drop(only);
    assert_eq!(take(&budget, peer(0)).amount(), 1);
}

#[test]
fn client_with_many_addresses_is_one_holder() {
    let budget = Budget::bytes(10_000);
    let addresses = (0..200).map(address);
    let flood: Vec<_> = addresses
        .map(|address| take(&budget, Holder::Plaintext(address)))
        .collect();
    assert_eq!(flood[0].amount(), 5714, "alone, an address gets 4/7");
    assert!(flood[1].amount() > 500, "{}", flood[1].amount());
    assert!(budget.used() <= 6667, "{}", budget.used());
    let pending = take(&budget, Holder::Pending(address(0)));
    let peer = take(&budget, peer(0));
    assert!(pending.amount() > 1000 && peer.amount() > 200);
}
