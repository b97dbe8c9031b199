//! An object that is checked after the API server has stored it. Pure.
//!
//! An invalid part has no effect, or its requests fail. The rest applies. Only the latest state of
//! the object decides, so that all replicas agree, also after a restart.

use std::sync::Arc;

use super::condition::{PARTIALLY_INVALID, UNSUPPORTED_VALUE};
use super::{Condition, Key, Kind, Meta, ObjectStatus, Rejection, TargetReference, TargetStatus};

/// A route, a split, a policy, or the annotations of a canary.
#[derive(Clone, Debug, PartialEq)]
pub struct Checked<T> {
    /// The kind. For a canary: Service.
    pub kind: Kind,
    /// Namespace and name.
    pub key: Key,
    /// The UID, or empty.
    pub uid: Arc<str>,
    /// The generation, for conditions.
    pub generation: i64,
    /// The creation time in seconds since 1970, or 0.
    pub created: i64,
    /// The parents or targets.
    pub parents: Vec<TargetReference>,
    /// The content that applies, or the reason why none applies.
    pub content: Result<T, Rejection>,
    /// The invalid part of an object whose content applies.
    pub invalid: Option<Rejection>,
    /// A field with a value that has no effect.
    pub ignored: Option<&'static str>,
    /// At least the length of its part of a message.
    pub bytes: usize,
    /// The applied fields that the API server has dropped.
    pub dropped: Option<Arc<String>>,
}

impl<T> Checked<T> {
    /// The object with this content.
    pub fn new(meta: Meta, parents: Vec<TargetReference>, content: Result<T, Rejection>) -> Self {
        Checked {
            kind: meta.kind,
            key: meta.key,
            uid: meta.uid,
            generation: meta.generation,
            created: meta.created,
            parents,
            content,
            invalid: None,
            ignored: None,
            bytes: meta.bytes + meta.dropped.as_ref().map_or(0, |text| text.len()),
            dropped: meta.dropped,
        }
    }

    /// The object with the content that `convert` makes of its content.
    pub fn and_then<U>(&self, convert: impl FnOnce(&T) -> Result<U, Rejection>) -> Checked<U> {
        let content = self.content.as_ref().map_err(Clone::clone);
        Checked {
            kind: self.kind,
            key: self.key.clone(),
            uid: self.uid.clone(),
            generation: self.generation,
            created: self.created,
            parents: self.parents.clone(),
            content: content.and_then(convert),
            invalid: self.invalid.clone(),
            ignored: self.ignored,
            bytes: self.bytes,
            dropped: self.dropped.clone(),
        }
    }

    /// The status of the object.
    pub fn status(&self, parents: Vec<TargetStatus>) -> ObjectStatus {
        ObjectStatus {
            uid: self.uid.clone(),
            ..ObjectStatus::new(self.kind, self.key.clone(), self.generation, parents)
        }
    }

    /// Why the object is not accepted, if no part of it is valid.
    pub fn rejection(&self) -> Option<&Rejection> {
        let invalid = self.invalid.as_ref().filter(|one| !one.is_partial);
        self.content.as_ref().err().or(invalid)
    }

    /// The conditions at a parent, where the valid part has the condition `accepted`.
    pub fn conditions(&self, mut accepted: Condition) -> Vec<Condition> {
        if let Some(dropped) = &self.dropped {
            accepted.message = format!("{}; {dropped}", accepted.message);
        }
        match self.invalid.as_ref().filter(|_| accepted.holds) {
            None => vec![accepted],
            Some(Rejection { message, .. }) => {
                let message = message.clone();
                let partial = Condition::new(PARTIALLY_INVALID, true, UNSUPPORTED_VALUE, message);
                vec![accepted, partial]
            }
        }
    }
}
