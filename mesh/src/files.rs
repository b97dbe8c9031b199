//! Objects in files, in place of the objects of a cluster.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use diy_mesh_controller::explain;
use diy_mesh_controller::index::Index;
use diy_mesh_controller::object::Kind;
use diy_mesh_injector::{
    config::Settings,
    patch::{Candidate, NamespaceLabels, Verdict, decide},
};
use diy_mesh_model::identity::TRUST_DOMAIN;
use diy_mesh_sandbox::manifest::{self, Files};
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::terminal::{self, printable};
use crate::{controller, routes};

/// The objects of files with any number of them, and of folders, with their kustomizations.
pub fn read(files: &[PathBuf]) -> Result<Vec<Value>> {
    let mut all = Vec::new();
    for path in files {
        if path.is_dir() {
            all.extend(Files::read(path)?.objects()?);
            continue;
        }
        let text = fs::read_to_string(path);
        let text = text.with_context(|| format!("failed to read {}", path.display()))?;
        let objects = manifest::parse(&text);
        all.extend(objects.with_context(|| format!("failed to parse {}", path.display()))?);
    }
    Ok(all)
}

/// The objects of files or, without files, the objects of these kinds in the cluster, in a
/// namespace or in all. `flag` names files, which `--controller` requires.
pub async fn read_or_list(
    files: &[PathBuf],
    flag: &str,
    controller: &controller::Arguments,
    namespaces: impl IntoIterator<Item = Option<&str>>,
    kinds: &[Kind],
) -> Result<Vec<Value>> {
    if !files.is_empty() {
        return read(files);
    }
    ensure!(
        controller.access.controller.is_empty(),
        "--controller requires {flag}: objects are read from a cluster or from files"
    );
    let cluster = Cluster::connect(&controller.cluster).await?;
    let mut all = Vec::new();
    for namespace in namespaces {
        let objects = routes::fetch(&cluster.client, namespace, kinds.iter().copied()).await;
        all.extend(objects.map_err(|error| {
            let place = namespace.map_or_else(String::new, |name| format!(" of namespace {name}"));
            anyhow!("failed to list objects{place}: {error}")
        })?);
    }
    Ok(all)
}

/// An index of the objects of files. Problems in them are printed.
pub fn index(files: &[PathBuf], mesh: &str) -> Result<Index> {
    let mut objects = read(files)?;
    let mut problems = inject(&mut objects, mesh);
    let (index, invalid) = explain::index(&objects, mesh, TRUST_DOMAIN);
    problems.extend(invalid);
    problems.extend(explain::problems_of_authorization(&index));
    print(&problems);
    Ok(index)
}

/// Prints problems to standard error.
pub(crate) fn print(problems: &[String]) {
    for problem in problems {
        terminal::note(&format!("problem: {}", printable(problem)));
    }
}

/// Adds a pod for each workload, with the name of it, and the proxies of pods as the injector would.
/// Returns what it would reject.
pub fn inject(objects: &mut Vec<Value>, mesh: &str) -> Vec<String> {
    let settings = Settings::of_mesh(mesh);
    let (mut pods, mut problems) = (Vec::new(), Vec::new());
    for pod in objects.iter().filter_map(pod) {
        let namespace = namespace(&pod).to_owned();
        let namespaced = metadata_of_namespace(objects, &namespace);
        let labels = NamespaceLabels::of(
            |name| namespaced?["labels"][name].as_str(),
            |name| namespaced?["annotations"][name].as_str(),
        );
        let candidate = Candidate {
            pod: &pod,
            namespace: &namespace,
            labels: Ok(labels),
        };
        let injected = match decide(&settings, candidate) {
            Verdict::Injected(injection) => injection.pod,
            Verdict::NotRequested => pod,
            Verdict::Skipped(problem) | Verdict::Denied(problem) | Verdict::Unknown(problem) => {
                let name = pod["metadata"]["name"].as_str().unwrap_or_default();
                problems.push(format!("Pod {namespace}/{name}: {problem}"));
                pod
            }
        };
        pods.push(injected);
    }
    objects.append(&mut pods);
    problems
}

/// The namespace of an object.
pub(crate) fn namespace(object: &Value) -> &str {
    object["metadata"]["namespace"]
        .as_str()
        .unwrap_or("default")
}

/// The metadata of a namespace that is among the objects.
fn metadata_of_namespace<'a>(objects: &'a [Value], name: &str) -> Option<&'a Value> {
    let mut namespaces = objects
        .iter()
        .filter(|object| object["kind"] == "Namespace");
    let namespace = namespaces.find(|object| object["metadata"]["name"] == name)?;
    Some(&namespace["metadata"])
}

/// A pod, or the pod of a workload.
fn pod(object: &Value) -> Option<Value> {
    let template = match object["kind"].as_str()? {
        "Pod" => object,
        "Deployment" | "StatefulSet" | "DaemonSet" | "Job" => &object["spec"]["template"],
        "CronJob" => &object["spec"]["jobTemplate"]["spec"]["template"],
        _ => return None,
    };
    let (metadata, spec) = (&template["metadata"], &template["spec"]);
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec});
    pod["metadata"]["name"] = object["metadata"]["name"].clone();
    pod["metadata"]["namespace"] = namespace(object).into();
    Some(pod)
}
