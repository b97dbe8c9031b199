//! Access to a Kubernetes cluster through kubectl for the tests in `tests/tests/cluster/` and
//! `tests/tests/cluster_serial/`.
//!
//! The tests use the cluster of KUBECONFIG and run only under `make e2e` (E2E=1), which requires
//! the images on the cluster, and tests that take over a minute only under `make e2e-all`
//! (E2E_ALL=1). Otherwise they are skipped. Each test has its own namespace. Any kind
//! of cluster works.

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use workloads::{App, Responses};

pub mod check;
pub mod gateway_api;
pub mod load;
pub mod outage;
pub mod smi;
pub mod versions;
pub mod workloads;

/// Limit for each wait on the cluster, such as a rollout.
pub const CLUSTER_TIMEOUT: Duration = Duration::from_secs(180);
const POLL_INTERVAL: Duration = Duration::from_millis(300);
/// Directory of the mesh, for `kubectl apply -k`.
pub const MANIFESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../manifests");
/// Namespace of the mesh.
pub const MESH: &str = "service-mesh";

/// Runs a test in a new namespace on a cluster with the mesh. If the test fails, prints the state
/// of the namespace before its deletion.
pub fn in_namespace(name: &str, test: impl FnOnce(&Namespace) -> Result<()>) -> Result<()> {
    if !with_mesh()? {
        return Ok(());
    }
    let namespace = Namespace::create(name)?;
    let result = test(&namespace);
    if let Err(error) = &result {
        eprintln!("{name}: {error:#}\n{}", namespace.report());
    }
    result
}

/// Installs the mesh once. Returns false if E2E is not set.
pub fn with_mesh() -> Result<bool> {
    if std::env::var_os("E2E").is_none() {
        // The test harness captures the output of eprintln!, but not this.
        writeln!(
            std::io::stderr(),
            "skipped: requires a cluster; `make e2e` runs it on the cluster of KUBECONFIG"
        )?;
        return Ok(false);
    }
    static UP: Mutex<bool> = Mutex::new(false);
    let mut up = UP.lock().expect("no test panicked with the lock");
    if !*up {
        std::env::var_os("KUBECONFIG").context("KUBECONFIG is not set")?;
        kubectl(&["apply", "-k", MANIFESTS])?;
        wait_for_mesh()?;
        *up = true;
    }
    Ok(true)
}

/// Whether tests that take over a minute run: only under `make e2e-all` (E2E_ALL=1).
pub fn runs_long_tests() -> Result<bool> {
    let is_enabled = std::env::var_os("E2E_ALL").is_some();
    if !is_enabled {
        writeln!(
            std::io::stderr(),
            "skipped: takes over a minute; `make e2e-all` runs it"
        )?;
    }
    Ok(is_enabled)
}

/// Waits until all replicas of controller and injector are ready, and until the API server reaches
/// an injector: kube-proxy sets the rules of a Service after its pods are ready.
pub fn wait_for_mesh() -> Result<()> {
    rolled_out(MESH, "controller")?;
    rolled_out(MESH, "injector")?;
    wait_for("the API server reaches the injector", || {
        let run = ["run", "never", "--image=never", "--dry-run=server"];
        let inject = [
            "-n",
            "default",
            "--annotations=diy-service-mesh/inject=true",
        ];
        kubectl(&[&run[..], &inject].concat()).map(Some)
    })
    .map(drop)
}

/// Directory of the sample apps, for `kubectl apply -k`.
pub fn sample_apps() -> String {
    format!("{MANIFESTS}/sample-apps")
}

/// Waits until the rollout of a Deployment is complete.
pub fn rolled_out(namespace: &str, deployment: &str) -> Result<()> {
    let timeout = format!("--timeout={}s", CLUSTER_TIMEOUT.as_secs());
    kubectl(&[
        "rollout",
        "status",
        "-n",
        namespace,
        &format!("deployment/{deployment}"),
        &timeout,
    ])
    .map(drop)
}

/// Names of an app's pods that are not terminating.
pub fn pods(namespace: &str, app: &str) -> Result<Vec<String>> {
    let template = r#"{{range .items}}{{if not .metadata.deletionTimestamp}}{{.metadata.name}}{{"\n"}}{{end}}{{end}}"#;
    let names = kubectl(&[
        "get",
        "pods",
        "-n",
        namespace,
        "-l",
        &format!("app={app}"),
        "-o",
        &format!("go-template={template}"),
    ])?;
    Ok(names.lines().map(str::to_owned).collect())
}

/// Runs kubectl and returns its output. The error contains standard error.
pub fn kubectl(arguments: &[&str]) -> Result<String> {
    kubectl_with_input(arguments, "")
}

/// Polls until `poll` returns a value. Fails after [`CLUSTER_TIMEOUT`] with the last error.
pub fn wait_for<T>(what: &str, mut poll: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + CLUSTER_TIMEOUT;
    loop {
        let result = poll();
        if let Ok(Some(value)) = result {
            return Ok(value);
        }
        if Instant::now() > deadline {
            return match result {
                Err(error) => Err(error.context(format!(
                    "{what}: not within {} s",
                    CLUSTER_TIMEOUT.as_secs()
                ))),
                Ok(_) => bail!("{what}: not within {} s", CLUSTER_TIMEOUT.as_secs()),
            };
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Namespace of one test, deleted on drop.
pub struct Namespace {
    /// Name in the cluster.
    pub name: String,
}

impl Namespace {
    fn create(name: &str) -> Result<Self> {
        let name = format!("e2e-{name}-{}", std::process::id());
        kubectl(&["create", "namespace", &name])?;
        Ok(Self { name })
    }

    /// Runs kubectl in this namespace.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        kubectl(&[&["-n", &self.name], arguments].concat())
    }

    /// Applies manifests.
    pub fn apply(&self, yaml: &str) -> Result<()> {
        kubectl_with_input(&["-n", &self.name, "apply", "-f", "-"], yaml).map(drop)
    }

    /// Waits for the rollout of a Deployment in this namespace.
    pub fn rolled_out(&self, deployment: &str) -> Result<()> {
        rolled_out(&self.name, deployment)
    }

    /// Replaces the pods of a Deployment, and waits until the previous ones are gone.
    pub fn restart(&self, deployment: &str) -> Result<()> {
        let previous = self.pods(deployment)?;
        self.kubectl(&["rollout", "restart", &format!("deployment/{deployment}")])?;
        self.rolled_out(deployment)?;
        for pod in previous {
            let pod = format!("pod/{pod}");
            self.kubectl(&["wait", &pod, "--for=delete", "--timeout=180s"])?;
        }
        Ok(())
    }

    /// Logs of a container in all pods of an app, in no particular order.
    pub fn logs(&self, app: &str, container: &str) -> Result<String> {
        self.kubectl(&[
            "logs",
            "-l",
            &format!("app={app}"),
            "-c",
            container,
            "--tail=-1",
            "--max-log-requests=50",
        ])
    }

    /// Responses that the pods of a client have logged.
    pub fn responses(&self, client: &App<'_>) -> Result<Responses> {
        Ok(Responses::count(&self.logs(client.name, client.program)?))
    }

    /// Starts server and client and waits for responses. The first requests may fail, until
    /// kube-proxy and the controller know the endpoint. Returns the number of these failures; later
    /// failures are errors.
    pub fn wait_for_responses(&self, server: &App<'_>, client: &App<'_>) -> Result<usize> {
        self.apply(&server.service())?;
        self.apply(&server.deployment())?;
        self.rolled_out(server.name)?;
        self.apply(&client.deployment())?;
        self.rolled_out(client.name)?;
        let minimum = 3 * client.replicas as usize;
        let first = wait_for("first responses", || {
            Ok(Some(self.responses(client)?).filter(|responses| responses.good >= minimum))
        })?;
        self.wait_for_more_responses(client, first.bad.len())?;
        Ok(first.bad.len())
    }

    /// Waits for three more responses per client. Fails if there are other failures than the
    /// initial ones.
    pub fn wait_for_more_responses(&self, client: &App<'_>, initial_failures: usize) -> Result<()> {
        let minimum = self.responses(client)?.good + 3 * client.replicas as usize;
        let responses = wait_for("more responses", || {
            let responses = self.responses(client)?;
            Ok(
                (responses.good >= minimum || responses.bad.len() != initial_failures)
                    .then_some(responses),
            )
        })?;
        responses.expect_failures(initial_failures)
    }

    /// Names of an app's pods that are not terminating.
    pub fn pods(&self, app: &str) -> Result<Vec<String>> {
        pods(&self.name, app)
    }

    /// Value of a metric of a pod's proxy, such as `connections_total{direction="outbound"}`.
    pub fn metric(&self, pod: &str, sample: &str) -> Result<u64> {
        let page = kubectl(&[
            "get",
            "--raw",
            &format!(
                "/api/v1/namespaces/{}/pods/{pod}:4001/proxy/metrics",
                self.name
            ),
        ])?;
        let sample = format!("diy_mesh_proxy_{sample} ");
        let value = page
            .lines()
            .find_map(|line| line.strip_prefix(&sample))
            .with_context(|| format!("no {sample}in:\n{page}"))?;
        value.parse().with_context(|| format!("{sample}{value}"))
    }

    fn report(&self) -> String {
        let commands: [&[&str]; 3] = [
            &["get", "pods", "-o", "wide"],
            &["get", "events", "--sort-by=.lastTimestamp"],
            &[
                "logs",
                "-l",
                "app",
                "--all-containers",
                "--prefix",
                "--tail=25",
                "--max-log-requests=100",
            ],
        ];
        let part = |command: &&[&str]| {
            format!(
                "--- kubectl {}\n{}",
                command.join(" "),
                self.kubectl(command)
                    .unwrap_or_else(|error| format!("{error:#}"))
            )
        };
        commands.iter().map(part).collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Err(error) = kubectl(&["delete", "namespace", &self.name, "--wait=false"]) {
            eprintln!("cannot delete namespace {}: {error:#}", self.name);
        }
    }
}

/// Runs kubectl with this standard input and returns its output.
pub fn kubectl_with_input(arguments: &[&str], input: &str) -> Result<String> {
    let mut command = Command::new("kubectl");
    command
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().context("cannot start kubectl")?;
    child
        .stdin
        .take()
        .expect("piped above")
        .write_all(input.as_bytes())
        .context("cannot write to kubectl")?;
    let output = child
        .wait_with_output()
        .context("cannot read the output of kubectl")?;
    if !output.status.success() {
        bail!(
            "kubectl {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    String::from_utf8(output.stdout).context("the output of kubectl is not UTF-8")
}
