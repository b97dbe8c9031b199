//! Service discovery: subscribes to a destination when a connection first goes there and keeps its
//! [`Target`] up to date. Workers hold a [`Discovery`]; one task on the main thread holds the
//! stream to the controller and the table of destinations. Targets outlive the stream.
//! Destinations without receivers expire. `balance` selects the endpoint of a request, not this
//! module.

mod affinity;
mod authorization;
mod limits;
mod own_pod;
mod policy;
pub mod position;
mod reported;
mod resource;
#[cfg(test)]
mod route_tests;
mod routes;
mod state;
mod subset;
mod table;
mod target;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod traffic;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use diy_mesh_proto::mesh::v1::discover_request::Action;
use diy_mesh_proto::mesh::v1::discover_response::Update;
use diy_mesh_proto::mesh::v1::{Acknowledgement, DiscoverRequest, DiscoverResponse, ResourceType};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep, timeout};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tracing::{debug, info, warn};

use crate::inbound::edges::{Edges, day};
use crate::inbound::policy::Policy;
use crate::observe::exceptions::Exceptions;
use crate::observe::metrics::{DiscoveryMetrics, Requests};
use crate::secure::control::{Control, ControlError, DiscoveryStream, backoff_ceiling, describe};
use crate::secure::identity::{CurrentCredentials, Roots, Trust};
pub use affinity::Affinity;
use own_pod::{OwnPod, Received};
use position::MAX_REFUSAL;
use reported::Reported;
pub use resource::Resource;
pub use state::Known;
use table::{Table, Watched};
pub use target::{Place, Target, TargetKind};
#[cfg(test)]
pub(crate) use testing::Questions;

/// Why the proxy is not ready at first.
const NOT_CONNECTED: &str = "no response from the controller yet";
const NOT_CONFIGURED: &str = "no inbound configuration of this pod from the controller yet; if it \
                              lasts, the log of the controller and `mesh check` have the cause";
/// Maximum number of subscribed destinations of all workers. Further ones are refused while all of
/// them are in use.
const MAX_DESTINATIONS: usize = 10_000;
/// Capacity of the queue of workers' requests. Workers wait while it is full.
const MAX_QUEUED_REQUESTS: usize = 256;
/// Minimum interval between log messages of the same kind.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Handle of the workers, which sends requests to the main thread. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Discovery {
    /// `None` if discovery is off.
    requests: Option<mpsc::Sender<Request>>,
    unready: watch::Receiver<Option<String>>,
    policy: watch::Receiver<Option<Arc<Policy>>>,
    timing: Timing,
}

/// Durations and limits, which tests shorten.
#[derive(Clone, Copy, Debug)]
struct Timing {
    /// Maximum time that a connection waits for the first response about its destination.
    first_response_timeout: Duration,
    /// The same for a destination that gets nothing before its first response: its requests would fail,
    /// although a busy controller answers late.
    withheld_timeout: Duration,
    /// Smallest and largest ceiling of the exponential back-off with full jitter.
    backoff: (Duration, Duration),
    /// Minimum lifetime of a stream that resets the back-off.
    backoff_reset_after: Duration,
    /// Time until a destination without receivers expires.
    idle_timeout: Duration,
    sweep_interval: Duration,
    /// Minimum interval between messages about exceptions, edges and unknown keys, each.
    report_interval: Duration,
    max_destinations: usize,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            first_response_timeout: Duration::from_secs(1),
            withheld_timeout: Duration::from_secs(5),
            backoff: (Duration::from_millis(100), Duration::from_secs(10)),
            backoff_reset_after: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(60),
            sweep_interval: Duration::from_secs(2),
            report_interval: Duration::from_secs(10),
            max_destinations: MAX_DESTINATIONS,
        }
    }
}

/// The settings and reports of the own proxy.
pub struct OwnProxy {
    /// The inbound policy of its arguments, which no controller weakens.
    pub arguments: Policy,
    /// The number of endpoints that all destinations together have, about.
    pub max_endpoints: Box<dyn Fn() -> usize + Send>,
    /// The edges of the pod, if the proxy reports them.
    pub edges: Option<Arc<Edges>>,
    /// The requests that it has forwarded.
    pub requests: Arc<Requests>,
}

/// Everything.
impl Default for OwnProxy {
    fn default() -> Self {
        Self {
            arguments: Policy::default(),
            max_endpoints: Box::new(|| usize::MAX),
            edges: None,
            requests: Arc::new(Requests::new(std::time::Instant::now())),
        }
    }
}

/// A request for the task on the main thread.
#[derive(Debug)]
enum Request {
    /// A request of a worker, for the target of a resource.
    Watch(Resource, oneshot::Sender<Watched>),
    /// A request of the admin server, for the known state.
    State(oneshot::Sender<Known>),
}

/// Returns the handle for the workers and the task that the main thread runs. The task ends when
/// all handles are dropped. Trust roots from the stream go to `trust`; changes of `credentials`
/// and `exceptions`, and the edges and requests of `own`, are reported to the controller.
pub fn start(
    control: Control,
    trust: Trust,
    credentials: CurrentCredentials,
    metrics: DiscoveryMetrics,
    exceptions: Arc<Exceptions>,
    own: OwnProxy,
) -> (Discovery, impl Future<Output = ()> + Send) {
    let reported = Reported::new(exceptions, own.edges.clone(), own.requests.clone());
    let timing = Timing::default();
    start_with(control, trust, credentials, metrics, reported, timing, own)
}

fn start_with(
    control: Control,
    trust: Trust,
    credentials: CurrentCredentials,
    metrics: DiscoveryMetrics,
    reported: Reported,
    timing: Timing,
    own: OwnProxy,
) -> (Discovery, impl Future<Output = ()> + Send) {
    let (sender, requests) = mpsc::channel(MAX_QUEUED_REQUESTS);
    let (set_unready, unready) = watch::channel(Some(NOT_CONNECTED.to_owned()));
    let (set_policy, policy) = watch::channel(None);
    let discovery = Discovery {
        requests: Some(sender),
        unready,
        policy,
        timing,
    };
    let driver = async move {
        let mut sweep = interval(timing.sweep_interval);
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let driver = Driver {
            table: Table::new(timing.max_destinations, (own.max_endpoints)()),
            max_endpoints: own.max_endpoints,
            requests,
            stream: None,
            controller_unavailable: false,
            unready: set_unready,
            own_pod: OwnPod::new(own.arguments, set_policy),
            metrics,
            reported,
            sweep,
            timing,
            log_limiter: LogLimiter::default(),
            trust,
            credentials,
        };
        driver.run(control).await;
    };
    (discovery, driver)
}

impl Discovery {
    /// Discovery without a controller: every destination is [`TargetKind::Unknown`].
    pub fn off() -> Self {
        Self {
            requests: None,
            unready: watch::channel(None).1,
            policy: watch::channel(None).1,
            timing: Timing::default(),
        }
    }

    /// Whether there is no controller.
    pub fn is_off(&self) -> bool {
        self.requests.is_none()
    }

    /// Watches the target of `resource`. Waits a bounded time for a first response with
    /// endpoints; while the controller is unavailable, returns the known target, or
    /// [`TargetKind::Unknown`], at once. The receiver is closed if the target never changes:
    /// [`TargetKind::Refused`] over the limit and at shutdown, [`TargetKind::Unknown`] for port 0,
    /// which is not a valid destination.
    pub async fn watch(&self, resource: impl Into<Resource>) -> watch::Receiver<Arc<Target>> {
        let resource = resource.into();
        let closed = |target| watch::channel(Arc::new(target)).1;
        let Some(requests) = self.requests.as_ref().filter(|_| resource.port() != 0) else {
            return closed(Target::unknown(&resource, false));
        };
        let (response, received) = oneshot::channel();
        let request = Request::Watch(resource, response);
        if requests.send(request).await.is_err() {
            return closed(TargetKind::Refused.into());
        }
        let Ok(Watched {
            mut receiver,
            settled,
        }) = received.await
        else {
            return closed(TargetKind::Refused.into());
        };
        if !settled {
            let is_withheld = receiver.borrow().kind == TargetKind::Withheld;
            let wait = if is_withheld {
                self.timing.withheld_timeout
            } else {
                self.timing.first_response_timeout
            };
            // After the timeout, the receiver has the target known by then.
            let _ = timeout(wait, first_response(&mut receiver)).await;
        }
        receiver
    }

    /// The known state, or `None` if discovery is off.
    pub async fn known(&self) -> Option<Known> {
        let (response, received) = oneshot::channel();
        let sent = self.requests.as_ref()?.send(Request::State(response)).await;
        sent.ok()?;
        received.await.ok()
    }

    /// Why `/ready` waits: for the first stream and, if the controller announces it, for the first
    /// inbound configuration of this pod. `None` from then on.
    pub fn unready(&self) -> watch::Receiver<Option<String>> {
        self.unready.clone()
    }

    /// The inbound policy of this pod that the controller sends. `None` before the first one.
    pub fn policy(&self) -> watch::Receiver<Option<Arc<Policy>>> {
        self.policy.clone()
    }
}

/// The task on the main thread.
struct Driver {
    table: Table,
    requests: mpsc::Receiver<Request>,
    /// Sender of the open stream. Unbounded, because the driver and the controller would otherwise
    /// wait for each other to read; the size of the table bounds its content.
    stream: Option<mpsc::UnboundedSender<DiscoverRequest>>,
    /// The latest attempt to open a stream failed: workers do not wait for a response.
    controller_unavailable: bool,
    unready: watch::Sender<Option<String>>,
    own_pod: OwnPod,
    metrics: DiscoveryMetrics,
    reported: Reported,
    sweep: Interval,
    timing: Timing,
    max_endpoints: Box<dyn Fn() -> usize + Send>,
    log_limiter: LogLimiter,
    trust: Trust,
    credentials: CurrentCredentials,
}

impl Driver {
    async fn run(mut self, control: Control) {
        let mut failures = 0;
        loop {
            let (requests, outgoing) = mpsc::unbounded_channel();
            let opening = control
                .clone()
                .discover(UnboundedReceiverStream::new(outgoing));
            let Some(opened) = self.serve_until(opening).await else {
                return;
            };
            match opened {
                Ok(stream) => {
                    let opened_at = Instant::now();
                    let Some(end) = self.follow(stream, requests).await else {
                        return;
                    };
                    failures = if opened_at.elapsed() >= self.timing.backoff_reset_after {
                        0
                    } else {
                        failures + 1
                    };
                    info!("discovery stream closed, keeping known targets: {end}");
                }
                Err(error) => {
                    failures += 1;
                    self.connect_failed(&error);
                }
            }
            let delay = backoff_ceiling(self.timing.backoff, failures).mul_f64(fastrand::f64());
            let Some(()) = self.serve_until(sleep(delay)).await else {
                return;
            };
            self.metrics.reconnects.inc();
        }
    }

    /// Subscribes to all watched destinations and applies responses until the stream closes.
    /// Returns why it closed; `None` if all handles are dropped.
    async fn follow(
        &mut self,
        stream: DiscoveryStream,
        requests: mpsc::UnboundedSender<DiscoverRequest>,
    ) -> Option<String> {
        info!(
            "discovery stream open, {} known destinations",
            self.table.len()
        );
        self.controller_unavailable = false;
        self.reported.stream_opened(stream.accepts);
        self.stream = Some(requests);
        self.send_status();
        let DiscoveryStream {
            mut responses,
            sends_own_pod,
            sends_policies,
            ..
        } = stream;
        if sends_own_pod {
            let subscription = self.own_pod.subscribe(sends_policies, Instant::now());
            self.send([subscription]);
        } else {
            self.own_pod.apply_arguments();
        }
        // Without it, the arguments of the proxy count.
        if !sends_own_pod || self.own_pod.is_configured() {
            self.unready.send_replace(None);
        } else {
            self.set_unready(NOT_CONFIGURED.to_owned());
        }
        let subscriptions = self.table.resume(Instant::now(), self.timing.idle_timeout);
        self.send(subscriptions);
        self.metrics.connected.set(1);
        let end = loop {
            match self.serve_until(responses.message()).await? {
                Ok(Some(response)) => self.apply(response),
                Ok(None) => break "closed by the controller".to_owned(),
                Err(status) => break describe(&status),
            }
        };
        self.stream = None;
        self.reported.traffic.stream_closed();
        self.table.pause(Instant::now());
        self.own_pod.pause(Instant::now());
        self.trust.stream_closed();
        self.metrics.connected.set(0);
        Some(end)
    }

    /// Serves workers and timers until `work` completes. `None` if all handles are dropped.
    async fn serve_until<F: Future>(&mut self, work: F) -> Option<F::Output> {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                output = &mut work => return Some(output),
                request = self.requests.recv() => self.respond(request?),
                () = changed(&mut self.credentials) => self.send_status(),
                _ = self.sweep.tick() => self.sweep(),
                () = self.reported.traffic.due() => {
                    let report = self.reported.traffic.take(Instant::now());
                    self.send(report.map(Action::Traffic));
                }
            }
        }
    }

    fn respond(&mut self, request: Request) {
        match request {
            Request::Watch(resource, response) => self.watch(resource, response),
            Request::State(response) => {
                // The client may have left.
                let _ = response.send(self.known());
            }
        }
    }

    fn watch(&mut self, resource: Resource, response: oneshot::Sender<Watched>) {
        match self.table.watch(resource.clone()) {
            Ok((Watched { receiver, settled }, requests)) => {
                self.send(requests);
                // The worker may have dropped the request.
                let _ = response.send(Watched {
                    receiver,
                    settled: settled || self.controller_unavailable,
                });
            }
            // Dropping `response` makes the target `Refused`.
            Err(table::Full) => {
                self.metrics.refused.inc();
                if let Some(count) = self.log_limiter.should_log(LogKind::TableFull) {
                    let used = self.table.len();
                    warn!(
                        "refusing {resource}: {used} destinations are in use, as many as the memory allows or the maximum ({count} refused)"
                    );
                }
            }
        }
    }

    fn apply(&mut self, response: DiscoverResponse) {
        self.metrics.message_received();
        debug!(
            name = response.name,
            version = response.version,
            "discovery response"
        );
        let Self {
            table,
            log_limiter,
            metrics,
            trust,
            own_pod,
            ..
        } = self;
        let mut report = |error: String| log_limiter.report_invalid(metrics, &error);
        match response {
            DiscoverResponse {
                update: Some(Update::Roots(roots)),
                version,
                ..
            } => match Roots::from_stream(roots, &version) {
                Ok(roots) => trust.set_from_stream(roots),
                Err(error) => {
                    report(format!("trust roots {version:?} rejected: {error}"));
                    self.send([Action::Acknowledgement(Acknowledgement {
                        r#type: ResourceType::Roots.into(),
                        version,
                        rejection: error.to_string(),
                        ..Acknowledgement::default()
                    })]);
                }
            },
            DiscoverResponse {
                update: Some(Update::Workload(workload)),
                version,
                position,
                ..
            } => {
                let received = Received {
                    workload,
                    version,
                    position: position.into(),
                };
                match own_pod.receive(received, Instant::now()) {
                    Some(acknowledgement) => self.acknowledge_own_pod(acknowledgement),
                    None => {
                        metrics.older_refused.inc();
                    }
                }
            }
            DiscoverResponse {
                update: Some(Update::ReportTraffic(asked)),
                ..
            } => self.reported.traffic.watch(asked.seconds, Instant::now()),
            // The only other resource without destinations: its version is current.
            response if response.r#type() == ResourceType::Self_ => {
                own_pod.confirm(response.position.into());
            }
            response => {
                let applied = table.apply(response, Instant::now(), &mut report);
                if applied.is_older {
                    metrics.older_refused.inc();
                }
                if let Some((resource, kept)) = applied.kept
                    && let Some(count) = log_limiter.should_log(LogKind::PartOfService)
                {
                    info!(
                        "{resource} has more endpoints than the memory limit of the proxy permits: using {kept} of them ({count} times)"
                    );
                }
                if let Some(resource) = applied.small_table
                    && let Some(count) = log_limiter.should_log(LogKind::SmallTable)
                {
                    info!(
                        "{resource} has a small table for its consistent hash, because the memory limit of the proxy permits no larger one: proxies with more memory select other endpoints ({count} times)"
                    );
                }
                self.send(applied.acknowledgement.map(Action::Acknowledgement));
            }
        }
    }

    /// The inbound configuration of this pod was applied, or is invalid.
    fn acknowledge_own_pod(&mut self, acknowledgement: Acknowledgement) {
        if acknowledgement.rejection.is_empty() {
            self.unready.send_replace(None);
        } else {
            let reason = &acknowledgement.rejection;
            let rejected = format!("inbound configuration rejected: {reason}");
            self.log_limiter.report_invalid(&self.metrics, &rejected);
            self.set_unready(rejected);
        }
        self.send([Action::Acknowledgement(acknowledgement)]);
    }

    /// Sets why the proxy is not ready, unless it has been ready.
    fn set_unready(&self, reason: String) {
        self.unready.send_if_modified(|unready| {
            let is_unready = unready.is_some();
            *unready = unready.take().map(|_| reason);
            is_unready
        });
    }

    /// Reports the roots and the certificate in use to the controller.
    fn send_status(&mut self) {
        let status = self
            .credentials
            .borrow_and_update()
            .as_ref()
            .map(|credentials| credentials.status());
        self.send(status.map(Action::Status));
    }

    fn sweep(&mut self) {
        self.table.set_max_endpoints((self.max_endpoints)());
        if self.stream.is_some() {
            let accepted = self.table.accept_refused(Instant::now()).into_iter();
            let (accepted, acknowledgements): (Vec<_>, Vec<_>) = accepted.unzip();
            let acknowledgements = acknowledgements.into_iter().flatten();
            self.send(acknowledgements.map(Action::Acknowledgement));
            let mut accepted: Vec<_> = accepted.iter().map(Resource::to_string).collect();
            if let Some(acknowledgement) = self.own_pod.accept_refused(Instant::now()) {
                self.acknowledge_own_pod(acknowledgement);
                accepted.push("the inbound configuration of this pod".to_owned());
            }
            self.metrics.older_accepted.inc_by(accepted.len() as u64);
            if let Some(first) = accepted.first()
                && let Some(count) = self.log_limiter.should_log(LogKind::OlderState)
            {
                warn!(
                    "using an older state of {first}: no controller has sent a newer one for {MAX_REFUSAL:?} ({} states, {count} times)",
                    accepted.len()
                );
            }
            let requests = self.table.sweep(Instant::now(), self.timing.idle_timeout);
            self.send(requests);
            let (interval, now) = (self.timing.report_interval, Instant::now());
            let exceptions = self.reported.exceptions(interval, now);
            self.send(exceptions.map(Action::Exceptions));
            let edges = self.reported.edges(interval, now, day(SystemTime::now()));
            self.send(edges.map(Action::Edges));
            let take = || self.own_pod.take_unknown_keys();
            let keys = self.reported.unknown_keys(interval, now, take);
            self.send(keys.map(Action::UnknownKeys));
        }
    }

    fn connect_failed(&mut self, error: &ControlError) {
        self.controller_unavailable = true;
        self.set_unready(error.to_string());
        self.table.stop_waiting();
        if let Some(count) = self.log_limiter.should_log(LogKind::Unavailable) {
            warn!("discovery unavailable, keeping known targets: {error} ({count} attempts)");
        }
    }

    /// Sends requests. While there is no stream, none is lost: the next one resumes everything.
    fn send(&mut self, actions: impl IntoIterator<Item = Action>) {
        let subscriptions = i64::try_from(self.table.len()).unwrap_or(i64::MAX);
        self.metrics.subscriptions.set(subscriptions);
        if let Some(stream) = &self.stream {
            for action in actions {
                // Fails if the stream has just closed.
                let _ = stream.send(DiscoverRequest {
                    action: Some(action),
                });
            }
        }
    }
}

/// Waits for a response with endpoints. A Service without endpoints, as each one is at first, keeps
/// its first connection waiting.
async fn first_response(receiver: &mut watch::Receiver<Arc<Target>>) {
    while receiver.changed().await.is_ok() && receiver.borrow().awaits_endpoint() {}
}

/// Waits for new credentials; forever if the sender is dropped.
async fn changed(credentials: &mut CurrentCredentials) {
    if credentials.changed().await.is_err() {
        std::future::pending().await
    }
}

/// Kinds of log messages that are limited separately.
#[derive(Clone, Copy)]
enum LogKind {
    TableFull,
    InvalidResponse,
    Unavailable,
    OlderState,
    PartOfService,
    SmallTable,
}

/// Limits each kind of log message to one per [`LOG_INTERVAL`].
#[derive(Default)]
struct LogLimiter([LogState; 6]);

#[derive(Default)]
struct LogState {
    last_logged: Option<Instant>,
    /// Events since then.
    count: u64,
}

impl LogLimiter {
    /// Counts an invalid response, and logs it if it is time.
    fn report_invalid(&mut self, metrics: &DiscoveryMetrics, error: &str) {
        metrics.broken.inc();
        if let Some(count) = self.should_log(LogKind::InvalidResponse) {
            warn!("invalid discovery response: {error} ({count} errors)");
        }
    }

    /// Counts an event. Returns the number of events since the last message if it is time for the
    /// next message.
    fn should_log(&mut self, kind: LogKind) -> Option<u64> {
        let LogState { last_logged, count } = &mut self.0[kind as usize];
        *count += 1;
        if last_logged.is_some_and(|at| at.elapsed() < LOG_INTERVAL) {
            return None;
        }
        *last_logged = Some(Instant::now());
        Some(std::mem::take(count))
    }
}
