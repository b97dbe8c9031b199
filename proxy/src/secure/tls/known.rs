//! The addresses of other proxies, which speak first on a new connection. Pure.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

/// The maximum number of addresses. The oldest one gives way.
const MAX_ADDRESSES: usize = 4096;
/// How long an address is known after a handshake.
const KNOWN_TIMEOUT: Duration = Duration::from_secs(600);

/// The addresses that have completed a handshake of mesh TLS lately.
#[derive(Default)]
pub struct KnownPeers {
    /// By the time of the last handshake.
    at: HashMap<IpAddr, Instant>,
}

impl KnownPeers {
    /// Adds an address that has completed a handshake.
    pub fn add(&mut self, address: IpAddr, now: Instant) {
        self.at.insert(address, now);
        if self.at.len() > MAX_ADDRESSES {
            self.at.retain(|_, at| now - *at < KNOWN_TIMEOUT);
        }
        while self.at.len() > MAX_ADDRESSES {
            let oldest = self.at.iter().min_by_key(|(_, at)| **at);
            let Some(oldest) = oldest.map(|(address, _)| *address) else {
                return;
            };
            self.at.remove(&oldest);
        }
    }

    /// Whether the address has completed a handshake lately.
    pub fn contains(&self, address: IpAddr, now: Instant) -> bool {
        let at = self.at.get(&address);
        at.is_some_and(|at| now - *at < KNOWN_TIMEOUT)
    }

    /// Removes an address, whose client has sent plaintext.
    pub fn remove(&mut self, address: IpAddr) {
        self.at.remove(&address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_addresses_for_ten_minutes_and_drops_the_oldest_ones() {
        let (mut known, start) = (KnownPeers::default(), Instant::now());
        let address = |number: usize| IpAddr::from((number as u32).to_be_bytes());
        let later = |seconds| start + Duration::from_secs(seconds);
        known.add(address(0), start);
        assert!(known.contains(address(0), later(599)));
        assert!(!known.contains(address(0), later(600)));
        known.add(address(1), later(1));
        known.add(address(0), later(2));
        for number in 2..MAX_ADDRESSES + 1 {
            known.add(address(number), later(3));
        }
        assert!(!known.contains(address(1), later(4)), "the oldest one");
        assert!(known.contains(address(0), later(4)));
        known.remove(address(0));
        assert!(!known.contains(address(0), later(4)));
    }
}
