//! The part of the endpoints of a large Service that a proxy keeps, so that no Service takes its
//! memory. Each proxy keeps other ones, so all of them get requests. Pure.

use crate::endpoint::EndpointInfo;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;

use diy_mesh_proto::mesh::v1::Endpoint;

use super::target::canonical;

/// The endpoints whose hash is at most a maximum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subset {
    /// The seed of the hashes.
    seed: u64,
    max_hash: u64,
}

/// All endpoints.
impl Default for Subset {
    fn default() -> Self {
        Self::new(0)
    }
}

impl Subset {
    /// All endpoints, until there are too many.
    pub fn new(seed: u64) -> Self {
        let max_hash = u64::MAX;
        Self { seed, max_hash }
    }

    /// Whether endpoints are left out.
    pub fn is_partial(self) -> bool {
        self.max_hash < u64::MAX
    }

    fn hash(self, endpoint: &impl Addressed) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.seed, endpoint.address()).hash(&mut hasher);
        hasher.finish()
    }

    /// Whether an endpoint is kept.
    fn keeps(self, endpoint: &impl Addressed) -> bool {
        !self.is_partial() || self.hash(endpoint) <= self.max_hash
    }

    /// Removes what is not kept.
    pub fn retain(self, endpoints: &mut Vec<impl Addressed>) {
        if self.is_partial() {
            endpoints.retain(|endpoint| self.keeps(endpoint));
        }
    }

    /// Keeps at most so many of these endpoints, which is not 0, and of those that drain.
    pub fn reduce<E: Addressed>(
        &mut self,
        endpoints: &mut Vec<E>,
        draining: &mut Vec<E>,
        max: usize,
    ) {
        for endpoints in [&*endpoints, &*draining] {
            if endpoints.len() > max {
                let mut hashes: Vec<u64> = endpoints.iter().map(|one| self.hash(one)).collect();
                let (_, max_hash, _) = hashes.select_nth_unstable(max - 1);
                self.max_hash = (*max_hash).min(self.max_hash).min(u64::MAX - 1);
            }
        }
        for endpoints in [endpoints, draining] {
            let before = endpoints.len();
            self.retain(endpoints);
            if endpoints.len() < before {
                endpoints.shrink_to_fit();
            }
        }
    }
}

/// An endpoint, as the controller sends it or as the proxy keeps it.
pub trait Addressed {
    /// `None` if it is invalid.
    fn address(&self) -> Option<SocketAddr>;
}

impl Addressed for Endpoint {
    fn address(&self) -> Option<SocketAddr> {
        self.address.parse().ok().map(canonical)
    }
}

impl Addressed for Arc<EndpointInfo> {
    fn address(&self) -> Option<SocketAddr> {
        Some(self.address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoints(count: usize) -> Vec<Endpoint> {
        let endpoint = |number| Endpoint {
            address: format!("10.0.{}.{}:80", number / 256, number % 256),
            ..Endpoint::default()
        };
        (0..count).map(endpoint).collect()
    }

    fn addresses(endpoints: &[Endpoint]) -> Vec<&str> {
        endpoints.iter().map(|one| &*one.address).collect()
    }

    #[test]
    fn proxies_together_keep_all_endpoints() {
        let all = endpoints(1000);
        let mut counts = vec![0; all.len()];
        for seed in 0..200 {
            let (mut subset, mut kept) = (Subset::new(seed), all.clone());
            subset.reduce(&mut kept, &mut Vec::new(), 100);
            assert_eq!(kept.len(), 100);
            for (count, endpoint) in counts.iter_mut().zip(&all) {
                *count += usize::from(subset.keeps(endpoint));
            }
        }
        // 200 proxies with a tenth each: 20 on average, with a standard deviation of 4.2.
        assert!(
            counts.iter().all(|count| (2..=45).contains(count)),
            "{counts:?}"
        );
    }

    #[test]
    fn parts_of_a_snapshot_lead_to_the_same_subset() {
        let (mut at_once, mut kept) = (Subset::new(7), endpoints(5000));
        at_once.reduce(&mut kept, &mut Vec::new(), 64);
        let (mut in_parts, mut joined) = (Subset::new(7), Vec::new());
        for part in endpoints(5000).chunks(999) {
            let mut part = part.to_vec();
            in_parts.retain(&mut part);
            joined.append(&mut part);
            in_parts.reduce(&mut joined, &mut Vec::new(), 64);
        }
        assert_eq!(in_parts, at_once);
        assert_eq!(addresses(&joined), addresses(&kept));
    }

    #[test]
    fn few_endpoints_are_kept() {
        let (mut subset, mut kept) = (Subset::default(), endpoints(64));
        subset.reduce(&mut kept, &mut Vec::new(), 64);
        assert!(!subset.is_partial() && kept.len() == 64);
    }
}
