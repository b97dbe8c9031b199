//! TrafficSplits and HTTPRouteGroups of the Service Mesh Interface as objects of Kubernetes.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;

use super::convert::{ConvertError, key};
use super::gateway::{GatewayKind, meta};
use crate::index::object::{Kind, Object};
use crate::routes::smi;

#[derive(Clone, Debug)]
pub(super) struct TrafficSplit;

#[derive(Clone, Debug)]
pub(super) struct RouteGroup;

impl GatewayKind for TrafficSplit {
    const GROUP: &'static str = smi::SPLIT_GROUP;
    const KIND: Kind = Kind::TrafficSplit;
    const PLURAL: &'static str = "trafficsplits";
    // Of the earlier ones, v1alpha2 has no matches.
    const VERSIONS: &'static [&'static str] = &[smi::VERSION, "v1alpha3", "v1alpha2"];
    type Spec = smi::SplitSpec;

    fn convert(metadata: &ObjectMeta, spec: &Value) -> Result<Object, ConvertError> {
        let uid = metadata.uid.as_deref().unwrap_or_default();
        let split = smi::split(meta(Self::KIND, metadata)?, uid, spec);
        split.map(Object::Split).map_err(ConvertError)
    }
}

impl GatewayKind for RouteGroup {
    const GROUP: &'static str = smi::SPECS_GROUP;
    const KIND: Kind = Kind::RouteGroup;
    const PLURAL: &'static str = "httproutegroups";
    const VERSIONS: &'static [&'static str] = &[smi::VERSION];
    type Spec = smi::GroupSpec;

    fn convert(metadata: &ObjectMeta, spec: &Value) -> Result<Object, ConvertError> {
        let group = smi::group(key(metadata)?, spec);
        group.map(Object::RouteGroup).map_err(ConvertError)
    }
}
