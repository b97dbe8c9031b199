//! `manifests/observability`: its queries parse and name metrics that exist, its alerts fire when
//! they are to, `dashboards.rs` generates its dashboards, and kustomize builds it.

#![allow(clippy::unwrap_used)]

mod dashboards;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use diy_mesh_sandbox::manifest::parse;
use diy_mesh_testkit::has_program;
use diy_mesh_tests::observability::{metric_names, objects, recipes};
use diy_mesh_tests::repository::{assert_none, files_with_extension, read, root};
use serde_json::{Value, json};

/// The expressions of the alerts.
fn alerts() -> Vec<Value> {
    let objects = objects("alerts.yaml");
    let groups = objects
        .iter()
        .flat_map(|one| one["spec"]["groups"].as_array());
    let rules = groups.flatten().flat_map(|group| group["rules"].as_array());
    rules.flatten().cloned().collect()
}

/// All queries, without variables.
fn queries() -> Vec<String> {
    let alerts = alerts();
    let alerts = alerts
        .iter()
        .map(|rule| rule["expr"].as_str().unwrap().to_owned());
    let values = [
        ("namespace", "shop"),
        ("service", "web"),
        ("target", "web"),
        ("workload", "web"),
        ("hash", "5d"),
        ("route", ".*"),
        ("interval", "1m"),
    ];
    let recipes = recipes();
    let recipes = recipes.iter().map(|recipe| recipe.query(&values));
    let dashboards = dashboards::queries().into_iter();
    let dashboards = dashboards.map(|query| query.replace("$__rate_interval", "5m"));
    alerts.chain(recipes).chain(dashboards).collect()
}

#[test]
fn queries_name_documented_metrics() {
    let known = metric_names(&read(Path::new("docs/operations.md")));
    let queries = queries();
    assert!(queries.len() > 80, "{} queries", queries.len());
    let named = metric_names(&queries.join("\n"));
    let unknown = named.difference(&known).cloned();
    assert_none("metrics that docs/operations.md does not list", unknown);
}

/// A directory of a test in `target`, for files that a program reads.
fn folder(name: &str) -> PathBuf {
    let folder = root().join("target/observability").join(name);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Runs a program in a folder, and returns its output. Fails with it if the program does.
fn run(folder: &Path, program: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(program);
    let output = command.args(arguments).current_dir(folder).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {text}");
    text
}

#[test]
fn queries_parse() {
    if !has_program("promtool") {
        return;
    }
    let folder = folder("queries");
    let rules = queries().into_iter().zip(0..);
    let rules =
        rules.map(|(query, number)| json!({"record": format!("query:{number}"), "expr": query}));
    let rules: Vec<Value> = rules.collect();
    let rules = json!({"groups": [{"name": "queries", "rules": rules}]});
    fs::write(folder.join("rules.yaml"), rules.to_string()).unwrap();
    run(&folder, "promtool", &["check", "rules", "rules.yaml"]);
}

#[test]
fn alerts_fire_when_they_are_to() {
    if !has_program("promtool") {
        return;
    }
    let folder = folder("alerts");
    let rules = objects("alerts.yaml")[0]["spec"].to_string();
    fs::write(folder.join("rules.yaml"), rules).unwrap();
    let tests = read(Path::new("tests/tests/observability/alerts.yaml"));
    fs::write(folder.join("tests.yaml"), &tests).unwrap();
    run(&folder, "promtool", &["test", "rules", "tests.yaml"]);
    for alert in alerts() {
        let name = format!("alertname=\"{}\"", alert["alert"].as_str().unwrap());
        assert!(tests.contains(&name), "{name}");
    }
}

#[test]
fn alerts_have_a_summary_and_an_existing_runbook() {
    for alert in alerts() {
        let name = alert["alert"].as_str().unwrap();
        let annotation = |name: &str| alert["annotations"][name].as_str().unwrap_or_default();
        assert!(annotation("summary").ends_with('.'), "{name}");
        assert!(alert["labels"]["severity"].is_string(), "{name}");
        let (file, anchor) = annotation("runbook").split_once('#').expect(name);
        let text = read(Path::new(file));
        let mut headings = text.lines().filter(|line| line.starts_with('#'));
        assert!(
            headings.any(|line| anchor_of(line) == anchor),
            "{name}: {anchor}"
        );
    }
}

/// GitHub's anchor of a heading.
fn anchor_of(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text
        .chars()
        .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn prometheus_accepts_the_scrape_configuration() {
    if !has_program("promtool") {
        return;
    }
    let folder = folder("scrape");
    let text = read(Path::new("manifests/observability/scrape-config.yaml"));
    // Builds without Kubernetes exist, such as Debian's.
    let text = text.replace("    kubernetes_sd_configs:\n      - role: pod\n", "");
    fs::write(folder.join("prometheus.yaml"), text).unwrap();
    let check = ["check", "config", "--syntax-only", "prometheus.yaml"];
    run(&folder, "promtool", &check);
}

#[test]
fn kustomize_builds_the_manifests_with_all_dashboards() {
    if !has_program("kubectl") {
        return;
    }
    let built = run(
        &root(),
        "kubectl",
        &["kustomize", "manifests/observability"],
    );
    let objects = parse(&built).unwrap();
    let kinds: Vec<&str> = objects
        .iter()
        .filter_map(|one| one["kind"].as_str())
        .collect();
    assert_eq!(
        kinds,
        ["ConfigMap", "PodMonitor", "PodMonitor", "PrometheusRule"]
    );
    assert_eq!(objects[0]["metadata"]["labels"]["grafana_dashboard"], "1");
    let pages = objects[0]["data"].as_object().unwrap();
    let files = files_with_extension("manifests/observability/dashboards", "json");
    assert_eq!(pages.len(), files.len());
    for page in pages.values() {
        assert!(serde_json::from_str::<Value>(page.as_str().unwrap()).is_ok());
    }
}
