//! TCP listener for both address families, and its stream of accepted connections.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

/// Pause after a failed accept. Accepting fails when file descriptors run out.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Listens on `[::]` for IPv4 and IPv6, or on `0.0.0.0` if the machine has no IPv6.
pub async fn dual_stack(port: u16) -> io::Result<TcpListener> {
    let result = match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).await {
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await
        }
        result => result,
    };
    result.map_err(|error| {
        let message = format!("cannot listen on port {port}: {error}");
        io::Error::new(error.kind(), message)
    })
}

/// Accepts connections until `stop`, then closes the port. Logs accept errors and continues.
pub fn incoming(
    listener: TcpListener,
    stop: CancellationToken,
) -> ReceiverStream<io::Result<TcpStream>> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(stop.run_until_cancelled_owned(async move {
        loop {
            match listener.accept().await {
                Ok((connection, _)) => {
                    // Fails only if the connection is closed, which its first read reports.
                    connection.set_nodelay(true).ok();
                    if sender.send(Ok(connection)).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    eprintln!("cannot accept a connection: {error}");
                    tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
                }
            }
        }
    }));
    ReceiverStream::new(receiver)
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt;

    use super::*;

    #[tokio::test]
    async fn accepts_ipv4_clients() {
        let listener = dual_stack(0).await.expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let (client, accepted) = tokio::join!(
            TcpStream::connect((Ipv4Addr::LOCALHOST, port)),
            listener.accept()
        );
        client.expect("connected");
        accepted.expect("accepted");
    }

    #[tokio::test]
    async fn stop_closes_port_and_ends_stream() {
        let listener = dual_stack(0).await.expect("a free port");
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
            .expect("a connection")
            .expect("accepted");
        stop.cancel();
        assert!(connections.next().await.is_none());
        drop(client);
        TcpStream::connect(address)
            .await
            .expect_err("the port is closed");
    }

    #[tokio::test]
    async fn error_names_port_in_use() {
        let first = dual_stack(0).await.expect("a free port");
        let port = first.local_addr().expect("bound").port();
        let error = dual_stack(port)
            .await
            .expect_err("the port is in use")
            .to_string();
        assert!(
            error.contains(&format!("cannot listen on port {port}")),
            "{error}"
        );
    }
}
