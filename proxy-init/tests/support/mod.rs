//! Network namespaces for the tests. Each is held by a thread and removed when the thread ends.

use std::any::Any;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::mpsc;

use diy_mesh_testkit::wait::TEST_TIMEOUT;
use diy_mesh_testkit::{has_program, is_root};
use nix::sched::{CloneFlags, unshare};

pub const PROXY_INIT: &str = env!("CARGO_BIN_EXE_proxy-init");

/// Whether this machine has what these tests need. They are skipped if it does not.
pub fn has_means() -> bool {
    let programs = ["ip", "iptables-nft", "iptables-legacy"];
    is_root() && programs.into_iter().all(has_program)
}

type Job = Box<dyn FnOnce() + Send>;

/// Network namespace whose loopback interface is up.
pub struct Namespace {
    jobs: mpsc::Sender<Job>,
    handle: File,
}

impl Namespace {
    pub fn new() -> Self {
        let (jobs, queue) = mpsc::channel::<Job>();
        let (ready, handle) = mpsc::channel();
        std::thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).expect("root creates network namespaces");
            command("ip", &["link", "set", "lo", "up"]);
            ready
                .send(File::open("/proc/thread-self/ns/net").expect("the namespace has a file"))
                .expect("the receiver exists");
            queue.into_iter().for_each(|job| job());
        });
        Self {
            handle: handle.recv().expect("the thread has entered its namespace"),
            jobs,
        }
    }

    /// Runs a closure in the namespace, including the sockets it opens and the programs it starts.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (sender, result) = mpsc::channel();
        let job: Job = Box::new(move || {
            let outcome: Result<T, Box<dyn Any + Send>> =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            sender.send(outcome).ok();
        });
        self.jobs
            .send(job)
            .expect("the thread runs as long as the namespace exists");
        result
            .recv()
            .expect("answered")
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Creates a veth pair to another namespace: `eth0` at both ends, with one IPv4 and one IPv6
    /// address each.
    pub fn connect(&self, other: &Namespace, own: [&'static str; 2], others: [&'static str; 2]) {
        let peer = format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            other.handle.as_raw_fd()
        );
        self.run(move || {
            command(
                "ip",
                &[
                    "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", &peer,
                ],
            )
        });
        for (end, addresses) in [(self, own), (other, others)] {
            end.run(move || {
                command("ip", &["addr", "add", addresses[0], "dev", "eth0"]);
                command("ip", &["addr", "add", addresses[1], "dev", "eth0", "nodad"]);
                command("ip", &["link", "set", "eth0", "up"]);
            });
        }
    }

    /// Adds an address to `eth0`.
    pub fn add_address(&self, address: &'static str) {
        let mut args = vec!["addr", "add", address, "dev", "eth0"];
        args.extend(address.contains(':').then_some("nodad"));
        self.run(move || command("ip", &args));
    }

    /// Runs proxy-init with `path` as `PATH`.
    pub fn proxy_init(&self, args: &[&str], path: &Path) -> Output {
        let args: Vec<OsString> = args.iter().map(OsString::from).collect();
        let path = path.as_os_str().to_owned();
        self.run(move || {
            Command::new(PROXY_INIT)
                .args(args)
                .env_clear()
                .env("PATH", path)
                .output()
                .expect("it starts")
        })
    }

    /// Like [`Self::proxy_init`], restricted to DNS to the nameservers in a resolv.conf.
    pub fn proxy_init_with_dns(&self, resolv_conf: &str, args: &[&str], path: &Path) -> Output {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), resolv_conf).expect("written");
        let script = "mount --bind \"$0\" /etc/resolv.conf; exec env -i PATH=\"$1\" \"$2\" --outbound-udp=dns $3";
        let mut command = Command::new("unshare");
        command
            .args(["-m", "sh", "-ec", script])
            .args([file.path(), path, Path::new(PROXY_INIT)])
            .arg(args.join(" "));
        self.run(move || command.output().expect("it starts"))
    }

    /// Output of `iptables-save` for a table without comments, which contain timestamps.
    pub fn saved(&self, program: &str, table: &'static str) -> String {
        let program = program.to_owned();
        let text = self.run(move || command(&program, &["-t", table]));
        text.lines()
            .filter(|line| !line.starts_with('#'))
            .map(|line| format!("{line}\n"))
            .collect()
    }

    /// Output of a command, whose words are separated by spaces.
    pub fn output(&self, line: &str) -> String {
        let line = line.to_owned();
        self.run(move || {
            let words: Vec<_> = line.split(' ').collect();
            command(words[0], &words[1..])
        })
    }

    /// Accepts TCP connections of both families on a port and answers each with `word`.
    pub fn serve(&self, port: u16, word: &'static str) {
        let listener = self.run(move || TcpListener::bind(("::", port)).expect("the port is free"));
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                // A client may close the connection early.
                connection
                    .and_then(|mut connection| connection.write_all(word.as_bytes()))
                    .ok();
            }
        });
    }

    /// Connects to an address and returns the response.
    pub fn request(&self, address: impl Into<IpAddr>, port: u16) -> String {
        let address = SocketAddr::new(address.into(), port);
        self.run(move || {
            let mut stream = TcpStream::connect_timeout(&address, TEST_TIMEOUT)
                .unwrap_or_else(|error| panic!("{address}: {error}"));
            stream
                .set_read_timeout(Some(TEST_TIMEOUT))
                .expect("a timeout");
            let mut word = String::new();
            stream.read_to_string(&mut word).expect("answered");
            word
        })
    }

    /// Like [`Self::request`], as another user.
    pub fn request_as(&self, uid: u32, address: impl Into<IpAddr>, port: u16) -> String {
        let script = format!("exec 3<>/dev/tcp/{}/{port} && cat <&3", address.into());
        self.run(move || {
            let output = Command::new("bash")
                .args(["-c", &script])
                .uid(uid)
                .output()
                .expect("bash starts");
            assert!(output.status.success(), "{}", text(&output.stderr));
            text(&output.stdout)
        })
    }

    /// Sends a datagram as another user, and returns whether the kernel accepted it.
    pub fn sends_udp_as(&self, uid: u32, address: impl Into<IpAddr>, port: u16) -> bool {
        let script = format!("printf user > /dev/udp/{}/{port}", address.into());
        self.run(move || {
            let mut command = Command::new("bash");
            let output = command.args(["-c", &script]).uid(uid).output();
            output.expect("bash starts").status.success()
        })
    }

    pub fn udp(&self, address: impl Into<IpAddr>, port: u16) -> UdpSocket {
        let address = SocketAddr::new(address.into(), port);
        let socket = self.run(move || UdpSocket::bind(address).expect("the port is free"));
        socket
            .set_read_timeout(Some(TEST_TIMEOUT))
            .expect("a timeout");
        socket
    }
}

/// The next datagram and its sender. A system call with a timeout fails with EINTR when the process
/// is suspended and resumed, without any signal handler (signal(7)).
pub fn receive(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let mut buffer = [0; 16];
    loop {
        match socket.recv_from(&mut buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            received => {
                let (length, from) = received.expect("came through");
                return (buffer[..length].to_vec(), from);
            }
        }
    }
}

/// Directory for `PATH` with symlinks from names to programs.
pub fn programs(links: &[(&str, &str)]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    for (name, program) in links {
        symlink(find(program), directory.path().join(name)).expect("a link");
    }
    directory
}

/// Directory for `PATH` with the four programs of one iptables backend, and none for nftables.
pub fn backend_programs(backend: &str) -> tempfile::TempDir {
    if backend == "nftables" {
        return programs(&[]);
    }
    let names: Vec<_> = ["iptables", "ip6tables"]
        .iter()
        .flat_map(|family| ["save", "restore"].map(|action| format!("{family}-{backend}-{action}")))
        .collect();
    programs(
        &names
            .iter()
            .map(|name| (name.as_str(), name.as_str()))
            .collect::<Vec<_>>(),
    )
}

/// Writes an executable shell script.
pub fn script(directory: &Path, name: &str, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    let path = directory.join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("written");
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).expect("executable");
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Runs a program, panics if it fails, and returns its output.
fn command(program: &str, args: &[&str]) -> String {
    let output = Command::new(find(program))
        .args(args)
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(
        output.status.success(),
        "{program} {args:?}: {}",
        text(&output.stderr)
    );
    text(&output.stdout)
}

/// Finds a program in `PATH` and in the sbin directories.
fn find(program: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let sbin = ["/usr/sbin", "/sbin", "/usr/local/sbin"].map(PathBuf::from);
    let mut candidates = std::env::split_paths(OsStr::new(&path))
        .chain(sbin)
        .map(|directory| directory.join(program));
    candidates.find(|path| path.exists()).unwrap_or_else(|| {
        panic!("`{program}` is missing: apt-get install iptables iproute2 nftables")
    })
}
