//! The memory of a real proxy process under attack, in a network namespace of its own. Requires root
//! and iptables.
#![allow(missing_docs, clippy::unwrap_used)]

/// The controller and the hostile peers of the unit tests.
#[allow(dead_code)]
#[path = "../../src/secure"]
mod secure {
    pub mod control {
        pub use diy_mesh_proxy::secure::control::Tls;
        pub mod testing;
    }
    pub mod identity {
        pub use diy_mesh_proxy::secure::identity::Trust;
        pub mod testing;
    }
}
mod floods;
#[path = "../../src/secure/tls/tests/fragments.rs"]
mod fragments;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use bytes::Bytes;
use diy_mesh_testkit::skip;
use diy_mesh_testkit::wait::{TEST_TIMEOUT, eventually_blocking};
use floods::{is_ready, start_controller};
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use secure::control::testing::Mounted;

const MIB: u64 = 1024 * 1024;
/// The memory limit of the proxy.
const LIMIT: u64 = 64 * MIB;
/// The group of the proxy, whose connections are not redirected.
const PROXY_GROUP: u32 = 1337;
/// The address of the application, behind the proxy: the address of a pod.
const APP: ([u8; 4], u16) = ([10, 0, 0, 1], 9999);
/// The port of a Service, as the application uses it.
const SERVICE: u16 = 30_000;
/// The port of a server that discovery does not know, as the application uses it.
const OUTSIDE: u16 = 30_001;

fn run(command: &str) -> Result<(), String> {
    let mut words = command.split(' ');
    let mut program = Command::new(words.next().unwrap());
    match program.args(words).output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!(
            "{command}: {}",
            String::from_utf8_lossy(&output.stderr)
        )),
        Err(error) => Err(format!("{command}: {error}")),
    }
}

/// Moves this thread to a network namespace where connections to [`APP`] and to the next ports are
/// redirected, as inbound ones, and those to [`SERVICE`] and [`OUTSIDE`] as outbound ones.
fn enter_namespace() -> Result<(), String> {
    unshare(CloneFlags::CLONE_NEWNET)
        .map_err(|error| format!("cannot create a namespace: {error}"))?;
    run("ip link set lo up")?;
    run("ip address add 10.0.0.1/32 dev lo")?;
    let inbound = format!("{}:20000", APP.1);
    let outbound = format!("{SERVICE}:{OUTSIDE}");
    for (ports, to) in [(inbound, 4000), (outbound, 5000)] {
        run(&format!(
            "iptables -w -t nat -A OUTPUT -p tcp --dport {ports} -m owner ! --gid-owner {PROXY_GROUP} -j REDIRECT --to-ports {to}"
        ))?;
    }
    Ok(())
}

/// A proxy, and the files that its arguments name.
struct Proxy(Child, Option<Mounted>);

impl Proxy {
    fn start() -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_proxy"));
        command.env_clear();
        let limit = format!("--memory-limit={}", LIMIT / MIB);
        command.arg(limit);
        let (control, mounted) = start_controller();
        let mut proxy = Self::spawn(command, &control);
        proxy.1 = Some(mounted);
        proxy.wait("it is ready", is_ready);
        proxy
    }

    /// Starts the proxy by this command, with more arguments.
    fn spawn(mut command: Command, more: &[impl AsRef<std::ffi::OsStr>]) -> Self {
        let arguments = [
            "--inbound-port=4000",
            "--outbound-port=5000",
            "--admin-port=4001",
            "--dump=off",
        ];
        let child = command
            .args(arguments)
            .args(more)
            .gid(PROXY_GROUP)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let proxy = Self(child, None);
        proxy.wait("it listens", || connect(1).is_ok());
        proxy
    }

    fn is_running(&self) -> bool {
        std::fs::read_to_string(format!("/proc/{}/status", self.0.id()))
            .is_ok_and(|status| status.contains("VmRSS:"))
    }

    /// Resident memory in bytes.
    fn resident(&self) -> u64 {
        self.status("VmRSS:")
    }

    /// Resident memory without the pages of the program.
    fn anonymous(&self) -> u64 {
        self.status("RssAnon:")
    }

    /// The largest resident memory so far in bytes.
    fn peak(&self) -> u64 {
        self.status("VmHWM:")
    }

    fn status(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kibibytes = line.unwrap().trim().strip_suffix(" kB").unwrap();
        kibibytes.parse::<u64>().unwrap() * 1024
    }

    fn wait(&self, what: &str, condition: impl Fn() -> bool) {
        eventually_blocking(what, || condition().then_some(()).ok_or("not yet"));
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A connection from one of many addresses.
fn connect(number: usize) -> std::io::Result<TcpStream> {
    connect_to(number, APP.1)
}

fn connect_to(number: usize, port: u16) -> std::io::Result<TcpStream> {
    let source = [127, 1, (number / 200) as u8, (number % 200) as u8 + 1];
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((source, 0)).into())?;
    socket.connect(&SocketAddr::from((APP.0, port)).into())?;
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(TEST_TIMEOUT))?;
    stream.set_write_timeout(Some(TEST_TIMEOUT))?;
    Ok(stream)
}

/// The first bytes that the proxy sends.
fn answer(mut stream: &TcpStream) -> String {
    let mut answer = [0; 2048];
    loop {
        match stream.read(&mut answer) {
            // The process was suspended and resumed: signal(7).
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            read => return String::from_utf8_lossy(&answer[..read.unwrap_or(0)]).into_owned(),
        }
    }
}

/// Whether a small request is served: nothing listens at the application's address, or not for HTTP/1.
fn is_served() -> bool {
    let Ok(mut client) = connect(7000) else {
        return false;
    };
    let sent = client.write_all(b"GET / HTTP/1.1\r\nHost: cart\r\n\r\n");
    let codes = ["connect-failed", "upstream-closed", "upstream-malformed"];
    let answer = answer(&client);
    let has = |code: &&str| answer.contains(&format!("x-mesh-error: {code}"));
    sent.is_ok() && codes.iter().any(has)
}

#[test]
fn unfinished_heads_stay_within_the_memory_limit_and_their_memory_returns() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    if let Err(reason) = enter_namespace() {
        return skip(&reason);
    }
    let proxy = Proxy::start();
    let idle = proxy.resident();
    for size in [60_000, 20_000] {
        let mut head = b"GET / HTTP/1.1\r\nHost: cart\r\nX: ".to_vec();
        head.resize(size, b'a');
        let attack: Vec<_> = (0..6000)
            .filter_map(|number| {
                let mut stream = connect(number).ok()?;
                // A rejected connection may be reset.
                let _ = stream.write_all(&head);
                Some(stream)
            })
            .collect();
        let is_overloaded = |stream: &TcpStream| {
            stream.set_nonblocking(true).unwrap();
            answer(stream).contains("503 Service Unavailable\r\n")
        };
        let rejected = attack.iter().filter(|stream| is_overloaded(stream)).count();
        assert!(rejected > 100, "{rejected} replies with 503");
        // Rejected clients have a second to read the reply. Then small requests are served, while
        // unfinished heads still hold memory.
        proxy.wait("a small request is served", is_served);
        drop(attack);
        proxy.wait("the memory returns", || proxy.resident() < idle + 16 * MIB);
    }
    let peak = proxy.peak();
    assert!(peak < LIMIT, "{} MiB were resident", peak / MIB);
}

/// The counts of an application that responds.
#[derive(Default)]
struct Responses {
    begun: AtomicUsize,
    sent: AtomicUsize,
}

impl Responses {
    /// Sends more than the proxy takes while the client does not read.
    async fn send(&self, mut respond: h2::server::SendResponse<Bytes>) {
        let Ok(mut stream) = respond.send_response(http::Response::new(()), false) else {
            return;
        };
        self.begun.fetch_add(1, Relaxed);
        loop {
            stream.reserve_capacity(1024 * 1024);
            let capacity = std::future::poll_fn(|cx| stream.poll_capacity(cx)).await;
            let Some(Ok(capacity)) = capacity else { return };
            self.sent.fetch_add(capacity, Relaxed);
            if stream.send_data(vec![0; capacity].into(), false).is_err() {
                return;
            }
        }
    }
}

/// An application that accepts `max_streams` HTTP/2 requests on each connection to this port. Responds
/// to none if there are no `responses`.
fn accept_streams(port: u16, max_streams: u32, responses: Option<&'static Responses>) {
    let listener = std::net::TcpListener::bind(SocketAddr::from((APP.0, port))).unwrap();
    listener.set_nonblocking(true).unwrap();
    let serve = async move {
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        while let Ok((stream, _)) = listener.accept().await {
            tokio::task::spawn_local(async move {
                // The proxy connects before it knows the protocol of a client.
                let mut builder = h2::server::Builder::new();
                let handshake = builder.max_concurrent_streams(max_streams);
                let Ok(mut connection) = handshake.handshake(stream).await else {
                    return;
                };
                let mut requests = Vec::new();
                while let Some(Ok((request, respond))) = connection.accept().await {
                    match responses {
                        None => requests.push((request, respond)),
                        Some(all) => drop(tokio::task::spawn_local(all.send(respond))),
                    }
                }
            });
        }
    };
    std::thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, serve);
    });
}

/// Reads until the proxy has acknowledged a PING frame. False if it closes the connection.
fn is_acknowledged(mut stream: &TcpStream) -> bool {
    loop {
        let mut head = [0; 9];
        if stream.read_exact(&mut head).is_err() {
            return false;
        }
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        if stream.read_exact(&mut vec![0; length as usize]).is_err() {
            return false;
        }
        if head[3..5] == [PING, 1] {
            return true;
        }
    }
}

const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const END_HEADERS: u8 = 4;

const END_STREAM: u8 = 1;

/// The bytes of a client that grants the largest windows, sends 250 requests, and a PING frame.
fn requests(flags: u8, head: &[u8]) -> Vec<u8> {
    let frame = |kind, flags, stream: u32, payload: &[u8]| {
        let length = u8::try_from(payload.len()).unwrap();
        [
            &[0, 0, length, kind, flags],
            &stream.to_be_bytes()[..],
            payload,
        ]
        .concat()
    };
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    // SETTINGS_INITIAL_WINDOW_SIZE.
    bytes.extend(frame(SETTINGS, 0, 0, b"\0\x04\x7f\xff\xff\xff"));
    bytes.extend(frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\0\0"));
    (0..250).for_each(|number| bytes.extend(frame(HEADERS, flags, 2 * number + 1, head)));
    bytes.extend(frame(PING, 0, 0, &[0; 8]));
    bytes
}

#[test]
fn unread_responses_over_http2_stay_within_the_memory_limit() {
    static RESPONSES: LazyLock<Responses> = LazyLock::new(Responses::default);
    leave_unread(APP.1, &RESPONSES);
}

#[test]
fn unread_responses_of_servers_outside_stay_within_the_memory_limit() {
    static RESPONSES: LazyLock<Responses> = LazyLock::new(Responses::default);
    leave_unread(OUTSIDE, &RESPONSES);
}

/// Requests many responses of the server at this port, and reads none.
fn leave_unread(port: u16, responses: &'static Responses) {
    if let Err(reason) = enter_namespace() {
        return skip(&reason);
    }
    accept_streams(port, 100, Some(responses));
    let proxy = Proxy::start();
    // GET / of http://a.
    let attack = requests(END_HEADERS | END_STREAM, b"\x82\x84\x86\x41\x01a");
    let accepted: Vec<_> = (0..100)
        .filter_map(|number| {
            let mut stream = connect_to(number, port).ok()?;
            stream.write_all(&attack).ok()?;
            is_acknowledged(&stream).then_some(stream)
        })
        .collect();
    let begun = || responses.begun.load(Relaxed);
    // The proxy serves other connections, and takes no more of these responses.
    proxy.wait("the application cannot send more", || {
        let sent = responses.sent.load(Relaxed);
        for _ in 0..50 {
            is_served();
        }
        begun() >= 300 && responses.sent.load(Relaxed) == sent
    });
    let (count, peak) = (accepted.len(), proxy.peak() / MIB);
    assert!(
        peak < LIMIT / MIB,
        "{peak} MiB were resident for {} responses of {count} connections",
        begun()
    );
}

#[test]
fn streams_without_an_end_stay_within_the_memory_limit() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    if let Err(reason) = enter_namespace() {
        return skip(&reason);
    }
    accept_streams(APP.1, u32::MAX, None);
    let proxy = Proxy::start();
    // POST / of http://a, whose body does not follow.
    let attack = requests(END_HEADERS, b"\x83\x84\x86\x41\x01a");
    // The memory of streams that have ended is used again.
    for _ in 0..4 {
        let accepted: Vec<_> = (0..300)
            .filter_map(|number| {
                let mut stream = connect(number).ok()?;
                stream.write_all(&attack).ok()?;
                is_acknowledged(&stream).then_some(stream)
            })
            .collect();
        let (count, peak) = (accepted.len(), proxy.peak() / MIB);
        assert!(
            peak < LIMIT / MIB,
            "{peak} MiB were resident for {count} connections"
        );
        assert!(count > 5, "{count} connections were accepted");
    }
}
