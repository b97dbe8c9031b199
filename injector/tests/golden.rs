//! Golden files: each file in tests/golden/ has a pod and the expected verdict. And the manifests of
//! features of Kubernetes in the folder tests/features/ of the repository.
//!
//! `UPDATE_GOLDEN=1 cargo test -p diy-mesh-injector --test golden` rewrites the verdicts; review
//! the diff.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser;
use diy_mesh_injector::config::{Config, Flags, Settings};
use diy_mesh_injector::other_mesh::OtherMesh;
use diy_mesh_injector::patch::{Candidate, NamespaceLabels, Verdict, decide};
use serde::Deserialize;
use serde_json::{Value, json};

const EXPECTED: [&str; 4] = ["denied:", "skipped:", "notRequested:", "patched:"];

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Golden {
    #[serde(rename = "about")]
    _about: String,
    namespace: String,
    #[serde(default)]
    enabled_namespace: bool,
    #[serde(default)]
    strict_namespace: bool,
    #[serde(default)]
    namespace_annotations: BTreeMap<String, String>,
    input: Value,
    #[serde(flatten)]
    expected: Value,
}

fn settings() -> Settings {
    let images = [
        "--image-to-deploy-proxy=diy-sm-proxy:dev",
        "--image-to-deploy-proxy-init=diy-sm-proxy-init:dev",
    ];
    let flags = Flags::parse_from(["injector"].iter().chain(&images));
    Config::from_flags(flags).expect("valid flags").settings
}

fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut files: Vec<_> = fs::read_dir(folder)
        .expect("tests/golden")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.sort();
    files
}

fn read(file: &Path) -> (String, Golden) {
    let text = fs::read_to_string(file).expect("a readable file");
    let golden = serde_yaml_ng::from_str(&text)
        .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    (text, golden)
}

fn verdict(golden: &Golden) -> Verdict {
    let labels = NamespaceLabels {
        enabled: golden.enabled_namespace,
        strict: golden.strict_namespace,
        other_mesh: OtherMesh::of_namespace(|name| {
            golden.namespace_annotations.get(name).map(String::as_str)
        }),
    };
    decide(
        &settings(),
        Candidate {
            pod: &golden.input,
            namespace: &golden.namespace,
            labels: Ok(labels),
        },
    )
}

/// The verdict in the format of the files.
fn outcome(golden: &Golden) -> Value {
    match verdict(golden) {
        Verdict::NotRequested => json!({"notRequested": true}),
        Verdict::Skipped(warning) => json!({"skipped": warning}),
        Verdict::Denied(message) => json!({"denied": message}),
        Verdict::Unknown(reason) => panic!("{reason}"),
        Verdict::Injected(injection) => {
            let mut pod = golden.input.clone();
            json_patch::patch(&mut pod, &injection.patch).expect("the patch applies");
            assert_eq!(pod, injection.pod, "the patch produces the pod");
            let operations = injection.patch.0.len();
            json!({"patched": pod, "operations": operations, "warnings": injection.warnings})
        }
    }
}

#[test]
fn verdicts_match_golden_files() {
    let update = std::env::var_os("UPDATE_GOLDEN").is_some();
    let files = files();
    assert!(files.len() > 15, "golden files exist");
    for file in files {
        let (text, golden) = read(&file);
        let outcome = outcome(&golden);
        if update {
            let kept = text.lines().take_while(|line| {
                !EXPECTED.iter().any(|key| line.starts_with(key))
                    && !line.starts_with("operations:")
            });
            let kept: String = kept.flat_map(|line| [line, "\n"]).collect();
            let new = serde_yaml_ng::to_string(&outcome).expect("YAML");
            fs::write(&file, format!("{kept}{new}")).expect("a writable file");
        } else {
            let shown = serde_yaml_ng::to_string(&outcome).expect("YAML");
            assert_eq!(
                outcome,
                golden.expected,
                "{}: the verdict is\n{shown}",
                file.display()
            );
        }
    }
}

#[test]
fn injection_is_idempotent() {
    for file in files() {
        let (_, mut golden) = read(&file);
        if let Verdict::Injected(injection) = verdict(&golden) {
            golden.input = injection.pod;
            let Verdict::Injected(again) = verdict(&golden) else {
                panic!("{}: the verdict changed", file.display())
            };
            assert_eq!(again.patch.0, [], "{}", file.display());
            assert_eq!(again.pod, golden.input);
        }
    }
}

/// The pods of a manifest, and those after injection.
fn features(name: &str) -> Vec<(Value, Value)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/features");
    let text = fs::read_to_string(folder.join(name)).expect("a readable file");
    let documents = serde_yaml_ng::Deserializer::from_str(&text);
    let objects = documents.map(|document| Value::deserialize(document).expect("YAML"));
    let pods = objects.filter_map(|mut object| match object["kind"].as_str()? {
        "Pod" => Some(object),
        "Job" => Some(object["spec"]["template"].take()),
        _ => None,
    });
    let injected = pods.map(|pod| {
        let candidate = Candidate {
            pod: &pod,
            namespace: "shop",
            labels: Ok(NamespaceLabels::default()),
        };
        let Verdict::Injected(injection) = decide(&settings(), candidate) else {
            panic!("{name} is not injected");
        };
        let is_raise = |warning: &String| warning.contains("is raised by");
        assert!(
            injection.warnings.iter().all(is_raise),
            "{name}: {:?}",
            injection.warnings
        );
        (pod, injection.pod)
    });
    injected.collect()
}

fn names_of_features() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/features");
    let entries = fs::read_dir(folder).expect("tests/features");
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    let mut names: Vec<_> = names.filter_map(|name| name.into_string().ok()).collect();
    names.sort();
    names
}

#[test]
fn pods_with_features_of_recent_kubernetes_are_injected_and_keep_them() {
    let mut injected = 0;
    for name in names_of_features() {
        for (before, after) in features(&name) {
            injected += 1;
            let [before, after] = [before, after].map(|mut pod| {
                // The proxy answers the probe.
                pod["spec"]["containers"][0]["readinessProbe"].take();
                pod["spec"].take()
            });
            for (field, value) in before.as_object().expect("a spec") {
                // The injector raises the resources of a pod.
                if field != "resources" {
                    assert_eq!(&after[field], value, "{name}: {field}");
                }
            }
            let names = after["initContainers"].as_array().expect("a list");
            let names: Vec<_> = names.iter().map(|one| &one["name"]).collect();
            assert_eq!(names, ["proxy-init", "proxy"], "{name}");
        }
    }
    assert!(injected >= 9, "{injected} pods");
}

#[test]
fn pods_have_a_proxy_that_fits_limit_ranges_quotas_and_guaranteed_pods() {
    let resources = |name: &str, cpu: [&str; 2], memory: [&str; 2]| {
        let [both] = &features(name)[..] else {
            panic!("{name} has several pods")
        };
        let [requests, limits] = [0, 1].map(|at| json!({"cpu": cpu[at], "memory": memory[at]}));
        for container in both.1["spec"]["initContainers"].as_array().expect("a list") {
            let expected = json!({"requests": requests, "limits": limits});
            assert_eq!(container["resources"], expected, "{name}");
        }
    };
    resources("limit-range.yaml", ["50m", "100m"], ["64Mi", "128Mi"]);
    resources("resource-quota.yaml", ["50m", "200m"], ["16Mi", "256Mi"]);
    resources("guaranteed.yaml", ["100m", "100m"], ["64Mi", "64Mi"]);
}

#[test]
fn proxy_has_a_user_that_no_container_of_the_pod_has() {
    let (_, pod) = &features("proxy-user.yaml")[0];
    let containers = &pod["spec"]["initContainers"];
    let args = containers[0]["args"].as_array().expect("a list");
    assert!(args.contains(&json!("--proxy-uid=1338")), "{args:?}");
    let context = &containers[1]["securityContext"];
    assert_eq!(
        [&context["runAsUser"], &context["runAsGroup"]],
        [1338, 1338]
    );
}
