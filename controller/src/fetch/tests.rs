//! Fetches over TLS from a server on the loopback interface.

use diy_mesh_testkit::authority;
use diy_mesh_testkit::net::{listen, read_until};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::catalog::Change;
use crate::index::Resource;
use crate::index::dependencies::CONFIGURATION;
use crate::index::state::TargetKind;
use crate::index::tests::pod;
use crate::kinds::Object;
use crate::kinds::authorization::keys;
use crate::kinds::authorization::tests::policy_with;
use crate::object::{Kind, ObjectId, PodRef};
use crate::status::statuses::Statuses as _;

/// The key of RFC 7515, appendix A.3.
const KEYS: &str = r#"{"keys": [{"kty": "EC", "crv": "P-256",
    "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU",
    "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"}]}"#;

/// A server for `localhost`, which gives one response to all requests, and the CA of its certificate.
struct Server {
    url: String,
    roots: tempfile::NamedTempFile,
}

impl Server {
    async fn new(response: String) -> Server {
        let server = authority::server("localhost");
        let roots = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(roots.path(), server.root).unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(server.config));
        let (listener, address) = listen().await;
        let url = format!("https://localhost:{}/keys", address.port());
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let Ok(mut stream) = acceptor.accept(stream).await else {
                    continue;
                };
                let head = read_until(&mut stream, "\r\n\r\n").await;
                assert!(head.starts_with("GET /keys HTTP/1.1\r\nhost: localhost:"));
                // Empty: it does not respond.
                if response.is_empty() {
                    std::future::pending::<()>().await;
                }
                let _ = stream.write_all(response.as_bytes()).await;
                let _ = stream.shutdown().await;
            }
        });
        Server { url, roots }
    }

    fn allowed(&self) -> Allowed {
        Allowed {
            private_urls: [self.url.clone()].into(),
            roots: self.roots.path().to_owned(),
            ..Allowed::default()
        }
    }

    async fn fetch(&self, allowed: Allowed) -> Result<String, String> {
        let fetcher = Fetcher::new(None, allowed);
        fetcher.fetch(&Source::Url(self.url.clone())).await
    }
}

fn ok(body: &str) -> String {
    format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

#[tokio::test]
async fn keys_are_those_of_an_allowed_url_over_verified_tls() {
    let server = Server::new(ok(KEYS)).await;
    let expected = Keys::public(KEYS.as_bytes()).unwrap();
    assert_eq!(server.fetch(server.allowed()).await, Ok(expected));
    let other = Server::new(ok(KEYS)).await;
    let url = || BTreeSet::from([server.url.clone()]);
    for (allowed, expected) in [
        (
            Allowed {
                roots: other.roots.path().to_owned(),
                ..server.allowed()
            },
            "TLS with localhost",
        ),
        (
            Allowed {
                roots: "/nowhere".into(),
                ..server.allowed()
            },
            "cannot read /nowhere",
        ),
        (
            Allowed {
                private_urls: BTreeSet::new(),
                ..server.allowed()
            },
            "has not allowed the URL (--key-urls)",
        ),
        (
            Allowed {
                private_urls: BTreeSet::new(),
                urls: url(),
                ..server.allowed()
            },
            "localhost has only private addresses",
        ),
    ] {
        let error = server.fetch(allowed).await.expect_err(expected);
        assert!(error.contains(expected), "{error}");
    }
}

#[tokio::test]
async fn redirects_errors_and_other_contents_are_no_keys() {
    let symmetric = r#"{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}"#;
    let moved = "HTTP/1.1 302 Found\r\nLocation: /other\r\nContent-Length: 0\r\n\r\n";
    let large = format!("{KEYS}{}", " ".repeat(MAX_KEY_BYTES));
    for (response, expected) in [
        (moved.to_owned(), "the response is 302"),
        (
            "HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n".to_owned(),
            "500",
        ),
        (ok(symmetric), "no JWK set with a public key"),
        (ok("<html>"), "no JWK set with a public key"),
        (ok(&large), "length limit exceeded"),
        (ok(KEYS)[..60].to_owned(), ""),
        ("SSH-2.0-x\r\n\r\n".to_owned(), ""),
    ] {
        let server = Server::new(response).await;
        let error = server.fetch(server.allowed()).await.expect_err(expected);
        assert!(error.contains(expected), "{error}");
    }
    let fetcher = Fetcher::new(None, Allowed::default());
    let secret = Source::Secret(Key::new("shop", "idp"), "jwks".to_owned());
    assert!(
        fetcher
            .fetch(&secret)
            .await
            .expect_err("no cluster")
            .contains("no cluster")
    );
}

#[tokio::test(start_paused = true)]
async fn issuer_that_does_not_respond_is_given_up() {
    let server = Server::new(String::new()).await;
    let error = server
        .fetch(server.allowed())
        .await
        .expect_err("no response");
    assert!(error.contains("no response within 10s"), "{error}");
}

#[test]
fn only_addresses_of_the_internet_are_public() {
    for (address, expected) in [
        ("1.1.1.1", true),
        ("2606:4700::1111", true),
        ("10.0.0.1", false),
        ("172.20.0.1", false),
        ("192.168.1.1", false),
        ("127.0.0.1", false),
        ("169.254.169.254", false),
        ("100.64.0.1", false),
        ("0.0.0.0", false),
        ("255.255.255.255", false),
        ("224.0.0.1", false),
        ("192.0.0.8", false),
        ("192.0.2.1", false),
        ("192.88.99.1", false),
        ("198.17.255.255", true),
        ("198.18.0.1", false),
        ("198.19.255.255", false),
        ("100.63.255.255", true),
        ("100.127.255.255", false),
        ("::1", false),
        ("::", false),
        ("fd00::1", false),
        ("fe80::1", false),
        ("ff02::1", false),
        ("::ffff:10.0.0.1", false),
        ("64:ff9b::a00:1", false),
        ("2002:a00:1::", false),
        ("2001::a00:1", false),
        ("2001:1ff::1", false),
        ("2001:200::1", true),
        ("2001:db8::1", false),
        ("3fff:fff::1", false),
        ("3ffe::1", true),
    ] {
        assert_eq!(is_public(address.parse().unwrap()), expected, "{address}");
    }
}

/// A policy for all pods of `shop` whose issuer has its keys at a URL.
fn policy(url: &str, status: &Value) -> Object {
    let issuer = json!({"issuer": "https://id.example.com", "audiences": ["shop"],
        "keys": {"type": "URL", "url": url}});
    let spec = json!({"targetRefs": [{"kind": "Pod", "selector": {}}], "action": "ALLOW",
        "issuers": [issuer], "rules": [{}]});
    let policy = policy_with("shop", "p", &spec, status);
    assert_eq!(policy.rejection(), None);
    Object::Authorization(policy)
}

fn policy_id() -> ObjectId {
    (Kind::Authorization, Key::new("shop", "p"))
}

/// A controller that has started with these objects.
fn hub(objects: impl IntoIterator<Item = Object>) -> Hub {
    let hub = Hub::default();
    hub.apply(
        CONFIGURATION
            .iter()
            .map(|kind| Change::Reset(*kind, vec![])),
    );
    hub.apply(objects.into_iter().map(Change::Apply));
    hub
}

#[tokio::test(start_paused = true)]
async fn reported_keys_are_fetched_again_within_seconds() {
    let pod = Object::Pod(pod("a", &[]));
    let hub = hub([pod, policy("https://id/keys", &json!({}))]);
    for (_, source) in hub.begin_fetches(Instant::now()) {
        hub.end_fetch(&source, Ok(KEYS.to_owned()), Instant::now());
    }
    // Attempts fail: the operator has not allowed the URL.
    let fetcher = Fetcher::new(None, Allowed::default());
    let has_failed = async |time| {
        let _ = timeout(time, fetcher.run(&hub)).await;
        let status = hub.get(&policy_id()).unwrap().unwrap();
        status.issuers[0].1.message.is_some()
    };
    assert!(!has_failed(Duration::from_secs(50)).await);
    let pod = PodRef {
        namespace: "shop".into(),
        name: "a".into(),
        uid: "".into(),
    };
    let issuers = ["https://id.example.com".to_owned()];
    hub.report_unknown_keys(&pod, &issuers, Instant::now());
    assert!(has_failed(REVIEW_INTERVAL).await);
}

#[tokio::test(start_paused = true)]
async fn keys_of_the_status_outlive_an_hour_without_issuer_and_a_restart() {
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}/keys", gone.local_addr().unwrap());
    drop(gone);
    let allowed = Allowed {
        private_urls: [url.clone()].into(),
        ..Allowed::default()
    };
    let mut status = json!({"issuers": [{"source": url, "keys": KEYS}], "ancestors": []});
    for _restart in 0..2 {
        let hub = hub([Object::Pod(pod("a", &[])), policy(&url, &status)]);
        let mut subscriber = hub.watch_resources(None);
        let own = Resource::Workload(Key::new("shop", "a"), "".into());
        subscriber.subscribe(&own);
        let fetcher = Fetcher::new(None, allowed.clone());
        let _ = timeout(Duration::from_secs(3600), fetcher.run(&hub)).await;
        // As the holder of the Lease writes it.
        let written = hub.get(&policy_id()).unwrap().unwrap();
        status["issuers"] =
            keys::merge(&written.issuers, &status).unwrap_or(status["issuers"].take());
        let entry = &keys::entries(&status.to_string())[0];
        assert_eq!(entry.keys.as_deref(), Some(KEYS));
        assert!(entry.message.is_some(), "the issuer is gone");
        hub.apply([Change::Apply(policy(&url, &status))]);
        let (_, state) = subscriber.next().expect("a state of the pod");
        let Some(TargetKind::Workload(workload)) = state.target.as_ref().map(|one| &one.kind)
        else {
            panic!("{state:?}")
        };
        let sent = workload.message().authorization.unwrap();
        assert_eq!(sent.policies[0].issuers[0].keys, KEYS);
    }
}
