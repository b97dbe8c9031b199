//! Tests of calls to outside of the cluster: a worker with policies of egress, a name server, and
//! clients and servers over sockets.

mod external;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::Future;
use std::net::IpAddr;

use diy_mesh_proto::authorization::Authorization;
use diy_mesh_proto::mesh::v1 as proto;
use domain::base::iana::Rcode;
use domain::base::{Message, MessageBuilder, Rtype, Ttl};
use domain::rdata::{A, Aaaa};
use proto::authorization_policy::Action;
use proto::authorization_source::Kind;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::watch;

use super::*;
use crate::context::worker::{Worker, WorkerContext};
use crate::discovery::{Discovery, Place, Target, TargetKind};
use crate::egress::resolver::Resolver;
use crate::endpoint::EndpointInfo;
use crate::inbound::edges::day;
use crate::inbound::policy::{Caller, Policy};
use crate::path::connection::carry;
use crate::secure::io::Io;
use diy_mesh_model::exchange::Direction;
use diy_mesh_testkit::net::connected;
use diy_mesh_testkit::wait::{on_worker, until};

const NAME: &str = "api.example.test";
const DENIED: &str = "HTTP/1.1 403 Forbidden\r\n";

fn rule(destinations: &[&str]) -> proto::AuthorizationRule {
    let sources = destinations.iter().map(|text| proto::AuthorizationSource {
        kind: Some(if text.contains('/') {
            Kind::IpBlock((*text).to_owned())
        } else {
            Kind::Host((*text).to_owned())
        }),
    });
    proto::AuthorizationRule {
        revision: 1,
        sources: Some(proto::AuthorizationSources {
            sources: sources.collect(),
        }),
        ..proto::AuthorizationRule::default()
    }
}

/// A policy of egress: of each action, the destinations.
fn egress(rules: &[(Action, &[&str])], audit: bool) -> Arc<Policy> {
    let policies = rules
        .iter()
        .map(|(action, destinations)| proto::AuthorizationPolicy {
            name: "AuthorizationPolicy shop/egress".to_owned(),
            action: (*action).into(),
            audit,
            rules: vec![rule(destinations)],
            ..proto::AuthorizationPolicy::default()
        });
    let message = proto::Authorization {
        policies: policies.collect(),
        ..proto::Authorization::default()
    };
    Arc::new(Policy {
        egress: Some(Egress::new(Authorization::compile(&message))),
        ..Policy::default()
    })
}

fn allow(destinations: &[&str]) -> Arc<Policy> {
    egress(&[(Action::Allow, destinations)], false)
}

/// A name server: the addresses of each name, and the names that it was asked for.
#[derive(Clone, Default)]
struct Names {
    addresses: Rc<RefCell<HashMap<String, Vec<IpAddr>>>>,
    asked: Rc<RefCell<Vec<String>>>,
}

impl Names {
    async fn start(&self) -> SocketAddr {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let (address, names) = (socket.local_addr().unwrap(), self.clone());
        tokio::task::spawn_local(async move {
            let mut bytes = [0; 512];
            loop {
                let (read, client) = socket.recv_from(&mut bytes).await.unwrap();
                let answer = names.answer(&bytes[..read]);
                socket.send_to(&answer, client).await.unwrap();
            }
        });
        address
    }

    fn set(&self, name: &str, addresses: &[IpAddr]) {
        self.addresses
            .borrow_mut()
            .insert(name.to_owned(), addresses.to_vec());
    }

    fn answer(&self, bytes: &[u8]) -> Vec<u8> {
        let query = Message::from_octets(bytes).unwrap();
        let question = query.first_question().unwrap();
        let name = question.qname().to_string();
        self.asked.borrow_mut().push(name.clone());
        let builder = MessageBuilder::new_vec();
        let mut answer = builder.start_answer(&query, Rcode::NOERROR).unwrap();
        for address in self.addresses.borrow().get(&name).into_iter().flatten() {
            if let (IpAddr::V4(address), Rtype::A) = (address, question.qtype()) {
                let data = A::from(*address);
                answer
                    .push((question.qname(), Ttl::from_secs(0), data))
                    .unwrap();
            }
            if let (IpAddr::V6(address), Rtype::AAAA) = (address, question.qtype()) {
                let data = Aaaa::from(*address);
                answer
                    .push((question.qname(), Ttl::from_secs(0), data))
                    .unwrap();
            }
        }
        answer.finish()
    }
}

/// A server outside of the cluster, which counts its connections.
struct Server {
    address: SocketAddr,
    connections: Rc<Cell<usize>>,
}

impl Server {
    /// Two servers with the same port, which no other test has.
    async fn pair() -> [Self; 2] {
        loop {
            let first = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let port = first.local_addr().unwrap().port();
            if let Ok(second) = TcpListener::bind(("127.0.0.2", port)).await {
                return [Self::of(first), Self::of(second)];
            }
        }
    }

    fn of(listener: TcpListener) -> Self {
        let address = listener.local_addr().unwrap();
        let connections = Rc::new(Cell::new(0));
        let counted = connections.clone();
        tokio::task::spawn_local(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                counted.set(counted.get() + 1);
                tokio::task::spawn_local(async move {
                    let mut bytes = [0; 4096];
                    while let Ok(read @ 1..) = stream.read(&mut bytes).await {
                        let body = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n".as_bytes();
                        let is_head = bytes[..read].ends_with(b"\r\n\r\n");
                        let answer = if is_head { body } else { &bytes[..read] };
                        stream.write_all(answer).await.unwrap();
                    }
                });
            }
        });
        Self {
            address,
            connections,
        }
    }

    fn connections(&self) -> usize {
        self.connections.get()
    }
}

/// A pod with a policy, two servers at one port (what the application dials, and what its name has),
/// and a name server.
struct Pod {
    worker: Rc<Worker>,
    policy: watch::Sender<Option<Arc<Policy>>>,
    names: Names,
    dialed: Server,
    named: Server,
}

impl Pod {
    async fn new(policy: Arc<Policy>) -> Self {
        Self::with(policy, Discovery::with_policy).await
    }

    async fn with(
        policy: Arc<Policy>,
        discovery: impl FnOnce(watch::Receiver<Option<Arc<Policy>>>) -> Discovery,
    ) -> Self {
        Self::with_arguments("", policy, discovery).await
    }

    async fn with_arguments(
        arguments: &str,
        policy: Arc<Policy>,
        discovery: impl FnOnce(watch::Receiver<Option<Arc<Policy>>>) -> Discovery,
    ) -> Self {
        let [dialed, named] = Server::pair().await;
        let (sender, receiver) = watch::channel(Some(policy));
        let mut worker = Worker::new(WorkerContext {
            discovery: discovery(receiver),
            ..WorkerContext::for_a_test(arguments)
        });
        let names = Names::default();
        names.set(NAME, &[named.address.ip()]);
        let own = Rc::get_mut(&mut worker).expect("the only one");
        own.resolver = Resolver::of(names.start().await);
        let maintained = worker.clone();
        tokio::task::spawn_local(async move { maintained.maintain_until_drained().await });
        tokio::task::yield_now().await;
        let pod = Self {
            worker,
            policy: sender,
            names,
            dialed,
            named,
        };
        pod.wait_for(1).await;
        pod
    }

    /// Waits until the worker has so many versions of the policy.
    async fn wait_for(&self, version: u64) {
        until(|| self.worker.policy_version() >= version).await;
    }

    async fn set(&self, policy: Arc<Policy>) {
        let version = self.worker.policy_version();
        self.policy.send_replace(Some(policy));
        self.wait_for(version + 1).await;
    }

    fn flow(&self, peer: SocketAddr, destination: Rc<Backend>) -> Flow {
        Flow {
            called_by: Default::default(),
            counted: Default::default(),
            slot: self.worker.slot(),
            worker: self.worker.clone(),
            direction: Direction::Outbound,
            peer,
            original: self.dialed.address,
            destination,
            caller: Caller::App,
        }
    }

    /// A connection of the application to the server that it dials.
    async fn connect(&self) -> TcpStream {
        let address = self.dialed.address;
        let destination = self.worker.destinations.get_or_watch(address).await;
        self.connect_to(destination).await
    }

    async fn connect_to(&self, destination: Rc<Backend>) -> TcpStream {
        let (client, stream) = connected().await;
        let peer = stream.peer_addr().unwrap();
        tokio::task::spawn_local(carry(Io::new(stream), self.flow(peer, destination)));
        client
    }

    /// The response to a request with this host.
    async fn get(&self, host: &str) -> String {
        request(&mut self.connect().await, host).await
    }

    /// The connections that the two servers got.
    fn connections(&self) -> (usize, usize) {
        (self.dialed.connections(), self.named.connections())
    }
}

async fn request(client: &mut TcpStream, host: &str) -> String {
    let head = format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    client.write_all(head.as_bytes()).await.unwrap();
    let mut response = String::new();
    client.read_to_string(&mut response).await.unwrap();
    response
}

/// A ClientHello with this server name.
fn client_hello(name: &str) -> Vec<u8> {
    let config = rustls::ClientConfig::builder()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let name = name.to_owned().try_into().unwrap();
    let mut client = rustls::ClientConnection::new(config.into(), name).unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    bytes
}

/// The ClientHello with one more extension that has a server name: one for it, with the type 0.
fn with_name(mut hello: Vec<u8>, kind: u8, name: &str) -> Vec<u8> {
    let length = |bytes: &[u8]| usize::from(u16::from_be_bytes([bytes[0], bytes[1]]));
    let add = |bytes: &mut [u8], more: usize| {
        let sum = length(bytes) + more;
        bytes.copy_from_slice(&u16::try_from(sum).unwrap().to_be_bytes());
    };
    // Record and message, version and random, session, cipher suites, compression methods.
    let ciphers = 44 + usize::from(hello[43]);
    let methods = ciphers + 2 + length(&hello[ciphers..]);
    let extensions = methods + 1 + usize::from(hello[methods]);
    let size = u8::try_from(name.len()).unwrap();
    let mut extension = vec![kind, kind, 0, size + 5, 0, size + 3, 0, 0, size];
    extension.extend_from_slice(name.as_bytes());
    for at in [3, 7, extensions] {
        add(&mut hello[at..at + 2], extension.len());
    }
    hello.extend_from_slice(&extension);
    hello
}

/// Whether the server returns these bytes.
async fn is_echoed(client: &mut TcpStream, sent: &[u8]) -> bool {
    let mut returned = vec![0; sent.len()];
    let is_sent = client.write_all(sent).await.is_ok();
    is_sent && client.read_exact(&mut returned).await.is_ok() && returned == sent
}

#[test]
fn closed_egress_reaches_only_what_is_allowed() {
    on_worker(async {
        let pod = Pod::new(allow(&["192.0.2.0/24"])).await;
        let response = pod.get("web").await;
        assert!(response.starts_with(DENIED), "{response}");
        assert!(
            response.contains("x-mesh-error: egress-denied"),
            "{response}"
        );
        let reason = "denied by AuthorizationPolicy shop/egress: no rule matches";
        assert!(response.contains(reason), "{response}");
        // The denial names the host, and what does not match.
        assert!(response.contains("\nweb at 127.0.0.1:"), "{response}");
        assert!(response.contains("but for its destinations"), "{response}");
        assert!(!is_echoed(&mut pod.connect().await, b"\0\0ping").await);
        assert_eq!(pod.connections(), (0, 0));
        pod.set(allow(&["127.0.0.1/32"])).await;
        assert!(pod.get("web").await.starts_with("HTTP/1.1 200"));
        assert!(is_echoed(&mut pod.connect().await, b"\0\0ping").await);
        pod.set(egress(
            &[
                (Action::Allow, &["127.0.0.0/8"]),
                (Action::Deny, &["127.0.0.1/32"]),
            ],
            false,
        ))
        .await;
        assert!(pod.get("web").await.starts_with(DENIED));
        assert_eq!(pod.connections(), (2, 0));
    });
}

#[test]
fn forged_host_or_server_name_leads_to_the_address_of_the_name() {
    on_worker(async {
        // The block stands for an address that is not local.
        let pod = Pod::new(allow(&[NAME, "127.0.0.2/32"])).await;
        assert!(pod.get(NAME).await.starts_with("HTTP/1.1 200"));
        assert!(
            pod.get("API.Example.test.")
                .await
                .starts_with("HTTP/1.1 200")
        );
        let (mut client, connection) = h2::client::handshake(pod.connect().await).await.unwrap();
        tokio::task::spawn_local(connection);
        let head = http::Request::get(format!("http://{NAME}/"))
            .body(())
            .unwrap();
        let (response, _) = client.send_request(head, true).unwrap();
        // The server speaks HTTP/1 only, and has got the connection.
        assert_eq!(response.await.unwrap().status(), 502);
        assert_eq!(pod.connections(), (0, 2));
        let denied = http::Request::get("http://evil.test/").body(()).unwrap();
        let (response, _) = client.send_request(denied, true).unwrap();
        let response = response.await.unwrap();
        assert_eq!(response.headers()["x-mesh-error"], "egress-denied");
        let hello = client_hello(NAME);
        assert!(is_echoed(&mut pod.connect().await, &hello).await);
        let unknown = with_name(client_hello(NAME), 0xfa, "evil.test");
        assert!(is_echoed(&mut pod.connect().await, &unknown).await);
        // In two records, each in pieces.
        let (record, rest) = hello[5..].split_at(100);
        let mut fragments = Vec::new();
        for part in [record, rest] {
            fragments.extend_from_slice(&hello[..3]);
            fragments.extend_from_slice(&u16::try_from(part.len()).unwrap().to_be_bytes());
            fragments.extend_from_slice(part);
        }
        let mut client = pod.connect().await;
        for piece in fragments.chunks(64) {
            client.write_all(piece).await.unwrap();
            tokio::task::yield_now().await;
        }
        let mut returned = vec![0; fragments.len()];
        client.read_exact(&mut returned).await.unwrap();
        assert_eq!(returned, fragments);
        let (dialed, named) = pod.connections();
        assert!(dialed == 0 && named >= 3, "{dialed} {named}");
    });
}

#[test]
fn what_has_no_allowed_name_is_denied_and_not_resolved() {
    on_worker(async {
        let pod = Pod::new(allow(&[NAME, "127.0.0.2/32"])).await;
        pod.names.set("evil.test", &[pod.named.address.ip()]);
        for host in [
            "evil.test",
            "127.0.0.1",
            "api.example.test.evil.test",
            "xapi.example.test",
        ] {
            assert!(pod.get(host).await.starts_with(DENIED), "{host}");
        }
        for bytes in [
            with_name(client_hello(NAME), 0, "evil.test"),
            with_name(client_hello("evil.test"), 0, NAME),
            client_hello("evil.test"),
            b"\0\0ping".to_vec(),
            b"SSH-2.0-x\r\n".to_vec(),
        ] {
            let mut client = pod.connect().await;
            client.write_all(&bytes).await.unwrap();
            client.shutdown().await.unwrap();
            assert!(!matches!(client.read(&mut [0]).await, Ok(1..)));
        }
        assert_eq!(pod.connections(), (0, 0));
        assert!(pod.names.asked.borrow().is_empty());
    });
}

#[test]
fn chosen_address_stays_while_the_name_has_it() {
    on_worker(async {
        let pod = Pod::new(allow(&[NAME, "127.0.0.2/31"])).await;
        let both = [pod.named.address.ip(), pod.dialed.address.ip()];
        // The block allows neither 127.0.0.1 nor, without it, a name that leads there.
        pod.names.set(NAME, &both);
        let to = |host: &str| {
            let host = host.to_owned();
            let pod = &pod;
            async move {
                let mut backend = pod
                    .worker
                    .destinations
                    .get_or_watch(pod.dialed.address)
                    .await;
                let flow = pod.flow(pod.dialed.address, backend.clone());
                let mut permit = flow.authorize_connection().unwrap();
                let found = find(&flow, Some(host), &mut backend, &mut permit).await;
                found.map(|_| permit.into_named().map(|to| to.address))
            }
        };
        assert_eq!(to(NAME).await.unwrap(), Some(pod.named.address));
        pod.set(egress(&[(Action::Allow, &[NAME])], false)).await;
        let denied = to(NAME).await.unwrap_err().to_string();
        assert!(denied.contains("local or of the cluster"), "{denied}");
        // Addresses that are neither local nor private, while the controller does not answer.
        let mut others = vec![
            "45.51.100.1".parse().unwrap(),
            "45.51.100.2".parse().unwrap(),
        ];
        pod.names.set("*.other.test", &others);
        pod.names.set("a.other.test", &others);
        pod.set(allow(&["*.other.test"])).await;
        let port = pod.dialed.address.port();
        let first = SocketAddr::new(others[0], port);
        assert_eq!(to("a.other.test").await.unwrap(), Some(first));
        others.rotate_left(1);
        pod.names.set("b.other.test", &others);
        let second = SocketAddr::new(others[0], port);
        assert_eq!(to("b.other.test").await.unwrap(), Some(second));
        pod.names
            .set("c.other.test", &["10.0.0.1".parse().unwrap()]);
        let denied = to("c.other.test").await.unwrap_err().to_string();
        assert!(denied.contains("c.other.test at 10.0.0.1"), "{denied}");
        let missing = to("d.other.test").await.unwrap_err();
        assert_eq!(missing.code().label(), "unresolved");
    });
}

#[test]
fn no_name_leads_to_an_address_of_the_cluster() {
    on_worker(async {
        let (_sender, policy) = watch::channel(Some(allow(&["*.example.test"])));
        let (discovery, mut questions) = Discovery::by_hand_with(policy.clone());
        let mut worker = Worker::new(WorkerContext {
            discovery,
            ..WorkerContext::for_a_test("")
        });
        let names = Names::default();
        Rc::get_mut(&mut worker).unwrap().resolver = Resolver::of(names.start().await);
        let maintained = worker.clone();
        tokio::task::spawn_local(async move { maintained.maintain_until_drained().await });
        until(|| worker.policy_version() > 0).await;
        let of_place = |place| Target {
            place,
            ..Target::default()
        };
        let chosen: SocketAddr = "203.0.113.9:443".parse().unwrap();
        let known: [(&str, Target, bool); 6] = [
            ("45.51.100.1", of_place(Place::Outside), true),
            ("10.0.0.1", of_place(Place::Outside), true),
            ("45.51.100.2", of_place(Place::Node), false),
            ("45.51.100.3", TargetKind::Pod.into(), false),
            ("45.51.100.4", TargetKind::Service.into(), false),
            ("45.51.100.5", TargetKind::Withheld.into(), false),
        ];
        let answers: HashMap<SocketAddr, Target> = known
            .iter()
            .map(|(ip, target, _)| (SocketAddr::new(ip.parse().unwrap(), 443), target.clone()))
            .chain([(chosen, of_place(Place::Outside))])
            .collect();
        tokio::task::spawn_local(async move {
            let mut senders = Vec::new();
            loop {
                let (resource, answer) = questions.next().await;
                let target = answers[&resource.address().unwrap()].clone();
                senders.push(answer(Arc::new(target)));
            }
        });
        for (number, (ip, _, is_allowed)) in known.into_iter().enumerate() {
            let name = format!("n{number}.example.test");
            names.set(&name, &[ip.parse().unwrap()]);
            let mut backend = worker.destinations.get_or_watch(chosen).await;
            let flow = Flow {
                called_by: Default::default(),
                counted: Default::default(),
                slot: worker.slot(),
                worker: worker.clone(),
                direction: Direction::Outbound,
                peer: chosen,
                original: chosen,
                destination: backend.clone(),
                caller: Caller::App,
            };
            let mut permit = flow.authorize_connection().unwrap();
            let found = find(&flow, Some(name), &mut backend, &mut permit).await;
            assert_eq!(found.is_ok(), is_allowed, "{ip}");
            let found = permit.into_named().map(|to| to.address.ip());
            assert_eq!(found, is_allowed.then(|| ip.parse().unwrap()));
        }
    });
}

#[test]
fn names_that_cannot_be_resolved_leave_room_for_others() {
    on_worker(async {
        let pod = Pod::new(allow(&["*.test", "127.0.0.2/32"])).await;
        let silent = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let failing = Resolver::of(silent.local_addr().unwrap());
        // More names than are kept, each of a call that ends before there is an answer.
        for number in 0..300 {
            let name = format!("n{number}.test");
            let call = std::pin::pin!(failing.resolve(&name, false));
            let none = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(call.poll(&mut { none }).is_pending());
        }
        assert!(failing.keeps("a.test"), "the cache has room again");
        let names = || pod.names.asked.borrow().len();
        for _ in 0..2 {
            assert!(pod.get(NAME).await.starts_with("HTTP/1.1 200"));
            assert_eq!(names(), 1);
        }
    });
}

#[test]
fn what_is_allowed_is_an_edge_by_its_name_or_address() {
    on_worker(async {
        let pod = Pod::new(allow(&[NAME, "127.0.0.2/32"])).await;
        let port = pod.dialed.address.port();
        let seen = || {
            let today = day(std::time::SystemTime::now());
            let message = pod.worker.metrics.edges.unsent(&mut None, today).unwrap();
            let edges = message.edges.into_iter().map(|edge| edge.destination);
            edges.collect::<Vec<_>>()
        };
        assert!(pod.get("evil.test").await.starts_with(DENIED));
        assert!(seen().is_empty());
        pod.get(NAME).await;
        assert_eq!(seen(), [format!("{NAME}:{port}")]);
        pod.set(Arc::default()).await;
        assert!(is_echoed(&mut pod.connect().await, &client_hello("web.test")).await);
        assert!(is_echoed(&mut pod.connect().await, b"\0\0ping").await);
        let expected = [NAME, "web.test", "127.0.0.1"];
        assert_eq!(seen(), expected.map(|host| format!("{host}:{port}")));
    });
}

#[test]
fn silent_client_causes_no_connection_that_is_not_allowed() {
    on_worker(async {
        let pod = Pod::new(allow(&["192.0.2.0/24"])).await;
        let mut client = pod.connect().await;
        client.shutdown().await.unwrap();
        assert!(!matches!(client.read(&mut [0]).await, Ok(1..)));
        assert_eq!(pod.connections(), (0, 0));
    });
}

#[test]
fn later_policy_ends_what_it_denies() {
    on_worker(async {
        let pod = Pod::new(allow(&[NAME, "127.0.0.0/8"])).await;
        let mut opaque = pod.connect().await;
        assert!(is_echoed(&mut opaque, b"\0\0ping").await);
        let mut http = pod.connect().await;
        http.write_all(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n")
            .await
            .unwrap();
        let mut bytes = [0; 38];
        http.read_exact(&mut bytes).await.unwrap();
        pod.set(allow(&["192.0.2.0/24"])).await;
        // It ends without another byte.
        assert!(!matches!(opaque.read(&mut [0]).await, Ok(1..)));
        assert!(request(&mut http, "web").await.starts_with(DENIED));
    });
}

#[test]
fn endpoint_of_a_service_that_is_no_pod_needs_the_permission() {
    on_worker(async {
        let pod = Pod::new(allow(&["192.0.2.0/24"])).await;
        let backend = |outside| {
            let info = EndpointInfo {
                outside,
                ..EndpointInfo::bare(pod.dialed.address)
            };
            let target = Target {
                kind: TargetKind::Service,
                endpoints: vec![Arc::new(info)],
                ..Target::default()
            };
            let (_, updates) = watch::channel(Arc::new(target));
            let service: SocketAddr = "10.96.0.7:80".parse().unwrap();
            Rc::new(Backend::watched(service, updates, &Rc::default()))
        };
        let denied = request(&mut pod.connect_to(backend(true)).await, "web").await;
        assert!(denied.starts_with(DENIED), "{denied}");
        assert!(!is_echoed(&mut pod.connect_to(backend(true)).await, b"\0\0ping").await);
        assert_eq!(pod.connections(), (0, 0));
        let response = request(&mut pod.connect_to(backend(false)).await, "web").await;
        assert!(response.starts_with("HTTP/1.1 200"), "{response}");
        pod.set(allow(&["127.0.0.1/32"])).await;
        let response = request(&mut pod.connect_to(backend(true)).await, "web").await;
        assert!(response.starts_with("HTTP/1.1 200"), "{response}");
    });
}

#[test]
fn nothing_outside_is_reached_before_the_first_configuration() {
    on_worker(async {
        let pending = Policy {
            pending: true,
            ..Policy::default()
        };
        let pod = Pod::new(Arc::new(pending)).await;
        let response = pod.get("web").await;
        assert!(response.contains("x-mesh-error: not-ready"), "{response}");
        assert_eq!(pod.connections(), (0, 0));
    });
}

#[test]
fn policies_under_audit_deny_nothing_and_are_counted() {
    on_worker(async {
        let pod = Pod::new(egress(&[(Action::Allow, &[NAME])], true)).await;
        let counts = |count: u32| {
            let labels = "direction=\"outbound\",verdict=\"would-deny\"";
            let sample = format!("verdicts_total{{{labels}}} {count}\n");
            pod.worker.metrics.render().contains(&sample)
        };
        assert!(pod.get("web").await.starts_with("HTTP/1.1 200"));
        assert!(counts(1));
        assert!(pod.get(NAME).await.starts_with("HTTP/1.1 200"));
        assert!(is_echoed(&mut pod.connect().await, &client_hello(NAME)).await);
        assert!(counts(1));
        assert!(is_echoed(&mut pod.connect().await, &client_hello("web.test")).await);
        assert!(counts(2));
    });
}
