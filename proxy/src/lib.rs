//! The data plane: one proxy beside each pod. Every TCP connection of the pod passes through it,
//! redirected by the rules that proxy-init wrote.
//!
//! Read `path/connection.rs` first: the path, one call a step, inbound and outbound. Step 3 is
//! `path/detect.rs`. `serve/` carries out the plan of each request (`route/plan.rs`), once
//! `serve/filters.rs` permits it, by attempts (`serve/attempts.rs`) at the endpoints of `upstream/`.
//! `context/record.rs` is what metrics, dumps and the log get of it (`observe/`). Beside the path:
//! `discovery.rs` and `secure/identity.rs`, both by way of `secure/control.rs`; and `error.rs`, the
//! one map of failures. The folders stand in the order of the path, and import from later ones only.
//!
//! The main thread runs what is slow and shared: the admin server, discovery, renewal, shutdown.
//! Each worker thread has its own listeners, pools and balancers: a request stays on one core. It
//! takes no lock but for rate limits and session affinity, which the workers share, and for failures
//! (`observe/exceptions.rs`).

pub mod config;
pub mod context;
pub mod discovery;
pub mod egress;
pub mod endpoint;
pub mod error;
pub mod http;
pub mod inbound;
pub mod labels;
pub mod limits;
pub mod observe;
pub mod path;
pub mod protocol;
pub mod route;
pub mod secure;
pub mod serve;
pub mod upstream;

use std::future::ready;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::http::StatusCode;
use anyhow::Context as _;
use diy_mesh_runtime::{
    Admin, Condition, Page, Readiness, listen, raise_max_open_files, shutdown_signal,
};
use tokio::sync::{Mutex, mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::context::state::States;
use crate::discovery::{Discovery, OwnProxy};
use crate::limits::memory::Memory;
use crate::observe::dump::{DumpConfig, Dumps};
use crate::observe::metrics::Metrics;
use crate::observe::recent::{Query, Recent};
use crate::path::connection::Listeners;
use crate::secure::control::{Control, Tls};
use crate::secure::identity::{CurrentCredentials, Trust};

/// Maximum number of connections, if the limit of open files permits.
const MAX_CONNECTIONS: u64 = 50_000;

/// Runs the proxy until SIGTERM or SIGINT, then drains until all connections are closed or the
/// drain timeout expires.
pub fn run(config: Config) -> anyhow::Result<()> {
    let config = Arc::new(config);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("failed to start the runtime of the main thread")?;
    let result = runtime.block_on(run_main(config));
    // Does not wait for pending name resolutions.
    runtime.shutdown_background();
    result
}

async fn run_main(config: Arc<Config>) -> anyhow::Result<()> {
    let shutdown = shutdown_signal().context("failed to install signal handlers")?;
    let shutdown = pin!(shutdown);
    let metrics = Metrics::new();
    let dump_config = DumpConfig {
        mode: config.dump,
        format: config.dump_format,
        out: Box::new(std::io::stdout()),
    };
    let dumps =
        Dumps::start(dump_config, metrics.clone()).context("failed to start the dump writer")?;
    let readiness = Readiness::default();
    let memory = Memory::detect(config.memory_limit);
    tokio::spawn(memory.clone().maintain(config.memory_limit));
    let (discovery, credentials) = start_control(&config, &memory, &metrics, &readiness);
    let listening = readiness.condition("listeners", "listeners are not bound yet");
    let discovering = readiness.condition("discovery", "not started");
    let admin_metrics = metrics.clone();
    let admin = Admin::new(readiness.clone(), move || admin_metrics.render());
    if !config.exempt_probes.is_empty() {
        tracing::warn!(
            "--probe is ignored: an earlier injector created this strict pod, and the kubelet's probes fail; recreate it"
        );
    }
    let recent = Arc::<Recent>::default();
    let ended = recent.clone();
    let admin = admin.local_route("/exchanges", move |query| {
        ready(page(exchanges(&ended, query)))
    });
    let requests = metrics.requests.clone();
    let admin = admin.local_route("/traffic", move |_| {
        let total = serde_json::to_string(&requests.traffic(Instant::now()));
        ready(Page::json(total.expect("all keys are strings")))
    });
    let (asked, questions): (Vec<_>, Vec<_>) =
        (0..config.workers).map(|_| mpsc::channel(1)).unzip();
    let states = Arc::new(States {
        pod: config.pod(),
        credentials: credentials.clone(),
        identity: metrics.identity.clone(),
        discovery: discovery.clone(),
        workers: asked,
        exceptions: metrics.exceptions.clone(),
        turn: Mutex::default(),
    });
    let admin = admin.local_route("/state", move |query| {
        let (states, query) = (states.clone(), query.to_owned());
        async move { page(states.json(&query).await) }
    });
    let admin = match config.kubelet_probes() {
        Some((pod, probes)) => observe::probe::add_routes(admin, probes, pod, &metrics.exceptions),
        None => admin,
    };
    let admin_port = config.admin_port;
    let admin_listener = listen::bind((Ipv6Addr::UNSPECIFIED, admin_port).into())
        .await
        .with_context(|| format!("failed to listen on port {admin_port} (--admin-port)"))?;
    tokio::spawn(admin.serve(admin_listener));
    let drain = CancellationToken::new();
    let limit = connection_limit() / config.workers;
    tracing::debug!(
        memory = memory.limit(),
        limit,
        "limits of memory and of connections"
    );
    let mut workers = Vec::new();
    for (number, questions) in questions.into_iter().enumerate() {
        let listeners = bind(&config)?;
        let context = context::worker::WorkerContext {
            config: config.clone(),
            dumps: dumps.clone(),
            metrics: metrics.clone(),
            discovery: discovery.clone(),
            credentials: credentials.clone(),
            limit,
            memory: memory.clone(),
            recent: recent.clone(),
            drain: drain.clone(),
            questions,
        };
        let serve = move |worker| path::connection::serve(worker, listeners);
        workers.push(context::worker::spawn(number, context, serve)?);
    }
    listening.send_replace(None);
    if config.verify_redirect {
        let redirecting = readiness.condition("redirect", "not verified yet");
        let config = config.clone();
        tokio::spawn(async move { path::redirect::watch(&config, redirecting).await });
    }
    tokio::spawn(meet_once(discovery.unready(), Option::clone, discovering));
    tracing::info!(
        pod = config.pod(),
        inbound = config.inbound_port,
        outbound = config.outbound_port,
        admin = config.admin_port,
        "started"
    );

    shutdown.await;
    tracing::info!("draining connections for at most {:?}", config.drain);
    readiness.drain();
    drain.cancel();
    let deadline = Instant::now() + config.drain;
    for worker in workers {
        let remaining = deadline.saturating_duration_since(Instant::now());
        match tokio::time::timeout(remaining, worker).await {
            Ok(_) => {}
            Err(_) => tracing::warn!(
                "drain timeout of {:?} exceeded, closing open connections",
                config.drain
            ),
        }
    }
    dumps.flush(Duration::from_secs(1));
    tracing::info!("stopped");
    Ok(())
}

/// The latest exchanges that the query of a URL asks for, in JSON.
fn exchanges(recent: &Recent, query: &str) -> Result<String, (StatusCode, String)> {
    let query = Query::parse(query).map_err(|error| (StatusCode::BAD_REQUEST, error))?;
    Ok(serde_json::to_string(&recent.query(query)).expect("all keys are strings"))
}

/// A page in JSON, or why there is none.
fn page(json: Result<String, (StatusCode, String)>) -> Page {
    let failure = |(status, error)| Page::failure(status, format!("{error}\n"));
    json.map_or_else(failure, Page::json)
}

/// Starts discovery and, if the controller is authenticated, the renewal of the workload identity.
fn start_control(
    config: &Config,
    memory: &Memory,
    metrics: &Metrics,
    readiness: &Readiness,
) -> (Discovery, CurrentCredentials) {
    let (trust, proof) = (Trust::default(), config.controller_proof.as_ref());
    let tls = proof.map(|proof| Tls {
        expected: proof.identity.clone(),
        roots_file: proof.roots_file.clone(),
        trust: trust.clone(),
    });
    let token_file = Some(config.token_file.clone());
    let control = Control::new(config.controller.clone(), token_file, tls);
    let credentials = match proof {
        Some(proof) => {
            let (credentials, renewal) = secure::identity::start(
                control.clone(),
                proof.identity.trust_domain().to_owned(),
                trust.clone(),
                metrics.identity.clone(),
            );
            tokio::spawn(renewal);
            let condition = readiness.condition("identity", "not started");
            let reason = |credentials: &Option<_>| match credentials {
                Some(_) => None,
                None => Some("no certificate yet".to_owned()),
            };
            tokio::spawn(meet_once(credentials.clone(), reason, condition));
            credentials
        }
        None => {
            tracing::warn!(
                "plaintext connection to the controller at {}: the proxy has no identity, meshed pods are unreachable",
                config.controller
            );
            secure::identity::none()
        }
    };
    let (memory, workers) = (memory.clone(), config.workers);
    let (discovery, driver) = discovery::start(
        control,
        trust,
        credentials.clone(),
        metrics.discovery.clone(),
        metrics.exceptions.clone(),
        OwnProxy {
            arguments: config.policy.clone(),
            max_endpoints: Box::new(move || memory.max_endpoints(workers)),
            edges: (!config.hide_edges).then(|| metrics.edges.clone()),
            requests: metrics.requests.clone(),
        },
    );
    tokio::spawn(driver);
    (discovery, credentials)
}

/// Meets `condition` when `value` has no `reason` against it for the first time. A proxy that was
/// ready once stays ready, so that a long outage of the controllers does not remove all pods from
/// their Services.
async fn meet_once<T>(
    mut value: watch::Receiver<T>,
    reason: impl Fn(&T) -> Option<String>,
    condition: Condition,
) {
    loop {
        let reason = reason(&value.borrow_and_update());
        let is_met = reason.is_none();
        condition.send_replace(reason);
        if is_met || value.changed().await.is_err() {
            return;
        }
    }
}

/// Binds the listeners of one worker: inbound on all addresses, outbound on loopback, where
/// proxy-init redirects to.
fn bind(config: &Config) -> anyhow::Result<Listeners> {
    let user_timeout = config.timeouts.tcp_user;
    let port =
        |flag: &str, port: u16, v4: Ipv4Addr, v6: Ipv6Addr| -> anyhow::Result<Vec<TcpListener>> {
            let v4 = path::listener::bind(IpAddr::V4(v4), port, user_timeout)
                .with_context(|| format!("failed to listen on {v4}:{port} (--{flag})"))?;
            // Optional: without IPv6, nothing is redirected either.
            let v6 = path::listener::bind(IpAddr::V6(v6), port, user_timeout)
                .inspect_err(|error| tracing::debug!("IPv6 is unavailable: {error}"));
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

/// Maximum number of connections. Each needs two file descriptors, and pools need some more.
fn connection_limit() -> usize {
    let files = raise_max_open_files();
    let connections = (files.saturating_sub(128) / 3).clamp(16, MAX_CONNECTIONS);
    usize::try_from(connections).unwrap_or(16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secure::control::testing::FakeController;
    use diy_mesh_proto::mesh::v1 as proto;
    use diy_mesh_testkit::wait::soon;
    use proto::discover_response::Update;
    use proto::snapshot::Kind;

    #[tokio::test]
    async fn endpoints_of_a_service_fit_the_memory_of_the_proxy() {
        use clap::Parser as _;
        let mut controller = FakeController::start().await;
        let token = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&token, "token").unwrap();
        let arguments = format!(
            "proxy --inbound-port 4000 --outbound-port 5000 --admin-port 4001 --workers 2 \
             --token-file {} --controller http://{}",
            token.path().display(),
            controller.address
        );
        let config = Config::parse_from(arguments.split(' ')).check().unwrap();
        let memory = Memory::new(32 * 1024 * 1024);
        let (discovery, _) =
            start_control(&config, &memory, &Metrics::new(), &Readiness::default());
        let cart = std::net::SocketAddr::from(([10, 96, 0, 7], 80));
        let watching = tokio::spawn(async move { discovery.watch(cart).await });
        let mut stream = controller.stream().await;
        while stream.request().await != format!("+{cart}@") {}
        let endpoint = |number: u32| proto::Endpoint {
            address: format!("{}:80", Ipv4Addr::from_bits(0x0a00_0000 + number)),
            ..proto::Endpoint::default()
        };
        let snapshot = proto::Snapshot {
            kind: Kind::Service.into(),
            endpoints: (0..10_000).map(endpoint).collect(),
            ..proto::Snapshot::default()
        };
        let update = Update::Snapshot(snapshot);
        stream.respond(&cart.to_string(), "1", update).await;
        let kept = soon(watching).await.unwrap().borrow().part();
        // Half of them, and a few that each Service may have.
        let half = memory.max_endpoints(2) / 2;
        assert!(
            kept.is_some_and(|kept| (half..half + 5).contains(&kept)),
            "{kept:?}"
        );
    }
}
