//! Tests of routes from the controller's message to the response: a fake controller, a worker, and
//! clients and applications over sockets, in both versions of HTTP.

mod authorization;
mod faults;
mod limits;
mod pod;
mod sessions;
mod telemetry;

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;

use bytes::Bytes;
use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_testkit::net::{connected, listen, read_head, read_until};
use diy_mesh_testkit::wait::{on_worker, soon, until};
use http::{Request, Response};
use proto::acknowledgement::Part;
use proto::{path_match, path_modifier, route_filter};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::context::flow::Flow;
use crate::context::worker::{Worker, WorkerContext};
use crate::inbound::policy::Caller;
use crate::path::connection::carry;
use crate::secure::control::testing::{FakeController, FakeStream};
use crate::secure::io::Io;
use crate::secure::tls::tests::freeze;
use crate::upstream::balance::Backend;
use diy_mesh_model::exchange::Direction;

mod connections;

const WEB: &str = "10.96.0.7:8080";

/// A worker whose destination [`WEB`] has routes.
struct Mesh {
    discovery: Discovery,
    worker: Rc<Worker>,
    destination: Rc<Backend>,
    /// The controller's end.
    controller: Rc<RefCell<Controller>>,
    acknowledgements: mpsc::UnboundedReceiver<Acknowledgement>,
    updates: mpsc::UnboundedSender<DiscoverResponse>,
}

#[derive(Default)]
struct Controller {
    backends: HashMap<String, SocketAddr>,
    subscribed: Vec<String>,
}

fn snapshot(endpoint: Option<SocketAddr>, routes: Option<proto::Routes>) -> Update {
    let endpoint = endpoint.map(|address| proto::Endpoint {
        address: address.to_string(),
        ..proto::Endpoint::default()
    });
    Update::Snapshot(proto::Snapshot {
        kind: proto::snapshot::Kind::Service.into(),
        namespace: "shop".to_owned(),
        name: "web".to_owned(),
        endpoints: endpoint.into_iter().collect(),
        routes,
        ..proto::Snapshot::default()
    })
}

fn routed(version: &str, routes: proto::Routes) -> DiscoverResponse {
    DiscoverResponse {
        name: WEB.to_owned(),
        version: version.to_owned(),
        update: Some(snapshot(None, Some(routes))),
        ..DiscoverResponse::default()
    }
}

impl Mesh {
    /// The routes are version 1.
    async fn new(routes: proto::Routes, backends: &[(&str, SocketAddr)]) -> Self {
        let mut fake = FakeController::start().await;
        let control = Control::new(fake.url(), None, None);
        let (trust, none) = (Trust::default(), crate::secure::identity::none());
        let exceptions = Arc::new(Exceptions::new(std::time::Instant::now()));
        let metrics = DiscoveryMetrics::default();
        let (discovery, driver) = start(
            control,
            trust,
            none,
            metrics,
            exceptions,
            OwnProxy::default(),
        );
        tokio::spawn(driver);
        let stream = fake.stream().await;
        let backends = backends.iter();
        let controller = Rc::new(RefCell::new(Controller {
            backends: backends.map(|(name, at)| (name.to_string(), *at)).collect(),
            ..Controller::default()
        }));
        let (acknowledge, acknowledgements) = mpsc::unbounded_channel();
        let (updates, receiver) = mpsc::unbounded_channel();
        let shared = controller.clone();
        tokio::task::spawn_local(async move {
            let _running = fake;
            control_proxy(stream, shared, routes, acknowledge, receiver).await;
        });
        let worker = Worker::new(WorkerContext {
            discovery: discovery.clone(),
            ..WorkerContext::for_a_test("")
        });
        let destination = worker.destinations.get_or_watch(WEB.parse().unwrap()).await;
        Self {
            discovery,
            worker,
            destination,
            controller,
            acknowledgements,
            updates,
        }
    }

    async fn connect(&self) -> TcpStream {
        let (client, stream) = connected().await;
        let flow = Flow {
            called_by: Default::default(),
            counted: Default::default(),
            slot: self.worker.slot(),
            worker: self.worker.clone(),
            direction: Direction::Outbound,
            peer: stream.peer_addr().unwrap(),
            original: self.destination.address().unwrap(),
            destination: self.destination.clone(),
            caller: Caller::App,
        };
        tokio::task::spawn_local(carry(Io::new(stream), flow));
        client
    }

    /// Sends an HTTP/1 request on a connection of its own. Returns the response.
    async fn http1(&self, head: &str) -> String {
        let mut client = self.connect().await;
        let request = format!("{head}\r\nHost: web:8080\r\nConnection: close\r\n\r\n");
        client.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        client.read_to_string(&mut response).await.unwrap();
        response
    }

    /// Sends an HTTP/2 request on a connection of its own. Returns the response and its body.
    async fn http2(&self, request: Request<()>) -> (Response<()>, String) {
        let (mut client, connection) = h2::client::handshake(self.connect().await).await.unwrap();
        tokio::task::spawn_local(connection);
        let (response, _) = client.send_request(request, true).unwrap();
        let (head, mut body) = response.await.unwrap().into_parts();
        let mut data = Vec::new();
        while let Some(chunk) = body.data().await {
            let chunk = chunk.unwrap();
            body.flow_control().release_capacity(chunk.len()).unwrap();
            data.extend_from_slice(&chunk);
        }
        (
            Response::from_parts(head, ()),
            String::from_utf8(data).unwrap(),
        )
    }

    /// The rejection of a version of the routes. Empty: it is in use.
    async fn rejection(&mut self, version: &str) -> String {
        let acknowledgement = soon(self.acknowledgements.recv()).await.unwrap();
        assert_eq!(
            (
                acknowledgement.name.as_str(),
                acknowledgement.version.as_str()
            ),
            (WEB, version)
        );
        let is_rejected = !acknowledgement.rejection.is_empty();
        assert_eq!(acknowledgement.part() == Part::Routes, is_rejected);
        acknowledgement.rejection
    }
}

/// The controller's end of the stream: answers subscriptions, and sends updates.
async fn control_proxy(
    mut stream: FakeStream,
    controller: Rc<RefCell<Controller>>,
    routes: proto::Routes,
    acknowledge: mpsc::UnboundedSender<Acknowledgement>,
    mut updates: mpsc::UnboundedReceiver<DiscoverResponse>,
) {
    loop {
        // Longer than a test: `soon` limits it.
        let action = tokio::select! {
            update = updates.recv() => match update {
                Some(update) => {
                    stream.send(update).await;
                    continue;
                }
                None => return,
            },
            action = stream.action() => action,
        };
        let subscribe = match action {
            Action::Subscribe(subscribe) => subscribe,
            Action::Acknowledgement(acknowledgement) => {
                let _ = acknowledge.send(acknowledgement);
                continue;
            }
            _ => continue,
        };
        let is_backend = subscribe.r#type() == ResourceType::Backend;
        let address = {
            let mut controller = controller.borrow_mut();
            controller.subscribed.push(subscribe.name.clone());
            controller.backends.get(&subscribe.name).copied()
        };
        let update = match (is_backend, address) {
            (false, _) => snapshot(None, Some(routes.clone())),
            (true, None) => Update::Unknown(proto::Unknown::default()),
            (true, address) => snapshot(address, None),
        };
        let response = DiscoverResponse {
            name: subscribe.name,
            r#type: subscribe.r#type,
            version: "1".to_owned(),
            update: Some(update),
            ..DiscoverResponse::default()
        };
        stream.send(response).await;
    }
}

/// The heads of the requests that an application got.
type Requests = Rc<RefCell<Vec<String>>>;

/// An HTTP/1 application that responds with its name.
async fn app(name: &'static str) -> (SocketAddr, Requests) {
    let (listener, address) = listen().await;
    let requests = Requests::default();
    let seen = requests.clone();
    tokio::task::spawn_local(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let seen = seen.clone();
            tokio::task::spawn_local(async move {
                while let Some(head) = read_head(&mut stream).await {
                    seen.borrow_mut().push(head);
                    let response = format!(
                        "HTTP/1.1 200 OK\r\nX-First: 1\r\nX-Old: 2\r\nContent-Length: {}\r\nX-Last: 3\r\n\r\n{name}",
                        name.len()
                    );
                    stream.write_all(response.as_bytes()).await.unwrap();
                }
            });
        }
    });
    (address, requests)
}

/// An HTTP/2 application that responds with its name.
async fn app2(name: &'static str) -> (SocketAddr, Requests) {
    let (listener, address) = listen().await;
    let requests = Requests::default();
    let seen = requests.clone();
    tokio::task::spawn_local(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let seen = seen.clone();
            tokio::task::spawn_local(async move {
                let Ok(mut connection) = h2::server::handshake(stream).await else {
                    return;
                };
                while let Some(Ok((request, mut respond))) = connection.accept().await {
                    let (parts, mut body) = request.into_parts();
                    let head = format!("{} {} {:?}", parts.method, parts.uri, parts.headers);
                    let seen = seen.clone();
                    tokio::task::spawn_local(async move {
                        let mut text = String::new();
                        while let Some(Ok(data)) = body.data().await {
                            text += std::str::from_utf8(&data).unwrap();
                        }
                        if let Ok(Some(trailers)) = body.trailers().await {
                            text += &format!("{trailers:?}");
                        }
                        seen.borrow_mut().push(head + &text);
                    });
                    let response = Response::builder().header("x-old", "2").body(()).unwrap();
                    let mut stream = respond.send_response(response, false).unwrap();
                    stream
                        .send_data(Bytes::from_static(name.as_bytes()), true)
                        .unwrap();
                }
            });
        }
    });
    (address, requests)
}

fn prefix(path: &str, rule: u32) -> proto::RouteMatch {
    let kind = Some(path_match::Kind::Prefix(path.to_owned()));
    proto::RouteMatch {
        rule,
        path: Some(proto::PathMatch { kind }),
        ..proto::RouteMatch::default()
    }
}

fn to(backends: &[(&str, u32)]) -> proto::RouteRule {
    let backend = |(name, weight): &(&str, u32)| proto::RouteBackend {
        name: name.to_string(),
        weight: *weight,
        ..proto::RouteBackend::default()
    };
    proto::RouteRule {
        name: "HTTPRoute shop/web".to_owned(),
        backends: backends.iter().map(backend).collect(),
        ..proto::RouteRule::default()
    }
}

fn filter(kind: route_filter::Kind) -> proto::RouteFilter {
    proto::RouteFilter { kind: Some(kind) }
}

fn field(name: &str, value: &str) -> proto::header_modifier::Field {
    proto::header_modifier::Field {
        name: name.to_owned(),
        value: value.to_owned(),
    }
}

fn routes(matches: Vec<proto::RouteMatch>, rules: Vec<proto::RouteRule>) -> proto::Routes {
    proto::Routes {
        matches,
        rules,
        grpc: false,
        ..proto::Routes::default()
    }
}

/// All requests to one rule.
fn one(rule: proto::RouteRule) -> proto::Routes {
    routes(vec![prefix("/", 0)], vec![rule])
}

fn new_prefix(path: &str) -> Option<proto::PathModifier> {
    let kind = Some(path_modifier::Kind::Prefix(path.to_owned()));
    Some(proto::PathModifier { kind })
}

fn body(response: &str) -> &str {
    response.split_once("\r\n\r\n").expect("a head").1
}

const V1: &str = "shop/web-v1:80";
const V2: &str = "shop/web-v2:80";

#[test]
fn canary_gets_its_share_of_http1_and_http2_requests() {
    on_worker(async {
        for http2 in [false, true] {
            let (one, two) = if http2 {
                (app2("one").await, app2("two").await)
            } else {
                (app("one").await, app("two").await)
            };
            let rules = vec![to(&[(V1, 90), (V2, 10)]), to(&[(V2, 1)])];
            let mesh = Mesh::new(
                routes(vec![prefix("/new", 1), prefix("/", 0)], rules),
                &[(V1, one.0), (V2, two.0)],
            )
            .await;
            mesh.worker.rng.borrow_mut().seed(7);
            let ask = async |path: &str| {
                if http2 {
                    let request = Request::get(format!("http://web{path}")).body(()).unwrap();
                    mesh.http2(request).await.1
                } else {
                    body(&mesh.http1(&format!("GET {path} HTTP/1.1")).await).to_owned()
                }
            };
            assert_eq!(ask("/new/page").await, "two");
            let mut canary = 0;
            for _ in 0..100 {
                canary += usize::from(ask("/").await == "two");
            }
            // Seeded: within four standard deviations of 10.
            assert!((1..=22).contains(&canary), "{canary} of 100");
            let mut subscribed = mesh.controller.borrow().subscribed.clone();
            subscribed.sort();
            assert_eq!(subscribed, [WEB, V1, V2], "one subscription each");
        }
    });
}

#[test]
fn requests_without_route_or_backend_get_404_and_500() {
    on_worker(async {
        let (app, _) = app("one").await;
        let rules = vec![to(&[("", 1)]), to(&[(V1, 1)]), to(&[(V2, 1)])];
        let matches = vec![
            prefix("/invalid", 0),
            prefix("/valid", 1),
            prefix("/gone", 2),
        ];
        let mesh = Mesh::new(routes(matches, rules), &[(V1, app)]).await;
        for (path, status, code, grpc) in [
            ("/", "404 Not Found", "no-route", "12"),
            (
                "/invalid",
                "500 Internal Server Error",
                "invalid-backend",
                "14",
            ),
            ("/gone", "503 Service Unavailable", "no-endpoint", "14"),
        ] {
            let response = mesh.http1(&format!("GET {path} HTTP/1.1")).await;
            assert!(
                response.starts_with(&format!("HTTP/1.1 {status}\r\n")),
                "{response}"
            );
            assert!(
                response.contains(&format!("\r\nx-mesh-error: {code}\r\n")),
                "{response}"
            );
            let call = Request::post(format!("http://web{path}"))
                .header("content-type", "application/grpc")
                .body(());
            let (head, _) = mesh.http2(call.unwrap()).await;
            assert_eq!(head.status(), 200);
            assert_eq!(head.headers()["grpc-status"], grpc, "{path}");
            assert_eq!(head.headers()["x-mesh-error"], code);
        }
        assert_eq!(body(&mesh.http1("GET /valid HTTP/1.1").await), "one");
    });
}

#[test]
fn rejected_routes_leave_the_last_good_ones_in_force() {
    on_worker(async {
        let (app, _) = app("one").await;
        let unknown_filter = proto::RouteRule {
            filters: vec![proto::RouteFilter { kind: None }],
            ..to(&[(V1, 1)])
        };
        let mut mesh = Mesh::new(one(unknown_filter.clone()), &[(V1, app)]).await;
        let reason = mesh.rejection("1").await;
        assert!(
            reason.contains("rule 0") && reason.contains("unknown kind of filter"),
            "{reason}"
        );
        let response = mesh.http1("GET / HTTP/1.1").await;
        assert!(response.starts_with("HTTP/1.1 500 "), "{response}");
        assert!(
            response.contains("x-mesh-error: invalid-routes\r\n"),
            "{response}"
        );
        assert!(response.contains("unknown kind of filter"), "{response}");
        mesh.updates.send(routed("2", one(to(&[(V1, 1)])))).unwrap();
        assert_eq!(mesh.rejection("2").await, "");
        assert_eq!(body(&mesh.http1("GET / HTTP/1.1").await), "one");
        mesh.updates.send(routed("3", one(unknown_filter))).unwrap();
        assert_ne!(mesh.rejection("3").await, "");
        assert_eq!(body(&mesh.http1("GET / HTTP/1.1").await), "one");
    });
}

#[test]
fn modifiers_keep_case_and_order_of_other_fields() {
    on_worker(async {
        let (one_app, seen) = app("one").await;
        let request = proto::HeaderModifier {
            set: vec![field("X-Set", "new")],
            add: vec![field("X-Add", "two")],
            remove: vec!["x-gone".to_owned()],
        };
        let response = proto::HeaderModifier {
            set: vec![field("X-Old", "new")],
            remove: vec!["x-first".to_owned()],
            ..proto::HeaderModifier::default()
        };
        let of_backend = proto::HeaderModifier {
            set: vec![field("x-SET", "newer")],
            ..proto::HeaderModifier::default()
        };
        let mut rule = to(&[(V1, 1)]);
        rule.filters = vec![
            filter(route_filter::Kind::RequestHeaders(request)),
            filter(route_filter::Kind::ResponseHeaders(response)),
        ];
        rule.backends[0].filters = vec![filter(route_filter::Kind::RequestHeaders(of_backend))];
        let (two_app, seen2) = app2("two").await;
        let mesh = Mesh::new(one(rule.clone()), &[(V1, one_app)]).await;
        let fields = "x-GONE: 1\r\nX-b: 2\r\nx-set: old\r\nX-ADD: one\r\nx_set: other\r\nX-A: 3";
        let answer = mesh.http1(&format!("GET / HTTP/1.1\r\n{fields}")).await;
        let expected = "GET / HTTP/1.1\r\nX-b: 2\r\nX-ADD: one\r\nx_set: other\r\nX-A: 3\r\n\
                        Host: web:8080\r\nX-Add: two\r\nx-SET: newer\r\n\r\n";
        assert_eq!(seen.borrow()[0], expected);
        let expected = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nX-Last: 3\r\nX-Old: new\r\n\
                        Connection: close\r\n\r\none";
        assert_eq!(answer, expected);

        let mesh = Mesh::new(one(rule), &[(V1, two_app)]).await;
        let request = Request::get("http://web/")
            .header("x-gone", "1")
            .header("x-set", "old")
            .header("x-add", "one");
        let (head, _) = mesh.http2(request.body(()).unwrap()).await;
        assert_eq!(head.headers()["x-old"], "new");
        let seen = seen2.borrow()[0].clone();
        assert!(!seen.contains("x-gone") && !seen.contains("old"), "{seen}");
        assert!(seen.contains("\"x-set\": \"newer\""), "{seen}");
        assert!(
            seen.contains("\"x-add\": \"one\"") && seen.contains("\"x-add\": \"two\""),
            "{seen}"
        );
    });
}

#[test]
fn redirects_are_answered_by_the_proxy() {
    on_worker(async {
        let redirect = proto::Redirect {
            scheme: "https".to_owned(),
            hostname: "new.example".to_owned(),
            path: new_prefix("/new"),
            port: 8443,
            status: 308,
        };
        let rule = proto::RouteRule {
            filters: vec![filter(route_filter::Kind::Redirect(redirect))],
            ..to(&[])
        };
        let mesh = Mesh::new(routes(vec![prefix("/old", 0)], vec![rule]), &[]).await;
        let response = mesh.http1("GET /old/page?q=%20 HTTP/1.1").await;
        let location = "https://new.example:8443/new/page?q=%20";
        let expected = format!(
            "HTTP/1.1 308 Permanent Redirect\r\ncontent-length: 0\r\nlocation: {location}\r\n\
             connection: close\r\n\r\n"
        );
        assert_eq!(response, expected);
        let request = Request::get("http://web/old/page?q=%20").body(()).unwrap();
        let (head, body) = mesh.http2(request).await;
        assert_eq!((head.status().as_u16(), body.as_str()), (308, ""));
        assert_eq!(head.headers()["location"], location);
        assert!(
            mesh.controller.borrow().subscribed == [WEB],
            "no backend is needed"
        );
    });
}

/// A body in which a hostile client hides a request. The connection carries a next request only if the
/// whole body has arrived.
#[test]
fn body_of_an_answered_request_is_never_the_next_request() {
    on_worker(async {
        let (app, requests) = app("v1").await;
        let redirect = proto::Redirect {
            status: 302,
            ..proto::Redirect::default()
        };
        let rule = proto::RouteRule {
            filters: vec![filter(route_filter::Kind::Redirect(redirect))],
            ..to(&[])
        };
        let all = routes(
            vec![prefix("/old", 0), prefix("/", 1)],
            vec![rule, to(&[(V1, 1)])],
        );
        let mesh = Mesh::new(all, &[(V1, app)]).await;
        let hidden = "GET /hidden HTTP/1.1\r\nHost: web\r\n\r\n";
        let next = "GET /next HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n";
        let length = hidden.len();
        let plain = format!("POST /old HTTP/1.1\r\nHost: web\r\nContent-Length: {length}\r\n\r\n");
        let chunked = "POST /old HTTP/1.1\r\nHost: web\r\nTransfer-Encoding: chunked\r\n\r\n";
        let whole = [
            format!("{plain}{hidden}"),
            format!("{chunked}{length:x}\r\n{hidden}\r\n0\r\n\r\n"),
            format!("{chunked}{length:x}\r\n{hidden}\r\n0\r\nX: y\r\n\r\n"),
        ];
        for (at, first) in whole.iter().enumerate() {
            let mut client = mesh.connect().await;
            client
                .write_all(format!("{first}{next}").as_bytes())
                .await
                .unwrap();
            let mut responses = String::new();
            client.read_to_string(&mut responses).await.unwrap();
            assert_eq!(
                responses.matches("HTTP/1.1 302 Found").count(),
                1,
                "{responses}"
            );
            assert_eq!(
                responses.matches("HTTP/1.1 200 OK").count(),
                1,
                "{responses}"
            );
            assert_eq!(requests.borrow().len(), at + 1, "{first}");
        }
        let seen = requests.borrow().len();
        for first in [plain, format!("{chunked}{length:x}\r\n")] {
            let mut client = mesh.connect().await;
            client.write_all(first.as_bytes()).await.unwrap();
            let mut head = [0; 12];
            client.read_exact(&mut head).await.unwrap();
            assert_eq!(&head, b"HTTP/1.1 302");
            client
                .write_all(format!("{hidden}{next}").as_bytes())
                .await
                .unwrap();
            let mut rest = String::new();
            client.read_to_string(&mut rest).await.unwrap();
            assert!(rest.to_lowercase().contains("connection: close"), "{rest}");
            assert!(!rest.contains("HTTP/1.1"), "{rest}");
        }
        assert_eq!(requests.borrow().len(), seen, "no hidden request arrived");
    });
}

#[test]
fn rewrites_host_and_path_in_place() {
    on_worker(async {
        let rewrite = proto::UrlRewrite {
            hostname: "v1.example".to_owned(),
            path: new_prefix("/"),
        };
        let rule = proto::RouteRule {
            filters: vec![filter(route_filter::Kind::Rewrite(rewrite))],
            ..to(&[(V1, 1)])
        };
        let matches = vec![prefix("/old", 0)];
        let (one_app, seen) = app("one").await;
        let mesh = Mesh::new(
            routes(matches.clone(), vec![rule.clone()]),
            &[(V1, one_app)],
        )
        .await;
        mesh.http1("GET /old/a//b?c=/old HTTP/1.1\r\nX-A: 1").await;
        mesh.http1("GET http://web:8080/old?d HTTP/1.1").await;
        let expected = [
            "GET /a//b?c=/old HTTP/1.1\r\nX-A: 1\r\nHost: v1.example\r\n\r\n",
            "GET http://v1.example/?d HTTP/1.1\r\nHost: v1.example\r\n\r\n",
        ];
        assert_eq!(*seen.borrow(), expected);
        let (two_app, seen) = app2("two").await;
        let mesh = Mesh::new(routes(matches, vec![rule]), &[(V1, two_app)]).await;
        let request = Request::get("http://web:8080/old/a?b").body(()).unwrap();
        assert_eq!(mesh.http2(request).await.1, "two");
        assert!(
            seen.borrow()[0].starts_with("GET http://v1.example/a?b "),
            "{seen:?}"
        );
    });
}

/// An application that accepts connections and never responds, or only begins to.
async fn silent_app(begins: &'static [u8]) -> SocketAddr {
    let (listener, address) = listen().await;
    tokio::task::spawn_local(async move {
        let mut open = Vec::new();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            // The proxy may have closed.
            let _ = stream.write_all(begins).await;
            open.push(stream);
        }
    });
    address
}

/// An HTTP/2 application whose responses never end.
async fn endless_app2() -> SocketAddr {
    let (listener, address) = listen().await;
    tokio::task::spawn_local(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(stream).await.unwrap();
        let mut open = Vec::new();
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            let kind = request.headers().get("content-type").cloned();
            let mut response = Response::new(());
            response
                .headers_mut()
                .extend(kind.map(|kind| (http::header::CONTENT_TYPE, kind)));
            let stream = respond.send_response(response, false).unwrap();
            open.push((request, respond, stream));
        }
    });
    address
}

fn with_timeouts(request: u64, attempt: u64) -> proto::RouteRule {
    proto::RouteRule {
        request_timeout: request,
        backend_request_timeout: attempt,
        ..to(&[(V1, 1)])
    }
}

#[test]
fn timeouts_end_requests_without_response() {
    on_worker(async {
        for (rule, named) in [
            (with_timeouts(50, 0), "request timeout"),
            (with_timeouts(0, 50), "backendRequest timeout"),
            (with_timeouts(10_000, 50), "backendRequest timeout"),
        ] {
            let mesh = Mesh::new(one(rule), &[(V1, silent_app(b"").await)]).await;
            let response = mesh.http1("GET / HTTP/1.1").await;
            assert!(
                response.starts_with("HTTP/1.1 504 Gateway Timeout\r\n"),
                "{response}"
            );
            assert!(response.contains("x-mesh-error: timeout\r\n"), "{response}");
            assert!(response.contains(named), "{response}");
            let call = Request::post("http://web/").header("content-type", "application/grpc");
            let (head, _) = mesh.http2(call.body(()).unwrap()).await;
            assert_eq!(head.headers()["grpc-status"], "4");
        }
    });
}

#[test]
fn timeout_within_an_interim_response_resets_the_connection() {
    on_worker(async {
        // More than the buffers of the kernel take.
        let interim = format!(
            "HTTP/1.1 103 Early Hints\r\nA: {}\r\n\r\n",
            "a".repeat(60_000)
        );
        let app = silent_app(interim.repeat(400).leak().as_bytes()).await;
        let mesh = Mesh::new(one(with_timeouts(0, 200)), &[(V1, app)]).await;
        let mut client = mesh.connect().await;
        // The time advances only when nothing else can proceed: the buffers are full.
        tokio::time::pause();
        let request = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
        client.write_all(request).await.unwrap();
        let timeouts = "failures_total{direction=\"outbound\",code=\"timeout\"} 1\n";
        while !mesh.worker.metrics.render().contains(timeouts) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let mut read = Vec::new();
        let ended = client.read_to_end(&mut read).await;
        let read = String::from_utf8_lossy(&read);
        assert!(!read.contains(" 504 "), "a response within a head");
        let reset = std::io::ErrorKind::ConnectionReset;
        assert_eq!(ended.unwrap_err().kind(), reset);
    });
}

#[test]
fn timeouts_cut_off_responses_that_have_begun() {
    on_worker(async {
        let begins = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf";
        let app = silent_app(begins).await;
        let mesh = Mesh::new(one(with_timeouts(100, 0)), &[(V1, app)]).await;
        let timeout = Duration::from_millis(100);
        let _frozen = freeze();
        let mut client = mesh.connect().await;
        client
            .write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            .await
            .unwrap();
        let mut read = Vec::new();
        while !read.ends_with(b"half") {
            read.push(client.read_u8().await.unwrap());
        }
        tokio::time::advance(2 * timeout).await;
        let ended = client.read_to_end(&mut read).await;
        assert_eq!(
            ended.unwrap_err().kind(),
            std::io::ErrorKind::ConnectionReset
        );

        let mesh = Mesh::new(one(with_timeouts(100, 0)), &[(V1, endless_app2().await)]).await;
        let (mut client, connection) = h2::client::handshake(mesh.connect().await).await.unwrap();
        tokio::task::spawn_local(connection);
        for is_grpc in [true, false] {
            let kind = if is_grpc {
                "application/grpc"
            } else {
                "text/plain"
            };
            let call = Request::post("http://web/").header("content-type", kind);
            let (response, _) = client.send_request(call.body(()).unwrap(), true).unwrap();
            let response = response.await.unwrap();
            assert_eq!(response.status(), 200);
            tokio::time::advance(2 * timeout).await;
            let mut body = response.into_body();
            if is_grpc {
                assert!(body.data().await.is_none());
                let trailers = body
                    .trailers()
                    .await
                    .unwrap()
                    .expect("the status of the call");
                assert_eq!(trailers["grpc-status"], "4");
            } else {
                let reset = body.data().await.expect("a reset").unwrap_err();
                assert_eq!(reset.reason(), Some(h2::Reason::INTERNAL_ERROR));
            }
        }
    });
}

#[test]
fn mirrors_get_a_copy_and_never_delay_the_request() {
    on_worker(async {
        let mirrored = |to_mirror: &str| {
            let mirror = proto::Mirror {
                backend: to_mirror.to_owned(),
                numerator: 1,
                denominator: 1,
            };
            proto::RouteRule {
                filters: vec![filter(route_filter::Kind::Mirror(mirror))],
                ..to(&[(V1, 1)])
            }
        };
        let ((one_app, seen), (copy, copied)) = (app("one").await, app("copy").await);
        let mesh = Mesh::new(one(mirrored(V2)), &[(V1, one_app), (V2, copy)]).await;
        for request in [
            "GET /a HTTP/1.1\r\nX-A: 1\r\nHost: a\r\nConnection: close\r\n\r\n",
            "POST /b HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello",
            "POST /c HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        ] {
            let mut client = mesh.connect().await;
            client.write_all(request.as_bytes()).await.unwrap();
            let mut response = String::new();
            client.read_to_string(&mut response).await.unwrap();
            assert_eq!(body(&response), "one");
            let forwarded = seen.borrow().last().unwrap().clone();
            until(|| copied.borrow().last() == Some(&forwarded)).await;
        }
        // A body above the bound is not copied.
        let length = crate::http::replay::MAX_REPLAY + 1;
        let mut client = mesh.connect().await;
        let head = format!(
            "POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
        );
        client.write_all(head.as_bytes()).await.unwrap();
        client.write_all(&vec![b'x'; length]).await.unwrap();
        let mut response = String::new();
        client.read_to_string(&mut response).await.unwrap();
        assert_eq!(body(&response), "one");
        let metrics = mesh.worker.metrics.clone();
        let counted = |result: &str, count: usize| {
            let sample = format!("mirrored_requests_total{{result=\"{result}\"}} {count}\n");
            metrics.render().contains(&sample)
        };
        assert!(counted("dropped", 1), "{}", metrics.render());
        until(|| counted("answered", 3)).await;

        // The mirror is silent, or is gone.
        for mirror in [Some(silent_app(b"").await), None] {
            let mut apps = vec![(V1, one_app)];
            apps.extend(mirror.map(|address| (V2, address)));
            let mesh = Mesh::new(one(mirrored(V2)), &apps).await;
            assert_eq!(body(&mesh.http1("GET / HTTP/1.1").await), "one");
        }

        let ((two_app, seen), (copy, copied)) = (app2("two").await, app2("copy").await);
        let mesh = Mesh::new(one(mirrored(V2)), &[(V1, two_app), (V2, copy)]).await;
        let (mut client, connection) = h2::client::handshake(mesh.connect().await).await.unwrap();
        tokio::task::spawn_local(connection);
        for with_body in [false, true] {
            let request = Request::post("http://web/d").body(()).unwrap();
            let (response, mut stream) = client.send_request(request, !with_body).unwrap();
            if with_body {
                stream
                    .send_data(Bytes::from_static(b"hello"), true)
                    .unwrap();
            }
            assert_eq!(response.await.unwrap().status(), 200);
            let count = 1 + usize::from(with_body);
            until(|| seen.borrow().len() == count && *copied.borrow() == *seen.borrow()).await;
        }
        assert!(copied.borrow()[1].ends_with("hello"), "{copied:?}");
    });
}

#[test]
fn cors_answers_preflight_requests_and_adds_fields_to_responses() {
    on_worker(async {
        let cors = proto::Cors {
            allow_origins: vec!["https://shop.example".to_owned()],
            allow_methods: vec!["PUT".to_owned()],
            max_age: 5,
            ..proto::Cors::default()
        };
        let rule = proto::RouteRule {
            filters: vec![filter(route_filter::Kind::Cors(cors))],
            ..to(&[(V1, 1)])
        };
        let (app, seen) = app("one").await;
        let mesh = Mesh::new(one(rule), &[(V1, app)]).await;
        let origin = "Origin: https://shop.example";
        let asked = format!("{origin}\r\nAccess-Control-Request-Method: PUT");
        let response = mesh.http1(&format!("OPTIONS / HTTP/1.1\r\n{asked}")).await;
        let expected = "HTTP/1.1 204 No Content\r\n\
            access-control-allow-origin: https://shop.example\r\n\
            access-control-allow-methods: PUT\r\naccess-control-max-age: 5\r\n\
            vary: origin\r\nconnection: close\r\n\r\n";
        assert_eq!(response, expected);
        assert!(seen.borrow().is_empty(), "the proxy answers");
        let response = mesh.http1(&format!("PUT / HTTP/1.1\r\n{origin}")).await;
        let allowed = "\r\naccess-control-allow-origin: https://shop.example\r\nvary: origin\r\n";
        assert!(
            response.contains(allowed) && body(&response) == "one",
            "{response}"
        );
        let response = mesh
            .http1("PUT / HTTP/1.1\r\nOrigin: https://evil.example")
            .await;
        assert!(!response.contains("access-control"), "{response}");
    });
}

/// The error of the proxy about routes that it cannot apply.
fn rejection(routes: proto::Routes) -> String {
    super::routes::parse(routes).err().unwrap_or_default()
}

#[test]
fn hostile_routes_are_rejected_with_a_reason() {
    let with = |kind| {
        one(proto::RouteRule {
            filters: vec![filter(kind)],
            ..to(&[(V1, 1)])
        })
    };
    let modifier = |name: &str, value: &str| {
        with(route_filter::Kind::RequestHeaders(proto::HeaderModifier {
            set: vec![field(name, value)],
            ..proto::HeaderModifier::default()
        }))
    };
    let matching = |one: proto::RouteMatch| routes(vec![one], vec![to(&[(V1, 1)])]);
    let regex = |expression: String| {
        let kind = Some(path_match::Kind::Regex(expression));
        matching(proto::RouteMatch {
            path: Some(proto::PathMatch { kind }),
            ..proto::RouteMatch::default()
        })
    };
    let redirect = |change: fn(&mut proto::Redirect)| {
        let mut redirect = proto::Redirect {
            status: 302,
            ..proto::Redirect::default()
        };
        change(&mut redirect);
        with(route_filter::Kind::Redirect(redirect))
    };
    let mirror = |backend: &str, denominator| {
        with(route_filter::Kind::Mirror(proto::Mirror {
            backend: backend.to_owned(),
            numerator: 1,
            denominator,
        }))
    };
    let rewrite = |hostname: &str, path: Option<path_modifier::Kind>| {
        with(route_filter::Kind::Rewrite(proto::UrlRewrite {
            hostname: hostname.to_owned(),
            path: path.map(|kind| proto::PathModifier { kind: Some(kind) }),
        }))
    };
    let full = |path: &str| Some(path_modifier::Kind::Full(path.to_owned()));
    let many = |count| routes(vec![prefix("/", 0); count], vec![to(&[(V1, 1)])]);
    let many_expressions = {
        let one = regex("a".to_owned()).matches.remove(0);
        routes(vec![one; 1001], vec![to(&[(V1, 1)])])
    };
    let mut exact_prefix = rewrite("", Some(path_modifier::Kind::Prefix("/b".to_owned())));
    exact_prefix.matches[0].path = Some(proto::PathMatch {
        kind: Some(path_match::Kind::Exact("/a".to_owned())),
    });
    let no_kind = proto::RouteMatch {
        path: Some(proto::PathMatch { kind: None }),
        ..proto::RouteMatch::default()
    };
    let odd_method = proto::RouteMatch {
        method: "G T".to_owned(),
        ..proto::RouteMatch::default()
    };
    let external = |change: fn(&mut proto::RouteBackend, &mut proto::ExternalBackend)| {
        let mut external = proto::ExternalBackend {
            name: "XBackend shop/api".to_owned(),
            host: "api.example.test".to_owned(),
            port: 443,
            tls: Some(proto::ExternalTls {
                server_name: "api.example.test".to_owned(),
                ..proto::ExternalTls::default()
            }),
        };
        let mut rule = to(&[("", 1)]);
        change(&mut rule.backends[0], &mut external);
        rule.backends[0].external = Some(external);
        one(rule)
    };
    fn tls(external: &mut proto::ExternalBackend) -> &mut proto::ExternalTls {
        external.tls.as_mut().unwrap()
    }
    assert_eq!(rejection(external(|_, _| {})), "");
    let root = crate::secure::identity::testing::Authority::new("public").pem();
    let mut with_roots = external(|_, _| {});
    let of_rule = with_roots.rules[0].backends[0].external.as_mut().unwrap();
    tls(of_rule).roots = format!("{root}{root}");
    assert_eq!(rejection(with_roots), "");
    for (routes, reason) in [
        (
            external(|backend, _| backend.name = V1.to_owned()),
            "rule 0 (HTTPRoute shop/web): backend \"shop/web-v1:80\" and \"XBackend shop/api\"",
        ),
        (external(|_, one| one.name.clear()), "without a name"),
        (
            external(|_, one| one.host.clear()),
            "XBackend shop/api: host \"\": expected a DNS name",
        ),
        (
            external(|_, one| one.host = "API.example.test".to_owned()),
            "in lower case",
        ),
        (
            external(|_, one| one.host = "192.0.2.1".to_owned()),
            "host \"192.0.2.1\"",
        ),
        (
            external(|_, one| one.host = "a".repeat(1 << 20)),
            "expected a DNS name",
        ),
        (external(|_, one| one.port = 0), "port 0, expected 1"),
        (external(|_, one| one.port = 65_536), "port 65536"),
        (
            external(|_, one| tls(one).server_name = "::1".to_owned()),
            "host \"::1\"",
        ),
        (
            external(|_, one| tls(one).roots = "no PEM".to_owned()),
            "no certificate in the roots",
        ),
        (
            external(|_, one| tls(one).roots = "x".repeat(65 * 1024)),
            "expected at most 65536",
        ),
        (
            external(|_, one| {
                let empty = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
                tls(one).roots = empty.to_owned();
            }),
            "root 0",
        ),
        (
            regex("(a{1000}){1000}".to_owned()),
            "match 0: path.value: \"(a{1000}){1000}\" is not a regular expression",
        ),
        (regex("a".repeat(1 << 20)), "it is longer than 1024 bytes"),
        (regex("(".repeat(10_000)), "is not a regular expression"),
        (
            many_expressions,
            "match 1000: more than 1000 regular expressions",
        ),
        (many(10_001), "10001 matches"),
        (matching(prefix("/", 1)), "match 0: rule 1 of 1"),
        (
            matching(prefix("relative", 0)),
            "match 0: path.value: \"relative\"",
        ),
        (matching(no_kind), "not a known type of path match"),
        (matching(odd_method), "method: \"G T\""),
        (
            modifier("x-a", "1\r\nX-Called-By: spiffe://evil"),
            "requestHeaderModifier.set: \"1\\r\\n",
        ),
        (modifier("X_Called-By", "1"), "filters may change"),
        (
            modifier("Transfer-Encoding", "chunked"),
            "filters may change",
        ),
        (modifier("a b", "1"), "not the name of a header"),
        (redirect(|one| one.status = 200), "statusCode: \"200\""),
        (
            redirect(|one| one.scheme = "javascript".to_owned()),
            "javascript",
        ),
        (redirect(|one| one.port = 65_536), "port: \"65536\""),
        (
            redirect(|one| one.hostname = "a/b".to_owned()),
            "hostname: \"a/b\"",
        ),
        (rewrite("a\r\nb", None), "urlRewrite.hostname"),
        (rewrite(&"a".repeat(1 << 20), None), "not a host name"),
        (
            rewrite("", full("//a b")),
            "path.replaceFullPath: \"//a b\"",
        ),
        (rewrite("", full("/a\r\nX: y")), "not a path"),
        (rewrite("", full("/a?b")), "not a path"),
        (exact_prefix, "not all matches have a prefix"),
        (mirror("shop/v1", 1), "expected NAMESPACE/SERVICE:PORT"),
        (mirror(V1, 0), "requestMirror: \"1/0\""),
        (
            one(to(&[("shop/:80", 1)])),
            "expected NAMESPACE/SERVICE:PORT",
        ),
    ] {
        let rejection = rejection(routes);
        assert!(rejection.contains(reason), "{reason}: {rejection}");
        assert!(rejection.len() < 1000, "{}", rejection.len());
    }
    assert_eq!(rejection(many(10_000)), "");
}

/// An HTTP/1 application whose first responses have status 503.
async fn failing_app(failures: usize) -> (SocketAddr, Rc<RefCell<usize>>) {
    let (listener, address) = listen().await;
    let requests = Rc::new(RefCell::new(0));
    let count = requests.clone();
    tokio::task::spawn_local(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            if read_head(&mut stream).await.is_some() {
                *count.borrow_mut() += 1;
                let status = if *count.borrow() <= failures {
                    "503 No"
                } else {
                    "200 OK"
                };
                let response =
                    format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
                stream.write_all(response.as_bytes()).await.unwrap();
            }
        }
    });
    (address, requests)
}

#[test]
fn rules_retry_the_statuses_that_they_name() {
    on_worker(async {
        for (statuses, attempts, failures, expected, requests) in [
            (&[503][..], 2, 2, "HTTP/1.1 200 ", 3),
            (&[503], 2, 5, "HTTP/1.1 503 ", 3),
            (&[500], 2, 1, "HTTP/1.1 503 ", 1),
            (&[503], 0, 1, "HTTP/1.1 503 ", 1),
        ] {
            let retry = proto::RouteRetry {
                statuses: statuses.to_vec(),
                attempts,
                backoff: 1,
            };
            let rule = proto::RouteRule {
                retry: Some(retry),
                ..to(&[(V1, 1)])
            };
            let (app, count) = failing_app(failures).await;
            let mesh = Mesh::new(one(rule), &[(V1, app)]).await;
            let response = mesh.http1("POST / HTTP/1.1").await;
            assert!(response.starts_with(expected), "{response}");
            assert_eq!(*count.borrow(), requests, "{statuses:?} {attempts}");
        }
    });
}

#[test]
fn rules_retry_closed_connections_whatever_the_method() {
    on_worker(async {
        for (attempts, expected) in [(1, "HTTP/1.1 200 "), (0, "HTTP/1.1 502 ")] {
            let (listener, address) = listen().await;
            tokio::task::spawn_local(async move {
                for response in ["", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"] {
                    let (mut stream, _) = listener.accept().await.unwrap();
                    read_until(&mut stream, "\r\n\r\n").await;
                    stream.write_all(response.as_bytes()).await.unwrap();
                }
            });
            let retry = proto::RouteRetry {
                statuses: Vec::new(),
                attempts,
                backoff: 0,
            };
            let rule = proto::RouteRule {
                retry: Some(retry),
                ..to(&[(V1, 1)])
            };
            let mesh = Mesh::new(one(rule), &[(V1, address)]).await;
            let response = mesh.http1("POST / HTTP/1.1").await;
            assert!(response.starts_with(expected), "{response}");
        }
    });
}

#[test]
fn pod_of_a_headless_service_stays_the_backend() {
    on_worker(async {
        let ((pod, seen), (other, _)) = (app("pod").await, app("other").await);
        let modifier = proto::HeaderModifier {
            set: vec![field("X-Route", "1")],
            ..proto::HeaderModifier::default()
        };
        let rule = proto::RouteRule {
            filters: vec![filter(route_filter::Kind::RequestHeaders(modifier))],
            ..to(&[(V1, 1)])
        };
        let mesh = Mesh::new(
            routes(vec![prefix("/a", 0)], vec![rule.clone()]),
            &[(V1, other)],
        )
        .await;
        let endpoint = proto::Endpoint {
            address: pod.to_string(),
            ..proto::Endpoint::default()
        };
        let target = proto::Snapshot {
            kind: proto::snapshot::Kind::Pod.into(),
            namespace: "shop".to_owned(),
            name: "web-0".to_owned(),
            endpoints: vec![endpoint],
            ..proto::Snapshot::default()
        };
        let resource = Resource::from(pod);
        let target =
            super::target::from_snapshot(&resource, target, Default::default(), &mut |error| {
                panic!("{error}")
            });
        let parsed = super::routes::parse(routes(vec![prefix("/a", 0)], vec![rule]));
        let mut target = target.unwrap();
        target.set_routes(Some(parsed), &Target::default());
        let (discovery, mut questions) = Discovery::by_hand();
        let worker = Worker::new(WorkerContext {
            discovery,
            ..WorkerContext::for_a_test("")
        });
        let (destination, ()) = tokio::join!(worker.destinations.get_or_watch(pod), async {
            drop(questions.next().await.1(Arc::new(target)));
        });
        let mesh = Mesh {
            worker,
            destination,
            ..mesh
        };
        assert_eq!(body(&mesh.http1("GET /a HTTP/1.1").await), "pod");
        assert!(seen.borrow()[0].contains("X-Route: 1\r\n"), "{seen:?}");
        let response = mesh.http1("GET /b HTTP/1.1").await;
        assert!(response.starts_with("HTTP/1.1 404 "), "{response}");
    });
}
