//! Certificates over loopback: who gets one and who does not, the roots on the stream, and the
//! controller's own certificate.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use diy_mesh_controller::authority::{Roots, Trust, TrustSender, self_signed};
use diy_mesh_controller::issuer::Issuer;
use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_testkit::has_program;
use diy_mesh_testkit::wait::soon;
use proto::discover_request::Action;
use proto::discover_response::Update;
use rcgen::{CertificateParams, DnType, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::{Value, json};
use support::{Client, Sandbox, claims};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::{Code, Status};

const USER: &str = "system:serviceaccount:shop:web";

fn pod(name: &str, uid: &str, ip: &str) -> String {
    format!(
        "---
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: shop, uid: \"{uid}\"}}
spec: {{serviceAccountName: web, initContainers: [{{name: proxy, env: [{{name: SERVICE_MESH_TOKEN_FILE}}]}}], containers: []}}
status: {{phase: Running, podIP: {ip}, podIPs: [{{ip: {ip}}}]}}
"
    )
}

fn csr(name: &str) -> Vec<u8> {
    let mut params = CertificateParams::new(["admin.shop".to_owned()]).unwrap();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params
        .serialize_request(&KeyPair::generate().unwrap())
        .unwrap()
        .pem()
        .unwrap()
        .into_bytes()
}

async fn sign(
    client: &mut Client,
    token: String,
) -> Result<proto::SignCertificateResponse, Status> {
    let request = proto::SignCertificateRequest {
        name: USER.into(),
        token,
        csr: csr(USER),
    };
    Ok(client.client.sign_certificate(request).await?.into_inner())
}

fn token(sandbox: &Sandbox, claim: &str, value: Value) -> String {
    let mut claims = claims();
    claims[claim] = value;
    sandbox.issuer.sign(&claims)
}

fn bound(pod: &str, uid: &str) -> Value {
    json!({"namespace": "shop", "pod": {"name": pod, "uid": uid}, "serviceaccount": {"name": "web", "uid": "2"}})
}

#[tokio::test]
async fn pod_gets_certificate_of_its_account_and_the_roots() {
    let sandbox = Sandbox::start(&[("web.yaml", pod("web-1", "1", "10.0.0.1"))]).await;
    let mut client = sandbox.client().await;
    let response = sign(&mut client, sandbox.issuer.sign(&claims()))
        .await
        .unwrap();
    let trust = sandbox.authority.borrow().clone();
    assert_eq!(
        (response.ca.as_ref(), &response.roots_version),
        (trust.roots.pem.as_bytes(), &trust.roots.version)
    );

    if !has_program("openssl") {
        return;
    }
    let dir = support::scratch();
    std::fs::write(dir.path().join("roots"), &response.ca).unwrap();
    std::fs::write(dir.path().join("leaf"), &response.cert).unwrap();
    let openssl = |arguments: &str| {
        let mut command = std::process::Command::new("openssl");
        String::from_utf8(
            command
                .current_dir(dir.path())
                .args(arguments.split(' '))
                .output()
                .unwrap()
                .stdout,
        )
        .unwrap()
    };
    assert_eq!(openssl("verify -CAfile roots leaf"), "leaf: OK\n");
    let names = openssl("x509 -in leaf -noout -ext subjectAltName");
    assert!(
        names
            .trim_end()
            .ends_with("URI:spiffe://cluster.local/ns/shop/sa/web")
            && !names.contains("admin"),
        "{names}"
    );
    let (_, metrics) = sandbox.admin("/metrics").await;
    for line in [
        "certificates_total{result=\"issued\"} 1",
        "ready 1",
        "signing_duration_seconds_count 1",
        "token_review_duration_seconds_count 1",
    ] {
        let line = format!("diy_mesh_controller_{line}\n");
        assert!(metrics.contains(&line), "{line}{metrics}");
    }
}

#[tokio::test]
async fn rejects_requests_for_other_identities() {
    let manifests = [
        ("one.yaml", pod("web-1", "1", "10.0.0.1")),
        ("two.yaml", pod("web-2", "2", "127.0.0.1")),
    ];
    let sandbox = Sandbox::start(&manifests).await;
    let mut client = sandbox.client().await;
    let unbound = json!({"namespace": "shop", "serviceaccount": {"name": "web", "uid": "2"}});
    for (token, code, part) in [
        (String::new(), Code::Unauthenticated, "carries no token"),
        ("rubbish".into(), Code::Unauthenticated, "it is not a JWT"),
        (
            token(&sandbox, "aud", json!(["another"])),
            Code::Unauthenticated,
            "its audience is not",
        ),
        (
            token(&sandbox, "exp", json!(1_000_000)),
            Code::Unauthenticated,
            "it has expired",
        ),
        (
            token(&sandbox, "kubernetes.io", unbound),
            Code::PermissionDenied,
            "bound to no pod",
        ),
        (
            token(&sandbox, "sub", json!("system:serviceaccount:shop:admin")),
            Code::PermissionDenied,
            "not the token's user name",
        ),
        (
            sandbox.issuer.sign(&claims()),
            Code::PermissionDenied,
            "comes from the address of shop/web-2",
        ),
        (
            token(&sandbox, "kubernetes.io", bound("web-1", "0")),
            Code::FailedPrecondition,
            "does not contain the pod shop/web-1",
        ),
    ] {
        let status = sign(&mut client, token.clone()).await.unwrap_err();
        assert_eq!(status.code(), code, "{part}: {status:?}");
        assert!(
            status.message().contains(part),
            "{part}: {}",
            status.message()
        );
        assert!(
            token.is_empty() || !status.message().contains(&token),
            "a token is never part of a message"
        );
    }
    let good = token(&sandbox, "kubernetes.io", bound("web-2", "2"));
    for csr in [
        csr("system:serviceaccount:shop:admin"),
        b"rubbish".to_vec(),
        vec![b'x'; 20_000],
    ] {
        let request = proto::SignCertificateRequest {
            name: USER.into(),
            token: good.clone(),
            csr,
        };
        let status = client.client.sign_certificate(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(
            status.message().starts_with("csr: "),
            "{}",
            status.message()
        );
    }
    sign(&mut client, good.clone()).await.unwrap();
    sign(&mut client, good.clone()).await.unwrap();
    let status = sign(&mut client, good).await.unwrap_err();
    assert_eq!(
        status.code(),
        Code::ResourceExhausted,
        "five at once, then it has to wait"
    );
    assert!(
        status.message().contains("try again in"),
        "{}",
        status.message()
    );
}

#[tokio::test]
async fn waits_for_a_new_pod_in_the_catalog() {
    let sandbox = Sandbox::start(&[]).await;
    let mut client = sandbox.client().await;
    client.services(&[]).await.unwrap();
    let token = sandbox.issuer.sign(&claims());
    let (response, ()) = tokio::join!(sign(&mut client, token), async {
        tokio::task::yield_now().await;
        sandbox.write("web.yaml", &pod("web-1", "1", "10.0.0.1"));
    });
    response.unwrap();
}

/// Another authority, whose roots are its own and those that were.
fn next(authority: &TrustSender) -> Trust {
    let now = SystemTime::now();
    let (certificate, key) = self_signed("cluster.local", now, Duration::from_secs(3600)).unwrap();
    let both = authority.borrow().roots.pem.clone() + &certificate;
    let issuer = Issuer::from_pem(&certificate, &key, now).unwrap().into();
    Trust {
        issuer,
        roots: Roots::from_pem(&both).unwrap().into(),
        renew_within: Duration::from_secs(7),
    }
}

#[tokio::test]
async fn sends_roots_first_and_after_changes() {
    let sandbox = Sandbox::start(&[]).await;
    let mut discover = sandbox.client().await.try_discover().await.unwrap();
    discover.subscribe("10.0.0.1:80", "").await;
    let trust = sandbox.authority.subscribe();
    let first = discover.answer().await.unwrap();
    assert_eq!(
        (first.name.as_str(), &first.version),
        ("", &trust.borrow().roots.version)
    );
    let Some(Update::Roots(roots)) = first.update else {
        panic!("roots come first")
    };
    assert_eq!(
        (roots.pem.as_ref(), roots.issuer.as_str()),
        (
            trust.borrow().roots.pem.as_bytes(),
            trust.borrow().issuer.id()
        )
    );
    assert_eq!(discover.said().await, "10.0.0.1:80: unknown");

    sandbox
        .authority
        .send_replace(next(&sandbox.authority).into());
    let second = discover.answer().await.unwrap();
    assert_ne!(second.version, first.version);
    let Some(Update::Roots(roots)) = second.update else {
        panic!("new roots are told")
    };
    assert_eq!(
        (roots.issuer.as_str(), roots.renew_within_seconds),
        (trust.borrow().issuer.id(), 7)
    );
}

#[tokio::test]
async fn rejects_status_with_long_texts() {
    let sandbox = Sandbox::start(&[]).await;
    let mut discover = sandbox.client().await.discover().await;
    discover
        .send(Action::Status(proto::ProxyStatus {
            proxy_version: "x".repeat(129),
            ..Default::default()
        }))
        .await;
    assert_eq!(
        discover.answer().await.unwrap_err().code(),
        Code::InvalidArgument
    );
}

/// The certificate that the controller shows to whoever trusts these roots, as `name`.
async fn shown(
    sandbox: &Sandbox,
    roots: &str,
    name: &'static str,
) -> std::io::Result<CertificateDer<'static>> {
    let mut store = rustls::RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(roots.as_bytes()) {
        store.add(certificate.unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap();
    let mut config = builder.with_root_certificates(store).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let connection = TcpStream::connect(sandbox.address).await.unwrap();
    let stream = TlsConnector::from(Arc::new(config))
        .connect(ServerName::try_from(name).unwrap(), connection)
        .await?;
    let tls = stream.get_ref().1;
    assert_eq!(
        tls.negotiated_key_exchange_group().unwrap().name(),
        rustls::NamedGroup::X25519MLKEM768
    );
    assert_eq!(
        tls.protocol_version(),
        Some(rustls::ProtocolVersion::TLSv1_3)
    );
    Ok(tls.peer_certificates().unwrap()[0].clone().into_owned())
}

#[tokio::test]
async fn renews_serving_certificate_while_streams_stay_open() {
    let sandbox = Sandbox::start(&[]).await;
    let mut discover = sandbox.client().await.discover().await;
    let old = sandbox.authority.borrow().roots.pem.clone();
    for name in [
        "controller.service-mesh.svc.cluster.local",
        "controller.service-mesh.svc",
        "controller.service-mesh",
        "localhost",
        "127.0.0.1",
        "::1",
    ] {
        shown(&sandbox, &old, name).await.unwrap();
    }
    assert!(shown(&sandbox, &old, "somebody.else").await.is_err());

    let trust = next(&sandbox.authority);
    let new = trust
        .roots
        .certificates
        .iter()
        .find(|root| !old.contains(&diy_mesh_controller::issuer::pem(root)))
        .unwrap()
        .clone();
    let new = diy_mesh_controller::issuer::pem(&new);
    sandbox.authority.send_replace(trust.into());
    let changed = async {
        while shown(&sandbox, &new, "localhost").await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    soon(changed).await;
    assert_eq!(discover.said().await, ": roots");
    discover.subscribe("10.0.0.1:80", "").await;
    assert_eq!(discover.said().await, "10.0.0.1:80: unknown");
}

#[tokio::test]
async fn plaintext_and_silent_connections_do_not_block_others() {
    let sandbox = Sandbox::start(&[]).await;
    let mut silent = Vec::new();
    for _ in 0..50 {
        silent.push(TcpStream::connect(sandbox.address).await.unwrap());
    }
    let mut plain = TcpStream::connect(sandbox.address).await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut plain, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        .await
        .unwrap();
    let mut answer = Vec::new();
    let read = soon(plain.read_to_end(&mut answer)).await;
    assert!(
        read.is_err() || answer.first() == Some(&21),
        "a TLS alert at most: {answer:?}"
    );
    sandbox.client().await.services(&[]).await.unwrap();
}
