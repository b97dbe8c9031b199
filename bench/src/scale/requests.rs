//! Certificates and injections: closed loops against one program on one core.

use std::{
    net::SocketAddr,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    runtime,
    task::JoinSet,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::{
    api_server::ApiServer,
    cluster::{NAMESPACES, PODS},
    config::Config,
    controller::Controller,
    report::{Metric, Values},
    testbed::{Testbed, free_address},
};
use crate::certificates::{client::SigningClient, requests::prepare};

/// Requests in flight.
const CONCURRENCY: usize = 32;
/// Requests before the measurement.
const WARM_UP_REQUESTS: usize = 200;
const CA_TIMEOUT: Duration = Duration::from_secs(10);

/// Measures first certificates: each has a new connection, and a token that is not cached.
pub fn certificates(config: &Config, testbed: &Testbed, api: &ApiServer) -> Result<Values> {
    let program = config.controller.as_deref().context("no controller")?;
    let (mut requests, pods) = prepare(config.requests as usize + WARM_UP_REQUESTS)?;
    api.reset(pods.into_iter().map(|pod| (PODS, pod)).collect());
    let controller = Controller::start(testbed, api, program)?;
    let client = SigningClient::new(&controller.url(), controller.roots())?;
    let counted = requests.split_off(WARM_UP_REQUESTS);
    let (count, meter) = (counted.len() as f64, controller.meter());
    let measured = client.run_closed_loop(requests, CONCURRENCY).and_then(|_| {
        let before = meter.cpu()?;
        let elapsed = client.run_closed_loop(counted, CONCURRENCY)?;
        Ok((meter.cpu()?.saturating_sub(before), elapsed))
    });
    let (used, elapsed) =
        measured.map_err(|error| anyhow!("{error:#}{}", controller.log_tail()))?;
    let mut values = Values::default();
    values.add(Metric::CertificatesPerCore, count / used.as_secs_f64());
    values.add(Metric::Certificates, count / elapsed.as_secs_f64());
    Ok(values)
}

/// Measures injections over connections that stay open, as the connections of an API server do. The
/// injector reads the namespace of each pod.
pub fn injections(config: &Config, testbed: &Testbed, api: &ApiServer) -> Result<Values> {
    let program = config.injector.as_deref().context("no injector")?;
    api.reset(vec![(NAMESPACES, json!({"metadata": {"name": "shop"}}))]);
    let kubeconfig = testbed.write("kubeconfig", &api.kubeconfig())?;
    let environment = vec![("KUBECONFIG", kubeconfig.to_string_lossy().into_owned())];
    let (address, admin) = (free_address()?, free_address()?);
    let ca_file = testbed.folder().join("injector-ca.crt");
    let arguments = vec![
        format!("--listen={address}"),
        format!("--admin-listen={admin}"),
        "--image-to-deploy-proxy=diy-sm-proxy".to_owned(),
        "--image-to-deploy-proxy-init=diy-sm-proxy-init".to_owned(),
        "--serving-certificate=ephemeral".to_owned(),
        format!("--ca-file={}", ca_file.display()),
    ];
    let injector = testbed.start("injector", program, arguments, environment, admin)?;
    testbed.wait_for("CA file of the injector", 1, CA_TIMEOUT, || {
        usize::from(ca_file.exists())
    })?;
    let tls = connector(&ca_file)?;
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime of the API server's client")?;
    let meter = injector.meter();
    let total = config.requests as usize;
    let measured = runtime.block_on(async {
        inject(&tls, address, WARM_UP_REQUESTS).await?;
        let (before, start) = (meter.cpu()?, Instant::now());
        inject(&tls, address, total).await?;
        anyhow::Ok((meter.cpu()?.saturating_sub(before), start.elapsed()))
    });
    let (used, elapsed) = measured.map_err(|error| anyhow!("{error:#}{}", injector.log_tail()))?;
    let mut values = Values::default();
    values.add(Metric::InjectionsPerCore, total as f64 / used.as_secs_f64());
    values.add(Metric::Injections, total as f64 / elapsed.as_secs_f64());
    Ok(values)
}

fn connector(ca_file: &Path) -> Result<TlsConnector> {
    let mut roots = RootCertStore::empty();
    let file = CertificateDer::from_pem_file(ca_file);
    let certificate = file.map_err(|error| anyhow!("{}: {error}", ca_file.display()))?;
    roots.add(certificate).context("trust the injector's CA")?;
    let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .context("configure TLS")?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

/// Sends so many reviews over several connections.
async fn inject(tls: &TlsConnector, address: SocketAddr, count: usize) -> Result<()> {
    let mut connections = JoinSet::new();
    for connection in 0..CONCURRENCY {
        let tls = tls.clone();
        let numbers = (connection..count).step_by(CONCURRENCY);
        connections.spawn(async move {
            let stream = TcpStream::connect(address)
                .await
                .context("connect to the injector")?;
            stream.set_nodelay(true).context("set TCP_NODELAY")?;
            let name = ServerName::from(address.ip());
            let mut stream = tls
                .connect(name, stream)
                .await
                .context("connect with TLS")?;
            for number in numbers {
                review(&mut stream, number).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(done) = connections.join_next().await {
        done.context("a client of the injector panicked")??;
    }
    Ok(())
}

/// Sends the review of one pod. The response contains a patch.
async fn review(stream: &mut TlsStream<TcpStream>, number: usize) -> Result<()> {
    let body = admission_review(number);
    let request = format!(
        "POST /pods HTTP/1.1\r\nHost: injector.service-mesh.svc\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream
        .write_all(request.as_bytes())
        .await
        .context("send a review")?;
    let mut response = Vec::with_capacity(16 * 1024);
    loop {
        let read = stream
            .read_buf(&mut response)
            .await
            .context("read a review")?;
        ensure!(read > 0, "the injector closed the connection");
        let text = String::from_utf8_lossy(&response);
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            continue;
        };
        let length = head
            .lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
            .and_then(|(_, value)| value.trim().parse::<usize>().ok())
            .context("the response has no length")?;
        if body.len() >= length {
            if !head.starts_with("HTTP/1.1 200") || !body.contains("JSONPatch") {
                bail!("the injector did not inject: {text}");
            }
            return Ok(());
        }
    }
}

/// A pod of a Deployment, as an API server sends it.
fn admission_review(number: usize) -> String {
    let uid = format!("00000000-0000-4000-a000-{number:012}");
    let resource = |name: &str| json!({ "group": "", "version": "v1", "resource": name });
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": uid, "kind": { "group": "", "version": "v1", "kind": "Pod" },
            "resource": resource("pods"), "requestKind": { "group": "", "version": "v1", "kind": "Pod" },
            "requestResource": resource("pods"), "namespace": "shop", "operation": "CREATE", "dryRun": false,
            "userInfo": { "username": "system:serviceaccount:kube-system:replicaset-controller", "groups": ["system:authenticated"] },
            "object": {
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {
                    "generateName": "till-6d4cf56db6-", "namespace": "shop",
                    "labels": { "app": "till", "pod-template-hash": "6d4cf56db6" },
                    "annotations": { "diy-service-mesh/inject": "true" },
                    "ownerReferences": [{ "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "till-6d4cf56db6", "uid": uid, "controller": true, "blockOwnerDeletion": true }],
                },
                "spec": {
                    "serviceAccountName": "shop", "restartPolicy": "Always", "terminationGracePeriodSeconds": 30,
                    "dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler",
                    "volumes": [{ "name": "kube-api-access-x7k2p", "projected": { "defaultMode": 420, "sources": [
                        { "serviceAccountToken": { "expirationSeconds": 3607, "path": "token" } },
                        { "configMap": { "name": "kube-root-ca.crt", "items": [{ "key": "ca.crt", "path": "ca.crt" }] } },
                    ]}}],
                    "containers": [{
                        "name": "till", "image": "shop/till:1.4.2", "imagePullPolicy": "IfNotPresent",
                        "ports": [{ "containerPort": 8080, "protocol": "TCP" }],
                        "env": (0..10).map(|number| json!({ "name": format!("SETTING_{number}"), "value": "value" })).collect::<Vec<_>>(),
                        "resources": { "requests": { "cpu": "100m", "memory": "64Mi" }, "limits": { "memory": "128Mi" } },
                        "readinessProbe": { "httpGet": { "path": "/ready", "port": 8080, "scheme": "HTTP" }, "periodSeconds": 10 },
                        "livenessProbe": { "httpGet": { "path": "/live", "port": 8080, "scheme": "HTTP" }, "periodSeconds": 10 },
                        "volumeMounts": [{ "name": "kube-api-access-x7k2p", "readOnly": true, "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount" }],
                    }],
                },
                "status": {},
            },
            "oldObject": null, "options": { "kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1" },
        },
    })
    .to_string()
}
