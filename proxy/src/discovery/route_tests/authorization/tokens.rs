//! Tokens of requests, and claims that the application gets as fields.

use std::sync::atomic::Ordering;

use diy_mesh_proto::mesh::v1::discover_request::Action as Report;
use diy_mesh_testkit::tokens::{Signer, now};
use serde_json::{Value, json};

use super::*;

const ISSUER: &str = "https://id.example.com";
const UNAUTHORIZED: &str = "HTTP/1.1 401 Unauthorized\r\n";

/// An issuer as a policy has it, with its keys.
fn issuer(signer: &Signer, fields: &[(&str, &str)]) -> proto::TokenIssuer {
    let field = |(claim, name): &(&str, &str)| proto::ClaimField {
        claim: (*claim).to_owned(),
        name: (*name).to_owned(),
    };
    proto::TokenIssuer {
        name: ISSUER.to_owned(),
        audiences: vec!["shop".to_owned()],
        keys: signer.jwks(),
        fields: fields.iter().map(field).collect(),
    }
}

/// A token with these claims in place of the usual ones.
fn token(signer: &Signer, claims: &[(&str, Value)]) -> String {
    let mut all = json!({
        "iss": ISSUER, "aud": "shop", "sub": "ada", "groups": ["dev", "ops"], "level": 7,
        "exp": now() + 600,
    });
    for (name, value) in claims {
        all[*name] = value.clone();
    }
    signer.sign(&all)
}

/// Allows requests with a token whose groups have this one.
fn with_group(issuer: proto::TokenIssuer, group: &str) -> proto::Authorization {
    let claim = proto::AuthorizedField {
        name: "groups".to_owned(),
        kind: Some(proto::authorized_field::Kind::Exact(group.to_owned())),
    };
    let request = proto::RequestMatch {
        claims: vec![claim],
        ..proto::RequestMatch::default()
    };
    let rule = proto::AuthorizationRule {
        requests: vec![request],
        ..proto::AuthorizationRule::default()
    };
    issuing(issuer, rule)
}

/// An ALLOW policy with an issuer.
fn issuing(issuer: proto::TokenIssuer, rule: proto::AuthorizationRule) -> proto::Authorization {
    let mut authorization = policy(Action::Allow, rule);
    authorization.policies[0].rules[0].revision = 2;
    authorization.policies[0].issuers = vec![issuer];
    authorization
}

/// The response to a request with these fields.
async fn get(pod: &Pod, fields: &str) -> String {
    let mut client = pod.connect(Some("a")).await;
    let request = format!("GET / HTTP/1.1\r\nHost: web\r\nConnection: close\r\n{fields}\r\n");
    client.write_all(request.as_bytes()).await.unwrap();
    String::from_utf8(rest(client).await).unwrap()
}

#[test]
fn invalid_tokens_get_401_and_missing_ones_what_the_rules_say() {
    on_worker(async {
        let (signer, other) = (Signer::new(), Signer::new());
        let (app, requests) = app("web").await;
        let mut pod = Pod::new(app);
        pod.authorize(with_group(issuer(&signer, &[]), "ops")).await;
        let bearer = |token: &str| format!("Authorization: Bearer {token}\r\n");
        let valid = token(&signer, &[]);
        let (head, body) = valid.split_once('.').unwrap();
        let (_, signature) = valid.rsplit_once('.').unwrap();
        for (fields, expected) in [
            (bearer(&valid), OK),
            (format!("authorization:\tbEARER  {valid} \r\n"), OK),
            (
                bearer(&token(&signer, &[("aud", json!(["bank", "shop"]))])),
                OK,
            ),
            (String::new(), DENIED),
            ("Authorization: Basic YTpi\r\n".to_owned(), DENIED),
            (format!("Authorization: Bearer{valid}\r\n"), UNAUTHORIZED),
            (
                bearer(&token(&signer, &[("groups", json!(["dev"]))])),
                DENIED,
            ),
            (bearer(""), UNAUTHORIZED),
            (bearer("opaque"), UNAUTHORIZED),
            (bearer(&format!("{valid}, Bearer {valid}")), UNAUTHORIZED),
            (bearer(&format!("{head}.{body}x")), UNAUTHORIZED),
            (
                bearer(&format!("eyJhbGciOiJub25lIn0.{}", &body)),
                UNAUTHORIZED,
            ),
            (bearer(&format!("{head}..{signature}")), UNAUTHORIZED),
            (bearer(&token(&other, &[])), UNAUTHORIZED),
            (
                bearer(&token(&signer, &[("aud", json!("bank"))])),
                UNAUTHORIZED,
            ),
            (
                bearer(&token(&signer, &[("iss", json!("https://other"))])),
                UNAUTHORIZED,
            ),
            (
                bearer(&token(&signer, &[("exp", json!(1_000_000_000))])),
                UNAUTHORIZED,
            ),
            (
                bearer(&token(&signer, &[("exp", json!(null))])),
                UNAUTHORIZED,
            ),
            (
                bearer(&token(&signer, &[("nbf", json!(9_000_000_000_u64))])),
                UNAUTHORIZED,
            ),
            (
                bearer(&valid) + "Authorization: Basic YTpi\r\n",
                UNAUTHORIZED,
            ),
            (bearer(&valid) + &bearer(&valid), UNAUTHORIZED),
        ] {
            let response = get(&pod, &fields).await;
            assert!(response.starts_with(expected), "{fields}{response}");
            if expected == UNAUTHORIZED {
                assert!(
                    response.contains("x-mesh-error: invalid-token\r\n"),
                    "{response}"
                );
                let challenge = "www-authenticate: Bearer error=\"invalid_token\"\r\n";
                assert!(response.contains(challenge), "{response}");
                assert!(!response.contains(POLICY), "{response}");
                // Outsiders learn nothing of the policies.
                assert!(!response.contains("\"shop\"") && !response.contains("issuer"));
            }
        }
        let requests = requests.borrow();
        assert_eq!(requests.len(), 3);
        assert!(
            requests[0].contains(&bearer(&valid)),
            "the token goes on: {}",
            requests[0]
        );
    });
}

#[test]
fn other_spellings_of_a_bearer_token_are_invalid_tokens() {
    on_worker(async {
        let signer = Signer::new();
        let (app, _) = app2("web").await;
        let mut pod = Pod::new(app);
        // Requests without a token are allowed.
        let rule = proto::AuthorizationRule::default();
        pod.authorize(issuing(issuer(&signer, &[]), rule)).await;
        let forged = "eyJhbGciOiJub25lIn0.e30.";
        for (value, is_token) in [
            (b"Bearer T".to_vec(), true),
            ([b"Bearer\xa0", forged.as_bytes()].concat(), true),
            ([b"Bearer\x85", forged.as_bytes()].concat(), true),
            ([b"\xa0Bearer ", forged.as_bytes()].concat(), true),
            (b"Bearer,T".to_vec(), true),
            (b"Bearer=T".to_vec(), true),
            (b"bearerT".to_vec(), true),
            (b"Basic x, bEARER T".to_vec(), true),
            (b"\"Bearer\" T".to_vec(), true),
            (b"Basic \xc3\xa9".to_vec(), true),
            (b"Basic YTpi".to_vec(), false),
            (b"Digest username=\"bea\"".to_vec(), false),
            (b"Bea".to_vec(), false),
            (b"".to_vec(), false),
        ] {
            let mut client = pod.connect(Some("a")).await;
            let head = b"GET / HTTP/1.1\r\nHost: web\r\nConnection: close\r\nAuthorization: ";
            let request = [&head[..], &value, b"\r\n\r\n"].concat();
            client.write_all(&request).await.unwrap();
            let response = rest(client).await;
            let is_refused = response.starts_with(UNAUTHORIZED.as_bytes());
            assert_eq!(is_refused, is_token, "{}", value.escape_ascii());
            let value = http::HeaderValue::from_bytes(&value).unwrap();
            let get = Request::get("http://web/").header("authorization", value);
            let fields = pod.http2(Some("a"), get.body(()).unwrap()).await;
            let code = fields.get("x-mesh-error");
            assert_eq!(code.is_some_and(|code| code == "invalid-token"), is_token);
        }
    });
}

#[test]
fn grpc_calls_with_invalid_tokens_are_unauthenticated() {
    on_worker(async {
        let signer = Signer::new();
        let (app, requests) = app2("web").await;
        let mut pod = Pod::new(app);
        pod.authorize(with_group(issuer(&signer, &[]), "ops")).await;
        let call = async |token: &str| {
            let request = Request::post("http://web/a.B/C")
                .header("content-type", "application/grpc")
                .header("authorization", format!("Bearer {token}"));
            pod.http2(Some("a"), request.body(()).unwrap()).await
        };
        let refused = call(&token(&signer, &[("exp", json!(1))])).await;
        assert_eq!(refused["grpc-status"], "16");
        assert_eq!(refused["x-mesh-error"], "invalid-token");
        assert!(
            !call(&token(&signer, &[]))
                .await
                .contains_key("x-mesh-error")
        );
        until(|| requests.borrow().len() == 1).await;
    });
}

#[test]
fn application_gets_claims_as_fields_of_the_proxy_alone() {
    on_worker(async {
        let signer = Signer::new();
        let fields = [
            ("sub", "X-User"),
            ("level", "x-level"),
            ("groups", "x-groups"),
        ];
        let authorization = issuing(
            issuer(&signer, &fields),
            proto::AuthorizationRule::default(),
        );
        let token = format!("Bearer {}", token(&signer, &[]));
        let forged = ["X-User", "x_user", "X.USER", "x-level", "X-Groups"];
        let sent: String = forged
            .iter()
            .map(|name| format!("{name}: forged\r\n"))
            .collect();
        let (web, requests) = app("web").await;
        let mut pod = Pod::new(web);
        pod.authorize(authorization.clone()).await;
        let chunked = "Transfer-Encoding: chunked\r\n";
        let trailers = format!("\r\n0\r\nX-Sum: 1\r\n{sent}");
        for authorized in [&format!("Authorization: {token}\r\n"), ""] {
            let response = get(&pod, &format!("{sent}{authorized}{chunked}{trailers}")).await;
            assert!(response.starts_with(OK), "{response}");
            let mut requests = requests.borrow_mut();
            let all: String = requests.drain(..).collect();
            assert!(!all.contains("forged") && all.contains("X-Sum: 1"), "{all}");
            let is_set = all.contains("X-User: ada\r\nx-level: 7\r\n");
            assert_eq!(is_set, !authorized.is_empty(), "{all}");
            assert!(
                !all.to_lowercase().contains("x-groups"),
                "a list has no one form: {all}"
            );
        }
        let (web, requests) = app2("web").await;
        let mut pod = Pod::new(web);
        pod.authorize(authorization).await;
        let mut head = Request::post("http://web/").header("authorization", token);
        let mut trailers = http::HeaderMap::new();
        trailers.insert("x-sum", "1".parse().unwrap());
        for name in ["x-user", "x_user", "x.user", "x-level", "x-groups"] {
            head = head.header(name, "forged");
            trailers.insert(name, "forged".parse().unwrap());
        }
        let connection = pod.connect(Some("a")).await;
        let (mut client, connection) = h2::client::handshake(connection).await.unwrap();
        tokio::task::spawn_local(connection);
        let (response, mut body) = client.send_request(head.body(()).unwrap(), false).unwrap();
        body.send_trailers(trailers).unwrap();
        assert_eq!(response.await.unwrap().status(), 200);
        until(|| !requests.borrow().is_empty()).await;
        let all = requests.borrow()[0].clone();
        assert!(!all.contains("forged") && all.contains("x-sum"), "{all}");
        assert!(
            all.contains("\"x-user\": \"ada\"") && all.contains("\"x-level\": \"7\""),
            "{all}"
        );
    });
}

#[test]
fn values_that_applications_could_read_otherwise_are_no_fields() {
    on_worker(async {
        let signer = Signer::new();
        let (app, requests) = app("web").await;
        let mut pod = Pod::new(app);
        let issuer = issuer(&signer, &[("sub", "x-user")]);
        pod.authorize(issuing(issuer, proto::AuthorizationRule::default()))
            .await;
        for subject in [" ada", "ada\r\nx-user: eve", "", "\u{a0}ada", "a\0"] {
            let token = token(&signer, &[("sub", json!(subject))]);
            let response = get(&pod, &format!("Authorization: Bearer {token}\r\n")).await;
            assert!(response.starts_with(OK), "{response}");
            let request = requests.borrow_mut().pop().unwrap();
            assert!(!request.contains("x-user"), "{subject:?} {request}");
        }
    });
}

#[test]
fn new_keys_apply_to_the_next_request_and_those_under_audit_to_none() {
    on_worker(async {
        let (old, new) = (Signer::new(), Signer::new());
        let (app, _) = app("web").await;
        let mut pod = Pod::new(app);
        let mut client = pod.connect(Some("a")).await;
        let ask = |signer: &Signer| {
            let token = token(signer, &[]);
            format!("GET / HTTP/1.1\r\nHost: web\r\nAuthorization: Bearer {token}\r\n\r\n")
        };
        pod.authorize(with_group(issuer(&old, &[]), "ops")).await;
        exchange(&mut client, ask(&old).as_bytes(), OK.as_bytes()).await;
        pod.authorize(with_group(issuer(&new, &[]), "ops")).await;
        let mut client = pod.connect(Some("a")).await;
        exchange(&mut client, ask(&old).as_bytes(), UNAUTHORIZED.as_bytes()).await;
        let mut client = pod.connect(Some("a")).await;
        exchange(&mut client, ask(&new).as_bytes(), OK.as_bytes()).await;
        let mut audited = with_group(issuer(&new, &[("sub", "x-user")]), "ops");
        audited.policies[0].audit = true;
        pod.authorize(audited).await;
        let mut client = pod.connect(Some("a")).await;
        exchange(&mut client, ask(&old).as_bytes(), OK.as_bytes()).await;
        assert!(pod.audited(1));
        let mut client = pod.connect(Some("a")).await;
        exchange(&mut client, ask(&new).as_bytes(), OK.as_bytes()).await;
        assert!(pod.audited(1));
    });
}

/// The `Authorization` field with the usual token.
fn bearer(signer: &Signer) -> String {
    format!("Authorization: Bearer {}\r\n", token(signer, &[]))
}

#[test]
fn unknown_key_ids_of_known_issuers_are_reported_without_a_trace_of_their_number() {
    on_worker(async {
        let signer = Signer::named("a");
        let (app, _) = app("web").await;
        let mut pod = Pod::new(app);
        pod.authorize(with_group(issuer(&signer, &[]), "ops")).await;
        let forged = Signer::named("a");
        let unnamed = Signer::new();
        let of_other = token(&Signer::named("b"), &[("iss", json!("https://other"))]);
        for field in [
            bearer(&signer),
            bearer(&forged),
            bearer(&unnamed),
            format!("Authorization: Bearer {of_other}\r\n"),
            "Authorization: Bearer opaque\r\n".to_owned(),
        ] {
            get(&pod, &field).await;
            assert_eq!(pod.own.take_unknown_keys(), [""; 0], "{field}");
        }
        for number in 0..20 {
            let response = get(&pod, &bearer(&Signer::named(&number.to_string()))).await;
            assert!(response.starts_with(UNAUTHORIZED), "{response}");
        }
        assert_eq!(pod.own.take_unknown_keys(), [ISSUER]);
        assert_eq!(pod.own.take_unknown_keys(), [""; 0]);
        // Keys without an ID are tried, and their failure says that the key is another one.
        pod.authorize(with_group(issuer(&unnamed, &[]), "ops"))
            .await;
        get(&pod, &bearer(&signer)).await;
        assert_eq!(pod.own.take_unknown_keys(), [ISSUER]);
    });
}

/// A pod whose policy comes from a controller.
struct Controlled {
    pod: Pod,
    controller: FakeController,
    stream: FakeStream,
    metrics: DiscoveryMetrics,
}

impl Controlled {
    async fn new(app: SocketAddr) -> Self {
        let mut controller = FakeController::start().await;
        controller.announces_self.store(true, Ordering::SeqCst);
        let exceptions = Arc::new(Exceptions::new(std::time::Instant::now()));
        let timing = Timing {
            sweep_interval: Duration::from_millis(5),
            ..Timing::default()
        };
        let metrics = DiscoveryMetrics::default();
        let (discovery, driver) = start_with(
            Control::new(controller.url(), None, None),
            Trust::default(),
            crate::secure::identity::none(),
            metrics.clone(),
            Reported::new(exceptions, None, OwnProxy::default().requests),
            timing,
            OwnProxy::default(),
        );
        tokio::spawn(driver);
        let stream = controller.stream().await;
        let pod = Pod::with(app, |context| WorkerContext {
            discovery,
            ..context
        });
        Self {
            pod,
            controller,
            stream,
            metrics,
        }
    }

    /// Sends the keys of an issuer in a policy.
    async fn send(&mut self, signer: &Signer) {
        let version = self.pod.worker.policy_version();
        let workload = proto::Workload {
            inbound_mode: proto::workload::InboundMode::Permissive.into(),
            authorization: Some(with_group(issuer(signer, &[]), "ops")),
            ..proto::Workload::default()
        };
        let version_sent = version.to_string();
        self.stream
            .respond("", &version_sent, Update::Workload(workload))
            .await;
        until(|| self.pod.worker.policy_version() > version).await;
    }

    async fn expect(&self, signer: &Signer, expected: &str) {
        let response = get(&self.pod, &bearer(signer)).await;
        assert!(response.starts_with(expected), "{response}");
    }
}

#[test]
fn controller_is_told_about_unknown_keys_and_their_tokens_are_valid_when_it_sends_them() {
    on_worker(async {
        let (old, new) = (Signer::named("old"), Signer::named("new"));
        let mut controlled = Controlled::new(app("web").await.0).await;
        controlled.send(&old).await;
        controlled.expect(&old, OK).await;
        controlled.expect(&new, UNAUTHORIZED).await;
        let issuers = loop {
            if let Report::UnknownKeys(keys) = controlled.stream.action().await {
                break keys.issuers;
            }
        };
        assert_eq!(issuers, [ISSUER]);
        controlled.send(&new).await;
        controlled.expect(&new, OK).await;
    });
}

#[test]
fn tokens_are_verified_an_hour_after_the_last_contact_with_a_controller() {
    // Without the timeout of other tests: the clock advances.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let (known, unknown) = (Signer::named("known"), Signer::named("unknown"));
        let mut controlled = Controlled::new(app("web").await.0).await;
        controlled.send(&known).await;
        let Controlled {
            pod,
            controller,
            stream,
            metrics,
        } = controlled;
        drop(stream);
        controller.stop().await;
        until(|| metrics.connected.get() == 0).await;
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(3600)).await;
        tokio::time::resume();
        until(|| metrics.reconnects.get() > 0).await;
        // No token was verified before: the proxy has the keys, not only former results.
        for (signer, expected) in [(&known, OK), (&unknown, UNAUTHORIZED)] {
            let response = get(&pod, &bearer(signer)).await;
            assert!(response.starts_with(expected), "{response}");
        }
    });
}
