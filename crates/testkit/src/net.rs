//! Sockets on the loopback interface.

use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

/// A listening socket and its address.
pub async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Both ends of a connection: the end of the client and the end of the server.
pub async fn connected() -> (TcpStream, TcpStream) {
    let (listener, address) = listen().await;
    let (client, server) = tokio::join!(TcpStream::connect(address), listener.accept());
    (client.unwrap(), server.unwrap().0)
}

/// An address that refuses connections. Its port stays bound, so that no other test gets it.
pub fn closed_address() -> SocketAddr {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let address = socket.local_addr().unwrap();
    std::mem::forget(socket);
    address
}

/// Reads until the bytes end with `end`.
pub async fn read_until(stream: &mut (impl AsyncRead + Unpin), end: &str) -> String {
    let mut read = Vec::new();
    while !read.ends_with(end.as_bytes()) {
        match stream.read_u8().await {
            Ok(byte) => read.push(byte),
            Err(error) => panic!("{error} after {:?}", String::from_utf8_lossy(&read)),
        }
    }
    String::from_utf8(read).unwrap()
}

/// Reads until the end of the stream. A reset also ends it.
pub async fn read_all(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut read = Vec::new();
    let _ = stream.read_to_end(&mut read).await;
    String::from_utf8(read).unwrap()
}

/// Reads the next head of HTTP/1, with the empty line. `None`: the stream ends before.
pub async fn read_head(stream: &mut (impl AsyncRead + Unpin)) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    Some(String::from_utf8(head).unwrap())
}
