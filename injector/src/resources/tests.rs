//! The resources of proxies beside the resources of pods.

use super::*;
use crate::settings::SETTINGS;
use clap::{Args, Command, FromArgMatches};

fn settings(annotations: &Value) -> SidecarSettings {
    let command = SidecarSettings::augment_args(Command::new("injector"));
    let matches = command.get_matches_from(["injector"]);
    let settings = SidecarSettings::from_arg_matches(&matches).expect("valid defaults");
    let pod = json!({"metadata": {"annotations": annotations}});
    let mut problems = Vec::new();
    let settings = settings.for_pod(&pod, &mut problems);
    assert_eq!(problems, [""; 0]);
    settings
}

/// The annotation with this end of its name.
fn named(name: &str) -> &'static str {
    let mut all = SETTINGS.iter().map(|setting| setting.annotation);
    all.find(|annotation| annotation.ends_with(&format!("/{name}")))
        .expect("a setting")
}

/// The resources of the proxy and of the pod, and the warnings.
fn fitted(
    annotations: &Value,
    pod: &Value,
    containers: &Value,
) -> Result<(Value, Value, Vec<String>), Vec<String>> {
    let mut settings = settings(annotations);
    let mut pod = json!({"spec": {"resources": pod}});
    let containers = Containers {
        mesh: &[],
        init: &[],
        main: containers.as_array().expect("a list"),
    };
    let warnings = fit(&mut settings, &mut pod, containers)?;
    let resources = pod["spec"]["resources"].clone();
    Ok((of_container(&settings), resources, warnings))
}

fn container(cpu: &str, memory: &str) -> Value {
    let both = json!({"cpu": cpu, "memory": memory});
    json!({"name": "app", "resources": {"requests": both, "limits": both}})
}

#[test]
fn pod_level_resources_are_raised_by_the_proxy() {
    let pod = json!({"requests": {"cpu": "0.5", "memory": "256Mi"},
        "limits": {"cpu": "1", "memory": "1Gi", "hugepages-2Mi": "2Mi"}});
    let (proxy, pod, warnings) = fitted(&json!({}), &pod, &json!([])).expect("it fits");
    assert_eq!(
        proxy,
        json!({"requests": {"cpu": "50m", "memory": "16Mi"}, "limits": {"memory": "256Mi"}})
    );
    assert_eq!(
        pod,
        json!({"requests": {"cpu": "550m", "memory": "272Mi"},
            "limits": {"cpu": "1050m", "memory": "1280Mi", "hugepages-2Mi": "2Mi"}})
    );
    assert_eq!(
        warnings,
        [
            "spec.resources of the pod is raised by the resources of the proxy: requests.cpu from \"0.5\" to 550m, requests.memory from \"256Mi\" to 272Mi, limits.cpu from \"1\" to 1050m, limits.memory from \"1Gi\" to 1280Mi; annotation diy-service-mesh/resources: keep leaves it as it is"
        ]
    );
    // A resource that the pod does not name stays the sum of its containers.
    let pod = json!({"requests": {"cpu": 0}, "limits": null});
    let (_, pod, _) = fitted(&json!({}), &pod, &json!([])).expect("it fits");
    assert_eq!(pod, json!({"requests": {"cpu": "50m"}, "limits": null}));
}

#[test]
fn resources_of_a_pod_are_raised_once() {
    let pod = json!({"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "1Gi"}});
    let (proxy, raised, _) = fitted(&json!({}), &pod, &json!([])).expect("it fits");
    let old = json!({"name": "proxy", "resources": proxy});
    let fit_again = |annotations| {
        let mut pod = json!({"spec": {"resources": raised}});
        let containers = Containers {
            mesh: &[&old],
            init: &[],
            main: &[],
        };
        let warnings = fit(&mut settings(&annotations), &mut pod, containers);
        (pod["spec"]["resources"].clone(), warnings.expect("it fits"))
    };
    assert_eq!(fit_again(json!({})), (raised.clone(), Vec::new()));
    let (pod, _) = fit_again(json!({named("proxy-memory-limit"): "512Mi"}));
    assert_eq!(pod["limits"]["memory"], "1536Mi");
}

#[test]
fn guaranteed_pods_stay_guaranteed_where_both_resources_are_named() {
    let memory = json!({named("guaranteed-memory"): "128Mi"});
    let both = json!({"cpu": "500m", "memory": "128Mi"});
    let exact = json!({"requests": both, "limits": both});
    let apps =
        json!([container("1", "1Gi"), {"resources": {"limits": {"cpu": 1, "memory": "1Gi"}}}]);
    let (proxy, _, warnings) = fitted(&memory, &Value::Null, &apps).expect("it fits");
    assert_eq!((proxy, warnings), (exact.clone(), Vec::new()));

    let pod =
        json!({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}});
    let (proxy, pod, warnings) = fitted(&memory, &pod, &json!([])).expect("it fits");
    assert_eq!((proxy, warnings.len()), (exact, 1));
    let raised = json!({"cpu": "1500m", "memory": "1152Mi"});
    assert_eq!(pod, json!({"limits": raised, "requests": raised}));

    // Equal requests and limits of the pod's own annotations stay.
    let own = json!({named("proxy-cpu-request"): "200m", named("proxy-cpu-limit"): "200m",
        named("proxy-memory-request"): "1Gi", named("proxy-memory-limit"): "100Mi"});
    let (proxy, _, warnings) = fitted(&own, &Value::Null, &apps).expect("it fits");
    let both = json!({"cpu": "200m", "memory": "100Mi"});
    assert_eq!(proxy, json!({"requests": both, "limits": both}));
    assert_eq!(warnings, [""; 0]);
}

#[test]
fn a_guaranteed_pod_that_becomes_burstable_gets_a_warning() {
    let guaranteed = json!([container("1", "1Gi")]);
    let (proxy, _, warnings) = fitted(&json!({}), &Value::Null, &guaranteed).expect("it fits");
    assert_eq!(proxy["requests"]["cpu"], "50m");
    assert!(
        warnings.len() == 1 && warnings[0].contains("becomes Burstable"),
        "{warnings:?}"
    );
    for others in [
        json!([{"name": "app"}]),
        json!([guaranteed[0], {"resources": {"limits": {"cpu": "1"}}}]),
        json!([]),
    ] {
        let (.., warnings) = fitted(&json!({}), &Value::Null, &others).expect("it fits");
        assert_eq!(warnings, [""; 0], "{others}");
    }
}

#[test]
fn kept_resources_of_a_pod_reduce_the_proxy_to_its_minimum_at_most() {
    let keep = json!({named("resources"): "keep"});
    let apps = json!([container("100m", "100Mi")]);
    let pod = json!({"requests": {"cpu": "150m", "memory": "116Mi"}, "limits": {"cpu": "100m", "memory": "128Mi"}});
    let (proxy, after, warnings) = fitted(&keep, &pod, &apps).expect("it fits");
    assert_eq!(proxy["limits"], json!({"memory": "128Mi"}));
    assert_eq!((after, warnings), (pod, Vec::new()));

    let pod = json!({"requests": {"cpu": "149m", "memory": "116Mi"}, "limits": {"cpu": "99m", "memory": "63Mi"}});
    let problems = fitted(&keep, &pod, &apps).expect_err("it does not fit");
    assert_eq!(
        problems,
        [
            "spec.resources.limits.cpu of the pod is \"99m\", less than the 100m that the proxy needs: raise it, or remove annotation diy-service-mesh/resources: keep",
            "spec.resources.requests.cpu of the pod is \"149m\", which the requests of its containers and 50m of the proxy exceed: raise it, or remove annotation diy-service-mesh/resources: keep",
            "spec.resources.limits.memory of the pod is \"63Mi\", less than the 64Mi that the proxy needs: raise it, or remove annotation diy-service-mesh/resources: keep",
        ]
    );
}

#[test]
fn requests_of_init_containers_count_as_kubernetes_adds_them_up() {
    let init = |cpu: &str, policy: Value| json!({"restartPolicy": policy, "resources": {"requests": {"cpu": cpu}}});
    let first = init("300m", Value::Null);
    let sidecar = init("50m", "Always".into());
    let last = init("200m", Value::Null);
    let requested = |init: &[&Value], main: &[Value]| {
        let containers = Containers {
            mesh: &[],
            init,
            main,
        };
        containers.requested("cpu")
    };
    let main = [container("100m", "1Mi")];
    assert_eq!(requested(&[&first, &sidecar, &last], &main), 300);
    assert_eq!(requested(&[&sidecar, &first], &main), 350);
    assert_eq!(
        requested(
            &[&sidecar, &last],
            &[main[0].clone(), container("200m", "1Mi")]
        ),
        350
    );
}
