//! Fair shares of a limited number of slots, such as connections. While slots are plentiful, a
//! holder may take any number of them. While they are short, it may take one only if it has less
//! than a quarter of all slots: no holder keeps the others out. Nothing here waits.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::hash::Hash;
use std::rc::Rc;

/// The slots of one worker, by holder.
pub struct Shares<K> {
    limit: usize,
    short_at: usize,
    total: Cell<usize>,
    held: RefCell<HashMap<K, usize>>,
}

/// A slot, released on drop.
pub struct Share<K: Clone + Eq + Hash> {
    shares: Rc<Shares<K>>,
    holder: K,
}

impl<K: Clone + Eq + Hash> Shares<K> {
    /// `limit` slots, which are short from `short_at` slots in use.
    pub fn new(limit: usize, short_at: usize) -> Rc<Self> {
        Rc::new(Self {
            limit,
            short_at,
            total: Cell::new(0),
            held: RefCell::default(),
        })
    }

    /// A slot, unless all are in use, or they are short and the holder has its share.
    pub fn acquire(self: &Rc<Self>, holder: K) -> Option<Share<K>> {
        let (total, share) = (self.total.get(), (self.limit / 4).max(1));
        let mut held = self.held.borrow_mut();
        let has_share = || held.get(&holder).is_some_and(|&slots| slots >= share);
        if total >= self.limit || (total >= self.short_at && has_share()) {
            return None;
        }
        *held.entry(holder.clone()).or_default() += 1;
        self.total.set(total + 1);
        let shares = self.clone();
        Some(Share { shares, holder })
    }

    /// The number of slots in use.
    pub fn in_use(&self) -> usize {
        self.total.get()
    }
}

impl<K: Clone + Eq + Hash> Drop for Share<K> {
    fn drop(&mut self) {
        let Shares { total, held, .. } = &*self.shares;
        total.set(total.get() - 1);
        let mut held = held.borrow_mut();
        if let Some(slots) = held.get_mut(&self.holder) {
            *slots -= 1;
            if *slots == 0 {
                held.remove(&self.holder);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Acquires slots until one is refused.
    fn take(shares: &Rc<Shares<char>>, holder: char) -> Vec<Share<char>> {
        std::iter::from_fn(|| shares.acquire(holder)).collect()
    }

    #[test]
    fn holder_takes_all_plentiful_slots_and_a_quarter_of_short_ones() {
        let shares = Shares::new(100, 50);
        let a = take(&shares, 'a');
        assert_eq!(a.len(), 50);
        let b = take(&shares, 'b');
        let c = take(&shares, 'c');
        assert_eq!((b.len(), c.len(), shares.in_use()), (25, 25, 100));
        assert!(shares.acquire('d').is_none(), "all are in use");
        drop(a);
        assert_eq!(take(&shares, 'd').len(), 25);
        drop((b, c));
        assert_eq!((shares.in_use(), shares.held.borrow().len()), (0, 0));
    }

    #[test]
    fn one_slot_can_be_used() {
        let shares = Shares::new(1, 0);
        let only = shares.acquire('a');
        assert!(only.is_some() && shares.acquire('b').is_none());
        drop(only);
        assert!(shares.acquire('b').is_some());
    }
}
