//! Consistent hashing: the same key selects the same endpoint, in all workers and proxies, and a
//! change of the endpoints moves few other keys. Pure.
//!
//! The table is from Maglev: D. E. Eisenbud et al., "Maglev: A Fast and Reliable Software Network
//! Load Balancer" (NSDI 2016), section 3.4. Each endpoint has a permutation of the slots, from the
//! hash of its address; the endpoints take turns, and each takes its next free slot. So shares
//! differ by at most one slot.
//!
//! The hash has no secret, or proxies would differ. A client that chooses its key can send its
//! requests to one endpoint of the Service, as it could by sending one key. It reaches only this
//! endpoint by that, and bounded loads limit the requests to it.

use std::net::{IpAddr, SocketAddr};

/// The number of slots, a prime, and the number of endpoints at most, usually and of a small table.
/// Usually, a table has 64 KiB, 256 KiB, or 1 MiB: at least 32 slots for each of 8,000 endpoints, so
/// that shares differ by at most 3%, and 13 for each of 20,000. A small table has about 4 for each.
/// All keys move when a Service grows into the next size.
const SIZES: [(u32, usize, usize); 6] = [
    (251, 0, 64),
    (1_021, 0, 250),
    (4_093, 0, 1_000),
    (16_381, 500, 4_000),
    (65_537, 2_000, 16_000),
    (262_139, usize::MAX, usize::MAX),
];
/// The slots that take the memory of an endpoint.
const SLOTS_OF_ENDPOINT: usize = 200;
/// Slots that are tried before a linear search. Nearly all endpoints are unusable then.
const MAX_PROBES: usize = 64;

/// The index of an endpoint for each slot. Empty without endpoints.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Table {
    slots: Vec<u32>,
    /// The number of endpoints.
    count: usize,
    is_small: bool,
}

/// The hash of a key: FNV-1a (G. Fowler, L. C. Noll, K.-P. Vo), and the finalizer of MurmurHash3,
/// because similar keys must not have similar slots.
pub fn hash(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    mix(bytes.iter().fold(0xcbf2_9ce4_8422_2325, step))
}

/// The hash of an address.
pub fn hash_address(ip: IpAddr, port: u16) -> u64 {
    let with_port = |ip: &[u8]| hash(&[ip, &port.to_be_bytes()].concat());
    match ip.to_canonical() {
        IpAddr::V4(ip) => with_port(&ip.octets()),
        IpAddr::V6(ip) => with_port(&ip.octets()),
    }
}

fn mix(mut hash: u64) -> u64 {
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

impl Table {
    /// The table of these endpoints, whose order does not depend on the proxy. A small one if the
    /// usual one takes the memory of more than `max` endpoints.
    pub fn new(endpoints: impl ExactSizeIterator<Item = SocketAddr>, max: usize) -> Self {
        const FREE: u32 = u32::MAX;
        let count = endpoints.len();
        let usual = SIZES.into_iter().find(|(_, most, _)| count <= *most);
        let fits = usual.filter(|(size, ..)| *size as usize / SLOTS_OF_ENDPOINT <= max);
        let small = || SIZES.into_iter().find(|(.., most)| count <= *most);
        let (size, ..) = fits.or_else(small).unwrap_or(SIZES[0]);
        // The next slot of each endpoint, and the distance to the one after it.
        let mut permutations: Vec<(u32, u32)> = endpoints
            .map(|endpoint| {
                let hash = hash_address(endpoint.ip(), endpoint.port());
                (remainder(hash, size), remainder(mix(hash), size - 1) + 1)
            })
            .collect();
        let mut slots = vec![FREE; if count == 0 { 0 } else { size as usize }];
        let mut free = slots.len();
        while free > 0 {
            for (index, (next, skip)) in permutations.iter_mut().enumerate().take(free) {
                while slots[*next as usize] != FREE {
                    *next = (*next + *skip) % size;
                }
                slots[*next as usize] = index as u32;
            }
            free = free.saturating_sub(count);
        }
        Self {
            slots,
            count,
            is_small: fits.is_none() && count > 0,
        }
    }

    /// Whether it is smaller than usual.
    pub fn is_small(&self) -> bool {
        self.is_small
    }

    /// The number of endpoints that take as much memory.
    pub fn weight(&self) -> usize {
        self.slots.len() / SLOTS_OF_ENDPOINT
    }

    /// The index of the endpoint for this hash, or of the next one that is usable: the endpoints of the
    /// following slots are different for each hash, so that the others share the load.
    pub fn find(&self, hash: u64, usable: impl Fn(usize) -> bool) -> Option<usize> {
        if self.count == 0 {
            return None;
        }
        let size = self.slots.len();
        let slot = remainder(hash, size as u32) as usize;
        let probes = (slot..size).chain(0..slot).take(MAX_PROBES);
        let mut found = probes.map(|slot| self.slots[slot] as usize);
        let first = self.slots[slot] as usize;
        found.find(|index| usable(*index)).or_else(|| {
            (first..self.count)
                .chain(0..first)
                .find(|index| usable(*index))
        })
    }
}

/// The remainder of a division by a size, which is not 0.
fn remainder(hash: u64, size: u32) -> u32 {
    (hash % u64::from(size)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoints(count: u32) -> Vec<SocketAddr> {
        let address = |number: u32| (std::net::Ipv4Addr::from(0x0af4_0000 + number * 7), 8080);
        (1..=count).map(|number| address(number).into()).collect()
    }

    /// The slots of each endpoint.
    fn table(endpoints: &[SocketAddr]) -> Vec<SocketAddr> {
        let table = Table::new(endpoints.iter().copied(), usize::MAX);
        let endpoint = |index: &u32| endpoints[*index as usize];
        table.slots.iter().map(endpoint).collect()
    }

    /// The share of the keys that move although their endpoint stays.
    fn disruption(before: &[SocketAddr], after: &[SocketAddr]) -> f64 {
        let (one, other) = (table(before), table(after));
        let moved = one
            .iter()
            .zip(&other)
            .filter(|(one, other)| one != other && before.contains(other) && after.contains(one));
        moved.count() as f64 / one.len() as f64
    }

    #[test]
    fn hash_is_the_same_in_all_releases() {
        assert_eq!(hash(b""), 0xefd0_1f60_ba99_2926);
        assert_eq!(hash(b"user-1"), 0x41a2_fca5_c684_01c5);
        let address = SocketAddr::from(([10, 244, 0, 7], 8080));
        let expected = 0x5e20_be79_5a45_f214;
        assert_eq!(hash_address(address.ip(), address.port()), expected);
    }

    #[test]
    fn endpoints_have_equal_shares() {
        for count in [1, 3, 10, 100, 1000, 20_000] {
            let mut shares = std::collections::HashMap::new();
            for endpoint in table(&endpoints(count)) {
                *shares.entry(endpoint).or_insert(0) += 1;
            }
            let (least, most) = (shares.values().min(), shares.values().max());
            assert!(
                most.zip(least)
                    .is_some_and(|(most, least)| most - least <= 1)
            );
            assert_eq!(shares.len(), count as usize);
        }
    }

    #[test]
    fn changes_move_few_keys_of_other_endpoints() {
        for (count, most) in [(10, 0.01), (100, 0.015), (1000, 0.01)] {
            let all = endpoints(count);
            let without = [&all[..3], &all[4..]].concat();
            let moved = (disruption(&all, &without), disruption(&without, &all));
            assert!(moved.0 < most && moved.1 < most, "{count}: {moved:?}");
        }
    }

    #[test]
    fn memory_is_at_most_a_mebibyte_and_little_if_it_is_short() {
        let bytes = |count, max| {
            let table = Table::new(endpoints(count).into_iter(), max);
            assert_eq!(table.is_small(), max == 80);
            table.slots.capacity() * size_of::<u32>()
        };
        let sizes = [10, 1000, 5000, 20_000].map(|count| bytes(count, 1400));
        assert_eq!(sizes, [65_524, 262_148, 1_048_556, 1_048_556]);
        let sizes = [10, 65, 1000, 5000, 20_000].map(|count| bytes(count, 80));
        assert_eq!(sizes, [1_004, 4_084, 16_372, 262_148, 1_048_556]);
    }

    #[test]
    fn small_table_gives_each_endpoint_a_share() {
        for count in [1, 10, 64, 250, 1000, 5000, 20_000] {
            let all = endpoints(count);
            let table = Table::new(all.iter().copied(), 0);
            let mut slots = vec![0; all.len()];
            for index in &table.slots {
                slots[*index as usize] += 1;
            }
            assert!(slots.iter().all(|slots| *slots >= 3), "{count}");
        }
    }

    #[test]
    fn keys_of_an_unusable_endpoint_spread_over_the_others() {
        let all = endpoints(10);
        let table = Table::new(all.iter().copied(), usize::MAX);
        let mut counts = [0_u32; 10];
        for key in 0..20_000_u32 {
            let hash = hash(&key.to_be_bytes());
            let usual = table.find(hash, |_| true).expect("usable");
            let spilled = table.find(hash, |index| index != 3).expect("usable");
            assert!(usual == spilled || usual == 3);
            counts[spilled] += u32::from(usual != spilled);
        }
        for (index, count) in counts.into_iter().enumerate() {
            assert_eq!(count == 0, index == 3, "{counts:?}");
            assert!(count < 400, "{counts:?}");
        }
        assert_eq!(table.find(7, |index| index == 8), Some(8));
        assert_eq!(table.find(7, |_| false), None);
        let none = Table::new(Vec::new().into_iter(), 0);
        assert_eq!(none.find(7, |_| true), None);
    }
}
