//! Continuous requests of an app's pods: their logs from the first line to the last, also of pods
//! that are created and deleted meanwhile.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::workloads::{App, Responses};
use super::{Namespace, pods, wait_for};

/// Time within which a new pod is found, and a lost connection to the API server is renewed.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The responses of a client, by pod.
type ByPod = BTreeMap<String, Responses>;

/// Follows the logs of a client until drop.
pub struct Load<'a> {
    namespace: &'a Namespace,
    client: App<'a>,
    responses: Arc<Mutex<ByPod>>,
    stop: Arc<AtomicBool>,
    follower: Option<JoinHandle<()>>,
}

impl<'a> Load<'a> {
    /// Starts a client and waits for responses to each of its pods. Earlier failures do not count:
    /// the first requests may fail, until kube-proxy and the controller know the endpoint.
    pub fn start(namespace: &'a Namespace, client: App<'a>) -> Result<Self> {
        namespace.apply(&client.deployment())?;
        let (responses, stop) = (Arc::default(), Arc::new(AtomicBool::new(false)));
        let follower = Follower {
            namespace: namespace.name.clone(),
            app: client.name.to_owned(),
            container: client.program.to_owned(),
            responses: Arc::clone(&responses),
        };
        let ended = Arc::clone(&stop);
        let load = Self {
            namespace,
            client,
            responses,
            stop,
            follower: Some(thread::spawn(move || follower.run(&ended))),
        };
        namespace.rolled_out(client.name)?;
        load.wait_for_responses()?;
        load.take_failures();
        Ok(load)
    }

    /// Waits until each pod has five more responses.
    pub fn wait_for_responses(&self) -> Result<()> {
        let good = |pod: &String| lock(&self.responses).get(pod).map_or(0, |all| all.good);
        let pods = self.namespace.pods(self.client.name)?;
        let before: Vec<usize> = pods.iter().map(good).collect();
        wait_for(&format!("responses to {}", self.client.name), || {
            let mut pods = pods.iter().zip(&before);
            let silent = pods.find(|(pod, before)| good(pod) < **before + 5);
            match silent {
                None => Ok(Some(())),
                Some((pod, _)) => Err(anyhow::anyhow!(
                    "{pod} waits, failures: {:#?}",
                    self.failures()
                )),
            }
        })
    }

    /// The number of successful requests.
    pub fn good(&self) -> usize {
        lock(&self.responses).values().map(|all| all.good).sum()
    }

    /// The failures since the last call of [`Self::take_failures`].
    pub fn failures(&self) -> Vec<String> {
        let responses = lock(&self.responses);
        let bad = responses.iter().flat_map(|(pod, responses)| {
            let bad = responses.bad.iter();
            bad.map(move |failure| format!("{pod}: {failure}"))
        });
        bad.collect()
    }

    /// The failures, which no longer count.
    pub fn take_failures(&self) -> Vec<String> {
        let failures = self.failures();
        lock(&self.responses)
            .values_mut()
            .for_each(|responses| responses.bad.clear());
        failures
    }

    /// Waits for more responses. Fails if a request has failed.
    pub fn expect_no_failure(&self) -> Result<()> {
        self.wait_for_responses()?;
        let (good, failures) = (self.good(), self.failures());
        ensure!(
            failures.is_empty(),
            "{}: {good} successful requests, {} failed: {failures:#?}",
            self.client.name,
            failures.len()
        );
        Ok(())
    }
}

impl Drop for Load<'_> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(follower) = self.follower.take() {
            follower.join().ok();
        }
    }
}

/// Reads the logs of all pods of an app.
struct Follower {
    namespace: String,
    app: String,
    container: String,
    responses: Arc<Mutex<ByPod>>,
}

/// `kubectl logs -f` of a pod.
struct Reader {
    kubectl: Child,
    /// Returns the number of lines.
    thread: JoinHandle<usize>,
}

impl Follower {
    fn run(self, stop: &AtomicBool) {
        let mut readers: BTreeMap<String, Reader> = BTreeMap::new();
        // The numbers of lines that earlier readers of a pod have read.
        let mut read: BTreeMap<String, usize> = BTreeMap::new();
        while !stop.load(Ordering::Relaxed) {
            for pod in pods(&self.namespace, &self.app).unwrap_or_default() {
                let has_ended =
                    |reader: &mut Reader| !matches!(reader.kubectl.try_wait(), Ok(None));
                if readers.get_mut(&pod).is_some_and(has_ended) {
                    let lines = readers.remove(&pod).map(|ended| ended.thread.join());
                    read.insert(pod.clone(), lines.and_then(Result::ok).unwrap_or_default());
                }
                let skipped = read.get(&pod).copied().unwrap_or_default();
                if let Entry::Vacant(entry) = readers.entry(pod) {
                    match self.read(entry.key(), skipped) {
                        Ok(reader) => _ = entry.insert(reader),
                        Err(error) => eprintln!("{error:#}"),
                    }
                }
            }
            thread::sleep(POLL_INTERVAL);
        }
        for reader in readers.values_mut() {
            reader.kubectl.kill().ok();
            reader.kubectl.wait().ok();
        }
    }

    /// Counts the responses in the log of a pod after the first lines.
    fn read(&self, pod: &str, skipped: usize) -> Result<Reader> {
        let mut kubectl = Command::new("kubectl")
            .args(["logs", "-f", "-n", &self.namespace, pod, "-c"])
            .arg(&self.container)
            .stdout(Stdio::piped())
            // The container may not run yet.
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start kubectl")?;
        let output = BufReader::new(kubectl.stdout.take().context("piped above")?);
        let (pod, responses) = (pod.to_owned(), Arc::clone(&self.responses));
        let thread = thread::spawn(move || {
            let mut lines = 0;
            for line in output.lines().map_while(Result::ok) {
                lines += 1;
                if lines > skipped {
                    lock(&responses).entry(pod.clone()).or_default().add(&line);
                }
            }
            lines.max(skipped)
        });
        Ok(Reader { kubectl, thread })
    }
}

fn lock(responses: &Mutex<ByPod>) -> MutexGuard<'_, ByPod> {
    responses.lock().unwrap_or_else(PoisonError::into_inner)
}
