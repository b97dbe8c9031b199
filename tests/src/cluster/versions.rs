//! Two versions of a server on a cluster, and the share of the requests that each of them gets.

use anyhow::{Result, bail};

use super::workloads::App;
use super::{Namespace, wait_for};
use crate::routes::{binomial_bounds, servers};

/// Requests that decide on a share. The bounds of 10% are then 60 and six standard deviations: 16
/// to 104.
const MIN_REQUESTS: usize = 600;

/// Starts Service `web`, whose pods are version 1.0, and the Services `web-v1` and `web-v2`.
pub fn start(namespace: &Namespace) -> Result<()> {
    namespace.apply(&servers(&namespace.name))?;
    namespace.rolled_out("web-v1")?;
    namespace.rolled_out("web-v2")
}

/// Clients that send requests to Service `web`.
pub fn clients(replicas: u32) -> App<'static> {
    App {
        name: "clients",
        replicas,
        endpoint: "http://web/hello",
        interval_ms: "20",
        ..App::http_client()
    }
}

/// The responses of each version to the [`clients`].
pub fn responses(namespace: &Namespace) -> Result<[usize; 2]> {
    let logs = namespace.logs("clients", "http-client")?;
    Ok(["1.0", "2.0"].map(|version| logs.matches(&format!("Version: {version}")).count()))
}

/// Waits until version 2.0 gets this share of the requests: routes reach the proxies with a delay.
pub fn wait_for_share(namespace: &Namespace, percentage: u32) -> Result<()> {
    let bounds = |number| binomial_bounds(number, f64::from(percentage) / 100.0);
    let mut before = responses(namespace)?;
    wait_for(&format!("{percentage}% of the requests"), || {
        let now = responses(namespace)?;
        let [v1, v2] = [now[0] - before[0], now[1] - before[1]];
        if v1 + v2 < MIN_REQUESTS {
            return Ok(None);
        }
        if bounds(v1 + v2).contains(&v2) {
            return Ok(Some(()));
        }
        // The next requests decide.
        before = now;
        let bounds = bounds(v1 + v2);
        bail!("{v2} of {} requests, expected {bounds:?}", v1 + v2)
    })
}
