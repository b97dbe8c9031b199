//! Listening sockets, one per worker, port and IP version.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::Duration;

use diy_mesh_runtime::listen::MAX_BACKLOG;
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::upstream::connect::set_options;

/// Creates a listening socket. `SO_REUSEPORT` lets each worker have its own on the same port.
/// Accepted sockets inherit its options.
pub fn bind(ip: IpAddr, port: u16, user_timeout: Duration) -> io::Result<TcpListener> {
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
    socket.listen(MAX_BACKLOG.cast_signed())?;
    Ok(socket.into())
}
