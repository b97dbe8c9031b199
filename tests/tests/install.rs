//! `mesh install`, kustomize and the Helm chart give the same objects. Requires kubectl and helm:
//! with `CI=true`, Go builds the helm of `tests/helm/go.mod`.

use std::collections::BTreeMap;
use std::env;
use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Once;

use anyhow::{Context, Result, ensure};
use diy_mesh::install::{self, Values};
use diy_mesh_sandbox::manifest;
use diy_mesh_testkit::skip;
use diy_mesh_tests::repository::root;
use serde_json::Value;

#[test]
fn kustomize_gives_the_objects_of_mesh_install() -> Result<()> {
    let values = Values::load(&[], &[])?;
    for (folder, objects) in [
        ("manifests", install::objects(&values)),
        ("manifests/crds", install::definitions()),
    ] {
        let mut kustomize = Command::new("kubectl");
        kustomize.arg("kustomize").arg(root().join(folder));
        let Some(text) = output(kustomize, "kubectl", "")? else {
            return Ok(());
        };
        assert_same(&objects, &manifest::parse(&text)?);
    }
    Ok(())
}

/// Values that differ from all defaults.
const VALUES: &str = r#"
namespace: mesh
trustDomain: example.org
redirect: iptables
image: {registry: "registry.example.com:5000/mesh", tag: "1.0", pullPolicy: Always, injector: "other/injector@sha256:00"}
controller:
  replicas: 3
  resources: {requests: {cpu: 1500m, memory: 1Gi}, limits: {cpu: "2", memory: null}}
  certificateLife: 3600
  caLife: 315360000
  log: info,kube_runtime=error,diy_mesh_controller=debug
  keyUrls: "https://a.example/keys,https://b.example/keys"
  privateKeyUrls: https://idp.internal/keys
  keyRootsFile: /etc/roots/ca.pem
  logFormat: json
injector:
  replicas: 1
  resources: {requests: {cpu: 20m, memory: 32Mi}, limits: {memory: 1Gi}}
  log: warn
  logFormat: json
egress: {privateNames: false}
proxy: {observeEdges: false, dump: "off", log: "info,diy_mesh_proxy=debug", logFormat: json, drain: 1m,
  cpuRequest: 20m, cpuLimit: "1", memoryRequest: 32Mi, memoryLimit: none}
guaranteed: {cpu: "1", memory: 128Mi}
"#;

#[test]
fn chart_gives_the_objects_of_mesh_install() -> Result<()> {
    for text in [
        "",
        VALUES,
        "image: {registry: example.com, proxyInit: 'a/b:c'}\nredirect: iptables",
    ] {
        let values = Values::load(&[("values".into(), text.into())], &[])?;
        let Some(rendered) = template("default", text)? else {
            return Ok(());
        };
        let objects = install::objects(&values);
        assert_same(&objects, &manifest::parse(&rendered?)?);
        // Helm creates the namespace of the release, and the chart does not.
        let rendered = template(values.namespace(), text)?.context("helm ran before")??;
        assert_same(&objects[1..], &manifest::parse(&rendered)?);
    }
    Ok(())
}

#[test]
fn chart_rejects_invalid_values() -> Result<()> {
    for (text, part) in [
        ("controler: {replicas: 3}", "controler"),
        ("controller: {replicas: many}", "/controller/replicas"),
        ("image: {tag: 1.0}", "/image/tag"),
        ("image: {pullPolicy: never}", "/image/pullPolicy"),
        ("namespace: A_B", "/namespace"),
        ("redirect: ebpf", "/redirect"),
    ] {
        ensure!(
            Values::load(&[("values".into(), text.into())], &[]).is_err(),
            "{text}"
        );
        let Some(rendered) = template("default", text)? else {
            return Ok(());
        };
        let error = format!("{:#}", rendered.expect_err(text));
        ensure!(error.contains(part), "{text}: {part} is not in: {error}");
    }
    Ok(())
}

/// Go has built helm, which takes minutes.
static BUILT: Once = Once::new();

/// The output of `helm template`, or its error. `None` without helm.
fn template(namespace: &str, values: &str) -> Result<Option<Result<String>>> {
    let mut helm = Command::new("helm");
    if env::var_os("CI").is_some() {
        // Two tests that begin at the same time would compile it twice.
        BUILT.call_once(|| drop(go_helm().arg("version").output()));
        helm = go_helm();
    }
    helm.args(["template", "mesh"])
        .arg(root().join("manifests/chart"));
    helm.args(["--namespace", namespace, "--values", "-"]);
    match output(helm, "helm", values) {
        Ok(None) => Ok(None),
        Ok(Some(text)) => Ok(Some(Ok(text))),
        Err(error) => Ok(Some(Err(error))),
    }
}

fn go_helm() -> Command {
    let mut go = Command::new("go");
    go.args(["tool", "helm"])
        .current_dir(root().join("tests/helm"));
    go
}

/// The output of a program, or `None` if it does not exist, except with `CI=true`.
fn output(mut program: Command, name: &str, input: &str) -> Result<Option<String>> {
    let pipes = program.stdin(Stdio::piped()).stdout(Stdio::piped());
    let Ok(mut child) = pipes.stderr(Stdio::piped()).spawn() else {
        skip(format!("{name} is missing"));
        return Ok(None);
    };
    child
        .stdin
        .take()
        .context("a pipe")?
        .write_all(input.as_bytes())?;
    let output = child.wait_with_output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name}: {error}");
    Ok(Some(String::from_utf8(output.stdout)?))
}

fn assert_same(expected: &[Value], found: &[Value]) {
    let by_name = |objects: &[Value]| -> BTreeMap<String, Value> {
        let name = |one: &Value| {
            let metadata = &one["metadata"];
            format!(
                "{} {}/{}",
                one["kind"], metadata["namespace"], metadata["name"]
            )
        };
        objects.iter().map(|one| (name(one), one.clone())).collect()
    };
    let (expected, found) = (by_name(expected), by_name(found));
    assert!(
        expected.keys().eq(found.keys()),
        "{:?} {:?}",
        expected.keys(),
        found.keys()
    );
    for (name, object) in &expected {
        assert_eq!(object, &found[name], "{name}");
    }
}
