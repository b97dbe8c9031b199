//! Waits for conditions, each of which fails the test if it takes too long.

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// Limit for each wait. Only what hangs reaches it, also on a machine with a tenth of the usual speed.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(300);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Runs a test on one thread with a local set, as a worker of the proxy runs.
pub fn on_worker(test: impl Future<Output = ()>) {
    on_worker_within(TEST_TIMEOUT, test);
}

/// Like [`on_worker`], with another timeout.
pub fn on_worker_within(timeout: Duration, test: impl Future<Output = ()>) {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, within(timeout, test));
}

/// The output of a future that completes before [`TEST_TIMEOUT`].
pub async fn soon<T>(future: impl Future<Output = T>) -> T {
    within(TEST_TIMEOUT, future).await
}

async fn within<T>(timeout: Duration, future: impl Future<Output = T>) -> T {
    let completed = tokio::time::timeout(timeout, future).await;
    completed.unwrap_or_else(|_| panic!("timed out after {timeout:?}"))
}

/// Lets the other tasks of the runtime run until a condition holds. The caller has a timeout.
pub async fn until(mut condition: impl FnMut() -> bool) {
    while !condition() {
        tokio::task::yield_now().await;
    }
}

/// Polls until the result is a value. Fails with the last error.
pub async fn eventually<T, E: Debug>(what: &str, mut poll: impl AsyncFnMut() -> Result<T, E>) -> T {
    let deadline = Instant::now() + TEST_TIMEOUT;
    loop {
        match poll().await {
            Ok(value) => return value,
            Err(error) => assert!(Instant::now() < deadline, "timeout: {what}: {error:#?}"),
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Like [`eventually`], in a test without a runtime.
pub fn eventually_blocking<T, E: Debug>(what: &str, mut poll: impl FnMut() -> Result<T, E>) -> T {
    let deadline = Instant::now() + TEST_TIMEOUT;
    loop {
        match poll() {
            Ok(value) => return value,
            Err(error) => assert!(Instant::now() < deadline, "timeout: {what}: {error:#?}"),
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}
