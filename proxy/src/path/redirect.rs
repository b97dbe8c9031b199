//! Verifies again and again that the rules of proxy-init are in force: by a connection of the proxy to
//! its own inbound port on loopback, which the rules redirect to its outbound port for this purpose. A
//! worker answers it there. The table of nftables is set in one transaction, so that this rule stands
//! for all others.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use diy_mesh_model::interfaces::has_global_ipv6_address;
use diy_mesh_runtime::Condition;
use socket2::SockRef;
use thiserror::Error;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::config::Config;
use crate::path::connection::original_destination;

/// The time for a connection over loopback, and its answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
const INTERVAL: Duration = Duration::from_secs(10);
/// Without an answer, the proxy may be busy: the rules count as in force until this many probes.
const MAX_UNANSWERED: u32 = 10;
/// The answer of a worker.
const ANSWER: u8 = b'r';

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
    is_unanswered: bool,
}

/// Sets `condition` to the reason while connections are not redirected. Never ends.
pub async fn watch(config: &Config, condition: Condition) {
    let mut unanswered = 0;
    loop {
        let Err(error) = verify(config).await else {
            unanswered = 0;
            if condition.send_replace(None).is_some() {
                tracing::info!("connections of this pod are redirected to the proxy");
            }
            sleep(INTERVAL).await;
            continue;
        };
        unanswered = if error.is_unanswered {
            unanswered + 1
        } else {
            0
        };
        let is_verified = condition.borrow().is_none();
        if !(is_verified && (1..MAX_UNANSWERED).contains(&unanswered)) {
            let reason = Some(error.to_string());
            if condition.send_replace(reason.clone()) != reason {
                tracing::error!("{error}");
            }
        }
        sleep(RETRY_INTERVAL).await;
    }
}

async fn verify(config: &Config) -> Result<(), NotRedirected> {
    // IPv6 that cannot leave the pod may be without rules.
    let ipv6 = has_global_ipv6_address().then_some(IpAddr::V6(Ipv6Addr::LOCALHOST));
    for loopback in std::iter::once(IpAddr::V4(Ipv4Addr::LOCALHOST)).chain(ipv6) {
        let target = SocketAddr::new(loopback, config.inbound_port);
        let answered = timeout(PROBE_TIMEOUT, probe(target)).await;
        let is_unanswered = answered.is_err();
        let unanswered = |_| Err(format!("no answer within {PROBE_TIMEOUT:?}"));
        answered
            .unwrap_or_else(unanswered)
            .map_err(|reason| NotRedirected {
                target,
                port: config.outbound_port,
                reason,
                is_unanswered,
            })?;
    }
    Ok(())
}

/// Connects to `target`, and expects the answer of a worker.
async fn probe(target: SocketAddr) -> Result<(), String> {
    let answered = async { TcpStream::connect(target).await?.read_u8().await };
    match answered.await {
        Ok(ANSWER) => Ok(()),
        Ok(_) => Err("another program has answered".to_owned()),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err("it arrived elsewhere".to_owned())
        }
        Err(error) => Err(error.to_string()),
    }
}

/// Answers a connection that [`watch`] has opened, and that the rules have redirected to the outbound
/// port. Returns any other one.
pub fn answer(stream: TcpStream, inbound_port: u16) -> Option<TcpStream> {
    let is_target = |target: SocketAddr| target.ip().is_loopback() && target.port() == inbound_port;
    if !original_destination(&stream, &[]).is_ok_and(is_target) {
        return Some(stream);
    }
    // The send buffer of a new socket has room.
    let _ = SockRef::from(&stream).send(&[ANSWER]);
    None
}

#[cfg(test)]
mod tests {
    use diy_mesh_testkit::net::{closed_address, connected};
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn connections_without_redirect_fail_the_probe() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let target = listener.local_addr().unwrap();
        for (answer, expected) in [
            (&b"r"[..], Ok(())),
            (b"x", Err("another program has answered")),
            (b"", Err("it arrived elsewhere")),
        ] {
            let answering = async {
                let (mut stream, _) = listener.accept().await.unwrap();
                stream.write_all(answer).await.unwrap();
            };
            let (probed, ()) = tokio::join!(probe(target), answering);
            assert_eq!(probed, expected.map_err(str::to_owned));
        }
        let error = probe(closed_address()).await.unwrap_err();
        assert!(error.contains("refused"), "{error}");
        // Direct connections have no original destination.
        let (_client, stream) = connected().await;
        let port = stream.local_addr().unwrap().port();
        assert!(answer(stream, port).is_some());
    }
}
