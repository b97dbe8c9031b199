//! Fair shares of a limited number of slots, such as connections. While slots are plentiful, a
//! holder may take any number of them. While they are short, it may take one only if it has less
//! than a quarter of all slots: no holder keeps the others out. A holder may wait for a slot: a
//! slot that is released goes to the waiting holder with the fewest slots.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Slots, by holder.
pub struct Shares<K: Clone + Eq + Hash> {
    limit: usize,
    short_at: usize,
    state: Mutex<State<K>>,
}

struct State<K: Clone + Eq + Hash> {
    total: usize,
    held: HashMap<K, usize>,
    queues: HashMap<K, VecDeque<Waiter<K>>>,
    /// The holders that have a queue, in the order of their turns.
    turns: VecDeque<K>,
}

type Waiter<K> = oneshot::Sender<Share<K>>;

/// A slot, released on drop.
pub struct Share<K: Clone + Eq + Hash>(Option<(Arc<Shares<K>>, K)>);

impl<K: Clone + Eq + Hash> Shares<K> {
    /// `limit` slots, which are short from `short_at` slots in use.
    pub fn new(limit: usize, short_at: usize) -> Arc<Self> {
        Arc::new(Self {
            limit,
            short_at,
            state: Mutex::new(State {
                total: 0,
                held: HashMap::new(),
                queues: HashMap::new(),
                turns: VecDeque::new(),
            }),
        })
    }

    /// A slot, unless all are in use, or they are short and the holder has its share.
    pub fn try_acquire(self: &Arc<Self>, holder: K) -> Option<Share<K>> {
        let taken = self.take(&mut self.state(), &holder);
        taken.then(|| Share(Some((self.clone(), holder))))
    }

    /// Waits for a slot. Cancel-safe: the slot of a waiter that has gone is released.
    pub async fn acquire(self: &Arc<Self>, holder: K) -> Share<K> {
        let granted = {
            let mut state = self.state();
            if self.take(&mut state, &holder) {
                return Share(Some((self.clone(), holder)));
            }
            let (waiter, granted) = oneshot::channel();
            state.wait(holder, waiter);
            granted
        };
        granted.await.expect("a queue keeps its waiters")
    }

    /// The number of slots in use.
    pub fn in_use(&self) -> usize {
        self.state().total
    }

    /// Whether anyone waits for a slot.
    pub fn is_contended(&self) -> bool {
        let state = self.state();
        let mut waiters = state.queues.values().flatten();
        waiters.any(|waiter| !waiter.is_closed())
    }

    fn take(&self, state: &mut State<K>, holder: &K) -> bool {
        let has_share = state.held(holder) >= (self.limit / 4).max(1);
        if state.total >= self.limit || (state.total >= self.short_at && has_share) {
            return false;
        }
        state.total += 1;
        *state.held.entry(holder.clone()).or_default() += 1;
        true
    }

    /// Releases a slot, and takes it for the next waiter, if any.
    fn release(&self, holder: &K) -> Option<(Waiter<K>, K)> {
        let mut state = self.state();
        state.total -= 1;
        if let Some(slots) = state.held.get_mut(holder) {
            *slots -= 1;
            if *slots == 0 {
                state.held.remove(holder);
            }
        }
        let index = state.next_turn()?;
        let next = state.turns[index].clone();
        self.take(&mut state, &next).then(|| {
            state.turns.remove(index);
            (state.pop(&next), next)
        })
    }

    /// Each update is complete before the lock is released, so the state is valid after a panic.
    fn state(&self) -> MutexGuard<'_, State<K>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Clone + Eq + Hash> State<K> {
    fn held(&self, holder: &K) -> usize {
        self.held.get(holder).copied().unwrap_or_default()
    }

    /// The holder with the fewest slots whose turn is first.
    fn next_turn(&self) -> Option<usize> {
        let without_slots = self.turns.iter().position(|holder| self.held(holder) == 0);
        without_slots
            .or_else(|| (0..self.turns.len()).min_by_key(|index| self.held(&self.turns[*index])))
    }

    fn wait(&mut self, holder: K, waiter: Waiter<K>) {
        if !self.queues.contains_key(&holder) {
            self.turns.push_back(holder.clone());
        }
        let queue = self.queues.entry(holder).or_default();
        while queue.front().is_some_and(Waiter::is_closed) {
            queue.pop_front();
        }
        queue.push_back(waiter);
    }

    fn pop(&mut self, holder: &K) -> Waiter<K> {
        let queue = self.queues.get_mut(holder);
        let queue = queue.expect("a holder with a turn has a queue");
        let waiter = queue.pop_front().expect("no queue is empty");
        match queue.is_empty() {
            true => drop(self.queues.remove(holder)),
            false => self.turns.push_back(holder.clone()),
        }
        waiter
    }
}

impl<K: Clone + Eq + Hash> Drop for Share<K> {
    fn drop(&mut self) {
        let mut released = self.0.take();
        // A slot that is granted to a waiter that has gone is released in turn.
        while let Some((shares, holder)) = released {
            released = shares.release(&holder).and_then(|(waiter, next)| {
                let granted = Share(Some((shares.clone(), next)));
                waiter.send(granted).err()?.0.take()
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Acquires slots until one is refused.
    fn take(shares: &Arc<Shares<char>>, holder: char) -> Vec<Share<char>> {
        std::iter::from_fn(|| shares.try_acquire(holder)).collect()
    }

    #[test]
    fn holder_takes_all_plentiful_slots_and_a_quarter_of_short_ones() {
        let shares = Shares::new(100, 50);
        let a = take(&shares, 'a');
        assert_eq!(a.len(), 50);
        let b = take(&shares, 'b');
        let c = take(&shares, 'c');
        assert_eq!((b.len(), c.len(), shares.in_use()), (25, 25, 100));
        assert!(shares.try_acquire('d').is_none(), "all are in use");
        drop(a);
        assert_eq!(take(&shares, 'd').len(), 25);
        drop((b, c));
        assert_eq!((shares.in_use(), shares.state().held.len()), (0, 0));
    }

    #[test]
    fn one_slot_can_be_used() {
        let shares = Shares::new(1, 0);
        let only = shares.try_acquire('a');
        assert!(only.is_some() && shares.try_acquire('b').is_none());
        drop(only);
        assert!(shares.try_acquire('b').is_some());
    }

    #[tokio::test]
    async fn released_slot_goes_to_the_waiting_holder_with_the_fewest_slots() {
        let shares = Shares::new(8, 4);
        let mut held: Vec<_> = [take(&shares, 'a'), take(&shares, 'b'), take(&shares, 'c')].into();
        assert_eq!((shares.in_use(), shares.is_contended()), (8, false));
        let (granted, mut order) = tokio::sync::mpsc::unbounded_channel();
        // A flood of 'a' and 'b' waits before 'd' does.
        for holder in "aaabbbd".chars() {
            let (shares, granted) = (shares.clone(), granted.clone());
            tokio::spawn(async move { granted.send((holder, shares.acquire(holder).await)) });
            tokio::task::yield_now().await;
        }
        assert!(shares.is_contended());
        held[0].pop();
        let (holder, share) = order.recv().await.unwrap();
        assert_eq!(holder, 'd');
        // One of 'b' is released: 'a' has more than its share.
        held[1].pop();
        assert_eq!(order.recv().await.unwrap().0, 'b');
        drop(share);
        drop(held);
        drop(granted);
        let mut rest = String::new();
        while let Some((holder, share)) = order.recv().await {
            rest.push(holder);
            drop(share);
        }
        assert_eq!(rest.len(), 5, "{rest}");
        assert_eq!((shares.in_use(), shares.is_contended()), (0, false));
        assert!(shares.state().queues.is_empty() && shares.state().turns.is_empty());
    }

    #[tokio::test]
    async fn slots_of_waiters_that_have_gone_are_released() {
        let shares = Shares::new(1, 0);
        let only = shares.try_acquire('a');
        let mut waiters: Vec<_> = ['b', 'b', 'c', 'd']
            .map(|k| Box::pin(shares.acquire(k)))
            .into();
        for waiter in &mut waiters {
            assert!(futures_poll(waiter).await.is_none());
        }
        let last = waiters.pop().unwrap();
        drop(waiters);
        drop(only);
        assert_eq!(shares.in_use(), 1);
        drop(last.await);
        assert_eq!((shares.in_use(), shares.is_contended()), (0, false));
    }

    /// Polls a future once.
    async fn futures_poll<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
        tokio::select! {
            biased;
            output = future => Some(output),
            () = std::future::ready(()) => None,
        }
    }
}
