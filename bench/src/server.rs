//! Origin server: answers every request with the same 1 kB over HTTP/1.1, HTTP/2 or gRPC on one
//! port, over HTTP/1.1 with separate writes of head and body on another, speaks second or first on two
//! others, and discards bytes on the last. It ignores the content of requests, to use little CPU time.

use std::{
    collections::VecDeque,
    io,
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use memchr::memmem;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    runtime, task,
    time::sleep,
};

use crate::{
    http2::{END_STREAM, Field, Frame, PREFACE, Session, kind, put_frame},
    network::Namespace,
};

/// HTTP port.
pub const HTTP_PORT: u16 = 8080;
/// Port of HTTP/1.1 with two writes for each response, and without TCP_NODELAY.
pub const TWO_WRITES_PORT: u16 = 8082;
/// Port on which the client speaks first: each piece of its bytes gets one byte.
pub const CLIENT_FIRST_PORT: u16 = 8083;
/// Port on which the server speaks first: it sends one line.
pub const SERVER_FIRST_PORT: u16 = 8084;
/// Port of the byte sink.
pub const SINK_PORT: u16 = 9000;
/// Body length of every response.
pub const BODY_LENGTH: usize = 1024;

const OK: Field = Field::Static(8);
const PAGE: [Field; 4] = [
    OK,
    Field::Literal("content-type", "text/plain"),
    Field::Literal("content-length", "1024"),
    Field::Literal("server", "bench-origin"),
];
const REPLY: [Field; 2] = [OK, Field::Literal("content-type", "application/grpc")];
const TRAILERS: [Field; 1] = [Field::Literal("grpc-status", "0")];

/// A server that runs for the lifetime of the process.
pub struct Server {
    received: Arc<AtomicU64>,
}

impl Server {
    /// Starts the server in `namespace` and waits until it listens.
    pub fn start(namespace: &Namespace) -> Result<Self> {
        let received = Arc::new(AtomicU64::new(0));
        let counter = received.clone();
        namespace.enter(|| {
            let (ready, listening) = mpsc::channel();
            // A thread inherits the network namespace.
            thread::Builder::new()
                .name("origin".into())
                .spawn(move || run(counter, &ready))
                .context("start the server's thread")?;
            listening
                .recv()
                .context("the server exited before it listened")?
        })?;
        Ok(Server { received })
    }

    /// Bytes received by the sink so far.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }
}

fn run(received: Arc<AtomicU64>, ready: &mpsc::Sender<Result<()>>) {
    let serve = async {
        let http = TcpListener::bind((Ipv4Addr::UNSPECIFIED, HTTP_PORT))
            .await
            .context("listen for HTTP")?;
        let two_writes = TcpListener::bind((Ipv4Addr::UNSPECIFIED, TWO_WRITES_PORT))
            .await
            .context("listen for HTTP with two writes")?;
        let client_first = TcpListener::bind((Ipv4Addr::UNSPECIFIED, CLIENT_FIRST_PORT))
            .await
            .context("listen for clients that speak first")?;
        let server_first = TcpListener::bind((Ipv4Addr::UNSPECIFIED, SERVER_FIRST_PORT))
            .await
            .context("listen for clients that wait")?;
        let sink = TcpListener::bind((Ipv4Addr::UNSPECIFIED, SINK_PORT))
            .await
            .context("listen for bytes")?;
        // The receiver may be gone.
        let _ = ready.send(Ok(()));
        tokio::join!(
            accept(http, |stream| _ = task::spawn_local(serve(stream))),
            accept(two_writes, |stream| _ =
                task::spawn_local(serve_http1(stream, Vec::new(), true))),
            accept(client_first, |stream| _ =
                task::spawn_local(answer_bytes(stream))),
            accept(server_first, |stream| _ = task::spawn_local(greet(stream))),
            accept(sink, |stream| _ =
                task::spawn_local(receive_bytes(stream, received.clone()))),
        );
        Ok(())
    };
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    let outcome: Result<()> = match runtime {
        Ok(runtime) => task::LocalSet::new().block_on(&runtime, serve),
        Err(error) => Err(error.into()),
    };
    if let Err(error) = outcome {
        let _ = ready.send(Err(error));
    }
}

async fn accept(listener: TcpListener, serve: impl Fn(TcpStream)) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => serve(stream),
            // The client closed the connection, or file descriptors are exhausted.
            Err(_) => sleep(Duration::from_millis(10)).await,
        }
    }
}

/// Serves one connection. The client reports errors.
async fn serve(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut input = Vec::with_capacity(16 * 1024);
    while input.len() < PREFACE.len() && PREFACE.starts_with(&input) {
        if stream.read_buf(&mut input).await? == 0 {
            return Ok(());
        }
    }
    if input.starts_with(PREFACE) {
        input.drain(..PREFACE.len());
        return serve_http2(stream, input).await;
    }
    serve_http1(stream, input, false).await
}

async fn serve_http1(
    mut stream: TcpStream,
    mut input: Vec<u8>,
    two_writes: bool,
) -> io::Result<()> {
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {BODY_LENGTH}\r\nServer: bench-origin\r\n\r\n"
    );
    let response = [head.as_bytes(), &[b'x'; BODY_LENGTH]].concat();
    let mut output = Vec::new();
    loop {
        let mut taken = 0;
        while let Some(end) = memmem::find(&input[taken..], b"\r\n\r\n") {
            taken += end + 4;
            if two_writes {
                stream.write_all(head.as_bytes()).await?;
                stream.write_all(&response[head.len()..]).await?;
            } else {
                output.extend_from_slice(&response);
            }
        }
        input.drain(..taken);
        stream.write_all(&output).await?;
        output.clear();
        if stream.read_buf(&mut input).await? == 0 {
            return Ok(());
        }
    }
}

async fn serve_http2(mut stream: TcpStream, mut input: Vec<u8>) -> io::Result<()> {
    let message = [&[0, 0, 0, 4, 0][..], &[b'x'; BODY_LENGTH]].concat();
    let mut session = Session::new(message.len());
    let mut output = Vec::new();
    session.send_settings(&mut output);
    // (stream ID, whether it is a gRPC call), waiting for the send window.
    let mut waiting: VecDeque<(u32, bool)> = VecDeque::new();
    loop {
        let mut taken = 0;
        while let Some((frame, length)) = Frame::parse(&input[taken..]) {
            session
                .receive(&frame, &mut output)
                .map_err(io::Error::other)?;
            if frame.ends_stream() {
                waiting.push_back((frame.stream, frame.kind == kind::DATA));
            }
            taken += length;
        }
        input.drain(..taken);
        while let Some(&(id, call)) = waiting.front() {
            let body = if call { &message } else { &message[5..] };
            if !session.may_send(body.len()) {
                break;
            }
            waiting.pop_front();
            if call {
                session.put_headers(&mut output, id, 0, &REPLY);
                put_frame(&mut output, kind::DATA, 0, id, body);
                session.put_headers(&mut output, id, END_STREAM, &TRAILERS);
            } else {
                session.put_headers(&mut output, id, 0, &PAGE);
                put_frame(&mut output, kind::DATA, END_STREAM, id, body);
            }
        }
        stream.write_all(&output).await?;
        output.clear();
        if stream.read_buf(&mut input).await? == 0 {
            return Ok(());
        }
    }
}

async fn answer_bytes(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = [0; 4096];
    while stream.read(&mut buffer).await? > 0 {
        stream.write_all(b"N").await?;
    }
    Ok(())
}

async fn greet(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.write_all(b"220 bench-origin\r\n").await?;
    // Until the client closes the connection.
    stream.read_u8().await.map(drop)
}

async fn receive_bytes(mut stream: TcpStream, received: Arc<AtomicU64>) -> io::Result<()> {
    let mut buffer = vec![0; 256 * 1024];
    loop {
        match stream.read(&mut buffer).await? {
            0 => return Ok(()),
            read => received.fetch_add(read as u64, Ordering::Relaxed),
        };
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn window_updates_for_all_received_bytes_keep_the_window_open() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (server, _) = listener.accept().await.unwrap();
        server.set_nodelay(true).unwrap();
        tokio::spawn(serve_http2(server, Vec::new()));
        let (mut input, mut output) = (Vec::new(), Vec::new());
        // Enough for a difference of a few bytes a response to use up the window of 65,535 bytes.
        for batch in 0..300 {
            for stream in 0..50 {
                let id = 2 * (50 * batch + stream) + 1;
                put_frame(&mut output, kind::HEADERS, END_STREAM, id, &[0x82]);
            }
            client.write_all(&output).await.unwrap();
            output.clear();
            let (mut responses, mut received) = (0, 0);
            while responses < 50 {
                let read = timeout(Duration::from_secs(10), client.read_buf(&mut input));
                let read = read.await.expect("the server waits for its window");
                assert_ne!(read.unwrap(), 0);
                let mut taken = 0;
                while let Some((frame, length)) = Frame::parse(&input[taken..]) {
                    if frame.kind == kind::DATA {
                        received += u32::try_from(frame.content().unwrap().len()).unwrap();
                        responses += u32::from(frame.ends_stream());
                    }
                    taken += length;
                }
                input.drain(..taken);
            }
            let update = received.to_be_bytes();
            put_frame(&mut output, kind::WINDOW_UPDATE, 0, 0, &update);
        }
    }
}
