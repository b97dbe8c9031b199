//! The data plane: one proxy beside each pod. Every TCP connection of the pod passes through it,
//! redirected by the rules that proxy-init wrote.
//!
//! Read `connection.rs` first: the path, one call a step, inbound and outbound. The steps before are in
//! `accept.rs`, `orig_dst.rs`, and `protocol.rs` with the pure `detect.rs`; then `policy.rs` authorizes,
//! `http1/`, `http2/` and `opaque.rs` serve, and `forward.rs` sends to endpoints by way of `balance/`,
//! `pool/` and `connect.rs`. `record.rs` is what metrics, dumps and the log get of it. Beside the path:
//! `discovery.rs` and `identity.rs`, both by way of `control.rs`; `dump/`, `admin.rs`, `metrics.rs`; and
//! `error.rs`, the one map of failures.
//!
//! The main thread runs what is slow and shared: the admin server, discovery, renewal, shutdown. Each
//! worker thread has its own listeners, pools and balancers: a request stays on one core and takes no
//! lock.

pub mod accept;
pub mod admin;
pub mod authority;
pub mod balance;
mod batched;
pub mod config;
pub mod connect;
pub mod connection;
pub mod control;
pub mod copy;
pub mod detect;
pub mod discovery;
pub mod dump;
pub mod error;
pub mod flow;
pub mod forward;
pub mod http;
pub mod http1;
pub mod http2;
pub mod identity;
pub mod io;
pub mod lifetime;
pub mod metrics;
pub mod opaque;
pub mod orig_dst;
pub mod policy;
pub mod pool;
pub mod ports;
pub mod protocol;
pub mod record;
mod scratch;
pub mod tls;
pub mod worker;

use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::admin::Readiness;
use crate::config::{Config, ControllerProof};
use crate::control::{Control, Tls};
use crate::discovery::Discovery;
use crate::dump::{DumpConfig, Dumps};
use crate::identity::{CurrentCredentials, Trust};
use crate::metrics::Metrics;
use crate::worker::Listeners;

/// Connections that the proxy carries at most, where the limit of open files allows them.
const MAX_CONNECTIONS: u64 = 50_000;

/// Runs the proxy until `shutdown` is done and its connections have finished, or the time to drain is over.
pub fn run<F: Future<Output = ()>>(
    config: Config,
    shutdown: impl FnOnce() -> F,
) -> anyhow::Result<()> {
    let config = Arc::new(config);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("can't start the main thread's runtime")?;
    let result = runtime.block_on(run_main(config, shutdown));
    // Name look-ups under way would hold the process back.
    runtime.shutdown_background();
    result
}

async fn run_main<F: Future<Output = ()>>(
    config: Arc<Config>,
    shutdown: impl FnOnce() -> F,
) -> anyhow::Result<()> {
    let shutdown = shutdown();
    let metrics = Metrics::new();
    let dump_config = DumpConfig {
        mode: config.dump,
        format: config.dump_format,
        out: Box::new(std::io::stdout()),
    };
    let dumps =
        Dumps::start(dump_config, metrics.clone()).context("can't start the writer of dumps")?;
    let readiness = admin::Readiness::new();
    let (discovery, credentials) = start_control(&config, &metrics, &readiness)?;
    let listening = readiness.condition("listeners", "not listening yet");
    let discovering = readiness.condition("discovery", "the controller has not answered yet");
    let admin = admin::Admin {
        readiness: readiness.clone(),
        metrics: metrics.clone(),
    };
    tokio::spawn(admin.serve(admin::bind(config.admin_port)?));

    let drain = CancellationToken::new();
    let limit = connection_limit() / config.workers;
    let mut workers = Vec::new();
    for number in 0..config.workers {
        let listeners = bind(&config)?;
        let context = worker::WorkerContext {
            config: config.clone(),
            dumps: dumps.clone(),
            metrics: metrics.clone(),
            discovery: discovery.clone(),
            credentials: credentials.clone(),
            limit,
            drain: drain.clone(),
        };
        workers.push(worker::spawn(
            number,
            context,
            listeners,
            connection::carry,
        )?);
    }
    listening.met();
    let mut connected = discovery.connected_once();
    tokio::spawn(async move {
        if connected.wait_for(|connected| *connected).await.is_ok() {
            discovering.met();
        }
    });
    tracing::info!(
        pod = config.pod,
        inbound = config.inbound_port,
        outbound = config.outbound_port,
        admin = config.admin_port,
        "started"
    );

    shutdown.await;
    tracing::info!(
        "draining: connections finish what they carry, at most for {:?}",
        config.drain
    );
    readiness.drain();
    drain.cancel();
    let deadline = Instant::now() + config.drain;
    for worker in workers {
        let left = deadline.saturating_duration_since(Instant::now());
        match tokio::time::timeout(left, worker).await {
            Ok(_) => {}
            Err(_) => tracing::warn!("connections were still open after {:?}", config.drain),
        }
    }
    dumps.flush(Duration::from_secs(1));
    tracing::info!("ended");
    Ok(())
}

/// Starts what talks to the controller: discovery, and, where the controller proves itself, the keeping of the own identity.
fn start_control(
    config: &Config,
    metrics: &Metrics,
    readiness: &Readiness,
) -> anyhow::Result<(Discovery, CurrentCredentials)> {
    let (address, token_file) = (
        config.controller.to_string(),
        Some(config.token_file.clone()),
    );
    let trust = Trust::default();
    let (control, credentials) = match &config.controller_proof {
        Some(ControllerProof {
            identity,
            roots_file,
        }) => {
            let tls = Tls {
                expected: identity.clone(),
                roots_file: roots_file.clone(),
                trust: trust.clone(),
            };
            let control = Control::new(&address, token_file, Some(tls))?;
            let (credentials, renewal) = identity::start(
                control.clone(),
                identity.trust_domain().to_owned(),
                trust.clone(),
                metrics.identity.clone(),
            );
            tokio::spawn(renewal);
            let condition = readiness.condition("identity", "no certificate yet");
            tokio::spawn(identity_condition(credentials.clone(), condition));
            (control, credentials)
        }
        None => {
            tracing::warn!(
                "the controller is asked in the clear ({address}): this proxy has no identity, and reaches no meshed pod"
            );
            (Control::new(&address, token_file, None)?, identity::none())
        }
    };
    let (discovery, driver) = discovery::start(
        control,
        trust,
        credentials.clone(),
        metrics.discovery.clone(),
    );
    tokio::spawn(driver);
    Ok((discovery, credentials))
}

/// Ready with a certificate; not before the first one, nor after the end of the last.
async fn identity_condition(mut credentials: CurrentCredentials, condition: admin::Condition) {
    while credentials.changed().await.is_ok() {
        match *credentials.borrow_and_update() {
            Some(_) => condition.met(),
            None => condition.unmet("the certificate has ended, and there is no new one"),
        }
    }
}

/// Done at SIGTERM or SIGINT.
pub async fn shutdown_signal() {
    let (Ok(mut terminate), Ok(mut interrupt)) = (
        signal(SignalKind::terminate()),
        signal(SignalKind::interrupt()),
    ) else {
        tracing::error!("can't listen for signals: only SIGKILL will end this process");
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

/// One worker's sockets. Inbound connections come to the pod's addresses, redirected outbound ones to loopback.
fn bind(config: &Config) -> anyhow::Result<Listeners> {
    let port =
        |flag: &str, port: u16, v4: Ipv4Addr, v6: Ipv6Addr| -> anyhow::Result<Vec<TcpListener>> {
            let v4 = accept::bind(IpAddr::V4(v4), port)
                .with_context(|| format!("can't listen on {v4}:{port} (--{flag})"))?;
            // Without IPv6 there is nothing to redirect either.
            let v6 = accept::bind(IpAddr::V6(v6), port)
                .inspect_err(|error| tracing::debug!("no IPv6: {error}"));
            Ok(std::iter::once(v4).chain(v6).collect())
        };
    Ok(Listeners {
        inbound: port(
            "inbound-port",
            config.inbound_port,
            Ipv4Addr::UNSPECIFIED,
            Ipv6Addr::UNSPECIFIED,
        )?,
        outbound: port(
            "outbound-port",
            config.outbound_port,
            Ipv4Addr::LOCALHOST,
            Ipv6Addr::LOCALHOST,
        )?,
    })
}

/// How many connections may be open: each takes two files, its own and the upstream's, and pools keep some more.
fn connection_limit() -> usize {
    let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, hard)| {
        let raised = setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok();
        if raised { hard } else { soft }
    });
    let connections = (files.saturating_sub(128) / 3).clamp(16, MAX_CONNECTIONS);
    tracing::debug!(files, connections, "limits");
    usize::try_from(connections).unwrap_or(16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::testing::soon;

    #[tokio::test(start_paused = true)]
    async fn a_proxy_is_ready_while_it_has_a_certificate() {
        let readiness = Readiness::new();
        let (sender, credentials) = tokio::sync::watch::channel(None);
        let condition = readiness.condition("identity", "no certificate yet");
        tokio::spawn(identity_condition(credentials, condition));
        let reasons = async |expected: &str| {
            soon(async {
                while readiness.reasons() != expected {
                    tokio::task::yield_now().await;
                }
            })
            .await;
        };
        reasons("identity: no certificate yet\n").await;
        sender.send_replace(Some(identity::testing::credentials(
            &identity::testing::Authority::new("one"),
        )));
        reasons("").await;
        sender.send_replace(None);
        reasons("identity: the certificate has ended, and there is no new one\n").await;
    }
}
