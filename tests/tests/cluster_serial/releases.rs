//! Components of two releases together, as during an upgrade: each commit in
//! `tests/previous-releases`, and this one. Requires their images (`make previous-images
//! load-previous`).

use std::process::Command;

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{
    MESH, Namespace, in_namespace, kubectl, kubectl_with_input, rolled_out, runs_long_tests,
    wait_for, wait_for_mesh,
};
use serde_json::Value;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

#[test]
fn releases_work_together_without_failed_requests() -> Result<()> {
    if !runs_long_tests()? {
        return Ok(());
    }
    let commits = std::fs::read_to_string(format!("{ROOT}/tests/previous-releases"))?;
    for commit in commits.lines() {
        works_with(&Release { commit }).with_context(|| format!("with commit {commit}"))?;
    }
    Ok(())
}

fn works_with(previous: &Release<'_>) -> Result<()> {
    let tag = previous.tag();
    in_namespace(&format!("releases-{tag}"), |namespace| {
        let _restore = Restore;
        // Proxies and injector of the previous release, with the controller of this one.
        previous.install("injector")?;
        inject_proxies(tag)?;
        previous.install("webhook")?;
        let old = Pair::start(namespace, "old", "old-server")?;
        old.run_proxies(namespace, tag)?;
        kubectl(&["apply", "-k", &format!("{ROOT}/manifests")])?;
        wait_for_mesh()?;
        policy_names_proxies_that_do_not_enforce_it(namespace)?;
        // Proxies of this release call them, and are called by them.
        inject_proxies("dev")?;
        let new = Pair::start(namespace, "new", "old-server")?;
        new.run_proxies(namespace, "dev")?;
        let mixed = Pair::start(namespace, "mixed", "new-server")?;
        // The controller of the previous release, for running proxies and for new ones.
        previous.install("controller")?;
        replaced("controller")?;
        for pair in [&old, &new, &mixed] {
            pair.expect_responses(namespace)?;
        }
        let late = Pair::start(namespace, "late", "new-server")?;
        late.run_proxies(namespace, "dev")?;
        // The injector of the previous release creates pods with proxies of this one, which its
        // manifest names.
        previous.install("injector")?;
        replaced("injector")?;
        expect_no_pods_without_labels(namespace, previous)?;
        previous.install("webhook")?;
        let injected = Pair::start(namespace, "injected", "old-server")?;
        injected.run_proxies(namespace, "dev")?;
        // The controller of this release, with proxies of all kinds.
        kubectl(&["apply", "-k", &format!("{ROOT}/manifests")])?;
        wait_for_mesh()?;
        for pair in [&old, &new, &mixed, &late, &injected] {
            pair.expect_responses(namespace)?;
        }
        Ok(())
    })
}

/// Fails unless an AuthorizationPolicy says that the proxy of the server of the previous release
/// does not enforce it. Replicas know their own streams only, so there is one for this time.
fn policy_names_proxies_that_do_not_enforce_it(namespace: &Namespace) -> Result<()> {
    let scale = |replicas: &str| {
        kubectl(&[
            "scale",
            "-n",
            MESH,
            "deployment/controller",
            &format!("--replicas={replicas}"),
        ])?;
        rolled_out(MESH, "controller")
    };
    scale("1")?;
    namespace.apply(
        "
apiVersion: diy-service-mesh.dev/v1alpha1
kind: AuthorizationPolicy
metadata: {name: all}
spec:
  targetRefs: [{group: '', kind: Service, name: old-server}]
  action: ALLOW
  rules: [{}]
",
    )?;
    wait_for("the policy names the proxy", || {
        let json = namespace.kubectl(&["get", "authorizationpolicy", "all", "-o", "json"])?;
        let policy: Value = serde_json::from_str(&json)?;
        let conditions = policy["status"]["ancestors"][0]["conditions"].as_array();
        let mut reasons = conditions.into_iter().flatten();
        let found = reasons.find(|one| one["reason"] == "ProxyLacksCapability");
        let message = found.and_then(|one| one["message"].as_str());
        let message = message.with_context(|| format!("{:#}", policy["status"]))?;
        ensure!(message.contains("; not: old-server-"), "{message}");
        Ok(Some(()))
    })?;
    namespace.kubectl(&["delete", "authorizationpolicy", "all"])?;
    scale("2")
}

/// A server, and a client of another server.
struct Pair {
    server: String,
    client: String,
    /// Requests that failed before the server was known.
    initial_failures: usize,
}

impl Pair {
    /// Starts both, and waits for responses.
    fn start(namespace: &Namespace, name: &str, called: &str) -> Result<Pair> {
        let (server, client) = (format!("{name}-server"), format!("{name}-client"));
        let endpoint = format!("http://{called}/hello");
        let mut pair = Pair {
            server,
            client,
            initial_failures: 0,
        };
        pair.initial_failures = namespace
            .wait_for_responses(&pair.server(), &pair.client(&endpoint))
            .with_context(|| format!("the pods {name}"))?;
        Ok(pair)
    }

    /// Fails if one of the next requests does.
    fn expect_responses(&self, namespace: &Namespace) -> Result<()> {
        namespace
            .wait_for_more_responses(&self.client(""), self.initial_failures)
            .with_context(|| format!("requests of {}", self.client))
    }

    /// Fails if the proxies are of another release.
    fn run_proxies(&self, namespace: &Namespace, tag: &str) -> Result<()> {
        for app in [&self.server, &self.client] {
            let path = r#"jsonpath={.items[*].spec.initContainers[?(@.name=="proxy")].image}"#;
            let label = format!("app={app}");
            let image = namespace.kubectl(&["get", "pods", "-l", &label, "-o", path])?;
            ensure!(image == format!("diy-sm-proxy:{tag}"), "{app}: {image}");
        }
        Ok(())
    }

    fn server(&self) -> App<'_> {
        App {
            name: &self.server,
            ..App::http_server()
        }
    }

    fn client<'a>(&'a self, endpoint: &'a str) -> App<'a> {
        App {
            name: &self.client,
            endpoint,
            ..App::http_client()
        }
    }
}

/// Makes the injector add proxies of a release.
fn inject_proxies(tag: &str) -> Result<()> {
    kubectl(&[
        "set",
        "image",
        "-n",
        MESH,
        "deployment/injector",
        &format!("proxy-image=diy-sm-proxy:{tag}"),
        &format!("proxy-init-image=diy-sm-proxy-init:{tag}"),
    ])?;
    replaced("injector")
}

/// Waits until the replicas of a component have replaced all former ones, which may still serve.
fn replaced(component: &str) -> Result<()> {
    rolled_out(MESH, component)?;
    wait_for("the former replicas have ended", || {
        let label = format!("app={component}");
        let pods = kubectl(&["get", "pods", "-n", MESH, "-l", &label, "-o", "name"])?;
        Ok((pods.lines().count() == 2).then_some(()))
    })
}

/// Fails if an injector that takes the labels of namespaces from the path accepts the pods of this
/// release's webhook configuration, and so makes pods of strict namespaces permissive.
fn expect_no_pods_without_labels(namespace: &Namespace, previous: &Release<'_>) -> Result<()> {
    if previous.manifest("webhook")?.contains("path: /pods") {
        return Ok(());
    }
    let inject = "--annotations=diy-service-mesh/inject=true";
    let run = ["run", "never", "--image=never", "--dry-run=server", inject];
    let error = namespace.kubectl(&run).expect_err("the pod is rejected");
    ensure!(
        format!("{error:#}").contains("failed calling webhook"),
        "{error:#}"
    );
    Ok(())
}

/// A previous release.
struct Release<'a> {
    commit: &'a str,
}

impl Release<'_> {
    /// The tag of its images.
    fn tag(&self) -> &str {
        &self.commit[..12]
    }

    fn manifest(&self, name: &str) -> Result<String> {
        let file = format!("{}:manifests/{name}.yaml", self.commit);
        let shown = Command::new("git")
            .args(["-C", ROOT, "show", &file])
            .output()?;
        ensure!(
            shown.status.success(),
            "git show {file}: {}; the checkout must contain the history",
            String::from_utf8_lossy(&shown.stderr)
        );
        Ok(String::from_utf8(shown.stdout)?)
    }

    /// Installs a component with the manifest of the release.
    fn install(&self, component: &str) -> Result<()> {
        let image = format!("image: diy-sm-{component}:");
        let manifest = self.manifest(component)?;
        let manifest = manifest.replace(&format!("{image}dev"), &format!("{image}{}", self.tag()));
        kubectl_with_input(&["apply", "-f", "-"], &manifest).map(drop)
    }
}

/// Installs this release again on drop.
struct Restore;

impl Drop for Restore {
    fn drop(&mut self) {
        let manifests = format!("{ROOT}/manifests");
        let restored = kubectl(&["apply", "-k", &manifests])
            .and_then(|_| inject_proxies("dev"))
            .and_then(|()| wait_for_mesh());
        if let Err(error) = restored {
            eprintln!("cannot restore the mesh: {error:#}");
        }
    }
}
