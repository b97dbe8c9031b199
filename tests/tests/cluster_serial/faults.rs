//! Faults of the mesh and of its users under continuous load, one after another. Requests fail only
//! where the documentation says so, `mesh check` names the cause within 30 s, and after the repair
//! it finds no problem.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::check::{check, level};
use diy_mesh_tests::cluster::load::Load;
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{
    MESH, Namespace, in_namespace, kubectl, rolled_out, runs_long_tests, wait_for, wait_for_mesh,
};

/// Time from a fault until `mesh check` names it.
const CHECK_TIMEOUT: Duration = Duration::from_secs(30);
const OUTAGE: Duration = Duration::from_secs(120);
const ROOTS: &str = "configmap/diy-service-mesh-roots";
const CA: &str = "secret/diy-service-mesh-ca";

#[test]
fn faults_under_load_are_named_and_fail_no_other_request() -> Result<()> {
    if !runs_long_tests()? {
        return Ok(());
    }
    in_namespace("faults", |namespace| {
        in_namespace("tenant", |tenant| {
            let drill = Drill::start(namespace, tenant)?;
            drill.rollouts()?;
            drill.replica_restarts_while_endpoints_change()?;
            drill.app_selector_matches_nothing()?;
            drill.controller_selector_matches_nothing()?;
            let garbage = drill.roots_of_a_namespace_are_replaced()?;
            drill.controller_is_away()?;
            drill.roots_of_the_namespace_are_repaired(garbage)?;
            drill.ca_secret_is_emptied()?;
            drill.ca_is_lost()
        })
    })
}

/// Clients under load in two namespaces.
struct Drill<'a> {
    namespace: &'a Namespace,
    tenant: &'a Namespace,
    /// HTTP and gRPC clients, and a client in the namespace of the tenant.
    loads: [Load<'a>; 3],
    start: Instant,
}

const HTTP_SERVER: App<'static> = App {
    replicas: 2,
    ..server("server", "http-server")
};
const GRPC_SERVER: App<'static> = App {
    replicas: 2,
    ..server("grpc-server", "grpc-server")
};

const fn server(name: &'static str, program: &'static str) -> App<'static> {
    App {
        name,
        program,
        inject: Some("true"),
        replicas: 1,
        endpoint: "",
        interval_ms: "",
    }
}

const HTTP_CLIENT: App<'static> = App {
    replicas: 3,
    endpoint: "http://server/hello",
    interval_ms: "100",
    ..server("client", "http-client")
};
const GRPC_CLIENT: App<'static> = App {
    endpoint: "http://grpc-server:80",
    interval_ms: "100",
    ..server("grpc-client", "grpc-client")
};

impl<'a> Drill<'a> {
    fn start(namespace: &'a Namespace, tenant: &'a Namespace) -> Result<Self> {
        let start = Instant::now();
        let servers = [
            (namespace, HTTP_SERVER),
            (namespace, GRPC_SERVER),
            (tenant, HTTP_SERVER),
        ];
        for (namespace, server) in servers {
            namespace.apply(&server.service())?;
            namespace.apply(&server.deployment())?;
        }
        for (namespace, server) in servers {
            namespace.rolled_out(server.name)?;
        }
        let drill = Self {
            namespace,
            tenant,
            loads: [
                Load::start(namespace, HTTP_CLIENT)?,
                Load::start(namespace, GRPC_CLIENT)?,
                Load::start(
                    tenant,
                    App {
                        replicas: 1,
                        ..HTTP_CLIENT
                    },
                )?,
            ],
            start,
        };
        drill.healthy("the mesh is installed")?;
        Ok(drill)
    }

    /// Prints a line of progress.
    fn say(&self, text: &str) {
        let good: usize = self.loads.iter().map(Load::good).sum();
        let seconds = self.start.elapsed().as_secs();
        eprintln!("faults: {seconds:4} s, {good:5} requests: {text}");
    }

    fn expect_no_failure(&self, fault: &str) -> Result<()> {
        for load in &self.loads {
            load.expect_no_failure().with_context(|| fault.to_owned())?;
        }
        Ok(())
    }

    /// Waits until `mesh check` finds no problem.
    fn healthy(&self, what: &str) -> Result<()> {
        wait_for(&format!("no problem after {what}"), || {
            let report = check()?;
            // A proxy that is not connected results in a warning.
            if report["ok"] == true && level(&report, "certificates") == "ok" {
                Ok(Some(()))
            } else {
                Err(anyhow::anyhow!("{report:#}"))
            }
        })?;
        self.say(&format!("{what}, no problems found"));
        Ok(())
    }

    /// Waits until a problem of `mesh check` contains all of these texts. `before` runs before each
    /// attempt.
    fn named(&self, name: &str, texts: &[&str], before: impl Fn() -> Result<()>) -> Result<()> {
        let begin = Instant::now();
        loop {
            before()?;
            let report = check()?;
            let findings = report["checks"].as_array().context("a list")?;
            let finding = findings.iter().find(|finding| {
                let text = finding.to_string();
                finding["check"] == name
                    && finding["level"] == "problem"
                    && texts.iter().all(|part| text.contains(part))
            });
            if let Some(finding) = finding {
                self.say(&format!(
                    "named after {:.1} s: {name}: {}, {}",
                    begin.elapsed().as_secs_f32(),
                    finding["text"],
                    finding["details"]
                ));
                return Ok(());
            }
            ensure!(
                begin.elapsed() < CHECK_TIMEOUT,
                "{name} does not contain {texts:?} within {CHECK_TIMEOUT:?}: {report:#}"
            );
        }
    }

    /// Rollouts of the mesh, of the servers, and of everything at once.
    fn rollouts(&self) -> Result<()> {
        let of_mesh = ["controller", "injector"].map(|name| (MESH, name));
        let name = self.namespace.name.as_str();
        let servers = [HTTP_SERVER, GRPC_SERVER].map(|app| (name, app.name));
        let clients = [HTTP_CLIENT, GRPC_CLIENT].map(|app| (name, app.name));
        let all = [of_mesh, servers, clients].concat();
        for (what, deployments) in [
            ("controller and injector", &of_mesh[..]),
            ("servers", &servers),
            ("all", &all),
        ] {
            for (namespace, deployment) in deployments {
                let deployment = format!("deployment/{deployment}");
                kubectl(&["rollout", "restart", "-n", namespace, &deployment])?;
            }
            for (namespace, deployment) in deployments {
                rolled_out(namespace, deployment)?;
            }
            self.expect_no_failure(&format!("rollout of {what}"))?;
            self.say(&format!("rollout of {what}"));
        }
        self.healthy("rollouts of all Deployments")
    }

    /// While servers are added and removed, one of two controllers is killed. Its proxies continue
    /// with the other one, whose states are as new: no proxy has to accept an older one.
    fn replica_restarts_while_endpoints_change(&self) -> Result<()> {
        for replicas in ["4", "2", "4", "2"] {
            let replicas = format!("--replicas={replicas}");
            self.namespace
                .kubectl(&["scale", "deployment/server", &replicas])?;
            let controller = &diy_mesh_tests::cluster::pods(MESH, "controller")?[0];
            // Without --force, after which a kubelet of Kubernetes 1.34 can panic.
            kubectl(&["delete", "pod", "-n", MESH, "--grace-period=1", controller])?;
            self.namespace.rolled_out(HTTP_SERVER.name)?;
            rolled_out(MESH, "controller")?;
        }
        self.expect_no_failure("a controller restarted while endpoints changed")?;
        for pod in self.namespace.pods(HTTP_CLIENT.name)? {
            let older = |result: &str| {
                let sample = format!("discovery_older_states_total{{result=\"{result}\"}}");
                self.namespace.metric(&pod, &sample)
            };
            let (refused, accepted) = (older("refused")?, older("accepted")?);
            self.say(&format!(
                "{pod}: {refused} older states refused, {accepted} accepted"
            ));
            ensure!(accepted == 0, "{pod} has accepted {accepted} older states");
        }
        self.healthy("restarts of controllers while endpoints changed")
    }

    /// Requests fail with the documented error, those to other Services do not.
    fn app_selector_matches_nothing(&self) -> Result<()> {
        let [broken, others @ ..] = &self.loads;
        let name = format!("{}/server", self.namespace.name);
        let repair = break_selector(&self.namespace.name, "server")?;
        self.named(
            "services",
            &[&name, "selects no pod", "no-endpoint"],
            || Ok(()),
        )?;
        wait_for("requests fail", || {
            Ok((!broken.failures().is_empty()).then_some(()))
        })?;
        repair.now()?;
        let failed = recovered(broken, "X-Mesh-Error: no-endpoint")?;
        for load in others {
            load.expect_no_failure()?;
        }
        self.healthy(&format!("{failed} requests without an endpoint"))
    }

    fn controller_selector_matches_nothing(&self) -> Result<()> {
        let repair = break_selector(MESH, "controller")?;
        let texts = ["service-mesh/controller", "does not select the pods"];
        self.named("services", &texts, || Ok(()))?;
        self.expect_no_failure("the Service of the controller without endpoints")?;
        repair.now()?;
        self.healthy("the Service of the controller is repaired")
    }

    /// A tenant replaces the roots of its namespace. The controller corrects them, unless they are
    /// immutable.
    fn roots_of_a_namespace_are_replaced(&self) -> Result<Repair> {
        let namespace = self.tenant.name.as_str();
        let account = format!("--serviceaccount={namespace}:default");
        self.tenant.kubectl(&[
            "create",
            "rolebinding",
            "admin",
            "--clusterrole=admin",
            &account,
        ])?;
        let tenant = format!("--as=system:serviceaccount:{namespace}:default");
        let replace = |patch: &str| {
            self.tenant
                .kubectl(&["patch", ROOTS, "--type=merge", "-p", patch, &tenant])
        };
        let roots = || {
            self.tenant
                .kubectl(&["get", ROOTS, "-o", "jsonpath={.data}"])
        };
        let before = roots()?;
        wait_for("the tenant has its rights", || {
            replace(r#"{"data": {"roots.pem": "garbage"}}"#).map(Some)
        })?;
        wait_for("the controller restores the roots", || {
            Ok((roots()? == before).then_some(()))
        })?;
        self.say("garbage in the roots of a namespace is replaced");
        let repair = Repair::new(&["delete", "-n", namespace, ROOTS]);
        replace(r#"{"immutable": true, "data": {"roots.pem": "garbage"}}"#)?;
        let texts = [namespace, "lacks a current root", "it is immutable"];
        self.named("roots", &texts, || Ok(()))?;
        self.expect_no_failure("garbage in the roots of a namespace")?;
        Ok(repair)
    }

    /// Until its last pod on a node ends, a kubelet keeps an immutable ConfigMap.
    fn roots_of_the_namespace_are_repaired(&self, garbage: Repair) -> Result<()> {
        garbage.now()?;
        let scale = |app: &App<'_>, replicas: u32| {
            let (deployment, replicas) = (
                format!("deployment/{}", app.name),
                format!("--replicas={replicas}"),
            );
            self.tenant.kubectl(&["scale", &deployment, &replicas])
        };
        for app in [HTTP_CLIENT, HTTP_SERVER] {
            scale(&app, 0)?;
            let label = format!("app={}", app.name);
            let gone = ["--for=delete", "--timeout=180s"];
            self.tenant
                .kubectl(&[&["wait", "pods", "-l", &label], &gone[..]].concat())?;
        }
        for app in [HTTP_SERVER, HTTP_CLIENT] {
            scale(&app, 1)?;
            self.tenant.rolled_out(app.name)?;
        }
        self.expect_no_failure("new pods of the namespace")?;
        self.healthy("the roots of the namespace are repaired")
    }

    /// Known traffic continues. A new pod starts when the controller is back.
    fn controller_is_away(&self) -> Result<()> {
        let begin = Instant::now();
        let repair = scale_controller_to_zero()?;
        self.named(
            "controller",
            &["service-mesh/controller is scaled to 0"],
            || Ok(()),
        )?;
        let late = server("late", "http-server");
        self.namespace.apply(&late.deployment())?;
        self.continue_until(begin + OUTAGE * 2 / 3)?;
        let name = format!("{}/late-", self.namespace.name);
        let texts = [&name, "not ready", "failed to connect to the controller"];
        self.named("proxies", &texts, || Ok(()))?;
        self.continue_until(begin + OUTAGE)?;
        repair.now()?;
        wait_for_mesh()?;
        self.namespace.rolled_out(late.name)?;
        self.expect_no_failure("the controller has returned")?;
        self.say("the controller has returned");
        Ok(())
    }

    /// Requests succeed until then.
    fn continue_until(&self, end: Instant) -> Result<()> {
        while Instant::now() < end {
            self.expect_no_failure("the controller is away")?;
        }
        Ok(())
    }

    /// Running controllers restore the Secret.
    fn ca_secret_is_emptied(&self) -> Result<()> {
        let before = secret()?;
        ensure!(!before.is_empty(), "the mesh has a CA");
        self.named("authority", &["contains no CA", "it is restored"], || {
            // It is restored after 5 s.
            (!secret()?.is_empty())
                .then(empty_secret)
                .transpose()
                .map(drop)
        })?;
        wait_for("the CA is restored", || {
            Ok((secret()? == before).then_some(()))
        })?;
        self.expect_no_failure("the Secret of the CA was emptied")?;
        self.healthy("the Secret of the CA is restored")
    }

    /// No controller has the CA any more. Proxies receive certificates of a new one.
    fn ca_is_lost(&self) -> Result<()> {
        let before = secret()?;
        let repair = scale_controller_to_zero()?;
        empty_secret()?;
        repair.now()?;
        let texts = ["contains no CA, but the mesh had one"];
        self.named("authority", &texts, || Ok(()))?;
        wait_for_mesh()?;
        ensure!(secret()? != before, "a CA that was lost cannot return");
        self.expect_no_failure("the CA was lost")?;
        // New clients and known servers have no common root yet.
        let [clients, others @ ..] = &self.loads;
        self.namespace
            .kubectl(&["rollout", "restart", "deployment/client"])?;
        self.namespace.rolled_out(HTTP_CLIENT.name)?;
        // Kubelets then update mounted roots at once, otherwise within two minutes.
        for namespace in [self.namespace, self.tenant] {
            namespace.kubectl(&["annotate", "pods", "--all", "drill=ca-lost"])?;
        }
        self.healthy("the CA was lost and a new one generated")?;
        let failed = recovered(clients, "X-Mesh-Error: handshake-failed")?;
        self.say(&format!("{failed} requests of new pods failed"));
        for load in others {
            load.expect_no_failure()?;
        }
        Ok(())
    }
}

/// Waits until no request fails. Fails if one has failed with an error other than `documented`.
/// Returns the number of failures.
fn recovered(load: &Load<'_>, documented: &str) -> Result<usize> {
    let mut failures = load.take_failures();
    wait_for("requests succeed again", || {
        load.wait_for_responses()?;
        let more = load.take_failures();
        let has_ended = more.is_empty();
        failures.extend(more);
        Ok(has_ended.then_some(()))
    })?;
    ensure!(
        failures.iter().all(|failure| failure.contains(documented)),
        "{failures:#?}"
    );
    Ok(failures.len())
}

/// The fields of the CA.
fn secret() -> Result<String> {
    kubectl(&["get", "-n", MESH, CA, "-o", "jsonpath={.data.tls\\.crt}"])
}

fn empty_secret() -> Result<()> {
    let patch = r#"[{"op": "replace", "path": "/data", "value": {"tls.crt": "", "tls.key": ""}}]"#;
    kubectl(&["patch", "-n", MESH, CA, "--type=json", "-p", patch]).map(drop)
}

pub fn scale_controller_to_zero() -> Result<Repair> {
    let repair = Repair::new(&["scale", "-n", MESH, "deployment/controller", "--replicas=2"]);
    kubectl(&["scale", "-n", MESH, "deployment/controller", "--replicas=0"])?;
    let label = ["-l", "app=controller", "--for=delete", "--timeout=180s"];
    kubectl(&[&["wait", "-n", MESH, "pods"], &label[..]].concat())?;
    Ok(repair)
}

/// Replaces the selector `app: NAME` of a Service.
fn break_selector(namespace: &str, service: &str) -> Result<Repair> {
    let patch = |app: &str| format!(r#"{{"spec": {{"selector": {{"app": "{app}"}}}}}}"#);
    let arguments = ["patch", "-n", namespace, "service", service, "-p"];
    let repair = Repair::new(&[&arguments[..], &[&patch(service)]].concat());
    kubectl(&[&arguments[..], &[&patch("nothing")]].concat())?;
    Ok(repair)
}

/// A kubectl command that ends a fault, at the latest on drop.
pub struct Repair(Vec<String>);

impl Repair {
    fn new(arguments: &[&str]) -> Self {
        Self(arguments.iter().map(|text| (*text).to_owned()).collect())
    }

    pub fn now(mut self) -> Result<()> {
        self.run()
    }

    fn run(&mut self) -> Result<()> {
        let arguments = std::mem::take(&mut self.0);
        if arguments.is_empty() {
            return Ok(());
        }
        kubectl(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).map(drop)
    }
}

impl Drop for Repair {
    fn drop(&mut self) {
        if let Err(error) = self.run() {
            eprintln!("cannot repair: {error:#}");
        }
    }
}
