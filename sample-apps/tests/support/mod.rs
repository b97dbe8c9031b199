//! The sample programs as processes on loopback.

#![allow(dead_code, reason = "each test file uses a part of this module")]

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};

use diy_mesh_testkit::process::Process;

pub const HTTP_SERVER: &str = env!("CARGO_BIN_EXE_http-server");
pub const HTTP_CLIENT: &str = env!("CARGO_BIN_EXE_http-client");
pub const GRPC_SERVER: &str = env!("CARGO_BIN_EXE_grpc-server");
pub const GRPC_CLIENT: &str = env!("CARGO_BIN_EXE_grpc-client");

/// Starts a program with these environment variables only.
pub fn start(program: &str, variables: &[(&str, &str)]) -> Process {
    Process::start(&mut command(program, variables))
}

/// Starts a server on a free port and returns the port.
pub fn start_server(program: &str, variables: &[(&str, &str)]) -> (Process, u16) {
    let port = free_port();
    let text = port.to_string();
    let mut all = vec![
        ("LISTEN_PORT", text.as_str()),
        ("HOSTNAME", "tester"),
        ("VERSION", "1.0"),
    ];
    all.extend_from_slice(variables);
    let server = start(program, &all);
    server.wait_for("listens on");
    (server, port)
}

/// Runs a program to its end and returns its exit code, standard output and standard error.
pub fn run(program: &str, args: &[&str], variables: &[(&str, &str)]) -> (i32, String, String) {
    let output = command(program, variables)
        .args(args)
        .output()
        .expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (
        output.status.code().expect("no signal"),
        text(output.stdout),
        text(output.stderr),
    )
}

/// A port that no other test gets, even while nothing listens on it: below the ephemeral ports of
/// the kernel.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Test programs may run at the same time.
    let first = 20_000 + (std::process::id() % 100) as u16 * 100;
    let is_free = |port: &u16| {
        TcpListener::bind(("::", *port))
            .or_else(|_| TcpListener::bind(("0.0.0.0", *port)))
            .is_ok()
    };
    let ports = std::iter::repeat_with(|| first + NEXT.fetch_add(1, Ordering::Relaxed) % 100);
    ports.take(100).find(is_free).expect("a free port")
}

fn command(program: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(program);
    command.env_clear().envs(variables.iter().copied());
    command.stdin(Stdio::null());
    command
}
