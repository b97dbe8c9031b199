//! Checks of what users set: labels of namespaces, annotations of pods, and the exemptions of
//! strict pods. Pure.

use diy_mesh_injector::annotations::{self, INBOUND, INJECT, PREFIX, STATUS};
use diy_mesh_injector::settings::OUTBOUND_UDP;
use diy_mesh_model::sidecar::{OutboundUdp, Settings};
use k8s_openapi::api::core::v1::Namespace;
use kube::ResourceExt;

use super::facts::Facts;
use super::injection::enabled;
use super::{Finding, Findings, count};
use crate::pods::{
    Pod, annotation, argument, init_container, is_active, is_injected, meshed, name, proxy,
};

/// The labels of namespaces and the annotations of pods are known, valid and in effect.
pub(super) fn labels_and_annotations(facts: &Facts) -> Findings<'_> {
    let mut findings = Vec::new();
    if let Ok(namespaces) = &facts.namespaces {
        findings.extend(invalid_labels(namespaces));
    }
    if let Ok(pods) = &facts.pods {
        findings.extend(invalid_inject_annotations(pods));
        findings.extend(unknown_annotations(pods));
        findings.extend(changed_udp_annotations(pods));
        if let Ok(namespaces) = &facts.namespaces {
            findings.extend(ineffective_annotations(pods, namespaces));
        }
    }
    Ok(findings)
}

fn invalid_labels(namespaces: &[Namespace]) -> Option<Finding> {
    let values = [
        (INJECT, &["enabled", "disabled"][..]),
        (INBOUND, &["strict", "permissive"]),
    ];
    let invalid = |namespace: &Namespace| -> Vec<String> {
        let labels = namespace.labels().iter();
        let invalid = labels.filter(|(label, value)| {
            let known = values.iter().find(|(known, _)| known == label);
            label.starts_with(PREFIX)
                && known.is_none_or(|(_, known)| !known.contains(&value.as_str()))
        });
        let name = namespace.name_any();
        invalid
            .map(|(label, value)| format!("{name}: {label}: {value:?}"))
            .collect()
    };
    let invalid: Vec<String> = namespaces.iter().flat_map(invalid).collect();
    let advice = format!(
        "valid labels are {INJECT}: enabled or disabled, and {INBOUND}: strict or permissive"
    );
    let finding = Finding::problem("with an invalid label, which has no effect", advice);
    finding.about(invalid, "namespace", "namespaces")
}

fn invalid_inject_annotations(pods: &[Pod]) -> Option<Finding> {
    let value = |pod: &Pod| {
        annotation(pod, INJECT)
            .filter(|value| {
                !value.eq_ignore_ascii_case("true") && !value.eq_ignore_ascii_case("false")
            })
            .map(|value| format!("{}: {value:?}", name(pod)))
    };
    let invalid = active(pods).filter_map(value);
    warning(
        invalid,
        &format!("whose annotation {INJECT} is neither \"true\" nor \"false\""),
        "correct spec.template.metadata.annotations of the workload",
    )
}

fn unknown_annotations(pods: &[Pod]) -> Option<Finding> {
    let unknown = |pod: &Pod| {
        let mut names = pod.annotations().keys();
        let unknown = names.find(|name| annotations::is_unknown(name))?;
        Some(format!("{}: {unknown}", name(pod)))
    };
    warning(
        active(pods).filter_map(unknown),
        "with an unknown annotation of the mesh, which has no effect",
        "correct the name: docs/reference/annotations.md lists the annotations",
    )
}

/// Pods whose spec has another value than their annotation, which has changed since.
fn changed_udp_annotations(pods: &[Pod]) -> Option<Finding> {
    let changed = |pod: &Pod| {
        let init = init_container(pod, "proxy-init")?;
        let arguments = init.args.iter().flatten().map(String::as_str);
        let created = OutboundUdp::of_arguments(arguments);
        let default = OutboundUdp::default().to_string();
        let now = annotation(pod, OUTBOUND_UDP).unwrap_or(&default);
        let is_changed = now.trim().parse() != Ok(created);
        is_changed.then(|| {
            let name = name(pod);
            format!("{name}: the annotation is {now}, and the pod was created with {created}")
        })
    };
    warning(
        meshed(pods).filter_map(changed),
        &format!("with a change of {OUTBOUND_UDP}, which has no effect until they are recreated"),
        "kubectl rollout restart (delete and create single pods)",
    )
}

/// Settings of pods that do not request injection, such as `inbound` without `inject`.
fn ineffective_annotations(pods: &[Pod], namespaces: &[Namespace]) -> Option<Finding> {
    let enabled = enabled(namespaces);
    let ineffective = |pod: &Pod| {
        let mut names = pod.annotations().keys();
        let setting = names.find(|name| {
            name.starts_with(PREFIX) && *name != STATUS && !annotations::is_unknown(name)
        })?;
        let is_outside = annotation(pod, INJECT).is_none()
            && !is_injected(pod)
            && !enabled.contains(&pod.namespace().unwrap_or_default());
        is_outside.then(|| format!("{}: {setting}", name(pod)))
    };
    warning(
        active(pods).filter_map(ineffective),
        "with annotations of the mesh that does not request injection",
        &format!("add {INJECT}: \"true\" to the pods, or remove the annotations"),
    )
}

fn active(pods: &[Pod]) -> impl Iterator<Item = &Pod> {
    pods.iter().filter(|pod| is_active(pod))
}

/// A warning about pods, unless there are none. `what` completes the sentence "N pods ...".
fn warning(details: impl Iterator<Item = String>, what: &str, advice: &str) -> Option<Finding> {
    Finding::warning(what, advice).about(details.collect(), "pod", "pods")
}

/// The parts of strict pods that unauthenticated callers reach.
pub(super) fn strict(facts: &Facts) -> Findings<'_> {
    let pods = facts.pods.as_deref().unwrap_or_default();
    let strict: Vec<&Pod> = meshed(pods).filter(|pod| is_strict(pod)).collect();
    if strict.is_empty() {
        return Ok(Vec::new());
    }
    let text = format!(
        "{} callers outside the mesh, except for the proxy's admin port and these exemptions",
        count(strict.len(), "strict pod rejects", "strict pods reject")
    );
    let exemptions = strict.into_iter().filter_map(exemptions);
    Ok(vec![Finding::ok(text).with_details(exemptions)])
}

fn is_strict(pod: &Pod) -> bool {
    let arguments = proxy(pod)
        .into_iter()
        .flat_map(|proxy| proxy.args.iter().flatten());
    Settings::of_arguments(arguments.map(String::as_str)).strict
}

/// The ports of a strict pod that bypass its proxy, and the probes and hooks that every caller of
/// the admin port can start.
fn exemptions(pod: &Pod) -> Option<String> {
    let skipped = init_container(pod, "proxy-init")
        .and_then(|init| argument(init, "--skip-inbound-ports"))
        .map(|ports| format!("ports {ports} bypass the proxy"));
    let probes = proxy(pod)
        .into_iter()
        .flat_map(|proxy| proxy.args.iter().flatten())
        .filter(|argument| argument.starts_with("--kubelet-probe="))
        .count();
    let probes = (probes > 0).then(|| {
        let probes = count(probes, "probe or hook", "probes or hooks");
        format!("all clients can start {probes} at the admin port")
    });
    let exemptions: Vec<String> = skipped.into_iter().chain(probes).collect();
    (!exemptions.is_empty()).then(|| format!("{}: {}", name(pod), exemptions.join("; ")))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::{
        Level,
        facts::testing::{facts, meshed as meshed_pod, object, pod, ready},
    };
    use super::*;

    #[test]
    fn reports_invalid_labels_and_annotations() {
        let findings = labels_and_annotations(&facts(
            vec![pod("p", json!({INJECT: "enabled"}))],
            json!({INJECT: "true", INBOUND: "Strict", "diy-service-mesh/inbund": "strict", "app": "x"}),
        )).unwrap();
        assert_eq!(
            findings
                .iter()
                .map(|finding| finding.level)
                .collect::<Vec<_>>(),
            [Level::Problem, Level::Warning]
        );
        assert_eq!(
            (findings[0].details.len(), findings[1].details.as_slice()),
            (3, &["shop/p: \"enabled\"".to_owned()][..])
        );
        assert!(
            labels_and_annotations(&facts(
                vec![],
                json!({INJECT: "enabled", INBOUND: "strict"})
            ))
            .unwrap()
            .is_empty()
        );
    }

    #[test]
    fn warns_of_unknown_annotations() {
        let mut typo = meshed_pod("typo", ready());
        typo.annotations_mut()
            .insert("diy-service-mesh/inbund".into(), "strict".into());
        let pods = vec![typo, meshed_pod("right", ready())];
        let findings = labels_and_annotations(&facts(pods, json!({}))).unwrap();
        assert_eq!((findings.len(), findings[0].level), (1, Level::Warning));
        assert_eq!(findings[0].details, ["shop/typo: diy-service-mesh/inbund"]);
    }

    #[test]
    fn warns_of_changes_of_outbound_udp_until_the_restart() {
        let pod = |name: &str, annotation: Option<&str>, argument: &str| {
            let mut pod = meshed_pod(name, ready());
            let containers = &mut pod.spec.as_mut().unwrap().init_containers;
            let init = json!({"name": "proxy-init", "args": ["--proxy-uid=1337", argument]});
            containers.as_mut().unwrap().push(object(init));
            let annotation = annotation.map(|value| (OUTBOUND_UDP.into(), value.into()));
            pod.annotations_mut().extend(annotation);
            pod
        };
        let (none, dns) = ("--skip-outbound-ports=25", "--outbound-udp=dns");
        let pods = vec![
            pod("open", None, none),
            pod("also-open", Some("all"), none),
            pod("closed", Some(" DNS"), dns),
            pod("web", Some("dns"), none),
            pod("opened", Some("all"), dns),
            pod("removed", None, dns),
            pod("invalid", Some("none"), none),
        ];
        let findings = labels_and_annotations(&facts(pods, json!({}))).unwrap();
        assert_eq!((findings.len(), findings[0].level), (1, Level::Warning));
        let text = "4 pods with a change of diy-service-mesh/outbound-udp, which has no effect until they are recreated";
        assert_eq!(findings[0].text, text);
        assert_eq!(
            findings[0].details,
            [
                "shop/web: the annotation is dns, and the pod was created with all",
                "shop/opened: the annotation is all, and the pod was created with dns",
                "shop/removed: the annotation is all, and the pod was created with dns",
                "shop/invalid: the annotation is none, and the pod was created with all",
            ]
        );
    }

    #[test]
    fn warns_of_settings_without_injection() {
        let pods = || {
            vec![
                pod("p", json!({INBOUND: "strict"})),
                pod("excluded", json!({INBOUND: "strict", INJECT: "false"})),
            ]
        };
        let findings = labels_and_annotations(&facts(pods(), json!({}))).unwrap();
        assert_eq!((findings.len(), findings[0].level), (1, Level::Warning));
        assert_eq!(findings[0].details, [format!("shop/p: {INBOUND}")]);
        let enabled = facts(pods(), json!({INJECT: "enabled"}));
        assert_eq!(labels_and_annotations(&enabled).unwrap(), []);
    }

    #[test]
    fn lists_exemptions_of_strict_pods() {
        let pod = |name: &str, arguments: Value| {
            let mut pod = meshed_pod(name, ready());
            let containers = &mut pod.spec.as_mut().unwrap().init_containers.as_mut().unwrap();
            containers[0].args = Some(object(arguments));
            containers.push(object(
                json!({"name": "proxy-init", "args": ["--skip-inbound-ports=25,9000-9100"]}),
            ));
            pod
        };
        let pods = vec![
            pod(
                "p",
                json!([
                    "--settings={\"strict\":true}",
                    "--kubelet-probe={}",
                    "--kubelet-probe={}"
                ]),
            ),
            pod("permissive", json!(["--inbound=permissive"])),
        ];
        let findings = strict(&facts(pods, json!({}))).unwrap();
        assert_eq!((findings.len(), findings[0].level), (1, Level::Ok));
        assert_eq!(
            findings[0].details,
            [
                "shop/p: ports 25,9000-9100 bypass the proxy; all clients can start 2 probes or hooks at the admin port"
            ]
        );
        assert_eq!(
            strict(&facts(vec![meshed_pod("p", ready())], json!({}))).unwrap(),
            []
        );
    }
}
