//! The kinds of the catalog as resources of the API server, and the objects of custom resources:
//! routes, grants and policies.
//!
//! The crate `gateway-api` is for an earlier version of `kube`, and its types reject the whole list
//! of objects if one has a value of a later release. So `spec` is parsed per object, in
//! `crate::routes::parse`.

use std::sync::Arc;

use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::convert::{CatalogObject, ConvertError, created, key};
use crate::authorization;
use crate::authorization::smi::{TargetSpec, TcpSpec, target, tcp};
use crate::authorization::spec::AuthorizationPolicySpec;
use crate::fields::with_unknown_fields;
use crate::index::object::{Key, Kind, Object};
use crate::policy;
use crate::policy::spec::TrafficPolicySpec;
use crate::routes::backend::{backend, is_backend};
use crate::routes::mesh::Mesh;
use crate::routes::model::Grant;
use crate::routes::parse::{self, Meta};
use crate::routes::smi::{self, GroupSpec, SplitSpec};
use crate::routes::spec::{
    BackendSpec, GrantSpec, GrpcMatch, HttpMatch, RouteSpec, Rule, TcpMatch,
};

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

impl CatalogObject for DynamicObject {
    fn convert(&self, kind: Kind, trust_domain: &str) -> Result<Object, ConvertError> {
        let (metadata, spec) = (&self.metadata, &self.data["spec"]);
        let uid = metadata.uid.as_deref().unwrap_or_default();
        let state = (uid, metadata.generation.unwrap_or_default());
        let meta = Meta::new(kind, key(metadata)?, created(metadata), state, spec);
        let object = match kind {
            Kind::Grant => grant(meta.key, spec).map(Object::Grant),
            Kind::TrafficPolicy if !is_backend(spec) => {
                policy::parse::policy(meta, spec).map(Object::Policy)
            }
            Kind::Backend | Kind::TrafficPolicy => {
                Ok(Object::Backend(backend(meta, spec, trust_domain)))
            }
            Kind::Authorization => Ok(Object::Authorization(authorization::parse::policy(
                meta,
                spec,
                &self.data["status"],
                trust_domain,
            ))),
            Kind::TrafficSplit => smi::split(meta, spec).map(Object::Split),
            Kind::RouteGroup => smi::group(meta, spec).map(Object::RouteGroup),
            Kind::TrafficTarget => Ok(Object::TrafficTarget(target(meta, spec, trust_domain))),
            Kind::TcpGroup => Ok(Object::TcpGroup(tcp(meta, spec))),
            Kind::Mesh => Ok(Object::Mesh(Mesh::new(meta, spec))),
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
            Kind::Backend => unknown::<BackendSpec>(spec),
            Kind::TrafficPolicy => unknown::<TrafficPolicySpec>(spec),
            Kind::Authorization => unknown::<AuthorizationPolicySpec>(spec),
            Kind::TrafficSplit => unknown::<SplitSpec>(spec),
            Kind::RouteGroup => unknown::<GroupSpec>(spec),
            Kind::TrafficTarget => unknown::<TargetSpec>(spec),
            Kind::TcpGroup => unknown::<TcpSpec>(spec),
            Kind::Service | Kind::Slice | Kind::Pod | Kind::Node | Kind::Mesh => Vec::new(),
        };
        let sections = self.data.as_object().into_iter().flatten();
        let others = sections.filter(|(name, _)| *name != "spec");
        let others = others.map(|(name, _)| name.clone());
        let of_spec = of_spec.into_iter().map(|field| format!("spec.{field}"));
        others.chain(of_spec).collect()
    }
}

/// The unknown fields of a spec. An error is a condition of the object, or an error of its conversion.
fn unknown<T: DeserializeOwned>(spec: &Value) -> Vec<String> {
    with_unknown_fields::<T, _>(spec).1
}

fn grant(key: Key, spec: &Value) -> Result<Grant, String> {
    let spec = GrantSpec::deserialize(spec).map_err(|error| format!("spec: {error}"))?;
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
