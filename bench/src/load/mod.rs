//! Load generator: one thread in the client's namespace. Verifies that every response has status
//! 200 and a complete body; any other response aborts the measurement.

mod http1;
mod http2;
mod latency;
mod tcp;

use std::{
    cell::Cell,
    convert::Infallible,
    net::SocketAddr,
    rc::Rc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use tokio::{
    runtime,
    task::{JoinSet, LocalSet},
    time::sleep,
};

pub use self::{
    latency::{Rate, constant_rate, percentile},
    tcp::stream_bytes,
};
use crate::cases::{Protocol, Traffic};

/// Time window of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Load before the measurement.
    pub warm_up: Duration,
    /// Measured load.
    pub length: Duration,
}

/// Counts of one window.
pub struct Tally<T> {
    /// Requests, connections or bytes.
    pub count: u64,
    /// Actual length of the window.
    pub elapsed: Duration,
    /// Result of the probe before the window.
    pub before: T,
    /// Result of the probe after the window.
    pub after: T,
}

/// Shared counter of all connections, which run on one thread.
type Counter = Rc<Cell<u64>>;

/// Measures the throughput of requests over persistent connections.
pub fn closed_loop<T>(
    traffic: Traffic,
    target: SocketAddr,
    window: Window,
    probe: impl Fn() -> Result<T>,
) -> Result<Tally<T>> {
    run(
        target,
        window,
        probe,
        traffic.connections,
        |target, counter| async move {
            match traffic.protocol {
                Protocol::Http1 => http1::requests(target, counter).await,
                Protocol::Http2 => {
                    http2::requests(target, counter, traffic.streams, http2::Request::Get).await
                }
                Protocol::Grpc => {
                    http2::requests(target, counter, traffic.streams, http2::Request::Call).await
                }
            }
        },
    )
}

/// Measures the throughput of new connections with one request each.
pub fn new_connections<T>(
    workers: usize,
    target: SocketAddr,
    window: Window,
    probe: impl Fn() -> Result<T>,
) -> Result<Tally<T>> {
    run(target, window, probe, workers, http1::connections)
}

/// Opens connections, sends one request on each, and calls `probe` while all are idle.
pub fn idle_connections<T>(
    number: usize,
    target: SocketAddr,
    protocol: Protocol,
    settle: Duration,
    probe: impl FnOnce() -> Result<T>,
) -> Result<T> {
    runtime()?.block_on(async {
        let (mut http1, mut http2) = (Vec::new(), Vec::new());
        for position in 0..number {
            let opened = async {
                match protocol {
                    Protocol::Http1 => {
                        let mut connection = http1::Connection::open(target).await?;
                        connection.request().await?;
                        http1.push(connection);
                    }
                    Protocol::Http2 | Protocol::Grpc => {
                        http2.push(http2::Connection::after_one_request(target).await?);
                    }
                }
                anyhow::Ok(())
            };
            opened
                .await
                .with_context(|| format!("connection {} of {number}", position + 1))?;
        }
        sleep(settle).await;
        probe()
    })
}

/// Sends one request on a new connection.
pub fn one_request(target: SocketAddr) -> Result<()> {
    idle_connections(1, target, Protocol::Http1, Duration::ZERO, || Ok(()))
}

pub(crate) fn runtime() -> Result<runtime::Runtime> {
    runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the load generator's runtime")
}

/// Runs `number` instances of `work`, which returns only on failure, and counts within the window.
pub(crate) fn run<T, F>(
    target: SocketAddr,
    window: Window,
    probe: impl Fn() -> Result<T>,
    number: usize,
    work: impl Fn(SocketAddr, Counter) -> F,
) -> Result<Tally<T>>
where
    F: Future<Output = Result<Infallible>> + 'static,
{
    let counter = Counter::default();
    let counted = counter.clone();
    let local = LocalSet::new();
    let work = local.run_until(async move {
        let mut tasks = JoinSet::new();
        for _ in 0..number {
            tasks.spawn_local(work(target, counter.clone()));
        }
        tokio::select! {
            Some(ended) = tasks.join_next() => Err(match ended {
                Ok(Err(error)) => error,
                Err(error) => anyhow!(error),
            }),
            tally = observe(window, &counted, probe) => tally,
        }
    });
    runtime()?.block_on(work)
}

async fn observe<T>(
    window: Window,
    counter: &Cell<u64>,
    probe: impl Fn() -> Result<T>,
) -> Result<Tally<T>> {
    sleep(window.warm_up).await;
    let (before, start, first) = (probe()?, Instant::now(), counter.get());
    sleep(window.length).await;
    let (after, elapsed, count) = (probe()?, start.elapsed(), counter.get() - first);
    ensure!(
        count > 0,
        "no response within {:.1} s",
        elapsed.as_secs_f64()
    );
    Ok(Tally {
        count,
        elapsed,
        before,
        after,
    })
}
