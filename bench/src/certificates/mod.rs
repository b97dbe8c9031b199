//! What a certificate costs the controller: proxies of pods that have just started ask for their first one, all of them others.
//!
//! The controller is the real program, with a catalog of these pods and the API server of `reviews.rs`, which answers TokenReviews at
//! once. Those who ask are the proxy's own code (`load.rs`): each on a connection of its own, as a proxy does it, with a token that
//! the controller has never seen, so that nothing comes from its cache. No proxy runs, and no traffic.

mod asks;
mod load;
mod reviews;

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};

use self::{asks::Ask, load::Load};
use crate::{
    cases::Metric,
    config::Programs,
    load::{Window, percentile},
    measure::Numbers,
    network::{Namespace, Site},
    process::{Process, Program},
    sides::{reachable, write_readable},
};

const ADMIN_PORT: u16 = 8081;
/// How many are counted for each second of a measurement: about what goes through beside those who ask.
const EACH_SECOND: f64 = 1000.0;
/// So many are not counted: with them the controller opens its connections to the API server.
const FIRST: usize = 200;
const PATIENCE: Duration = Duration::from_secs(10);

/// Where the controller runs, and the API server that it asks.
pub struct Issuing {
    namespace: Namespace,
    programs: Programs,
    state: PathBuf,
    kubeconfig: PathBuf,
}

/// A controller that is ready, and what it will be asked.
pub struct Ready {
    controller: Process,
    load: Load,
    asks: Vec<Ask>,
    namespace: Namespace,
    length: Duration,
}

impl Issuing {
    /// Makes the namespace, and starts the API server.
    pub fn start(programs: &Programs, site: &Site) -> Result<Self> {
        let namespace = Namespace::alone("issuing", site)?;
        let state = programs.state.join("issuing");
        let authority = state.join("ca");
        for folder in [&state.join("catalog"), &authority] {
            fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
        }
        // The controller, which is another user, writes there.
        fs::set_permissions(&authority, fs::Permissions::from_mode(0o777))
            .with_context(|| format!("make {} writable", authority.display()))?;
        let kubeconfig = state.join("kubeconfig");
        write_readable(&kubeconfig, &reviews::start(&namespace)?)?;
        Ok(Issuing {
            namespace,
            programs: programs.clone(),
            state,
            kubeconfig,
        })
    }

    /// Starts a fresh controller, which has seen none of those who will ask it in this window at such a rate.
    pub fn ready(&self, rate: u32, window: Window) -> Result<Ready> {
        let seconds = window.length.as_secs_f64();
        let count = FIRST as f64 + seconds * (EACH_SECOND + f64::from(rate));
        let (asks, catalog) = asks::prepare(count.ceil() as usize)?;
        let (folder, authority) = (self.state.join("catalog"), self.state.join("ca"));
        write_readable(&folder.join("pods.yaml"), &catalog)?;
        let arguments = [
            "--catalog",
            &format!("files:{}", folder.display()),
            "--ca",
            &format!("files:{}", authority.display()),
        ];
        let program = Program {
            name: "controller-of-certificates".to_string(),
            path: reachable(&self.programs.controller, &self.programs.state)?,
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
        let load = Load::new(&roots)?;
        Ok(Ready {
            controller,
            load,
            asks,
            namespace: self.namespace.clone(),
            length: window.length,
        })
    }
}

/// The controller is ready a moment before it has published its roots.
fn wait_for(file: &Path) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !file.exists() {
        ensure!(
            Instant::now() < deadline,
            "the controller has not written {} within {PATIENCE:?}",
            file.display()
        );
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

impl Ready {
    /// The controller's process ID.
    pub fn id(&self) -> u32 {
        self.controller.id()
    }

    /// As many as go through, `askers` at a time; then `rate` in each second.
    pub fn measure(mut self, askers: usize, rate: u32) -> Result<Numbers> {
        let numbers = self
            .numbers(askers, rate)
            .map_err(|problem| anyhow!("{problem:#}{}", self.controller.last_words()));
        self.controller.ensure_running()?;
        numbers
    }

    fn numbers(&mut self, askers: usize, rate: u32) -> Result<Numbers> {
        let mut asks = std::mem::take(&mut self.asks);
        let paced =
            asks.split_off(asks.len() - (self.length.as_secs_f64() * f64::from(rate)) as usize);
        let counted = asks.split_off(FIRST);
        let (count, load, meter) = (counted.len() as f64, &self.load, self.controller.meter());
        let (elapsed, used, times) = self.namespace.enter(|| {
            load.as_many_as_go_through(asks, askers)?;
            let before = meter.cpu()?;
            let elapsed = load.as_many_as_go_through(counted, askers)?;
            let used = meter.cpu()?.saturating_sub(before);
            Ok((elapsed, used, load.at_rate(paced, rate)?))
        })?;
        ensure!(
            !used.is_zero(),
            "the controller used no CPU time: somebody else has answered"
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
