//! Tests of routes from the controller's message to the response: a fake controller, a worker, and
//! clients and applications over sockets, in both versions of HTTP.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;

use bytes::Bytes;
use diy_mesh_proto::mesh::v1 as proto;
use http::{Request, Response};
use proto::{path_match, path_modifier, route_filter};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::connection::carry;
use crate::control::testing::{FakeController, FakeStream, soon};
use crate::destination::Destination;
use crate::dump::Direction;
use crate::flow::Flow;
use crate::io::Io;
use crate::policy::Caller;
use crate::worker::{Worker, WorkerContext};

const WEB: &str = "10.96.0.7:8080";

/// Runs a test on one thread with a local set, as a worker runs.
fn on_worker<F: Future<Output = ()>>(test: F) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async { soon(test).await });
}

/// A worker whose destination [`WEB`] has routes.
struct Mesh {
    worker: Rc<Worker>,
    destination: Rc<Destination>,
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
        let control = Control::new(&format!("http://{}", fake.address), None, None).unwrap();
        let (trust, none) = (Trust::default(), crate::identity::none());
        let (discovery, driver) = start(control, trust, none, DiscoveryMetrics::default());
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
            discovery,
            ..WorkerContext::for_a_test("")
        });
        let destination = worker.destinations.get_or_watch(WEB.parse().unwrap()).await;
        Self {
            worker,
            destination,
            controller,
            acknowledgements,
            updates,
        }
    }

    async fn connect(&self) -> TcpStream {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let connecting = TcpStream::connect(listener.local_addr().unwrap());
        let (client, accepted) = tokio::join!(connecting, listener.accept());
        let (stream, peer) = accepted.unwrap();
        let flow = Flow {
            worker: self.worker.clone(),
            direction: Direction::Outbound,
            peer,
            destination: self.destination.clone(),
            caller: Caller::App,
        };
        tokio::task::spawn_local(carry(Io::new(stream), flow));
        client.unwrap()
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
            (true, None) => Update::Unknown(proto::Unknown {}),
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
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let requests = Requests::default();
    let seen = requests.clone();
    tokio::task::spawn_local(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let seen = seen.clone();
            tokio::task::spawn_local(async move {
                let mut head = Vec::new();
                while let Ok(byte) = stream.read_u8().await {
                    head.push(byte);
                    if head.ends_with(b"\r\n\r\n") {
                        seen.borrow_mut()
                            .push(String::from_utf8(head.split_off(0)).unwrap());
                        let response = format!(
                            "HTTP/1.1 200 OK\r\nX-First: 1\r\nX-Old: 2\r\nContent-Length: {}\r\nX-Last: 3\r\n\r\n{name}",
                            name.len()
                        );
                        stream.write_all(response.as_bytes()).await.unwrap();
                    }
                }
            });
        }
    });
    (address, requests)
}

/// An HTTP/2 application that responds with its name.
async fn app2(name: &'static str) -> (SocketAddr, Requests) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
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
                    let (parts, _) = request.into_parts();
                    let head = format!("{} {} {:?}", parts.method, parts.uri, parts.headers);
                    seen.borrow_mut().push(head);
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
            let (one, two) = match http2 {
                true => (app2("one").await, app2("two").await),
                false => (app("one").await, app("two").await),
            };
            let rules = vec![to(&[(V1, 90), (V2, 10)]), to(&[(V2, 1)])];
            let mesh = Mesh::new(
                routes(vec![prefix("/new", 1), prefix("/", 0)], rules),
                &[(V1, one.0), (V2, two.0)],
            )
            .await;
            mesh.worker.rng.borrow_mut().seed(7);
            let ask = async |path: &str| match http2 {
                true => {
                    let request = Request::get(format!("http://web{path}")).body(()).unwrap();
                    mesh.http2(request).await.1
                }
                false => body(&mesh.http1(&format!("GET {path} HTTP/1.1")).await).to_owned(),
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
