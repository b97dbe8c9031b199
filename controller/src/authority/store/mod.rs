//! Where the authority's state lies, for all replicas alike: a Secret, or a folder. Two providers
//! that keep one promise.
//!
//! A write names what it was made from, and is refused where somebody has written since: of two
//! replicas that do the same at the same moment one does it, and the other reads what the first has
//! written. A store decides nothing.

pub mod files;
pub mod kubernetes;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use futures::Stream;

use super::material::Fields;

/// What a store holds.
#[derive(Clone, PartialEq, Eq)]
pub struct Stored {
    /// The mesh's fields.
    pub fields: Fields,
    /// What somebody asks of the rotation, as it was written.
    pub request: Option<String>,
    /// Another one after each write.
    pub version: String,
}

/// What became of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// It is done.
    Done,
    /// Somebody else was quicker: read again.
    Raced,
}

/// Why a store cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The Kubernetes API refuses.
    #[error("cannot {0}: {1}")]
    Api(String, #[source] Box<kube::Error>),
    /// The Kubernetes API does not answer.
    #[error("cannot {0}: the Kubernetes API does not answer")]
    Silent(String),
    /// A file cannot be read or written.
    #[error("{path}: {1}", path = .0.display())]
    File(PathBuf, #[source] io::Error),
}

/// One of the providers.
pub trait Store: Send + Sync + 'static {
    /// Where it is, for people: "Secret service-mesh/diy-service-mesh-ca".
    fn place(&self) -> String;

    /// What it holds; none where nothing was ever put there.
    fn read(&self) -> impl Future<Output = Result<Option<Stored>, StoreError>> + Send;

    /// Puts these fields in the place of all that are the mesh's own, and takes the request away,
    /// unless somebody has written since `before` was read (none: unless somebody has put something
    /// there).
    fn write(
        &self,
        fields: &Fields,
        before: Option<&Stored>,
    ) -> impl Future<Output = Result<Written, StoreError>> + Send;

    /// An item whenever there may be something new to read. It never ends.
    fn changes(&self) -> impl Stream<Item = ()> + Send;

    /// What each replica has reported last, by its name.
    fn reports(&self) -> impl Future<Output = Result<BTreeMap<String, String>, StoreError>> + Send;

    /// Leaves a replica's report, or takes it away.
    fn report(
        &self,
        name: &str,
        report: Option<&str>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;
}
