//! The kinds of the catalog as resources of the API server, and the objects of custom resources:
//! routes, grants and policies.
//!
//! Each object is parsed from its own text, alone, so that an invalid one leaves the others readable
//! and the memory for a response is bounded.
//!
//! The crate `gateway-api` is for an earlier version of `kube`, and its types reject the whole list
//! of objects if one has a value of a later release. So `spec` is parsed per object, in
//! `crate::kinds::route::parse`.

use std::borrow::Cow;
use std::sync::Arc;

use kube::core::{ApiResource, GroupVersionKind};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use super::convert::{self, ConvertError, created, key};
use super::slim::{Applied, Custom, Metadata, References};
use crate::kinds::Object;
use crate::kinds::authorization::spec::AuthorizationPolicySpec;
use crate::kinds::authorization::{self, TOO_LARGE};
use crate::kinds::mesh::Mesh;
use crate::kinds::policy::spec::TrafficPolicySpec;
use crate::kinds::policy::{self, Policy};
use crate::kinds::route::backend::{Backend, backend, is_backend};
use crate::kinds::route::model::{Grant, Route};
use crate::kinds::route::parse::MAX_PARENTS;
use crate::kinds::route::spec::{
    BackendSpec, GrantSpec, GrpcMatch, HttpMatch, RouteSpec, Rule, TcpMatch,
};
use crate::kinds::smi::split::{self, GroupSpec, SplitSpec};
use crate::kinds::smi::traffic_target::{TargetSpec, TcpSpec, target, tcp};
use crate::object::fields::{self, NULL, dropped, field, with_unknown_fields};
use crate::object::rejection::shortened;
use crate::object::{Key, Kind, Meta, Rejection, TargetReference};

/// The maximum length of the JSON of a custom resource. Nothing of a longer one applies: the trees of
/// values that show its dropped fields take up to 30 times their length. Objects of other kinds apply
/// at any length, and only their known fields are read: connections to an unknown pod or Service would
/// be plaintext.
pub const MAX_OBJECT_BYTES: usize = 1024 * 1024;

/// The dropped fields that a condition names.
const MAX_DROPPED: usize = 5;

/// A kind in the versions that have all fields that are read, the preferred one first.
pub fn resources(kind: Kind) -> Vec<ApiResource> {
    let row = kind.row();
    let resource = |version: &&str| {
        let kind = GroupVersionKind::gvk(row.group, version, row.name);
        ApiResource::from_gvk_with_plural(&kind, row.plural)
    };
    row.versions.iter().map(resource).collect()
}

/// A kind in the version that the mesh prefers.
pub(crate) fn resource(kind: Kind) -> ApiResource {
    resources(kind).swap_remove(0)
}

/// Converts the JSON text of an object of this kind. Identities are in the trust domain.
pub(super) fn read(kind: Kind, json: &str, trust_domain: &str) -> Result<Object, ConvertError> {
    if kind.is_custom() && json.len() > MAX_OBJECT_BYTES {
        return too_large(kind, json);
    }
    match kind {
        Kind::Service => convert::service(&parse(json)?).map(Object::Service),
        Kind::Slice => convert::slice(&parse(json)?).map(Object::Slice),
        Kind::Pod => convert::pod(&parse(json)?, trust_domain).map(Object::Pod),
        Kind::Node => convert::node(&parse(json)?).map(Object::Node),
        _ => custom(
            kind,
            &parse(json)?,
            last_applied(json).as_deref(),
            trust_domain,
        ),
    }
}

/// The object that `kubectl apply` has sent, as it keeps it in an annotation.
fn last_applied(json: &str) -> Option<Cow<'_, str>> {
    let applied: Applied<'_> = serde_json::from_str(json).ok()?;
    applied.metadata.annotations?.last_applied
}

/// A description of the fields that the API server has dropped.
fn describe_dropped(last_applied: &str, spec: &str) -> Option<Arc<String>> {
    let fields = dropped(last_applied, spec);
    let first = fields[..fields.len().min(MAX_DROPPED)].join(", ");
    let text = shortened(&format!(
        "the API server has dropped fields that were applied, and that the kind does not have: {first}"
    ));
    (!fields.is_empty()).then(|| Arc::new(text))
}

pub(super) fn parse<'a, T: Deserialize<'a>>(json: &'a str) -> Result<T, ConvertError> {
    serde_json::from_str(json).map_err(|error| ConvertError(error.to_string()))
}

/// A custom resource. Its spec is read from its text. At most two trees of values are in memory for
/// each thread, to find dropped fields: the tree of the last applied spec is at most as long as
/// annotations.
fn custom(
    kind: Kind,
    object: &Custom<'_>,
    last_applied: Option<&str>,
    trust_domain: &str,
) -> Result<Object, ConvertError> {
    let spec = object.spec.map_or(NULL, RawValue::get);
    let meta = Meta {
        dropped: last_applied.and_then(|text| describe_dropped(text, spec)),
        ..meta(kind, &object.metadata, spec)?
    };
    let object = match kind {
        Kind::Grant => grant(meta.key, spec).map(Object::Grant),
        Kind::TrafficPolicy if !is_backend(spec) => {
            policy::parse::policy(meta, spec).map(Object::Policy)
        }
        Kind::Backend | Kind::TrafficPolicy => {
            Ok(Object::Backend(backend(meta, spec, trust_domain)))
        }
        Kind::Authorization => {
            let status = object.status.map_or(NULL, RawValue::get);
            let policy = authorization::parse::policy(meta, spec, status, trust_domain);
            Ok(Object::Authorization(policy))
        }
        Kind::TrafficSplit => split::split(meta, spec).map(Object::Split),
        Kind::RouteGroup => split::group(meta, spec).map(Object::RouteGroup),
        Kind::TrafficTarget => Ok(Object::TrafficTarget(target(meta, spec, trust_domain))),
        Kind::TcpGroup => Ok(Object::TcpGroup(tcp(meta, spec))),
        Kind::Mesh => Ok(Object::Mesh(Mesh::new(meta, spec))),
        _ => crate::kinds::route::parse::route(meta, spec).map(Object::Route),
    };
    object.map_err(ConvertError)
}

fn meta(kind: Kind, metadata: &Metadata, spec: &str) -> Result<Meta, ConvertError> {
    let uid = metadata.uid.as_deref().unwrap_or_default();
    let state = (uid, metadata.generation.unwrap_or_default());
    Ok(Meta::new(
        kind,
        key(metadata)?,
        created(metadata),
        state,
        spec,
    ))
}

/// An object over the limit. Nothing of it applies, and its status says so, where it has one. An
/// AuthorizationPolicy denies, as an invalid one does.
fn too_large(kind: Kind, json: &str) -> Result<Object, ConvertError> {
    let message = format!(
        "the object has {} bytes of JSON, expected at most {MAX_OBJECT_BYTES}",
        json.len()
    );
    let object: References = parse(json)?;
    let meta = meta(kind, &object.metadata, NULL)?;
    let rejection = || Rejection::new(TOO_LARGE, message.clone());
    Ok(match kind {
        Kind::Authorization => {
            Object::Authorization(authorization::parse::denying_all(meta, rejection()))
        }
        Kind::TrafficPolicy => {
            let targets = references(object.spec.target_refs);
            Object::Policy(Policy::new(meta, targets, Err(rejection())))
        }
        Kind::Backend => Object::Backend(Backend::new(meta, vec![], Err(rejection()))),
        Kind::HttpRoute | Kind::GrpcRoute | Kind::TcpRoute => {
            let mut parents = references(object.spec.parent_refs);
            parents.retain(TargetReference::is_service);
            Object::Route(Route::new(meta, parents, Err(rejection())))
        }
        _ => return Err(ConvertError(message)),
    })
}

/// The parents or targets that can be read.
fn references(list: Option<Vec<Box<RawValue>>>) -> Vec<TargetReference> {
    let mut references: Vec<TargetReference> = Vec::new();
    for one in list.into_iter().flatten().take(MAX_PARENTS) {
        match fields::read::<TargetReference>(one.get(), "") {
            Ok(reference) if !references.contains(&reference) => references.push(reference),
            _ => {}
        }
    }
    references
}

/// The paths of the unknown fields of the JSON text of a custom resource.
pub(super) fn unknown_fields(kind: Kind, json: &str) -> Vec<String> {
    let spec = field(json, "spec");
    let of_spec = match kind {
        Kind::HttpRoute => unknown::<RouteSpec<Rule<HttpMatch>>>(spec),
        Kind::GrpcRoute => unknown::<RouteSpec<Rule<GrpcMatch>>>(spec),
        Kind::TcpRoute => unknown::<RouteSpec<Rule<TcpMatch>>>(spec),
        Kind::Grant => unknown::<GrantSpec>(spec),
        Kind::Backend => unknown::<BackendSpec>(spec),
        Kind::TrafficPolicy => unknown::<TrafficPolicySpec>(spec),
        Kind::Authorization => unknown::<AuthorizationPolicySpec>(spec),
        Kind::TrafficSplit => unknown::<SplitSpec>(spec),
        Kind::RouteGroup => unknown::<GroupSpec>(spec),
        Kind::TrafficTarget => unknown::<TargetSpec>(spec),
        Kind::TcpGroup => unknown::<TcpSpec>(spec),
        Kind::Service | Kind::Slice | Kind::Pod | Kind::Node | Kind::Mesh => Vec::new(),
    };
    let known = ["apiVersion", "kind", "metadata", "spec"];
    let sections = fields::fields(json).into_keys();
    let others = sections.filter(|name| !known.contains(&name.as_str()));
    let of_spec = of_spec.into_iter().map(|field| format!("spec.{field}"));
    others.chain(of_spec).collect()
}

/// The unknown fields of a spec. An error is a condition of the object, or an error of its conversion.
fn unknown<T: DeserializeOwned>(spec: &str) -> Vec<String> {
    with_unknown_fields::<T>(spec).1
}

fn grant(key: Key, spec: &str) -> Result<Grant, String> {
    let spec: GrantSpec = fields::read(spec, "spec").map_err(|one| one.message)?;
    let from = spec.from.into_iter().filter_map(|from| {
        let is_kind = |kind: &Kind| (kind.row().group, kind.name()) == (&*from.group, &*from.kind);
        let kind = Kind::routes().find(is_kind)?;
        Some((kind, Arc::from(from.namespace)))
    });
    let to = spec.to.into_iter();
    let to = to.filter(|to| to.group.is_empty() && to.kind == "Service");
    let name = |name: String| Some(name).filter(|name| !name.is_empty());
    let to = to.map(|to| to.name.and_then(name).map(Into::into));
    Ok(Grant {
        key,
        from: from.collect(),
        to: to.collect(),
    })
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use serde_json::{Value, json};

    use super::*;
    use crate::kinds::authorization::Direction;
    use crate::object::Condition;
    use crate::object::fields::LAST_APPLIED;

    /// An object over the limit, by its `spec`.
    fn large(kind: Kind, spec: Value) -> Result<Object, ConvertError> {
        let mut object = json!({
            "metadata": {"name": "a", "namespace": "shop", "uid": "u", "generation": 7},
            "spec": spec,
        });
        object["spec"]["long"] = "x".repeat(MAX_OBJECT_BYTES).into();
        read(kind, &object.to_string(), "cluster.local")
    }

    #[test]
    fn policy_over_the_limit_denies_the_inbound_calls_of_its_namespace() {
        let Ok(Object::Authorization(policy)) = large(Kind::Authorization, json!({})) else {
            panic!("it is known")
        };
        assert_eq!(policy.generation, 7);
        assert!(policy.is_about(Direction::Inbound) && !policy.is_about(Direction::Outbound));
        assert_eq!(
            policy.parents,
            [TargetReference {
                group: Some(String::new()),
                ..TargetReference::object(Kind::Pod, "*")
            }]
        );
        let rejection = policy.rejection().unwrap();
        assert_eq!(rejection.reason, TOO_LARGE);
        let expected = "bytes of JSON, expected at most 1048576";
        assert!(
            rejection.message.ends_with(expected),
            "{}",
            rejection.message
        );
    }

    #[test]
    fn pod_and_service_over_the_limit_are_known_as_others_are() {
        let token =
            json!({"name": "SERVICE_MESH_TOKEN_FILE", "value": "x".repeat(MAX_OBJECT_BYTES)});
        let object = json!({
            "metadata": {"name": "a", "namespace": "shop", "uid": "u", "labels": {"app": "web"}},
            "spec": {
                "serviceAccountName": "web",
                "initContainers": [{"name": "proxy", "env": [token]}],
            },
            "status": {"phase": "Running", "podIP": "10.0.0.1"},
        });
        let pod = read(Kind::Pod, &object.to_string(), "cluster.local");
        let Ok(Object::Pod(pod)) = pod else {
            panic!("it is known")
        };
        let identity = "spiffe://cluster.local/ns/shop/sa/web";
        assert_eq!(pod.identity.as_deref(), Some(identity));
        assert_eq!(pod.own_addresses(), ["10.0.0.1".parse::<IpAddr>().unwrap()]);
        assert_eq!((&*pod.uid, pod.labels.len()), ("u", 1));
        let spec = json!({"clusterIP": "10.96.0.1", "ports": [{"port": 80}]});
        let Ok(Object::Service(service)) = large(Kind::Service, spec) else {
            panic!("it is known")
        };
        assert_eq!(service.ports.len(), 1);
    }

    #[test]
    fn condition_names_fields_that_the_api_server_has_dropped() {
        let policy = |applied: Value| {
            let stored = json!({"action": "ALLOW", "targetRefs": [{"group": "", "kind": "Pod", "name": "*"}],
                "rules": [{}]});
            let object = json!({"spec": stored, "metadata": {"name": "a", "namespace": "shop",
                "annotations": {LAST_APPLIED: json!({"spec": applied}).to_string()}}});
            let read = read(Kind::Authorization, &object.to_string(), "cluster.local");
            let Ok(Object::Authorization(policy)) = read else {
                panic!("it is known")
            };
            let accepted = Condition::new("Accepted", true, "Accepted", "it applies".to_owned());
            policy.conditions(accepted)[0].message.clone()
        };
        assert_eq!(
            policy(json!({"action": "ALLOW", "rules": [{"source": [{"type": "Mesh"}]}]})),
            "it applies; the API server has dropped fields that were applied, and that the kind does not \
             have: spec.rules[].source"
        );
        assert_eq!(
            policy(json!({"action": "ALLOW", "mode": null, "rules": [{}]})),
            "it applies"
        );
        assert_eq!(policy(Value::Null), "it applies");
    }

    #[test]
    fn fields_that_are_not_read_are_skipped_at_any_depth() {
        let deep = format!("{}{}", "[".repeat(1000), "]".repeat(1000));
        let spec = format!(
            r#"{{"new":{deep},"parentRefs":[{{"group":"","kind":"Service","name":"web"}}],
            "rules":[{{"new":{deep}}},{{"matches":[{{"new":{deep}}}]}}]}}"#
        );
        let json = format!(r#"{{"metadata":{{"name":"a","namespace":"shop"}},"spec":{spec}}}"#);
        let Ok(Object::Route(route)) = read(Kind::HttpRoute, &json, "cluster.local") else {
            panic!("it is known")
        };
        assert_eq!((route.parents.len(), route.invalid), (1, None));
        assert_eq!(route.content.map(|rules| rules.len()), Ok(2));
        let unknown = unknown_fields(Kind::HttpRoute, &json);
        let expected = [
            "spec.new",
            "spec.rules[0].new",
            "spec.rules[1].matches[0].new",
        ];
        assert_eq!(unknown, expected);
    }

    #[test]
    fn other_objects_over_the_limit_have_a_status_and_no_effect() {
        let parent = json!({"group": "", "kind": "Service", "name": "web"});
        let spec = json!({"parentRefs": [{"name": 1}, {"kind": "Gateway", "name": "b"}, parent.clone(), parent],
            "rules": [{}]});
        let Ok(Object::Route(route)) = large(Kind::HttpRoute, spec) else {
            panic!("it is known")
        };
        assert_eq!(route.parents.len(), 1);
        assert_eq!(route.content.unwrap_err().reason, TOO_LARGE);
        let target = json!({"targetRefs": [{"group": "", "kind": "Service", "name": "web"}]});
        let Ok(Object::Policy(policy)) = large(Kind::TrafficPolicy, target) else {
            panic!("it is known")
        };
        assert_eq!(policy.parents.len(), 1);
        assert_eq!(policy.content.unwrap_err().reason, TOO_LARGE);
        for kind in [Kind::Grant, Kind::TrafficTarget] {
            assert!(large(kind, json!({})).is_err(), "{kind}");
        }
    }
}
