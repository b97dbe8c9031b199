//! Calls to the pod, and its calls to outside of the cluster: the kinds of calls (edges) of the
//! day, without duplicates. Workers add edges that they have not seen on that day, discovery sends
//! them to the controller.
//!
//! Callers choose most of an edge, the application chooses destinations. A full table drops new
//! edges and keeps known ones. Destinations have a share of their own.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::hash::BuildHasher as _;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use diy_mesh_proto::authorization::edge::{self, is_valid};
use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_proto::{MAX_EDGES, MAX_EDGES_BYTES};
use foldhash::fast::RandomState;
use http::StatusCode;
use prometheus_client::metrics::counter::Counter;
use prost::Message as _;
use proto::edge::Path;

use crate::http::view::{Fields, RequestView};
use crate::inbound::policy::{Client, Policies};

/// Paths of a port, other than patterns of policies. Further ones are not told apart.
const MAX_PATHS: usize = 64;
/// Edges of one caller.
const MAX_CALLER_EDGES: usize = MAX_EDGES / 4;
/// Destinations, and the bytes of their edges. The rest is for calls to the pod.
const MAX_DESTINATIONS: usize = MAX_EDGES / 4;
const MAX_DESTINATION_BYTES: usize = MAX_EDGES_BYTES / 8;
/// The encoded length of an edge besides its content, and of the rest of a message.
const EDGE_BYTES: usize = 4;
const REST_BYTES: usize = 16;
/// Edges and destinations that a worker remembers, those that were cut included.
const MAX_KNOWN: usize = 4 * MAX_EDGES;
const MAX_KNOWN_DESTINATIONS: usize = 4 * MAX_DESTINATIONS;
const SECONDS_PER_DAY: u64 = 24 * 3600;
/// The status of a gRPC call of a method that the application does not have.
const UNIMPLEMENTED: &[u8] = b"12";

/// Days of UTC since 1970.
pub fn day(now: SystemTime) -> u64 {
    let since = now.duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs() / SECONDS_PER_DAY)
}

/// The edges of the day, shared by all threads.
#[derive(Debug, Default)]
pub struct Edges {
    today: Mutex<Today>,
    /// Edges that had no room, and those without their path.
    cut: Counter,
}

#[derive(Debug, Default)]
struct Today {
    day: u64,
    /// In the order of their arrival.
    edges: Vec<proto::Edge>,
    known: HashSet<proto::Edge>,
    /// By port, those that are counted.
    paths: HashMap<u32, HashSet<Path>>,
    /// The number of edges by caller.
    callers: HashMap<String, usize>,
    calls: Share,
    destinations: Share,
    is_incomplete: bool,
}

/// The number of edges, and their bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    edges: usize,
    bytes: usize,
}

/// The bounds of calls and of destinations.
const MAX_SHARES: [Share; 2] = [
    Share {
        edges: MAX_EDGES - MAX_DESTINATIONS,
        bytes: MAX_EDGES_BYTES - MAX_DESTINATION_BYTES - REST_BYTES,
    },
    Share {
        edges: MAX_DESTINATIONS,
        bytes: MAX_DESTINATION_BYTES,
    },
];

/// The edges that the controller knows: the day, their number from the first one, and whether
/// others were cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent(u64, usize, bool);

impl Edges {
    /// No edges so far. `cut` counts edges without room.
    pub fn new(cut: Counter) -> Self {
        Self {
            cut,
            ..Self::default()
        }
    }

    fn add(&self, edge: proto::Edge, day: u64) {
        let mut today = self.begin(day);
        if !today.add(edge) {
            today.is_incomplete = true;
            self.cut.inc();
        }
    }

    /// The edges that the controller does not know, if something has changed. The first message of a
    /// stream and of a day may have none.
    pub fn unsent(&self, sent: &mut Option<Sent>, day: u64) -> Option<proto::Edges> {
        let today = self.begin(day);
        let all = Sent(today.day, today.edges.len(), today.is_incomplete);
        let Sent(_, count, _) = match sent.replace(all) {
            Some(before) if before == all => return None,
            before => before
                .filter(|before| before.0 == all.0)
                .unwrap_or(Sent(0, 0, false)),
        };
        Some(proto::Edges {
            edges: today.edges[count..].to_vec(),
            incomplete: today.is_incomplete,
        })
    }

    /// The edges of a day. A thread may be late.
    fn begin(&self, day: u64) -> MutexGuard<'_, Today> {
        let mut today = self.today.lock().unwrap_or_else(PoisonError::into_inner);
        if today.day < day {
            *today = Today {
                day,
                ..Today::default()
            };
        }
        today
    }
}

impl Today {
    /// Adds an edge. Returns whether the edges of the day contain it, with its path.
    fn add(&mut self, mut edge: proto::Edge) -> bool {
        let is_complete = is_valid(&edge) && self.has_room_for_path(&edge);
        if !is_complete {
            edge.path = None;
        }
        if self.known.contains(&edge) {
            return is_complete;
        }
        let is_call = edge.destination.is_empty();
        let silent = edge.silent.as_ref();
        let caller = silent.map_or(&edge.caller, |silent| &silent.caller);
        let of_caller = self.callers.get(caller).copied().unwrap_or_default();
        let [of_calls, of_destinations] = MAX_SHARES;
        let (share, most) = if is_call {
            (&mut self.calls, of_calls)
        } else {
            (&mut self.destinations, of_destinations)
        };
        let bytes = share.bytes + edge.encoded_len() + EDGE_BYTES;
        let has_room = share.edges < most.edges
            && bytes <= most.bytes
            && (!is_call || of_caller < MAX_CALLER_EDGES);
        if !has_room || !is_valid(&edge) {
            return false;
        }
        share.edges += 1;
        share.bytes = bytes;
        if is_call {
            self.callers.insert(caller.clone(), of_caller + 1);
        }
        if let Some(path) = counted_path(&edge) {
            let paths = self.paths.entry(edge.port).or_default();
            paths.insert(path.clone());
        }
        self.known.insert(edge.clone());
        self.edges.push(edge);
        is_complete
    }

    fn has_room_for_path(&self, edge: &proto::Edge) -> bool {
        let (Some(path), Some(paths)) = (counted_path(edge), self.paths.get(&edge.port)) else {
            return true;
        };
        paths.len() < MAX_PATHS || paths.contains(path)
    }
}

/// The path of an edge, unless it is a pattern of a policy.
fn counted_path(edge: &proto::Edge) -> Option<&Path> {
    let is_counted = |path: &&Path| matches!(path, Path::Segment(_) | Path::Grpc(_));
    edge.path.as_ref().filter(is_counted)
}

/// The edges that a worker has seen on this day.
#[derive(Debug)]
pub struct SeenEdges {
    all: Arc<Edges>,
    day: Cell<u64>,
    /// The hashes of those that need no further attention. Callers cannot predict them.
    known: RefCell<HashSet<u64, RandomState>>,
    /// The same of destinations, which the application chooses.
    destinations: RefCell<HashSet<u64, RandomState>>,
    state: RandomState,
}

/// An edge that the worker has not seen on this day, until the call is answered.
#[derive(Debug)]
pub struct NewEdge {
    hash: u64,
    edge: proto::Edge,
}

impl NewEdge {
    /// The edge of a connection on which the client has sent no byte.
    pub fn silent(self) -> Self {
        let proto::Edge {
            caller,
            port,
            block,
            ..
        } = self.edge;
        let edge = proto::Edge {
            silent: Some(proto::SilentConnection {
                caller,
                port,
                block,
            }),
            ..proto::Edge::default()
        };
        Self {
            hash: !self.hash,
            edge,
        }
    }
}

/// The values that determine an edge.
#[derive(Hash)]
struct Key<'a> {
    caller: Option<&'a str>,
    port: u16,
    block: String,
    method: &'a str,
    path: PathKey<'a>,
}

#[derive(Hash)]
enum PathKey<'a> {
    Unknown,
    Pattern(&'a proto::AuthorizedPath),
    Segment(&'a str),
    Grpc(&'a str),
}

impl SeenEdges {
    /// No edges so far.
    pub fn new(all: Arc<Edges>) -> Self {
        Self {
            all,
            day: Cell::new(day(SystemTime::now())),
            known: RefCell::default(),
            destinations: RefCell::default(),
            state: RandomState::default(),
        }
    }

    /// Forgets the edges of earlier days.
    pub fn follow(&self, now: SystemTime) {
        let today = day(now);
        if self.day.replace(today) != today {
            self.known.borrow_mut().clear();
            self.destinations.borrow_mut().clear();
        }
    }

    /// The edge of an allowed call, unless the worker has seen it. Without a request: of a
    /// connection that carries no HTTP.
    pub fn find(
        &self,
        client: Client<'_>,
        request: Option<&RequestView<'_>>,
        policies: Option<&Policies>,
    ) -> Option<Box<NewEdge>> {
        let key = Key {
            caller: client.caller.identity().map(|identity| identity.as_str()),
            port: client.port,
            block: client.block(request),
            method: request.map_or("", |request| edge::method(request.method)),
            path: request.map_or(PathKey::Unknown, |request| {
                PathKey::of(request, client.port, policies)
            }),
        };
        let hash = self.state.hash_one(&key);
        let is_known = self.known.borrow().contains(&hash);
        (!is_known).then(|| {
            Box::new(NewEdge {
                hash,
                edge: key.edge(),
            })
        })
    }

    /// The application has answered a request with this head.
    pub fn answered(&self, new: NewEdge, status: StatusCode, fields: &dyn Fields) {
        let is_found = match &new.edge.path {
            Some(Path::Segment(_)) => status != StatusCode::NOT_FOUND,
            Some(Path::Grpc(_)) => fields.field("grpc-status") != Some(UNIMPLEMENTED),
            Some(Path::Pattern(_)) | None => true,
        };
        if is_found {
            self.add(new);
        }
    }

    /// Adds an edge.
    pub fn add(&self, NewEdge { hash, edge }: NewEdge) {
        let mut known = self.known.borrow_mut();
        if known.len() < MAX_KNOWN {
            known.insert(hash);
        }
        self.all.add(edge, self.day.get());
    }

    /// Adds an allowed call to outside of the cluster, unless the worker has seen it: by the name that
    /// was allowed or, without one, by the address.
    pub fn add_destination(&self, name: Option<&str>, address: SocketAddr) {
        let (ip, port) = (address.ip().to_canonical(), address.port());
        let hash = self
            .state
            .hash_one((name, name.is_none().then_some(ip), port));
        {
            let mut known = self.destinations.borrow_mut();
            if known.contains(&hash) {
                return;
            }
            if known.len() < MAX_KNOWN_DESTINATIONS {
                known.insert(hash);
            }
        }
        let destination = name.map_or_else(
            || SocketAddr::new(ip, port).to_string(),
            |name| format!("{name}:{port}"),
        );
        let edge = proto::Edge {
            destination,
            ..proto::Edge::default()
        };
        self.all.add(edge, self.day.get());
    }
}

impl Client<'_> {
    /// The block of the address, for a client without an identity on a connection that carries no HTTP.
    /// Nothing else is known of this client.
    fn block(self, request: Option<&RequestView<'_>>) -> String {
        match self.caller.identity() {
            None if request.is_none() => edge::block(self.address),
            _ => String::new(),
        }
    }
}

impl<'a> PathKey<'a> {
    fn of(request: &RequestView<'a>, port: u16, policies: Option<&'a Policies>) -> Self {
        let path = request.path();
        if request.is_grpc() {
            return edge::grpc_path(path).map_or(Self::Unknown, Self::Grpc);
        }
        let pattern = policies.and_then(|policies| policies.pattern(port, path));
        let segment = || edge::segment(path).map_or(Self::Unknown, Self::Segment);
        pattern.map_or_else(segment, Self::Pattern)
    }
}

impl Key<'_> {
    fn edge(&self) -> proto::Edge {
        proto::Edge {
            caller: self.caller.unwrap_or_default().to_owned(),
            port: self.port.into(),
            block: self.block.clone(),
            method: self.method.to_owned(),
            path: match self.path {
                PathKey::Unknown => None,
                PathKey::Pattern(pattern) => Some(Path::Pattern(pattern.clone())),
                PathKey::Segment(segment) => Some(Path::Segment(segment.to_owned())),
                PathKey::Grpc(path) => Some(Path::Grpc(path.to_owned())),
            },
            ..proto::Edge::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderMap;

    use super::*;
    use crate::http::view::testing::request;
    use crate::inbound::policy::Caller;

    const CLIENT: Client<'_> = Client {
        caller: &Caller::Unauthenticated,
        address: std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST),
        port: 8080,
    };

    fn edge(caller: usize, segment: &str) -> proto::Edge {
        proto::Edge {
            caller: format!("spiffe://cluster.local/ns/shop/sa/c{caller}"),
            port: 8080,
            method: "GET".into(),
            path: Some(Path::Segment(segment.into())),
            ..proto::Edge::default()
        }
    }

    /// The message to a controller that knows no edges.
    fn all(edges: &Edges, day: u64) -> proto::Edges {
        edges.unsent(&mut None, day).expect("the first message")
    }

    #[test]
    fn each_edge_is_sent_once_a_day_and_on_each_stream() {
        let (edges, mut sent) = (Edges::default(), None);
        let paths = |sent: &mut Option<Sent>, day| {
            let message = edges.unsent(sent, day)?;
            Some(
                message
                    .edges
                    .into_iter()
                    .map(|edge| edge.path)
                    .collect::<Vec<_>>(),
            )
        };
        let path = |text: &str| Some(Path::Segment(text.into()));
        assert_eq!(paths(&mut sent, 1), Some(vec![]));
        assert_eq!(paths(&mut sent, 1), None);
        edges.add(edge(0, "/a"), 1);
        edges.add(edge(0, "/a"), 1);
        assert_eq!(paths(&mut sent, 1), Some(vec![path("/a")]));
        edges.add(edge(0, "/b"), 1);
        assert_eq!(paths(&mut sent, 1), Some(vec![path("/b")]));
        assert_eq!(paths(&mut sent, 1), None);
        assert_eq!(paths(&mut None, 1), Some(vec![path("/a"), path("/b")]));
        // A new day. A worker may notice it later.
        assert_eq!(paths(&mut sent, 2), Some(vec![]));
        edges.add(edge(0, "/b"), 1);
        assert_eq!(paths(&mut sent, 2), Some(vec![path("/b")]));
        assert_eq!(paths(&mut sent, 2), None);
    }

    #[test]
    fn hostile_callers_displace_nothing_and_messages_are_bounded() {
        let edges = Edges::default();
        edges.add(edge(0, "/first"), 1);
        let long = |number: usize| format!("/{number}-{}", "x".repeat(200));
        for number in 0..1000 {
            edges.add(edge(1, &long(number)), 1);
        }
        let message = all(&edges, 1);
        assert_eq!(message.edges[0], edge(0, "/first"));
        assert!(message.incomplete && edges.cut.get() > 0);
        // The others know that it calls.
        let without_path = proto::Edge {
            path: None,
            ..edge(1, "/")
        };
        assert_eq!(message.edges.len(), MAX_PATHS + 1);
        assert_eq!(message.edges.last(), Some(&without_path));
        for (caller, method) in (2..20).flat_map(|one| (0..200).map(move |method| (one, method))) {
            let pattern = proto::AuthorizedPath {
                kind: Some(proto::authorized_path::Kind::Exact(long(method))),
            };
            edges.add(
                proto::Edge {
                    path: Some(Path::Pattern(pattern)),
                    ..edge(caller, "/")
                },
                1,
            );
        }
        let message = all(&edges, 1);
        let of = |caller: usize| {
            let name = edge(caller, "/").caller;
            message
                .edges
                .iter()
                .filter(|edge| edge.caller == name)
                .count()
        };
        assert_eq!((of(0), of(2)), (1, MAX_CALLER_EDGES));
        assert!(message.edges.len() <= MAX_EDGES);
        assert!(message.encoded_len() <= MAX_EDGES_BYTES);
        assert!(message.encoded_len() > MAX_EDGES_BYTES / 2);
        // The next day, there is room again.
        edges.add(edge(7, "/late"), 2);
        let message = all(&edges, 2);
        assert_eq!(
            (message.edges, message.incomplete),
            (vec![edge(7, "/late")], false)
        );
    }

    /// The edge of an answered request, if it is new.
    fn call(seen: &SeenEdges, method: &str, path: &str, status: u16) -> bool {
        let new = seen.find(CLIENT, Some(&request(method, path)), None);
        let is_new = new.is_some();
        let status = StatusCode::from_u16(status).expect("a status");
        new.into_iter()
            .for_each(|new| seen.answered(*new, status, &HeaderMap::new()));
        is_new
    }

    #[test]
    fn requests_are_edges_once_they_are_answered_other_than_by_404() {
        let edges = Arc::new(Edges::default());
        let seen = SeenEdges::new(edges.clone());
        let today = seen.day.get();
        assert!(call(&seen, "GET", "/shop/a?q", 404) && call(&seen, "GET", "/shop/a?q", 404));
        assert_eq!(all(&edges, today).edges, []);
        assert!(call(&seen, "GET", "/shop/a?q", 500));
        assert!(!call(&seen, "GET", "/shop/b", 200));
        assert!(call(&seen, "BREW", "/shop/../admin", 200));
        assert!(!call(&seen, "brew", "/%2e/x", 404));
        let connection = seen.find(CLIENT, None, None).expect("it is new");
        seen.add(*connection);
        let lines = all(&edges, today).edges.into_iter();
        let lines = lines.map(|edge| (edge.method, edge.path, edge.block));
        let expected = [
            ("GET", Some(Path::Segment("/shop".into())), ""),
            ("OTHER", None, ""),
            ("", None, "127.0.0.0/24"),
        ];
        let expected =
            expected.map(|(method, path, block)| (method.to_owned(), path, block.to_owned()));
        assert_eq!(lines.collect::<Vec<_>>(), expected);
        seen.follow(UNIX_EPOCH + std::time::Duration::from_secs((today + 1) * SECONDS_PER_DAY));
        assert!(call(&seen, "GET", "/shop/b", 200));
        assert_eq!(all(&edges, today + 1).edges.len(), 1);
    }

    fn destinations(message: &proto::Edges) -> Vec<&str> {
        let all = message.edges.iter().map(|edge| &*edge.destination);
        all.filter(|destination| !destination.is_empty()).collect()
    }

    #[test]
    fn calls_to_outside_are_edges_by_name_or_address_once_a_day() {
        let edges = Arc::new(Edges::default());
        let seen = SeenEdges::new(edges.clone());
        let today = seen.day.get();
        for (name, address) in [
            (Some("api.example.com"), "203.0.113.1:443"),
            (Some("api.example.com"), "203.0.113.2:443"),
            (Some("api.example.com"), "203.0.113.1:80"),
            (None, "203.0.113.1:443"),
            (None, "[::ffff:203.0.113.1]:443"),
            (None, "[2001:db8::7]:443"),
        ] {
            let address = address.parse().expect("an address");
            seen.add_destination(name, address);
            seen.add_destination(name, address);
        }
        let expected = [
            "api.example.com:443",
            "api.example.com:80",
            "203.0.113.1:443",
            "[2001:db8::7]:443",
        ];
        let message = all(&edges, today);
        assert_eq!(destinations(&message), expected);
        assert!(message.edges.iter().all(is_valid) && !message.incomplete);
        assert_eq!(seen.destinations.borrow().len(), 4);
        seen.follow(UNIX_EPOCH + std::time::Duration::from_secs((today + 1) * SECONDS_PER_DAY));
        seen.add_destination(None, "203.0.113.1:443".parse().expect("an address"));
        assert_eq!(destinations(&all(&edges, today + 1)), ["203.0.113.1:443"]);
    }

    #[test]
    fn destinations_and_calls_do_not_displace_each_other() {
        let edges = Arc::new(Edges::default());
        let seen = SeenEdges::new(edges.clone());
        let today = seen.day.get();
        let address = "203.0.113.1:443".parse().expect("an address");
        let flood = |length: usize| {
            for number in 0..1000 {
                let name = format!("{number}-{}.example.com", "x".repeat(length));
                seen.add_destination(Some(&name), address);
            }
        };
        flood(1);
        let message = all(&edges, today);
        assert_eq!(destinations(&message).len(), MAX_DESTINATIONS);
        assert!(message.incomplete && edges.cut.get() > 0);
        assert_eq!(seen.destinations.borrow().len(), MAX_KNOWN_DESTINATIONS);
        // Calls still have their share, those without an identity too.
        for port in 1..=1000 {
            let method = if port % 2 == 0 { "GET" } else { "PUT" };
            let mut call = edge(port as usize / 100, "/a");
            (call.port, call.method) = (port, method.into());
            edges.add(call, today);
        }
        let message = all(&edges, today);
        assert_eq!(message.edges.len(), MAX_EDGES);
        assert!(message.encoded_len() <= MAX_EDGES_BYTES);
        // The other way around: calls leave the share of destinations.
        seen.follow(UNIX_EPOCH + std::time::Duration::from_secs((today + 1) * SECONDS_PER_DAY));
        for (caller, number) in (0..10).flat_map(|one| (0..MAX_PATHS).map(move |at| (one, at))) {
            let segment = format!("/{number}-{}", "x".repeat(240));
            edges.add(edge(caller, &segment), today + 1);
        }
        let calls = all(&edges, today + 1).edges.len();
        flood(50);
        let message = all(&edges, today + 1);
        let count = message.edges.len() - calls;
        assert!((100..MAX_DESTINATIONS).contains(&count), "{count}");
        assert!(message.encoded_len() <= MAX_EDGES_BYTES);
    }

    #[test]
    fn grpc_calls_are_edges_by_their_method_if_the_application_has_it() {
        let edges = Arc::new(Edges::default());
        let seen = SeenEdges::new(edges.clone());
        let head = http::Request::post("/").header("content-type", "application/grpc+proto");
        let head = diy_mesh_http2::Request::from(&head.body(()).expect("a request").into_parts().0);
        for (path, status) in [("/echo.Echo/Say", "0"), ("/echo.Echo/Else", "12")] {
            let request = RequestView {
                head: &head,
                version: http::Version::HTTP_2,
                ..request("POST", path)
            };
            let new = seen.find(CLIENT, Some(&request), None).expect("it is new");
            let trailers = http::Response::builder().header("grpc-status", status);
            let trailers = trailers.body(()).expect("a response").into_parts().0;
            seen.answered(*new, StatusCode::OK, &trailers.headers);
        }
        let message = all(&edges, seen.day.get());
        let paths: Vec<_> = message.edges.into_iter().map(|edge| edge.path).collect();
        assert_eq!(paths, [Some(Path::Grpc("/echo.Echo/Say".into()))]);
    }
}
