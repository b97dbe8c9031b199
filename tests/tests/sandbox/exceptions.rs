//! The failures of traffic that an operator has to see, in a sandbox. The proxies report them to
//! the controllers, and the check of the traffic names them.

use std::collections::BTreeMap;

use diy_mesh::check::traffic::{Traffic, findings};
use diy_mesh::check::upgrade::judge;
use diy_mesh::check::{Finding, Level};
use diy_mesh_proto::mesh::v1::exceptions::Exception;
use diy_mesh_tests::routes::traffic_policy;
use diy_mesh_tests::sandbox::{
    MESHED, READY_TIMEOUT, get, identity_when, request_until, requests, run, shell, single_pod,
    with_mesh,
};
use serde_json::{Value, json};

/// A Service in namespace `shop` that selects the pods of `group`, with this target port.
fn service(name: &str, target_port: u16) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": name, "namespace": "shop"},
        "spec": {"selector": {"group": "web"}, "ports": [{"port": 80, "targetPort": target_port}]},
    })
}

/// A Deployment whose pods fail this percentage of the requests, with one more field of the
/// container.
fn server(name: &str, group: &str, fail_rate: u32, field: (&str, Value)) -> Value {
    let mut deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": name, "namespace": "shop"},
        "spec": {
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {
                    "labels": {"app": name, "group": group},
                    "annotations": {"diy-service-mesh/inject": "true"},
                },
                "spec": {"containers": [{
                    "name": "http-server", "image": "diy-sm-http-server:dev",
                    "env": [{"name": "FAIL_RATE", "value": fail_rate.to_string()}],
                }]},
            },
        },
    });
    deployment["spec"]["template"]["spec"]["containers"][0][field.0] = field.1;
    deployment
}

/// The reports of the proxies, in the output of `mesh identity`.
fn traffic(identity: &Value) -> Traffic {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let number = |value: &Value| value.as_u64().and_then(|number| number.try_into().ok());
    let exception = |one: &Value| Exception {
        kind: text(&one["kind"]),
        destination: text(&one["destination"]),
        endpoint: text(&one["endpoint"]),
        reason: text(&one["reason"]),
        count: number(&one["count"]).unwrap_or_default(),
        total: number(&one["total"]).unwrap_or_default(),
    };
    let workloads = identity["workloads"].as_array().into_iter().flatten();
    let proxies = workloads.map(|workload| {
        let name = format!(
            "{}/{}",
            text(&workload["namespace"]),
            text(&workload["pod"])
        );
        let exceptions = workload["exceptions"]["exceptions"].as_array();
        let exceptions = exceptions.into_iter().flatten();
        (name, exceptions.map(exception).collect())
    });
    Traffic {
        proxies: proxies.collect::<BTreeMap<_, _>>(),
        ..Traffic::default()
    }
}

/// The findings as lines "LEVEL DETAIL".
fn lines(findings: &[Finding]) -> Vec<String> {
    let lines = findings.iter().flat_map(|finding| {
        let details = finding.details.iter();
        details.map(|detail| format!("{:?} {detail}", finding.level))
    });
    lines.collect()
}

#[test]
fn wrong_target_port_ejected_replica_failing_probe_and_rejected_split_are_named() {
    let startup = || {
        (
            "startupProbe",
            json!({"tcpSocket": {"port": 8080}, "periodSeconds": 1}),
        )
    };
    let probe = json!({"httpGet": {"port": 8080, "path": "/hello"}, "periodSeconds": 1});
    let split = json!({
        "apiVersion": "split.smi-spec.io/v1alpha4", "kind": "TrafficSplit",
        "metadata": {"name": "web", "namespace": "shop"},
        "spec": {"service": "web", "backends": [{"service": "web-v2", "weight": 1}]},
    });
    let objects = [
        service("web", 8080),
        service("broken", 8081),
        server("working", "web", 0, startup()),
        server("failing", "web", 100, startup()),
    ];
    let more = [
        shell(MESHED),
        traffic_policy("loadBalancing: {algorithm: RoundRobin}"),
    ];
    let yaml = objects.iter().map(|object| format!("---\n{object}\n"));
    let yaml: String = yaml.chain(more.map(|one| format!("---\n{one}"))).collect();
    let Some(sandbox) = with_mesh(&yaml) else {
        return;
    };
    let unready = server("unready", "none", 100, ("readinessProbe", probe));
    sandbox.apply(&unready.to_string()).unwrap();
    // The judgement of the controllers about a split, which has no status.
    let errors = judge(&[&objects[..], &[split]].concat()).errors;
    assert!(
        errors.len() == 1 && errors[0].starts_with("TrafficSplit shop/web: "),
        "{errors:?}"
    );

    let client = single_pod(&sandbox, "clients", "shell");
    get(&sandbox, &client, "web.shop", 80);
    requests(&sandbox, &client, "/hello", 200);
    let refused = |response: &str| response.contains("x-mesh-error: connect-failed");
    request_until(
        &sandbox,
        &client,
        "GET /hello",
        ("broken.shop", 80),
        "",
        refused,
    );
    let request = "GET /hello HTTP/1.1\\r\\nHost: broken.shop\\r\\nConnection: close\\r\\n\\r\\n";
    let script = format!(
        "for i in {{1..20}}; do
             exec 3<>/dev/tcp/broken.shop/80 && printf '{request}' >&3 && cat <&3
         done"
    );
    run(&sandbox, &client, &script);

    let (client, unready) = (client.full_name(), single_pod(&sandbox, "shop", "unready"));
    let failing = single_pod(&sandbox, "shop", "failing").ip.unwrap();
    let expected = [
        (
            format!("Problem {client}: 100% of "),
            "requests to shop/broken:80 failed: connect-failed".to_owned(),
        ),
        (
            format!("Problem {}: ", unready.full_name()),
            "probes failed, HTTP GET /hello on port 8080: status-500".to_owned(),
        ),
        (
            format!("Warning {client}: requests to shop/web:80 avoid {failing}:8080: "),
            "it failed several requests in a row".to_owned(),
        ),
    ];
    let what = "the findings about the traffic";
    let mut found = Vec::new();
    identity_when(&sandbox, what, READY_TIMEOUT, |identity| {
        found = lines(&findings(&traffic(identity), &[], &[], 0));
        let is_found = |(start, end): &(String, String)| {
            let mut found = found.iter();
            found.any(|line| line.starts_with(start) && line.contains(end))
        };
        expected.iter().all(is_found)
    });
    // Nothing else fails at the client, and nothing at the pods that work.
    let problems = found
        .iter()
        .filter(|line| line.starts_with(&format!("{:?}", Level::Problem)));
    assert_eq!(problems.count(), 2, "{found:?}");
}
