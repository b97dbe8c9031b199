//! Those who ask: the very code by which a proxy asks the controller, TLS, the check of the controller's identity and all.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use diy_mesh_proto::Identity;
use diy_mesh_proxy::{
    control::{Control, Tls},
    identity::Trust,
};
use tokio::{
    runtime::{self, Runtime},
    task::JoinSet,
    time::sleep_until,
};

use super::asks::Ask;

const CONTROLLER: &str = "https://127.0.0.1:8080";
const IDENTITY: &str = "spiffe://cluster.local/ns/service-mesh/sa/controller";

/// Asks the controller, from within its namespace.
pub struct Load(Control);

impl Load {
    /// The controller is verified by the roots in this file.
    pub fn new(roots: &Path) -> Result<Self> {
        let expected: Identity = IDENTITY.parse().context("the controller's identity")?;
        let tls = Tls {
            expected,
            roots_file: roots.to_path_buf(),
            trust: Trust::default(),
        };
        Ok(Load(
            Control::new(CONTROLLER, None, Some(tls)).context("reach the controller")?,
        ))
    }

    /// So many at a time, each as soon as there is a place. How long all of them took.
    pub fn as_many_as_go_through(&self, asks: Vec<Ask>, at_a_time: usize) -> Result<Duration> {
        let start = Instant::now();
        runtime()?.block_on(async {
            let mut running = JoinSet::new();
            for ask in asks {
                if running.len() >= at_a_time {
                    finish(running.join_next().await)?;
                }
                running.spawn(one(self.0.clone(), ask));
            }
            while let Some(done) = running.join_next().await {
                finish(Some(done))?;
            }
            Ok(start.elapsed())
        })
    }

    /// So many in each second, whatever becomes of those before. How long each took, sorted.
    pub fn at_rate(&self, asks: Vec<Ask>, rate: u32) -> Result<Vec<Duration>> {
        let step = Duration::from_secs(1) / rate;
        runtime()?.block_on(async {
            let start = tokio::time::Instant::now();
            let mut running = JoinSet::new();
            for (number, ask) in (0..).zip(asks) {
                sleep_until(start + step * number).await;
                running.spawn(one(self.0.clone(), ask));
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

/// One connection and one certificate.
async fn one(control: Control, ask: Ask) -> Result<Duration> {
    let start = Instant::now();
    let answer = control
        .sign_certificate(ask)
        .await
        .context("ask for a certificate")?;
    let took = start.elapsed();
    ensure!(
        answer.cert.starts_with(b"-----BEGIN CERTIFICATE-----"),
        "the answer holds no certificate"
    );
    Ok(took)
}

fn finish(done: Option<Result<Result<Duration>, tokio::task::JoinError>>) -> Result<Duration> {
    done.ok_or_else(|| anyhow!("nobody is asking"))?
        .map_err(|problem| anyhow!(problem))?
}

/// One thread, so that the controller has the others.
fn runtime() -> Result<Runtime> {
    runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime of those who ask")
}
