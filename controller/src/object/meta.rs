//! The metadata of objects. Plain values.

use std::sync::Arc;

use super::{Key, Kind};

/// The metadata of a route or of a policy.
pub struct Meta {
    /// HTTPRoute, GRPCRoute or TCPRoute.
    pub kind: Kind,
    /// Namespace and name.
    pub key: Key,
    /// The creation time in seconds since 1970, or 0.
    pub created: i64,
    /// The UID, or empty.
    pub uid: Arc<str>,
    /// The generation, or 0.
    pub generation: i64,
    /// The length of the spec.
    pub bytes: usize,
    /// The applied fields that the API server has dropped, for conditions.
    pub dropped: Option<Arc<String>>,
}

impl Meta {
    /// The metadata of an object with this spec.
    pub fn new(
        kind: Kind,
        key: Key,
        created: i64,
        (uid, generation): (&str, i64),
        spec: &str,
    ) -> Meta {
        Meta {
            kind,
            key,
            created,
            uid: uid.into(),
            generation,
            bytes: spec.len(),
            dropped: None,
        }
    }
}
