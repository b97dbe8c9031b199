//! Tests of AuthorizationPolicies, from the controller's message to what the application gets.

mod changes;
mod external;
mod paths;
mod tokens;

use std::cell::Cell;
use std::time::Duration;

use proto::authorization_policy::Action;
use proto::authorization_source::Kind;

use super::pod::Pod;
use super::*;

/// Bytes that no detection takes for the start of a request.
const OPAQUE: &[u8] = b"\0\0\0\x01ping";
const DENIED: &str = "HTTP/1.1 403 Forbidden\r\n";
const OK: &str = "HTTP/1.1 200 OK\r\n";
const POLICY: &str = "AuthorizationPolicy shop/web";

fn policy(action: Action, rule: proto::AuthorizationRule) -> proto::Authorization {
    let policy = proto::AuthorizationPolicy {
        name: POLICY.to_owned(),
        action: action.into(),
        rules: vec![proto::AuthorizationRule {
            revision: 1,
            ..rule
        }],
        ..proto::AuthorizationPolicy::default()
    };
    proto::Authorization {
        policies: vec![policy],
        ..proto::Authorization::default()
    }
}

/// Allows the service accounts of a namespace.
fn allow_namespace(namespace: &str) -> proto::Authorization {
    let identity = proto::IdentityMatch {
        namespace: namespace.to_owned(),
        ..proto::IdentityMatch::default()
    };
    let sources = vec![proto::AuthorizationSource {
        kind: Some(Kind::Identity(identity)),
    }];
    let rule = proto::AuthorizationRule {
        sources: Some(proto::AuthorizationSources { sources }),
        ..proto::AuthorizationRule::default()
    };
    policy(Action::Allow, rule)
}

/// A policy on the paths below this one.
fn on_path(action: Action, path: &str) -> proto::Authorization {
    let path = proto::AuthorizedPath {
        kind: Some(proto::authorized_path::Kind::Prefix(path.to_owned())),
    };
    let request = proto::RequestMatch {
        paths: vec![path],
        ..proto::RequestMatch::default()
    };
    let rule = proto::AuthorizationRule {
        requests: vec![request],
        ..proto::AuthorizationRule::default()
    };
    policy(action, rule)
}

impl Pod {
    async fn authorize(&mut self, authorization: proto::Authorization) {
        let rejection = self
            .configure(proto::Workload {
                authorization: Some(authorization),
                ..proto::Workload::default()
            })
            .await;
        assert_eq!(rejection, "");
    }

    fn counts(&self, line: &str) -> bool {
        self.worker.metrics.render().contains(line)
    }

    /// Whether this is the number of calls that the policies under audit would deny.
    fn audited(&self, count: u32) -> bool {
        self.verdicts("would-deny", count)
    }

    fn verdicts(&self, verdict: &str, count: u32) -> bool {
        let labels = format!("direction=\"inbound\",verdict=\"{verdict}\"");
        self.counts(&format!("verdicts_total{{{labels}}} {count}\n"))
    }
}

/// An application that counts its connections and what it gets, answers each head, and returns all
/// other bytes.
struct App {
    address: SocketAddr,
    connections: Rc<Cell<usize>>,
    received: Rc<RefCell<Vec<u8>>>,
    /// The connections that have ended.
    ended: Rc<Cell<usize>>,
}

impl App {
    async fn new(greeting: &'static str, answer: &'static str) -> Self {
        let (listener, address) = listen().await;
        let app = Self {
            address,
            connections: Rc::default(),
            received: Rc::default(),
            ended: Rc::default(),
        };
        let (connections, ended) = (app.connections.clone(), app.ended.clone());
        let received = app.received.clone();
        tokio::task::spawn_local(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                connections.set(connections.get() + 1);
                let (received, ended) = (received.clone(), ended.clone());
                tokio::task::spawn_local(async move {
                    stream.write_all(greeting.as_bytes()).await.unwrap();
                    let mut bytes = [0; 4096];
                    while let Ok(read @ 1..) = stream.read(&mut bytes).await {
                        let bytes = &bytes[..read];
                        received.borrow_mut().extend_from_slice(bytes);
                        let is_head = bytes.ends_with(b"\r\n\r\n");
                        let response = if is_head { answer.as_bytes() } else { bytes };
                        if stream.write_all(response).await.is_err() {
                            break;
                        }
                    }
                    ended.set(ended.get() + 1);
                });
            }
        });
        app
    }

    /// The numbers of received connections and bytes.
    fn got(&self) -> (usize, usize) {
        (self.connections.get(), self.received.borrow().len())
    }
}

/// Sends bytes, and expects these at the start of what is returned.
async fn exchange(client: &mut TcpStream, sent: &[u8], expected: &[u8]) {
    client.write_all(sent).await.unwrap();
    let mut returned = vec![0; expected.len()];
    client.read_exact(&mut returned).await.unwrap();
    assert_eq!(
        returned.escape_ascii().to_string(),
        expected.escape_ascii().to_string()
    );
}

/// Reads until the connection has ended. Returns what was left.
async fn rest(mut client: TcpStream) -> Vec<u8> {
    let mut rest = Vec::new();
    let _ = client.read_to_end(&mut rest).await;
    rest
}

#[test]
fn denied_http1_request_gets_403_and_the_application_gets_nothing() {
    on_worker(async {
        let app = App::new("", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
        let mut pod = Pod::new(app.address);
        pod.authorize(on_path(Action::Deny, "/admin")).await;
        for account in [Some("a"), None] {
            let response = pod.http1(account, "/admin/users").await;
            assert!(response.starts_with(DENIED), "{response}");
            assert!(response.contains("x-mesh-error: denied\r\n"), "{response}");
        }
        assert_eq!(app.got(), (0, 0));
        // Each request of a connection is judged.
        let mut client = pod.connect(None).await;
        let get = |path| format!("GET {path} HTTP/1.1\r\nHost: web\r\n\r\n");
        exchange(&mut client, get("/").as_bytes(), OK.as_bytes()).await;
        exchange(&mut client, b"", b"Content-Length: 0\r\n\r\n").await;
        exchange(&mut client, get("/admin").as_bytes(), DENIED.as_bytes()).await;
        assert_eq!(app.connections.get(), 1);
        assert!(pod.counts("failures_total{direction=\"inbound\",code=\"denied\"} 3\n"));
    });
}

#[test]
fn pod_that_wants_plain_paths_gets_no_others_whatever_the_controller_knows() {
    on_worker(async {
        let app = App::new("", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
        let settings = Policy {
            plain_paths: true,
            ..Policy::default()
        };
        let mut pod = Pod::of_settings(app.address, settings, |context| context);
        pod.authorize(on_path(Action::Allow, "/shop")).await;
        for (path, expected) in [("/shop/a", OK), ("/shop/a%20b", DENIED)] {
            let response = pod.http1(Some("a"), path).await;
            assert!(response.starts_with(expected), "{path}: {response}");
        }
    });
}

#[test]
fn denied_http2_request_gets_403_and_grpc_call_permission_denied() {
    on_worker(async {
        let (app, requests) = app2("web").await;
        let mut pod = Pod::new(app);
        pod.authorize(on_path(Action::Allow, "/a.B/C")).await;
        let request = |path: &str, kind: &str| {
            let builder = Request::post(format!("http://web{path}"));
            builder.header("content-type", kind).body(()).unwrap()
        };
        let denied = pod
            .http2(Some("a"), request("/a.B/D", "application/grpc"))
            .await;
        assert_eq!(denied["grpc-status"], "7");
        assert_eq!(denied["x-mesh-error"], "denied");
        let denied = pod.http2(Some("a"), request("/a.B/D", "text/plain")).await;
        assert_eq!(denied["x-mesh-error"], "denied");
        assert!(!denied.contains_key("grpc-status"), "{denied:?}");
        let allowed = pod
            .http2(Some("a"), request("/a.B/C", "application/grpc"))
            .await;
        assert!(!allowed.contains_key("x-mesh-error"), "{allowed:?}");
        until(|| requests.borrow().len() == 1).await;
    });
}

#[test]
fn only_callers_of_the_own_namespace_are_told_the_policy() {
    on_worker(async {
        let (app, _) = app("web").await;
        let mut pod = Pod::new(app);
        pod.authorize(on_path(Action::Deny, "/")).await;
        let told = pod.http1(Some("shop/a"), "/").await;
        assert_eq!(body(&told), format!("denied by {POLICY}, rules[0]\n"));
        pod.authorize(allow_namespace("none")).await;
        let told = pod.http1(Some("shop/a"), "/").await;
        assert_eq!(
            body(&told),
            format!(
                "denied by {POLICY}: no rule matches, the nearest is rules[0] but for its sources\n"
            )
        );
        for other in [Some("other/a"), None] {
            let told = pod.http1(other, "/").await;
            let text = "denied; the log of the callee's proxy has the reason under ";
            let id = body(&told)
                .strip_prefix(text)
                .unwrap_or_else(|| panic!("{told}"));
            assert!(u32::from_str_radix(id.trim_end(), 16).is_ok(), "{told}");
        }
    });
}

#[test]
fn denied_opaque_connection_is_reset_and_the_application_gets_none() {
    on_worker(async {
        let app = App::new("", "").await;
        let mut pod = Pod::new(app.address);
        pod.authorize(allow_namespace("clients")).await;
        for account in [Some("shop/a"), None] {
            let mut client = pod.connect(account).await;
            client.write_all(OPAQUE).await.unwrap();
            assert_eq!(rest(client).await, b"");
        }
        // Conditions on requests are unknown.
        for authorization in [on_path(Action::Allow, "/"), on_path(Action::Deny, "/admin")] {
            pod.authorize(authorization).await;
            let mut client = pod.connect(Some("clients/a")).await;
            client.write_all(OPAQUE).await.unwrap();
            assert_eq!(rest(client).await, b"");
        }
        assert_eq!(app.got(), (0, 0));
        pod.authorize(allow_namespace("clients")).await;
        let mut client = pod.connect(Some("clients/a")).await;
        exchange(&mut client, OPAQUE, OPAQUE).await;
        assert!(pod.counts("failures_total{direction=\"inbound\",code=\"denied\"} 4\n"));
    });
}

#[test]
fn silent_client_causes_no_connection_where_only_requests_are_allowed() {
    on_worker(async {
        let app = App::new("220 hello\r\n", "").await;
        let mut pod = Pod::new(app.address);
        pod.authorize(on_path(Action::Allow, "/")).await;
        let mut client = pod.connect(Some("clients/a")).await;
        // Longer than detection waits for a client that sends first.
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(app.got(), (0, 0));
        pod.authorize(on_path(Action::Allow, "/none")).await;
        client
            .write_all(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n")
            .await
            .unwrap();
        exchange(&mut client, b"", DENIED.as_bytes()).await;
        assert_eq!(app.got(), (0, 0));
        // Where opaque traffic is allowed, the server speaks first.
        pod.authorize(allow_namespace("clients")).await;
        let mut client = pod.connect(Some("clients/a")).await;
        exchange(&mut client, b"", b"220 hello\r\n").await;
    });
}

#[test]
fn audit_refuses_nothing_and_is_counted_once() {
    on_worker(async {
        let app = App::new("", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
        let mut pod = Pod::new(app.address);
        let mut authorization = allow_namespace("clients");
        authorization.policies[0].audit = true;
        pod.authorize(authorization).await;
        assert!(pod.audited(0));
        assert!(pod.http1(Some("clients/a"), "/").await.starts_with(OK));
        assert!(pod.audited(0));
        assert!(pod.http1(Some("others/a"), "/").await.starts_with(OK));
        assert!(pod.audited(1));
        let mut client = pod.connect(None).await;
        exchange(&mut client, OPAQUE, OPAQUE).await;
        assert!(pod.audited(2) && pod.verdicts("allowed", 3) && pod.verdicts("denied", 0));
        drop(client);
        pod.authorize(allow_namespace("clients")).await;
        let denied = pod.http1(Some("others/a"), "/").await;
        assert!(denied.contains("denied"), "{denied}");
        assert!(pod.verdicts("allowed", 3) && !pod.verdicts("denied", 0));
    });
}

#[test]
fn calls_of_the_own_application_are_not_judged() {
    on_worker(async {
        let app = App::new("", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
        let mut pod = Pod::new(app.address);
        pod.authorize(allow_namespace("none")).await;
        let mut client = pod.connect_as(Direction::Outbound, Caller::App).await;
        let get = b"GET / HTTP/1.1\r\nHost: web\r\n\r\n";
        exchange(&mut client, get, OK.as_bytes()).await;
        let mut client = pod.connect_as(Direction::Outbound, Caller::App).await;
        exchange(&mut client, OPAQUE, OPAQUE).await;
        pod.authorize(on_path(Action::Deny, "/")).await;
        exchange(&mut client, OPAQUE, OPAQUE).await;
    });
}
