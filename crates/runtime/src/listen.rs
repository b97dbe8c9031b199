//! TCP listeners: binding, and an accept loop that backs off after errors and never ends.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};

use crate::Backoff;

const MIN_ACCEPT_DELAY: Duration = Duration::from_millis(5);
const MAX_ACCEPT_DELAY: Duration = Duration::from_secs(1);
/// The maximum number of connections that wait to be accepted. The kernel also applies its
/// `net.core.somaxconn`, by default 4,096.
pub const MAX_BACKLOG: u32 = 4096;

/// Binds an address, with `TCP_NODELAY`. On hosts without IPv6, `[::]` means `0.0.0.0`.
pub async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let is_any = address.is_ipv6() && address.ip().is_unspecified();
    listen(address).or_else(|error| match error.kind() {
        kind if !is_any || kind == io::ErrorKind::AddrInUse => Err(error),
        _ => listen((Ipv4Addr::UNSPECIFIED, address.port()).into()).map_err(|_| error),
    })
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    // Accepted sockets inherit it.
    socket.set_nodelay(true)?;
    socket.bind(address)?;
    socket.listen(MAX_BACKLOG)
}

/// Accepts connections from one listener. An error of accept(2), usually a lack of file
/// descriptors, is logged and followed by a delay.
#[derive(Debug)]
pub struct Acceptor {
    listener: TcpListener,
    backoff: Backoff,
}

impl Acceptor {
    /// An acceptor of a listener, which may be one of several with `SO_REUSEPORT`.
    pub fn new(listener: TcpListener) -> Self {
        let backoff = Backoff::new(MIN_ACCEPT_DELAY, MAX_ACCEPT_DELAY);
        Self { listener, backoff }
    }

    /// Returns the next connection, with the options of the listener. Cancel-safe.
    pub async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    self.backoff.reset();
                    return (stream, peer);
                }
                Err(error) => {
                    let delay = self.backoff.next_delay();
                    tracing::warn!("cannot accept a connection: {error}; retrying in {delay:?}");
                    tokio::time::sleep(delay).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    /// The kernel drops the SYN of a connection that exceeds the backlog.
    #[tokio::test]
    async fn connections_wait_in_the_backlog() {
        crate::raise_max_open_files();
        let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut clients = Vec::new();
        for number in 0..1000 {
            let client = tokio::time::timeout(TIMEOUT, TcpStream::connect(address));
            let client = client.await.unwrap_or_else(|_| panic!("{number} are open"));
            clients.push(client.unwrap());
        }
    }

    #[tokio::test]
    async fn reports_a_port_in_use() {
        let taken = bind("[::]:0".parse().unwrap()).await.unwrap();
        let error = bind(taken.local_addr().unwrap()).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }
}
