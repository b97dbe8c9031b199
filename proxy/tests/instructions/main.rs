//! The instructions that fixed exchanges take, counted by valgrind. They do not depend on the load of
//! the machine: a rise makes every request slower. The code has the dev profile. Client and
//! application are a few reads and writes, and count too.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

use std::process::Command;
use std::time::{Duration, Instant};

use diy_mesh_proxy::limits::lifetime::Lifetime;
use diy_mesh_testkit::has_program;
use diy_mesh_testkit::net::listen;
use diy_mesh_testkit::wait::on_worker_within;
use support::Mesh;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Thousands of instructions of an exchange, of the proxy beside the server. Record a new number with
/// the change that is its reason.
const RECORDED: [(&str, u64); 3] = [("http1", 243), ("http2", 324), ("grpc", 422)];
/// The part by which a number may rise, in percent.
const TOLERANCE: u64 = 3;
/// Names the kind and the number of exchanges for a process that valgrind runs.
const VARIABLE: &str = "DIY_MESH_EXCHANGES";
const COUNTS: [u64; 2] = [200, 600];

const BODY: [u8; 1000] = [b'b'; 1000];
/// A gRPC message of 5 bytes.
const MESSAGE: &[u8] = b"\0\0\0\0\x05hello";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const ACK: u8 = 1;

#[test]
fn exchanges_take_no_more_instructions_than_recorded() {
    if !has_program("valgrind") {
        return;
    }
    let mut failed = Vec::new();
    for (kind, recorded) in RECORDED {
        let [few, many] = COUNTS.map(|count| instructions(kind, count));
        let counted = (many - few) / (COUNTS[1] - COUNTS[0]) / 1000;
        println!("{kind}: {counted} thousand instructions, recorded {recorded}");
        if counted * 100 > recorded * (100 + TOLERANCE) {
            failed.push(format!("{kind}: {counted}, recorded {recorded}"));
        }
    }
    assert!(
        failed.is_empty(),
        "more thousands of instructions than recorded here: {failed:?}"
    );
}

/// The instructions of a process that makes exchanges.
fn instructions(kind: &str, count: u64) -> u64 {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "process_that_is_counted"])
        .env(VARIABLE, format!("{kind} {count}"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let collected = text
        .lines()
        .find_map(|line| line.split_once("Collected : "));
    let (_, number) = collected.unwrap_or_else(|| panic!("no count: {text}"));
    number.trim().parse().unwrap()
}

/// Does nothing, unless valgrind runs it.
#[test]
fn process_that_is_counted() {
    let Ok(variable) = std::env::var(VARIABLE) else {
        return;
    };
    let (kind, count) = variable.split_once(' ').unwrap();
    let count = count.parse().unwrap();
    on_worker_within(Duration::from_secs(600), async {
        match kind {
            "http1" => http1(count).await,
            _ => http2(count, kind == "grpc").await,
        }
    });
}

/// A connection of another proxy's client.
async fn connect(mesh: &Mesh, app: std::net::SocketAddr) -> TcpStream {
    let after = Instant::now() + Duration::from_secs(3600);
    let lifetime = Lifetime {
        retires_at: after,
        certificate_ends_at: after,
        resets_at: Some(after),
    };
    mesh.connect_peer(app, lifetime).await
}

async fn http1(count: u32) {
    const REQUEST: &[u8] = b"GET /hello HTTP/1.1\r\nHost: cart\r\nUser-Agent: test\r\n\r\n";
    let response = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n";
    let response = [&response[..], &BODY].concat();
    let (mesh, (listener, app)) = (Mesh::new(), listen().await);
    let length = response.len();
    tokio::task::spawn_local(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut buffer = [0; 4096];
        while stream.read(&mut buffer).await.unwrap() > 0 {
            stream.write_all(&response).await.unwrap();
        }
    });
    let mut client = connect(&mesh, app).await;
    let mut buffer = vec![0; length];
    for _ in 0..count {
        client.write_all(REQUEST).await.unwrap();
        client.read_exact(&mut buffer).await.unwrap();
    }
}

async fn http2(count: u32, is_grpc: bool) {
    let (mesh, (listener, app)) = (Mesh::new(), listen().await);
    tokio::task::spawn_local(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.read_exact(&mut [0; 24]).await.unwrap();
        serve(&mut stream, is_grpc).await;
    });
    let request = if is_grpc {
        let fields = literal("content-type", "application/grpc");
        [
            &b"\x83\x86\x04\x09/cart/Get\x01\x04cart"[..],
            &fields,
            &literal("te", "trailers"),
        ]
        .concat()
    } else {
        [
            &b"\x82\x86\x04\x06/hello\x01\x04cart"[..],
            &literal("user-agent", "test"),
        ]
        .concat()
    };
    let mut client = connect(&mesh, app).await;
    client
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        .await
        .unwrap();
    client.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
    let window = (1_u32 << 30).to_be_bytes();
    client
        .write_all(&frame(WINDOW_UPDATE, 0, 0, &window))
        .await
        .unwrap();
    for id in (1..).step_by(2).take(count as usize) {
        let end = if is_grpc { 0 } else { END_STREAM };
        let mut message = frame(HEADERS, END_HEADERS | end, id, &request);
        if is_grpc {
            message.extend(frame(DATA, END_STREAM, id, MESSAGE));
        }
        client.write_all(&message).await.unwrap();
        while {
            let (kind, flags, _) = read(&mut client).await.unwrap();
            answer_control(&mut client, kind, flags).await;
            kind > HEADERS || flags & END_STREAM == 0
        } {}
    }
}

/// Responds to each request at its end.
async fn serve(stream: &mut TcpStream, is_grpc: bool) {
    stream.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
    while let Some((kind, flags, id)) = read(stream).await {
        answer_control(stream, kind, flags).await;
        if kind > HEADERS || flags & END_STREAM == 0 {
            continue;
        }
        let mut response = vec![0x88];
        let message = if is_grpc {
            response.extend(literal("content-type", "application/grpc"));
            [
                frame(HEADERS, END_HEADERS, id, &response),
                frame(DATA, 0, id, MESSAGE),
                frame(
                    HEADERS,
                    END_HEADERS | END_STREAM,
                    id,
                    &literal("grpc-status", "0"),
                ),
            ]
            .concat()
        } else {
            let head = frame(HEADERS, END_HEADERS, id, &response);
            [head, frame(DATA, END_STREAM, id, &BODY)].concat()
        };
        stream.write_all(&message).await.unwrap();
    }
}

/// Acknowledges SETTINGS and PING, whose payload is not verified.
async fn answer_control(stream: &mut TcpStream, kind: u8, flags: u8) {
    if matches!(kind, SETTINGS | PING) && flags & ACK == 0 {
        let payload: &[u8] = if kind == PING { &[0; 8] } else { &[] };
        stream
            .write_all(&frame(kind, ACK, 0, payload))
            .await
            .unwrap();
    }
}

fn frame(kind: u8, flags: u8, id: u32, payload: &[u8]) -> Vec<u8> {
    let length = &(payload.len() as u32).to_be_bytes()[1..];
    [length, &[kind, flags], &id.to_be_bytes(), payload].concat()
}

/// A field that no table takes.
fn literal(name: &str, value: &str) -> Vec<u8> {
    let length = |text: &str| [text.len() as u8];
    let (name_length, value_length) = (length(name), length(value));
    [
        &[0],
        &name_length[..],
        name.as_bytes(),
        &value_length,
        value.as_bytes(),
    ]
    .concat()
}

/// Type, flags and stream of the next frame. `None` at the end.
async fn read(stream: &mut TcpStream) -> Option<(u8, u8, u32)> {
    let mut head = [0; 9];
    stream.read_exact(&mut head).await.ok()?;
    let [a, b, c, kind, flags, id @ ..] = head;
    let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
    stream.read_exact(&mut payload).await.ok()?;
    Some((kind, flags, u32::from_be_bytes(id)))
}
