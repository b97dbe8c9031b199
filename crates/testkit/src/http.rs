//! A client of the admin servers, which close each connection after the response.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Sends a GET request. Returns the status and the body of the response.
pub async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let (status, _, body) = send(address, "GET", path, "").await;
    (status, body)
}

/// Sends a request with further fields, each with its end of line. Returns the status, the head and
/// the body of the response.
pub async fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    fields: &str,
) -> (u16, String, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("{method} {path} HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    let (head, body) = response.split_once("\r\n\r\n").expect(&response);
    (head[9..12].parse().unwrap(), head.into(), body.into())
}
