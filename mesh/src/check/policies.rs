//! Checks of TrafficPolicies and AuthorizationPolicies: the installed definitions, and the policies.

use std::collections::BTreeSet;

use diy_mesh_controller::object::condition::{ALLOWS_ALL, FIELDS_DROPPED};
use diy_mesh_controller::object::fields::{LAST_APPLIED, dropped};
use diy_mesh_controller::object::kind::{GROUP, VERSION};
use serde_json::Value;

use super::facts::Facts;
use super::gateway::PARTIAL_ADVICE;
use super::{Finding, Findings, count, or_ok};
use crate::install::{self, live};
use crate::routes::{conditions, list, text};

const ADVICE: &str = "mesh install --crds | kubectl apply -f -";

/// The definitions are installed, and have the fields of this version.
pub(super) fn definition(facts: &Facts) -> Findings<'_> {
    let installed = facts.definitions.as_ref()?;
    let own = install::definitions();
    let findings = own.iter().map(|own| compared(own, installed));
    Ok(findings.collect())
}

fn compared(own: &Value, installed: &[Value]) -> Finding {
    let kind = text(&own["spec"]["names"]["kind"]);
    let Some(installed) = of_same_kind(own, installed) else {
        let text = format!("not installed: the cluster has no kind {kind}");
        return Finding::warning(text, ADVICE);
    };
    let missing: Vec<String> = fields(own)
        .difference(&fields(installed))
        .cloned()
        .collect();
    if missing.is_empty() {
        let text = format!("{kind} is installed, with all fields of this version");
        return Finding::ok(text);
    }
    let text = format!(
        "the installed definition of {kind} lacks fields of this version, which the API server drops"
    );
    Finding::warning(text, ADVICE).with_details(missing)
}

/// The installed definition of the kind of another one.
pub(super) fn of_same_kind<'a>(own: &Value, installed: &'a [Value]) -> Option<&'a Value> {
    let kind = &own["spec"]["names"]["kind"];
    let mut installed = installed.iter();
    installed.find(|one| one["spec"]["names"]["kind"] == *kind)
}

/// The paths of all fields of this version.
pub(super) fn fields(definition: &Value) -> BTreeSet<String> {
    let mut versions = list(&definition["spec"]["versions"]);
    let version = versions.find(|version| version["name"] == VERSION);
    let schema = version.and_then(|version| version.pointer("/schema/openAPIV3Schema"));
    let mut paths = BTreeSet::new();
    if let Some(schema) = schema {
        collect(schema, "", &mut paths);
    }
    paths
}

fn collect(schema: &Value, path: &str, paths: &mut BTreeSet<String>) {
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let path = join(path, name);
        collect(field, &path, paths);
        paths.insert(path);
    }
    if schema["items"].is_object() {
        collect(&schema["items"], &format!("{path}[]"), paths);
    }
}

fn join(path: &str, name: &str) -> String {
    match path {
        "" => name.to_owned(),
        path => format!("{path}.{name}"),
    }
}

/// The mesh has accepted the policies.
pub(super) fn policies(facts: &Facts) -> Findings<'_> {
    let policies = facts.policies.as_ref()?;
    if policies.is_empty() {
        return Ok(Vec::new());
    }
    let all = policies.iter().map(problems);
    let (rejected, partial): (Vec<_>, Vec<_>) = all.unzip();
    let text = "policies that have no effect on a target, or that no controller has read yet";
    let advice = format!(
        "correct the policies; if nothing has read them, see the log of the controllers: kubectl \
         logs -n {} -l app=controller",
        facts.namespace
    );
    let rejected = Finding::warning(text, advice).if_any(rejected.concat());
    let text = "policies that do not apply everywhere";
    let partial = Finding::warning(text, PARTIAL_ADVICE).if_any(partial.concat());
    let text = "policies with fields that the API server has dropped when they were applied, so that their \
                rules match more than is written";
    let advice = "correct the names of the fields, and apply with kubectl apply --validate=strict";
    let pruned = Finding::warning(text, advice).if_any(policies.iter().flat_map(pruned));
    let (all_of_dropped, all) = allowing_all(policies);
    let text = "ALLOW policies with a rule that allows every caller, since fields were dropped";
    let all_of_dropped = Finding::warning(text, advice).if_any(all_of_dropped);
    let text = "ALLOW policies with a rule that allows every caller";
    let advice = "if that is not intended, name sources or requests";
    let note = Finding::note(text, advice).if_any(all);
    let opened = facts.judgement.iter().flat_map(|one| one.opened.clone());
    let text = "pods that everyone may call, while an ALLOW policy of their namespace selects none";
    let advice = "correct the Service or targetRefs of the policy, or delete it";
    let opened = Finding::warning(text, advice).if_any(opened);
    let text = count(
        policies.len(),
        "policy is accepted",
        "policies are accepted",
    );
    let warnings = [rejected, partial, pruned, all_of_dropped, opened];
    Ok(or_ok(warnings, text).into_iter().chain(note).collect())
}

/// The policies with the condition `AllowsAll`: policies with dropped fields, and the others.
fn allowing_all(policies: &[Value]) -> (BTreeSet<String>, BTreeSet<String>) {
    let conditions = policies.iter().flat_map(|policy| {
        let of_all = current(policy).filter(|(_, one)| one["type"] == ALLOWS_ALL);
        of_all.map(|(_, condition)| (live::title(policy), condition))
    });
    let (dropped, others): (Vec<_>, Vec<_>) = conditions
        .filter(|(_, condition)| condition["status"] == "True")
        .partition(|(_, condition)| condition["reason"] == FIELDS_DROPPED);
    [dropped, others]
        .map(|all| {
            let all = all.into_iter();
            let described = all.map(|(title, one)| format!("{title}: {}", text(&one["message"])));
            described.collect()
        })
        .into()
}

/// The conditions of the current generation of a policy, with their targets.
fn current(policy: &Value) -> impl Iterator<Item = (&Value, &Value)> {
    let generation = &policy["metadata"]["generation"];
    conditions(&policy["status"])
        .filter(move |(_, condition)| condition["observedGeneration"] == *generation)
}

/// The fields of a policy that `kubectl apply` has sent and that are not stored.
fn pruned(policy: &Value) -> Vec<String> {
    let applied = &text(&policy["metadata"]["annotations"][LAST_APPLIED]);
    let title = live::title(policy);
    let lost = dropped(applied, &policy["spec"].to_string()).into_iter();
    lost.map(|path| format!("{title}: {path}")).collect()
}

/// The conditions of a policy as texts: at targets that do not accept it, and at targets where it
/// does not apply everywhere.
fn problems(policy: &Value) -> (Vec<String>, Vec<String>) {
    let (title, current) = (live::title(policy), Vec::from_iter(current(policy)));
    let problems_of = |is_type: fn(&str) -> bool| {
        let of_type = current.iter().filter(move |(_, condition)| {
            condition["type"].as_str().is_some_and(is_type) && condition["status"] != "True"
        });
        let describe = |(target, condition): &(&Value, &Value)| {
            let (kind, name) = (text(&target["kind"]), text(&target["name"]));
            let (reason, message) = (text(&condition["reason"]), text(&condition["message"]));
            format!("{title}, {kind} {name}: {reason}: {message}")
        };
        of_type.map(describe).collect()
    };
    let mut accepted = current.iter().map(|(_, condition)| &condition["type"]);
    let rejected = if accepted.any(|kind| kind == "Accepted") {
        problems_of(|kind| kind == "Accepted")
    } else {
        vec![format!("{title}: no condition yet")]
    };
    let is_own = |kind: &str| {
        let domain = kind.split_once('/').map(|(domain, _)| domain);
        kind == "ResolvedRefs" || domain == Some(GROUP)
    };
    (rejected, problems_of(is_own))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{Level, facts::testing::unknown_facts};
    use super::*;
    use crate::routes::CONTROLLER_NAME;

    fn own_definition() -> Value {
        install::definitions().remove(1)
    }

    fn check(installed: Option<Value>) -> Finding {
        let facts = Facts {
            definitions: Ok(installed.into_iter().collect()),
            ..unknown_facts()
        };
        definition(&facts).unwrap().remove(1)
    }

    #[test]
    fn reports_a_missing_definition_and_its_missing_fields() {
        assert_eq!(check(Some(own_definition())).level, Level::Ok);
        let missing = check(None);
        assert_eq!((missing.level, &*missing.advice), (Level::Warning, ADVICE));
        let mut old = own_definition();
        let path = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/faults\
                    /items/properties";
        let fault = old.pointer_mut(path).unwrap().as_object_mut().unwrap();
        fault.remove("matches");
        fault["delay"]["properties"] = json!({"duration": {}, "percent": {}});
        let old = check(Some(old));
        assert_eq!(old.level, Level::Warning);
        assert!(old.details.contains(&"spec.faults[].matches".to_owned()));
        assert!(
            old.details
                .contains(&"spec.faults[].delay.fraction".to_owned())
        );
        assert!(
            !old.details
                .contains(&"spec.faults[].delay.percent".to_owned())
        );
    }

    #[test]
    fn reports_fields_that_the_api_server_has_dropped() {
        let check = |applied: Value, stored: Value| {
            let policy = json!({
                "kind": "AuthorizationPolicy", "spec": stored,
                "metadata": {"namespace": "shop", "name": "web", "annotations": {
                    LAST_APPLIED: json!({"spec": applied}).to_string()}},
            });
            pruned(&policy)
        };
        let stored = json!({"action": "ALLOW", "rules": [{}], "targetRefs": []});
        let applied = json!({"action": "ALLOW", "mode": null, "targetRefs": [],
            "rules": [{"source": [{"type": "Unauthenticated"}]}]});
        assert_eq!(
            check(applied, stored.clone()),
            ["AuthorizationPolicy shop/web: spec.rules[].source"]
        );
        assert_eq!(check(stored.clone(), stored.clone()), [""; 0]);
        assert_eq!(check(Value::Null, stored), [""; 0]);
    }

    #[test]
    fn rule_that_allows_every_caller_is_a_note_and_a_warning_if_fields_were_dropped() {
        let find = |reason: &str| {
            let condition = json!({"type": ALLOWS_ALL, "status": "True", "reason": reason,
                "message": "spec.rules[0] allows every caller", "observedGeneration": 2});
            let accepted = json!({"type": "Accepted", "status": "True", "observedGeneration": 2});
            let target = |name: &str| {
                json!({"ancestorRef": {"group": "", "kind": "Service", "name": name},
                    "controllerName": CONTROLLER_NAME, "conditions": [accepted, condition]})
            };
            let policy = json!({
                "kind": "AuthorizationPolicy",
                "metadata": {"namespace": "shop", "name": "web", "generation": 2},
                "status": {"ancestors": [target("web"), target("api")]},
            });
            let facts = Facts {
                policies: Ok(vec![policy]),
                ..unknown_facts()
            };
            let findings = policies(&facts).unwrap();
            let details = findings.iter().flat_map(|one| one.details.clone());
            let expected = "AuthorizationPolicy shop/web: spec.rules[0] allows every caller";
            assert_eq!(Vec::from_iter(details), [expected]);
            Vec::from_iter(findings.into_iter().map(|one| one.level))
        };
        assert_eq!(find("RuleWithoutConditions"), [Level::Ok, Level::Note]);
        assert_eq!(find(FIELDS_DROPPED), [Level::Warning]);
    }

    #[test]
    fn reports_policies_that_are_not_accepted() {
        let find = |status: Value| {
            let policy = json!({
                "kind": "TrafficPolicy",
                "metadata": {"namespace": "shop", "name": "web", "generation": 2},
                "status": {"ancestors": [{
                    "ancestorRef": {"group": "", "kind": "Service", "name": "web"},
                    "controllerName": CONTROLLER_NAME,
                    "conditions": status,
                }]},
            });
            let facts = Facts {
                policies: Ok(vec![policy]),
                ..unknown_facts()
            };
            policies(&facts).unwrap().remove(0)
        };
        let typed = |kind: &str, generation: i64, status: &str| {
            json!({"type": kind, "status": status, "reason": "Conflicted",
                "message": "why", "observedGeneration": generation})
        };
        let condition = |generation, status| json!([typed("Accepted", generation, status)]);
        let accepted = find(condition(2, "True"));
        assert_eq!(
            (accepted.level, &*accepted.text),
            (Level::Ok, "1 policy is accepted")
        );
        let rejected = find(condition(2, "False"));
        assert_eq!(rejected.level, Level::Warning);
        assert_eq!(
            rejected.details,
            ["TrafficPolicy shop/web, Service web: Conflicted: why"]
        );
        assert_eq!(
            find(condition(1, "True")).details,
            ["TrafficPolicy shop/web: no condition yet"]
        );
        // An earlier release writes `Enforced`.
        for kind in ["Programmed", "Enforced"] {
            let programmed = typed(&format!("{GROUP}/{kind}"), 2, "False");
            let partial = find(json!([typed("Accepted", 2, "True"), programmed]));
            assert_eq!(partial.level, Level::Warning);
            assert_eq!(partial.text, "policies that do not apply everywhere");
            assert_eq!(
                partial.details,
                ["TrafficPolicy shop/web, Service web: Conflicted: why"]
            );
        }
        // About a generation that is no longer the current one.
        let earlier = typed("diy-service-mesh.dev/Programmed", 1, "False");
        let pending = find(json!([typed("Accepted", 2, "True"), earlier]));
        assert_eq!(pending.level, Level::Ok);
    }
}
