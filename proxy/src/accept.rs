//! Step 1: sockets that listen, and the loop that takes connections from them. The loop never ends and never spins:
//! an error of accept(2) is logged and waited out.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener as StdListener};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, TcpStream};

use crate::connect::keepalive;

/// Connections that the kernel holds until they are accepted.
const BACKLOG: i32 = 4096;

/// Binds so that each worker can have a listener of its own on the same port. What is accepted inherits the options.
pub fn bind(ip: IpAddr, port: u16) -> io::Result<StdListener> {
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
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(&keepalive())?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Gives each connection to `take`, for ever.
pub async fn accept(listener: StdListener, mut take: impl FnMut(TcpStream, SocketAddr)) {
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!("can't listen: {error}"),
    };
    let mut pause = Duration::from_millis(5);
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                pause = Duration::from_millis(5);
                take(stream, peer);
            }
            Err(error) => {
                tracing::warn!("can't accept a connection: {error}; trying again in {pause:?}");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(1));
            }
        }
    }
}
