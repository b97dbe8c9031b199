//! A Kubernetes cluster for the tests in tests/cluster_*.rs, spoken to by kubectl as a person would.
//!
//! It is the cluster that KUBECONFIG names, and only under `make e2e` (E2E=1), the images being there: elsewhere these tests say that they
//! are skipped. Every test gets a namespace of its own; nothing here knows which kind of cluster it is.

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use workloads::{Answers, App};

pub mod workloads;

/// How long anything may take that a cluster does by itself: pods on two busy cores are slow.
pub const SOON: Duration = Duration::from_secs(180);
const LOOK_AGAIN: Duration = Duration::from_millis(300);
const MANIFESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../manifests");
/// The namespace of the mesh itself.
pub const MESH: &str = "service-mesh";

/// Runs a test in a new namespace, on a cluster with the mesh. When the test fails, what the namespace looks like is printed before it goes.
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

/// Brings up the mesh, once; false where no cluster was asked for.
pub fn with_mesh() -> Result<bool> {
    if std::env::var_os("E2E").is_none() {
        // Not by eprintln!, which nobody hears of in a test that passes.
        writeln!(
            std::io::stderr(),
            "skipped: needs a cluster; make e2e runs it on the one that KUBECONFIG names"
        )?;
        return Ok(false);
    }
    static UP: Mutex<bool> = Mutex::new(false);
    let mut up = UP.lock().expect("a test that fails here fails all");
    if !*up {
        std::env::var_os("KUBECONFIG").context("KUBECONFIG names no cluster")?;
        kubectl(&["apply", "-k", MANIFESTS])?;
        wait_for_mesh()?;
        *up = true;
    }
    Ok(true)
}

/// Waits for both parts of the mesh to have all their replicas ready.
pub fn wait_for_mesh() -> Result<()> {
    rolled_out(MESH, "controller")?;
    rolled_out(MESH, "injector")
}

/// The folder of the tutorial's apps, for `kubectl apply -k`.
pub fn sample_apps() -> String {
    format!("{MANIFESTS}/sample-apps")
}

/// Waits for a Deployment to have all its replicas, of its newest version, ready.
pub fn rolled_out(namespace: &str, deployment: &str) -> Result<()> {
    let timeout = format!("--timeout={}s", SOON.as_secs());
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

/// Runs kubectl and gives what it prints; its complaint is the error.
pub fn kubectl(arguments: &[&str]) -> Result<String> {
    kubectl_with_input(arguments, "")
}

/// Looks until there is something to see, with a deadline.
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + SOON;
    loop {
        let seen = look();
        if let Ok(Some(seen)) = seen {
            return Ok(seen);
        }
        if Instant::now() > deadline {
            return match seen {
                Err(error) => {
                    Err(error.context(format!("{what}: not within {} s", SOON.as_secs())))
                }
                Ok(_) => bail!("{what}: not within {} s", SOON.as_secs()),
            };
        }
        thread::sleep(LOOK_AGAIN);
    }
}

/// A namespace of one test; it goes with everything in it.
pub struct Namespace {
    /// Its name in the cluster.
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

    /// Creates or changes what the YAML says.
    pub fn apply(&self, yaml: &str) -> Result<()> {
        kubectl_with_input(&["-n", &self.name, "apply", "-f", "-"], yaml).map(drop)
    }

    /// Waits for a Deployment of this namespace.
    pub fn rolled_out(&self, deployment: &str) -> Result<()> {
        rolled_out(&self.name, deployment)
    }

    /// All that a container has printed, in all pods of an app, in no order.
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

    /// What the clients of an app have been answered.
    pub fn answers(&self, client: &App<'_>) -> Result<Answers> {
        Ok(Answers::count(&self.logs(client.name, client.program)?))
    }

    /// Starts both and waits for good answers. Until kube-proxy and the controller have heard that the server is ready, a call
    /// may be refused, as in any cluster; once answers have come, no call may fail. Gives how many were refused before.
    pub fn answers_come(&self, server: &App<'_>, client: &App<'_>) -> Result<usize> {
        self.apply(&server.service())?;
        self.apply(&server.deployment())?;
        self.rolled_out(server.name)?;
        self.apply(&client.deployment())?;
        self.rolled_out(client.name)?;
        let each = 3 * client.replicas as usize;
        let first = wait_for("first answers", || {
            Ok(Some(self.answers(client)?).filter(|answers| answers.good >= each))
        })?;
        self.more_answers(client, first.bad.len())?;
        Ok(first.bad.len())
    }

    /// Waits until each client has had three more answers; a bad one, beyond those of before the first answers, is an error.
    pub fn more_answers(&self, client: &App<'_>, refused_at_first: usize) -> Result<()> {
        let enough = self.answers(client)?.good + 3 * client.replicas as usize;
        let answers = wait_for("more answers", || {
            let answers = self.answers(client)?;
            Ok(
                (answers.good >= enough || answers.bad.len() != refused_at_first)
                    .then_some(answers),
            )
        })?;
        ensure!(
            answers.bad.len() == refused_at_first,
            "of {} answers these are not good: {:#?}",
            answers.good,
            answers.bad
        );
        Ok(())
    }

    /// The names of an app's pods that are not on their way out.
    pub fn pods(&self, app: &str) -> Result<Vec<String>> {
        let template = r#"{{range .items}}{{if not .metadata.deletionTimestamp}}{{.metadata.name}}{{"\n"}}{{end}}{{end}}"#;
        let names = self.kubectl(&[
            "get",
            "pods",
            "-l",
            &format!("app={app}"),
            "-o",
            &format!("go-template={template}"),
        ])?;
        Ok(names.lines().map(str::to_owned).collect())
    }

    /// One number out of what a pod's proxy tells Prometheus, for example `connections_total{direction="outbound"}`.
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
            eprintln!("the namespace {} is still there: {error:#}", self.name);
        }
    }
}

fn kubectl_with_input(arguments: &[&str], input: &str) -> Result<String> {
    let mut command = Command::new("kubectl");
    command
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().context("kubectl is missing")?;
    child
        .stdin
        .take()
        .expect("piped above")
        .write_all(input.as_bytes())
        .context("cannot write to kubectl")?;
    let output = child
        .wait_with_output()
        .context("cannot read what kubectl prints")?;
    if !output.status.success() {
        bail!(
            "kubectl {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    String::from_utf8(output.stdout).context("kubectl prints something that is not text")
}
