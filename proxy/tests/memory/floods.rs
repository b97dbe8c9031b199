//! The floods of one client with many addresses against a proxy in a memory control group of its own,
//! as in a container: no flood, and not all together, reaches the limit or leaves memory behind.
//! `--ignored` runs each flood alone and all together with each limit.

use std::io::Write;
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use super::*;

/// The memory that may stay after a flood.
const MAX_REST: u64 = 8 * MIB;
/// The time in which the other memory returns.
const MAX_RETURN: Duration = Duration::from_secs(30);

/// A control group with a memory limit, of version 1 or 2.
struct Group {
    path: PathBuf,
    is_v1: bool,
}

impl Group {
    /// None: this machine has no controller for memory that this process may use.
    fn new(limit: u64) -> Result<Self, String> {
        let root = PathBuf::from("/sys/fs/cgroup");
        let is_v1 = root.join("memory/memory.limit_in_bytes").exists();
        let name = format!("diy-mesh-{}-{limit}", std::process::id());
        let path = if is_v1 { root.join("memory") } else { root }.join(name);
        let group = Self { path, is_v1 };
        let file = match is_v1 {
            true => "memory.limit_in_bytes",
            false => "memory.max",
        };
        let failed = |error| format!("cannot create a memory control group: {error}");
        std::fs::create_dir(&group.path).map_err(failed)?;
        std::fs::write(group.path.join(file), limit.to_string()).map_err(failed)?;
        Ok(group)
    }

    fn read(&self, file: &str) -> Option<u64> {
        let text = std::fs::read_to_string(self.path.join(file)).ok()?;
        text.trim().parse().ok()
    }

    /// The largest memory so far. Version 1 counts socket buffers apart.
    fn peak(&self) -> u64 {
        let of = |file| self.read(file).unwrap();
        match self.is_v1 {
            true => of("memory.max_usage_in_bytes") + of("memory.kmem.tcp.max_usage_in_bytes"),
            false => of("memory.peak"),
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.path);
    }
}

/// The addresses of a flood, fewer than the slots of the smallest limit.
const ADDRESSES: usize = 40;

/// What a flood holds open.
type Held = Vec<TcpStream>;

/// Connections from [`ADDRESSES`] addresses that send these bytes.
fn connections(first: usize, count: usize, bytes: &[u8]) -> Held {
    let connection = |number| {
        let mut stream = connect(first + number % ADDRESSES).ok()?;
        // A rejected connection may be reset.
        let _ = stream.write_all(bytes);
        Some(stream)
    };
    (0..count).filter_map(connection).collect()
}

fn unfinished_heads() -> Held {
    let mut head = b"GET / HTTP/1.1\r\nHost: cart\r\nX: ".to_vec();
    head.resize(20_000, b'a');
    connections(0, 1000, &head)
}

fn unfinished_hellos() -> Held {
    let mut hello = vec![22, 3, 1, 0x40, 0, 1];
    hello.resize(16_000, 0);
    connections(4000, 1000, &hello)
}

fn silent_connections() -> Held {
    connections(8000, 1000, b"")
}

fn unread_responses() -> Held {
    let attack = requests(END_HEADERS | END_STREAM, b"\x82\x84\x86\x41\x01a");
    connections(12_000, 300, &attack)
}

fn scanned_ports() -> Held {
    let scan = |port| drop(connect_to(16_000, port));
    (10_000..14_000).for_each(scan);
    Held::new()
}

const FLOODS: [fn() -> Held; 5] = [
    unfinished_heads,
    unfinished_hellos,
    silent_connections,
    unread_responses,
    scanned_ports,
];

/// Runs these floods against a proxy with this limit.
fn withstands(floods: &[fn() -> Held], limit: u64) -> Result<(), String> {
    let group = Group::new(limit)?;
    let program = env!("CARGO_BIN_EXE_proxy");
    // The pages of the program count for whoever reads them first.
    std::fs::read(program).unwrap();
    let join = format!(
        "echo $$ > {}/cgroup.procs && exec \"$0\" \"$@\"",
        group.path.display()
    );
    let mut command = Command::new("sh");
    command.env_clear().args(["-c", &join, program]);
    let proxy = Proxy::spawn(command, &[]);
    let idle = proxy.anonymous();
    let held: Vec<Held> = floods.iter().map(|flood| flood()).collect();
    // Each client has its own address.
    for _ in 0..20 {
        proxy.wait("a client within its share gets an answer", is_served);
    }
    let resident = proxy.resident() / MIB;
    drop(held);
    let peak = group.peak();
    assert!(
        proxy.is_running(),
        "the proxy has ended: {} MiB at {} MiB",
        peak / MIB,
        limit / MIB
    );
    assert!(peak < limit, "{} MiB of {} MiB", peak / MIB, limit / MIB);
    // Without the pages of the program, which are not those of a flood.
    let rest = || proxy.anonymous().saturating_sub(idle);
    let end = Instant::now() + MAX_RETURN;
    proxy.wait("the memory returns", || {
        rest() < MAX_REST || Instant::now() > end
    });
    eprintln!(
        "{} floods, limit {} MiB: {resident} MiB resident under attack, peak {} MiB, {} KiB stay",
        floods.len(),
        limit / MIB,
        peak / MIB,
        rest() / 1024
    );
    assert!(rest() < MAX_REST, "{} MiB stay", rest() / MIB);
    Ok(())
}

fn prepare() -> Result<(), String> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    enter_namespace()?;
    static RESPONSES: LazyLock<Responses> = LazyLock::new(Responses::default);
    accept_streams(100, Some(&RESPONSES));
    Ok(())
}

#[test]
fn all_floods_together_stay_within_the_memory_limit_and_their_memory_returns() {
    let result = prepare().and_then(|()| withstands(&FLOODS, 64 * MIB));
    result.unwrap_or_else(|reason| skip(&reason));
}

#[test]
#[ignore = "takes minutes"]
fn each_flood_and_all_together_stay_within_each_memory_limit() {
    if let Err(reason) = prepare() {
        return skip(&reason);
    }
    for limit in [32, 64, 256] {
        for flood in &FLOODS {
            withstands(std::slice::from_ref(flood), limit * MIB).unwrap();
        }
        withstands(&FLOODS, limit * MIB).unwrap();
    }
}
