//! Limits of the log lines that peers cause. Metrics count the events beyond these limits.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::limits::memory::Holder;

/// The lines of a client, of a group of clients and of all in an interval.
const MAX_LINES: [u32; 3] = [20, 60, 600];
const INTERVAL: Duration = Duration::from_secs(60);

/// A limit of log lines.
pub struct LogLimit {
    /// The maximum number of lines in an interval.
    max: u32,
    interval: Duration,
    /// The start of the current interval, and its lines.
    logged: Cell<(Option<Instant>, u32)>,
}

impl LogLimit {
    /// At most so many lines in an interval.
    pub fn new((max, interval): (u32, Duration)) -> Self {
        let logged = Cell::default();
        Self {
            max,
            interval,
            logged,
        }
    }

    /// Whether to log a line.
    pub fn should_log(&self, now: Instant) -> bool {
        let (since, lines) = match self.logged.get() {
            (Some(since), lines) if now < since + self.interval => (since, lines),
            _ => (now, 0),
        };
        self.logged.set((Some(since), lines.saturating_add(1)));
        lines < self.max
    }
}

/// A limit of log lines about clients. No client takes the lines of others: a namespace, or all
/// clients without an identity, are one group.
#[derive(Default)]
pub struct HolderLimit(RefCell<Lines>);

/// The lines of an interval.
#[derive(Default)]
struct Lines {
    since: Option<Instant>,
    all: u32,
    by_holder: HashMap<Holder, u32>,
}

impl HolderLimit {
    /// Whether to log a line about a client.
    pub fn should_log(&self, client: Holder, now: Instant) -> bool {
        let mut lines = self.0.borrow_mut();
        if lines.since.is_none_or(|since| now >= since + INTERVAL) {
            *lines = Lines {
                since: Some(now),
                ..Lines::default()
            };
        }
        let mut holders = client.path();
        holders.retain(|holder| *holder != Holder::Clients);
        let counts = holders.iter().rev().zip(MAX_LINES);
        let has_left = lines.all < MAX_LINES[2]
            && counts
                .into_iter()
                .all(|(holder, max)| lines.by_holder.get(holder).is_none_or(|count| *count < max));
        if has_left {
            lines.all += 1;
            for holder in holders {
                *lines.by_holder.entry(holder).or_default() += 1;
            }
        }
        has_left
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::Arc;

    use diy_mesh_model::identity::Identity;

    use super::*;

    fn address(last: u8) -> Holder {
        Holder::Plaintext(IpAddr::from([10, 0, 0, last]))
    }

    fn peer(namespace: &str, account: u32) -> Holder {
        let account = format!("a{account}");
        Holder::Peer(Arc::new(
            Identity::new("cluster.local", namespace, &account).unwrap(),
        ))
    }

    #[test]
    fn denials_of_one_client_hide_none_of_others() {
        let (limit, now) = (HolderLimit::default(), Instant::now());
        for start in [now, now + INTERVAL] {
            let count = |client: &dyn Fn(u32) -> Holder| {
                let logged = (0..1000).filter(|at| limit.should_log(client(*at), start));
                logged.count()
            };
            assert_eq!(count(&|_| address(1)), 20);
            assert_eq!(
                count(&|at| address(at as u8)),
                40,
                "of all clients without an identity"
            );
            assert_eq!(count(&|at| peer("shop", at)), 60, "of the namespace");
            assert_eq!(count(&|_| peer("bank", 0)), 20);
            assert!(limit.should_log(peer("bank", 1), start));
            assert!(limit.should_log(Holder::App, start));
        }
    }

    #[test]
    fn lines_of_all_clients_are_bounded() {
        let (limit, now) = (HolderLimit::default(), Instant::now());
        let namespaces = (0..100).map(|number| format!("n{number}"));
        let clients = namespaces.flat_map(|name| (0..10).map(move |at| peer(&name, at)));
        let logged = clients.filter(|client| limit.should_log(client.clone(), now));
        assert_eq!(logged.count(), 600);
        assert!(limit.0.borrow().by_holder.len() <= 1200);
    }
}
