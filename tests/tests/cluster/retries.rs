//! Retries of a route on a cluster: they hide a failing replica, and stay within their budget when
//! all replicas fail.

use std::time::Instant;

use anyhow::{Result, ensure};
use diy_mesh_tests::cluster::gateway_api::{
    ACCEPTED, Experimental, install, route, wait_for_condition,
};
use diy_mesh_tests::cluster::workloads::App;
use diy_mesh_tests::cluster::{Namespace, in_namespace, runs_long_tests, wait_for};
use diy_mesh_tests::routes::http_route;
use serde_json::{Value, json};

/// Requests of all clients of a Service.
const MIN_REQUESTS: usize = 2000;
/// Clients of each Service, each with a budget of its own.
const CLIENTS: usize = 2;

#[test]
fn retries_hide_a_failing_replica_and_stay_within_their_budget() -> Result<()> {
    if !runs_long_tests()? {
        return Ok(());
    }
    in_namespace("retries", |namespace| {
        install()?;
        let _experimental = Experimental::install()?;
        for (service, replicas) in [("web", &[(4, 0), (1, 50)][..]), ("down", &[(2, 100)])] {
            namespace.apply(&servers(service, replicas).to_string())?;
            retry(namespace, service)?;
        }
        for name in ["web-0", "web-50", "down-100"] {
            namespace.rolled_out(name)?;
        }
        let services = ["web", "down"].map(|service| {
            let endpoint = format!("http://{service}/hello");
            (service, format!("{service}-client"), endpoint)
        });
        let clients = services.each_ref().map(|(service, name, endpoint)| {
            let client = App {
                name,
                endpoint,
                replicas: CLIENTS as u32,
                interval_ms: "20",
                ..App::http_client()
            };
            (*service, client)
        });
        let started = Instant::now();
        for (_, client) in &clients {
            namespace.apply(&client.deployment())?;
        }
        for (service, client) in &clients {
            let (good, bad) = wait_for(&format!("{MIN_REQUESTS} requests to {service}"), || {
                let responses = namespace.responses(client)?;
                let counts = (responses.good, responses.bad.len());
                Ok((counts.0 + counts.1 >= MIN_REQUESTS).then_some(counts))
            })?;
            // After the responses: requests in progress count too.
            let attempts = received(namespace, service)?;
            let all = namespace.responses(client)?;
            let requests = all.good + all.bad.len();
            eprintln!(
                "{service}: {good} of {} succeed, {attempts} attempts for at most {requests} requests",
                good + bad
            );
            match *service {
                "web" => ensure!(bad * 1000 <= good + bad, "{bad} fail: {:#?}", all.bad),
                _ => ensure!(good == 0, "no replica of {service} works"),
            }
            // A fifth of the requests. For each client: 10, one in each second, and one in progress.
            let seconds = usize::try_from(started.elapsed().as_secs())?;
            let bound = requests + requests / 5 + CLIENTS * (10 + seconds + 1);
            ensure!(
                attempts <= bound,
                "{service}: {attempts} attempts for {requests} requests"
            );
        }
        Ok(())
    })
}

/// Requests that the replicas of a Service have received.
fn received(namespace: &Namespace, service: &str) -> Result<usize> {
    let selector = format!("service={service}");
    let log = namespace.kubectl(&[
        "logs",
        "-l",
        &selector,
        "-c",
        "http-server",
        "--tail=-1",
        "--max-log-requests=50",
    ])?;
    Ok(log.matches("Request #").count())
}

/// A route that retries status 500.
fn retry(namespace: &Namespace, service: &str) -> Result<()> {
    let rules = format!(
        "[{{backendRefs: [{{name: {service}, port: 80}}], retry: {{codes: [500], attempts: 2}}}}]"
    );
    let yaml = http_route(&namespace.name, service, &namespace.name, &rules).replace(
        "name: web, namespace",
        &format!("name: {service}, namespace"),
    );
    // The API server uses the new schema with a delay.
    wait_for("retry is stored", || {
        namespace.apply(&yaml)?;
        let route = route(namespace, "httproute", service)?;
        Ok((route["spec"]["rules"][0]["retry"]["attempts"] == 2).then_some(()))
    })?;
    wait_for_condition(namespace, "httproute", service, ACCEPTED).map(drop)
}

/// A Service and a Deployment for each number of replicas that fail a percentage of requests.
fn servers(service: &str, replicas: &[(u32, u32)]) -> Value {
    let labels = |rate: &u32| json!({"app": format!("{service}-{rate}"), "service": service});
    let deployments = replicas.iter().map(|(number, rate)| {
        json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": format!("{service}-{rate}")},
            "spec": {"replicas": number, "selector": {"matchLabels": labels(rate)}, "template": {
                "metadata": {"labels": labels(rate), "annotations": {"diy-service-mesh/inject": "true"}},
                "spec": {"containers": [{
                    "name": "http-server", "image": "diy-sm-http-server:dev", "imagePullPolicy": "IfNotPresent",
                    "env": [{"name": "FAIL_RATE", "value": rate.to_string()}],
                    "startupProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1, "failureThreshold": 60},
                }]},
            }}})
    });
    let object = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": service},
        "spec": {"selector": {"service": service}, "ports": [{"name": "http", "port": 80, "targetPort": 8080}]}});
    let items: Vec<Value> = std::iter::once(object).chain(deployments).collect();
    json!({"apiVersion": "v1", "kind": "List", "items": items})
}
