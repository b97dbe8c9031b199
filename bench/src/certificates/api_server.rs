//! Kubernetes API server for the benchmark: answers every TokenReview immediately, over TLS. It
//! takes the claims from the token and verifies nothing.

use std::{
    collections::BTreeMap,
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, mpsc},
    thread,
};

use anyhow::{Context, Result};
use axum::{Json, Router, http::StatusCode, routing::post, serve::Listener};
use base64::{Engine, engine::general_purpose::STANDARD};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::{ServerConfig, crypto::aws_lc_rs, pki_types::PrivateKeyDer};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use crate::network::Namespace;

const PORT: u16 = 6443;

/// Starts the server in a namespace for the lifetime of the process. Returns a kubeconfig for it.
pub fn start(namespace: &Namespace) -> Result<String> {
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["127.0.0.1".to_string()])
        .context("create the API server's certificate")?;
    let authority = STANDARD.encode(cert.pem());
    let key = PrivateKeyDer::try_from(signing_key.serialize_der())
        .map_err(|error| anyhow::anyhow!("{error}"))?;
    let tls = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|config| {
            config
                .with_no_client_auth()
                .with_single_cert(vec![cert.der().clone()], key)
        })
        .context("configure the API server's TLS")?;
    namespace.enter(|| {
        let (ready, listening) = mpsc::channel();
        // A thread inherits the network namespace.
        thread::Builder::new()
            .name("api-server".into())
            .spawn(move || serve(TlsAcceptor::from(Arc::new(tls)), &ready))
            .context("start the API server's thread")?;
        listening
            .recv()
            .context("the API server exited before it listened")?
    })?;
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "bench",
        "clusters": [{ "name": "bench", "cluster": { "server": format!("https://127.0.0.1:{PORT}"), "certificate-authority-data": authority } }],
        "users": [{ "name": "bench", "user": { "token": "controller-token" } }],
        "contexts": [{ "name": "bench", "context": { "cluster": "bench", "user": "bench" } }],
    });
    Ok(config.to_string())
}

fn serve(tls: TlsAcceptor, ready: &mpsc::Sender<Result<()>>) {
    let work = async {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, PORT))
            .await
            .context("listen as the API server")?;
        let _ = ready.send(Ok(()));
        let routes =
            Router::new().route("/apis/authentication.k8s.io/v1/tokenreviews", post(review));
        axum::serve(TlsListener { listener, tls }, routes)
            .await
            .context("serve as the API server")
    };
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the API server's runtime");
    if let Err(error) = runtime.and_then(|runtime| runtime.block_on(work)) {
        let _ = ready.send(Err(error));
    }
}

/// Listener that performs TLS handshakes one at a time: connections are few and long-lived.
struct TlsListener {
    listener: TcpListener,
    tls: TlsAcceptor,
}

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        loop {
            let (stream, peer) = Listener::accept(&mut self.listener).await;
            // Fails only on a closed connection.
            let _ = stream.set_nodelay(true);
            if let Ok(stream) = self.tls.accept(stream).await {
                return (stream, peer);
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

#[derive(Deserialize)]
struct Claims {
    sub: String,
    aud: Vec<String>,
    #[serde(rename = "kubernetes.io")]
    kubernetes: Bound,
}

#[derive(Deserialize)]
struct Bound {
    namespace: String,
    pod: Object,
    serviceaccount: Object,
}

#[derive(Deserialize)]
struct Object {
    name: String,
    uid: String,
}

/// Returns a TokenReview with the fields and the size of a real one.
pub(crate) async fn review(Json(review): Json<Value>) -> (StatusCode, Json<Value>) {
    let token = review["spec"]["token"].as_str().unwrap_or_default();
    let Ok(claims) = jsonwebtoken::dangerous::insecure_decode_claims::<Claims>(token) else {
        return (
            StatusCode::BAD_REQUEST,
            Json(
                json!({ "kind": "Status", "status": "Failure", "message": "no token", "code": 400 }),
            ),
        );
    };
    let Claims {
        sub,
        aud,
        kubernetes:
            Bound {
                namespace,
                pod,
                serviceaccount,
            },
    } = claims;
    let extra = BTreeMap::from([
        (
            "credential-id",
            "JTI=8d2f4a52-6a0c-4a6d-9d51-5f1e3d8a7c10".to_string(),
        ),
        ("node-name", "node-1".to_string()),
        (
            "node-uid",
            "5b1f7c0e-2f2b-4a0e-8f43-0d8f6c9d7e21".to_string(),
        ),
        ("pod-name", pod.name),
        ("pod-uid", pod.uid),
    ]);
    let extra: BTreeMap<_, _> = extra
        .into_iter()
        .map(|(key, value)| (format!("authentication.kubernetes.io/{key}"), [value]))
        .collect();
    let groups = [
        "system:serviceaccounts".to_string(),
        format!("system:serviceaccounts:{namespace}"),
        "system:authenticated".to_string(),
    ];
    let response = json!({
        "kind": "TokenReview", "apiVersion": "authentication.k8s.io/v1", "metadata": { "creationTimestamp": null },
        "spec": review["spec"],
        "status": {
            "authenticated": true, "audiences": aud,
            "user": { "username": sub, "uid": serviceaccount.uid, "groups": groups, "extra": extra },
        },
    });
    (StatusCode::CREATED, Json(response))
}
