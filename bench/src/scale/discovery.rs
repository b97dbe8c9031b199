//! The measurements with many subscribers.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use tokio::{
    runtime::{self, Runtime},
    sync::Semaphore,
};

use super::{
    api_server::ApiServer,
    cluster::{self, Cluster},
    config::Config,
    controller::Controller,
    progress::Progress,
    report::{Metric, Values},
    subscriber::{Kind, Subscriber},
    testbed::Testbed,
};
use crate::{certificates::client::control, load::percentile, tokens};

/// Subscribers that connect at the same time, until all are connected for the first time.
const MAX_CONNECTING: usize = 64;
/// One in this many subscribers does not read, and another one is the discovery of a proxy.
const SPECIAL_SUBSCRIBERS: usize = 100;
/// Time for all subscribers, and for each of them: many share a core.
const SUBSCRIBE_TIMEOUT: Duration = Duration::from_secs(120);
const SUBSCRIBER_TIMEOUT: Duration = Duration::from_millis(30);
const CHANGE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time without changes before memory is read.
const SETTLE_TIME: Duration = Duration::from_secs(2);
/// Time between two single changes.
const CHANGE_INTERVAL: Duration = Duration::from_millis(200);

/// Measures a new controller with so many subscribers.
pub fn measure(
    config: &Config,
    testbed: &Testbed,
    api: &ApiServer,
    subscribers: usize,
) -> Result<Values> {
    let program = config.controller.as_deref().context("no controller")?;
    let endpoints = config.endpoints as usize;
    let cluster = Cluster::new(endpoints, config.total_changes() as usize);
    api.reset(cluster.objects(subscribers));
    let controller = Controller::start(testbed, api, program)?;
    let progress = Progress::new(endpoints);
    let mut run = Run {
        clients: clients()?,
        progress: progress.clone(),
        subscribers,
        cluster,
        controller,
        testbed,
        api,
    };
    let values = run.all(config);
    let log = run.controller.log_tail();
    run.clients.shutdown_background();
    values.map_err(|error| anyhow!("{error:#}; {}{log}", progress.failures()))
}

struct Run<'a> {
    clients: Runtime,
    progress: Arc<Progress>,
    subscribers: usize,
    cluster: Cluster,
    controller: Controller,
    testbed: &'a Testbed,
    api: &'a ApiServer,
}

impl Run<'_> {
    fn all(&mut self, config: &Config) -> Result<Values> {
        let mut values = Values::default();
        self.testbed.pause(SETTLE_TIME)?;
        let empty = self.controller.meter().resident()?;
        self.connect()?;
        self.testbed.pause(SETTLE_TIME)?;
        let steady = self.controller.meter().resident()?;
        let per_subscriber = steady.saturating_sub(empty) as f64 / self.subscribers as f64;
        values.add(Metric::Memory, per_subscriber / 1000.0);
        self.single_changes(config.changes as usize, &mut values)?;
        self.churn(config, &mut values)?;
        for _ in 0..config.storms {
            self.storm(steady, &mut values)?;
        }
        self.check_targets()?;
        Ok(values)
    }

    /// Connects all subscribers, a limited number at the same time.
    fn connect(&self) -> Result<()> {
        let issuer = tokens::Issuer::new()?;
        let connecting = Arc::new(Semaphore::new(MAX_CONNECTING));
        for number in 0..self.subscribers {
            let token = issuer.token(&cluster::subscriber(number))?;
            let token = self.testbed.write(&format!("token-{number}"), &token)?;
            let subscriber = Subscriber {
                number,
                kind: kind(number),
                control: control(&self.controller.url(), Some(token), self.controller.roots())?,
                progress: self.progress.clone(),
            };
            self.clients.spawn(subscriber.run(connecting.clone()));
        }
        self.wait_for_subscribers()
    }

    /// Subscribers that read.
    fn readers(&self) -> usize {
        let numbers = 0..self.subscribers;
        numbers
            .filter(|number| kind(*number) != Kind::Stuck)
            .count()
    }

    fn wait_for_subscribers(&self) -> Result<()> {
        self.testbed.wait_for(
            "subscribers with all destinations",
            self.readers(),
            SUBSCRIBE_TIMEOUT + SUBSCRIBER_TIMEOUT * self.subscribers as u32,
            || self.progress.complete(),
        )
    }

    /// Makes the next change. Returns its number.
    fn change(&mut self) -> usize {
        let slice = self.cluster.change();
        let number = self.progress.issue();
        self.api.apply(slice);
        number
    }

    fn wait_for_change(&self) -> Result<()> {
        self.testbed.wait_for(
            "subscribers with the latest change",
            self.readers(),
            CHANGE_TIMEOUT,
            || self.progress.reached(),
        )
    }

    fn single_changes(&mut self, count: usize, values: &mut Values) -> Result<()> {
        let meter = self.controller.meter();
        // The first one may grow buffers.
        self.change();
        self.wait_for_change()?;
        let (mut numbers, idle) = (Vec::new(), self.idle_cpu()?);
        for _ in 1..count.max(2) {
            self.testbed.pause(CHANGE_INTERVAL)?;
            let (before, start) = (meter.cpu()?, Instant::now());
            numbers.push(self.change());
            self.wait_for_change()?;
            let used = meter.cpu()?.saturating_sub(before).as_secs_f64();
            let used = used - idle * start.elapsed().as_secs_f64();
            values.add(
                Metric::ChangeCpu,
                used.max(0.0) * 1e6 / self.subscribers as f64,
            );
        }
        let lags = self.progress.lags(numbers[0]..=numbers[numbers.len() - 1]);
        for lags in &lags {
            let first = lags.first().copied().unwrap_or_default();
            let spread: Vec<_> = lags.iter().map(|lag| *lag - first).collect();
            values.add(Metric::FanOut, milliseconds(percentile(&spread, 0.99)));
            values.add(Metric::ChangeFirst, milliseconds(first));
        }
        Ok(())
    }

    /// CPU seconds per second without changes: keep-alive and bookmarks.
    fn idle_cpu(&self) -> Result<f64> {
        let (meter, start) = (self.controller.meter(), Instant::now());
        let before = meter.cpu()?;
        self.testbed.pause(SETTLE_TIME)?;
        Ok(meter.cpu()?.saturating_sub(before).as_secs_f64() / start.elapsed().as_secs_f64())
    }

    fn churn(&mut self, config: &Config, values: &mut Values) -> Result<()> {
        let interval = Duration::from_secs(1) / config.churn;
        let (meter, start) = (self.controller.meter(), Instant::now());
        let before = meter.cpu()?;
        let mut numbers = Vec::new();
        while start.elapsed() < config.churn_length()
            && numbers.len() < (config.churn * config.seconds) as usize
        {
            let due = start + interval * numbers.len() as u32;
            self.testbed
                .pause(due.saturating_duration_since(Instant::now()))?;
            numbers.push(self.change());
        }
        let used = meter.cpu()?.saturating_sub(before);
        values.add(
            Metric::ChurnCpu,
            used.as_secs_f64() * 100.0 / start.elapsed().as_secs_f64(),
        );
        self.wait_for_change()?;
        let (Some(&first), Some(&last)) = (numbers.first(), numbers.last()) else {
            return Ok(());
        };
        let mut lags: Vec<_> = self.progress.lags(first..=last).concat();
        lags.sort_unstable();
        ensure!(!lags.is_empty(), "no subscriber received a change");
        values.add(Metric::ChurnLag, milliseconds(percentile(&lags, 0.99)));
        Ok(())
    }

    /// Kills the controller. All subscribers return without known versions.
    fn storm(&mut self, steady: u64, values: &mut Values) -> Result<()> {
        // With a pending back-off, a subscriber would return later.
        self.wait_for_subscribers()?;
        let start = Instant::now();
        self.controller.restart(self.testbed)?;
        self.progress.restarted();
        let lost = || self.subscribers - self.progress.complete().min(self.subscribers);
        self.testbed
            .wait_for("lost subscribers", 1, CHANGE_TIMEOUT, lost)?;
        self.wait_for_subscribers()?;
        values.add(Metric::Storm, start.elapsed().as_secs_f64());
        let meter = self.controller.meter();
        values.add(Metric::StormCpu, meter.cpu()?.as_secs_f64());
        let peak = meter.peak_resident()? as f64;
        values.add(Metric::StormMemory, peak / 1e6);
        values.add(Metric::StormMemoryRatio, peak / steady as f64);
        Ok(())
    }

    /// The discoveries have exactly the endpoints of the cluster, all of them meshed.
    fn check_targets(&self) -> Result<()> {
        let targets = self.progress.targets();
        let expected = self.cluster.addresses();
        let discoveries = (0..self.subscribers).filter(|number| kind(*number) == Kind::Discovery);
        ensure!(
            targets.len() == discoveries.count()
                && targets.values().all(|target| *target == expected),
            "the proxies' endpoints differ from the endpoints of the cluster"
        );
        Ok(())
    }
}

/// The first subscriber is the discovery of a proxy.
fn kind(number: usize) -> Kind {
    match number % SPECIAL_SUBSCRIBERS {
        0 => Kind::Discovery,
        50 => Kind::Stuck,
        _ => Kind::Stream,
    }
}

/// The runtime of the subscribers, with a thread for each core of this process.
fn clients() -> Result<Runtime> {
    let cores = thread::available_parallelism().context("count the cores")?;
    runtime::Builder::new_multi_thread()
        .worker_threads(cores.get())
        .enable_all()
        .build()
        .context("start the runtime of the subscribers")
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
