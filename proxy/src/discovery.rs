//! What a destination is: asked of the controller when a connection first goes there, then watched. Workers hold a
//! [`Discovery`]; one task on the main thread holds the stream. What is known outlives the stream; a destination that
//! nobody watches is forgotten. It never decides where a request goes: that is `balance`'s work.

mod table;
mod target;
#[cfg(test)]
mod tests;

use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_proto::mesh::v1::discover_request::Action;
use diy_mesh_proto::mesh::v1::discover_response::Update;
use diy_mesh_proto::mesh::v1::{DiscoverRequest, DiscoverResponse};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep, timeout};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Streaming;
use tracing::{debug, info, warn};

use crate::control::{Control, ControlError, said};
use crate::identity::{CurrentCredentials, Roots, Trust};
use crate::metrics::DiscoveryMetrics;
use table::{Table, Watched};
pub use target::{AppProtocol, EndpointInfo, PodTarget, ServiceTarget, Target};

/// Destinations that are subscribed to at once, over all workers. One more is refused while all of them are in use.
const MAX_DESTINATIONS: usize = 10_000;
/// Questions of the workers that wait for the main thread; a worker that finds it full waits.
const QUEUED_QUESTIONS: usize = 256;
/// One line in the log about each kind of trouble in this time.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// The workers' handle: asks the main thread. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Discovery {
    /// None where there is nobody to ask.
    questions: Option<mpsc::Sender<Question>>,
    ready: watch::Receiver<bool>,
    first_answer: Duration,
}

/// How long things take; tests are less patient.
#[derive(Clone, Copy, Debug)]
struct Timing {
    /// A connection waits this long for its destination's first answer, then passes through.
    first_answer: Duration,
    /// Full jitter, up to a ceiling that doubles from the one to the other.
    backoff: (Duration, Duration),
    /// A stream that lived this long was a good one: the next try is a first one again.
    good_stream: Duration,
    /// A destination that nobody watches is kept this long.
    idle: Duration,
    sweep: Duration,
    limit: usize,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            first_answer: Duration::from_secs(1),
            backoff: (Duration::from_millis(100), Duration::from_secs(10)),
            good_stream: Duration::from_secs(10),
            idle: Duration::from_secs(60),
            sweep: Duration::from_secs(2),
            limit: MAX_DESTINATIONS,
        }
    }
}

#[derive(Debug)]
struct Question {
    destination: SocketAddr,
    answer: oneshot::Sender<Watched>,
}

/// The handle for the workers, and the task that the main thread must run. The task ends once all handles are gone. Roots that come
/// over the stream go to `trust`; what came of them, by `credentials`, is said to the controller.
pub fn start(
    control: Control,
    trust: Trust,
    credentials: CurrentCredentials,
    metrics: DiscoveryMetrics,
) -> (Discovery, impl Future<Output = ()> + Send) {
    start_with(control, trust, credentials, metrics, Timing::default())
}

fn start_with(
    control: Control,
    trust: Trust,
    credentials: CurrentCredentials,
    metrics: DiscoveryMetrics,
    timing: Timing,
) -> (Discovery, impl Future<Output = ()> + Send) {
    let (questions, asked) = mpsc::channel(QUEUED_QUESTIONS);
    let (set_ready, ready) = watch::channel(false);
    let discovery = Discovery {
        questions: Some(questions),
        ready,
        first_answer: timing.first_answer,
    };
    let driver = async move {
        let mut sweep = interval(timing.sweep);
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let table = Table::new(timing.limit);
        let quiet = Quiet::default();
        let driver = Driver {
            table,
            questions: asked,
            requests: None,
            away: false,
            ready: set_ready,
            metrics,
            sweep,
            timing,
            quiet,
            trust,
            credentials,
        };
        driver.run(control).await;
    };
    (discovery, driver)
}

impl Discovery {
    /// Discovery without a controller: every destination is [`Target::Unknown`].
    pub fn off() -> Self {
        let (_, ready) = watch::channel(true);
        Self {
            questions: None,
            ready,
            first_answer: Duration::ZERO,
        }
    }

    /// There is nobody to ask.
    pub fn is_off(&self) -> bool {
        self.questions.is_none()
    }

    /// What `destination` is, now and whenever that changes. Waits a bounded time for a first answer with endpoints; where the controller is known
    /// to be away it returns at once with what is known, or with [`Target::Unknown`]. The receiver is closed where nothing will
    /// ever come: [`Target::Refused`] over the limit and at the end, [`Target::Unknown`] for port 0, which is no place.
    pub async fn watch(&self, destination: SocketAddr) -> watch::Receiver<Arc<Target>> {
        let closed = |target| watch::channel(Arc::new(target)).1;
        let Some(questions) = self.questions.as_ref().filter(|_| destination.port() != 0) else {
            return closed(Target::Unknown);
        };
        let (answer, answered) = oneshot::channel();
        if questions
            .send(Question {
                destination,
                answer,
            })
            .await
            .is_err()
        {
            return closed(Target::Refused);
        }
        let Ok(Watched {
            mut receiver,
            settled,
        }) = answered.await
        else {
            return closed(Target::Refused);
        };
        if !settled {
            // Late or never: the target is what it is by then.
            let _ = timeout(self.first_answer, first_answer(&mut receiver)).await;
        }
        receiver
    }

    /// True once the controller has accepted the stream, and ever after: what `/ready` waits for.
    pub fn connected_once(&self) -> watch::Receiver<bool> {
        self.ready.clone()
    }
}

/// The main thread's place, taken by a test of the workers' side.
#[cfg(test)]
pub(crate) struct Questions(mpsc::Receiver<Question>);

#[cfg(test)]
impl Questions {
    /// The next destination that is asked about, and the way to answer: it leaves the test what news can be sent to.
    pub(crate) async fn next(
        &mut self,
    ) -> (
        SocketAddr,
        impl FnOnce(Arc<Target>) -> watch::Sender<Arc<Target>> + use<>,
    ) {
        let Question {
            destination,
            answer,
        } = self.0.recv().await.expect("a handle is left");
        (destination, move |target| {
            let (sender, receiver) = watch::channel(target);
            // Whoever asked may have given up.
            let _ = answer.send(Watched {
                receiver,
                settled: true,
            });
            sender
        })
    }
}

#[cfg(test)]
impl Discovery {
    /// Discovery whose questions the test answers.
    pub(crate) fn by_hand() -> (Self, Questions) {
        let (questions, asked) = mpsc::channel(QUEUED_QUESTIONS);
        (
            Self {
                questions: Some(questions),
                ..Self::off()
            },
            Questions(asked),
        )
    }
}

/// The task on the main thread.
struct Driver {
    table: Table,
    questions: mpsc::Receiver<Question>,
    /// The way to the controller while there is a stream. Unbounded, and yet bounded by the table: the driver must not
    /// wait for the controller to read while the controller waits for the driver to.
    requests: Option<mpsc::UnboundedSender<DiscoverRequest>>,
    /// The last try failed: nobody should wait for an answer.
    away: bool,
    ready: watch::Sender<bool>,
    metrics: DiscoveryMetrics,
    sweep: Interval,
    timing: Timing,
    quiet: Quiet,
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
                Ok(answers) => {
                    let since = Instant::now();
                    let Some(end) = self.follow(answers, requests).await else {
                        return;
                    };
                    failures = if since.elapsed() >= self.timing.good_stream {
                        0
                    } else {
                        failures + 1
                    };
                    info!("the controller's stream ended, what is known stays: {end}");
                }
                Err(error) => {
                    failures += 1;
                    self.give_up(&error);
                }
            }
            let pause = backoff(self.timing.backoff, failures, fastrand::f64());
            let Some(()) = self.serve_until(sleep(pause)).await else {
                return;
            };
            self.metrics.reconnects.inc();
        }
    }

    /// Subscribes to all that is watched, and takes answers in until the stream ends; returns why. `None`: nobody is
    /// left to take them in for.
    async fn follow(
        &mut self,
        mut answers: Streaming<DiscoverResponse>,
        requests: mpsc::UnboundedSender<DiscoverRequest>,
    ) -> Option<String> {
        info!(
            "connected to the controller, {} destinations known",
            self.table.len()
        );
        self.away = false;
        self.requests = Some(requests);
        self.send_status();
        let resumed = self.table.resume(Instant::now(), self.timing.idle);
        self.send(resumed);
        self.metrics.connected.set(1);
        self.ready.send_replace(true);
        let end = loop {
            match self.serve_until(answers.message()).await? {
                Ok(Some(answer)) => self.take_in(answer),
                Ok(None) => break "the controller closed it".to_owned(),
                Err(status) => break said(&status),
            }
        };
        self.requests = None;
        self.trust.stream_ended();
        self.metrics.connected.set(0);
        Some(end)
    }

    /// Serves the workers and the clock while `work` is under way. `None`: no worker is left.
    async fn serve_until<F: Future>(&mut self, work: F) -> Option<F::Output> {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                output = &mut work => return Some(output),
                question = self.questions.recv() => self.answer(question?),
                () = changed(&mut self.credentials) => self.send_status(),
                _ = self.sweep.tick() => self.tidy(),
            }
        }
    }

    fn answer(&mut self, question: Question) {
        let Question {
            destination,
            answer,
        } = question;
        match self.table.watch(destination) {
            Ok((Watched { receiver, settled }, requests)) => {
                self.send(requests);
                // A worker whose connection went away meanwhile does not listen, which is fine.
                let _ = answer.send(Watched {
                    receiver,
                    settled: settled || self.away,
                });
            }
            // Without an answer the worker goes by Refused.
            Err(table::Full) => {
                self.metrics.refused.inc();
                let limit = self.timing.limit;
                self.quiet.now_and_then(Trouble::Full, |times| {
                    warn!("{limit} destinations are in use, {destination} is refused until one of them is not ({times} such)");
                });
            }
        }
    }

    fn take_in(&mut self, answer: DiscoverResponse) {
        self.metrics.message_received();
        debug!(
            destination = answer.destination,
            version = answer.version,
            "the controller answered"
        );
        let Self {
            table,
            quiet,
            metrics,
            trust,
            ..
        } = self;
        let mut report = |problem: String| {
            metrics.broken.inc();
            quiet.now_and_then(Trouble::Broken, |times| {
                warn!("the controller's answer makes no sense: {problem} ({times} such)")
            });
        };
        match answer {
            DiscoverResponse {
                update: Some(Update::Roots(roots)),
                version,
                ..
            } => match Roots::announced(roots, &version) {
                Ok(roots) => trust.announce(roots),
                Err(problem) => report(format!(
                    "its trust roots {version:?} are not taken: {problem}"
                )),
            },
            answer => table.apply(answer, &mut report),
        }
    }

    /// So the controller learns which roots are in use, and which certificate.
    fn send_status(&mut self) {
        let status = self
            .credentials
            .borrow_and_update()
            .as_ref()
            .map(|credentials| credentials.status());
        self.send(status.map(|status| DiscoverRequest {
            action: Some(Action::Status(status)),
        }));
    }

    fn tidy(&mut self) {
        if self.requests.is_some() {
            let requests = self.table.sweep(Instant::now(), self.timing.idle);
            self.send(requests);
        }
    }

    fn give_up(&mut self, error: &ControlError) {
        self.away = true;
        self.table.stop_waiting();
        self.quiet.now_and_then(Trouble::Away, |times| {
            warn!("no discovery, what is known stays: {error} ({times} tries)")
        });
    }

    fn send(&mut self, requests: impl IntoIterator<Item = DiscoverRequest>) {
        let subscriptions = i64::try_from(self.table.len()).unwrap_or(i64::MAX);
        self.metrics.subscriptions.set(subscriptions);
        if let Some(sender) = &self.requests {
            // Where the stream has just ended, the next one starts with all of them.
            requests
                .into_iter()
                .for_each(|request| drop(sender.send(request)));
        }
    }
}

/// Done with an answer that is of use. A Service that has no endpoint yet, as all have in their first moments, gets the rest of the
/// time that its first connection waits.
async fn first_answer(receiver: &mut watch::Receiver<Arc<Target>>) {
    while receiver.changed().await.is_ok() && receiver.borrow().is_without_endpoint() {}
}

/// Done when there are other credentials; never where there will be none.
async fn changed(credentials: &mut CurrentCredentials) {
    if credentials.changed().await.is_err() {
        std::future::pending().await
    }
}

/// The pause before the try after `failures` failures in a row; `jitter` is from 0 to 1.
fn backoff((least, most): (Duration, Duration), failures: u32, jitter: f64) -> Duration {
    let ceiling = least
        .saturating_mul(1 << failures.saturating_sub(1).min(16))
        .min(most);
    ceiling.mul_f64(jitter)
}

/// What the log hears of only now and then.
#[derive(Clone, Copy)]
enum Trouble {
    Full,
    Broken,
    Away,
}

/// Keeps the log short: the first of a kind is told at once, then one in a while with the count of those since.
#[derive(Default)]
struct Quiet([Option<Instant>; 3], [u64; 3]);

impl Quiet {
    fn now_and_then(&mut self, trouble: Trouble, tell: impl FnOnce(u64)) {
        let (told, times) = (&mut self.0[trouble as usize], &mut self.1[trouble as usize]);
        *times += 1;
        if told.is_none_or(|at| at.elapsed() >= LOG_EVERY) {
            tell(std::mem::take(times));
            *told = Some(Instant::now());
        }
    }
}
