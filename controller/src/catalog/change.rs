//! The changes of the catalog. Plain values.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::kinds::Object;
use crate::object::{Key, Kind};

/// A change of the catalog.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "most are objects")]
pub enum Change {
    /// A new or changed object.
    Apply(Object),
    /// A deleted object.
    Delete(Kind, Key),
    /// All objects of a kind. Others are deleted.
    Reset(Kind, Vec<Object>),
    /// A kind is not installed, and has no objects.
    NotInstalled(Kind),
    /// The source could not list an optional kind so far, and nothing waits for it any longer.
    /// States that depend on it are withheld until it is listed.
    Unreadable(Kind),
    /// The AuthorizationPolicies of these namespaces were deleted with their definition. The pods wait
    /// for others, until these are listed.
    Lost(BTreeSet<Arc<str>>),
    /// The source has no other changes of a kind up to a resource version.
    Bookmark(Kind),
    /// The epoch of the resource versions of the Kubernetes API.
    Epoch(u64),
}

/// A change and its resource version.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// The change.
    pub change: Change,
    /// The resource version of the list or of the object, if it is an integer.
    pub version: Option<u64>,
}

impl From<Change> for Event {
    /// An event of a source without resource versions.
    fn from(change: Change) -> Event {
        Event {
            change,
            version: None,
        }
    }
}
