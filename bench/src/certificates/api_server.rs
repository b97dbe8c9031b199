//! Kubernetes API server for the benchmark: answers every TokenReview immediately, over TLS. It
//! takes the claims from the token and verifies nothing.

use std::{
    collections::BTreeMap,
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
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
    let tls = TlsAcceptor::from(Arc::new(tls));
    namespace.enter(|| {
        serve_on_thread(PORT, async |listener| {
            let routes =
                Router::new().route("/apis/authentication.k8s.io/v1/tokenreviews", post(review));
            axum::serve(TlsListener { listener, tls }, routes).await
        })
    })?;
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "bench",
        "clusters": [{ "name": "bench", "cluster": { "server": format!("https://127.0.0.1:{PORT}"), "certificate-authority-data": authority } }],
        "users": [{ "name": "bench", "user": { "token": "controller-token" } }],
        "contexts": [{ "name": "bench", "context": { "cluster": "bench", "user": "bench" } }],
    });
    Ok(config.to_string())
}

/// Runs a server on a thread of its own until the process exits. It listens on a loopback port of
/// the current network namespace, which is returned.
pub fn serve_on_thread(
    port: u16,
    serve: impl AsyncFnOnce(TcpListener) -> io::Result<()> + Send + 'static,
) -> Result<SocketAddr> {
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, port))
        .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
        .context("listen as the API server")?;
    let address = listener
        .local_addr()
        .context("read the API server's address")?;
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the API server's runtime")?;
    let server = move || {
        let work = async { serve(TcpListener::from_std(listener)?).await };
        if let Err(error) = runtime.block_on(work) {
            eprintln!("the API server has failed: {error}");
        }
    };
    thread::Builder::new()
        .name("api-server".into())
        .spawn(server)
        .context("start the API server's thread")?;
    Ok(address)
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
