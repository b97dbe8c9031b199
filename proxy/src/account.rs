//! Limited resources that callers share: the memory for buffers, and the slots of connections. An
//! account has what one holder uses. It limits a holder to a multiple of what is left, so each leaves
//! a part of the rest to others. With a fixed share of a quarter, one attacker could use up all: it
//! is three holders, with its identity, and with its address before and without authentication.
//!
//! Of one worker: nothing is shared between threads. A connection finds its account once.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::IpAddr;
use std::rc::{Rc, Weak};

use diy_mesh_proto::Identity;

use crate::error::Failure;
use crate::memory::count_pressure;

/// A holder gets no more once it uses this many times what is left. The first one gets two thirds, and
/// the next one two thirds of the rest: 1/27 is left beside the three holders of an attacker.
const MAX_SHARE: usize = 2;
/// The maximum size of a head while memory is short.
const MAX_HEAD_UNDER_PRESSURE: usize = 4 * 1024;

const EXHAUSTED: &str = "its connections use the memory that they may use";
const HAS_SHARE: &str = "the connections of this caller use the memory that they may use";

/// Who uses a resource.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Holder {
    /// The pod's own application. Only it uses the resources of the outbound path.
    App,
    /// A workload of the mesh.
    Peer(Rc<Identity>),
    /// A client without mutual TLS.
    Plaintext(IpAddr),
    /// A client that has not authenticated, and whose protocol is unknown.
    Pending(IpAddr),
    /// All clients without mutual TLS: a client with many addresses is one holder.
    AllPlaintext,
    /// All clients whose protocol is unknown.
    AllPending,
}

impl Holder {
    /// The group that shares as one holder.
    fn group(&self) -> Option<Self> {
        match self {
            Self::Plaintext(_) => Some(Self::AllPlaintext),
            Self::Pending(_) => Some(Self::AllPending),
            Self::App | Self::Peer(_) | Self::AllPlaintext | Self::AllPending => None,
        }
    }
}

/// A limited number of bytes, or of slots.
#[derive(Debug)]
pub struct Budget {
    limit: usize,
    used: Cell<usize>,
    is_memory: bool,
    /// The accounts in use.
    accounts: RefCell<HashMap<Holder, Weak<Account>>>,
}

impl Budget {
    /// A budget of `limit` bytes.
    pub fn bytes(limit: usize) -> Rc<Self> {
        Self::new(limit, true)
    }

    /// A budget of `limit` slots.
    pub fn slots(limit: usize) -> Rc<Self> {
        Self::new(limit, false)
    }

    fn new(limit: usize, is_memory: bool) -> Rc<Self> {
        Rc::new(Self {
            limit,
            used: Cell::new(0),
            is_memory,
            accounts: RefCell::default(),
        })
    }

    /// The account of a holder.
    pub fn account(self: &Rc<Self>, holder: Holder) -> Rc<Account> {
        let known = self.accounts.borrow().get(&holder).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let account = Rc::new(Account {
                group: holder.group().map(|group| self.account(group)),
                holder: holder.clone(),
                budget: self.clone(),
                used: Cell::new(0),
            });
            let entry = Rc::downgrade(&account);
            self.accounts.borrow_mut().insert(holder, entry);
            account
        })
    }

    /// Whether three quarters are used: large buffers are rejected.
    pub fn is_under_pressure(&self) -> bool {
        self.used.get() >= self.limit / 4 * 3
    }

    /// Whether all is used: new work is rejected.
    pub fn is_exhausted(&self) -> bool {
        self.used.get() >= self.limit
    }

    /// The limit.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// What is used.
    pub fn used(&self) -> usize {
        self.used.get()
    }

    fn set(&self, used: usize) {
        let before = self.is_under_pressure();
        self.used.set(used);
        match (before, self.is_under_pressure()) {
            (false, true) if self.is_memory => count_pressure(1),
            (true, false) if self.is_memory => count_pressure(-1),
            _ => {}
        }
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// What one holder uses of a budget.
#[derive(Debug)]
pub struct Account {
    holder: Holder,
    group: Option<Rc<Account>>,
    budget: Rc<Budget>,
    used: Cell<usize>,
}

impl Account {
    /// The holder.
    pub fn holder(&self) -> &Holder {
        &self.holder
    }

    /// The account of the group, if the holder belongs to one, else this one.
    pub fn or_group(self: &Rc<Self>) -> &Rc<Self> {
        self.group.as_ref().unwrap_or(self)
    }

    /// Whether the holder may use `more`.
    fn has_left(&self, more: usize) -> bool {
        self.left(more).is_some()
    }

    /// What is left to the holder once it uses `more`. None if it is too much.
    fn left(&self, more: usize) -> Option<usize> {
        let left = match &self.group {
            Some(group) => group.left(more)?,
            None => (self.budget.limit).checked_sub(self.budget.used().checked_add(more)?)?,
        };
        let used = self.used.get();
        if self.holder == Holder::App {
            return Some(left);
        }
        let share = left.saturating_mul(MAX_SHARE);
        // A holder that uses nothing gets something while there is enough of it.
        share.checked_sub(used + more).or((used == 0).then_some(0))
    }

    /// Whether work in progress may not grow: the last eighth is for others if the holder uses more
    /// than a quarter.
    fn must_yield(&self) -> bool {
        let limit = self.budget.limit;
        let (used, limit) = match &self.group {
            Some(group) if group.must_yield() => return true,
            Some(group) => (group.used.get(), limit / (MAX_SHARE + 1) * MAX_SHARE),
            None => (self.budget.used(), limit),
        };
        self.holder != Holder::App && used >= limit / 8 * 7 && self.used.get() > limit / 4
    }

    fn change(&self, from: usize, to: usize) {
        self.used.set(self.used.get() - from + to);
        match &self.group {
            Some(group) => group.change(from, to),
            None => self.budget.set(self.budget.used() - from + to),
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.budget.accounts.borrow_mut().remove(&self.holder);
    }
}

/// What a task holds while it waits, released on drop.
#[derive(Debug)]
pub struct Charge {
    account: Rc<Account>,
    amount: usize,
}

impl Charge {
    /// A charge of nothing.
    pub fn new(account: Rc<Account>) -> Self {
        Self { account, amount: 0 }
    }

    /// The account.
    pub fn account(&self) -> &Rc<Account> {
        &self.account
    }

    /// Changes the charge.
    pub fn set(&mut self, amount: usize) {
        if amount != self.amount {
            self.account.change(self.amount, amount);
            self.amount = amount;
        }
    }

    /// Changes the charge for work in progress, which grows as its peers send. Fails if it grows, and
    /// the rest of the budget is for other holders.
    pub fn hold(&mut self, amount: usize) -> Result<(), Failure> {
        let grows = amount > self.amount;
        self.set(amount);
        match grows && self.account.must_yield() {
            true => Err(self.exceeded()),
            false => Ok(()),
        }
    }

    /// Increases the charge to `amount`, unless less is left to the holder.
    pub fn try_grow(&mut self, amount: usize) -> bool {
        let has_left = self.account.has_left(amount.saturating_sub(self.amount));
        if has_left && amount > self.amount {
            self.set(amount);
        }
        has_left
    }

    /// Fails if no memory is left to the holder for new work.
    pub fn check(&self) -> Result<(), Failure> {
        match self.account.has_left(1) {
            true => Ok(()),
            false => Err(self.exceeded()),
        }
    }

    /// Fails if no memory is left to the holder for a head of this size: under pressure, only for
    /// small ones.
    pub fn check_head(&self, size: usize) -> Result<(), Failure> {
        if size > MAX_HEAD_UNDER_PRESSURE && self.budget().is_under_pressure() {
            return Err(Failure::Overloaded(EXHAUSTED));
        }
        self.check()
    }

    /// The failure of work for which no memory is left.
    pub fn exceeded(&self) -> Failure {
        Failure::Overloaded(match self.budget().is_exhausted() {
            true => EXHAUSTED,
            false => HAS_SHARE,
        })
    }

    /// What is charged.
    pub fn amount(&self) -> usize {
        self.amount
    }

    /// The budget.
    pub fn budget(&self) -> &Budget {
        &self.account.budget
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::max_read;

    const MIB: usize = 1024 * 1024;

    fn peer(name: usize) -> Holder {
        let identity = format!("spiffe://cluster.local/ns/shop/sa/a{name}");
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
        let slots = Budget::slots(1);
        let slot = take(&slots, peer(0));
        assert!(slots.is_exhausted() && max_read(MIB) == MIB);
        drop(slot);
    }

    #[test]
    fn holders_leave_some_to_others() {
        let budget = Budget::slots(1000);
        let first = take(&budget, peer(0));
        assert_eq!(first.amount(), 666, "two thirds");
        let held: Vec<_> = (1..6).map(|name| take(&budget, peer(name))).collect();
        let amounts: Vec<_> = held.iter().map(Charge::amount).collect();
        assert_eq!(amounts, [222, 74, 25, 8, 3]);
        drop(first);
        let sixth = take(&budget, peer(6));
        assert!(sixth.amount() > 400, "{}", sixth.amount());
    }

    #[test]
    fn attacker_with_three_names_leaves_some_to_others() {
        let budget = Budget::slots(10_000);
        let names = [
            peer(0),
            Holder::Plaintext(address(0)),
            Holder::Pending(address(0)),
        ];
        let _attacker = names.map(|name| take(&budget, name));
        let other = take(&budget, peer(1));
        assert!(other.amount() > 250, "{}", other.amount());
    }

    #[test]
    fn work_of_a_large_holder_does_not_grow_into_the_last_eighth() {
        let budget = Budget::bytes(800);
        let charge = |holder| Charge::new(budget.account(holder));
        let (mut large, mut small) = (charge(peer(0)), charge(peer(1)));
        assert!(large.hold(699).is_ok() && large.hold(700).is_err());
        assert!(large.hold(700).is_ok(), "it does not grow");
        assert!(small.hold(50).is_ok() && large.hold(600).is_ok());
        drop((large, small));
        // An address leaves some of two thirds to other addresses.
        let [mut large, mut small] = [1, 2].map(|last| charge(Holder::Plaintext(address(last))));
        assert!(large.hold(461).is_ok() && large.hold(462).is_err());
        assert!(small.hold(50).is_ok() && large.hold(450).is_ok());
        drop((large, small));
        let mut app = charge(Holder::App);
        assert!(app.hold(800).is_ok(), "there is no other holder");
    }

    #[test]
    fn holder_without_anything_gets_the_last_slot() {
        let budget = Budget::slots(1);
        let only = take(&budget, Holder::Plaintext(address(1)));
        assert_eq!((only.amount(), take(&budget, peer(0)).amount()), (1, 0));
        drop(only);
        assert_eq!(take(&budget, peer(0)).amount(), 1);
    }

    #[test]
    fn client_with_many_addresses_is_one_holder() {
        let budget = Budget::slots(10_000);
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
}
