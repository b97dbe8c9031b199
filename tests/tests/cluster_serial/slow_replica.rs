//! A slow replica on a cluster. Its share depends on the latency of the other replicas and on the rate
//! of requests, so no other test runs beside it.

use anyhow::{Context, Result, ensure};
use diy_mesh_tests::cluster::load::Load;
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{Namespace, in_namespace, kubectl_with_input, wait_for};
use serde_json::json;

/// Time in which a slow replica loses its share.
const SLOW_SECONDS: f64 = 2.0;
/// Time in which the share of a slow replica is measured.
const MEASURED_SECONDS: f64 = 5.0;

#[test]
fn slow_replica_loses_its_share_and_gets_it_back() -> Result<()> {
    in_namespace("slow", |namespace| {
        let server = App {
            replicas: 3,
            ..App::http_server()
        };
        namespace.apply(&server.service())?;
        namespace.apply(&server.deployment())?;
        namespace.rolled_out(server.name)?;
        let clients = App {
            replicas: 2,
            interval_ms: "20",
            ..App::http_client()
        };
        let load = Load::start(namespace, clients)?;
        let replicas = namespace.pods(server.name)?;
        let slow = &replicas[0];
        set_delay(namespace, slow, 200)?;
        let [all, share] = wait_for("requests after the delay", || {
            let logs = server_logs(namespace, &replicas)?;
            let from = *logs[0].delays.first().context("the delay is logged")? + SLOW_SECONDS;
            let to = from + MEASURED_SECONDS;
            let is_over = logs.iter().any(|log| log.requests.last() > Some(&to));
            let count = |log: &ServerLog| log.requests_between(from, to);
            Ok(is_over.then(|| [logs.iter().map(count).sum(), count(&logs[0])]))
        })?;
        // A third is fair.
        ensure!(
            all >= 100 && share * 20 <= all,
            "{share} of {all} requests reach the slow replica"
        );
        set_delay(namespace, slow, 0)?;
        wait_for("the replica has at least half of its share", || {
            let before = server_logs(namespace, &replicas)?;
            load.wait_for_responses()?;
            let after = server_logs(namespace, &replicas)?;
            let more = |at: usize| after[at].requests.len() - before[at].requests.len();
            let all: usize = (0..replicas.len()).map(more).sum();
            ensure!(more(0) * 6 >= all, "{} of {all} requests", more(0));
            Ok(Some(()))
        })?;
        load.expect_no_failure()
    })
}

/// Delays the responses of a server.
fn set_delay(namespace: &Namespace, pod: &str, milliseconds: u32) -> Result<()> {
    let name = &namespace.name;
    let path = format!("/api/v1/namespaces/{name}/pods/{pod}:8080/proxy/delay");
    let arguments = ["create", "--raw", &path, "-f", "-"];
    kubectl_with_input(&arguments, &json!(milliseconds).to_string()).map(drop)
}

/// The times of a server's log, in seconds.
struct ServerLog {
    requests: Vec<f64>,
    delays: Vec<f64>,
}

impl ServerLog {
    fn requests_between(&self, from: f64, to: f64) -> usize {
        let is_between = |time: &&f64| (from..to).contains(*time);
        self.requests.iter().filter(is_between).count()
    }
}

fn server_logs(namespace: &Namespace, pods: &[String]) -> Result<Vec<ServerLog>> {
    let log = |pod: &String| {
        let log = namespace.kubectl(&["logs", "--timestamps", pod, "-c", "http-server"])?;
        let times = |text: &str| -> Result<Vec<f64>> {
            let lines = log.lines().filter_map(|line| line.split_once(' '));
            let lines = lines.filter(|(_, line)| line.starts_with(text));
            lines.map(|(time, _)| seconds(time)).collect()
        };
        Ok(ServerLog {
            requests: times("Request #")?,
            delays: times("Delay: ")?,
        })
    };
    pods.iter().map(log).collect()
}

/// Seconds of the day, of a time as in `2026-01-31T13:59:58.123456789Z`.
fn seconds(time: &str) -> Result<f64> {
    let clock = time.split_once('T').map(|(_, clock)| clock);
    let mut parts = clock.context("a time")?.trim_end_matches('Z').split(':');
    let mut part = || -> Result<f64> {
        let part = parts.next().with_context(|| time.to_owned())?;
        part.parse().with_context(|| time.to_owned())
    };
    Ok(part()? * 3600.0 + part()? * 60.0 + part()?)
}
