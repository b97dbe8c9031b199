//! The storage of the authority's state, shared by all replicas: a Secret, or a folder.
//!
//! A write names the state that it is based on, and is rejected after a write of another replica,
//! which the next read returns. A store decides nothing.

pub mod files;
pub mod kubernetes;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::time::SystemTime;

use futures::Stream;

use super::state::Fields;
use crate::api::ApiError;

/// The content of a store.
#[derive(Clone, PartialEq, Eq)]
pub struct Stored {
    /// The fields of the mesh.
    pub fields: Fields,
    /// The request for a rotation, as written.
    pub request: Option<String>,
    /// Differs after each write.
    pub version: String,
}

impl Stored {
    /// Whether the fields of the CA have been emptied.
    pub fn is_empty(&self) -> bool {
        ["tls.crt", "tls.key"].into_iter().all(|name| {
            let value = self.fields.get(name);
            value.is_none_or(|value| value.trim_ascii().is_empty())
        })
    }
}

/// The result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The fields are written.
    Done,
    /// The store has changed since it was read.
    Conflict,
}

/// A failure to access a store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A request to the Kubernetes API has failed.
    #[error("cannot {0}: {1}")]
    Api(String, Box<ApiError>),
    /// A file cannot be accessed.
    #[error("{path}: {1}", path = .0.display())]
    File(PathBuf, #[source] io::Error),
}

/// A store.
pub trait Store: Send + Sync + 'static {
    /// The location for messages, such as "Secret service-mesh/diy-service-mesh-ca".
    fn place(&self) -> String;

    /// The content. `None` if there is none.
    fn read(&self) -> impl Future<Output = Result<Option<Stored>, StoreError>> + Send;

    /// The time of the server of the store, if it has one and responds.
    fn date(&self) -> impl Future<Output = Option<SystemTime>> + Send;

    /// The traces of an earlier CA of the mesh: published roots, reports of replicas.
    fn traces(&self) -> impl Future<Output = Result<Vec<String>, StoreError>> + Send;

    /// Replaces all fields and removes the request, unless the store has changed since `before` was
    /// read (`None`: unless the store has content).
    fn write(
        &self,
        fields: &Fields,
        before: Option<&Stored>,
    ) -> impl Future<Output = Result<Written, StoreError>> + Send;

    /// An item after each possible change. Never ends.
    fn changes(&self) -> impl Stream<Item = ()> + Send;

    /// The latest reports by replica.
    fn reports(&self) -> impl Future<Output = Result<BTreeMap<String, String>, StoreError>> + Send;

    /// Writes or removes the report of a replica.
    fn report(
        &self,
        replica: &str,
        report: Option<&str>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;
}
