//! Checks of pods: injection, readiness and restarts of proxies. Pure.

use std::collections::BTreeSet;

use diy_mesh_injector::annotations::INJECT;
use diy_mesh_injector::config::Settings;
use diy_mesh_injector::patch::{Candidate, NamespaceLabels, Verdict, decide};
use diy_mesh_model::json;
use k8s_openapi::api::core::v1::Namespace;
use kube::ResourceExt;
use serde_json::Value;
use serde_json::value::RawValue;

use super::{Finding, Findings, count, facts::Facts, or_ok};
use crate::pods::{Pod, READY_TIMEOUT, age, annotation, is_proxy_ready, meshed, name, status};
use crate::time::{format_duration, format_relative};

/// The namespaces that the webhook excludes, in addition to the namespace of the mesh.
const EXCLUDED_NAMESPACES: [&str; 3] = ["kube-system", "kube-public", "kube-node-lease"];
/// The period in which restarts of proxies are reported, in seconds.
const RESTART_PERIOD: u64 = 24 * 3600;

/// The namespaces that enable injection.
pub(super) fn enabled(namespaces: &[Namespace]) -> BTreeSet<String> {
    let is_enabled = |namespace: &&Namespace| {
        let value = namespace.labels().get(INJECT);
        value.is_some_and(|value| value == "enabled")
    };
    let enabled = namespaces.iter().filter(is_enabled);
    enabled.map(ResourceExt::name_any).collect()
}

/// Pods that request injection have a proxy.
pub(super) fn injected(facts: &Facts) -> Findings<'_> {
    let (pods, namespaces) = (facts.pods.as_ref()?, facts.namespaces.as_ref()?);
    let settings = Settings::of_mesh(&facts.namespace);
    let (mut missing, mut unsupported) = (Vec::new(), Vec::new());
    for pod in pods {
        let namespace = pod.namespace().unwrap_or_default();
        if EXCLUDED_NAMESPACES.contains(&&*namespace) || namespace == facts.namespace {
            continue;
        }
        let object = |text: &RawValue| json::parse::<Value>(text.get()).ok();
        let Some(object) = pod.text.as_deref().and_then(object) else {
            continue;
        };
        let own = namespaces.iter().find(|one| one.name_any() == namespace);
        let labels = own.map(|own| NamespaceLabels::of_metadata(&own.metadata));
        let candidate = Candidate {
            pod: &object,
            namespace: &namespace,
            labels: Ok(labels.unwrap_or_default()),
        };
        let is_annotated =
            || annotation(pod, INJECT).is_some_and(|value| value.eq_ignore_ascii_case("true"));
        match decide(&settings, candidate) {
            Verdict::Injected(_) | Verdict::Denied(_) => missing.push(name(pod)),
            // Such pods are expected in an enabled namespace, but not with the annotation.
            Verdict::Skipped(reason) if is_annotated() => {
                unsupported.push(format!("{}: {reason}", name(pod)));
            }
            _ => {}
        }
    }
    let text = "injection: the request or the webhook is newer than the pod";
    let advice = "recreate them: kubectl rollout restart (delete and create single pods)";
    let (one, many) = (
        "pod without a proxy requests",
        "pods without a proxy request",
    );
    let missing = Finding::problem(text, advice).about(missing, one, many);
    let advice = format!("remove the annotation {INJECT}");
    let finding = Finding::warning("injection and cannot have a proxy", advice);
    let unsupported = finding.about(unsupported, "pod requests", "pods request");
    let have = count(meshed(pods).count(), "pod has", "pods have");
    let text = format!("{have} a proxy, and no other pod requests one");
    Ok(or_ok([missing, unsupported], text))
}

/// Proxies are ready, and have not restarted.
pub(super) fn proxies(facts: &Facts) -> Findings<'_> {
    let Ok(pods) = &facts.pods else {
        return Ok(Vec::new());
    };
    let not_ready: Vec<String> = meshed(pods)
        .filter_map(|pod| {
            let reason = not_ready_reason(pod, facts.now)?;
            let own = facts.ready_pages.get(&name(pod)).map(|page| page.trim());
            let own = own.map_or(String::new(), |own| {
                format!(": {}", own.replace('\n', "; "))
            });
            Some(format!("{}: {reason}{own}", name(pod)))
        })
        .collect();
    let ready = meshed(pods).filter(|pod| is_proxy_ready(pod)).count();
    let advice = "see the log of the proxy (kubectl logs -n NAMESPACE POD -c proxy) and the events of the pod (kubectl describe)";
    let finding = Finding::problem("not ready", advice);
    let not_ready = finding.about(not_ready, "proxy is", "proxies are");
    let text = format!("{} ready", count(ready, "proxy is", "proxies are"));
    let mut findings = or_ok([not_ready], text);
    let restarted: Vec<String> = meshed(pods)
        .filter_map(|pod| Some(format!("{}: {}", name(pod), restarts(pod, facts.now)?)))
        .collect();
    let text = format!(
        "restarted in the last {}; each restart closes the connections of its pod",
        format_duration(RESTART_PERIOD)
    );
    let advice = "see the log before the restart: kubectl logs -n NAMESPACE POD -c proxy --previous; OOMKilled: increase diy-service-mesh/proxy-memory-limit";
    let finding = Finding::warning(text, advice);
    findings.extend(finding.about(restarted, "proxy has", "proxies have"));
    Ok(findings)
}

/// The pods whose proxies run and are not ready, although they are old enough.
pub(super) fn unready_proxies(pods: &[Pod], now: u64) -> impl Iterator<Item = &Pod> {
    meshed(pods).filter(move |pod| is_proxy_running(pod) && not_ready_reason(pod, now).is_some())
}

/// The restarts of a proxy, if the last one is within `RESTART_PERIOD`.
fn restarts(pod: &Pod, now: u64) -> Option<String> {
    let status = status(pod, "proxy").filter(|status| status.restart_count > 0)?;
    let last = status.last_state.as_ref()?.terminated.as_ref()?;
    let time = u64::try_from(last.finished_at.as_ref()?.0.as_second()).ok()?;
    let number = usize::try_from(status.restart_count).unwrap_or_default();
    (now.saturating_sub(time) <= RESTART_PERIOD).then(|| {
        format!(
            "{}, the last one {} ({}, exit code {})",
            count(number, "restart", "restarts"),
            format_relative(time, now),
            last.reason.as_deref().unwrap_or("no reason"),
            last.exit_code
        )
    })
}

fn is_proxy_running(pod: &Pod) -> bool {
    let state = status(pod, "proxy").and_then(|status| status.state.as_ref());
    state.is_some_and(|state| state.running.is_some())
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
        let waiting = state.waiting.as_ref();
        let waiting = waiting.and_then(|waiting| waiting.reason.as_deref());
        let is_ordinary = |reason: &&str| ["PodInitializing", "ContainerCreating"].contains(reason);
        if let Some(reason) = waiting.filter(|reason| !is_ordinary(reason)) {
            return Some(format!("{container} is waiting: {reason}"));
        }
        let exit_code = state.terminated.as_ref().map(|one| one.exit_code);
        if let Some(code) = exit_code.filter(|code| *code != 0) {
            return Some(format!("{container} exited with code {code}"));
        }
    }
    let state = if is_proxy_running(pod) {
        "proxy is running but not ready"
    } else {
        "proxy has not started"
    };
    (age(pod, now) > READY_TIMEOUT).then(|| state.into())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::super::{
        Level,
        facts::testing::{NOW, facts, meshed as meshed_pod, object, pod, ready},
    };
    use super::*;

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
            let findings = injected(&facts(pods(), labels)).unwrap();
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
        let pod = |name: &str, phase: &str, spec: Value| -> Pod {
            let annotations = json!({INJECT: "true"});
            let metadata = json!({"namespace": "shop", "name": name, "annotations": annotations});
            object(json!({"metadata": metadata, "spec": spec, "status": {"phase": phase}}))
        };
        let pods = vec![
            pod("host", "Running", json!({"hostNetwork": true})),
            pod("done", "Succeeded", json!({"hostNetwork": true})),
            pod(
                "other",
                "Running",
                json!({"initContainers": [{"name": "linkerd-init"}]}),
            ),
        ];
        let findings = injected(&facts(pods, json!({}))).unwrap();
        assert_eq!((findings.len(), findings[0].level), (1, Level::Warning));
        let reasons = [
            "shop/host: not injected: the pod uses the network of its node (hostNetwork)",
            "shop/other: not injected: the pod has init container \"linkerd-init\" of Linkerd",
        ];
        for (detail, reason) in findings[0].details.iter().zip(reasons) {
            assert!(detail.starts_with(reason), "{detail}");
        }
        assert_eq!(findings[0].details.len(), reasons.len());
        assert_eq!(
            injected(&facts(vec![], json!({}))).unwrap()[0].level,
            Level::Ok
        );
    }

    #[test]
    fn prints_the_reasons_of_the_proxy() {
        let mut status = ready();
        status["ready"] = json!(false);
        let page = "identity: no certificate\ndiscovery: not connected\n".to_owned();
        let findings = proxies(&Facts {
            ready_pages: BTreeMap::from([("shop/p".to_owned(), page)]),
            ..facts(vec![meshed_pod("p", status)], json!({}))
        })
        .unwrap();
        assert_eq!(
            findings[0].details,
            [
                "shop/p: proxy is running but not ready: identity: no certificate; discovery: not connected"
            ]
        );
    }

    #[test]
    fn page_of_a_hostile_proxy_controls_no_terminal() {
        let mut status = ready();
        status["ready"] = json!(false);
        let page = format!("\u{1b}[2J\rno problems found{}", "x".repeat(1024 * 1024));
        let findings = proxies(&Facts {
            ready_pages: BTreeMap::from([("shop/p".to_owned(), page)]),
            ..facts(vec![meshed_pod("p", status)], json!({}))
        })
        .unwrap();
        let detail = &findings[0].details[0];
        assert!(detail.contains("not ready: \\x1b[2J\\rno problems"));
        assert!(!detail.contains(char::is_control) && detail.len() < 3000);
    }

    #[test]
    fn warns_of_restarted_proxies() {
        let restarted = |finished: &str| {
            let mut status = ready();
            status["restartCount"] = json!(3);
            status["lastState"] = json!({"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": finished}});
            proxies(&facts(vec![meshed_pod("p", status)], json!({}))).unwrap()
        };
        // NOW is 2027-01-15T08:00:00Z.
        let findings = restarted("2027-01-15T07:00:00Z");
        assert_eq!(findings[1].level, Level::Warning);
        assert_eq!(
            findings[1].details,
            ["shop/p: 3 restarts, the last one 1 h ago (OOMKilled, exit code 137)"]
        );
        assert_eq!(restarted("2027-01-13T07:00:00Z").len(), 1);
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
