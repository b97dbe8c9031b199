//! Clients that close or reset their connection before the response has ended, through two proxies:
//! the application learns of it as without the mesh.

use std::process::Command;

use super::*;
use diy_mesh_testkit::has_program;
use diy_mesh_testkit::process::Process;
use diy_mesh_testkit::wait::until;

const STREAM: &str = "GET /events HTTP/1.1\r\nHost: cart\r\n\r\n";

/// How the connection to the application ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It carries a request.
    Open,
    HalfClose,
    Reset,
}

/// An application that starts a response and is silent until its connection ends. After a
/// half-close it completes the response.
async fn streaming_app(start: &'static str) -> (SocketAddr, Rc<Cell<Option<End>>>) {
    let end = Rc::new(Cell::new(None));
    let seen = end.clone();
    let address = listening(async move |mut stream| {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            // The connection that detection dials may end without a request.
            let Ok(byte) = stream.read_u8().await else {
                return;
            };
            head.push(byte);
        }
        seen.set(Some(End::Open));
        stream.write_all(start.as_bytes()).await.unwrap();
        match stream.read(&mut [0]).await {
            Ok(0) => {
                seen.set(Some(End::HalfClose));
                let rest = if start.is_empty() {
                    "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nlast"
                } else {
                    "4\r\nlast\r\n0\r\n\r\n"
                };
                stream.write_all(rest.as_bytes()).await.unwrap();
            }
            Err(_) => seen.set(Some(End::Reset)),
            Ok(_) => panic!("unexpected bytes"),
        }
    })
    .await;
    (address, end)
}

const START: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n";

impl Pair {
    fn idle_http1(&self) -> usize {
        let endpoint = self.destination.pick(&[], &mut fastrand::Rng::new());
        endpoint.unwrap().pool().idle_http1()
    }
}

#[test]
fn reset_of_the_client_resets_a_quiet_response() {
    on_worker(async {
        for pipelined in ["", STREAM] {
            let (app, end) = streaming_app(START).await;
            let pair = Pair::usual(app).await;
            let mut client = pair.connect().await;
            client.write_all(STREAM.as_bytes()).await.unwrap();
            read_until(&mut client, "first\r\n").await;
            client.write_all(pipelined.as_bytes()).await.unwrap();
            assert_eq!(end.get(), Some(End::Open));
            Io::new(client).reset();
            until(|| end.get() == Some(End::Reset)).await;
            assert_eq!(pair.idle_http1(), 0);
        }
    });
}

#[test]
fn reset_of_the_client_resets_a_pending_request() {
    on_worker(async {
        let (app, end) = streaming_app("").await;
        let pair = Pair::usual(app).await;
        let mut client = pair.connect().await;
        client.write_all(STREAM.as_bytes()).await.unwrap();
        until(|| end.get() == Some(End::Open)).await;
        Io::new(client).reset();
        until(|| end.get() == Some(End::Reset)).await;
    });
}

#[test]
fn half_close_of_the_client_reaches_the_application_and_the_response_completes() {
    on_worker(async {
        for start in [START, ""] {
            let (app, end) = streaming_app(start).await;
            let pair = Pair::usual(app).await;
            let mut client = pair.connect().await;
            client.write_all(STREAM.as_bytes()).await.unwrap();
            if !start.is_empty() {
                read_until(&mut client, "first\r\n").await;
            }
            client.shutdown().await.unwrap();
            let mut rest = String::new();
            client.read_to_string(&mut rest).await.unwrap();
            assert!(rest.contains("last"), "{rest}");
            assert_eq!(end.get(), Some(End::HalfClose));
            assert_eq!(pair.idle_http1(), 0, "the connection is half-closed");
        }
    });
}

/// Builds the Go server. `None` without Go, which CI must have.
fn go_server(folder: &std::path::Path) -> Option<std::path::PathBuf> {
    if !has_program("go") {
        return None;
    }
    let program = folder.join("events");
    let source = folder.join("events.go");
    std::fs::write(&source, include_str!("events.go")).unwrap();
    let mut build = Command::new("go");
    build.args(["build", "-o"]).arg(&program).arg(&source);
    let output = build.env("GOCACHE", folder.join("cache")).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    Some(program)
}

#[test]
fn context_of_a_go_server_ends_with_the_client() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = go_server(folder.path()) else {
        return;
    };
    on_worker(async {
        let mut server = Process::with_stdout(&mut Command::new(program));
        let app = server.line("").await.parse().unwrap();
        let pair = Pair::usual(app).await;
        for is_reset in [true, false] {
            let mut client = pair.connect().await;
            client.write_all(STREAM.as_bytes()).await.unwrap();
            read_until(&mut client, "first\n").await;
            if is_reset {
                Io::new(client).reset();
            } else {
                client.shutdown().await.unwrap();
            }
            assert_eq!(server.line("").await, "context canceled", "{is_reset}");
        }
    });
}
