//! Listening: bind, with a clear error, and accept for ever. A failed accept pauses, it never ends or spins.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use futures::Stream;
use tokio::net::{TcpListener, TcpStream};

/// After a failed accept, mostly for want of file descriptors.
const PAUSE: Duration = Duration::from_millis(50);

/// Binds. Where the kernel has no IPv6, `[::]` means all IPv4 addresses.
pub async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(address).await {
        Err(error) if address.is_ipv6() && address.ip().is_unspecified() && lacks_ipv6(&error) => {
            tracing::info!("this machine has no IPv6: listening on all IPv4 addresses");
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await
        }
        result => result,
    }
}

/// "Address family not supported" and "cannot assign requested address".
fn lacks_ipv6(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::AddrNotAvailable || error.raw_os_error() == Some(97)
}

/// The connections of a listener, without an end.
pub fn connections(listener: TcpListener) -> impl Stream<Item = TcpStream> {
    futures::stream::unfold(listener, async |listener| {
        loop {
            match listener.accept().await {
                Ok((connection, _)) => {
                    // Small messages that somebody waits for; a kernel that refuses the option merely sends them later.
                    let _ = connection.set_nodelay(true);
                    return Some((connection, listener));
                }
                Err(error) => {
                    tracing::warn!("a connection could not be accepted: {error}");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    })
}
