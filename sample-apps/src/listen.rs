//! Listening for both families on one port, and accepting for as long as the program runs. Never looks into a connection.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;
/// How long to leave accepting alone after it failed: it fails when file descriptors run out, and those come back with time.
const ACCEPT_BACK_OFF: Duration = Duration::from_millis(100);

/// Listens on `[::]` for IPv4 and IPv6; where the machine has no IPv6, on `0.0.0.0`.
pub fn dual_stack(port: u16) -> io::Result<TcpListener> {
    let any6 = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
    let any4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
    match bind(any6) {
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => bind(any4),
        result => result,
    }
    .map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("cannot listen on port {port}: {error}"),
        )
    })
}

/// The connections that come in, until `stop`; then the port is closed at once. A failure to accept is printed and never the end.
pub fn incoming(
    listener: TcpListener,
    stop: CancellationToken,
) -> ReceiverStream<io::Result<TcpStream>> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(stop.run_until_cancelled_owned(async move {
        loop {
            match listener.accept().await {
                Ok((connection, _)) => {
                    // Without it small answers wait for the peer's acknowledgements; a connection that refuses is dead already.
                    connection.set_nodelay(true).ok();
                    if sender.send(Ok(connection)).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    eprintln!("cannot accept a connection: {error}");
                    tokio::time::sleep(ACCEPT_BACK_OFF).await;
                }
            }
        }
    }));
    ReceiverStream::new(receiver)
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt;

    use super::*;

    #[tokio::test]
    async fn an_ipv4_client_is_heard() {
        let listener = dual_stack(0).expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let (client, accepted) = tokio::join!(
            TcpStream::connect((Ipv4Addr::LOCALHOST, port)),
            listener.accept()
        );
        client.expect("connected");
        accepted.expect("accepted");
    }

    #[tokio::test]
    async fn stopping_closes_the_port_and_ends_the_stream() {
        let listener = dual_stack(0).expect("a free port");
        let address = (
            Ipv4Addr::LOCALHOST,
            listener.local_addr().expect("bound").port(),
        );
        let stop = CancellationToken::new();
        let mut connections = incoming(listener, stop.clone());
        let client = TcpStream::connect(address).await.expect("connected");
        connections
            .next()
            .await
            .expect("one came")
            .expect("accepted");
        stop.cancel();
        assert!(connections.next().await.is_none());
        drop(client);
        TcpStream::connect(address)
            .await
            .expect_err("nobody listens");
    }

    #[tokio::test]
    async fn a_port_in_use_is_named() {
        let first = dual_stack(0).expect("a free port");
        let port = first.local_addr().expect("bound").port();
        let error = dual_stack(port).expect_err("taken").to_string();
        assert!(
            error.contains(&format!("cannot listen on port {port}")),
            "{error}"
        );
    }
}
