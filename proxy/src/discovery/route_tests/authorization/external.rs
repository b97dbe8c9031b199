//! Authorization servers: what they are asked, what their answers do, and what happens without one.

mod answers;
mod bodies;
mod order;
mod questions;

use std::sync::Mutex;

use diy_mesh_proto::envoy::auth::authorization_server::{self, AuthorizationServer};
use diy_mesh_proto::envoy::auth::check_response::HttpResponse;
use diy_mesh_proto::envoy::auth::{
    CheckRequest, CheckResponse, DeniedHttpResponse, HeaderValue, HeaderValueOption, HttpStatus,
    OkHttpResponse, QueryParameter, Status,
};
use proto::authorizer::Protocol;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;

use super::*;
use crate::limits::memory::Memory;
use crate::observe::recent::testing::without_ids;

const BACKEND: &str = "auth/server:9000";
const EMPTY: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
const REFUSED: &str = "HTTP/1.1 400 Bad Request\r\n";
const FAILED: &str = "HTTP/1.1 503 Service Unavailable\r\n";

fn authorizer(protocol: Protocol) -> proto::Authorizer {
    proto::Authorizer {
        backend: BACKEND.to_owned(),
        protocol: protocol.into(),
        response_fields: vec!["x-user".to_owned()],
        timeout: 5000,
        ..proto::Authorizer::default()
    }
}

/// Asks about paths below /orders at the port of the application.
fn asking(app: SocketAddr, authorizer: proto::Authorizer) -> proto::Authorization {
    let mut asking = on_path(Action::ExternalAuth, "/orders");
    asking.policies[0].rules[0].ports = vec![app.port().into()];
    asking.policies[0].authorizer = Some(authorizer);
    asking
}

/// A mesh with the authorization server at this address.
async fn mesh(server: SocketAddr) -> Mesh {
    Mesh::new(proto::Routes::default(), &[(BACKEND, server)]).await
}

impl Mesh {
    /// The inputs of a worker that finds the backends of this mesh.
    fn context(&self, context: WorkerContext) -> WorkerContext {
        WorkerContext {
            discovery: Discovery {
                policy: context.discovery.policy.clone(),
                ..self.discovery.clone()
            },
            ..context
        }
    }
}

/// The pod of an application whose proxy finds the authorization server at this address.
async fn pod(app: SocketAddr, server: SocketAddr) -> (Pod, Mesh) {
    let mesh = mesh(server).await;
    let pod = Pod::with(app, |context| mesh.context(context));
    (pod, mesh)
}

/// A server of ext_authz that answers by the path, and keeps what it is asked.
#[derive(Clone, Default)]
struct Envoy(Arc<Mutex<Vec<CheckRequest>>>);

#[tonic::async_trait]
impl authorization_server::Authorization for Envoy {
    async fn check(
        &self,
        request: tonic::Request<CheckRequest>,
    ) -> Result<tonic::Response<CheckResponse>, tonic::Status> {
        let request = request.into_inner();
        let http = request.attributes.clone().unwrap().request.unwrap().http;
        self.0.lock().unwrap().push(request);
        let path = http.unwrap().path;
        Ok(tonic::Response::new(match path.as_str() {
            "/orders/error" => return Err(tonic::Status::internal("no")),
            "/orders/empty" => CheckResponse::default(),
            "/orders/secret" => response(16, denied()),
            "/orders/other" => response(7, HttpResponse::OkResponse(OkHttpResponse::default())),
            "/orders/long" => response(7, long_page()),
            "/orders/query" => response(0, changing("x-user", "ada", "x", "")),
            "/orders/remove" => response(0, changing("x-user", "ada", "", "authorization")),
            _ => response(0, changing("X-User", "ada", "", "x-user")),
        }))
    }
}

fn response(code: i32, http_response: HttpResponse) -> CheckResponse {
    CheckResponse {
        status: Some(Status {
            code,
            message: "no reason".to_owned(),
        }),
        http_response: Some(http_response),
    }
}

fn option(name: &str, value: &str) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(HeaderValue {
            key: name.to_owned(),
            value: value.to_owned(),
            raw_value: vec![],
        }),
    }
}

fn denied() -> HttpResponse {
    HttpResponse::DeniedResponse(DeniedHttpResponse {
        status: Some(HttpStatus { code: 401 }),
        headers: vec![
            option("www-authenticate", "Basic realm=\"orders\""),
            option("content-length", "77"),
            option("content-type", "text/html"),
            option("grpc-status", "0"),
            option("x-mesh-error", "forged"),
        ],
        body: "who are you?".to_owned(),
    })
}

fn long_page() -> HttpResponse {
    HttpResponse::DeniedResponse(DeniedHttpResponse {
        body: "x".repeat(17_000),
        ..DeniedHttpResponse::default()
    })
}

fn changing(name: &str, value: &str, query: &str, removed: &str) -> HttpResponse {
    let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let query = text(query).map(|key| QueryParameter {
        key,
        ..QueryParameter::default()
    });
    HttpResponse::OkResponse(OkHttpResponse {
        headers: vec![option(name, value), option("x-unlisted", "1")],
        headers_to_remove: text(removed).into_iter().collect(),
        query_parameters_to_set: query.into_iter().collect(),
        ..OkHttpResponse::default()
    })
}

impl Envoy {
    async fn start(&self) -> SocketAddr {
        let (listener, address) = listen().await;
        let service = AuthorizationServer::new(self.clone());
        let serving = Server::builder().add_service(service);
        tokio::spawn(serving.serve_with_incoming(TcpListenerStream::new(listener)));
        address
    }
}

/// A server that answers each head with these bytes, and keeps the heads.
async fn server(answer: &'static str) -> (SocketAddr, App) {
    let server = App::new("", answer).await;
    (server.address, server)
}

fn text(app: &App) -> String {
    String::from_utf8(app.received.borrow().clone()).unwrap()
}

#[test]
fn grpc_server_decides_about_requests_that_a_rule_matches() {
    on_worker(async {
        let (app, envoy) = (App::new("", EMPTY).await, Envoy::default());
        let (mut pod, _mesh) = pod(app.address, envoy.start().await).await;
        pod.authorize(asking(app.address, authorizer(Protocol::Grpc)))
            .await;
        assert!(pod.http1(Some("a"), "/").await.starts_with(OK));
        assert_eq!(envoy.0.lock().unwrap().len(), 0);
        let mut client = pod.connect(Some("a")).await;
        let head = "POST /orders/1?q=%2F HTTP/1.1\r\nHost: web:80\r\nX_User: forged\r\n\
             Cookie: a=1\r\nX-A: 1\r\ncookie: b=2\r\nx-a: 2\r\nX-Request-Id: r1\r\n\
             X_Mesh_Caller: other\r\nX-Mesh-Questions: 0\r\nContent-Length: 4\r\n\r\n\r\n\r\n";
        exchange(&mut client, head.as_bytes(), OK.as_bytes()).await;
        let seen = text(&app);
        let seen = seen.split_once("Content-Length: 4\r\n").unwrap().1;
        assert_eq!(
            seen,
            "X-Called-By: spiffe://cluster.local/ns/shop/sa/a\r\nx-user: ada\r\n\r\n\r\n\r\n"
        );
        assert!(!text(&app).contains("forged") && !text(&app).contains("x-unlisted"));
        let asked = envoy.0.lock().unwrap().remove(0).attributes.unwrap();
        let (source, destination) = (asked.source.unwrap(), asked.destination.unwrap());
        assert_eq!(source.principal, "spiffe://cluster.local/ns/shop/sa/a");
        assert_eq!(
            destination.principal,
            "spiffe://cluster.local/ns/shop/sa/cart"
        );
        let at = destination.address.unwrap().socket_address.unwrap();
        assert_eq!(at.port_value, u32::from(app.address.port()));
        let http = asked.request.unwrap().http.unwrap();
        let head = [
            &http.method,
            &http.path,
            &http.host,
            &http.protocol,
            &http.id,
        ];
        assert_eq!(
            head,
            ["POST", "/orders/1?q=%2F", "web:80", "HTTP/1.1", "r1"]
        );
        assert_eq!(http.size, 4);
        let mut headers: Vec<_> = http.headers.into_iter().collect();
        headers.sort();
        let headers = headers
            .iter()
            .map(|(name, value)| format!("{name}: {value}"));
        let headers: Vec<String> = headers.collect();
        assert_eq!(
            headers,
            [
                "content-length: 4",
                "cookie: a=1; b=2",
                "host: web:80",
                "x-a: 1,2",
                "x-called-by: spiffe://cluster.local/ns/shop/sa/a",
                "x-request-id: r1",
            ]
        );
        assert!(pod.counts("external_authorizations_total{result=\"allowed\"} 1\n"));
    });
}

#[test]
fn denial_of_a_server_is_the_response_of_the_client() {
    on_worker(async {
        let (app, envoy) = (App::new("", EMPTY).await, Envoy::default());
        let (mut pod, _mesh) = pod(app.address, envoy.start().await).await;
        pod.authorize(asking(app.address, authorizer(Protocol::Grpc)))
            .await;
        assert_eq!(
            without_ids(&pod.http1(None, "/orders/secret").await),
            "HTTP/1.1 401 Unauthorized\r\ncontent-length: 12\r\n\
             x-mesh-error: externally-denied\r\nwww-authenticate: Basic realm=\"orders\"\r\n\
             content-type: text/html\r\nconnection: close\r\n\r\nwho are you?"
        );
        let other = pod.http1(None, "/orders/other").await;
        assert!(other.starts_with(DENIED) && other.ends_with("\r\n\r\nno reason"));
        let grpc = Request::post("http://web/orders/secret");
        let grpc = grpc.header("content-type", "application/grpc");
        let fields = pod.http2(None, grpc.body(()).unwrap()).await;
        assert_eq!(fields["grpc-status"], "16");
        assert_eq!(fields["content-type"], "application/grpc");
        assert_eq!(fields["grpc-message"], "who are you?");
        assert_eq!(app.got(), (0, 0));
        assert!(pod.counts("code=\"externally-denied\"} 3\n"));
    });
}

#[test]
fn http_server_gets_the_head_and_its_status_decides() {
    on_worker(async {
        let app = App::new("", EMPTY).await;
        let allowing = "HTTP/1.1 204 No Content\r\nX-User: ada\r\nX-Other: 1\r\n\r\n";
        let (address, server) = server(allowing).await;
        let (mut pod, _mesh) = pod(app.address, address).await;
        let authorizer = proto::Authorizer {
            path: "/check".to_owned(),
            request_fields: ["cookie", "te", "x-mesh-caller"].map(str::to_owned).into(),
            ..authorizer(Protocol::Http)
        };
        pod.authorize(asking(app.address, authorizer)).await;
        let mut client = pod.connect(Some("a")).await;
        let head = "POST /orders/1?q HTTP/1.1\r\nHost: web\r\nX-User: forged\r\nCookie: a=1\r\n\
             X-A: 1\r\nTE: trailers\r\nX-Mesh-Caller: other\r\nAuthorization: Basic YQ==\r\n\
             Content-Length: 4\r\n\r\n\r\n\r\n";
        exchange(&mut client, head.as_bytes(), OK.as_bytes()).await;
        assert_eq!(
            text(&server),
            "POST /check/orders/1?q HTTP/1.1\r\nHost: web\r\nContent-Length: 0\r\n\
             x-mesh-questions: 1\r\nx-mesh-caller: spiffe://cluster.local/ns/shop/sa/a\r\n\
             Cookie: a=1\r\nAuthorization: Basic YQ==\r\n\r\n"
        );
        assert!(text(&app).contains("\r\nx-user: ada\r\n") && !text(&app).contains("forged"));
        // A protocol that the client asks for does not change the method.
        let mut client = pod.connect(None).await;
        let head = "DELETE /orders/3 HTTP/1.1\r\nHost: web\r\nConnection: upgrade\r\n\
             Upgrade: websocket\r\n\r\n";
        exchange(&mut client, head.as_bytes(), OK.as_bytes()).await;
        assert!(text(&server).contains("DELETE /check/orders/3 HTTP/1.1\r\n"));
        // In HTTP/2 too.
        let get = Request::get("http://web/orders/2").header("x.user", "forged");
        pod.http2(None, get.body(()).unwrap()).await;
        assert!(text(&server).contains("GET /check/orders/2 HTTP/1.1\r\nHost: web\r\n"));
    });
}

#[test]
fn http2_request_gets_the_fields_of_a_server() {
    on_worker(async {
        let ((app, requests), envoy) = (app2("web").await, Envoy::default());
        let (mut pod, _mesh) = pod(app, envoy.start().await).await;
        pod.authorize(asking(app, authorizer(Protocol::Grpc))).await;
        let get = Request::get("http://web/orders/1").header("x.user", "forged");
        pod.http2(Some("a"), get.body(()).unwrap()).await;
        let seen = requests.borrow()[0].clone();
        assert!(
            seen.contains("\"x-user\": \"ada\"") && !seen.contains("forged"),
            "{seen}"
        );
    });
}

#[test]
fn http_server_denies_by_redirects_and_errors_of_clients() {
    on_worker(async {
        let app = App::new("", EMPTY).await;
        for (answer, expected) in [
            (
                "HTTP/1.1 302 Found\r\nLocation: https://id.example.com/\r\nContent-Length: 0\r\n\r\n",
                "HTTP/1.1 302 Found\r\ncontent-length: 0\r\nx-mesh-error: externally-denied\r\n\
                 location: https://id.example.com/\r\nconnection: close\r\n\r\n",
            ),
            (
                "HTTP/1.1 429 Too Many Requests\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n<p>",
                "HTTP/1.1 429 Too Many Requests\r\ncontent-length: 3\r\n\
                 x-mesh-error: externally-denied\r\ncontent-type: text/html\r\n\
                 connection: close\r\n\r\n<p>",
            ),
        ] {
            let closing = answer.contains("close");
            let address = if closing {
                once(answer).await
            } else {
                server(answer).await.0
            };
            let (mut pod, _mesh) = pod(app.address, address).await;
            pod.authorize(asking(app.address, authorizer(Protocol::Http)))
                .await;
            assert_eq!(without_ids(&pod.http1(None, "/orders").await), expected);
        }
        assert_eq!(app.got(), (0, 0));
    });
}

/// A server that answers each head once and closes.
async fn once(answer: &'static str) -> SocketAddr {
    let (listener, address) = listen().await;
    tokio::task::spawn_local(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut bytes = [0; 4096];
            let _ = stream.read(&mut bytes).await;
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    address
}

#[test]
fn without_an_answer_the_failure_mode_decides() {
    on_worker(async {
        let closed = {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            listener.local_addr().unwrap()
        };
        let error = "HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n";
        let envoy = Envoy::default().start().await;
        let (http, grpc) = (Protocol::Http, Protocol::Grpc);
        let text = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
        for (what, protocol, address, path) in [
            ("refused", http, closed, "/orders"),
            ("refused", grpc, closed, "/orders"),
            ("slow", http, server("").await.0, "/orders"),
            ("slow", grpc, server("").await.0, "/orders"),
            ("reset", http, once("").await, "/orders"),
            ("reset", grpc, once("").await, "/orders"),
            ("5xx", http, server(error).await.0, "/orders"),
            ("error", grpc, envoy, "/orders/error"),
            ("empty", grpc, envoy, "/orders/empty"),
            ("changes the query", grpc, envoy, "/orders/query"),
            ("removes what is not listed", grpc, envoy, "/orders/remove"),
            ("not gRPC", grpc, server(text).await.0, "/orders"),
            ("not HTTP", http, server("ok\r\n\r\n").await.0, "/orders"),
            ("half a status", http, once("HTTP/1.1 40").await, "/orders"),
            (
                "304",
                http,
                server("HTTP/1.1 304 Not Modified\r\n\r\n").await.0,
                "/orders",
            ),
        ] {
            for fail_open in [false, true] {
                let app = App::new("", EMPTY).await;
                let (mut pod, _mesh) = pod(app.address, address).await;
                let authorizer = proto::Authorizer {
                    timeout: 200,
                    fail_open,
                    ..authorizer(protocol)
                };
                pod.authorize(asking(app.address, authorizer)).await;
                let response = pod.http1(None, path).await;
                let expected = if fail_open { OK } else { FAILED };
                assert!(response.starts_with(expected), "{what}: {response}");
                assert_eq!(app.connections.get(), usize::from(fail_open), "{what}");
                let code = response.contains("x-mesh-error: authorizer-failed\r\n");
                assert_eq!(code, !fail_open, "{what}");
                let result = if fail_open { "failed-open" } else { "failed" };
                let count = format!("external_authorizations_total{{result=\"{result}\"}} 1\n");
                assert!(pod.counts(&count), "{what}");
            }
        }
    });
}

#[test]
fn request_that_no_server_can_be_asked_about_is_refused_in_every_failure_mode() {
    on_worker(async {
        let app = App::new("", EMPTY).await;
        let settings = Policy {
            allow_connect: true,
            ..Policy::default()
        };
        let mut pod = Pod::of_settings(app.address, settings, |context| context);
        let mut asking = asking(app.address, authorizer(Protocol::Http));
        asking.policies[0].rules[0].requests.clear();
        asking.policies[0].authorizer.as_mut().unwrap().fail_open = true;
        pod.authorize(asking).await;
        let mut client = pod.connect(None).await;
        let connect = b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n";
        exchange(&mut client, connect, REFUSED.as_bytes()).await;
        // A connection is no request.
        let mut opaque = pod.connect(None).await;
        opaque.write_all(OPAQUE).await.unwrap();
        assert_eq!(rest(opaque).await, b"");
        assert_eq!(app.got(), (0, 0));
    });
}

#[test]
fn client_without_memory_makes_no_server_fail_open() {
    on_worker(async {
        let (mut refused, mut allowed) = (0, 0);
        for kilobytes in (16..400).step_by(8) {
            let (app, envoy) = (App::new("", EMPTY).await, Envoy::default());
            let mesh = mesh(envoy.start().await).await;
            let mut pod = Pod::with(app.address, |context| WorkerContext {
                memory: Memory::of_bytes(kilobytes * 1024, context.config.workers),
                ..mesh.context(context)
            });
            let grpc = proto::Authorizer {
                fail_open: true,
                ..authorizer(Protocol::Grpc)
            };
            pod.authorize(asking(app.address, grpc)).await;
            let mut client = pod.connect(Some("a")).await;
            let head = b"GET /orders HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n";
            client.write_all(head).await.unwrap();
            let response = rest(client).await;
            if response.starts_with(OK.as_bytes()) {
                allowed += 1;
                assert_eq!(
                    envoy.0.lock().unwrap().len(),
                    1,
                    "{kilobytes} KiB: not asked"
                );
            } else {
                refused += 1;
            }
        }
        assert!(
            refused > 0 && allowed > 0,
            "{refused} refused, {allowed} allowed"
        );
    });
}

#[test]
fn questions_lead_to_few_others() {
    on_worker(async {
        let (app, envoy) = (App::new("", EMPTY).await, Envoy::default());
        let (mut pod, _mesh) = pod(app.address, envoy.start().await).await;
        let grpc = proto::Authorizer {
            fail_open: true,
            ..authorizer(Protocol::Grpc)
        };
        pod.authorize(asking(app.address, grpc)).await;
        for (before, expected) in [("0", OK), ("2", OK), ("3", REFUSED), ("-1", REFUSED)] {
            let head =
                format!("GET /orders HTTP/1.1\r\nHost: web\r\nX-Mesh-Questions: {before}\r\n\r\n");
            let mut client = pod.connect(None).await;
            exchange(&mut client, head.as_bytes(), expected.as_bytes()).await;
        }
        assert_eq!(envoy.0.lock().unwrap().len(), 2);
    });
}

#[test]
fn question_ends_with_its_client() {
    on_worker(async {
        let app = App::new("", EMPTY).await;
        let (address, server) = server("").await;
        let (mut pod, _mesh) = pod(app.address, address).await;
        pod.authorize(asking(app.address, authorizer(Protocol::Http)))
            .await;
        let mut client = pod.connect(None).await;
        let head = b"GET /orders HTTP/1.1\r\nHost: web\r\n\r\n";
        client.write_all(head).await.unwrap();
        until(|| server.received.borrow().ends_with(b"\r\n\r\n")).await;
        drop(client);
        until(|| server.ended.get() == 1).await;
        assert_eq!(app.got(), (0, 0));
    });
}

#[test]
fn change_ends_requests_that_another_server_would_have_to_allow() {
    on_worker(async {
        let answer = "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello";
        let (app, envoy) = (App::new("", answer).await, Envoy::default());
        let (mut pod, _mesh) = pod(app.address, envoy.start().await).await;
        let asking = asking(app.address, authorizer(Protocol::Grpc));
        pod.authorize(asking.clone()).await;
        let mut client = pod.connect(None).await;
        let head = b"GET /orders HTTP/1.1\r\nHost: web\r\n\r\n";
        exchange(&mut client, head, answer.as_bytes()).await;
        // The server that has allowed it stays.
        let mut same = asking.clone();
        same.policies
            .extend(on_path(Action::Deny, "/admin").policies);
        pod.authorize(same).await;
        assert_eq!(app.ended.get(), 0);
        let mut other = asking;
        other.policies[0].authorizer.as_mut().unwrap().backend = "auth/other:9000".to_owned();
        pod.authorize(other).await;
        assert_eq!(rest(client).await, b"");
        until(|| app.ended.get() == 1).await;
        assert_eq!(envoy.0.lock().unwrap().len(), 1);
    });
}

const ROUTE: &str = "HTTPRoute shop/web";

fn path_match(kind: proto::path_match::Kind) -> Option<proto::PathMatch> {
    Some(proto::PathMatch { kind: Some(kind) })
}

/// Routes at the port of the application in order of precedence: prefixes, and whether their rules
/// ask.
fn routes(
    app: SocketAddr,
    authorizer: &proto::Authorizer,
    rules: &[(&str, bool)],
) -> proto::Authorization {
    let matches = rules
        .iter()
        .enumerate()
        .map(|(rule, (path, _))| proto::RouteMatch {
            rule: rule as u32,
            path: path_match(proto::path_match::Kind::Prefix((*path).to_owned())),
            ..proto::RouteMatch::default()
        });
    let of_rules = rules
        .iter()
        .map(|(_, asks)| proto::route_authorization::Rule {
            name: ROUTE.to_owned(),
            authorizer: asks.then(|| authorizer.clone()),
        });
    let routes = proto::RouteAuthorization {
        matches: matches.collect(),
        rules: of_rules.collect(),
    };
    let mut asking = policy(Action::ExternalAuth, proto::AuthorizationRule::default());
    asking.policies[0].name = ROUTE.to_owned();
    asking.policies[0].ports = vec![app.port().into()];
    asking.policies[0].routes = Some(routes);
    asking
}

#[test]
fn server_of_a_route_is_asked_about_its_rule_and_no_other_whoever_dials() {
    on_worker(async {
        let (app, envoy) = (App::new("", EMPTY).await, Envoy::default());
        let (mut pod, _mesh) = pod(app.address, envoy.start().await).await;
        let rules = [("/orders/open", false), ("/orders", true), ("/", false)];
        pod.authorize(routes(app.address, &authorizer(Protocol::Grpc), &rules))
            .await;
        let asked = || std::mem::take(&mut *envoy.0.lock().unwrap()).len();
        for client in [Some("a"), Some("bank/a"), None] {
            for (path, count, status) in [
                ("/", 0, OK),
                ("/orders/open", 0, OK),
                ("/orders/1", 1, OK),
                ("/ordersecret", 0, OK),
                ("/orders/secret", 1, "HTTP/1.1 401 Unauthorized\r\n"),
            ] {
                let response = pod.http1(client, path).await;
                assert!(response.starts_with(status), "{path}: {response}");
                assert_eq!(asked(), count, "{path}");
            }
        }
        let get = Request::get("http://web/orders/secret");
        let fields = pod.http2(None, get.body(()).unwrap()).await;
        assert_eq!(
            (&fields["x-mesh-error"], asked()),
            (&"externally-denied".parse().unwrap(), 1)
        );
        // Nobody can ask about a connection.
        let connections = app.connections.get();
        let mut opaque = pod.connect(Some("a")).await;
        opaque.write_all(OPAQUE).await.unwrap();
        assert_eq!(rest(opaque).await, b"");
        assert_eq!((app.connections.get(), asked()), (connections, 0));
        // Fields of the server come from no client, whatever the rule.
        let mut client = pod.connect(None).await;
        let head = b"GET / HTTP/1.1\r\nHost: web\r\nX-User: forged\r\n\r\n";
        exchange(&mut client, head, OK.as_bytes()).await;
        assert!(!text(&app).contains("forged"));
    });
}

#[test]
fn no_spelling_of_a_path_avoids_the_server_of_a_route() {
    on_worker(async {
        let (app, envoy) = (App::new("", EMPTY).await, Envoy::default());
        let (mut pod, _mesh) = pod(app.address, envoy.start().await).await;
        let rules = [
            ("/orders", true),
            ("/Admin/", true),
            ("/%7Eroot/my%20files", true),
            ("/", false),
        ];
        let mut exact = routes(app.address, &authorizer(Protocol::Grpc), &rules);
        let of_exact = exact.policies[0].routes.as_mut().unwrap();
        let path = path_match(proto::path_match::Kind::Exact("/exact".to_owned()));
        of_exact.matches.insert(
            0,
            proto::RouteMatch {
                path,
                ..proto::RouteMatch::default()
            },
        );
        pod.authorize(exact).await;
        let asked = || std::mem::take(&mut *envoy.0.lock().unwrap()).len();
        for path in [
            "/ORDERS",
            "/admin/1",
            "/ADMIN",
            "/a/..//aDMIN",
            "/exact/",
            "/Exact//",
            "/%65xact",
            "/%7Eroot/my%20files",
            "/~root/my%20files/a",
            "/%7eROOT/m%79%20files/",
            "//orders/1",
            "/./orders",
            "/a/../orders",
            "/%6frders",
            "/orders;a=1/1",
            "/a/%2e%2e/orders",
            "/orders%2f1",
            "\\orders",
            "http://web/orders",
            "http://web//orders",
            "/%zz",
        ] {
            pod.http1(None, path).await;
            assert!(asked() == 1 || path.starts_with('\\'), "{path}");
        }
        for path in ["/a%20b", "/a//b", "/a/orders", "http://web", "/?/orders"] {
            assert!(pod.http1(None, path).await.starts_with(OK), "{path}");
            assert_eq!(asked(), 0, "{path}");
        }
    });
}

#[test]
fn no_spelling_of_a_method_avoids_the_server_of_a_route() {
    on_worker(async {
        let (app, envoy) = (App::new("", EMPTY).await, Envoy::default());
        let (mut pod, _mesh) = pod(app.address, envoy.start().await).await;
        let rules = [("/orders", true), ("/", false)];
        let mut of_get = routes(app.address, &authorizer(Protocol::Grpc), &rules);
        let of_routes = of_get.policies[0].routes.as_mut().unwrap();
        of_routes.matches[0].method = "GET".to_owned();
        pod.authorize(of_get).await;
        let asked = || std::mem::take(&mut *envoy.0.lock().unwrap()).len();
        for (method, count) in [("GET", 1), ("get", 1), ("Get", 1), ("POST", 0)] {
            let request = Request::builder()
                .method(method)
                .uri("http://web/orders/secret");
            pod.http2(None, request.body(()).unwrap()).await;
            assert_eq!(asked(), count, "{method}");
        }
    });
}

#[test]
fn route_without_a_valid_server_refuses_and_one_that_cannot_be_read_denies_all() {
    on_worker(async {
        let app = App::new("", EMPTY).await;
        let mut pod = Pod::new(app.address);
        let none = proto::Authorizer {
            backend: String::new(),
            ..authorizer(Protocol::Grpc)
        };
        let mut refusing = routes(app.address, &none, &[("/orders", true), ("/", false)]);
        pod.authorize(refusing.clone()).await;
        let response = pod.http1(None, "/orders").await;
        assert!(response.starts_with(FAILED), "{response}");
        assert!(response.contains("x-mesh-error: authorizer-failed\r\n"));
        assert_eq!(app.connections.get(), 0);
        assert!(pod.http1(None, "/").await.starts_with(OK));
        let invalid = [
            path_match(proto::path_match::Kind::Regex("(".to_owned())),
            Some(proto::PathMatch { kind: None }),
        ];
        for path in invalid {
            let routes = refusing.policies[0].routes.as_mut().unwrap();
            routes.matches[1].path = path;
            pod.authorize(refusing.clone()).await;
            assert!(pod.http1(None, "/").await.starts_with(DENIED));
        }
        let routes = refusing.policies[0].routes.as_mut().unwrap();
        routes.matches[1] = proto::RouteMatch {
            rule: 7,
            ..proto::RouteMatch::default()
        };
        pod.authorize(refusing).await;
        assert!(pod.http1(None, "/").await.starts_with(DENIED));
    });
}

#[test]
fn request_too_large_for_the_expressions_of_a_route_is_refused() {
    on_worker(async {
        let app = App::new("", EMPTY).await;
        let mut pod = Pod::new(app.address);
        let mut routes = routes(app.address, &authorizer(Protocol::Grpc), &[("/", true)]);
        let expressions = (0..128).map(|one| proto::FieldMatch {
            name: "x-long".to_owned(),
            kind: Some(proto::field_match::Kind::Regex(format!(".*{one}"))),
        });
        let matches = expressions.map(|header| proto::RouteMatch {
            headers: vec![header],
            ..proto::RouteMatch::default()
        });
        routes.policies[0].routes.as_mut().unwrap().matches = matches.collect();
        pod.authorize(routes).await;
        let mut client = pod.connect(None).await;
        let head = format!(
            "GET / HTTP/1.1\r\nHost: web\r\nX-Long: {}\r\n\r\n",
            "x".repeat(16_000)
        );
        exchange(&mut client, head.as_bytes(), b"HTTP/1.1 431 ").await;
        assert_eq!(app.got(), (0, 0));
    });
}

#[test]
fn requests_without_a_path_select_the_route_for_all_requests() {
    on_worker(async {
        let (app, envoy) = (App::new("", EMPTY).await, Envoy::default());
        let mesh = mesh(envoy.start().await).await;
        let settings = Policy {
            allow_connect: true,
            ..Policy::default()
        };
        let mut pod = Pod::of_settings(app.address, settings, |context| mesh.context(context));
        let all = routes(app.address, &authorizer(Protocol::Grpc), &[("/", true)]);
        pod.authorize(all).await;
        for line in ["GET http://web", "OPTIONS *", "CONNECT web:80"] {
            let mut client = pod.connect(None).await;
            let head = format!("{line} HTTP/1.1\r\nHost: web:80\r\nConnection: close\r\n\r\n");
            client.write_all(head.as_bytes()).await.unwrap();
            let mut first = [0; 12];
            client.read_exact(&mut first).await.unwrap();
            let asked = std::mem::take(&mut *envoy.0.lock().unwrap()).len();
            assert_eq!((&first[..], asked), (&b"HTTP/1.1 200"[..], 1), "{line}");
        }
    });
}

#[test]
fn routes_of_several_services_and_policies_ask_each_server_once() {
    on_worker(async {
        let (app, envoy) = (App::new("", EMPTY).await, Envoy::default());
        let (mut pod, _mesh) = pod(app.address, envoy.start().await).await;
        let server = authorizer(Protocol::Grpc);
        let mut all = routes(app.address, &server, &[("/orders", true), ("/", false)]);
        // The same route at another Service, other routes at another port, and a policy.
        all.policies
            .extend(routes(app.address, &server, &[("/", true)]).policies);
        let mut elsewhere = routes(app.address, &server, &[("/", true)]);
        elsewhere.policies[0].ports = vec![1];
        let other = elsewhere.policies[0].routes.as_mut().unwrap();
        other.rules[0].name = "HTTPRoute shop/other".to_owned();
        all.policies.extend(elsewhere.policies);
        all.policies.extend(asking(app.address, server).policies);
        pod.authorize(all).await;
        let asked = || std::mem::take(&mut *envoy.0.lock().unwrap()).len();
        assert!(pod.http1(None, "/").await.starts_with(OK));
        assert_eq!(asked(), 1);
        assert!(pod.http1(None, "/orders/1").await.starts_with(OK));
        assert_eq!(asked(), 2);
    });
}

#[test]
fn change_of_routes_ends_requests_of_which_another_rule_asks() {
    on_worker(async {
        let answer = "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello";
        let app = App::new("", answer).await;
        let mut pod = Pod::new(app.address);
        let server = authorizer(Protocol::Grpc);
        pod.authorize(routes(
            app.address,
            &server,
            &[("/orders", true), ("/", false)],
        ))
        .await;
        let mut client = pod.connect(None).await;
        let head = b"GET /cart HTTP/1.1\r\nHost: web\r\n\r\n";
        exchange(&mut client, head, answer.as_bytes()).await;
        pod.authorize(routes(app.address, &server, &[("/a", true), ("/", false)]))
            .await;
        assert_eq!(app.ended.get(), 0);
        pod.authorize(routes(
            app.address,
            &server,
            &[("/cart", true), ("/", false)],
        ))
        .await;
        assert_eq!(rest(client).await, b"");
        until(|| app.ended.get() == 1).await;
    });
}
