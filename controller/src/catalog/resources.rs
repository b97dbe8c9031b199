//! The kinds of the catalog as resources of the API server, and the objects of custom resources:
//! routes, grants and policies, with their stored states.
//!
//! The crate `gateway-api` is for an earlier version of `kube`, and its types reject the whole list
//! of objects if one has a value of a later release. So `spec` is parsed per object, in
//! `crate::routes::parse`.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::convert::{CatalogObject, ConvertError, created, key};
use crate::fields::with_unknown_fields;
use crate::index::object::{Key, Kind, Object};
use crate::last_valid::{Origin, Revision};
use crate::policy;
use crate::policy::spec::TrafficPolicySpec;
use crate::routes::attach::RouteId;
use crate::routes::model::Grant;
use crate::routes::parse::{self, Meta};
use crate::routes::smi::{self, GroupSpec, SplitSpec};
use crate::routes::spec::{GrantSpec, GrpcMatch, HttpMatch, RouteSpec, Rule, TcpMatch};

/// The label of ControllerRevisions of the mesh. Its value is the kind of their objects.
pub(crate) const LAST_VALID_LABEL: &str = "diy-service-mesh.dev/last-valid";
const GATEWAY: &str = "gateway.networking.k8s.io";

/// A kind in the versions that have all fields that are read, the preferred one first.
pub(super) fn resources(kind: Kind) -> Vec<ApiResource> {
    let (group, plural, versions): (_, _, &[_]) = match kind {
        Kind::Service => ("", "services", &["v1"]),
        Kind::Slice => ("discovery.k8s.io", "endpointslices", &["v1"]),
        Kind::Pod => ("", "pods", &["v1"]),
        Kind::Node => ("", "nodes", &["v1"]),
        Kind::HttpRoute => (GATEWAY, "httproutes", &["v1"]),
        Kind::GrpcRoute => (GATEWAY, "grpcroutes", &["v1"]),
        // Of the experimental channel.
        Kind::TcpRoute => (GATEWAY, "tcproutes", &["v1alpha2"]),
        Kind::Grant => (GATEWAY, "referencegrants", &["v1", "v1beta1"]),
        Kind::TrafficPolicy => (policy::GROUP, "trafficpolicies", &[policy::VERSION]),
        Kind::TrafficSplit => {
            // Of the earlier ones, v1alpha2 has no matches.
            let versions = &[smi::VERSION, "v1alpha3", "v1alpha2"];
            (smi::SPLIT_GROUP, "trafficsplits", versions)
        }
        Kind::RouteGroup => (smi::SPECS_GROUP, "httproutegroups", &[smi::VERSION]),
        Kind::Revision => ("apps", "controllerrevisions", &["v1"]),
    };
    let resource = |version: &&str| {
        let kind = GroupVersionKind::gvk(group, version, kind.name());
        ApiResource::from_gvk_with_plural(&kind, plural)
    };
    versions.iter().map(resource).collect()
}

/// A kind in the version that the mesh prefers.
pub(crate) fn resource(kind: Kind) -> ApiResource {
    resources(kind).swap_remove(0)
}

impl CatalogObject for DynamicObject {
    fn convert(&self, kind: Kind, _: &str) -> Result<Object, ConvertError> {
        let (metadata, spec) = (&self.metadata, &self.data["spec"]);
        let uid = metadata.uid.as_deref().unwrap_or_default();
        let state = (uid, metadata.generation.unwrap_or_default());
        let meta = Meta::new(kind, key(metadata)?, created(metadata), state, spec);
        let object = match kind {
            Kind::Grant => grant(meta.key, spec).map(Object::Grant),
            Kind::TrafficPolicy => policy::parse::policy(meta, spec).map(Object::Policy),
            Kind::TrafficSplit => smi::split(meta, spec).map(Object::Split),
            Kind::RouteGroup => smi::group(meta, spec).map(Object::RouteGroup),
            _ => parse::route(meta, spec).map(Object::Route),
        };
        object.map_err(ConvertError)
    }

    fn unknown_fields(&self, kind: Kind) -> Vec<String> {
        let spec = &self.data["spec"];
        let of_spec = match kind {
            Kind::HttpRoute => unknown::<RouteSpec<Rule<HttpMatch>>>(spec),
            Kind::GrpcRoute => unknown::<RouteSpec<Rule<GrpcMatch>>>(spec),
            Kind::TcpRoute => unknown::<RouteSpec<Rule<TcpMatch>>>(spec),
            Kind::Grant => unknown::<GrantSpec>(spec),
            Kind::TrafficPolicy => unknown::<TrafficPolicySpec>(spec),
            Kind::TrafficSplit => unknown::<SplitSpec>(spec),
            Kind::RouteGroup => unknown::<GroupSpec>(spec),
            Kind::Service | Kind::Slice | Kind::Pod | Kind::Node | Kind::Revision => Vec::new(),
        };
        let sections = self.data.as_object().into_iter().flatten();
        let others = sections.filter(|(name, _)| *name != "spec");
        let others = others.map(|(name, _)| name.clone());
        let of_spec = of_spec.into_iter().map(|field| format!("spec.{field}"));
        others.chain(of_spec).collect()
    }
}

impl CatalogObject for ControllerRevision {
    fn convert(&self, _: Kind, trust_domain: &str) -> Result<Object, ConvertError> {
        let data = self.data.as_ref().map_or(&Value::Null, |data| &data.0);
        let name = data["kind"].as_str();
        let mut kinds = Kind::ALL.into_iter().filter(|kind| kind.can_fall_back());
        let kind = kinds.find(|kind| Some(kind.name()) == name);
        let kind = kind.ok_or_else(|| ConvertError(format!("data.kind: {name:?} is unknown")))?;
        let object = match kind {
            Kind::Service => convert_data::<Service>(kind, data, trust_domain),
            _ => convert_data::<DynamicObject>(kind, data, trust_domain),
        };
        Ok(Object::Revision(Revision {
            key: key(&self.metadata)?,
            object: Box::new(object?),
        }))
    }
}

fn convert_data<T: CatalogObject + DeserializeOwned>(
    kind: Kind,
    data: &Value,
    trust_domain: &str,
) -> Result<Object, ConvertError> {
    let object = T::deserialize(data).map_err(|error| ConvertError(format!("data: {error}")))?;
    object.convert(kind, trust_domain)
}

/// The ControllerRevision with a state of an object. `None` if the state cannot be stored.
pub(crate) fn revision(
    name: &str,
    (kind, key): &RouteId,
    origin: &Origin,
) -> Option<ControllerRevision> {
    let resource = resource(*kind);
    let (uid, generation) = (&origin.uid, origin.generation);
    let mut object = json!({
        "apiVersion": resource.api_version, "kind": resource.kind,
        "metadata": {"namespace": *key.namespace, "name": *key.name, "uid": **uid},
    });
    match kind {
        Kind::Service => {
            object["metadata"]["resourceVersion"] = generation.to_string().into();
            object["metadata"]["annotations"] = origin.content()?;
        }
        _ => {
            object["metadata"]["generation"] = generation.into();
            object["spec"] = origin.content()?;
        }
    }
    let label = (LAST_VALID_LABEL.to_owned(), kind.name().to_owned());
    Some(ControllerRevision {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            labels: Some([label].into()),
            ..ObjectMeta::default()
        },
        data: Some(RawExtension(object)),
        revision: generation,
    })
}

/// The object of the catalog for a Service.
#[cfg(test)]
pub(crate) fn service(object: Value) -> Object {
    convert_data::<Service>(Kind::Service, &object, "cluster.local").unwrap()
}

/// The object of the catalog for a stored state.
#[cfg(test)]
pub(crate) fn stored_revision(stored: &Key, id: &RouteId, origin: &Origin) -> Object {
    let mut revision = revision(&stored.name, id, origin).unwrap();
    revision.metadata.namespace = Some(stored.namespace.to_string());
    revision.convert(Kind::Revision, "cluster.local").unwrap()
}

/// The unknown fields of a spec. An error is a condition of the object, or an error of its conversion.
fn unknown<T: DeserializeOwned>(spec: &Value) -> Vec<String> {
    with_unknown_fields::<T, _>(spec).1
}

fn grant(key: Key, spec: &Value) -> Result<Grant, String> {
    let spec = GrantSpec::deserialize(spec).map_err(|error| format!("spec: {error}"))?;
    let kinds = [Kind::HttpRoute, Kind::GrpcRoute, Kind::TcpRoute];
    let from = spec.from.into_iter().filter_map(|from| {
        let mut kinds = kinds.into_iter();
        let kind = kinds.find(|kind| from.group == GATEWAY && from.kind == kind.name())?;
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
