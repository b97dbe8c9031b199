//! HTTPRoutes, GRPCRoutes, TCPRoutes, ReferenceGrants and TrafficPolicies as objects of Kubernetes.
//!
//! The crate `gateway-api` is for an earlier version of `kube`, and its types reject the whole list
//! of objects if one has a value of a later release. So `spec` is parsed per object, in
//! `crate::routes::parse`.

use std::borrow::Cow;
use std::marker::PhantomData;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Client, Resource};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::convert::{CatalogObject, ConvertError, key};
use super::manifest::with_unknown_fields;
use crate::index::object::{Kind, Object};
use crate::policy;
use crate::policy::spec::TrafficPolicySpec;
use crate::routes::model::Grant;
use crate::routes::parse;
use crate::routes::spec::{self, GrantSpec, GrpcMatch, HttpMatch, RouteSpec, TcpMatch};

pub(super) const GROUP: &str = "gateway.networking.k8s.io";

/// An object of a kind of the Gateway API, or of the mesh.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct GatewayObject<K> {
    metadata: ObjectMeta,
    #[serde(default)]
    spec: Value,
    #[serde(skip)]
    kind: PhantomData<K>,
}

/// A kind of the Gateway API, or of the mesh.
pub(super) trait GatewayKind: Clone + std::fmt::Debug + Send + Sync + 'static {
    const GROUP: &'static str = GROUP;
    const KIND: Kind;
    const PLURAL: &'static str;
    /// The versions that have all fields that are read, the preferred one first.
    const VERSIONS: &'static [&'static str];
    /// All fields of the spec.
    type Spec: DeserializeOwned;

    fn convert(metadata: &ObjectMeta, spec: &Value) -> Result<Object, ConvertError>;
}

#[derive(Clone, Debug)]
pub(super) struct HttpRoute;

#[derive(Clone, Debug)]
pub(super) struct GrpcRoute;

/// Of the experimental channel.
#[derive(Clone, Debug)]
pub(super) struct TcpRoute;

#[derive(Clone, Debug)]
pub(super) struct ReferenceGrant;

#[derive(Clone, Debug)]
pub(super) struct TrafficPolicy;

impl GatewayKind for HttpRoute {
    const KIND: Kind = Kind::HttpRoute;
    const PLURAL: &'static str = "httproutes";
    const VERSIONS: &'static [&'static str] = &["v1"];
    type Spec = RouteSpec<spec::Rule<HttpMatch>>;

    fn convert(metadata: &ObjectMeta, spec: &Value) -> Result<Object, ConvertError> {
        route(Self::KIND, metadata, spec)
    }
}

impl GatewayKind for GrpcRoute {
    const KIND: Kind = Kind::GrpcRoute;
    const PLURAL: &'static str = "grpcroutes";
    const VERSIONS: &'static [&'static str] = &["v1"];
    type Spec = RouteSpec<spec::Rule<GrpcMatch>>;

    fn convert(metadata: &ObjectMeta, spec: &Value) -> Result<Object, ConvertError> {
        route(Self::KIND, metadata, spec)
    }
}

impl GatewayKind for TcpRoute {
    const KIND: Kind = Kind::TcpRoute;
    const PLURAL: &'static str = "tcproutes";
    const VERSIONS: &'static [&'static str] = &["v1alpha2"];
    type Spec = RouteSpec<spec::Rule<TcpMatch>>;

    fn convert(metadata: &ObjectMeta, spec: &Value) -> Result<Object, ConvertError> {
        route(Self::KIND, metadata, spec)
    }
}

impl GatewayKind for ReferenceGrant {
    const KIND: Kind = Kind::Grant;
    const PLURAL: &'static str = "referencegrants";
    const VERSIONS: &'static [&'static str] = &["v1", "v1beta1"];
    type Spec = GrantSpec;

    fn convert(metadata: &ObjectMeta, spec: &Value) -> Result<Object, ConvertError> {
        let spec = GrantSpec::deserialize(spec);
        let spec = spec.map_err(|error| ConvertError(format!("spec: {error}")))?;
        let kinds = [Kind::HttpRoute, Kind::GrpcRoute, Kind::TcpRoute];
        let from = spec.from.into_iter().filter_map(|from| {
            let mut kinds = kinds.into_iter();
            let kind = kinds.find(|kind| from.group == GROUP && from.kind == kind.name())?;
            Some((kind, from.namespace.into()))
        });
        let to = spec.to.into_iter();
        let to = to.filter(|to| to.group.is_empty() && to.kind == "Service");
        let name = |name: String| Some(name).filter(|name| !name.is_empty());
        Ok(Object::Grant(Grant {
            key: key(metadata)?,
            from: from.collect(),
            to: to
                .map(|to| to.name.and_then(name).map(Into::into))
                .collect(),
        }))
    }
}

impl GatewayKind for TrafficPolicy {
    const GROUP: &'static str = policy::GROUP;
    const KIND: Kind = Kind::TrafficPolicy;
    const PLURAL: &'static str = "trafficpolicies";
    const VERSIONS: &'static [&'static str] = &[policy::VERSION];
    type Spec = TrafficPolicySpec;

    fn convert(metadata: &ObjectMeta, spec: &Value) -> Result<Object, ConvertError> {
        let generation = metadata.generation.unwrap_or_default();
        let policy = policy::parse::policy(key(metadata)?, generation, created(metadata), spec);
        policy.map(Object::Policy).map_err(ConvertError)
    }
}

/// The creation time in seconds since 1970, or 0.
fn created(metadata: &ObjectMeta) -> i64 {
    let created = metadata.creation_timestamp.as_ref();
    created.map_or(0, |time| time.0.as_second())
}

fn route(kind: Kind, metadata: &ObjectMeta, spec: &Value) -> Result<Object, ConvertError> {
    parse::route(meta(kind, metadata)?, spec)
        .map(Object::Route)
        .map_err(ConvertError)
}

pub(super) fn meta(kind: Kind, metadata: &ObjectMeta) -> Result<parse::Meta, ConvertError> {
    Ok(parse::Meta {
        kind,
        key: key(metadata)?,
        generation: metadata.generation.unwrap_or_default(),
        created: created(metadata),
    })
}

impl<K: GatewayKind> CatalogObject for GatewayObject<K> {
    const KIND: Kind = K::KIND;

    fn convert(&self, _: &str) -> Result<Object, ConvertError> {
        K::convert(&self.metadata, &self.spec)
    }

    fn unknown_fields_of_spec(&self) -> Vec<String> {
        // An error is a condition of the object, or an error of its conversion.
        let (_, unknown) = with_unknown_fields::<K::Spec, _>(&self.spec);
        let in_spec = unknown.into_iter().map(|field| format!("spec.{field}"));
        in_spec.collect()
    }
}

impl<K: GatewayKind> Resource for GatewayObject<K> {
    /// The version of the API.
    type DynamicType = &'static str;
    type Scope = kube::core::NamespaceResourceScope;

    fn kind(_: &Self::DynamicType) -> Cow<'_, str> {
        K::KIND.name().into()
    }

    fn group(_: &Self::DynamicType) -> Cow<'_, str> {
        K::GROUP.into()
    }

    fn version(version: &Self::DynamicType) -> Cow<'_, str> {
        (*version).into()
    }

    fn plural(_: &Self::DynamicType) -> Cow<'_, str> {
        K::PLURAL.into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

impl<K: GatewayKind> GatewayObject<K> {
    /// The objects of all namespaces, by each version of the API.
    pub(super) fn apis(client: &Client) -> Vec<Api<Self>> {
        let versions = K::VERSIONS.iter();
        versions
            .map(|version| Api::all_with(client.clone(), version))
            .collect()
    }
}
