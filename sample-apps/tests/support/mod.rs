//! A sample program as a process on loopback, with its output; killed at the end of the test.

#![allow(dead_code, reason = "each test file uses a part of this module")]

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Limit for each wait in a test.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(30);

pub const HTTP_SERVER: &str = env!("CARGO_BIN_EXE_http-server");
pub const HTTP_CLIENT: &str = env!("CARGO_BIN_EXE_http-client");
pub const GRPC_SERVER: &str = env!("CARGO_BIN_EXE_grpc-server");
pub const GRPC_CLIENT: &str = env!("CARGO_BIN_EXE_grpc-client");

pub struct Process {
    child: Child,
    output: Arc<Output>,
}

#[derive(Default)]
struct Output {
    text: Mutex<String>,
    changed: Condvar,
}

impl Process {
    /// Starts a program with these environment variables only. Standard output and standard error
    /// are read as one text.
    pub fn start(program: &str, variables: &[(&str, &str)]) -> Self {
        let mut child = command(program, variables)
            .spawn()
            .expect("the program starts");
        let output = Arc::new(Output::default());
        read_lines(output.clone(), child.stdout.take().expect("piped"));
        read_lines(output.clone(), child.stderr.take().expect("piped"));
        Self { child, output }
    }

    /// Starts a server on a free port and returns the port.
    pub fn start_server(program: &str, variables: &[(&str, &str)]) -> (Self, u16) {
        let port = free_port();
        let text = port.to_string();
        let mut all = vec![
            ("LISTEN_PORT", text.as_str()),
            ("HOSTNAME", "tester"),
            ("VERSION", "1.0"),
        ];
        all.extend_from_slice(variables);
        let server = Self::start(program, &all);
        server.wait_for("listens on");
        (server, port)
    }

    /// Waits until the output contains `expected`; returns the output up to the end of that line.
    pub fn wait_for(&self, expected: &str) -> String {
        let deadline = Instant::now() + TEST_TIMEOUT;
        let mut text = self.output.text.lock().expect("not poisoned");
        loop {
            if let Some(at) = text.find(expected)
                && let Some(line_end) = text[at + expected.len() - 1..].find('\n')
            {
                return text[..at + expected.len() + line_end].to_owned();
            }
            let left = deadline.checked_duration_since(Instant::now());
            let left = left.unwrap_or_else(|| {
                panic!("timeout waiting for `{expected}`; the output is:\n{text}")
            });
            text = self
                .output
                .changed
                .wait_timeout(text, left)
                .expect("not poisoned")
                .0;
        }
    }

    pub fn output(&self) -> String {
        self.output.text.lock().expect("not poisoned").clone()
    }

    pub fn signal(&self, signal: Signal) {
        kill(
            Pid::from_raw(i32::try_from(self.child.id()).expect("a pid")),
            signal,
        )
        .expect("the process exists");
    }

    pub fn has_exited(&mut self) -> bool {
        self.child
            .try_wait()
            .expect("a child of this process")
            .is_some()
    }

    /// Waits for the process to exit.
    pub fn exit(&mut self) -> ExitStatus {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child of this process") {
                return status;
            }
            assert!(
                Instant::now() < deadline,
                "the process did not exit; its output is:\n{}",
                self.output()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have exited already.
        self.child.kill().ok();
        self.child.wait().ok();
    }
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
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn read_lines(output: Arc<Output>, pipe: impl Read + Send + 'static) {
    std::thread::spawn(move || {
        let mut lines = BufReader::new(pipe);
        let mut line = String::new();
        while lines.read_line(&mut line).is_ok_and(|read| read > 0) {
            output.text.lock().expect("not poisoned").push_str(&line);
            output.changed.notify_all();
            line.clear();
        }
    });
}
