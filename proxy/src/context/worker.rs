//! One worker thread, and what its connections share. Workers share the configuration, the metrics,
//! the dump queue, and what discovery knows.

use std::cell::{Cell, Ref, RefCell};
use std::future::{Future, poll_fn};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use diy_mesh_runtime::admission::{Admission, network};
use tokio::sync::{Notify, Semaphore, mpsc, oneshot, watch};
use tokio::task::LocalSet;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::context::destination::Destinations;
use crate::context::log::{HolderLimit, LogLimit};
use crate::context::state::Question;
use crate::discovery::Discovery;
use crate::egress::resolver::Resolver;
use crate::error::Failure;
use crate::inbound::edges::SeenEdges;
use crate::inbound::policy::Policy;
use crate::limits::lifetime::{Expiry, Lifetimes};
use crate::limits::memory::{ConnectionSlot, Holder, Memory};
use crate::observe::dump::Dumps;
use crate::observe::exceptions::{Event, Kind};
use crate::observe::metrics::Metrics;
use crate::observe::recent::Recent;
use crate::observe::trace::SpanQueue;
use crate::secure::identity::CurrentCredentials;
use crate::secure::io::Io;
use crate::secure::tls::Tls;
use crate::upstream::balance::Backend;
use crate::upstream::connect::Pools;
use diy_mesh_model::exchange::Direction;

/// The maximum number of requests of a worker whose copies are collected or sent.
const MAX_MIRRORS: usize = 100;

/// How often idle destinations and connections are evicted.
const EVICTION_INTERVAL: Duration = Duration::from_secs(2);

/// Warnings about peers.
const PEER_WARNINGS: (u32, Duration) = (1, Duration::from_secs(10));

const NO_SLOT: Failure =
    Failure::Overloaded("the connections or the memory are in use, and its holder has its share");

/// The inputs of a worker.
pub struct WorkerContext {
    /// The configuration of the proxy.
    pub config: Arc<Config>,
    /// The dump queue.
    pub dumps: Dumps,
    /// The metrics of the proxy.
    pub metrics: Arc<Metrics>,
    /// The source of destinations.
    pub discovery: Discovery,
    /// The certificate and the trust roots.
    pub credentials: CurrentCredentials,
    /// The maximum number of open connections. The memory may allow fewer.
    pub limit: usize,
    /// The memory of the proxy.
    pub memory: Memory,
    /// The latest exchanges and opaque connections of the proxy.
    pub recent: Arc<Recent>,
    /// Cancelled when the proxy shuts down.
    pub drain: CancellationToken,
    /// The questions of the admin server.
    pub questions: mpsc::Receiver<Question>,
}

/// Starts a worker on a thread of its own, which runs `serve`. The receiver completes when that
/// ends.
pub fn spawn<F: Future<Output = ()>>(
    number: usize,
    context: WorkerContext,
    serve: impl FnOnce(Rc<Worker>) -> F + Send + 'static,
) -> io::Result<oneshot::Receiver<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (done, drained) = oneshot::channel();
    std::thread::Builder::new()
        .name(format!("worker-{number}"))
        .spawn(move || {
            LocalSet::new().block_on(&runtime, serve(Worker::new(context)));
            // Fails if the drain timeout has passed and the receiver was dropped.
            let _ = done.send(());
        })?;
    Ok(drained)
}

/// The state that the connections of one worker thread share.
pub struct Worker {
    /// The configuration of the proxy.
    pub config: Arc<Config>,
    /// The dump queue.
    pub dumps: Dumps,
    /// The metrics of the proxy.
    pub metrics: Arc<Metrics>,
    /// The TLS configurations and session tickets.
    pub tls: Tls,
    /// The destinations of the outbound path: endpoints with their loads and pools.
    pub destinations: Destinations,
    /// The addresses of the application, which the inbound path connects to.
    pub apps: Destinations,
    /// The inbound policy, and its updates.
    policy: RefCell<Arc<Policy>>,
    policy_updates: watch::Receiver<Option<Arc<Policy>>>,
    /// The number of its changes, each of which is notified.
    policy_version: Cell<u64>,
    policy_changed: Notify,
    /// The edges of calls to the pod, and of its calls to outside of the cluster, on this day.
    pub edges: SeenEdges,
    /// The latest exchanges and opaque connections.
    pub recent: Arc<Recent>,
    /// Spans for the collector.
    pub spans: SpanQueue,
    /// The addresses of destinations outside of the cluster.
    pub resolver: Resolver,
    /// The random numbers of the balancers.
    pub rng: RefCell<fastrand::Rng>,
    /// Makes the choices for a connection repeatable, and different from the choices of other workers.
    choices: RandomState,
    /// Cancelled when the proxy shuts down: connections end after their current exchange.
    pub drain: CancellationToken,
    /// The slots and the bytes of connections, of both directions.
    pub admission: Arc<Admission<Holder>>,
    /// The maximum number of slots. The memory may allow fewer.
    limit: usize,
    /// The number of open connections, with those that have lost their slot.
    open: Cell<usize>,
    /// Requests whose copies are collected or sent.
    pub mirrors: Arc<Semaphore>,
    memory: Memory,
    /// The log lines about denied calls. The metrics count them all.
    pub denials: HolderLimit,
    /// The log lines about calls that are allowed without an answer of an authorization server.
    pub failures_open: HolderLimit,
    /// The warnings about peers. The metrics count their causes.
    pub warnings: LogLimit,
    /// Notified when the last connection closes.
    idle: Notify,
    /// Those that maintain the worker answer them.
    questions: RefCell<mpsc::Receiver<Question>>,
}

impl Worker {
    /// A worker without connections.
    pub fn new(context: WorkerContext) -> Rc<Self> {
        let mut rng = fastrand::Rng::new();
        let lifetimes = Lifetimes::new(context.config.max_connection_age, rng.fork());
        let tls = Tls::new(
            context.credentials,
            lifetimes,
            context.config.timeouts,
            context.metrics.clone(),
        );
        let workers = u32::try_from(context.config.workers).unwrap_or(u32::MAX);
        let metrics = context.metrics.clone();
        let pools = |direction| Pools::new(workers, metrics.upstream(direction));
        let worker = Self {
            policy: RefCell::new(Arc::new(context.config.policy.clone())),
            policy_updates: context.discovery.policy(),
            policy_version: Cell::new(0),
            policy_changed: Notify::new(),
            edges: SeenEdges::new(context.metrics.edges.clone()),
            recent: context.recent,
            spans: SpanQueue::default(),
            resolver: Resolver::new(&context.config.resolv_conf),
            config: context.config,
            dumps: context.dumps,
            metrics: context.metrics,
            tls,
            destinations: Destinations::new(context.discovery, pools(Direction::Outbound)),
            apps: Destinations::new(Discovery::off(), pools(Direction::Inbound)),
            rng: RefCell::new(rng),
            choices: RandomState::new(),
            drain: context.drain,
            admission: Admission::new(context.limit),
            limit: context.limit,
            open: Cell::new(0),
            mirrors: Arc::new(Semaphore::new(MAX_MIRRORS)),
            memory: context.memory,
            denials: HolderLimit::default(),
            failures_open: HolderLimit::default(),
            warnings: LogLimit::new(PEER_WARNINGS),
            idle: Notify::new(),
            questions: RefCell::new(context.questions),
        };
        worker.follow_memory_limit();
        Rc::new(worker)
    }

    /// Divides the memory of the container, whose limit may change, into slots and bytes.
    fn follow_memory_limit(&self) {
        let (workers, limit) = (self.config.workers, self.max_connections());
        self.admission.resize(limit, self.memory.bytes(workers));
        for pools in [&self.destinations, &self.apps] {
            pools.set_max_idle(limit / 4);
        }
    }

    /// The number of slots.
    pub fn max_connections(&self) -> usize {
        let of_memory = self.memory.max_connections() / self.config.workers;
        self.limit.min(of_memory)
    }

    /// Random numbers for a connection of this client, the same ones on each call.
    pub fn rng_of(&self, peer: SocketAddr) -> fastrand::Rng {
        fastrand::Rng::with_seed(self.choices.hash_one(peer))
    }

    /// Evicts what is idle, follows the policy and tells its state until the proxy shuts down and the last connection
    /// has ended. Late connections are still served.
    pub async fn maintain_until_drained(&self) {
        let mut eviction = tokio::time::interval(EVICTION_INTERVAL);
        let mut policy_updates = self.policy_updates.clone();
        policy_updates.mark_changed();
        let mut drained = pin!(async {
            self.drain.cancelled().await;
            while self.open.get() > 0 {
                self.idle.notified().await;
            }
        });
        loop {
            tokio::select! {
                Ok(()) = policy_updates.changed() => {
                    if let Some(policy) = &*policy_updates.borrow_and_update() {
                        *self.policy.borrow_mut() = policy.clone();
                        self.policy_version.set(self.policy_version.get() + 1);
                        self.policy_changed.notify_waiters();
                    }
                }
                _ = eviction.tick() => {
                    let now = Instant::now();
                    self.edges.follow(SystemTime::now());
                    let exceptions = &self.metrics.exceptions;
                    self.destinations.report(Direction::Outbound, exceptions, now);
                    self.apps.report(Direction::Inbound, exceptions, now);
                    self.destinations.evict_idle(now);
                    self.apps.evict_idle(now);
                    self.follow_memory_limit();
                }
                Some(question) = poll_fn(|cx| self.questions.borrow_mut().poll_recv(cx)) => {
                    question.answer(self);
                }
                () = &mut drained => return,
            }
        }
    }

    /// Admits an accepted connection, which counts as open until the value is dropped. Returns `None`
    /// if its holder has its share of the slots, and uses all of them.
    pub fn admit(self: &Rc<Self>, direction: Direction, peer: IpAddr) -> Option<Open> {
        let holder = match direction {
            Direction::Inbound => Holder::Pending(network(peer)),
            Direction::Outbound => Holder::App,
        };
        let Some(slot) = self.admission.admit(&holder.path()) else {
            self.count_no_slot(direction);
            return None;
        };
        self.open.set(self.open.get() + 1);
        Some(Open {
            worker: self.clone(),
            direction,
            slot: Rc::new(slot),
            _counted: self.metrics.connection(direction),
        })
    }

    /// Counts a connection without a slot.
    fn count_no_slot(&self, direction: Direction) {
        self.metrics.failure(direction, &NO_SLOT);
        let event = Event {
            // The destination of an outbound connection is unknown.
            kind: match direction {
                Direction::Inbound => Kind::Inbound,
                Direction::Outbound => Kind::Addresses,
            },
            destination: "",
            endpoint: "",
            reason: NO_SLOT.code().label(),
        };
        self.metrics.exceptions.record(event, 1, Instant::now());
    }

    /// Counts an exchange or an opaque connection that ended, with the code of its failure.
    pub fn ended(&self, direction: Direction, backend: &Backend, failure: Option<&'static str>) {
        backend.count_end();
        if let Some(code) = failure {
            let exceptions = &self.metrics.exceptions;
            backend.report_failure(direction, code, exceptions, Instant::now());
        }
    }

    /// The inbound policy of the pod.
    pub fn policy(&self) -> Ref<'_, Policy> {
        Ref::map(self.policy.borrow(), |policy| &**policy)
    }

    /// Waits for the next change of the policy.
    pub async fn policy_changed(&self) {
        self.policy_changed.notified().await;
    }

    /// The number of changes of the policy.
    pub fn policy_version(&self) -> u64 {
        self.policy_version.get()
    }

    /// Runs the work of a task. If policies apply to it, polls it after each change of the policy: what it
    /// does may no longer be allowed.
    pub async fn run_under_policy<T>(
        &self,
        direction: Direction,
        mut work: Pin<&mut impl Future<Output = T>>,
    ) -> T {
        // Without policies of egress, what is open is judged again with its next bytes.
        if direction == Direction::Outbound && self.policy().egress.is_none() {
            return work.await;
        }
        let mut changed = pin!(self.policy_changed.notified());
        let mut version = None;
        poll_fn(|cx| {
            let current = self.policy_version.get();
            if version.replace(current) != Some(current) {
                changed.set(self.policy_changed.notified());
                // Registers the task.
                let _ = changed.as_mut().poll(cx);
            }
            work.as_mut().poll(cx)
        })
        .await
    }

    /// The expiry of a connection in use, which counts the connection from the end of the peer's
    /// certificate on. Never done for plaintext.
    pub fn expiry(self: &Rc<Self>, io: &Io, direction: Direction) -> Expiry {
        let Some(&lifetime) = io.lifetime() else {
            return Expiry(None);
        };
        // A socket without a peer address is closed: the next read returns the error.
        let Ok(peer) = io.socket().peer_addr() else {
            return Expiry(None);
        };
        let (worker, path) = (self.clone(), direction.name());
        Expiry(Some(Box::pin(async move {
            let outlived = || {
                if worker.warnings.should_log(Instant::now()) {
                    tracing::warn!(path, %peer, "the peer's certificate has expired; its connection stays open");
                }
                worker.metrics.certificate_expired(direction)
            };
            lifetime.expire(outlived).await;
            tracing::debug!(path, %peer, "connection reset: it reached its maximum age");
        })))
    }

    /// The ports of the proxy, which no connection may lead back to.
    pub fn own_ports(&self) -> [u16; 2] {
        [self.config.inbound_port, self.config.outbound_port]
    }
}

/// One open connection, counted until it is dropped.
pub struct Open {
    worker: Rc<Worker>,
    direction: Direction,
    /// Its slot.
    pub slot: Rc<ConnectionSlot>,
    _counted: diy_mesh_runtime::metrics::Active,
}

impl Open {
    /// Runs the work of the connection until it is done, or another connection takes the slot.
    pub async fn run(self, work: Pin<&mut impl Future<Output = ()>>) {
        self.slot.run(work).await;
        if self.slot.is_ended() {
            self.worker.count_no_slot(self.direction);
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.slot.release();
        self.worker.open.set(self.worker.open.get() - 1);
        if self.worker.open.get() == 0 {
            self.worker.idle.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diy_mesh_testkit::wait::{soon, until};

    impl Worker {
        /// A slot of the application.
        pub fn slot(&self) -> Rc<ConnectionSlot> {
            Rc::new(self.admission.admit(&Holder::App.path()).expect("a slot"))
        }
    }

    impl WorkerContext {
        /// The inputs of a worker in a test, with additional arguments and without discovery.
        pub fn for_a_test(arguments: &str) -> Self {
            use clap::Parser as _;
            let usual = "proxy --inbound-port 4000 --outbound-port 5000 --admin-port 4001 --controller http://c:8080 --token-file /token";
            let config = Config::parse_from(format!("{usual}{arguments}").split(' '));
            let config = Arc::new(config.check().unwrap());
            Self {
                memory: Memory::of_bytes(64 * 1024 * 1024, config.workers),
                config,
                dumps: Dumps::off(),
                metrics: Metrics::new(),
                discovery: Discovery::off(),
                credentials: crate::secure::identity::none(),
                limit: 1000,
                recent: Arc::default(),
                drain: CancellationToken::new(),
                questions: mpsc::channel(1).1,
            }
        }
    }

    #[tokio::test]
    async fn slots_follow_the_memory_limit() {
        let memory = Memory::new(32 << 20);
        let worker = Worker::new(WorkerContext {
            limit: 3000,
            memory: memory.clone(),
            ..WorkerContext::for_a_test("")
        });
        let mut open = Vec::new();
        // A slot has 16 KiB of the memory, and the application may use all slots.
        for (mebibytes, slots) in [(32, 2048), (64, 3000), (16, 1024)] {
            memory.set(mebibytes << 20);
            worker.follow_memory_limit();
            let admit = || worker.admit(Direction::Outbound, [127, 0, 0, 1].into());
            open.extend((0..4000).map(|_| admit()));
            assert_eq!(worker.admission.used(&[]), slots, "{mebibytes} MiB");
        }
        // One new connection is enough.
        memory.set(32 << 20);
        worker.follow_memory_limit();
        open.extend((0..4000).map(|_| worker.admit(Direction::Outbound, [127, 0, 0, 1].into())));
        memory.set(16 << 20);
        worker.follow_memory_limit();
        open.push(worker.admit(Direction::Outbound, [127, 0, 0, 1].into()));
        assert_eq!(worker.admission.used(&[]), 1024);
    }

    #[tokio::test]
    async fn policy_of_the_controller_replaces_that_of_the_arguments() {
        let (controller, policy) = watch::channel(None);
        let context = WorkerContext {
            discovery: Discovery::with_policy(policy),
            ..WorkerContext::for_a_test(" --allow-connect")
        };
        let drain = context.drain.clone();
        let worker = Worker::new(context);
        let change = async {
            assert!(worker.policy().allow_connect && !worker.policy().strict);
            let strict = Policy {
                strict: true,
                ..Policy::default()
            };
            controller.send_replace(Some(Arc::new(strict.clone())));
            until(|| *worker.policy() == strict).await;
            // Also while the last connections end.
            let open = worker.admit(Direction::Inbound, [127, 0, 0, 1].into());
            let open = open.expect("a slot");
            drain.cancel();
            tokio::task::yield_now().await;
            controller.send_replace(Some(Arc::default()));
            until(|| !worker.policy().strict).await;
            drop(open);
        };
        soon(async { tokio::join!(worker.maintain_until_drained(), change) }).await;
    }
}
