//! Checks of the Gateway API: the installed definitions, and the routes of the mesh. Pure.

use std::collections::BTreeSet;

use diy_mesh_controller::catalog::definitions::{lacking_fields, unsupported};
use diy_mesh_controller::object::{Kind, kind};
use diy_mesh_injector::version::is_below;
use serde_json::Value;

use super::{Finding, Findings, count, facts::Facts, or_ok};
use crate::routes::{Condition, GROUP, Route};

/// The first version with the resources that the mesh reads.
const MIN_VERSION: (u32, u32) = (1, 5);
const INSTALL_ADVICE: &str = "install its standard channel, version 1.5 or newer: https://gateway-api.sigs.k8s.io/guides/getting-started/";
pub(super) const PARTIAL_ADVICE: &str = "follow the messages of the conditions";
/// The definitions that the mesh reads. Others are optional.
const REQUIRED: [&str; 3] = ["HTTPRoute", "GRPCRoute", "ReferenceGrant"];

/// The definitions of the Gateway API are complete and current, or not installed at all.
pub(super) fn definitions(facts: &Facts) -> Findings<'_> {
    let definitions = facts.definitions.as_ref()?.iter();
    let definitions = definitions.filter(|one| one["spec"]["group"] != kind::GROUP);
    let kind = |definition: &Value| definition["spec"]["names"]["kind"].clone();
    let find = |name: &str| definitions.clone().find(|one| kind(one) == name);
    let missing: Vec<&str> = REQUIRED
        .into_iter()
        .filter(|name| find(name).is_none())
        .collect();
    if missing.len() == REQUIRED.len() {
        let text =
            "not installed: the cluster has no HTTPRoutes and GRPCRoutes, and the mesh needs none";
        return Ok(vec![Finding::ok(text)]);
    }
    let kinds = [
        Kind::HttpRoute,
        Kind::GrpcRoute,
        Kind::TcpRoute,
        Kind::Grant,
    ];
    let unread = kinds.map(|kind| unsupported(kind, find(kind.name())?));
    let unread: Vec<String> = unread.into_iter().flatten().collect();
    if !unread.is_empty() {
        let text = "objects of these kinds have no effect in the mesh";
        let advice = "install a release of the mesh that reads these versions, or definitions that \
                      serve an earlier one";
        return Ok(vec![Finding::problem(text, advice).with_details(unread)]);
    }
    if !missing.is_empty() {
        let text = format!("{} is not installed", missing.join(", "));
        return Ok(vec![Finding::warning(text, INSTALL_ADVICE)]);
    }
    let annotations = |name: &str| -> BTreeSet<String> {
        let read = |one: &Value| {
            let value = &one["metadata"]["annotations"][format!("{GROUP}/{name}")];
            value.as_str().unwrap_or("unknown").to_owned()
        };
        definitions.clone().map(read).collect()
    };
    let (versions, channels) = (annotations("bundle-version"), annotations("channel"));
    let joined = |set: &BTreeSet<String>| Vec::from_iter(set.iter().cloned()).join(", ");
    let text = format!(
        "version {}, channel {}",
        joined(&versions),
        joined(&channels)
    );
    if versions.len() > 1 || channels.len() > 1 {
        let differ = match versions.len() {
            1 => "channels",
            _ => "releases",
        };
        let text = format!("{text}: the definitions are of different {differ}");
        let advice = "install all definitions of one release and channel";
        return Ok(vec![Finding::warning(text, advice)]);
    }
    if versions
        .iter()
        .any(|version| is_below(version, MIN_VERSION))
    {
        let text = format!("{text}: too old");
        return Ok(vec![Finding::warning(text, INSTALL_ADVICE)]);
    }
    let lacks = |kind: Kind| {
        let lacks = lacking_fields(kind, find(kind.name())?);
        (!lacks.is_empty()).then(|| format!("{kind} without {}", lacks.join(", ")))
    };
    let routes = [Kind::HttpRoute, Kind::GrpcRoute];
    let mut lacking: Vec<String> = routes.into_iter().filter_map(lacks).collect();
    lacking.extend(find("TCPRoute").is_none().then(|| "no TCPRoute".to_owned()));
    let suffix = if lacking.is_empty() {
        String::new()
    } else {
        format!("; {}", lacking.join(", "))
    };
    Ok(vec![Finding::ok(text + &suffix)])
}

/// The mesh has accepted the routes, and all of their references resolve. So it has the TrafficSplits
/// and the canary annotations of Services.
pub(super) fn routes(facts: &Facts) -> Findings<'_> {
    let routes = facts.routes.as_ref()?;
    let errors = match &facts.judgement {
        Ok(judgement) => judgement.errors.clone(),
        // The check of the upgrade says why.
        Err(_) => Vec::new(),
    };
    if routes.is_empty() && errors.is_empty() {
        return Ok(Vec::new());
    }
    let text =
        "TrafficSplits or Services with errors: their canaries, weights or ports do not apply";
    let advice = "correct the TrafficSplits, and the annotations and ports of the Services";
    let errors = Finding::problem(text, advice).if_any(errors);
    let (mut invalid, mut partial, mut pending) = (Vec::new(), Vec::new(), Vec::new());
    for (route, parent) in parents(routes) {
        let title = format!("{}, parent {}", route.title(), parent.title());
        if parent.condition("Accepted").is_none() {
            pending.push(title);
            continue;
        }
        let describe = |one: &Condition| {
            let (kind, reason, message) = (&one.kind, &one.reason, &one.message);
            format!("{title}: {kind} is {}, {reason}: {message}", one.status())
        };
        let requirements = ["Accepted", "ResolvedRefs"].into_iter();
        let requirements = requirements.filter_map(|kind| parent.condition(kind));
        invalid.extend(requirements.filter(|one| !one.holds).map(describe));
        partial.extend(parent.problems().map(describe));
    }
    let text = "routes with errors: requests that they match fail, or the route has no effect";
    let advice = "correct the routes; mesh routes lists all conditions";
    let invalid = Finding::problem(text, advice).if_any(invalid);
    let text = "routes that do not apply everywhere, or of which a part is invalid";
    let partial = Finding::warning(text, PARTIAL_ADVICE).if_any(partial);
    let text = "routes whose current version no controller of the mesh has accepted or rejected";
    let advice = format!(
        "if this persists, see the log of the controllers: kubectl logs -n {} -l app=controller",
        facts.namespace
    );
    let pending = Finding::warning(text, advice).if_any(pending);
    let text = format!("{} accepted", count(routes.len(), "route is", "routes are"));
    Ok(or_ok([invalid, errors, partial, pending], text))
}

fn parents(routes: &[Route]) -> impl Iterator<Item = (&Route, &crate::routes::Parent)> {
    routes
        .iter()
        .flat_map(|route| route.parents.iter().map(move |parent| (route, parent)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{Level, facts::testing::unknown_facts, upgrade::Judgement};
    use super::*;
    use crate::routes::testing::{condition, route};

    fn definition(kind: &str, version: &str, channel: &str, fields: &[&str]) -> Value {
        let fields: serde_json::Map<String, Value> = fields
            .iter()
            .map(|field| ((*field).to_owned(), json!({})))
            .collect();
        json!({
            "metadata": {"annotations": {
                "gateway.networking.k8s.io/bundle-version": version,
                "gateway.networking.k8s.io/channel": channel,
            }},
            "spec": {"names": {"kind": kind}, "versions": [{"name": "v1", "served": true, "schema": {"openAPIV3Schema":
                {"properties": {"spec": {"properties": {"rules": {"items": {"properties": fields}}}}}}}}]},
        })
    }

    fn finding(definitions: Vec<Value>) -> Finding {
        let facts = Facts {
            definitions: Ok(definitions),
            ..unknown_facts()
        };
        super::definitions(&facts).unwrap().remove(0)
    }

    fn standard(version: &str) -> Vec<Value> {
        REQUIRED
            .map(|kind| definition(kind, version, "standard", &["matches"]))
            .into()
    }

    #[test]
    fn cluster_without_the_gateway_api_is_ok() {
        let finding = finding(Vec::new());
        assert_eq!(finding.level, Level::Ok);
        assert!(finding.text.starts_with("not installed"), "{finding:?}");
    }

    #[test]
    fn reports_version_channel_and_lacking_fields() {
        let found = finding(standard("v1.5.1"));
        assert_eq!(found.level, Level::Ok);
        assert_eq!(
            found.text,
            "version v1.5.1, channel standard; HTTPRoute without retry, sessionPersistence, \
             GRPCRoute without sessionPersistence, no TCPRoute"
        );
        let mut all: Vec<Value> = REQUIRED
            .map(|kind| {
                definition(
                    kind,
                    "v1.6.0",
                    "experimental",
                    &["retry", "sessionPersistence"],
                )
            })
            .into();
        all.push(definition("TCPRoute", "v1.6.0", "experimental", &[]));
        assert_eq!(finding(all).text, "version v1.6.0, channel experimental");
    }

    #[test]
    fn incomplete_mixed_or_old_definitions_are_warnings() {
        let mut mixed = standard("v1.5.1");
        mixed[0] = definition("HTTPRoute", "v1.5.1", "experimental", &[]);
        for (definitions, text) in [
            (
                standard("v1.5.1").split_off(1),
                "HTTPRoute is not installed",
            ),
            (mixed, "different channels"),
            (
                [standard("v1.5.1"), standard("v1.6.0").split_off(1)].concat(),
                "different releases",
            ),
            (standard("v1.4.1"), "too old"),
        ] {
            let finding = finding(definitions);
            assert_eq!(finding.level, Level::Warning, "{finding:?}");
            assert!(finding.text.contains(text), "{finding:?}");
        }
    }

    #[test]
    fn definition_without_a_version_that_the_mesh_reads_is_a_problem() {
        let mut definitions = standard("v1.9.0");
        let mut later = definition("TCPRoute", "v1.9.0", "standard", &[]);
        later["spec"]["versions"][0]["name"] = json!("v2");
        definitions.push(later);
        let finding = finding(definitions);
        assert_eq!(finding.level, Level::Problem, "{finding:?}");
        let expected = "TCPRoute is not used: its definition serves [\"v2\"], expected one of \
                        [\"v1\", \"v1alpha2\"]";
        assert_eq!(finding.details, [expected]);
    }

    #[test]
    fn reports_invalid_and_pending_routes() {
        let findings = |conditions: Value| {
            let routes = Route::read(&route(conditions)).into_iter().collect();
            super::routes(&Facts {
                routes: Ok(routes),
                ..unknown_facts()
            })
            .unwrap()
        };
        let accepted = condition("Accepted", "True", "Accepted");
        let ok = findings(json!([
            accepted,
            condition("ResolvedRefs", "True", "ResolvedRefs")
        ]));
        assert_eq!(
            (ok[0].level, ok[0].text.as_str()),
            (Level::Ok, "1 route is accepted")
        );
        let invalid = &findings(json!([
            accepted,
            condition("ResolvedRefs", "False", "BackendNotFound")
        ]))[0];
        assert_eq!(invalid.level, Level::Problem);
        let expected = "HTTPRoute shop/canary, parent shop/web:80: ResolvedRefs is False, \
                        BackendNotFound: what to do";
        assert_eq!(invalid.details, [expected]);
        let partial = &findings(json!([
            accepted,
            condition(
                "diy-service-mesh.dev/Programmed",
                "False",
                "ProxyLacksCapability"
            ),
            condition("example.net/Audited", "False", "Unknown"),
        ]));
        let expected = "HTTPRoute shop/canary, parent shop/web:80: \
                        diy-service-mesh.dev/Programmed is False, ProxyLacksCapability: what to do";
        assert_eq!((partial[0].level, partial.len()), (Level::Warning, 1));
        assert_eq!(partial[0].details, [expected]);
        let partial = condition("PartiallyInvalid", "True", "UnsupportedValue");
        let invalid = &findings(json!([accepted, partial]));
        let expected = "HTTPRoute shop/canary, parent shop/web:80: PartiallyInvalid is True, \
                        UnsupportedValue: what to do";
        assert_eq!((invalid[0].level, invalid.len()), (Level::Warning, 1));
        assert_eq!(invalid[0].details, [expected]);
        let pending = &findings(json!([]))[0];
        assert_eq!(pending.level, Level::Warning);
        assert_eq!(
            pending.details,
            ["HTTPRoute shop/canary, parent shop/web:80"]
        );
    }

    #[test]
    fn errors_of_splits_and_canaries_are_a_problem_without_any_route() {
        let errors = vec!["TrafficSplit shop/cart: UnsupportedValue: no".to_owned()];
        let facts = Facts {
            routes: Ok(Vec::new()),
            judgement: Ok(Judgement {
                errors: errors.clone(),
                ..Judgement::default()
            }),
            ..unknown_facts()
        };
        let finding = super::routes(&facts).unwrap().remove(0);
        assert_eq!((finding.level, finding.details), (Level::Problem, errors));
    }
}
