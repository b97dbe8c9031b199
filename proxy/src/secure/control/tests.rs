//! Calls of a controller over TLS; discovery, certificates and roots together.

use std::net::SocketAddr;
use std::sync::Arc;

use diy_mesh_proto::mesh::v1 as proto;
use proto::discover_response::Update;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::UnboundedReceiverStream;

use super::testing::{CONTROLLER, FakeController, Mounted, Signing};
use super::*;
use crate::discovery::{self, Discovery, OwnProxy};
use crate::observe::metrics::{DiscoveryMetrics, IdentityMetrics, Metrics};
use crate::secure::identity::testing::{Authority, WEB, token};
use crate::secure::identity::{self, CurrentCredentials, Trust};
use diy_mesh_testkit::net::closed_address;
use diy_mesh_testkit::wait::soon;

const LOOPBACK: ([u8; 4], u16) = ([127, 0, 0, 1], 0);
const WEB_USER: &str = "system:serviceaccount:shop:web";

fn client(address: SocketAddr, mounted: &Mounted, trust: &Trust) -> Control {
    let url = format!("https://{address}").parse().expect("a URL");
    Control::new(url, Some(mounted.token_file()), Some(mounted.tls(trust)))
}

/// Opens a stream and returns the result.
async fn open_stream(control: &Control) -> Result<(), String> {
    let (_requests, outgoing) = tokio::sync::mpsc::unbounded_channel();
    soon(
        control
            .clone()
            .discover(UnboundedReceiverStream::new(outgoing)),
    )
    .await
    .map(drop)
    .map_err(|error| error.to_string())
}

#[test]
fn sends_token_as_bearer_and_omits_it_from_debug() {
    let value = bearer(Path::new("t"), "abc.def").expect("a token");
    assert_eq!(value.to_str().expect("text"), "Bearer abc.def");
    assert!(!format!("{value:?}").contains("abc"));
    assert!(bearer(Path::new("t"), "bell\u{7}").is_err());
}

#[test]
fn backoff_ceiling_doubles_up_to_a_maximum() {
    let bounds = (Duration::from_millis(100), Duration::from_secs(10));
    let ceilings: Vec<_> = (0..11)
        .map(|failures| backoff_ceiling(bounds, failures).as_millis())
        .collect();
    assert_eq!(
        ceilings,
        [
            100, 100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000, 10_000
        ]
    );
    assert_eq!(backoff_ceiling(bounds, u32::MAX), Duration::from_secs(10));
}

#[tokio::test]
async fn reads_token_file_on_each_call() {
    let path = std::env::temp_dir().join(format!("diy-sm-proxy-token-{}", std::process::id()));
    let url = Uri::from_static("http://127.0.0.1:1");
    let control = Control::new(url, Some(path.clone()), None);
    let missing = control.token().await.expect_err("no file yet").to_string();
    assert!(missing.contains(&path.display().to_string()), "{missing}");
    for token in ["first", "second"] {
        std::fs::write(&path, format!("{token}\n")).expect("a file in the temporary folder");
        let value = control.token().await.expect("a token").expect("a token");
        assert_eq!(value.to_str().expect("text"), format!("Bearer {token}"));
    }
    for wrong in ["", "two words", "line\nbreak"] {
        std::fs::write(&path, wrong).expect("a file in the temporary folder");
        assert!(control.token().await.is_err(), "{wrong:?}");
    }
    std::fs::remove_file(&path).expect("the file is there");
}

#[tokio::test]
async fn reports_address_of_unavailable_controller() {
    let address = format!("http://{}", closed_address());
    let control = Control::new(address.parse().expect("a URL"), None, None);
    let error = control.discover(tokio_stream::empty()).await;
    let text = error.expect_err("no listener").to_string();
    assert!(
        text.contains(&address) && text.contains("refused"),
        "{text}"
    );
}

#[tokio::test]
async fn verifies_identity_of_the_controller() {
    let (authority, other) = (Authority::new("one"), Authority::new("other"));
    let mounted = Mounted::new(&authority, &token(WEB_USER));
    for (signer, identity, expected) in [
        (&authority, CONTROLLER, None),
        (
            &authority,
            WEB,
            Some("peer is spiffe://cluster.local/ns/shop/sa/web, expected spiffe"),
        ),
        (&other, CONTROLLER, Some("UnknownIssuer")),
    ] {
        let controller = FakeController::start_tls(LOOPBACK.into(), signer, identity).await;
        let error = open_stream(&client(controller.address, &mounted, &Trust::default()))
            .await
            .err();
        assert_eq!(error.is_some(), expected.is_some(), "{error:?}");
        assert!(
            error
                .unwrap_or_default()
                .contains(expected.unwrap_or_default()),
            "expected {expected:?}"
        );
    }
}

#[tokio::test]
async fn rejects_plaintext_controller_if_tls_is_configured() {
    let authority = Authority::new("one");
    let mounted = Mounted::new(&authority, &token(WEB_USER));
    let controller = FakeController::start().await;
    let error = open_stream(&client(controller.address, &mounted, &Trust::default()))
        .await
        .expect_err("no TLS");
    assert!(
        error.contains("failed to connect to the controller"),
        "{error}"
    );
}

#[tokio::test]
async fn rejects_controller_without_http2() {
    let authority = Authority::new("one");
    let mounted = Mounted::new(&authority, &token(WEB_USER));
    let (certificate, key) = authority.leaf_and_key(CONTROLLER, |_| {});
    let key = rustls::pki_types::PrivatePkcs8KeyDer::from(key.serialize_der());
    let config = rustls::ServerConfig::builder_with_provider(Arc::new(
        rustls::crypto::aws_lc_rs::default_provider(),
    ));
    let config = config
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth();
    let acceptor = TlsAcceptor::from(Arc::new(
        config
            .with_single_cert(vec![certificate], key.into())
            .unwrap(),
    ));
    let listener = TcpListener::bind(SocketAddr::from(LOOPBACK)).await.unwrap();
    let control = client(listener.local_addr().unwrap(), &mounted, &Trust::default());
    let serving = async { acceptor.accept(listener.accept().await.unwrap().0).await };
    let (_stream, error) = tokio::join!(serving, open_stream(&control));
    let error = error.expect_err("no HTTP/2");
    assert!(error.contains("HTTP/2 not negotiated"), "{error}");
}

#[tokio::test]
async fn reads_mounted_roots_on_each_call_and_adds_received_ones() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let mounted = Mounted::new(&old, &token(WEB_USER));
    let controller = FakeController::start_tls(LOOPBACK.into(), &new, CONTROLLER).await;
    let trust = Trust::default();
    let control = client(controller.address, &mounted, &trust);
    assert!(open_stream(&control).await.is_err(), "unknown issuer");
    mounted.write_roots(&(old.pem() + &new.pem()));
    assert_eq!(open_stream(&control).await, Ok(()));
    mounted.write_roots("half a ");
    assert!(
        open_stream(&control)
            .await
            .unwrap_err()
            .contains("invalid trust roots in")
    );
    trust.set_from_stream(identity::Roots::parse(new.pem().as_bytes(), "1").unwrap());
    assert_eq!(
        open_stream(&control).await,
        Ok(()),
        "received roots are sufficient"
    );
    std::fs::remove_file(mounted.roots_file()).unwrap();
    assert_eq!(open_stream(&control).await, Ok(()));
    assert!(
        open_stream(&client(controller.address, &mounted, &Trust::default()))
            .await
            .unwrap_err()
            .contains("failed to read the trust roots")
    );
}

/// Running discovery and renewal of a proxy.
struct Proxy {
    _discovery: Discovery,
    credentials: CurrentCredentials,
    metrics: IdentityMetrics,
    _tasks: JoinSet<()>,
}

impl Proxy {
    fn start(address: SocketAddr, mounted: &Mounted) -> Self {
        let (trust, metrics) = (Trust::default(), IdentityMetrics::default());
        let control = client(address, mounted, &trust);
        let (credentials, renewal) = identity::start(
            control.clone(),
            "cluster.local".to_owned(),
            trust.clone(),
            metrics.clone(),
        );
        let (discovery, driver) = discovery::start(
            control,
            trust,
            credentials.clone(),
            DiscoveryMetrics::default(),
            Metrics::new().exceptions.clone(),
            OwnProxy::default(),
        );
        let mut tasks = JoinSet::new();
        tasks.spawn(renewal);
        tasks.spawn(driver);
        Self {
            _discovery: discovery,
            credentials,
            metrics,
            _tasks: tasks,
        }
    }

    async fn has_certificate(&mut self, has: bool) {
        soon(
            self.credentials
                .wait_for(|credentials| credentials.is_some() == has),
        )
        .await
        .expect("the task runs");
    }
}

fn roots(authorities: &[&Authority], issuer: &Authority, renew_within_seconds: u32) -> Update {
    let pem: String = authorities
        .iter()
        .map(|authority| authority.pem())
        .collect();
    Update::Roots(proto::Roots {
        pem: pem.into_bytes(),
        issuer: issuer.key_id(),
        renew_within_seconds,
    })
}

#[tokio::test]
async fn reports_each_renewed_certificate_to_the_controller() {
    let authority = Arc::new(Authority::new("one"));
    let mounted = Mounted::new(&authority, &token(WEB_USER));
    let mut controller = FakeController::start_tls(LOOPBACK.into(), &authority, CONTROLLER).await;
    controller.sign(Some(Signing {
        authority: authority.clone(),
        // The renewal has a fifth of it.
        lifetime: Duration::from_secs(10),
        roots_version: "1",
    }));
    let mut proxy = Proxy::start(controller.address, &mounted);
    let mut stream = controller.stream().await;
    assert_eq!(
        stream.authorization,
        Some(format!("Bearer {}", token(WEB_USER)))
    );
    let (first, second) = (stream.status().await, stream.status().await);
    assert_eq!(
        (first.roots_version.as_str(), first.certificate_issuer),
        ("1", authority.key_id())
    );
    assert!(
        first.certificate_serial != second.certificate_serial
            && first.certificate_not_after < second.certificate_not_after
    );
    assert!(first.clock > 1_700_000_000_000 && !first.proxy_version.is_empty());
    assert!(
        proxy.credentials.borrow().is_some(),
        "renewed before expiry"
    );
    controller.sign(None);
    proxy.has_certificate(false).await;
    assert!(proxy.metrics.certificates.get() >= 2);
    soon(async {
        while proxy.metrics.failures.get() == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    controller.sign(Some(Signing {
        authority,
        lifetime: Duration::from_secs(3600),
        roots_version: "1",
    }));
    proxy.has_certificate(true).await;
}

#[tokio::test]
async fn follows_root_rotation_and_reports_status_on_a_new_stream() {
    let (old, new) = (
        Arc::new(Authority::new("old")),
        Arc::new(Authority::new("new")),
    );
    let mounted = Mounted::new(&old, &token(WEB_USER));
    // An address of this test alone: other tests cannot get the port meanwhile.
    let alone = ([127, 0, 1, 3], 0).into();
    let mut controller = FakeController::start_tls(alone, &old, CONTROLLER).await;
    let signing = Signing {
        authority: old.clone(),
        lifetime: Duration::from_secs(3600),
        roots_version: "old",
    };
    controller.sign(Some(signing.clone()));
    let mut proxy = Proxy::start(controller.address, &mounted);
    let mut stream = controller.stream().await;
    stream.respond("", "old", roots(&[&old], &old, 0)).await;
    assert_eq!(stream.request().await, "=old");
    proxy.has_certificate(true).await;
    // Invalid roots are rejected.
    stream
        .respond("", "none", Update::Roots(proto::Roots::default()))
        .await;
    let rejected = stream.request().await;
    assert!(
        rejected.starts_with("RESOURCE_TYPE_ROOTS@none \"no certificate"),
        "{rejected}"
    );
    stream
        .respond("", "both", roots(&[&old, &new], &old, 0))
        .await;
    let acknowledged = stream.status().await;
    assert_eq!(
        (
            acknowledged.roots_version.as_str(),
            acknowledged.certificate_issuer
        ),
        ("both", old.key_id())
    );
    // The issuer changes; the controller restarts with a certificate of the new one.
    drop(stream);
    let address = controller.stop().await;
    let mut controller = FakeController::start_tls(address, &new, CONTROLLER).await;
    controller.sign(Some(Signing {
        authority: new.clone(),
        roots_version: "both",
        ..signing
    }));
    let mut stream = controller.stream().await;
    assert_eq!(
        stream.request().await,
        "=both",
        "trusted by the received roots"
    );
    assert_eq!(
        proxy
            .credentials
            .borrow()
            .as_ref()
            .map(|credentials| credentials.roots.len()),
        Some(2)
    );
}
