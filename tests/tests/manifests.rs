//! Properties of the manifests of the mesh, and of their optional component.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::process::Command;

use diy_mesh_proto::field;
use diy_mesh_sandbox::manifest::{embedded, parse};
use diy_mesh_testkit::has_program;
use diy_mesh_tests::repository::root;
use serde_json::{Value, json};

/// The objects of a kind in the namespace of the mesh, with their names.
fn objects(all: &[Value], kind: &str) -> Vec<(String, Value)> {
    all.iter()
        .filter(|object| {
            object["kind"] == kind && object["metadata"]["namespace"] == "service-mesh"
        })
        .map(|object| {
            (
                object["metadata"]["name"].as_str().unwrap().to_owned(),
                object.clone(),
            )
        })
        .collect()
}

fn ports(rule: &Value) -> Vec<&Value> {
    let ports = rule["ports"].as_array().unwrap();
    ports.iter().map(|port| &port["port"]).collect()
}

/// Every container port accepts connections, but gRPC accepts only connections of pods. No other
/// port does.
#[test]
fn network_policies_allow_the_ports_of_the_control_plane() {
    let all = embedded().objects().unwrap();
    let policies = objects(&all, "NetworkPolicy");
    let deployments = objects(&all, "Deployment");
    assert_eq!((policies.len(), deployments.len()), (2, 2));
    for (name, deployment) in deployments {
        let (_, policy) = policies.iter().find(|(other, _)| *other == name).unwrap();
        let (spec, pod) = (&policy["spec"], &deployment["spec"]["template"]);
        for (label, value) in spec["podSelector"]["matchLabels"].as_object().unwrap() {
            assert_eq!(&pod["metadata"]["labels"][label], value);
        }
        assert_eq!(spec["policyTypes"], json!(["Ingress"]));
        let rules = spec["ingress"].as_array().unwrap();
        let mut allowed: Vec<_> = rules.iter().flat_map(ports).collect();
        let container = &pod["spec"]["containers"][0];
        let mut listening: Vec<_> = container["ports"].as_array().unwrap().iter().collect();
        listening
            .iter_mut()
            .for_each(|port| *port = &port["containerPort"]);
        allowed.sort_by_key(|port| port.as_u64());
        listening.sort_by_key(|port| port.as_u64());
        assert_eq!(allowed, listening, "{name}");
        for rule in rules {
            let expected = if ports(rule) == [8080] {
                json!([{"namespaceSelector": {}}])
            } else {
                Value::Null
            };
            assert_eq!(rule["from"], expected, "{name}");
        }
    }
}

#[test]
fn requests_of_the_control_plane_have_a_concurrency_limit_of_their_own() {
    let all = embedded().objects().unwrap();
    let of_kind = |kind: &str| all.iter().find(|object| object["kind"] == kind).unwrap();
    let level = of_kind("PriorityLevelConfiguration");
    assert_eq!(level["spec"]["type"], "Limited");
    let spec = &of_kind("FlowSchema")["spec"];
    let selected = &spec["priorityLevelConfiguration"]["name"];
    assert_eq!(selected, &level["metadata"]["name"]);
    // The schema of Kubernetes for all service accounts has 9000.
    assert!(spec["matchingPrecedence"].as_u64().unwrap() < 9000);
    let subjects = spec["rules"][0]["subjects"].as_array().unwrap();
    let subjects = subjects.iter().map(|one| one["serviceAccount"].clone());
    let deployments = objects(&all, "Deployment").into_iter();
    let accounts = deployments
        .map(|(_, mut deployment)| {
            deployment["spec"]["template"]["spec"]["serviceAccountName"].take()
        })
        .map(|name| json!({"name": name, "namespace": "service-mesh"}));
    assert_eq!(subjects.collect::<Vec<_>>(), accounts.collect::<Vec<_>>());
}

#[test]
fn load_and_drains_do_not_stop_the_control_plane() {
    let all = embedded().objects().unwrap();
    let class = all.iter().find(|object| object["kind"] == "PriorityClass");
    let class = &class.unwrap()["metadata"]["name"];
    for (name, deployment) in objects(&all, "Deployment") {
        let spec = &deployment["spec"]["template"]["spec"];
        assert_eq!(&spec["priorityClassName"], class, "{name}");
        let probe = &spec["containers"][0]["livenessProbe"];
        let number = |field: &str| probe[field].as_u64().unwrap();
        assert!(
            number("timeoutSeconds") >= 10 && number("failureThreshold") >= 6,
            "{name}"
        );
    }
    for (name, budget) in objects(&all, "PodDisruptionBudget") {
        assert_eq!(
            budget["spec"]["unhealthyPodEvictionPolicy"], "AlwaysAllow",
            "{name}"
        );
    }
}

#[test]
fn component_restricts_the_sources_of_webhook_and_admin_ports() {
    if !has_program("kubectl") {
        return;
    }
    // kustomize accepts no absolute paths of directories.
    let folder = root().join("target/restrict-sources");
    fs::create_dir_all(&folder).unwrap();
    let overlay = "resources: [../../manifests]\ncomponents: [../../manifests/restrict-sources]\n";
    fs::write(folder.join("kustomization.yaml"), overlay).unwrap();
    let built = Command::new("kubectl")
        .arg("kustomize")
        .arg(&folder)
        .output();
    let built = built.unwrap();
    let text = String::from_utf8(built.stdout).unwrap();
    let error = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{error}");
    for (name, policy) in objects(&parse(&text).unwrap(), "NetworkPolicy") {
        for rule in policy["spec"]["ingress"].as_array().unwrap() {
            let source = &rule["from"][0];
            let is_restricted = source["ipBlock"]["cidr"] == "192.0.2.0/24";
            assert_eq!(is_restricted, ports(rule) != [8080], "{name}: {rule}");
        }
    }
}

/// The expression that warns of them has the names that the controller and the proxies reject.
#[test]
fn warnings_of_routes_know_all_reserved_headers() {
    let policy = fs::read_to_string(root().join("manifests/route-warnings/policy.yaml"));
    let policy = policy.unwrap();
    let names = policy.split("'^(?i:").nth(1).unwrap();
    let names: Vec<&str> = names.split(")$'").next().unwrap().split('|').collect();
    let of_mesh = [
        field::CALLED_BY,
        field::PREVIOUS_ATTEMPTS,
        field::MESH_ERROR,
        field::EXCHANGE,
    ];
    let of_mesh = of_mesh.map(|name| name.replace('-', "[^a-z0-9]"));
    let of_connections = field::OF_CONNECTIONS.map(str::to_owned);
    let expected: Vec<String> = of_connections.into_iter().chain(of_mesh).collect();
    assert_eq!(names, expected);
}
