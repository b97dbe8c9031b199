//! Verifies that the rules of proxy-init are in force, before the first connection is accepted: a
//! connection of the proxy to its own inbound port on loopback, which the rules redirect to its
//! outbound port for this purpose. The table of nftables is set in one transaction, so that this rule
//! stands for all others.
//!
//! The workers have no listeners yet. The probe is not among the connections of the proxy.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use diy_mesh_model::interfaces::has_global_ipv6_address;
use diy_mesh_runtime::Condition;
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use crate::config::Config;
use crate::path::connection::original_destination;
use crate::path::listener;

/// The time for a connection over loopback.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// A connection that was not redirected.
#[derive(Debug, Error)]
#[error(
    "connections of this pod are not redirected to the proxy: a connection to {target} did not arrive at port {port}: \
     {reason}; proxy-init did not run in this network namespace, is of an earlier release, or its rules were removed: \
     recreate the pod"
)]
struct NotRedirected {
    target: SocketAddr,
    port: u16,
    reason: String,
}

/// Completes when connections are redirected. Until then, `condition` has the reason. Fails if the
/// outbound port is in use.
pub async fn verify(config: &Config, condition: Condition) -> io::Result<()> {
    // IPv6 that cannot leave the pod may be without rules.
    let ipv6 = has_global_ipv6_address().then_some(IpAddr::V6(Ipv6Addr::LOCALHOST));
    for loopback in std::iter::once(IpAddr::V4(Ipv4Addr::LOCALHOST)).chain(ipv6) {
        let port = config.outbound_port;
        let listener = listener::bind(loopback, port, config.timeouts.tcp_user)?;
        let listener = TcpListener::from_std(listener)?;
        let target = SocketAddr::new(loopback, config.inbound_port);
        while let Err(reason) = probe(&listener, target).await {
            let error = NotRedirected {
                target,
                port,
                reason,
            };
            let is_new = condition.send_replace(Some(error.to_string())) != *condition.borrow();
            if is_new {
                tracing::error!("{error}");
            }
            sleep(RETRY_INTERVAL).await;
        }
    }
    condition.send_replace(None);
    Ok(())
}

/// Connects to `target`, and expects the connection at `listener`.
async fn probe(listener: &TcpListener, target: SocketAddr) -> Result<(), String> {
    let redirected = async {
        let client = TcpStream::connect(target).await?;
        let client = client.local_addr()?;
        loop {
            // Others are of an application that was redirected to an earlier process of the proxy: they
            // fail, as they do while there is no process.
            let (stream, peer) = listener.accept().await?;
            if peer == client {
                return original_destination(&stream, &[]).map_err(io::Error::other);
            }
        }
    };
    match timeout(PROBE_TIMEOUT, redirected).await {
        Ok(Ok(original)) if original == target => Ok(()),
        Ok(Ok(original)) => Err(format!("its original destination is {original}")),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("timeout of {PROBE_TIMEOUT:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn connections_without_redirect_fail_the_probe() {
        let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let (listener, other) = (bind().await.unwrap(), bind().await.unwrap());
        let target = other.local_addr().unwrap();
        // Another program listens at the inbound port.
        assert_eq!(probe(&listener, target).await.unwrap_err(), "timeout of 1s");
        drop(other);
        let error = probe(&listener, target).await.unwrap_err();
        assert!(error.contains("refused"), "{error}");
        // Direct connections have no original destination.
        let own = listener.local_addr().unwrap();
        let error = probe(&listener, own).await.unwrap_err();
        assert!(error.contains("original destination"), "{error}");
    }
}
