//! Properties of injection, on random pods from a fixed seed: unusual, partially injected and
//! malformed ones.

use clap::Parser;
use diy_mesh_injector::annotations::SCRAPE;
use diy_mesh_injector::config::{Config, Flags, Settings};
use diy_mesh_injector::patch::{Candidate, Injection, NamespaceLabels, Verdict, decide};
use diy_mesh_model::sidecar;
use fastrand::Rng;
use serde_json::{Map, Value, json};

fn settings() -> Settings {
    let flags = Flags::parse_from([
        "injector",
        "--image-to-deploy-proxy=proxy:1",
        "--image-to-deploy-proxy-init=init:1",
    ]);
    Config::from_flags(flags).expect("valid flags").settings
}

fn verdict(pod: &Value, strict: bool) -> Verdict {
    decide(
        &settings(),
        Candidate {
            pod,
            namespace: "shop",
            labels: Ok(NamespaceLabels {
                enabled: true,
                strict,
                other_mesh: None,
            }),
        },
    )
}

fn injected(pod: &Value) -> Option<Injection> {
    inject_into(pod, false)
}

fn inject_into(pod: &Value, strict: bool) -> Option<Injection> {
    match verdict(pod, strict) {
        Verdict::Injected(injection) => Some(*injection),
        _ => None,
    }
}

#[test]
fn patch_produces_the_pod_and_injection_is_idempotent() {
    let mut rng = Rng::with_seed(3);
    let mut count = 0;
    for _ in 0..1_000 {
        let pod = pod(&mut rng);
        let Some(injection) = injected(&pod) else {
            continue;
        };
        count += 1;
        let mut patched = pod.clone();
        json_patch::patch(&mut patched, &injection.patch)
            .unwrap_or_else(|error| panic!("{error}: {pod}"));
        assert_eq!(patched, injection.pod, "{pod}");
        let again = injected(&patched).unwrap_or_else(|| panic!("no longer injected: {patched}"));
        assert_eq!(again.patch.0, [], "{pod}");
        assert_eq!(again.pod, patched);
    }
    assert!(count > 200, "{count} pods were injected");
}

#[test]
fn preserves_other_fields_and_their_order() {
    let mut rng = Rng::with_seed(4);
    for _ in 0..1_000 {
        let pod = pod(&mut rng);
        let Some(injection) = injected(&pod) else {
            continue;
        };
        let (before, after) = (without_mesh(pod), without_mesh(injection.pod));
        assert_eq!(before, after);
    }
}

#[test]
fn injected_containers_come_first_and_once() {
    let mut rng = Rng::with_seed(5);
    for _ in 0..1_000 {
        let pod = pod(&mut rng);
        let Some(injection) = injected(&pod) else {
            continue;
        };
        let containers = injection.pod["spec"]["initContainers"]
            .as_array()
            .expect("a list");
        let names: Vec<_> = containers
            .iter()
            .filter_map(|container| container["name"].as_str())
            .collect();
        assert_eq!(names[..2], ["proxy-init", "proxy"], "{pod}");
        assert!(
            !names[2..].contains(&"proxy") && !names[2..].contains(&"proxy-init"),
            "{pod}"
        );
    }
}

#[test]
fn strict_namespace_is_the_default_of_its_pods() {
    let mut rng = Rng::with_seed(7);
    let (mut strict, mut permissive) = (0, 0);
    for _ in 0..1_000 {
        let pod = pod(&mut rng);
        let Some(injection) = inject_into(&pod, true) else {
            continue;
        };
        let mode = pod["metadata"]["annotations"]["diy-service-mesh/inbound"]
            .as_str()
            .unwrap_or("strict");
        let proxy = injection.pod["spec"]["initContainers"]
            .as_array()
            .expect("a list")
            .iter()
            .find(|container| container["name"] == "proxy");
        let args = &proxy.expect("it is injected")["args"];
        let args: Vec<_> = args
            .as_array()
            .expect("a list")
            .iter()
            .filter_map(Value::as_str)
            .collect();
        let settings = sidecar::Settings::of_arguments(args.iter().copied());
        assert_eq!(settings.strict, mode == "strict", "{pod}");
        // The proxy performs the probes, whether the pod is strict or not.
        let has_probes = args.iter().any(|arg| arg.starts_with("--kubelet-probe="));
        let has_http_probe = pod["spec"]["containers"][0]["livenessProbe"]
            .get("httpGet")
            .is_some();
        let skipped = pod["metadata"]["annotations"]
            .get("diy-service-mesh/skip-inbound-ports")
            .is_some();
        assert!(has_probes || !has_http_probe || skipped, "{pod}");
        strict += usize::from(mode == "strict" && has_probes);
        permissive += usize::from(mode == "permissive" && has_probes);
    }
    assert!(
        strict > 100 && permissive > 100,
        "{strict} strict and {permissive} permissive pods with probes"
    );
}

#[test]
fn malformed_pods_do_not_panic() {
    let mut rng = Rng::with_seed(6);
    for _ in 0..4_000 {
        let mut pod = pod(&mut rng);
        for _ in 0..rng.usize(1..4) {
            corrupt(&mut pod, &mut rng);
        }
        if let Some(injection) = inject_into(&pod, rng.bool()) {
            json_patch::patch(&mut pod, &injection.patch).expect("the patch applies");
            assert_eq!(pod, injection.pod);
        }
    }
}

fn without_mesh(mut pod: Value) -> Value {
    let is_mesh = |item: &Value| {
        matches!(
            item["name"].as_str(),
            Some("proxy" | "proxy-init" | "diy-service-mesh-token")
        )
    };
    let spec = pod["spec"].as_object_mut().expect("a spec");
    if let Some(containers) = spec["containers"].as_array_mut() {
        containers.iter_mut().for_each(remove_probe_actions);
    }
    for list in ["initContainers", "volumes"] {
        let items = spec.remove(list).unwrap_or_default();
        let others = items
            .as_array()
            .into_iter()
            .flatten()
            .filter(|item| !is_mesh(item))
            .cloned();
        spec.insert(list.into(), others.collect());
    }
    let metadata = pod["metadata"].as_object_mut().expect("metadata");
    let mut annotations = metadata
        .remove("annotations")
        .and_then(|map| map.as_object().cloned())
        .unwrap_or_default();
    annotations.retain(|name, _| name != "diy-service-mesh/status" && !SCRAPE.contains(&&**name));
    metadata.insert("annotations".into(), Value::Object(annotations));
    pod
}

/// Injection may replace the action of a probe, and nothing else of it.
fn remove_probe_actions(container: &mut Value) {
    for probe in ["/livenessProbe", "/readinessProbe", "/lifecycle/preStop"] {
        if let Some(probe) = container.pointer_mut(probe).and_then(Value::as_object_mut) {
            for action in ["httpGet", "tcpSocket", "grpc"] {
                probe.remove(action);
            }
        }
    }
}

fn pod(rng: &mut Rng) -> Value {
    let mut pod = json!({"metadata": {"generateName": "a-"}, "spec": {"containers": [container(rng, "app")]}});
    match rng.u8(0..4) {
        0 => {}
        1 => pod["metadata"]["annotations"] = Value::Null,
        _ => pod["metadata"]["annotations"] = annotations(rng),
    }
    let init = [
        json!({"name": "migrate", "image": "m"}),
        json!({"name": "tail", "restartPolicy": "Always"}),
        outdated_proxy(rng),
        outdated_init(rng),
    ];
    pod["spec"]["initContainers"] = list(rng, init);
    let token =
        json!({"name": "diy-service-mesh-token", "projected": {"sources": [], "defaultMode": 256}});
    let volumes = [
        json!({"name": "scratch", "emptyDir": {}}),
        json!({"name": "a/b~c", "configMap": {"name": "c"}}),
        token,
    ];
    pod["spec"]["volumes"] = list(rng, volumes);
    // Some pods are already injected, and changed by others afterwards.
    if let Some(injection) = injected(&pod).filter(|_| rng.bool()) {
        pod = injection.pod;
        let containers = pod["spec"]["initContainers"]
            .as_array_mut()
            .expect("a list");
        let changed = rng.usize(0..containers.len());
        containers[changed]["terminationMessagePath"] = json!("/dev/termination-log");
        containers[changed]["volumeMounts"] = json!([{"name": "kube-api-access", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}]);
        rng.shuffle(containers);
    }
    pod
}

fn list<const N: usize>(rng: &mut Rng, items: [Value; N]) -> Value {
    if rng.u8(0..8) == 0 {
        return Value::Null;
    }
    let mut items: Vec<_> = items.into_iter().filter(|_| rng.bool()).collect();
    rng.shuffle(&mut items);
    Value::Array(items)
}

fn annotations(rng: &mut Rng) -> Value {
    let all = [
        ("diy-service-mesh/inject", "True"),
        ("diy-service-mesh/skip-inbound-ports", "25, 80-90"),
        ("diy-service-mesh/skip-outbound-ports", "3306"),
        ("diy-service-mesh/outbound-udp", "dns"),
        ("diy-service-mesh/dump", "off"),
        (
            "diy-service-mesh/inbound",
            *rng.choice(&["strict", "permissive"]).expect("some"),
        ),
        ("diy-service-mesh/opaque-ports", "5432"),
        (
            "diy-service-mesh/allow-connect",
            *rng.choice(&["true", "false"]).expect("some"),
        ),
        ("diy-service-mesh/max-connection-age", "30m"),
        ("diy-service-mesh/status", "unknown"),
        ("prometheus.io/scrape", "false"),
        ("prometheus.io/port", "9100"),
        ("example.com/a~b", "c"),
    ];
    let chosen = all
        .into_iter()
        .filter(|_| rng.bool())
        .map(|(name, value)| (name.to_owned(), json!(value)));
    Value::Object(chosen.collect::<Map<_, _>>())
}

fn container(rng: &mut Rng, name: &str) -> Value {
    let port = *rng.choice(&[80, 4000, 4001, 5000, 65535]).expect("some");
    let mut container = json!({"name": name, "image": "i", "ports": [{"containerPort": port, "name": "web"}], "unknown": {"kept": [1, null]}});
    let mut probe = || match rng.u8(0..5) {
        0 => json!({"httpGet": {"path": "/health", "port": "web"}}),
        1 => json!({"httpGet": {"port": 85}}),
        2 => json!({"tcpSocket": {"port": port}}),
        3 => json!({"grpc": {"port": port}, "timeoutSeconds": 3}),
        _ => json!({"exec": {"command": ["true"]}}),
    };
    container["livenessProbe"] = probe();
    container["readinessProbe"] = probe();
    container["lifecycle"] = json!({"preStop": probe()});
    container
}

fn outdated_proxy(rng: &mut Rng) -> Value {
    let mut proxy = json!({"name": "proxy", "env": [{"name": "EXTRA", "value": "1"}, {"name": "SERVICE_MESH_TOKEN_FILE", "value": "/old"}]});
    if rng.bool() {
        proxy["args"] = json!(["--old"]);
        proxy["command"] = json!(["/proxy"]);
        proxy["env"]
            .as_array_mut()
            .expect("a list")
            .push(json!({"name": "POD_NAME", "value": "old"}));
    }
    proxy
}

fn outdated_init(rng: &mut Rng) -> Value {
    let args = if rng.bool() {
        json!(["--proxy-uid=1"])
    } else {
        json!(["--proxy-uid", "1", "--old"])
    };
    json!({"name": "proxy-init", "args": args, "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}, "runAsUser": 7}})
}

/// Replaces a random value by one of an unexpected type.
fn corrupt(value: &mut Value, rng: &mut Rng) {
    let inner: Vec<&mut Value> = match value {
        Value::Object(map) => map.values_mut().collect(),
        Value::Array(items) => items.iter_mut().collect(),
        _ => Vec::new(),
    };
    let unexpected = [
        Value::Null,
        json!(""),
        json!(-1),
        json!(1e300),
        json!([]),
        json!({}),
        json!([null]),
        json!(["proxy"]),
        json!({"name": "proxy"}),
    ];
    let count = inner.len();
    match inner.into_iter().nth(rng.usize(0..=count)) {
        Some(inner) if rng.u8(0..4) != 0 => corrupt(inner, rng),
        Some(inner) => *inner = rng.choice(unexpected).expect("some"),
        None => *value = rng.choice(unexpected).expect("some"),
    }
}
