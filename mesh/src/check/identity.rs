//! Checks of the certificate authority, root rotation, trust roots, workload certificates and
//! clocks. Pure.

use std::collections::{BTreeMap, BTreeSet};

use diy_mesh_injector::containers::{ROOTS, ROOTS_CONFIG_MAP};
use k8s_openapi::api::core::v1::ConfigMap;

use super::facts::Facts;
use super::{Finding, Findings, certificates, count, or_ok};
use crate::pods;
use crate::{
    identity::status::{
        Authority, CLOCK_SKEW_WARNING_MS, Mesh, describe_phase, describe_waiting, has_certificate,
        is_steady, workload_name,
    },
    time::format_duration,
};

/// A rotation phase that lasts longer results in a warning, in seconds.
const MAX_PHASE_DURATION: u64 = 60 * 60;
/// A proxy that is older than the CA and not connected for this time has another cause, in seconds.
const ROOTS_UPDATE_TIMEOUT: u64 = 10 * 60;
/// The clock skew that certificates tolerate, in milliseconds.
const MAX_CLOCK_SKEW_MS: i64 = 5 * 60 * 1000;

/// A certificate authority exists and does not expire soon.
pub(super) fn authority(facts: &Facts) -> Findings<'_> {
    let mesh = facts.identity.as_ref()?;
    let mut findings = Vec::new();
    let describe = |(name, reason): (&String, &String)| format!("{name}: {reason}");
    let text = "the certificate authority cannot be read or used";
    let advice = "the last valid state stays in effect, but certificates may not be issued: correct the reported error";
    let problems = mesh.problems.iter().map(describe);
    findings.extend(Finding::problem(text, advice).if_any(problems));
    let text = "some controllers do not respond";
    let advice = "check that they are ready: kubectl get pods";
    let unreachable = mesh.unreachable.iter().map(describe);
    findings.extend(Finding::warning(text, advice).if_any(unreachable));
    match &mesh.issuer {
        None if mesh.problems.is_empty() => {
            findings.push(Finding::problem(
                "the mesh has no certificate authority",
                "the controller creates it at startup: see its log",
            ));
        }
        None => {}
        Some(issuer) => {
            let current = mesh.roots.iter().filter(|root| root.role == "current");
            let authorities = std::iter::once(("the issuing CA", issuer))
                .chain(current.map(|root| ("a trust root", root)));
            findings.extend(
                authorities
                    .filter_map(|(name, authority)| expires_soon(name, authority, facts.now)),
            );
            if findings.is_empty() {
                let remaining = issuer.not_after.saturating_sub(facts.now);
                let text = format!(
                    "{} issues certificates for {} and expires in {}",
                    issuer.subject,
                    mesh.trust_domain,
                    format_duration(remaining)
                );
                findings.push(Finding::ok(text));
            }
        }
    }
    Ok(findings)
}

fn expires_soon(name: &str, authority: &Authority, now: u64) -> Option<Finding> {
    let (lifetime, remaining) = (
        authority.not_after.saturating_sub(authority.issued_at),
        authority.not_after.saturating_sub(now),
    );
    let advice = if authority.own {
        "the controller rotates it at two thirds of its lifetime: see `mesh identity`, or start a rotation with `mesh rotate-root`"
    } else {
        "replace your own CA in Secret diy-service-mesh-ca (tls.crt, tls.key, ca.crt): the controller rotates to it"
    };
    let name = format!("{name} ({})", authority.subject);
    match remaining {
        0 => {
            let text = format!("{name} has expired: all certificates of the mesh are invalid");
            Some(Finding::problem(text, advice))
        }
        _ if remaining < lifetime / 3 => {
            let text = format!("{name} expires in {}", format_duration(remaining));
            Some(Finding::warning(text, advice))
        }
        _ => None,
    }
}

/// A root rotation makes progress.
pub(super) fn rotation(facts: &Facts) -> Findings<'_> {
    let mesh = match &facts.identity {
        Ok(mesh) if mesh.issuer.is_some() => mesh,
        _ => return Ok(Vec::new()),
    };
    let rotation = &mesh.rotation;
    if is_steady(rotation) {
        return Ok(vec![Finding::ok(describe_phase(rotation))]);
    }
    let elapsed = facts.now.saturating_sub(rotation.since);
    let text = format!(
        "{} for {}: {}",
        rotation.phase,
        format_duration(elapsed),
        describe_phase(rotation)
    );
    if elapsed < MAX_PHASE_DURATION || rotation.waiting.is_empty() {
        return Ok(vec![Finding::ok(text)]);
    }
    let advice = "see the logs of the listed pods (kubectl logs -c proxy), or return to the previous root with `mesh rotate-root --abandon`";
    let waiting = describe_waiting(rotation);
    Ok(vec![Finding::warning(text, advice).with_details(waiting)])
}

/// Every namespace with meshed pods contains the current trust roots.
pub(super) fn roots(facts: &Facts) -> Findings<'_> {
    let (pods, maps) = (facts.pods.as_ref()?, facts.roots.as_ref()?);
    let published: BTreeMap<&str, &ConfigMap> = maps
        .iter()
        .filter_map(|map| Some((map.metadata.namespace.as_deref()?, map)))
        .collect();
    let mut needed: BTreeMap<&str, u64> = BTreeMap::new();
    for pod in pods::meshed(pods) {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let age = needed.entry(namespace).or_default();
        *age = pods::age(pod, facts.now).max(*age);
    }
    let (mut missing, mut outdated) = (Vec::new(), Vec::new());
    for (namespace, age) in &needed {
        match (published.get(namespace), &facts.identity) {
            // The controller writes the ConfigMap of a namespace after its first meshed pod.
            (None, _) if *age <= pods::READY_TIMEOUT => {}
            (None, _) => missing.push((*namespace).to_owned()),
            (Some(map), Ok(mesh)) if lacks_current_root(map, mesh) => {
                outdated.push(describe_outdated(namespace, map))
            }
            (Some(_), _) => {}
        }
    }
    let advice = "the controller writes it: see its log (kubectl logs -n service-mesh deployment/controller)";
    let text = format!("without ConfigMap {ROOTS_CONFIG_MAP}: new meshed pods do not start there");
    let finding = Finding::problem(text, advice);
    let missing = finding.about(missing, "namespace", "namespaces");
    let text = format!(
        "whose ConfigMap {ROOTS_CONFIG_MAP} lacks a current root: new meshed pods do not start there"
    );
    let finding = Finding::problem(text, advice);
    let outdated = finding.about(outdated, "namespace", "namespaces");
    if missing.is_none() && outdated.is_none() {
        facts.identity.as_ref()?;
    }
    let namespaces = count(needed.len(), "namespace", "namespaces");
    let text = format!("{namespaces} with meshed pods, all with the current roots");
    Ok(or_ok([missing, outdated], text))
}

fn describe_outdated(namespace: &str, map: &ConfigMap) -> String {
    match map.immutable {
        Some(true) => format!(
            "{namespace}: it is immutable, so the controller cannot correct it: delete it (kubectl delete configmap -n {namespace} {ROOTS_CONFIG_MAP}), \
             then scale the meshed workloads of the namespace to 0 and back: kubelets keep an immutable ConfigMap while a pod uses it"
        ),
        _ => namespace.to_owned(),
    }
}

fn lacks_current_root(map: &ConfigMap, mesh: &Mesh) -> bool {
    let pem = map.data.as_ref().and_then(|data| data.get(ROOTS));
    let published = certificates::read(pem.map_or(b"", |pem| pem.as_bytes()));
    let published: Vec<String> = published.iter().map(|one| one.fingerprint()).collect();
    let is_published = |root: &Authority| {
        let mut published = published.iter();
        published.any(|one| one.eq_ignore_ascii_case(&root.fingerprint))
    };
    !mesh.roots.iter().all(is_published)
}

/// Whether no trust root covers the certificates of an issuer. Unknown for an intermediate: its
/// predecessors may have the same root.
fn is_untrusted(mesh: &Mesh, issuer: &str) -> bool {
    let is_root = |id: &str| mesh.roots.iter().any(|root| root.id == id);
    let current = mesh.issuer.as_ref().map_or("", |issuer| &issuer.id);
    is_root(current) && !issuer.is_empty() && !is_root(issuer)
}

/// Every ready proxy is connected to a controller and has a valid certificate of a trusted root.
pub(super) fn workloads(facts: &Facts) -> Findings<'_> {
    let Ok(mesh) = &facts.identity else {
        return Ok(Vec::new());
    };
    let (mut expired, mut overdue, mut pending) = (Vec::new(), Vec::new(), Vec::new());
    let mut untrusted = Vec::new();
    for workload in &mesh.workloads {
        let remaining = workload.certificate_not_after.saturating_sub(facts.now);
        let lifetime = workload
            .certificate_not_after
            .saturating_sub(workload.certificate_issued_at);
        let name = workload_name(workload);
        match () {
            () if !has_certificate(workload) => pending.push(name),
            () if remaining == 0 => expired.push(name),
            () if is_untrusted(mesh, &workload.certificate_issuer) => untrusted.push(name),
            () if remaining < lifetime / 10 => {
                let remaining = format_duration(remaining);
                overdue.push(format!("{name}: expires in {remaining}"));
            }
            () => {}
        }
    }
    let mut findings = Vec::new();
    let advice = "see the log of the proxy: kubectl logs -n NAMESPACE POD -c proxy";
    let finding = Finding::problem("expired: other proxies reject their connections", advice);
    findings.extend(finding.about(expired, "certificate has", "certificates have"));
    let text = "that no trust root of the mesh covers: other proxies reject their connections";
    let renewal = "the CA was replaced without a rotation (see `mesh identity`). A connected proxy gets a new certificate within a minute; \
                  if it does not, see its log: kubectl logs -n NAMESPACE POD -c proxy";
    let finding = Finding::problem(text, renewal);
    findings.extend(finding.about(untrusted, "certificate", "certificates"));
    let finding = Finding::warning("not been renewed in time", advice);
    findings.extend(finding.about(overdue, "certificate has", "certificates have"));
    if let Ok(pods) = &facts.pods {
        let connected: BTreeSet<String> = mesh.workloads.iter().map(workload_name).collect();
        let ready = pods::meshed(pods)
            .filter(|pod| pods::is_proxy_ready(pod))
            .map(|pod| (pods::name(pod), pods::age(pod, facts.now)));
        let disconnected = ready.filter(|(name, _)| !connected.contains(name));
        let ca_age = facts.now.saturating_sub(mesh.rotation.since);
        let is_new_ca = is_steady(&mesh.rotation) && ca_age < ROOTS_UPDATE_TIMEOUT;
        let (former, disconnected): (Vec<_>, Vec<_>) =
            disconnected.partition(|(_, age)| is_new_ca && *age > ca_age);
        if mesh.unreachable.is_empty() {
            let names = |pods: Vec<(String, u64)>| pods.into_iter().map(|(name, _)| name).collect();
            let text = format!(
                "not connected to a controller, and older than the CA, which is in use since {} ago: they may trust only former roots",
                format_duration(ca_age)
            );
            let advice = "the kubelets update the roots in the volumes of the pods within two minutes, and the proxies connect within 30 seconds after that; to wait for no kubelet, restart the pods";
            let finding = Finding::warning(text, advice);
            let former: Vec<String> = names(former);
            findings.extend(finding.about(former, "proxy is", "proxies are"));
            let text = "not connected to a controller: they continue with the last known state and receive no changes";
            let advice = "check the NetworkPolicies and the logs of the proxies: kubectl logs -n NAMESPACE POD -c proxy";
            let finding = Finding::warning(text, advice);
            let disconnected: Vec<String> = names(disconnected);
            findings.extend(finding.about(disconnected, "proxy is", "proxies are"));
        }
    }
    let suffix = match pending.len() {
        0 => String::new(),
        number => format!(", {number} pending"),
    };
    let (one, many) = ("workload's certificate is", "workloads' certificates are");
    let valid = count(mesh.workloads.len() - pending.len(), one, many);
    let text = format!("{valid} valid{suffix}");
    Ok(or_ok(findings.into_iter().map(Some), text))
}

/// The clocks of proxies and controllers are synchronized.
pub(super) fn clocks(facts: &Facts) -> Findings<'_> {
    let Ok(mesh) = &facts.identity else {
        return Ok(Vec::new());
    };
    let text = "the clocks of controllers and the API server differ by more than five minutes";
    let advice = "synchronize the clocks of the nodes (chrony, systemd-timesyncd)";
    let controllers = mesh.clocks.iter();
    let controllers = controllers.map(|(name, text)| format!("{name}: {text}"));
    let controllers = Finding::warning(text, advice).if_any(controllers);
    let skewed: Vec<_> = mesh
        .workloads
        .iter()
        .filter(|workload| workload.clock_skew_ms.abs() > CLOCK_SKEW_WARNING_MS)
        .collect();
    if skewed.is_empty() {
        if controllers.is_some() {
            return Ok(controllers.into_iter().collect());
        }
        let text = "the clocks of proxies and controllers are synchronized";
        return Ok(vec![Finding::ok(text)]);
    }
    let details = skewed.iter().map(|workload| {
        let direction = if workload.clock_skew_ms > 0 {
            "ahead"
        } else {
            "behind"
        };
        format!(
            "{}: {} {direction}",
            workload_name(workload),
            format_duration(workload.clock_skew_ms.unsigned_abs() / 1000)
        )
    });
    let text = format!(
        "{} by more than 30 s; certificates tolerate five minutes",
        count(
            skewed.len(),
            "proxy's clock is off",
            "proxies' clocks are off"
        )
    );
    let exceeds_limit = skewed
        .iter()
        .any(|workload| workload.clock_skew_ms.abs() > MAX_CLOCK_SKEW_MS);
    let finding = if exceeds_limit {
        Finding::problem(text, advice)
    } else {
        Finding::warning(text, advice)
    };
    let proxies = finding.with_details(details);
    Ok(controllers.into_iter().chain([proxies]).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{
        Level,
        facts::testing::{NOW, meshed, object, ready, unknown_facts},
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
            issued_at: NOW + left * day - 365 * day,
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
            ..unknown_facts()
        }
    }

    fn level(findings: &[Finding]) -> Level {
        findings.iter().map(|finding| finding.level).max().unwrap()
    }

    #[test]
    fn warns_before_the_authority_expires() {
        let level_of = |left| level(&authority(&facts(left, workload(3_600, 0))).unwrap());
        assert_eq!(
            (level_of(300), level_of(100), level_of(0)),
            (Level::Ok, Level::Warning, Level::Problem)
        );
        let mut broken = facts(300, workload(3_600, 0));
        broken.identity.as_mut().unwrap().problems.insert(
            "controller-1".into(),
            "Secret a/b: tls.key is not the key of tls.crt".into(),
        );
        assert_eq!(level(&authority(&broken).unwrap()), Level::Problem);
    }

    #[test]
    fn warns_of_a_stalled_rotation() {
        let mut facts = facts(300, workload(3_600, 0));
        assert_eq!(level(&rotation(&facts).unwrap()), Level::Ok);
        let waiting = vec!["shop/till to trust the current roots".to_owned()];
        facts.identity.as_mut().unwrap().rotation = Rotation {
            phase: "announcing".into(),
            since: NOW - 60,
            waiting,
            ..Rotation::default()
        };
        assert_eq!(level(&rotation(&facts).unwrap()), Level::Ok);
        facts.identity.as_mut().unwrap().rotation.since = NOW - 7_200;
        let finding = &rotation(&facts).unwrap()[0];
        assert_eq!(
            (finding.level, finding.details.as_slice()),
            (
                Level::Warning,
                &["waiting for shop/till to trust the current roots".to_owned()][..]
            )
        );
    }

    #[test]
    fn reports_expired_and_overdue_certificates_and_disconnected_proxies() {
        let level_of = |workload| level(&workloads(&facts(300, workload)).unwrap());
        assert_eq!(
            (
                level_of(workload(40_000, 0)),
                level_of(workload(4_000, 0)),
                level_of(workload(0, 0))
            ),
            (Level::Ok, Level::Warning, Level::Problem)
        );
        let mut disconnected = facts(300, workload(40_000, 0));
        disconnected.identity.as_mut().unwrap().workloads.clear();
        let finding = &workloads(&disconnected).unwrap()[0];
        assert_eq!(
            (finding.level, finding.details.as_slice()),
            (Level::Warning, &["shop/till".to_owned()][..])
        );
        assert!(finding.advice.contains("NetworkPolicies"), "{finding:?}");
    }

    #[test]
    fn names_a_new_ca_as_the_cause_of_disconnected_proxies() {
        let mut facts = facts(300, workload(40_000, 0));
        let mesh = facts.identity.as_mut().unwrap();
        mesh.workloads.clear();
        mesh.rotation.since = NOW - 60;
        let finding = &workloads(&facts).unwrap()[0];
        assert_eq!(finding.details, ["shop/till"]);
        assert!(finding.text.contains("former roots"), "{}", finding.text);
        // The volumes have been updated meanwhile.
        let mesh = facts.identity.as_mut().unwrap();
        mesh.rotation.since = NOW - ROOTS_UPDATE_TIMEOUT;
        let finding = &workloads(&facts).unwrap()[0];
        assert!(!finding.text.contains("former roots"), "{}", finding.text);
    }

    #[test]
    fn reports_certificates_that_no_root_covers() {
        let of_former_ca = Workload {
            certificate_issuer: "former".into(),
            ..workload(40_000, 0)
        };
        let mut facts = facts(300, of_former_ca);
        let mesh = facts.identity.as_mut().unwrap();
        mesh.roots[0].id = "root".into();
        mesh.issuer.as_mut().unwrap().id = "root".into();
        let finding = &workloads(&facts).unwrap()[0];
        assert_eq!(
            (finding.level, finding.details.as_slice()),
            (Level::Problem, &["shop/till".to_owned()][..])
        );
        // During a rotation, the roots contain the root of the former CA.
        let mesh = facts.identity.as_mut().unwrap();
        let mut former = mesh.roots[0].clone();
        former.id = "former".into();
        mesh.roots.push(former);
        assert_eq!(level(&workloads(&facts).unwrap()), Level::Ok);
    }

    #[test]
    fn reports_clock_skew() {
        let level_of = |skew| level(&clocks(&facts(300, workload(40_000, skew))).unwrap());
        assert_eq!(
            (level_of(-500), level_of(-60_000), level_of(400_000)),
            (Level::Ok, Level::Warning, Level::Problem)
        );
    }

    #[test]
    fn clock_of_the_api_server_that_differs_is_a_warning_with_the_names_of_controllers() {
        let mut facts = facts(300, workload(40_000, 0));
        let mesh = facts.identity.as_mut().unwrap();
        let text = "the clock of the API server is 60 min ahead";
        mesh.clocks.insert("controller-1".into(), text.into());
        let findings = clocks(&facts).unwrap();
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].level, Level::Warning);
        assert_eq!(findings[0].details, [format!("controller-1: {text}")]);
        let workload = &mut facts.identity.as_mut().unwrap().workloads[0];
        workload.clock_skew_ms = 400_000;
        assert_eq!(clocks(&facts).unwrap().len(), 2);
    }

    #[test]
    fn reports_missing_and_outdated_roots() {
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
        let mut young = facts(300, workload(40_000, 0));
        young.roots = Ok(Vec::new());
        // 30 s after 2020-01-01, the creation of the pods.
        young.now = 1_577_836_830;
        assert_eq!(roots_finding(&young).level, Level::Ok);
        young.identity = Err("no controller".into());
        assert_eq!(roots_finding(&young).level, Level::Warning);
        let (level, text, _) = with(
            json!([{"metadata": {"namespace": "shop", "name": ROOTS_CONFIG_MAP}, "data": {"roots.pem": ""}}]),
        );
        assert!(
            level == Level::Problem && text.contains("lacks a current root"),
            "{text}"
        );
        let (_, text, details) = with(
            json!([{"metadata": {"namespace": "shop", "name": ROOTS_CONFIG_MAP}, "immutable": true, "data": {"other": ""}}]),
        );
        assert!(
            text.contains("lacks a current root")
                && details[0].starts_with("shop: it is immutable"),
            "{text} {details:?}"
        );
    }

    fn roots_finding(facts: &Facts) -> Finding {
        let findings = super::roots(facts);
        let unknown = |reason: &String| vec![super::Finding::unknown(reason)];
        findings.unwrap_or_else(unknown).remove(0)
    }
}
