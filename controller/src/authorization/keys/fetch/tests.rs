//! Fetches over TLS from a server on the loopback interface.

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::PrivateKeyDer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::*;

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
        let mut ca = CertificateParams::default();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca_key = KeyPair::generate().unwrap();
        let roots = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(roots.path(), ca.self_signed(&ca_key).unwrap().pem()).unwrap();
        let key = KeyPair::generate().unwrap();
        let leaf = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let leaf = leaf.signed_by(&key, &Issuer::new(ca, ca_key)).unwrap();
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let config = rustls::ServerConfig::builder().with_no_client_auth();
        let config = config
            .with_single_cert(vec![leaf.der().clone()], key)
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!(
            "https://localhost:{}/keys",
            listener.local_addr().unwrap().port()
        );
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let Ok(mut stream) = acceptor.accept(stream).await else {
                    continue;
                };
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await.unwrap());
                }
                assert!(head.starts_with(b"GET /keys HTTP/1.1\r\nhost: localhost:"));
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
    assert_eq!(server.fetch(server.allowed()).await.as_deref(), Ok(KEYS));
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
        ("198.18.0.1", false),
        ("::1", false),
        ("::", false),
        ("fd00::1", false),
        ("fe80::1", false),
        ("ff02::1", false),
        ("::ffff:10.0.0.1", false),
        ("64:ff9b::a00:1", false),
        ("2002:a00:1::", false),
    ] {
        assert_eq!(is_public(address.parse().unwrap()), expected, "{address}");
    }
}
