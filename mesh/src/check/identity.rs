//! Identity: the CA, a rotation that does not get on, the roots in the namespaces, the workloads' certificates and clocks. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Finding, certificates, count,
    facts::{Facts, ROOTS},
    pods,
};
use crate::{
    identity::status::{Authority, Mesh, is_steady, made, meaning},
    time::span,
};

/// A phase of a rotation may last this long before it is worth a look, in seconds.
const LONG_PHASE: u64 = 60 * 60;
/// Certificates allow clocks to differ by five minutes, in milliseconds.
const WRONG_CLOCK: i64 = 5 * 60 * 1000;
const ODD_CLOCK: i64 = 30 * 1000;

/// There is a CA, and it has a while to live.
pub(super) fn authority(facts: &Facts) -> Vec<Finding> {
    const CHECK: &str = "authority";
    let mesh = match &facts.identity {
        Err(why) => return vec![Finding::unknown(CHECK, why)],
        Ok(mesh) => mesh,
    };
    let mut findings = Vec::new();
    if !mesh.problems.is_empty() {
        let advice = "what was read before stays in force, and new certificates may not be possible: put right what the message says";
        let text = "the mesh's certificate authority cannot be read or used";
        findings.push(
            Finding::problem(CHECK, text, advice).naming(
                mesh.problems
                    .iter()
                    .map(|(name, problem)| format!("{name}: {problem}")),
            ),
        );
    }
    if !mesh.silent.is_empty() {
        let silent = mesh
            .silent
            .iter()
            .map(|(name, why)| format!("{name}: {why}"));
        findings.push(
            Finding::warning(
                CHECK,
                "not every controller answers",
                "kubectl get pods shows whether they are ready",
            )
            .naming(silent),
        );
    }
    match &mesh.issuer {
        None if mesh.problems.is_empty() => {
            findings.push(Finding::problem(
                CHECK,
                "the mesh has no certificate authority",
                "the controller makes it when it starts; its log says why not",
            ));
        }
        None => {}
        Some(issuer) => {
            let current = mesh.roots.iter().filter(|root| root.role == "current");
            let ends = std::iter::once(("the CA that signs", issuer))
                .chain(current.map(|root| ("a trust root", root)));
            findings
                .extend(ends.filter_map(|(what, authority)| ends_soon(what, authority, facts.now)));
            if findings.is_empty() {
                let left = issuer.not_after.saturating_sub(facts.now);
                let text = format!(
                    "{} signs for {} and has {} left",
                    issuer.subject,
                    mesh.trust_domain,
                    span(left)
                );
                findings.push(Finding::ok(CHECK, text));
            }
        }
    }
    findings
}

fn ends_soon(what: &str, authority: &Authority, now: u64) -> Option<Finding> {
    const CHECK: &str = "authority";
    let (life, left) = (
        authority.not_after.saturating_sub(made(authority)),
        authority.not_after.saturating_sub(now),
    );
    let advice = if authority.own {
        "the mesh rotates it by itself at two thirds of its life: `mesh identity` shows on whom it waits; `mesh rotate-root` begins now"
    } else {
        "it is your own: put its successor into Secret diy-service-mesh-ca (tls.crt, tls.key, ca.crt), and the mesh moves to it"
    };
    match left {
        0 => Some(Finding::problem(
            CHECK,
            format!(
                "{what} ({}) has ended: nothing in the mesh is trusted any more",
                authority.subject
            ),
            advice,
        )),
        _ if left < life / 3 => Some(Finding::warning(
            CHECK,
            format!("{what} ({}) ends in {}", authority.subject, span(left)),
            advice,
        )),
        _ => None,
    }
}

/// A rotation gets on.
pub(super) fn rotation(facts: &Facts) -> Vec<Finding> {
    const CHECK: &str = "rotation";
    let Ok(mesh) = &facts.identity else {
        return Vec::new();
    };
    let rotation = &mesh.rotation;
    if mesh.issuer.is_none() {
        return Vec::new();
    }
    if is_steady(rotation) {
        return vec![Finding::ok(CHECK, meaning(rotation))];
    }
    let lasts = facts.now.saturating_sub(rotation.since);
    let text = format!(
        "{} for {}: {}",
        rotation.phase,
        span(lasts),
        meaning(rotation)
    );
    if lasts < LONG_PHASE || rotation.waiting.is_empty() {
        return vec![Finding::ok(CHECK, text)];
    }
    let advice = "look after those that it waits for (kubectl logs -c proxy; delete what is not needed); `mesh rotate-root --abandon` goes back";
    let waiting = rotation
        .waiting
        .iter()
        .map(|whom| format!("waits for {whom}"));
    vec![Finding::warning(CHECK, text, advice).naming(waiting)]
}

/// Every namespace with meshed pods holds the roots that are in force.
pub(super) fn roots(facts: &Facts) -> Vec<Finding> {
    const CHECK: &str = "roots";
    let (pods, maps) = match (&facts.pods, &facts.roots) {
        (Ok(pods), Ok(maps)) => (pods, maps),
        (Err(why), _) | (_, Err(why)) => return vec![Finding::unknown(CHECK, why)],
    };
    let held: BTreeMap<&str, &str> = maps
        .iter()
        .filter_map(|map| {
            Some((
                map.metadata.namespace.as_deref()?,
                map.data.as_ref()?.get("roots.pem")?.as_str(),
            ))
        })
        .collect();
    let needed: BTreeSet<&str> = pods::meshed(pods)
        .filter_map(|pod| pod.metadata.namespace.as_deref())
        .collect();
    let (mut missing, mut old) = (Vec::new(), Vec::new());
    for namespace in &needed {
        match held.get(namespace) {
            None => missing.push((*namespace).to_owned()),
            Some(pem)
                if facts
                    .identity
                    .as_ref()
                    .is_ok_and(|mesh| lacks_a_root(pem, mesh)) =>
            {
                old.push((*namespace).to_owned())
            }
            Some(_) => {}
        }
    }
    let mut findings = Vec::new();
    let advice = "the controller keeps it there: its log says why it cannot (kubectl logs -n service-mesh deployment/controller)";
    if !missing.is_empty() {
        let text = format!(
            "{} without ConfigMap {ROOTS}: new pods of the mesh wait there",
            count(missing.len(), "namespace", "namespaces")
        );
        findings.push(Finding::problem(CHECK, text, advice).naming(missing));
    }
    if !old.is_empty() {
        let text = format!(
            "{} whose ConfigMap {ROOTS} lacks a root that is in force",
            count(old.len(), "namespace", "namespaces")
        );
        findings.push(Finding::problem(CHECK, text, advice).naming(old));
    }
    if findings.is_empty() {
        let text = format!(
            "{} with meshed pods, each with the mesh's roots",
            count(needed.len(), "namespace", "namespaces")
        );
        findings.push(Finding::ok(CHECK, text));
    }
    findings
}

fn lacks_a_root(pem: &str, mesh: &Mesh) -> bool {
    let held = certificates::fingerprints(pem.as_bytes());
    mesh.roots.iter().any(|root| {
        !held
            .iter()
            .any(|fingerprint| fingerprint.eq_ignore_ascii_case(&root.fingerprint))
    })
}

/// Every meshed pod is connected, and has a certificate that will do.
pub(super) fn workloads(facts: &Facts) -> Vec<Finding> {
    const CHECK: &str = "certificates";
    let Ok(mesh) = &facts.identity else {
        return Vec::new();
    };
    let (mut ended, mut late, mut without) = (Vec::new(), Vec::new(), Vec::new());
    for workload in &mesh.workloads {
        let left = workload.certificate_not_after.saturating_sub(facts.now);
        let life = workload
            .certificate_not_after
            .saturating_sub(workload.certificate_issued_at);
        match () {
            () if !workload.has_certificate() => without.push(workload.name()),
            () if left == 0 => ended.push(workload.name()),
            () if left < life / 10 => {
                late.push(format!("{}: {} left", workload.name(), span(left)))
            }
            () => {}
        }
    }
    let mut findings = Vec::new();
    let log = "its log says why it cannot renew: kubectl logs -n NAMESPACE POD -c proxy";
    if !ended.is_empty() {
        let text = format!(
            "{} ended: nobody in the mesh takes their connections",
            count(ended.len(), "certificate has", "certificates have")
        );
        findings.push(Finding::problem(CHECK, text, log).naming(ended));
    }
    if !late.is_empty() {
        let text = format!(
            "{} been renewed by now",
            count(
                late.len(),
                "certificate should have",
                "certificates should have"
            )
        );
        findings.push(Finding::warning(CHECK, text, log).naming(late));
    }
    if let Ok(pods) = &facts.pods {
        let connected: BTreeSet<String> = mesh
            .workloads
            .iter()
            .map(|workload| workload.name())
            .collect();
        let ready = pods::meshed(pods)
            .filter(|pod| pods::is_proxy_ready(pod))
            .map(pods::name);
        let absent: Vec<String> = ready.filter(|name| !connected.contains(name)).collect();
        if !absent.is_empty() && mesh.silent.is_empty() {
            let text = format!(
                "{} connected to no controller: what they know goes on, and they hear of no changes",
                count(absent.len(), "proxy is", "proxies are")
            );
            let advice = "can they reach the controller (a NetworkPolicy?), and what do they say: kubectl logs -n NAMESPACE POD -c proxy";
            findings.push(Finding::warning(CHECK, text, advice).naming(absent));
        }
    }
    if findings.is_empty() {
        let more = if without.is_empty() {
            String::new()
        } else {
            format!(", {} on the way", without.len())
        };
        let valid = mesh.workloads.len() - without.len();
        findings.push(Finding::ok(
            CHECK,
            format!(
                "{} in force{more}",
                count(
                    valid,
                    "workload's certificate is",
                    "workloads' certificates are"
                )
            ),
        ));
    }
    findings
}

/// Clocks agree.
pub(super) fn clocks(facts: &Facts) -> Vec<Finding> {
    const CHECK: &str = "clocks";
    let Ok(mesh) = &facts.identity else {
        return Vec::new();
    };
    let off: Vec<_> = mesh
        .workloads
        .iter()
        .filter(|workload| workload.clock_skew_ms.abs() > ODD_CLOCK)
        .collect();
    if off.is_empty() {
        return vec![Finding::ok(
            CHECK,
            "the clocks of proxies and controllers agree",
        )];
    }
    let details = off.iter().map(|workload| {
        let direction = if workload.clock_skew_ms > 0 {
            "ahead"
        } else {
            "behind"
        };
        format!(
            "{}: {} {direction}",
            workload.name(),
            span(workload.clock_skew_ms.unsigned_abs() / 1000)
        )
    });
    let text = format!(
        "{} by more than 30 s; certificates allow five minutes",
        count(off.len(), "proxy's clock is off", "proxies' clocks are off")
    );
    let advice = "set the clocks of those pods' nodes right, and of the controllers' (chrony, systemd-timesyncd)";
    let wrong = off
        .iter()
        .any(|workload| workload.clock_skew_ms.abs() > WRONG_CLOCK);
    let finding = if wrong {
        Finding::problem(CHECK, text, advice)
    } else {
        Finding::warning(CHECK, text, advice)
    };
    vec![finding.naming(details)]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{
        Level,
        facts::testing::{NOW, meshed, object, ready, untold},
    };
    use super::*;
    use crate::identity::status::{Rotation, Workload};

    fn workload(left: u64, skew: i64) -> Workload {
        Workload {
            namespace: "shop".into(),
            pod: "till".into(),
            certificate_issued_at: NOW + left - 86_400,
            certificate_not_after: NOW + left,
            clock_skew_ms: skew,
            ..Workload::default()
        }
    }

    fn facts(left: u64, workload: Workload) -> Facts {
        let day = 86_400;
        let ca = Authority {
            role: "current".into(),
            subject: "CN=mesh".into(),
            own: true,
            not_before: NOW + left * day - 365 * day,
            not_after: NOW + left * day,
            fingerprint: "aa".into(),
            ..Authority::default()
        };
        let rotation = Rotation {
            phase: "steady".into(),
            ..Rotation::default()
        };
        let mesh = Mesh {
            issuer: Some(ca.clone()),
            roots: vec![ca],
            rotation,
            workloads: vec![workload],
            ..Mesh::default()
        };
        Facts {
            identity: Ok(mesh),
            pods: Ok(vec![meshed("till", ready())]),
            ..untold()
        }
    }

    fn level(findings: &[Finding]) -> Level {
        findings.iter().map(|finding| finding.level).max().unwrap()
    }

    #[test]
    fn an_authority_that_ends_is_told_in_time() {
        let told = |left| level(&authority(&facts(left, workload(3_600, 0))));
        assert_eq!(
            (told(300), told(100), told(0)),
            (Level::Ok, Level::Warning, Level::Problem)
        );
        let mut broken = facts(300, workload(3_600, 0));
        broken.identity.as_mut().unwrap().problems.insert(
            "controller-1".into(),
            "Secret a/b: tls.key is not the key of tls.crt".into(),
        );
        assert_eq!(level(&authority(&broken)), Level::Problem);
    }

    #[test]
    fn a_rotation_that_does_not_get_on_names_those_that_it_waits_for() {
        let mut facts = facts(300, workload(3_600, 0));
        assert_eq!(level(&rotation(&facts)), Level::Ok);
        let waiting = vec!["shop/till to trust the current roots".to_owned()];
        facts.identity.as_mut().unwrap().rotation = Rotation {
            phase: "announcing".into(),
            since: NOW - 60,
            waiting,
            ..Rotation::default()
        };
        assert_eq!(level(&rotation(&facts)), Level::Ok);
        facts.identity.as_mut().unwrap().rotation.since = NOW - 7_200;
        let finding = &rotation(&facts)[0];
        assert_eq!(
            (finding.level, finding.details.as_slice()),
            (
                Level::Warning,
                &["waits for shop/till to trust the current roots".to_owned()][..]
            )
        );
    }

    #[test]
    fn certificates_that_ended_or_are_late_and_proxies_that_are_away_are_told() {
        let told = |workload| level(&workloads(&facts(300, workload)));
        assert_eq!(
            (
                told(workload(40_000, 0)),
                told(workload(4_000, 0)),
                told(workload(0, 0))
            ),
            (Level::Ok, Level::Warning, Level::Problem)
        );
        let mut away = facts(300, workload(40_000, 0));
        away.identity.as_mut().unwrap().workloads.clear();
        let finding = &workloads(&away)[0];
        assert_eq!(
            (finding.level, finding.details.as_slice()),
            (Level::Warning, &["shop/till".to_owned()][..])
        );
    }

    #[test]
    fn clocks_are_compared() {
        let told = |skew| level(&clocks(&facts(300, workload(40_000, skew))));
        assert_eq!(
            (told(-500), told(-60_000), told(400_000)),
            (Level::Ok, Level::Warning, Level::Problem)
        );
    }

    #[test]
    fn a_namespace_without_the_roots_or_with_old_ones_is_named() {
        let with = |roots: serde_json::Value| {
            let mut facts = facts(300, workload(40_000, 0));
            facts.roots = Ok(roots
                .as_array()
                .unwrap()
                .iter()
                .map(|map| object(map.clone()))
                .collect());
            let finding = roots_finding(&facts);
            (finding.level, finding.text, finding.details)
        };
        let (level, text, details) = with(json!([]));
        assert_eq!(
            (level, details.as_slice()),
            (Level::Problem, &["shop".to_owned()][..])
        );
        assert!(text.contains("1 namespace without ConfigMap"), "{text}");
        let (level, text, _) = with(
            json!([{"metadata": {"namespace": "shop", "name": ROOTS}, "data": {"roots.pem": ""}}]),
        );
        assert!(
            level == Level::Problem && text.contains("lacks a root"),
            "{text}"
        );
    }

    fn roots_finding(facts: &Facts) -> Finding {
        super::roots(facts).remove(0)
    }
}
