//! The memory for buffers, which callers share, and the holders of memory and of connection slots
//! (`runtime/src/admission.rs`). An account has what one holder uses. It limits a holder to a
//! multiple of what is left, so each leaves a part of the rest to others. With a fixed share of a
//! quarter, one attacker could use up all: it is three holders, with its identity, and with its
//! address before and without authentication. Names that one attacker can have many of are limited
//! as a group too.
//!
//! Of one worker: nothing is shared between threads. A connection finds its account once.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::IpAddr;
use std::ptr;
use std::rc::{Rc, Weak};

use diy_mesh_proto::Identity;
use diy_mesh_runtime::admission;

use crate::error::Failure;
use crate::memory::count_pressure;

/// A holder gets no more once it uses this many times what is left. The first one gets two thirds, and
/// the next one two thirds of the rest: 1/27 is left beside the three groups of an attacker. A member
/// may use this many times what is left to its group: alone 4/7, and it leaves 2/21 to the others.
const MAX_SHARE: usize = 2;
/// Once a group has its share, all but its largest member may together use one part in this many of
/// what is left. Else an attacker with three names would leave nothing to others of its namespace.
const GROUP_RESERVE: usize = 4;
/// The maximum size of a head while memory is short.
const MAX_HEAD_UNDER_PRESSURE: usize = 4 * 1024;

const EXHAUSTED: &str = "its connections use the memory that they may use";
const HAS_SHARE: &str = "the connections of this caller use the memory that they may use";

/// The slot of a connection among those of its worker.
pub type ConnectionSlot = admission::Slot<Holder>;

/// Who uses a resource. Addresses are [`admission::network`]s.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Holder {
    /// The pod's own application. Only it uses the resources of the outbound path.
    App,
    /// All clients of the application: they share half of the slots.
    Clients,
    /// A workload of the mesh.
    Peer(Rc<Identity>),
    /// A client without mutual TLS.
    Plaintext(IpAddr),
    /// A client that has not authenticated, and whose protocol is unknown.
    Pending(IpAddr),
    /// All workloads of a namespace, with the trust domain: a tenant creates service accounts at will.
    Namespace(Rc<str>),
    /// All clients without mutual TLS: a client with many addresses is one holder.
    AllPlaintext,
    /// All clients whose protocol is unknown.
    AllPending,
}

impl Holder {
    /// The group that shares as one holder.
    fn group(&self) -> Option<Self> {
        match self {
            Self::Peer(identity) => {
                let namespace = format!("{}/{}", identity.trust_domain(), identity.namespace());
                Some(Self::Namespace(namespace.into()))
            }
            Self::Plaintext(_) => Some(Self::AllPlaintext),
            Self::Pending(_) => Some(Self::AllPending),
            _ => None,
        }
    }

    /// The holders of a connection slot, from the largest group on.
    pub fn path(self) -> Vec<Self> {
        match self.group() {
            Some(group) => vec![Self::Clients, group, self],
            None => vec![self],
        }
    }
}

/// A limited number of bytes.
#[derive(Debug)]
pub struct Budget {
    limit: Cell<usize>,
    used: Cell<usize>,
    /// The accounts in use.
    accounts: RefCell<HashMap<Holder, Weak<Account>>>,
}

impl Budget {
    /// A budget of `limit` bytes.
    pub fn bytes(limit: usize) -> Rc<Self> {
        Rc::new(Self {
            limit: Cell::new(limit),
            used: Cell::new(0),
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
                largest: Cell::new((ptr::null(), 0)),
            });
            let entry = Rc::downgrade(&account);
            self.accounts.borrow_mut().insert(holder, entry);
            account
        })
    }

    /// Whether three quarters are used: large buffers are rejected.
    pub fn is_under_pressure(&self) -> bool {
        self.used.get() >= self.limit() / 4 * 3
    }

    /// Whether all is used: new work is rejected.
    pub fn is_exhausted(&self) -> bool {
        self.used.get() >= self.limit()
    }

    /// The limit.
    pub fn limit(&self) -> usize {
        self.limit.get()
    }

    /// What is used.
    pub fn used(&self) -> usize {
        self.used.get()
    }

    /// What is left once `more` is used. None if it is too much.
    fn left(&self, more: usize) -> Option<usize> {
        self.limit().checked_sub(self.used().checked_add(more)?)
    }

    /// Changes the limit.
    pub fn resize(&self, limit: usize) {
        self.change(&self.limit, limit);
    }

    fn set(&self, used: usize) {
        self.change(&self.used, used);
    }

    fn change(&self, cell: &Cell<usize>, value: usize) {
        let before = self.is_under_pressure();
        cell.set(value);
        match (before, self.is_under_pressure()) {
            (false, true) => count_pressure(1),
            (true, false) => count_pressure(-1),
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
    /// Of a group: the member that used the most when it last changed, and what it uses.
    largest: Cell<(*const Account, usize)>,
}

impl Account {
    /// The holder.
    pub fn holder(&self) -> &Holder {
        &self.holder
    }

    /// Whether the holder may use `more`.
    fn has_left(&self, more: usize) -> bool {
        self.left(more).is_some()
    }

    /// What is left to the holder once it uses `more`. None if it is too much.
    fn left(&self, more: usize) -> Option<usize> {
        let left = match &self.group {
            Some(group) => (group.left(more)).or_else(|| group.left_in_reserve(more))?,
            None => self.budget.left(more)?,
        };
        let used = self.used.get();
        if self.holder == Holder::App {
            return Some(left);
        }
        let share = left.saturating_mul(MAX_SHARE);
        // A holder that uses nothing gets something while there is enough of it.
        share.checked_sub(used + more).or((used == 0).then_some(0))
    }

    /// What is left to all but the largest member of a group that has its share, once they use `more`.
    fn left_in_reserve(&self, more: usize) -> Option<usize> {
        let reserve = self.budget.left(more)? / GROUP_RESERVE;
        reserve.checked_sub(self.used_by_rest() + more)
    }

    /// What all but the largest member of a group use.
    fn used_by_rest(&self) -> usize {
        self.used.get() - self.largest.get().1
    }

    /// Whether work in progress may not grow. The last eighth is for others if the holder uses more
    /// than a quarter, or all but the largest member of its group do. The last eighth of the share of
    /// the group is for its other members.
    fn must_yield(&self) -> bool {
        if self.holder == Holder::App {
            return false;
        }
        let is_reached = |used, limit| used >= limit / 8 * 7;
        let (limit, used) = (self.budget.limit(), self.used.get());
        let by_rest = self.group.as_ref().map_or(0, |group| group.used_by_rest());
        if is_reached(self.budget.used(), limit) && used.max(by_rest) > limit / 4 {
            return true;
        }
        let share = limit / (MAX_SHARE + 1) * MAX_SHARE;
        let in_group = |group: &Rc<Self>| is_reached(group.used.get(), share);
        self.group.as_ref().is_some_and(in_group) && used > share / 4
    }

    fn change(&self, from: usize, to: usize) {
        let used = self.used.get() - from + to;
        self.used.set(used);
        let Some(group) = &self.group else {
            return self.budget.set(self.budget.used() - from + to);
        };
        let (largest, most) = group.largest.get();
        if used > most || ptr::eq(self, largest) {
            group.largest.set((self, used));
        }
        group.change(from, to);
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
mod tests;
