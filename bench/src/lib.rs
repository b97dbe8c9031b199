//! The side-by-side benchmark: direct connections, this mesh and Envoy, in turns, on one machine, printed as ratios.
//!
//! [`cases`] says what is measured, [`sides`] brings the four ways up, [`mod@measure`] runs one case on one of them with the [`load`]
//! generator against the [`server`], [`report`] makes the table. Load generator and server are threads of this program, each inside
//! its [`network`] namespace; only proxies and controller are processes. The proxies of both kinds speak mutual TLS with each
//! other; nothing but their [`cases::Side`] knows how a side reaches the server.

pub mod cases;
pub mod config;
pub mod http2;
pub mod load;
pub mod machine;
pub mod measure;
pub mod network;
pub mod process;
pub mod profile;
pub mod report;
pub mod server;
pub mod sides;

use std::{
    fs::{self, File},
    path::Path,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::json;
use tokio::{
    runtime, select,
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

use crate::{
    cases::{Case, Kind},
    config::Config,
    machine::Reading,
    measure::{Numbers, measure},
    network::Site,
    report::Results,
    sides::{Control, Running},
};

/// The share of the machine that others may take before the run says so.
const QUIET: f64 = 0.1;

/// Runs the benchmark on a thread of its own; cleans up when it ends, and when a signal ends it.
pub fn run_until_signal(config: Config) -> ExitCode {
    if config.list {
        print!("{}", config::list());
        return ExitCode::SUCCESS;
    }
    let outcome = guarded(config);
    match outcome {
        Ok(code) => code,
        Err(problem) => {
            eprintln!("bench: {problem:#}");
            ExitCode::FAILURE
        }
    }
}

fn guarded(config: Config) -> Result<ExitCode> {
    let state = config.programs.state.clone();
    // Held to the end: two runs would measure each other, and sweep each other away.
    let _lock = lock(&state)?;
    let site = Site::clear(Site::BENCH)?;
    let (done, finished) = oneshot::channel();
    let inner = site.clone();
    let work = move || {
        // Nobody waits any more after a signal.
        let _ = done.send(run(&config, &inner));
    };
    let runtime = runtime::Builder::new_current_thread().enable_all().build().context("start the runtime")?;
    let outcome = runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
        let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
        thread::Builder::new().name("bench".into()).spawn(work).context("start the benchmark's thread")?;
        select! {
            outcome = finished => outcome.context("the benchmark panicked")?,
            _ = interrupt.recv() => Ok(ExitCode::from(130)),
            _ = terminate.recv() => Ok(ExitCode::from(143)),
        }
    });
    site.close()?;
    fs::remove_dir_all(&state).with_context(|| format!("remove {}", state.display()))?;
    outcome
}

fn lock(state: &Path) -> Result<File> {
    // What an earlier run left there is of no use.
    let path = state.with_extension("lock");
    let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
    if file.try_lock().is_err() {
        bail!("another run is under way ({} is locked)", path.display());
    }
    if state.exists() {
        fs::remove_dir_all(state).with_context(|| format!("remove {}", state.display()))?;
    }
    fs::create_dir_all(state).with_context(|| format!("make {}", state.display()))?;
    Ok(file)
}

fn run(config: &Config, site: &Site) -> Result<ExitCode> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).context("ask for the limit of open files")?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most).context("raise the limit of open files")?;
    if let Some(notice) = &config.left_out {
        eprintln!("{notice}");
    }
    let mut control = match config.sides.iter().any(|side| side.is_mesh()) {
        true => Some(Control::start(&config.programs, site)?),
        false => None,
    };
    let (mut running, mut failures) = (Vec::new(), 0);
    for &side in &config.sides {
        eprintln!("starting {}", side.name());
        match Running::start(side, &config.programs, site, control.as_mut()) {
            Ok(side) => running.push(side),
            Err(problem) => {
                failures += 1;
                eprintln!("FAILED {} does not start: {problem:#}", side.name());
            }
        }
    }
    ensure!(!running.is_empty(), "no side is up");
    let sides: Vec<_> = running.iter().map(|running| running.side).collect();
    if let (Some(how), [case], [one]) = (config.profile, &config.cases[..], &running[..]) {
        profile::profile(how, case, one, config.window, &config.programs.output)?;
        return Ok(ExitCode::SUCCESS);
    }
    let (results, others, failed) = measure_all(config, &mut running, control.as_ref())?;
    failures += failed;
    print!("{}", results.table(&config.cases, &sides, config.colours));
    if let Some(file) = &config.json {
        let report = results.json(&config.cases, &sides, settings(config, others));
        fs::write(file, format!("{report:#}\n")).with_context(|| format!("write {}", file.display()))?;
    }
    if others > QUIET {
        eprintln!(
            "The machine was not idle: others took {:.0}% of its CPU time. That costs each side differently: repeat when it is quiet.",
            others * 100.0
        );
    }
    Ok(if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Each case on each side in turns, so that a slow minute of the machine hits all sides alike. A measurement that fails is reported
/// and leaves its cell to the other repeats. Gives the results, the share of the machine that others took, and the failures.
fn measure_all(config: &Config, running: &mut [Running], control: Option<&Control>) -> Result<(Results, f64, usize)> {
    let (mut results, mut failures, mut shares) = (Results::default(), 0, Vec::new());
    let mut patience = config.patience;
    let total = config.cases.len() * config.repeats * running.len();
    let rounds = config.cases.iter().flat_map(|case| (0..config.repeats).map(move |_| case));
    for (round, case) in rounds.enumerate() {
        for position in 0..running.len() {
            let side = running[position].side;
            let progress = format!("[{}/{total}] {} {}:", round * running.len() + position + 1, case.name, side.name());
            match measure_quietly(case, config, running, position, control, &mut patience)? {
                (Ok(numbers), share) => {
                    results.add(case, side, &numbers);
                    let text: Vec<_> = numbers.iter().map(|(metric, value)| format!("{} {value:.1}", metric.name())).collect();
                    eprintln!("{progress} {} (others {:.0}%)", text.join(", "), share * 100.0);
                    shares.push(share);
                }
                (Err(problem), _) => {
                    failures += 1;
                    let side = &mut running[position];
                    eprintln!("{progress} FAILED {problem:#}{}", side.last_words());
                    // A proxy that is gone or stuck must not spoil what follows.
                    if let Err(problem) = side.restart() {
                        eprintln!("{} does not start again: {problem:#}", side.side.name());
                    }
                }
            }
        }
    }
    let others = shares.iter().sum::<f64>() / shares.len().max(1) as f64;
    Ok((results, others, failures))
}

/// One measurement, with the share of the machine that others took meanwhile. It waits for a quiet moment, and drops a measurement
/// that others have disturbed, for as long as patience lasts.
fn measure_quietly(
    case: &Case,
    config: &Config,
    running: &mut [Running],
    position: usize,
    control: Option<&Control>,
    patience: &mut Duration,
) -> Result<(Result<Numbers>, f64)> {
    loop {
        let start = Instant::now();
        let mut before = reading(running, control)?;
        while start.elapsed() < *patience {
            thread::sleep(Duration::from_millis(500));
            let now = reading(running, control)?;
            let share = std::mem::replace(&mut before, now).others_until(&now);
            if share < QUIET {
                break;
            }
        }
        *patience = patience.saturating_sub(start.elapsed());
        let start = Instant::now();
        let outcome = measure(case, &mut running[position], config.window);
        // Fresh proxies have used less than those before them, so the case that starts them cannot be told from others.
        let share = if matches!(case.kind, Kind::Start { .. }) { 0.0 } else { before.others_until(&reading(running, control)?) };
        if outcome.is_err() || share < QUIET || patience.is_zero() {
            return Ok((outcome, share));
        }
        *patience = patience.saturating_sub(start.elapsed());
    }
}

fn reading(running: &[Running], control: Option<&Control>) -> Result<Reading> {
    let mut meters: Vec<_> = running.iter().flat_map(Running::meters).collect();
    meters.extend(control.map(Control::meter));
    Reading::take(&meters)
}

fn settings(config: &Config, others: f64) -> serde_json::Value {
    json!({
        "seconds": config.window.length.as_secs_f64(), "repeats": config.repeats, "envoy": config::ENVOY_PACKAGE,
        "machine": machine::description(), "others_share_of_cpu": others,
    })
}
