//! The slots of inbound connections before authentication: only the address tells such clients
//! apart. While all slots are in use, a new connection takes the slot of the oldest one of the
//! address with the most, if its own address has at least two fewer. So each of several addresses
//! gets an equal part, whatever the others do. Of one worker: nothing is shared between threads.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::rc::Rc;

use tokio::sync::Notify;

use crate::account::Charge;
use crate::error::Failure;

/// The slots of one worker.
#[derive(Debug)]
pub struct PendingSlots {
    limit: usize,
    in_use: Cell<usize>,
    /// The number of the next connection.
    next: Cell<u64>,
    /// The connections of each address by their numbers, so the oldest one is first.
    addresses: RefCell<HashMap<IpAddr, BTreeMap<u64, Rc<Notify>>>>,
}

/// The slot of a connection, released on drop.
#[derive(Debug)]
pub struct PendingSlot {
    slots: Rc<PendingSlots>,
    address: IpAddr,
    number: u64,
    evicted: Rc<Notify>,
}

impl PendingSlots {
    /// This many slots.
    pub fn new(limit: usize) -> Rc<Self> {
        Rc::new(Self {
            limit,
            in_use: Cell::new(0),
            next: Cell::new(0),
            addresses: RefCell::default(),
        })
    }

    /// The number of slots in use.
    pub fn in_use(&self) -> usize {
        self.in_use.get()
    }

    /// A slot for a connection of this address, perhaps that of an evicted one.
    pub fn try_acquire(self: &Rc<Self>, address: IpAddr) -> Option<PendingSlot> {
        if self.in_use.get() >= self.limit {
            self.evict_for(address)?;
        }
        let (number, evicted) = (self.next.get(), Rc::new(Notify::new()));
        self.next.set(number + 1);
        self.in_use.set(self.in_use.get() + 1);
        let mut addresses = self.addresses.borrow_mut();
        let slots = addresses.entry(address).or_default();
        slots.insert(number, evicted.clone());
        Some(PendingSlot {
            slots: self.clone(),
            address,
            number,
            evicted,
        })
    }

    /// Releases the slot of the oldest connection of the address with the most, unless this one has
    /// about as many.
    fn evict_for(&self, address: IpAddr) -> Option<()> {
        let addresses = self.addresses.borrow();
        let own = addresses.get(&address).map_or(0, BTreeMap::len);
        let (largest, slots) = addresses.iter().max_by_key(|(_, slots)| slots.len())?;
        let (number, evicted) = slots.first_key_value().filter(|_| slots.len() > own + 1)?;
        let (largest, number) = (*largest, *number);
        evicted.notify_one();
        drop(addresses);
        self.release(largest, number);
        Some(())
    }

    /// Releases a slot, unless that has been done.
    fn release(&self, address: IpAddr, number: u64) {
        let mut addresses = self.addresses.borrow_mut();
        let Some(slots) = addresses.get_mut(&address) else {
            return;
        };
        if slots.remove(&number).is_some() {
            self.in_use.set(self.in_use.get() - 1);
        }
        if slots.is_empty() {
            addresses.remove(&address);
        }
    }
}

impl Drop for PendingSlot {
    fn drop(&mut self) {
        self.slots.release(self.address, self.number);
    }
}

/// What a connection holds before authentication: its slot and its memory. Nothing if it comes from
/// the pod's own application.
#[derive(Debug, Default)]
pub struct Pending(Option<(PendingSlot, Charge)>);

impl Pending {
    /// An inbound connection.
    pub fn new(slot: PendingSlot, memory: Charge) -> Self {
        Self(Some((slot, memory)))
    }

    /// Runs a step of the connection. Fails if another connection takes the slot before it ends.
    pub async fn unless_evicted<T>(
        &self,
        step: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let Some((slot, _)) = &self.0 else {
            return step.await;
        };
        tokio::select! {
            result = step => result,
            () = slot.evicted.notified() => Err(Failure::Overloaded(
                "other addresses need its slot: its own has the most unauthenticated connections",
            )),
        }
    }

    /// Releases both: the client has authenticated, or its protocol is known.
    pub fn release(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(slots: &Rc<PendingSlots>, host: u8, count: usize) -> Vec<PendingSlot> {
        let address = IpAddr::from([10, 0, 0, host]);
        let taken = (0..count).map_while(|_| slots.try_acquire(address));
        taken.collect()
    }

    async fn is_evicted(slot: &PendingSlot) -> bool {
        tokio::select! {
            biased;
            () = slot.evicted.notified() => true,
            () = std::future::ready(()) => false,
        }
    }

    #[tokio::test]
    async fn address_gets_its_part_while_others_hold_all_slots() {
        let slots = PendingSlots::new(12);
        let one = take(&slots, 1, 100);
        assert_eq!(one.len(), 12, "all, while no other address needs one");
        let two = take(&slots, 2, 100);
        assert_eq!((two.len(), slots.in_use()), (6, 12));
        let three = take(&slots, 3, 100);
        assert_eq!((three.len(), slots.in_use()), (4, 12));
        assert!(take(&slots, 1, 1).is_empty(), "it has its part");
        for (number, slot) in one.iter().enumerate() {
            assert_eq!(is_evicted(slot).await, number < 8, "the oldest ones");
        }
        drop(one);
        assert_eq!((slots.in_use(), take(&slots, 3, 100).len()), (8, 4));
        drop((two, three));
        assert_eq!((slots.in_use(), slots.addresses.borrow().len()), (0, 0));
    }

    #[test]
    fn addresses_of_an_attacker_leave_a_slot_to_each_other_one() {
        let slots = PendingSlots::new(40);
        let flood: Vec<_> = (0..20).map(|host| take(&slots, host, 100)).collect();
        assert_eq!(flood.iter().map(Vec::len).max(), Some(40));
        assert_eq!(slots.in_use(), 40);
        let victim = take(&slots, 100, 1);
        assert_eq!(victim.len(), 1);
        for host in 0..20 {
            take(&slots, host, 100);
        }
        assert_eq!(slots.addresses.borrow()[&victim[0].address].len(), 1);
    }
}
