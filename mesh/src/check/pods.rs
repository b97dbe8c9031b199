//! Checks of pods: injection, proxy readiness, and invalid labels and annotations. Pure.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Namespace, Pod};
use kube::ResourceExt;

use super::{Finding, count, facts::Facts};

const INJECT: &str = "diy-service-mesh/inject";
const INBOUND: &str = "diy-service-mesh/inbound";
const STATUS: &str = "diy-service-mesh/status";
/// The namespaces that the webhook excludes, in addition to the namespace of the mesh.
const EXCLUDED_NAMESPACES: [&str; 3] = ["kube-system", "kube-public", "kube-node-lease"];
/// The time from the creation of a pod until its proxy is ready, in seconds.
const READY_TIMEOUT: u64 = 60;

/// Whether the injector has injected a proxy.
pub(super) fn is_injected(pod: &Pod) -> bool {
    annotation(pod, STATUS) == Some("injected")
}

/// The active pods with a proxy.
pub(super) fn meshed(pods: &[Pod]) -> impl Iterator<Item = &Pod> {
    pods.iter().filter(|pod| is_injected(pod) && is_active(pod))
}

/// `namespace/name`.
pub(super) fn name(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())
}

/// The proxy container of a pod.
pub(super) fn proxy(pod: &Pod) -> Option<&Container> {
    pod.spec
        .as_ref()?
        .init_containers
        .iter()
        .flatten()
        .find(|container| container.name == "proxy")
}

/// Whether the proxy of the pod is ready.
pub(super) fn is_proxy_ready(pod: &Pod) -> bool {
    status(pod, "proxy").is_some_and(|status| status.ready)
}

fn annotation<'a>(pod: &'a Pod, name: &str) -> Option<&'a str> {
    pod.annotations().get(name).map(String::as_str)
}

fn is_active(pod: &Pod) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    pod.metadata.deletion_timestamp.is_none() && !matches!(phase, Some("Succeeded" | "Failed"))
}

fn status<'a>(pod: &'a Pod, container: &str) -> Option<&'a ContainerStatus> {
    pod.status
        .as_ref()?
        .init_container_statuses
        .iter()
        .flatten()
        .find(|status| status.name == container)
}

/// The labels of namespaces and annotations of pods have valid values.
pub(super) fn labels_and_annotations(facts: &Facts) -> Vec<Finding> {
    const CHECK: &str = "wishes";
    let mut findings = Vec::new();
    if let Ok(namespaces) = &facts.namespaces {
        let values = [
            (INJECT, &["enabled", "disabled"][..]),
            (INBOUND, &["strict", "permissive"]),
        ];
        let invalid: Vec<String> = namespaces
            .iter()
            .flat_map(|namespace| {
                values
                    .iter()
                    .filter_map(|(label, known)| invalid(namespace, label, known))
            })
            .collect();
        if !invalid.is_empty() {
            let text = format!(
                "{} with an invalid label value, which has no effect",
                count(invalid.len(), "namespace", "namespaces")
            );
            let advice = format!(
                "valid values are {INJECT}: enabled or disabled, and {INBOUND}: strict or permissive"
            );
            findings.push(Finding::problem(CHECK, text, advice).with_details(invalid));
        }
    }
    if let Ok(pods) = &facts.pods {
        let value = |pod: &Pod| {
            annotation(pod, INJECT)
                .filter(|value| {
                    !value.eq_ignore_ascii_case("true") && !value.eq_ignore_ascii_case("false")
                })
                .map(|value| format!("{}: {value:?}", name(pod)))
        };
        let invalid: Vec<String> = pods
            .iter()
            .filter(|pod| is_active(pod))
            .filter_map(value)
            .collect();
        if !invalid.is_empty() {
            let text = format!(
                "{} whose annotation {INJECT} is neither \"true\" nor \"false\"",
                count(invalid.len(), "pod", "pods")
            );
            findings.push(
                Finding::warning(
                    CHECK,
                    text,
                    "correct spec.template.metadata.annotations of the workload",
                )
                .with_details(invalid),
            );
        }
    }
    findings
}

fn invalid(namespace: &Namespace, label: &str, known: &[&str]) -> Option<String> {
    let value = namespace.labels().get(label)?;
    let name = namespace.name_any();
    (!known.contains(&value.as_str())).then(|| format!("{name}: {label}: {value:?}"))
}

/// Pods that request injection have a proxy.
pub(super) fn injected(facts: &Facts) -> Vec<Finding> {
    const CHECK: &str = "pods";
    let (pods, namespaces) = match (&facts.pods, &facts.namespaces) {
        (Ok(pods), Ok(namespaces)) => (pods, namespaces),
        (Err(reason), _) | (_, Err(reason)) => return vec![Finding::unknown(CHECK, reason)],
    };
    let is_enabled = |namespace: &&Namespace| {
        let value = namespace.labels().get(INJECT);
        value.is_some_and(|value| value == "enabled")
    };
    let enabled: BTreeSet<String> = namespaces
        .iter()
        .filter(is_enabled)
        .map(ResourceExt::name_any)
        .collect();
    let (mut missing, mut unsupported) = (Vec::new(), Vec::new());
    for pod in pods
        .iter()
        .filter(|pod| is_active(pod) && !is_injected(pod))
    {
        let namespace = pod.namespace().unwrap_or_default();
        let requested = match annotation(pod, INJECT) {
            Some(value) => value.eq_ignore_ascii_case("true"),
            None => enabled.contains(&namespace),
        };
        if !requested
            || EXCLUDED_NAMESPACES.contains(&namespace.as_str())
            || namespace == facts.namespace
        {
            continue;
        }
        match injection_obstacle(pod) {
            None => missing.push(name(pod)),
            // Such pods are expected in an enabled namespace, but not with the annotation.
            Some(reason) if annotation(pod, INJECT).is_some() => {
                unsupported.push(format!("{}: {reason}", name(pod)))
            }
            Some(_) => {}
        }
    }
    let mut findings = Vec::new();
    if !missing.is_empty() {
        let text = format!(
            "{} injection: {}",
            count(
                missing.len(),
                "pod without a proxy requests",
                "pods without a proxy request"
            ),
            "the request or the webhook is newer than the pod"
        );
        let advice = "recreate them: kubectl rollout restart (delete and create single pods)";
        findings.push(Finding::problem(CHECK, text, advice).with_details(missing));
    }
    if !unsupported.is_empty() {
        let text = format!(
            "{} injection and cannot have a proxy",
            count(unsupported.len(), "pod requests", "pods request")
        );
        findings.push(
            Finding::warning(CHECK, text, format!("remove the annotation {INJECT}"))
                .with_details(unsupported),
        );
    }
    if findings.is_empty() {
        findings.push(Finding::ok(
            CHECK,
            format!(
                "{} a proxy, and no other pod requests one",
                count(meshed(pods).count(), "pod has", "pods have")
            ),
        ));
    }
    findings
}

fn injection_obstacle(pod: &Pod) -> Option<&'static str> {
    let spec = pod.spec.as_ref()?;
    if spec.host_network == Some(true) {
        return Some("it uses the host network");
    }
    if annotation(pod, "kubernetes.io/config.mirror").is_some() {
        return Some("it is a static pod");
    }
    spec.os
        .as_ref()
        .filter(|os| os.name == "windows")
        .map(|_| "it runs on Windows")
}

/// Proxies are ready.
pub(super) fn proxies(facts: &Facts) -> Vec<Finding> {
    const CHECK: &str = "proxies";
    let Ok(pods) = &facts.pods else {
        return Vec::new();
    };
    let not_ready: Vec<String> = meshed(pods)
        .filter_map(|pod| {
            Some(format!(
                "{}: {}",
                name(pod),
                not_ready_reason(pod, facts.now)?
            ))
        })
        .collect();
    let ready = meshed(pods).filter(|pod| is_proxy_ready(pod)).count();
    vec![if not_ready.is_empty() {
        Finding::ok(
            CHECK,
            format!("{} ready", count(ready, "proxy is", "proxies are")),
        )
    } else {
        let text = format!(
            "{} not ready",
            count(not_ready.len(), "proxy is", "proxies are")
        );
        let advice = "see the log of the proxy (kubectl logs -n NAMESPACE POD -c proxy) and the events of the pod (kubectl describe)";
        Finding::problem(CHECK, text, advice).with_details(not_ready)
    }]
}

/// Why the proxy of a pod is not ready. Returns `None` within `READY_TIMEOUT` unless a container
/// failed.
fn not_ready_reason(pod: &Pod, now: u64) -> Option<String> {
    if is_proxy_ready(pod) {
        return None;
    }
    for container in ["proxy-init", "proxy"] {
        let Some(state) = status(pod, container).and_then(|status| status.state.as_ref()) else {
            continue;
        };
        if let Some(waiting) = state
            .waiting
            .as_ref()
            .and_then(|waiting| waiting.reason.as_deref())
            && !["PodInitializing", "ContainerCreating"].contains(&waiting)
        {
            return Some(format!("{container} is waiting: {waiting}"));
        }
        if let Some(terminated) = state
            .terminated
            .as_ref()
            .filter(|terminated| terminated.exit_code != 0)
        {
            return Some(format!(
                "{container} exited with code {}",
                terminated.exit_code
            ));
        }
    }
    let created = pod
        .metadata
        .creation_timestamp
        .as_ref()
        .and_then(|time| u64::try_from(time.0.as_second()).ok())
        .unwrap_or(now);
    let is_running = status(pod, "proxy").is_some_and(|status| {
        status
            .state
            .as_ref()
            .is_some_and(|state| state.running.is_some())
    });
    let state = if is_running {
        "proxy is running but not ready"
    } else {
        "proxy has not started"
    };
    (now.saturating_sub(created) > READY_TIMEOUT).then(|| state.into())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::{
        Level,
        facts::testing::{NOW, meshed as meshed_pod, object, pod, ready, unknown_facts},
    };
    use super::*;

    fn facts(pods: Vec<Pod>, labels: Value) -> Facts {
        Facts {
            pods: Ok(pods),
            namespaces: Ok(vec![object(
                json!({"metadata": {"name": "shop", "labels": labels}}),
            )]),
            ..unknown_facts()
        }
    }

    #[test]
    fn reports_pods_without_the_requested_proxy() {
        let pods = || {
            vec![
                meshed_pod("in", ready()),
                pod("requesting", json!({INJECT: "True"})),
                pod("silent", json!({})),
                pod("not", json!({INJECT: "false"})),
            ]
        };
        let missing = |labels: Value| {
            let findings = injected(&facts(pods(), labels));
            (findings[0].level, findings[0].details.clone())
        };
        assert_eq!(
            missing(json!({})),
            (Level::Problem, vec!["shop/requesting".to_owned()])
        );
        assert_eq!(
            missing(json!({INJECT: "enabled"})),
            (
                Level::Problem,
                vec!["shop/requesting".to_owned(), "shop/silent".to_owned()]
            )
        );
    }

    #[test]
    fn warns_of_unsupported_pods_and_ignores_completed_ones() {
        let mut host = pod("host", json!({INJECT: "true"}));
        host.spec.as_mut().unwrap().host_network = Some(true);
        let mut done = pod("done", json!({INJECT: "true"}));
        done.status.as_mut().unwrap().phase = Some("Succeeded".into());
        let findings = injected(&facts(vec![host, done], json!({})));
        assert_eq!((findings.len(), findings[0].level), (1, Level::Warning));
        assert_eq!(findings[0].details, ["shop/host: it uses the host network"]);
        assert_eq!(injected(&facts(vec![], json!({})))[0].level, Level::Ok);
    }

    #[test]
    fn reports_invalid_labels_and_annotations() {
        let findings = labels_and_annotations(&facts(
            vec![pod("p", json!({INJECT: "enabled"}))],
            json!({INJECT: "true", INBOUND: "Strict"}),
        ));
        assert_eq!(
            findings
                .iter()
                .map(|finding| finding.level)
                .collect::<Vec<_>>(),
            [Level::Problem, Level::Warning]
        );
        assert_eq!(
            (findings[0].details.len(), findings[1].details.as_slice()),
            (2, &["shop/p: \"enabled\"".to_owned()][..])
        );
        assert!(
            labels_and_annotations(&facts(
                vec![],
                json!({INJECT: "enabled", INBOUND: "strict"})
            ))
            .is_empty()
        );
    }

    #[test]
    fn reports_why_a_proxy_is_not_ready_after_the_timeout() {
        let state = |state: Value| {
            let mut status = ready();
            status["ready"] = json!(false);
            status["state"] = state;
            not_ready_reason(&meshed_pod("p", status), NOW)
        };
        assert_eq!(not_ready_reason(&meshed_pod("p", ready()), NOW), None);
        assert_eq!(
            state(json!({"waiting": {"reason": "ImagePullBackOff"}})).as_deref(),
            Some("proxy is waiting: ImagePullBackOff")
        );
        assert_eq!(
            state(json!({"terminated": {"exitCode": 2}})).as_deref(),
            Some("proxy exited with code 2")
        );
        assert_eq!(
            state(json!({"running": {}})).as_deref(),
            Some("proxy is running but not ready")
        );
        assert_eq!(
            state(json!({"waiting": {"reason": "PodInitializing"}})).as_deref(),
            Some("proxy has not started")
        );
        let mut young = meshed_pod(
            "p",
            json!({"name": "proxy", "ready": false, "restartCount": 0, "image": "", "imageID": ""}),
        );
        young.metadata.creation_timestamp = None;
        assert_eq!(not_ready_reason(&young, NOW), None);
    }
}
