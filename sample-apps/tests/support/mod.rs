//! A sample program as a process: started on loopback, its output watched line by line, ended with the test.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// How long anything may take before a test calls it missing; what is there is seen at once.
pub const PATIENCE: Duration = Duration::from_secs(30);

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
    grown: Condvar,
}

impl Process {
    /// Starts a program with these variables and no others; both outputs are pipes, read as one text.
    pub fn start(program: &str, variables: &[(&str, &str)]) -> Self {
        let mut child = command(program, variables)
            .spawn()
            .expect("the program starts");
        let output = Arc::new(Output::default());
        watch(output.clone(), child.stdout.take().expect("piped"));
        watch(output.clone(), child.stderr.take().expect("piped"));
        Self { child, output }
    }

    /// Starts a server on a free port, and gives the port.
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

    /// Waits until the output holds `what`; gives all output up to the end of its line.
    pub fn wait_for(&self, what: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        let mut text = self.output.text.lock().expect("not poisoned");
        loop {
            if let Some(at) = text.find(what)
                && let Some(line_end) = text[at + what.len() - 1..].find('\n')
            {
                return text[..at + what.len() + line_end].to_owned();
            }
            let left = deadline.checked_duration_since(Instant::now());
            let left =
                left.unwrap_or_else(|| panic!("`{what}` never came; the output was:\n{text}"));
            text = self
                .output
                .grown
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
        .expect("the process is there");
    }

    pub fn has_exited(&mut self) -> bool {
        self.child.try_wait().expect("our child").is_some()
    }

    /// Waits for the process to end by itself.
    pub fn exit(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("our child") {
                return status;
            }
            assert!(
                Instant::now() < deadline,
                "the process did not end; its output was:\n{}",
                self.output()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Runs a program that ends by itself: its exit code, standard output and standard error.
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

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    TcpListener::bind("[::]:0")
        .or_else(|_| TcpListener::bind("0.0.0.0:0"))
        .expect("a free port")
        .local_addr()
        .expect("bound")
        .port()
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

fn watch(output: Arc<Output>, pipe: impl Read + Send + 'static) {
    std::thread::spawn(move || {
        let mut lines = BufReader::new(pipe);
        let mut line = String::new();
        while lines.read_line(&mut line).is_ok_and(|read| read > 0) {
            output.text.lock().expect("not poisoned").push_str(&line);
            output.grown.notify_all();
            line.clear();
        }
    });
}
