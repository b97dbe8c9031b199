//! Benchmark of certificate signing: each request is the first one of another pod.
//!
//! The controller is the real program. Its catalog contains these pods, and the API server of
//! `api_server.rs` answers TokenReviews immediately. The client (`client.rs`) is the proxy's own
//! code: each request has a new connection and a token that is not in the controller's cache. No
//! proxy runs.

pub(crate) mod api_server;
pub(crate) mod client;
pub(crate) mod requests;

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};

use diy_mesh_proto::mesh::v1::SignCertificateRequest;

use self::client::SigningClient;
use crate::{
    cases::Metric,
    config::Programs,
    load::{Window, percentile},
    measure::Numbers,
    network::{Namespace, NamespaceSet},
    process::{Process, Program},
    sides::{copy_for_proxy_user, write_readable},
};

const ADMIN_PORT: u16 = 8081;
/// Upper estimate of the throughput, which determines how many requests are prepared.
const MAX_CERTIFICATES_PER_SECOND: f64 = 1000.0;
/// Requests before the measurement, during which the controller connects to the API server.
const WARM_UP_REQUESTS: usize = 200;
const ROOTS_TIMEOUT: Duration = Duration::from_secs(10);

/// Namespace of the controller and its API server.
pub struct CertificateBench {
    namespace: Namespace,
    programs: Programs,
    state: PathBuf,
    kubeconfig: PathBuf,
}

/// A ready controller and the requests to send.
pub struct PreparedRun {
    controller: Process,
    client: SigningClient,
    requests: Vec<SignCertificateRequest>,
    namespace: Namespace,
    length: Duration,
}

impl CertificateBench {
    /// Creates the namespace and starts the API server.
    pub fn start(programs: &Programs, namespaces: &NamespaceSet) -> Result<Self> {
        let namespace = Namespace::create("issuing", namespaces)?;
        let state = programs.state.join("issuing");
        let authority = state.join("ca");
        for folder in [&state.join("catalog"), &authority] {
            fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
        }
        // The controller writes there as another user.
        fs::set_permissions(&authority, fs::Permissions::from_mode(0o777))
            .with_context(|| format!("make {} writable", authority.display()))?;
        let kubeconfig = state.join("kubeconfig");
        write_readable(&kubeconfig, &api_server::start(&namespace)?)?;
        Ok(CertificateBench {
            namespace,
            programs: programs.clone(),
            state,
            kubeconfig,
        })
    }

    /// Starts a new controller and prepares the requests for a window.
    pub fn prepare(&self, rate: u32, window: Window) -> Result<PreparedRun> {
        let seconds = window.length.as_secs_f64();
        let count =
            WARM_UP_REQUESTS as f64 + seconds * (MAX_CERTIFICATES_PER_SECOND + f64::from(rate));
        let (requests, pods) = requests::prepare(count.ceil() as usize)?;
        let catalog: Vec<_> = pods.iter().map(ToString::to_string).collect();
        let (folder, authority) = (self.state.join("catalog"), self.state.join("ca"));
        write_readable(&folder.join("pods.yaml"), &catalog.join("\n---\n"))?;
        let arguments = [
            "--catalog",
            &format!("files:{}", folder.display()),
            "--ca",
            &format!("files:{}", authority.display()),
        ];
        let program = Program {
            name: "controller-of-certificates".to_string(),
            path: copy_for_proxy_user(&self.programs.controller, &self.programs.state)?,
            arguments: arguments.map(String::from).to_vec(),
            environment: vec![
                ("POD_NAMESPACE", "service-mesh".to_string()),
                ("KUBECONFIG", self.kubeconfig.to_string_lossy().into_owned()),
            ],
            uid: 65532,
        };
        let mut controller = Process::start(program, &self.namespace, &self.state)?;
        controller.wait_ready(
            &self.namespace,
            SocketAddr::from((Ipv4Addr::LOCALHOST, ADMIN_PORT)),
            "/ready",
        )?;
        let roots = authority.join("roots.pem");
        wait_for(&roots)?;
        let client = SigningClient::new("https://127.0.0.1:8080", &roots)?;
        Ok(PreparedRun {
            controller,
            client,
            requests,
            namespace: self.namespace.clone(),
            length: window.length,
        })
    }
}

/// Waits for a file: the controller publishes its roots shortly after it is ready.
fn wait_for(file: &Path) -> Result<()> {
    let deadline = Instant::now() + ROOTS_TIMEOUT;
    while !file.exists() {
        ensure!(
            Instant::now() < deadline,
            "the controller did not write {} within {ROOTS_TIMEOUT:?}",
            file.display()
        );
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

impl PreparedRun {
    /// The controller's process ID.
    pub fn id(&self) -> u32 {
        self.controller.id()
    }

    /// Measures a closed loop of `concurrency` requests in flight, then a constant rate in requests
    /// per second.
    pub fn measure(mut self, concurrency: usize, rate: u32) -> Result<Numbers> {
        let numbers = self
            .numbers(concurrency, rate)
            .map_err(|error| anyhow!("{error:#}{}", self.controller.log_tail()));
        self.controller.ensure_running()?;
        numbers
    }

    fn numbers(&mut self, concurrency: usize, rate: u32) -> Result<Numbers> {
        let mut requests = std::mem::take(&mut self.requests);
        let paced = requests
            .split_off(requests.len() - (self.length.as_secs_f64() * f64::from(rate)) as usize);
        let counted = requests.split_off(WARM_UP_REQUESTS);
        let (count, client, meter) = (counted.len() as f64, &self.client, self.controller.meter());
        let (elapsed, used, times) = self.namespace.enter(|| {
            client.run_closed_loop(requests, concurrency)?;
            let before = meter.cpu()?;
            let elapsed = client.run_closed_loop(counted, concurrency)?;
            let used = meter.cpu()?.saturating_sub(before);
            Ok((elapsed, used, client.run_at_rate(paced, rate)?))
        })?;
        ensure!(
            !used.is_zero(),
            "the controller used no CPU time: another process answered"
        );
        let at = |share| percentile(&times, share).as_secs_f64() * 1e6;
        Ok(vec![
            (Metric::Certificates, count / elapsed.as_secs_f64()),
            (Metric::CertificateCpu, used.as_secs_f64() * 1e6 / count),
            (Metric::CertificatesPerCore, count / used.as_secs_f64()),
            (Metric::LatencyP50, at(0.5)),
            (Metric::LatencyP99, at(0.99)),
        ])
    }
}
