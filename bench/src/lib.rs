//! Side-by-side benchmark: compares direct connections, this mesh, Envoy and HAProxy on one machine
//! and prints ratios.
//!
//! [`cases`] defines the measurements, [`sides`] starts the four configurations, [`mod@measure`]
//! runs one case on one side with the [`load`] generator against the [`server`], [`report`] formats
//! the table. Load generator and server are threads of this program in their [`network`]
//! namespaces; proxies and controller are processes. Both meshes use mutual TLS between their
//! proxies. [`certificates`] measures the controller without proxies, [`records`] TLS records
//! alone. The program `scale` measures the control plane with thousands of subscribers: [`scale`].

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
pub mod records;
pub mod report;
pub mod scale;
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
    certificates::CertificateBench,
    config::{Config, Programs},
    load::Window,
    machine::Reading,
    measure::{Numbers, load_only, measure},
    network::NamespaceSet,
    report::Results,
    sides::{Control, Running},
};

/// Share of CPU time of other programs, from 0 to 1, above which a run prints a warning.
const MAX_FOREIGN_CPU_SHARE: f64 = 0.1;

/// Runs the benchmark on a separate thread. Cleans up after it and on SIGINT and SIGTERM.
pub fn run_until_signal(config: Config) -> ExitCode {
    if config.list {
        print!("{}", config::list());
        return ExitCode::SUCCESS;
    }
    let outcome = match config.records_server {
        Some(implementation) => records::serve(implementation).map(|()| ExitCode::SUCCESS),
        None => run_with_cleanup(config),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run_with_cleanup(config: Config) -> Result<ExitCode> {
    let state = config.programs.state.clone();
    // Concurrent runs would disturb each other and delete each other's namespaces.
    let _lock = lock(&state)?;
    let namespaces = NamespaceSet::clear(NamespaceSet::BENCH)?;
    let (done, finished) = oneshot::channel();
    let inner = namespaces.clone();
    let work = move || {
        // The receiver is gone after a signal.
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
            .context("start the benchmark thread")?;
        select! {
            outcome = finished => outcome.context("the benchmark panicked")?,
            _ = interrupt.recv() => Ok(ExitCode::from(130)),
            _ = terminate.recv() => Ok(ExitCode::from(143)),
        }
    });
    namespaces.close()?;
    fs::remove_dir_all(&state).with_context(|| format!("remove {}", state.display()))?;
    outcome
}

fn lock(state: &Path) -> Result<File> {
    // Discards the state of an earlier run.
    let path = state.with_extension("lock");
    let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
    if file.try_lock().is_err() {
        bail!("another run is in progress ({} is locked)", path.display());
    }
    if state.exists() {
        fs::remove_dir_all(state).with_context(|| format!("remove {}", state.display()))?;
    }
    fs::create_dir_all(state).with_context(|| format!("create {}", state.display()))?;
    Ok(file)
}

fn run(config: &Config, namespaces: &NamespaceSet) -> Result<ExitCode> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).context("read the limit of open files")?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most).context("raise the limit of open files")?;
    if let Some(notice) = &config.skipped_sides {
        eprintln!("{notice}");
    }
    let (mut up, mut failures) = Testbed::start(config, namespaces)?;
    if let (Some(profiler_kind), [case]) = (config.profile, &config.cases[..]) {
        up.profile(profiler_kind, case, config)?;
        return Ok(ExitCode::SUCCESS);
    }
    let (results, foreign, failed) = up.measure_all(config)?;
    failures += failed;
    let sides = up.sides();
    print!("{}", results.table(&config.cases, &sides, config.color));
    if let Some(file) = &config.json {
        let report = results.json(&config.cases, &sides, settings(config, foreign));
        fs::write(file, format!("{report:#}\n"))
            .with_context(|| format!("write {}", file.display()))?;
    }
    if foreign > MAX_FOREIGN_CPU_SHARE {
        eprintln!(
            "warning: other programs used {:.0}% of the CPU time, which affects each side differently; repeat the run on an idle machine",
            foreign * 100.0
        );
    }
    Ok(if failures == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Running sides and controllers.
struct Testbed {
    running: Vec<Running>,
    control: Option<Control>,
    /// The controller of the side with telemetry, whose state has its own directory.
    telemetry: Option<Control>,
    /// For the cases without proxies.
    certificates: Option<CertificateBench>,
    /// Whether the case of TLS records is measured.
    records: bool,
}

impl Testbed {
    /// Starts the sides and controllers that the cases need. Logs and skips sides that fail to
    /// start, and returns their number.
    fn start(config: &Config, namespaces: &NamespaceSet) -> Result<(Self, usize)> {
        let (is_standalone, has_mesh) = (
            |case: &&Case| case.kind.is_standalone(),
            config.sides.iter().any(|side| side.is_mesh()),
        );
        let sides = if config.cases.iter().all(&is_standalone) {
            &[][..]
        } else {
            &config.sides
        };
        let with_telemetry = Programs {
            state: config.programs.state.join("telemetry"),
            ..config.programs.clone()
        };
        let needs_control = |side: &Side| side.is_mesh() && *side != Side::Telemetry;
        let control = sides.iter().any(needs_control);
        let control = control.then(|| Control::start(&config.programs, namespaces, false));
        let telemetry = sides.contains(&Side::Telemetry);
        let telemetry = telemetry.then(|| Control::start(&with_telemetry, namespaces, true));
        let needs = |kind: fn(&Kind) -> bool| config.cases.iter().any(|case| kind(&case.kind));
        let certificates = if has_mesh && needs(|kind| matches!(kind, Kind::Certificates { .. })) {
            Some(CertificateBench::start(&config.programs, namespaces)?)
        } else {
            None
        };
        let (mut up, mut failures) = (
            Testbed {
                running: Vec::new(),
                control: control.transpose()?,
                telemetry: telemetry.transpose()?,
                certificates,
                records: needs(|kind| matches!(kind, Kind::Records(_))),
            },
            0,
        );
        for &side in sides {
            eprintln!("starting {}", side.name());
            let (programs, control) = match side {
                Side::Telemetry => (&with_telemetry, up.telemetry.as_mut()),
                _ => (&config.programs, up.control.as_mut()),
            };
            match Running::start(side, programs, namespaces, control) {
                Ok(side) => up.running.push(side),
                Err(error) => {
                    failures += 1;
                    eprintln!("FAILED to start {}: {error:#}", side.name());
                }
            }
        }
        ensure!(
            !up.sides().is_empty(),
            "no side is running that these cases measure"
        );
        Ok((up, failures))
    }

    /// The sides with results.
    fn sides(&self) -> Vec<Side> {
        let has_standalone = self.certificates.is_some() || self.records;
        let is_up = |side: &Side| self.running.iter().any(|running| running.side == *side);
        Side::ALL
            .into_iter()
            .filter(|side| is_up(side) || (*side == Side::Mesh && has_standalone))
            .collect()
    }

    fn profile(&self, profiler_kind: config::Profile, case: &Case, config: &Config) -> Result<()> {
        let run_profiler = |targets: &[(String, u32)], load: &mut dyn FnMut() -> Result<()>| {
            profile::profile(profiler_kind, case, targets, load, &config.programs.output)
        };
        if let (Kind::Certificates { concurrency, rate }, Some(certificates)) =
            (case.kind, &self.certificates)
        {
            let run = certificates.prepare(rate, config.window)?;
            let (id, mut ready) = (run.id(), Some(run));
            return run_profiler(&[("controller".to_string(), id)], &mut || {
                ready
                    .take()
                    .map_or(Ok(()), |ready| ready.measure(concurrency, rate).map(drop))
            });
        }
        let running = self.running.first().context("no side is running")?;
        let proxies = running
            .proxies()
            .context("the direct side has no proxies to profile")?;
        let ends = ["client", "server"].iter().zip(&proxies.ends);
        let targets: Vec<_> = ends
            .filter_map(|(role, end)| Some((role, end.as_ref()?.id())))
            .map(|(role, id)| (format!("{}-{role}", running.side.name()), id))
            .collect();
        run_profiler(&targets, &mut || load_only(case, running, config.window))
    }

    /// Measures each case on all sides in rotation, so that slow phases of the machine affect all
    /// sides. Logs failed measurements and continues. Returns the results, the CPU share of other
    /// programs, and the number of failures.
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
            match self.measure_when_idle(case, side, config, &mut patience)? {
                (Ok(numbers), share) => {
                    results.add(case, side, &numbers);
                    let text: Vec<_> = numbers
                        .iter()
                        .map(|(metric, value)| format!("{} {value:.1}", metric.name()))
                        .collect();
                    eprintln!(
                        "{progress} {} (other programs {:.0}%)",
                        text.join(", "),
                        share * 100.0
                    );
                    shares.push(share);
                }
                (Err(error), _) => {
                    failures += 1;
                    let running = self
                        .running
                        .iter_mut()
                        .find(|running| running.side == side && !case.kind.is_standalone());
                    let log = running
                        .as_ref()
                        .map(|running| running.log_tail())
                        .unwrap_or_default();
                    eprintln!("{progress} FAILED {error:#}{log}");
                    // A crashed or stuck proxy must not affect the next measurements.
                    if let Some(Err(error)) = running.map(Running::restart) {
                        eprintln!("cannot restart {}: {error:#}", side.name());
                    }
                }
            }
        }
        let foreign = shares.iter().sum::<f64>() / shares.len().max(1) as f64;
        Ok((results, foreign, failures))
    }

    fn rounds<'a>(&self, case: &'a Case, repeats: usize) -> Vec<(&'a Case, Side)> {
        let sides = match (case.kind, &self.certificates) {
            (Kind::Records(_), _) | (Kind::Certificates { .. }, Some(_)) => vec![Side::Mesh],
            (Kind::Certificates { .. }, None) => Vec::new(),
            (kind, _) => {
                let sides = self.running.iter().map(|running| running.side);
                sides.filter(|side| kind.is_measured_on(*side)).collect()
            }
        };
        (0..repeats)
            .flat_map(|_| sides.iter().map(|&side| (case, side)))
            .collect()
    }

    /// Measures once and returns the CPU share of other programs with the result. Waits for an idle
    /// machine and repeats a disturbed measurement until the budget `patience` is used up.
    fn measure_when_idle(
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
                let share = std::mem::replace(&mut before, now).foreign_cpu_share(&now);
                if share < MAX_FOREIGN_CPU_SHARE {
                    break;
                }
            }
            *patience = patience.saturating_sub(start.elapsed());
            let start = Instant::now();
            let outcome = self.measure(case, side, config.window);
            let share = before.foreign_cpu_share(&self.reading()?);
            if outcome.is_err() || share < MAX_FOREIGN_CPU_SHARE || patience.is_zero() {
                return Ok((outcome, share));
            }
            *patience = patience.saturating_sub(start.elapsed());
        }
    }

    fn measure(&mut self, case: &Case, side: Side, window: Window) -> Result<Numbers> {
        if let (Kind::Certificates { concurrency, rate }, Some(certificates)) =
            (case.kind, &self.certificates)
        {
            return certificates
                .prepare(rate, window)?
                .measure(concurrency, rate);
        }
        if let Kind::Records(other) = case.kind {
            return records::measure(other, window);
        }
        let running = self
            .running
            .iter_mut()
            .find(|running| running.side == side)
            .context("the side is not running")?;
        measure(case, running, window)
    }

    fn reading(&self) -> Result<Reading> {
        let mut meters: Vec<_> = self.running.iter().flat_map(Running::meters).collect();
        meters.extend(
            [&self.control, &self.telemetry]
                .into_iter()
                .flatten()
                .map(Control::meter),
        );
        Reading::take(&meters)
    }
}

fn settings(config: &Config, foreign: f64) -> serde_json::Value {
    json!({
        "seconds": config.window.length.as_secs_f64(), "repeats": config.repeats, "envoy": config::ENVOY_PACKAGE,
        "machine": machine::description(), "others_share_of_cpu": foreign,
    })
}
