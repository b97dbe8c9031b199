//! Step 2: original destination of redirected connections, and loop detection.

use std::io;
use std::net::{IpAddr, SocketAddr};

use socket2::SockRef;
use thiserror::Error;
use tokio::net::TcpStream;

/// A connection without a usable original destination, which is closed.
#[derive(Debug, Error)]
pub enum OrigDstError {
    /// The original destination is a port of the proxy itself.
    #[error("original destination {0} is the proxy itself: forwarding would loop")]
    Loop(SocketAddr),
    /// The kernel has no original destination.
    #[error(
        "no original destination: {0}; check that the rules of proxy-init redirected the connection"
    )]
    Unknown(#[source] io::Error),
}

/// Reads SO_ORIGINAL_DST, which the REDIRECT rule sets. `own_ports` are the ports of the proxy.
pub fn original_destination(
    stream: &TcpStream,
    own_ports: &[u16],
) -> Result<SocketAddr, OrigDstError> {
    let local = stream.local_addr().map_err(OrigDstError::Unknown)?;
    let socket = SockRef::from(stream);
    let original = if local.is_ipv4() {
        socket.original_dst_v4()
    } else {
        socket.original_dst_v6()
    };
    let original = original.map_err(OrigDstError::Unknown)?.as_socket();
    let original =
        original.ok_or_else(|| OrigDstError::Unknown(io::ErrorKind::AddrNotAvailable.into()))?;
    check(original, local, own_ports)
}

/// Rejects own ports at addresses of this pod.
fn check(
    original: SocketAddr,
    local: SocketAddr,
    own_ports: &[u16],
) -> Result<SocketAddr, OrigDstError> {
    let is_own_address = original.ip().is_loopback()
        || original.ip().is_unspecified()
        || same(original.ip(), local.ip());
    if is_own_address && own_ports.contains(&original.port()) {
        Err(OrigDstError::Loop(original))
    } else {
        Ok(original)
    }
}

fn same(one: IpAddr, other: IpAddr) -> bool {
    one.to_canonical() == other.to_canonical()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_accepted(original: &str, local: &str) -> bool {
        check(
            original.parse().unwrap(),
            local.parse().unwrap(),
            &[4000, 5000],
        )
        .is_ok()
    }

    #[test]
    fn rejects_own_ports_at_own_addresses_only() {
        assert!(!is_accepted("10.0.0.1:4000", "10.0.0.1:4000"));
        assert!(!is_accepted("10.0.0.1:5000", "10.0.0.1:4000"));
        assert!(!is_accepted("127.0.0.1:5000", "127.0.0.1:5000"));
        assert!(!is_accepted("[::1]:5000", "[::1]:5000"));
        assert!(is_accepted("10.0.0.1:8080", "10.0.0.1:4000"));
        assert!(
            is_accepted("10.0.0.2:5000", "127.0.0.1:5000"),
            "port 5000 of another host"
        );
    }

    #[tokio::test]
    async fn rejects_connection_without_redirect() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (_client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        assert!(original_destination(&accepted.unwrap().0, &[address.port()]).is_err());
    }
}
