//! The control plane at size: memory, fan-out, churn and restarts with thousands of subscribers,
//! certificates and injections, next to their goals.
//!
//! The controller and the injector are the real programs, each on a core of its own. Subscribers
//! (`subscriber.rs`) use the proxy's client code. The fake Kubernetes API server (`api_server.rs`)
//! serves the objects of `cluster.rs` and answers TokenReviews. `discovery.rs` and `requests.rs`
//! are the measurements, `report.rs` formats them.

pub mod api_server;
pub mod cluster;
pub mod config;
mod controller;
mod discovery;
mod progress;
pub mod report;
mod requests;
mod subscriber;
mod testbed;

use std::{
    fs,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use anyhow::{Context, Result};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::{
    runtime, select,
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

use self::{
    api_server::ApiServer,
    config::{Case, Config},
    report::Report,
    testbed::Testbed,
};

/// Enough for 20,000 subscribers.
const OPEN_FILES: u64 = 65_536;

/// Measures and prints the report. After SIGINT and SIGTERM, ends the programs and removes all
/// files before it returns.
pub fn run_until_signal(config: Config) -> ExitCode {
    let outcome = with_signals(move |interrupted| {
        let report = measure(&config, interrupted)?;
        print!("{}", report.table(config.color));
        if let Some(file) = &config.json {
            fs::write(file, format!("{:#}\n", report.json()))
                .with_context(|| format!("write {}", file.display()))?;
        }
        Ok(())
    });
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("scale: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs `work` on a thread, to its end also after a signal.
fn with_signals(
    work: impl FnOnce(Arc<AtomicBool>) -> Result<()> + Send + 'static,
) -> Result<ExitCode> {
    let (done, mut finished) = oneshot::channel();
    let interrupted = Arc::new(AtomicBool::new(false));
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
        let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
        let flag = interrupted.clone();
        thread::Builder::new()
            .name("scale".into())
            .spawn(move || done.send(work(flag)))
            .context("start the benchmark thread")?;
        let code = select! {
            outcome = &mut finished => {
                outcome.context("the benchmark panicked")??;
                return Ok(ExitCode::SUCCESS);
            }
            _ = interrupt.recv() => 130,
            _ = terminate.recv() => 143,
        };
        interrupted.store(true, Ordering::Relaxed);
        // Fails with the interruption.
        let _ = finished.await;
        Ok(ExitCode::from(code))
    })
}

/// Raises the limit of open files, which the programs under test inherit. Root may exceed the hard
/// limit.
fn raise_open_files() -> Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("read the limit of open files")?;
    let set = |limit| setrlimit(Resource::RLIMIT_NOFILE, limit, limit);
    let raised = set(hard.max(OPEN_FILES)).or_else(|_| set(hard));
    raised.context("raise the limit of open files")
}

/// Measures what the configuration selects.
pub fn measure(config: &Config, interrupted: Arc<AtomicBool>) -> Result<Report> {
    raise_open_files()?;
    let testbed = Testbed::new(interrupted)?;
    let api = ApiServer::start()?;
    let mut report = Report::default();
    if config.only.contains(&Case::Discovery) {
        for &subscribers in &config.subscribers {
            eprintln!("{subscribers} subscribers");
            let values = discovery::measure(config, &testbed, &api, subscribers as usize)
                .with_context(|| format!("measure {subscribers} subscribers"))?;
            report.by_subscribers.insert(subscribers, values);
        }
    }
    if config.only.contains(&Case::Certificates) {
        eprintln!("certificates");
        let values = requests::certificates(config, &testbed, &api);
        report
            .standalone
            .extend(values.context("measure certificates")?);
    }
    if config.only.contains(&Case::Injections) {
        eprintln!("injections");
        let values = requests::injections(config, &testbed, &api);
        report
            .standalone
            .extend(values.context("measure injections")?);
    }
    Ok(report)
}
