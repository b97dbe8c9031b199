//! The controller over TLS, and the whole life of an identity with it: discovery, certificates and roots together.

use std::net::SocketAddr;
use std::sync::Arc;

use diy_mesh_proto::mesh::v1 as proto;
use proto::discover_response::Update;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::UnboundedReceiverStream;

use super::testing::{CONTROLLER, FakeController, Mounted, Signing, soon};
use super::*;
use crate::discovery::{self, Discovery};
use crate::identity::testing::{Authority, WEB, token};
use crate::identity::{self, CurrentCredentials, Trust};
use crate::metrics::{DiscoveryMetrics, IdentityMetrics};

const LOOPBACK: ([u8; 4], u16) = ([127, 0, 0, 1], 0);
const WEB_USER: &str = "system:serviceaccount:shop:web";

fn connecting(address: SocketAddr, mounted: &Mounted, trust: &Trust) -> Control {
    Control::new(
        &format!("https://{address}"),
        Some(mounted.token_file()),
        Some(mounted.tls(trust)),
    )
    .expect("an address")
}

/// Opens a stream and says what came of it.
async fn opened(control: &Control) -> Result<(), String> {
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
fn addresses_are_checked_before_anything_is_dialled() {
    assert!(
        Control::new(
            "http://controller.service-mesh.svc.cluster.local.:8080",
            None,
            None
        )
        .is_ok()
    );
    assert!(Control::new("http://[fd00::1]:8080", None, None).is_ok());
    for wrong in [
        "",
        "controller:8080",
        "ftp://controller:8080",
        "https://controller:8080",
        "http://",
        "http://a b:80",
    ] {
        let error = Control::new(wrong, None, None)
            .expect_err(wrong)
            .to_string();
        assert!(
            error.contains("expected something like https://"),
            "{wrong}: {error}"
        );
    }
}

#[test]
fn a_token_is_sent_as_bearer_and_never_printed() {
    let value = bearer(Path::new("t"), "abc.def").expect("a token");
    assert_eq!(value.to_str().expect("text"), "Bearer abc.def");
    assert!(!format!("{value:?}").contains("abc"));
    assert!(bearer(Path::new("t"), "bell\u{7}").is_err());
}

#[tokio::test]
async fn the_token_file_is_read_at_each_call_and_its_absence_is_named() {
    let path = std::env::temp_dir().join(format!("diy-sm-proxy-token-{}", std::process::id()));
    let control = Control::new("http://127.0.0.1:1", Some(path.clone()), None).expect("an address");
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
async fn a_controller_that_is_away_is_an_error_that_says_where() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = format!("http://{}", listener.local_addr().expect("bound"));
    drop(listener);
    let error = Control::new(&address, None, None)
        .expect("an address")
        .discover(tokio_stream::empty())
        .await;
    let text = error.expect_err("nobody listens").to_string();
    assert!(
        text.contains(&address) && text.contains("refused"),
        "{text}"
    );
}

#[tokio::test]
async fn the_controller_is_known_by_its_identity() {
    let (authority, other) = (Authority::new("one"), Authority::new("other"));
    let mounted = Mounted::new(&authority, &token(WEB_USER));
    for (signer, identity, expected) in [
        (&authority, CONTROLLER, None),
        (
            &authority,
            WEB,
            Some("the peer is spiffe://cluster.local/ns/shop/sa/web, expected spiffe"),
        ),
        (&other, CONTROLLER, Some("UnknownIssuer")),
    ] {
        let controller = FakeController::start_tls(LOOPBACK.into(), signer, identity).await;
        let error = opened(&connecting(controller.address, &mounted, &Trust::default()))
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
async fn a_controller_in_the_clear_is_not_talked_to_where_tls_is_expected() {
    let authority = Authority::new("one");
    let mounted = Mounted::new(&authority, &token(WEB_USER));
    let controller = FakeController::start().await;
    let error = opened(&connecting(controller.address, &mounted, &Trust::default()))
        .await
        .expect_err("no TLS");
    assert!(error.contains("can't connect to the controller"), "{error}");
}

#[tokio::test]
async fn a_server_of_the_right_identity_that_does_not_speak_http2_is_none() {
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
    let control = connecting(listener.local_addr().unwrap(), &mounted, &Trust::default());
    let serving = async { acceptor.accept(listener.accept().await.unwrap().0).await };
    let (_stream, error) = tokio::join!(serving, opened(&control));
    let error = error.expect_err("no HTTP/2");
    assert!(error.contains("not HTTP/2"), "{error}");
}

#[tokio::test]
async fn the_mounted_roots_are_read_anew_and_those_that_were_sent_count_too() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let mounted = Mounted::new(&old, &token(WEB_USER));
    let controller = FakeController::start_tls(LOOPBACK.into(), &new, CONTROLLER).await;
    let trust = Trust::default();
    let control = connecting(controller.address, &mounted, &trust);
    assert!(
        opened(&control).await.is_err(),
        "signed by whom nobody has heard of yet"
    );
    mounted.write_roots(&(old.pem() + &new.pem()));
    assert_eq!(opened(&control).await, Ok(()));
    mounted.write_roots("half a ");
    assert!(
        opened(&control)
            .await
            .unwrap_err()
            .contains("roots.pem are no roots")
    );
    trust.announce(identity::Roots::parse(new.pem().as_bytes(), "1").unwrap());
    assert_eq!(opened(&control).await, Ok(()), "what was sent is enough");
    std::fs::remove_file(mounted.roots_file()).unwrap();
    assert_eq!(opened(&control).await, Ok(()));
    assert!(
        opened(&connecting(controller.address, &mounted, &Trust::default()))
            .await
            .unwrap_err()
            .contains("can't read the trust roots")
    );
}

/// A proxy's side of all that has to do with the controller.
struct Proxy {
    _discovery: Discovery,
    credentials: CurrentCredentials,
    metrics: IdentityMetrics,
    _tasks: JoinSet<()>,
}

impl Proxy {
    fn start(address: SocketAddr, mounted: &Mounted) -> Self {
        let (trust, metrics) = (Trust::default(), IdentityMetrics::default());
        let control = connecting(address, mounted, &trust);
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
async fn certificates_of_seconds_follow_each_other_and_the_controller_hears_of_each() {
    let authority = Arc::new(Authority::new("one"));
    let mounted = Mounted::new(&authority, &token(WEB_USER));
    let mut controller = FakeController::start_tls(LOOPBACK.into(), &authority, CONTROLLER).await;
    controller.sign(Some(Signing {
        authority: authority.clone(),
        life: Duration::from_secs(3),
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
    assert!(proxy.credentials.borrow().is_some(), "it never was without");
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
        life: Duration::from_secs(3600),
        roots_version: "1",
    }));
    proxy.has_certificate(true).await;
}

#[tokio::test]
async fn a_rotation_is_followed_step_by_step_and_a_new_stream_says_where_the_proxy_stands() {
    let (old, new) = (
        Arc::new(Authority::new("old")),
        Arc::new(Authority::new("new")),
    );
    let mounted = Mounted::new(&old, &token(WEB_USER));
    let mut controller = FakeController::start_tls(LOOPBACK.into(), &old, CONTROLLER).await;
    let signing = Signing {
        authority: old.clone(),
        life: Duration::from_secs(3600),
        roots_version: "old",
    };
    controller.sign(Some(signing.clone()));
    let mut proxy = Proxy::start(controller.address, &mounted);
    let mut stream = controller.stream().await;
    stream.answer("", "old", roots(&[&old], &old, 0)).await;
    assert_eq!(stream.request().await, "=old");
    proxy.has_certificate(true).await;
    // Nonsense changes nothing, and is not acknowledged.
    stream
        .answer("", "none", Update::Roots(proto::Roots::default()))
        .await;
    stream
        .answer("", "both", roots(&[&old, &new], &old, 0))
        .await;
    let acknowledged = stream.status().await;
    assert_eq!(
        (
            acknowledged.roots_version.as_str(),
            acknowledged.certificate_issuer
        ),
        ("both", old.key_id())
    );
    // The issuer is about to switch; the controller comes back with a certificate of the new one.
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
        "the mounted roots are still the old ones"
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
