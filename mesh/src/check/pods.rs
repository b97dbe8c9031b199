//! Pods: those that ask for the mesh and are not in it, those whose proxy is not well, and wishes that cannot be understood. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Namespace, Pod};

use super::{Finding, count, facts::Facts};

const INJECT: &str = "diy-service-mesh/inject";
const INBOUND: &str = "diy-service-mesh/inbound";
const STATUS: &str = "diy-service-mesh/status";
/// Namespaces that the webhook leaves alone, beside the mesh's own.
const LEFT_ALONE: [&str; 3] = ["kube-system", "kube-public", "kube-node-lease"];
/// A proxy that has been there for so long should be ready, in seconds.
const PATIENCE: u64 = 60;

/// It has a proxy.
pub(super) fn is_injected(pod: &Pod) -> bool {
    annotation(pod, STATUS) == Some("injected")
}

/// The pods with a proxy that have not come to their end.
pub(super) fn meshed(pods: &[Pod]) -> impl Iterator<Item = &Pod> {
    pods.iter().filter(|pod| is_injected(pod) && is_alive(pod))
}

/// `namespace/name`.
pub(super) fn name(pod: &Pod) -> String {
    format!(
        "{}/{}",
        pod.metadata.namespace.as_deref().unwrap_or_default(),
        pod.metadata.name.as_deref().unwrap_or_default()
    )
}

/// The proxy of a pod.
pub(super) fn proxy(pod: &Pod) -> Option<&Container> {
    pod.spec
        .as_ref()?
        .init_containers
        .iter()
        .flatten()
        .find(|container| container.name == "proxy")
}

/// Its proxy says that it is ready.
pub(super) fn is_proxy_ready(pod: &Pod) -> bool {
    status(pod, "proxy").is_some_and(|status| status.ready)
}

fn annotation<'a>(pod: &'a Pod, name: &str) -> Option<&'a str> {
    pod.metadata
        .annotations
        .as_ref()?
        .get(name)
        .map(String::as_str)
}

fn is_alive(pod: &Pod) -> bool {
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

/// Annotations and labels say what the mesh understands.
pub(super) fn wishes(facts: &Facts) -> Vec<Finding> {
    const CHECK: &str = "wishes";
    let mut findings = Vec::new();
    if let Ok(namespaces) = &facts.namespaces {
        let values = [
            (INJECT, &["enabled", "disabled"][..]),
            (INBOUND, &["strict", "permissive"]),
        ];
        let unclear: Vec<String> = namespaces
            .iter()
            .flat_map(|namespace| {
                values
                    .iter()
                    .filter_map(|(label, known)| unclear(namespace, label, known))
            })
            .collect();
        if !unclear.is_empty() {
            let text = format!(
                "{} with a label that the mesh does not know, and that has no effect",
                count(unclear.len(), "namespace", "namespaces")
            );
            let advice = format!("the labels are {INJECT}: enabled and {INBOUND}: strict");
            findings.push(Finding::problem(CHECK, text, advice).naming(unclear));
        }
    }
    if let Ok(pods) = &facts.pods {
        let value = |pod: &Pod| {
            annotation(pod, INJECT)
                .filter(|value| !is(value, "true") && !is(value, "false"))
                .map(|value| format!("{}: {value:?}", name(pod)))
        };
        let unclear: Vec<String> = pods
            .iter()
            .filter(|pod| is_alive(pod))
            .filter_map(value)
            .collect();
        if !unclear.is_empty() {
            let text = format!(
                "{} whose annotation {INJECT} is neither \"true\" nor \"false\"",
                count(unclear.len(), "pod", "pods")
            );
            findings.push(
                Finding::warning(
                    CHECK,
                    text,
                    "correct it in the workload's spec.template.metadata.annotations",
                )
                .naming(unclear),
            );
        }
    }
    findings
}

fn unclear(namespace: &Namespace, label: &str, known: &[&str]) -> Option<String> {
    let value = namespace.metadata.labels.as_ref()?.get(label)?;
    let name = namespace.metadata.name.as_deref().unwrap_or_default();
    (!known.contains(&value.as_str())).then(|| format!("{name}: {label}: {value:?}"))
}

fn is(value: &str, word: &str) -> bool {
    value.eq_ignore_ascii_case(word)
}

/// Pods that ask for the mesh are in it.
pub(super) fn injected(facts: &Facts) -> Vec<Finding> {
    const CHECK: &str = "pods";
    let (pods, namespaces) = match (&facts.pods, &facts.namespaces) {
        (Ok(pods), Ok(namespaces)) => (pods, namespaces),
        (Err(why), _) | (_, Err(why)) => return vec![Finding::unknown(CHECK, why)],
    };
    let enabled: BTreeMap<&str, bool> = namespaces
        .iter()
        .map(|namespace| {
            let labels = namespace.metadata.labels.as_ref();
            let enabled = labels
                .and_then(|labels| labels.get(INJECT))
                .is_some_and(|value| value == "enabled");
            (
                namespace.metadata.name.as_deref().unwrap_or_default(),
                enabled,
            )
        })
        .collect();
    let (mut outside, mut unfit) = (Vec::new(), Vec::new());
    for pod in pods.iter().filter(|pod| is_alive(pod) && !is_injected(pod)) {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let asks = match annotation(pod, INJECT) {
            Some(value) => is(value, "true"),
            None => enabled.get(namespace).copied().unwrap_or(false),
        };
        if !asks || LEFT_ALONE.contains(&namespace) || namespace == facts.namespace {
            continue;
        }
        match unfit_because(pod) {
            None => outside.push(name(pod)),
            // A whole namespace that asks may have such pods; one that asks itself is told.
            Some(why) if annotation(pod, INJECT).is_some() => {
                unfit.push(format!("{}: {why}", name(pod)))
            }
            Some(_) => {}
        }
    }
    let mut findings = Vec::new();
    if !outside.is_empty() {
        let text = format!(
            "{} for the mesh and not in it: {}",
            count(outside.len(), "pod that asks", "pods that ask"),
            "they were made before they asked, or past the webhook"
        );
        let advice = "make them anew: kubectl rollout restart their workload (a single pod: delete it and create it again)";
        findings.push(Finding::problem(CHECK, text, advice).naming(outside));
    }
    if !unfit.is_empty() {
        let text = format!(
            "{} for the mesh and cannot be in it",
            count(unfit.len(), "pod that asks", "pods that ask")
        );
        findings.push(
            Finding::warning(
                CHECK,
                text,
                format!("take the annotation {INJECT} off them"),
            )
            .naming(unfit),
        );
    }
    if findings.is_empty() {
        findings.push(Finding::ok(
            CHECK,
            format!(
                "{} in the mesh, and no other asks for it",
                count(meshed(pods).count(), "pod is", "pods are")
            ),
        ));
    }
    findings
}

fn unfit_because(pod: &Pod) -> Option<&'static str> {
    let spec = pod.spec.as_ref()?;
    if spec.host_network == Some(true) {
        return Some("it uses the host's network");
    }
    if annotation(pod, "kubernetes.io/config.mirror").is_some() {
        return Some("it is static: its kubelet reads it from a file");
    }
    spec.os
        .as_ref()
        .filter(|os| os.name == "windows")
        .map(|_| "it runs on Windows")
}

/// Proxies are up.
pub(super) fn proxies(facts: &Facts) -> Vec<Finding> {
    const CHECK: &str = "proxies";
    let Ok(pods) = &facts.pods else {
        return Vec::new();
    };
    let ill: Vec<String> = meshed(pods)
        .filter_map(|pod| Some(format!("{}: {}", name(pod), illness(pod, facts.now)?)))
        .collect();
    let ready = meshed(pods).filter(|pod| is_proxy_ready(pod)).count();
    vec![if ill.is_empty() {
        Finding::ok(
            CHECK,
            format!("{} ready", count(ready, "proxy is", "proxies are")),
        )
    } else {
        let text = format!("{} not ready", count(ill.len(), "proxy is", "proxies are"));
        let advice = "what a proxy lacks stands in its log: kubectl logs -n NAMESPACE POD -c proxy; before it starts: kubectl describe";
        Finding::problem(CHECK, text, advice).naming(ill)
    }]
}

/// Why a meshed pod's proxy is not ready, if it should be by now.
fn illness(pod: &Pod, now: u64) -> Option<String> {
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
            return Some(format!("{container} waits: {waiting}"));
        }
        if let Some(ended) = state
            .terminated
            .as_ref()
            .filter(|ended| ended.exit_code != 0)
        {
            return Some(format!(
                "{container} ended with exit code {}",
                ended.exit_code
            ));
        }
    }
    let made = pod
        .metadata
        .creation_timestamp
        .as_ref()
        .and_then(|time| u64::try_from(time.0.as_second()).ok())
        .unwrap_or(now);
    let has_started = status(pod, "proxy").is_some_and(|status| {
        status
            .state
            .as_ref()
            .is_some_and(|state| state.running.is_some())
    });
    let what = if has_started {
        "it runs, and is not ready"
    } else {
        "it has not started"
    };
    (now.saturating_sub(made) > PATIENCE).then(|| what.into())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::{
        Level,
        facts::testing::{NOW, meshed as meshed_pod, object, pod, ready, untold},
    };
    use super::*;

    fn facts(pods: Vec<Pod>, labels: Value) -> Facts {
        Facts {
            pods: Ok(pods),
            namespaces: Ok(vec![object(
                json!({"metadata": {"name": "shop", "labels": labels}}),
            )]),
            ..untold()
        }
    }

    #[test]
    fn pods_that_ask_and_are_not_in_the_mesh_are_named() {
        let pods = || {
            vec![
                meshed_pod("in", ready()),
                pod("asks", json!({INJECT: "True"})),
                pod("silent", json!({})),
                pod("not", json!({INJECT: "false"})),
            ]
        };
        let outside = |labels: Value| {
            let findings = injected(&facts(pods(), labels));
            (findings[0].level, findings[0].details.clone())
        };
        assert_eq!(
            outside(json!({})),
            (Level::Problem, vec!["shop/asks".to_owned()])
        );
        assert_eq!(
            outside(json!({INJECT: "enabled"})),
            (
                Level::Problem,
                vec!["shop/asks".to_owned(), "shop/silent".to_owned()]
            )
        );
    }

    #[test]
    fn pods_that_cannot_be_in_the_mesh_and_those_that_ended_are_no_problem() {
        let mut host = pod("host", json!({INJECT: "true"}));
        host.spec.as_mut().unwrap().host_network = Some(true);
        let mut done = pod("done", json!({INJECT: "true"}));
        done.status.as_mut().unwrap().phase = Some("Succeeded".into());
        let findings = injected(&facts(vec![host, done], json!({})));
        assert_eq!((findings.len(), findings[0].level), (1, Level::Warning));
        assert_eq!(
            findings[0].details,
            ["shop/host: it uses the host's network"]
        );
        assert_eq!(injected(&facts(vec![], json!({})))[0].level, Level::Ok);
    }

    #[test]
    fn labels_and_annotations_that_mean_nothing_are_told() {
        let findings = wishes(&facts(
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
            wishes(&facts(
                vec![],
                json!({INJECT: "enabled", INBOUND: "strict"})
            ))
            .is_empty()
        );
    }

    #[test]
    fn a_proxy_that_is_not_ready_is_told_with_its_reason_once_it_should_be() {
        let state = |state: Value| {
            let mut status = ready();
            status["ready"] = json!(false);
            status["state"] = state;
            illness(&meshed_pod("p", status), NOW)
        };
        assert_eq!(illness(&meshed_pod("p", ready()), NOW), None);
        assert_eq!(
            state(json!({"waiting": {"reason": "ImagePullBackOff"}})).as_deref(),
            Some("proxy waits: ImagePullBackOff")
        );
        assert_eq!(
            state(json!({"terminated": {"exitCode": 2}})).as_deref(),
            Some("proxy ended with exit code 2")
        );
        assert_eq!(
            state(json!({"running": {}})).as_deref(),
            Some("it runs, and is not ready")
        );
        assert_eq!(
            state(json!({"waiting": {"reason": "PodInitializing"}})).as_deref(),
            Some("it has not started")
        );
        let mut young = meshed_pod(
            "p",
            json!({"name": "proxy", "ready": false, "restartCount": 0, "image": "", "imageID": ""}),
        );
        young.metadata.creation_timestamp = None;
        assert_eq!(illness(&young, NOW), None);
    }
}
