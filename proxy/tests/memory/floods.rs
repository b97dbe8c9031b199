//! The floods of one client with many addresses against a proxy in a memory control group of its own,
//! as in a container: no flood, and not all together, reaches the limit or leaves memory behind.
//! `--ignored` runs each flood alone and all together with each limit.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_testkit::memory::MemoryGroup;
use proto::discover_request::Action;
use proto::discover_response::Update;

use super::fragments::{ALLOWED, Fragments, HostileClient, HostileServer};
use super::secure::control::testing::{CONTROLLER, FakeController, FakeStream, Mounted, Signing};
use super::secure::identity::testing::{Authority, WEB, token};
use super::*;

/// The memory that may stay after a flood.
const MAX_REST: u64 = 8 * MIB;

/// The addresses of a flood, fewer than the slots of the smallest limit.
const ADDRESSES: usize = 40;

/// The connections that a flood holds open.
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

/// The endpoint of [`SERVICE`], a server that floods its handshakes. The kernel connects to it from
/// another address, as to another pod.
const ENDPOINT: ([u8; 4], u16) = ([127, 0, 0, 2], 30_000);
const ALPN: &[u8] = b"diy-mesh/http1";

/// Sends so many fragments that the proxy keeps them, or more, which it does not.
fn send_fragments(stream: &mut TcpStream, fragments: &mut Fragments, is_long: bool) {
    let count = if is_long { 16 * ALLOWED } else { ALLOWED };
    for _ in 0..count {
        // The proxy closes the connection of a handshake that is too long.
        if stream.write_all(&fragments.next()).is_err() {
            return;
        }
    }
}

fn unfinished_handshakes_of_clients() -> Held {
    let handshake = |number| {
        let mut stream = connect(20_000 + number % ADDRESSES).ok()?;
        let mut client = HostileClient::new(ALPN);
        stream.write_all(&client.hello()).ok()?;
        let mut fragments = loop {
            let mut bytes = [0; 4096];
            let read = stream.read(&mut bytes).ok().filter(|read| *read > 0)?;
            if let Some(fragments) = client.receive(&bytes[..read]) {
                break fragments;
            }
        };
        send_fragments(&mut stream, &mut fragments, number % 2 == 1);
        Some(stream)
    };
    let held: Held = (0..1000).filter_map(handshake).collect();
    assert!(held.len() > 10, "{} handshakes have begun", held.len());
    held
}

/// Requests of the application to [`SERVICE`].
fn unfinished_handshakes_of_servers() -> Held {
    let before = FLOODED.load(Relaxed);
    let connection = |number| {
        let mut stream = connect_to(24_000 + number % ADDRESSES, SERVICE).ok()?;
        let sent = stream.write_all(b"GET / HTTP/1.1\r\nHost: cart\r\n\r\n");
        sent.ok().map(|()| stream)
    };
    let held = (0..1000).filter_map(connection).collect();
    let end = Instant::now() + TEST_TIMEOUT;
    while FLOODED.load(Relaxed) < before + 100 {
        assert!(Instant::now() < end, "the proxy does not connect");
        thread::yield_now();
    }
    held
}

/// The number of handshakes that the endpoint of [`SERVICE`] has flooded.
static FLOODED: AtomicUsize = AtomicUsize::new(0);

/// Floods a handshake as a server.
fn flood_client(mut stream: TcpStream, mut server: HostileServer) -> Option<()> {
    let (hello, mut fragments) = loop {
        let mut bytes = [0; 4096];
        let read = stream.read(&mut bytes).ok().filter(|read| *read > 0)?;
        if let Some(begun) = server.receive(&bytes[..read]) {
            break begun;
        }
    };
    stream.write_all(&hello).ok()?;
    let number = FLOODED.fetch_add(1, Relaxed);
    send_fragments(&mut stream, &mut fragments, number % 2 == 1);
    // Until the proxy closes the connection.
    while stream.read(&mut [0; 4096]).ok()? > 0 {}
    Some(())
}

async fn answer_subscriptions(mut stream: FakeStream, answer: impl Fn(&str) -> Update) {
    while let Ok(Some(request)) = stream.requests.message().await {
        if let Some(Action::Subscribe(subscribe)) = request.action {
            let update = answer(&subscribe.name);
            stream.respond(&subscribe.name, "1", update).await;
        }
    }
}

/// Starts a controller, and the endpoint of [`SERVICE`]. Returns the arguments of the proxy, and the
/// files that they name.
pub fn start_controller() -> (Vec<String>, Mounted) {
    let authority = Arc::new(Authority::new("root"));
    let (certificate, key) = authority.leaf_and_key(WEB, |_| {});
    let listener = TcpListener::bind(SocketAddr::from(ENDPOINT)).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let server = HostileServer::new(ALPN, certificate.clone(), key.serialize_der());
            thread::spawn(|| flood_client(stream.unwrap(), server));
        }
    });
    let mounted = Mounted::new(&authority, &token("system:serviceaccount:shop:web"));
    let endpoint = proto::Endpoint {
        address: SocketAddr::from(ENDPOINT).to_string(),
        identity: WEB.to_owned(),
        ..proto::Endpoint::default()
    };
    let service = proto::Snapshot {
        kind: proto::snapshot::Kind::Service.into(),
        endpoints: vec![endpoint],
        ..proto::Snapshot::default()
    };
    let name = SocketAddr::from((APP.0, SERVICE)).to_string();
    let answer = move |resource: &str| {
        if resource == name {
            Update::Snapshot(service.clone())
        } else {
            Update::Unknown(proto::Unknown::default())
        }
    };
    let address = SocketAddr::from(([127, 0, 0, 1], 8443));
    let (started, is_started) = std::sync::mpsc::channel();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut controller = FakeController::start_tls(address, &authority, CONTROLLER).await;
            controller.sign(Some(Signing {
                authority: authority.clone(),
                lifetime: Duration::from_secs(3600),
                roots_version: "1",
            }));
            started.send(()).unwrap();
            while let Some(stream) = controller.streams.recv().await {
                tokio::spawn(answer_subscriptions(stream, answer.clone()));
            }
        });
    });
    is_started.recv().unwrap();
    let arguments = vec![
        format!("--controller=https://{address}"),
        format!("--controller-identity={CONTROLLER}"),
        format!("--roots-file={}", mounted.roots_file().display()),
        format!("--token-file={}", mounted.token_file().display()),
    ];
    (arguments, mounted)
}

/// In an order in which the first ones leave memory to the others.
const FLOODS: [fn() -> Held; 7] = [
    unfinished_handshakes_of_servers,
    unfinished_handshakes_of_clients,
    unfinished_heads,
    unfinished_hellos,
    silent_connections,
    unread_responses,
    scanned_ports,
];

/// Whether the proxy has its certificate.
pub fn is_ready() -> bool {
    let Ok(mut client) = connect_to(7000, 4001) else {
        return false;
    };
    let sent = client.write_all(b"GET /ready HTTP/1.1\r\nHost: a\r\n\r\n");
    sent.is_ok() && answer(&client).starts_with("HTTP/1.1 200 ")
}

/// Runs these floods against a proxy with this limit.
fn withstands(floods: &[fn() -> Held], limit: u64, control: &[String]) -> Result<(), String> {
    let group = MemoryGroup::new(limit)?;
    let program = env!("CARGO_BIN_EXE_proxy");
    // The pages of the program count for whoever reads them first.
    std::fs::read(program).unwrap();
    let mut command = group.command(program);
    command.env_clear();
    let proxy = Proxy::spawn(command, control);
    proxy.wait("it has a certificate", is_ready);
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
    // Without the pages of the program: a flood does not add them.
    let rest = || proxy.anonymous().saturating_sub(idle);
    proxy.wait("the memory returns", || rest() < MAX_REST);
    eprintln!(
        "{} floods, limit {} MiB: {resident} MiB resident under attack, peak {} MiB, {} KiB stay",
        floods.len(),
        limit / MIB,
        peak / MIB,
        rest() / 1024
    );
    Ok(())
}

fn prepare() -> Result<(Vec<String>, Mounted), String> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    enter_namespace()?;
    static RESPONSES: LazyLock<Responses> = LazyLock::new(Responses::default);
    accept_streams(APP.1, 100, Some(&RESPONSES));
    Ok(start_controller())
}

#[test]
fn all_floods_together_stay_within_the_memory_limit_and_their_memory_returns() {
    let result = prepare().and_then(|(control, _files)| withstands(&FLOODS, 64 * MIB, &control));
    result.unwrap_or_else(|reason| skip(&reason));
}

#[test]
#[ignore = "takes minutes"]
fn each_flood_and_all_together_stay_within_each_memory_limit() {
    let (control, _files) = match prepare() {
        Ok(prepared) => prepared,
        Err(reason) => return skip(&reason),
    };
    for limit in [32, 64, 256] {
        for flood in &FLOODS {
            withstands(std::slice::from_ref(flood), limit * MIB, &control).unwrap();
        }
        withstands(&FLOODS, limit * MIB, &control).unwrap();
    }
}
