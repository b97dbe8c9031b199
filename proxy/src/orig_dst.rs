//! Step 2: where a redirected connection was going, and whether going there would lead back to the proxy.

use std::io;
use std::net::{IpAddr, SocketAddr};

use socket2::SockRef;
use thiserror::Error;
use tokio::net::TcpStream;

/// Why a connection is closed at once.
#[derive(Debug, Error)]
pub enum Refused {
    /// It was made to the proxy's own port.
    #[error("the connection was made to the proxy's own port {0}: forwarding it would loop")]
    Loop(SocketAddr),
    /// The kernel knows no original destination.
    #[error(
        "the kernel knows no original destination: {0} (was the connection redirected by proxy-init's rules?)"
    )]
    Unknown(#[source] io::Error),
}

/// Asks the kernel (SO_ORIGINAL_DST, set by the REDIRECT rule). `own_ports` are the ports that the proxy listens on.
pub fn original_destination(stream: &TcpStream, own_ports: &[u16]) -> Result<SocketAddr, Refused> {
    let local = stream.local_addr().map_err(Refused::Unknown)?;
    let socket = SockRef::from(stream);
    let original = if local.is_ipv4() {
        socket.original_dst_v4()
    } else {
        socket.original_dst_v6()
    };
    let original = original.map_err(Refused::Unknown)?.as_socket();
    let original =
        original.ok_or_else(|| Refused::Unknown(io::ErrorKind::AddrNotAvailable.into()))?;
    check(original, local, own_ports)
}

/// Refuses what would come back: an own port at an address of this pod.
fn check(
    original: SocketAddr,
    local: SocketAddr,
    own_ports: &[u16],
) -> Result<SocketAddr, Refused> {
    let here = original.ip().is_loopback()
        || original.ip().is_unspecified()
        || same(original.ip(), local.ip());
    if here && own_ports.contains(&original.port()) {
        Err(Refused::Loop(original))
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

    fn verdict(original: &str, local: &str) -> bool {
        check(
            original.parse().unwrap(),
            local.parse().unwrap(),
            &[4000, 5000],
        )
        .is_ok()
    }

    #[test]
    fn own_ports_at_own_addresses_are_refused_and_others_are_not() {
        assert!(!verdict("10.0.0.1:4000", "10.0.0.1:4000"));
        assert!(!verdict("10.0.0.1:5000", "10.0.0.1:4000"));
        assert!(!verdict("127.0.0.1:5000", "127.0.0.1:5000"));
        assert!(!verdict("[::1]:5000", "[::1]:5000"));
        assert!(verdict("10.0.0.1:8080", "10.0.0.1:4000"));
        assert!(
            verdict("10.0.0.2:5000", "127.0.0.1:5000"),
            "another host's service may well listen on 5000"
        );
    }

    #[tokio::test]
    async fn a_connection_that_nobody_redirected_is_refused() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (_client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        assert!(original_destination(&accepted.unwrap().0, &[address.port()]).is_err());
    }
}
