//! Step 1: listening sockets, and the loop that accepts connections from them. The loop never ends.
//! After an error of accept(2) it logs the error and waits.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener as StdListener};
use std::time::Duration;

use diy_mesh_runtime::Backoff;
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpStream};

use crate::connect::set_options;

/// The maximum number of connections that wait to be accepted.
const MAX_BACKLOG: i32 = 4096;
/// The delay after the first failed accept(2). It doubles with each further failure.
const MIN_ACCEPT_DELAY: Duration = Duration::from_millis(5);
const MAX_ACCEPT_DELAY: Duration = Duration::from_secs(1);

/// Creates a listening socket. `SO_REUSEPORT` lets each worker have its own on the same port.
/// Accepted sockets inherit its options.
pub fn bind(ip: IpAddr, port: u16, user_timeout: Duration) -> io::Result<StdListener> {
    let address = SocketAddr::new(ip, port);
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    if ip.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    set_options(SockRef::from(&socket), user_timeout)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(MAX_BACKLOG)?;
    Ok(socket.into())
}

/// Accepts connections forever and passes each to `handle`.
pub async fn accept(listener: StdListener, mut handle: impl FnMut(TcpStream, SocketAddr)) {
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!("cannot listen: {error}"),
    };
    let mut backoff = Backoff::new(MIN_ACCEPT_DELAY, MAX_ACCEPT_DELAY);
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                backoff.reset();
                handle(stream, peer);
            }
            Err(error) => {
                let delay = backoff.next_delay();
                tracing::warn!("cannot accept a connection: {error}; retrying in {delay:?}");
                tokio::time::sleep(delay).await;
            }
        }
    }
}
