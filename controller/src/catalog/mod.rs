//! Where the catalog comes from: providers that send the same changes, whatever they read. The
//! first stop of the control plane.
//!
//! A provider sends one [`Change::Reset`](crate::index::object::Change) of each kind once it has
//! seen everything, then what changes. It decides nothing; the index does.

pub mod files;
pub mod kubernetes;
mod manifest;

use crate::index::convert::{self, ConvertError};
use crate::index::object::{Kind, Object};

/// An object of Kubernetes that the catalog is made of.
trait CatalogObject {
    const KIND: Kind;

    /// What the index keeps of it; identities are of this trust domain.
    fn convert(&self, trust_domain: &str) -> Result<Object, ConvertError>;
}

impl CatalogObject for k8s_openapi::api::core::v1::Service {
    const KIND: Kind = Kind::Service;

    fn convert(&self, _: &str) -> Result<Object, ConvertError> {
        convert::service(self).map(Object::Service)
    }
}

impl CatalogObject for k8s_openapi::api::discovery::v1::EndpointSlice {
    const KIND: Kind = Kind::Slice;

    fn convert(&self, _: &str) -> Result<Object, ConvertError> {
        convert::slice(self).map(Object::Slice)
    }
}

impl CatalogObject for k8s_openapi::api::core::v1::Pod {
    const KIND: Kind = Kind::Pod;

    fn convert(&self, trust_domain: &str) -> Result<Object, ConvertError> {
        convert::pod(self, trust_domain).map(Object::Pod)
    }
}
