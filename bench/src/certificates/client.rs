//! Signing client: the proxy's own client code, including TLS and the verification of the
//! controller's identity.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use diy_mesh_model::identity::Identity;
use diy_mesh_proto::mesh::v1::SignCertificateRequest;
use diy_mesh_proxy::secure::control::{Control, Tls};
use diy_mesh_proxy::secure::identity::Trust;
use tokio::{
    runtime::{self, Runtime},
    task::JoinSet,
    time::sleep_until,
};

/// The controller's identity.
const IDENTITY: &str = "spiffe://cluster.local/ns/service-mesh/sa/controller";

/// Sends signing requests to the controller, from its namespace.
pub struct SigningClient(Control);

impl SigningClient {
    /// Sends to the controller at this URL and verifies it with the roots in this file.
    pub fn new(controller: &str, roots: &Path) -> Result<Self> {
        control(controller, None, roots).map(SigningClient)
    }

    /// Sends the requests with at most `concurrency` in flight. Returns the total duration.
    pub fn run_closed_loop(
        &self,
        requests: Vec<SignCertificateRequest>,
        concurrency: usize,
    ) -> Result<Duration> {
        let start = Instant::now();
        runtime()?.block_on(async {
            let mut running = JoinSet::new();
            for request in requests {
                if running.len() >= concurrency {
                    finish(running.join_next().await)?;
                }
                running.spawn(sign(self.0.clone(), request));
            }
            while let Some(done) = running.join_next().await {
                finish(Some(done))?;
            }
            Ok(start.elapsed())
        })
    }

    /// Sends `rate` requests per second in an open loop. Returns the sorted durations.
    pub fn run_at_rate(
        &self,
        requests: Vec<SignCertificateRequest>,
        rate: u32,
    ) -> Result<Vec<Duration>> {
        let step = Duration::from_secs(1) / rate;
        runtime()?.block_on(async {
            let start = tokio::time::Instant::now();
            let mut running = JoinSet::new();
            for (number, request) in (0..).zip(requests) {
                sleep_until(start + step * number).await;
                running.spawn(sign(self.0.clone(), request));
            }
            let mut times = Vec::new();
            while let Some(done) = running.join_next().await {
                times.push(finish(Some(done))?);
            }
            times.sort_unstable();
            Ok(times)
        })
    }
}

/// The proxy's client of the controller at this URL. Verifies it with the roots in this file.
pub fn control(controller: &str, token_file: Option<PathBuf>, roots: &Path) -> Result<Control> {
    let expected: Identity = IDENTITY.parse().context("the controller's identity")?;
    let tls = Tls {
        expected,
        roots_file: roots.to_path_buf(),
        trust: Trust::default(),
    };
    let url = controller.parse().context("the controller's URL")?;
    Ok(Control::new(url, token_file, Some(tls)))
}

/// Sends one request on a new connection.
async fn sign(control: Control, request: SignCertificateRequest) -> Result<Duration> {
    let start = Instant::now();
    let response = control
        .sign_certificate(request)
        .await
        .context("request a certificate")?;
    let duration = start.elapsed();
    ensure!(
        response.cert.starts_with(b"-----BEGIN CERTIFICATE-----"),
        "the response contains no certificate"
    );
    Ok(duration)
}

fn finish(done: Option<Result<Result<Duration>, tokio::task::JoinError>>) -> Result<Duration> {
    done.ok_or_else(|| anyhow!("no request is in flight"))?
        .map_err(|error| anyhow!(error))?
}

/// Single-threaded runtime, which leaves the other CPUs to the controller.
fn runtime() -> Result<Runtime> {
    runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime of the signing client")
}
