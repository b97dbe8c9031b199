//! `mesh check` of one namespace: what a user without rights elsewhere is told, and the wait for a
//! repair.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::{env, fs};

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{Namespace, check, in_namespace, kubectl};
use diy_mesh_tests::sandbox::programs;
use serde_json::Value;

fn command(namespace: &Namespace, arguments: &[&str]) -> Command {
    let mut command = Command::new(programs().join("mesh"));
    command.args(["check", "-n", &namespace.name, "-o", "json"]);
    command.args(arguments);
    command
}

fn report(output: &Output) -> Result<Value> {
    serde_json::from_slice(&output.stdout).with_context(|| format!("{output:?}"))
}

/// A kubeconfig of a service account that may see the namespace only.
fn tenant(namespace: &Namespace) -> Result<PathBuf> {
    namespace.kubectl(&["create", "serviceaccount", "tenant"])?;
    let account = format!("--serviceaccount={}:tenant", namespace.name);
    let role = "--clusterrole=view";
    namespace.kubectl(&["create", "rolebinding", "tenant", role, &account])?;
    let token = namespace.kubectl(&["create", "token", "tenant"])?;
    let view = ["config", "view", "--minify", "--raw", "-o", "json"];
    let mut config: Value = serde_json::from_str(&kubectl(&view)?)?;
    config["users"][0]["user"] = serde_json::json!({"token": token.trim()});
    let path = env::temp_dir().join(&namespace.name);
    fs::write(&path, config.to_string())?;
    Ok(path)
}

#[test]
fn tenant_is_told_of_its_namespace_and_what_it_may_not_see_is_a_note() -> Result<()> {
    in_namespace("check", |namespace| {
        namespace.wait_for_responses(&App::http_server(), &App::http_client())?;
        let config = tenant(namespace)?;
        let output = command(namespace, &[])
            .env("KUBECONFIG", &config)
            .output()?;
        fs::remove_file(config)?;
        let report = report(&output)?;
        ensure!(report["ok"] == true, "{report:#}");
        for name in ["pods", "proxies", "services"] {
            ensure!(check::level(&report, name) == "ok", "{report:#}");
        }
        let note = check::finding(&report, "unchecked").context("no note")?;
        ensure!(note["level"] == "note", "{note:#}");
        let details = note["details"].to_string();
        ensure!(
            details.contains("controller") && details.contains("upgrade"),
            "{note:#}"
        );
        Ok(())
    })
}

#[test]
fn check_waits_until_the_problem_of_its_namespace_is_repaired() -> Result<()> {
    in_namespace("check-wait", |namespace| {
        namespace.wait_for_responses(&App::http_server(), &App::http_client())?;
        let select = |app: &str| {
            let patch = format!("{{\"spec\":{{\"selector\":{{\"app\":\"{app}\"}}}}}}");
            namespace.kubectl(&["patch", "service", "server", "-p", &patch])
        };
        select("nobody")?;
        let once = command(namespace, &["--wait=0s"]).output()?;
        ensure!(once.status.code() == Some(1), "{once:?}");
        ensure!(
            check::level(&report(&once)?, "services") == "problem",
            "{once:?}"
        );
        let mut waiting = command(namespace, &["--wait"]);
        let waiting = waiting
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        select("server")?;
        let output = waiting.wait_with_output()?;
        ensure!(output.status.success(), "{output:?}");
        ensure!(report(&output)?["ok"] == true, "{output:?}");
        Ok(())
    })
}
