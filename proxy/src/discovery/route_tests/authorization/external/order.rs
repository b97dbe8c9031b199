//! The order of policies, rate limits, tokens and authorization servers.

use diy_mesh_testkit::tokens::{Signer, now};
use proto::rate_limit::Scope;
use serde_json::json;

use super::*;

const LIMITED: &str = "HTTP/1.1 429 Too Many Requests\r\n";
const UNAUTHORIZED: &str = "HTTP/1.1 401 Unauthorized\r\n";
const NO: &str = "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n";

/// A limit of one request.
fn one(scope: Scope, app: SocketAddr) -> proto::RateLimit {
    proto::RateLimit {
        name: "TrafficPolicy shop/web/one".to_owned(),
        ports: vec![app.port().into()],
        scope: scope.into(),
        requests: 1,
        window: 3_600_000,
        replicas: 1,
        ..proto::RateLimit::default()
    }
}

impl Pod {
    /// Applies policies and a limit.
    async fn limit(&mut self, authorization: proto::Authorization, limit: proto::RateLimit) {
        let rejection = self
            .configure(proto::Workload {
                authorization: Some(authorization),
                rate_limits: vec![limit],
                ..proto::Workload::default()
            })
            .await;
        assert_eq!(rejection, "");
    }

    async fn code_of_http2(&self, account: Option<&str>, path: &str) -> String {
        let get = Request::get(format!("http://web{path}"));
        let fields = self.http2(account, get.body(()).unwrap()).await;
        let code = fields.get("x-mesh-error");
        code.map_or(String::new(), |code| code.to_str().unwrap().to_owned())
    }
}

#[test]
fn limits_of_callers_protect_authorization_servers_in_both_failure_modes() {
    on_worker(async {
        for fail_open in [false, true] {
            let (app, requests) = app2("web").await;
            let error = "HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n";
            let (address, server) = server(error).await;
            let (mut pod, _mesh) = pod(app, address).await;
            let authorizer = proto::Authorizer {
                fail_open,
                ..authorizer(Protocol::Http)
            };
            pod.limit(asking(app, authorizer), one(Scope::Caller, app))
                .await;
            let expected = if fail_open { "" } else { "authorizer-failed" };
            assert_eq!(pod.code_of_http2(Some("a"), "/orders").await, expected);
            for _ in 0..5 {
                assert_eq!(
                    pod.code_of_http2(Some("a"), "/orders").await,
                    "rate-limited"
                );
                let response = pod.http1(Some("a"), "/orders").await;
                assert!(response.starts_with(LIMITED), "{response}");
            }
            assert_eq!(text(&server).matches("GET /orders").count(), 1);
            assert_eq!(requests.borrow().len(), usize::from(fail_open));
            // Others are not affected, nor are clients without an identity.
            assert_eq!(pod.code_of_http2(Some("b"), "/orders").await, expected);
            assert_eq!(pod.code_of_http2(None, "/orders").await, expected);
        }
    });
}

#[test]
fn denial_of_an_authorization_server_costs_the_service_no_token() {
    on_worker(async {
        for protocol in [Protocol::Http, Protocol::Grpc] {
            let (app, _) = app2("web").await;
            let envoy = Envoy::default();
            let address = match protocol {
                Protocol::Http => server(NO).await.0,
                _ => envoy.start().await,
            };
            let (mut pod, _mesh) = pod(app, address).await;
            pod.limit(asking(app, authorizer(protocol)), one(Scope::Service, app))
                .await;
            for _ in 0..3 {
                let code = pod.code_of_http2(None, "/orders/secret").await;
                assert_eq!(code, "externally-denied");
            }
            // The token is left, for one request.
            assert_eq!(pod.code_of_http2(None, "/").await, "");
            assert_eq!(pod.code_of_http2(None, "/").await, "rate-limited");
            assert_eq!(
                pod.code_of_http2(None, "/orders/secret").await,
                "rate-limited"
            );
        }
    });
}

#[test]
fn denials_without_a_token_come_before_limits_and_those_before_tokens() {
    on_worker(async {
        let (app, _) = app2("web").await;
        let mut pod = Pod::new(app);
        let mut denying = on_path(Action::Deny, "/admin");
        denying.policies[0].issuers = vec![issuer(&Signer::new())];
        denying.policies[0].rules[0].revision = 2;
        pod.limit(denying, one(Scope::Caller, app)).await;
        let get = async |path: &str| {
            let mut client = pod.connect(Some("a")).await;
            let head = format!(
                "GET {path} HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\
                 Authorization: Bearer forged\r\n\r\n"
            );
            client.write_all(head.as_bytes()).await.unwrap();
            String::from_utf8(rest(client).await).unwrap()
        };
        for _ in 0..3 {
            let response = get("/admin").await;
            assert!(response.starts_with(DENIED), "{response}");
        }
        assert!(get("/").await.starts_with(UNAUTHORIZED));
        assert!(get("/").await.starts_with(LIMITED));
        assert!(get("/admin").await.starts_with(DENIED));
    });
}

fn issuer(signer: &Signer) -> proto::TokenIssuer {
    proto::TokenIssuer {
        name: "https://id.example.com".to_owned(),
        audiences: vec!["shop".to_owned()],
        keys: signer.jwks(),
        fields: vec![proto::ClaimField {
            claim: "sub".to_owned(),
            name: "x-user".to_owned(),
        }],
    }
}

#[test]
fn limit_on_a_field_of_a_token_counts_what_the_application_gets() {
    on_worker(async {
        let signer = Signer::new();
        for is_http2 in [false, true] {
            let app = if is_http2 {
                app2("web").await.0
            } else {
                app("web").await.0
            };
            let mut pod = Pod::new(app);
            let mut allowing = policy(Action::Allow, proto::AuthorizationRule::default());
            allowing.policies[0].issuers = vec![issuer(&signer)];
            allowing.policies[0].rules[0].revision = 2;
            let of_ada = proto::FieldMatch {
                name: "x-user".to_owned(),
                kind: Some(proto::field_match::Kind::Exact("ada".to_owned())),
            };
            let limit = proto::RateLimit {
                matches: vec![proto::RouteMatch {
                    headers: vec![of_ada],
                    ..proto::RouteMatch::default()
                }],
                ..one(Scope::Caller, app)
            };
            pod.limit(allowing, limit).await;
            let is_limited = async |user: &str, sub: &str| {
                let claims = json!({
                    "iss": "https://id.example.com", "aud": "shop", "sub": sub, "exp": now() + 600,
                });
                let token = format!("Bearer {}", signer.sign(&claims));
                if is_http2 {
                    let get = Request::get("http://web/").header("x-user", user);
                    let get = get.header("authorization", token).body(()).unwrap();
                    let fields = pod.http2(Some("a"), get).await;
                    return fields
                        .get("x-mesh-error")
                        .is_some_and(|code| code == "rate-limited");
                }
                let mut client = pod.connect(Some("a")).await;
                let head = format!(
                    "GET / HTTP/1.1\r\nHost: web\r\nConnection: close\r\nX-User: {user}\r\n\
                     Authorization: {token}\r\n\r\n"
                );
                client.write_all(head.as_bytes()).await.unwrap();
                rest(client).await.starts_with(LIMITED.as_bytes())
            };
            assert!(!is_limited("ada", "bob").await && !is_limited("ada", "bob").await);
            assert!(!is_limited("bob", "ada").await && is_limited("bob", "ada").await);
        }
    });
}
