//! The side-by-side benchmark: direct connections, this mesh and Envoy, in turns, on one machine, printed as ratios.
//!
//! [`cases`] says what is measured, [`sides`] brings the four ways up, [`mod@measure`] runs one case on one of them with the [`load`]
//! generator against the [`server`], [`report`] makes the table. Load generator and server are threads of this program, each inside
//! its [`network`] namespace; only proxies and controller are processes. The proxies of both kinds speak mutual TLS with each
//! other; nothing but their [`cases::Side`] knows how a side reaches the server. What the controller costs by itself is measured
//! apart: [`certificates`].

pub mod cases;
pub mod certificates;
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
pub mod tokens;

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
    cases::{Case, Kind, Side},
    certificates::Issuing,
    config::Config,
    load::Window,
    machine::Reading,
    measure::{Numbers, load_only, measure},
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
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    let outcome = runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
        let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
        thread::Builder::new()
            .name("bench".into())
            .spawn(work)
            .context("start the benchmark's thread")?;
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
    let (_, most) =
        getrlimit(Resource::RLIMIT_NOFILE).context("ask for the limit of open files")?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most).context("raise the limit of open files")?;
    if let Some(notice) = &config.left_out {
        eprintln!("{notice}");
    }
    let (mut up, mut failures) = Up::start(config, site)?;
    if let (Some(how), [case]) = (config.profile, &config.cases[..]) {
        up.profile(how, case, config)?;
        return Ok(ExitCode::SUCCESS);
    }
    let (results, others, failed) = up.measure_all(config)?;
    failures += failed;
    let sides = up.sides();
    print!("{}", results.table(&config.cases, &sides, config.colours));
    if let Some(file) = &config.json {
        let report = results.json(&config.cases, &sides, settings(config, others));
        fs::write(file, format!("{report:#}\n"))
            .with_context(|| format!("write {}", file.display()))?;
    }
    if others > QUIET {
        eprintln!(
            "The machine was not idle: others took {:.0}% of its CPU time. That costs each side differently: repeat when it is quiet.",
            others * 100.0
        );
    }
    Ok(if failures == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// All that is there to be measured.
struct Up {
    running: Vec<Running>,
    control: Option<Control>,
    /// For the cases that are about the controller alone.
    issuing: Option<Issuing>,
}

impl Up {
    /// Starts what the cases need. Sides that do not start are reported and left out; how many that are.
    fn start(config: &Config, site: &Site) -> Result<(Self, usize)> {
        let (is_alone, has_mesh) = (
            |case: &&Case| case.kind.is_alone(),
            config.sides.iter().any(|side| side.is_mesh()),
        );
        let sides = if config.cases.iter().all(&is_alone) {
            &[][..]
        } else {
            &config.sides
        };
        let control = if sides.iter().any(|side| side.is_mesh()) {
            Some(Control::start(&config.programs, site)?)
        } else {
            None
        };
        let alone = has_mesh && config.cases.iter().any(&is_alone);
        let issuing = if alone {
            Some(Issuing::start(&config.programs, site)?)
        } else {
            None
        };
        let (mut up, mut failures) = (
            Up {
                running: Vec::new(),
                control,
                issuing,
            },
            0,
        );
        for &side in sides {
            eprintln!("starting {}", side.name());
            match Running::start(side, &config.programs, site, up.control.as_mut()) {
                Ok(side) => up.running.push(side),
                Err(problem) => {
                    failures += 1;
                    eprintln!("FAILED {} does not start: {problem:#}", side.name());
                }
            }
        }
        ensure!(
            !up.sides().is_empty(),
            "no side is up that these cases measure"
        );
        Ok((up, failures))
    }

    /// The sides that have figures.
    fn sides(&self) -> Vec<Side> {
        let is_up = |side: &Side| self.running.iter().any(|running| running.side == *side);
        Side::ALL
            .into_iter()
            .filter(|side| is_up(side) || (*side == Side::Mesh && self.issuing.is_some()))
            .collect()
    }

    fn profile(&self, how: config::Profile, case: &Case, config: &Config) -> Result<()> {
        let look = |targets: &[(String, u32)], load: &mut dyn FnMut() -> Result<()>| {
            profile::profile(how, case, targets, load, &config.programs.output)
        };
        if let (Kind::Certificates { askers, rate }, Some(issuing)) = (case.kind, &self.issuing) {
            let ready = issuing.ready(rate, config.window)?;
            let (id, mut ready) = (ready.id(), Some(ready));
            return look(&[("controller".to_string(), id)], &mut || {
                ready
                    .take()
                    .map_or(Ok(()), |ready| ready.measure(askers, rate).map(drop))
            });
        }
        let running = self.running.first().context("no side is up")?;
        let proxies = running
            .proxies()
            .context("the direct side has no proxies to look at")?;
        let targets = [
            ("client", proxies.client.id()),
            ("server", proxies.server.id()),
        ];
        let targets = targets.map(|(role, id)| (format!("{}-{role}", running.side.name()), id));
        look(&targets, &mut || load_only(case, running, config.window))
    }

    /// Each case on each side in turns, so that a slow minute of the machine hits all sides alike. A measurement that fails is
    /// reported and leaves its cell to the other repeats. Gives the results, the share of the machine that others took, and the failures.
    fn measure_all(&mut self, config: &Config) -> Result<(Results, f64, usize)> {
        let (mut results, mut failures, mut shares) = (Results::default(), 0, Vec::new());
        let mut patience = config.patience;
        let rounds: Vec<(&Case, Side)> = config
            .cases
            .iter()
            .flat_map(|case| self.rounds(case, config.repeats))
            .collect();
        for (round, &(case, side)) in rounds.iter().enumerate() {
            let progress = format!(
                "[{}/{}] {} {}:",
                round + 1,
                rounds.len(),
                case.name,
                side.name()
            );
            match self.measure_quietly(case, side, config, &mut patience)? {
                (Ok(numbers), share) => {
                    results.add(case, side, &numbers);
                    let text: Vec<_> = numbers
                        .iter()
                        .map(|(metric, value)| format!("{} {value:.1}", metric.name()))
                        .collect();
                    eprintln!(
                        "{progress} {} (others {:.0}%)",
                        text.join(", "),
                        share * 100.0
                    );
                    shares.push(share);
                }
                (Err(problem), _) => {
                    failures += 1;
                    let running = self
                        .running
                        .iter_mut()
                        .find(|running| running.side == side && !case.kind.is_alone());
                    let words = running
                        .as_ref()
                        .map(|running| running.last_words())
                        .unwrap_or_default();
                    eprintln!("{progress} FAILED {problem:#}{words}");
                    // A proxy that is gone or stuck must not spoil what follows.
                    if let Some(Err(problem)) = running.map(Running::restart) {
                        eprintln!("{} does not start again: {problem:#}", side.name());
                    }
                }
            }
        }
        let others = shares.iter().sum::<f64>() / shares.len().max(1) as f64;
        Ok((results, others, failures))
    }

    fn rounds<'a>(&self, case: &'a Case, repeats: usize) -> Vec<(&'a Case, Side)> {
        let sides = match (case.kind.is_alone(), &self.issuing) {
            (false, _) => self.running.iter().map(|running| running.side).collect(),
            (true, Some(_)) => vec![Side::Mesh],
            (true, None) => Vec::new(),
        };
        (0..repeats)
            .flat_map(|_| sides.iter().map(|&side| (case, side)))
            .collect()
    }

    /// One measurement, with the share of the machine that others took meanwhile. It waits for a quiet moment, and drops a
    /// measurement that others have disturbed, for as long as patience lasts.
    fn measure_quietly(
        &mut self,
        case: &Case,
        side: Side,
        config: &Config,
        patience: &mut Duration,
    ) -> Result<(Result<Numbers>, f64)> {
        loop {
            let start = Instant::now();
            let mut before = self.reading()?;
            while start.elapsed() < *patience {
                thread::sleep(Duration::from_millis(500));
                let now = self.reading()?;
                let share = std::mem::replace(&mut before, now).others_until(&now);
                if share < QUIET {
                    break;
                }
            }
            *patience = patience.saturating_sub(start.elapsed());
            let start = Instant::now();
            let outcome = self.measure(case, side, config.window);
            let share = before.others_until(&self.reading()?);
            if outcome.is_err() || share < QUIET || patience.is_zero() {
                return Ok((outcome, share));
            }
            *patience = patience.saturating_sub(start.elapsed());
        }
    }

    fn measure(&mut self, case: &Case, side: Side, window: Window) -> Result<Numbers> {
        if let (Kind::Certificates { askers, rate }, Some(issuing)) = (case.kind, &self.issuing) {
            return issuing.ready(rate, window)?.measure(askers, rate);
        }
        let running = self
            .running
            .iter_mut()
            .find(|running| running.side == side)
            .context("the side is not up")?;
        measure(case, running, window)
    }

    fn reading(&self) -> Result<Reading> {
        let mut meters: Vec<_> = self.running.iter().flat_map(Running::meters).collect();
        meters.extend(self.control.as_ref().map(Control::meter));
        Reading::take(&meters)
    }
}

fn settings(config: &Config, others: f64) -> serde_json::Value {
    json!({
        "seconds": config.window.length.as_secs_f64(), "repeats": config.repeats, "envoy": config::ENVOY_PACKAGE,
        "machine": machine::description(), "others_share_of_cpu": others,
    })
}
