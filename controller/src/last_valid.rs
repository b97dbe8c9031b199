//! The last valid state of an object, which stays in force while the object is invalid. Pure.
//!
//! Routes, splits and policies are checked after the API server has stored them. An invalid change
//! gets a condition, and the traffic stays as it is: the "Fall Back" of the Gateway API
//! (`RouteConditionPartiallyInvalid`). `crate::index::revisions` restores such states after a
//! restart.

use std::sync::Arc;

use serde_json::Value;

use crate::index::object::{Key, Kind, Object};
use crate::routes::attach::RouteId;
use crate::routes::model::Rejection;
use crate::routes::parse::Meta;
use crate::routes::{Condition, PARTIALLY_INVALID, ParentReference, UNSUPPORTED_VALUE};

/// The length of a content that is kept. An invalid object whose former content was longer has no
/// effect.
const MAX_CONTENT_BYTES: usize = 128 * 1024;

/// An object that is checked after the API server has stored it: a route, a split, a policy, or the
/// annotations of a canary.
#[derive(Clone, Debug, PartialEq)]
pub struct Checked<T> {
    /// The kind. Of a canary, Service.
    pub kind: Kind,
    /// Namespace and name.
    pub key: Key,
    /// The generation, for conditions.
    pub generation: i64,
    /// The creation time in seconds since 1970, or 0.
    pub created: i64,
    /// The parents or targets of the state in force.
    pub parents: Vec<ParentReference>,
    /// What is in force, or why nothing is.
    pub content: Result<T, Rejection>,
    /// A field with a value that has no effect.
    pub ignored: Option<&'static str>,
    /// At least the length of its part of a message.
    pub bytes: usize,
    /// The state with these parents and this content.
    pub origin: Arc<Origin>,
    /// The latest state, if it is invalid and an earlier one is in force.
    pub invalid: Option<Box<Invalid>>,
}

/// The state of an object that is in force.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The UID of the object, or empty.
    pub uid: Arc<str>,
    /// The generation of the state. Of a Service, which has none, the resource version.
    pub generation: i64,
    /// Its spec as JSON, unless it is too long. Of a Service, the annotations of a canary.
    pub content: Option<Arc<str>>,
}

/// The latest state of an object, which is invalid.
#[derive(Clone, Debug, PartialEq)]
pub struct Invalid {
    /// Why it is not accepted.
    pub rejection: Rejection,
    /// Its parents or targets.
    pub parents: Vec<ParentReference>,
}

impl<T> Checked<T> {
    /// The latest state of an object.
    pub fn new(meta: Meta, parents: Vec<ParentReference>, content: Result<T, Rejection>) -> Self {
        Checked {
            kind: meta.kind,
            key: meta.key,
            generation: meta.origin.generation,
            created: meta.created,
            parents,
            content,
            ignored: None,
            bytes: meta.bytes,
            origin: meta.origin,
            invalid: None,
        }
    }

    /// The object with the content that `convert` makes of its content.
    pub fn and_then<U>(&self, convert: impl FnOnce(&T) -> Result<U, Rejection>) -> Checked<U> {
        Checked {
            kind: self.kind,
            key: self.key.clone(),
            generation: self.generation,
            created: self.created,
            parents: self.parents.clone(),
            content: self
                .content
                .as_ref()
                .map_err(Clone::clone)
                .and_then(convert),
            ignored: self.ignored,
            bytes: self.bytes,
            origin: self.origin.clone(),
            invalid: self.invalid.clone(),
        }
    }

    /// The parents as the author wrote them, which may differ from those in force.
    pub fn written_parents(&self) -> &[ParentReference] {
        let invalid = self.invalid.as_ref();
        invalid.map_or(&self.parents, |invalid| &invalid.parents)
    }

    /// The conditions at a parent, where the state in force is `accepted` if it has this parent.
    pub fn conditions(&self, parent: &ParentReference, accepted: Condition) -> Vec<Condition> {
        let Some(invalid) = &self.invalid else {
            return vec![accepted];
        };
        let Rejection {
            reason,
            message,
            is_partial,
        } = &invalid.rejection;
        if !accepted.holds || !self.parents.contains(parent) {
            return vec![invalid.rejection.condition()];
        }
        let generation = self.origin.generation;
        let in_force = match generation {
            // Objects from files have none.
            0 => "the last valid state".to_owned(),
            number => format!("generation {number}"),
        };
        if !is_partial {
            let message = format!("{message}; {in_force} stays in force");
            return vec![Rejection::new(reason, message).condition()];
        }
        let message = format!("Fall Back to {in_force}: {message}");
        let accepted = Condition {
            generation: Some(generation),
            ..accepted
        };
        let partial = Condition::new(PARTIALLY_INVALID, true, UNSUPPORTED_VALUE, message);
        vec![accepted, partial]
    }
}

impl<T: Clone> Checked<T> {
    /// Falls back to the latest one of the former states, if the object is invalid.
    pub fn fall_back<'a>(&mut self, formers: impl Iterator<Item = &'a Self>)
    where
        T: 'a,
    {
        let rejection = match (&self.content, &self.invalid) {
            (Err(rejection), _) => Some(rejection.clone()),
            (Ok(_), Some(_)) => None,
            (Ok(_), None) => return,
        };
        // An object may have the name of a deleted one.
        let usable = formers.filter(|former| {
            let origin = &former.origin;
            former.content.is_ok() && origin.uid == self.origin.uid && origin.content.is_some()
        });
        let Some(former) = usable.max_by_key(|former| former.origin.generation) else {
            return;
        };
        let parents = std::mem::take(&mut self.parents);
        let latest = rejection.map(|rejection| Box::new(Invalid { rejection, parents }));
        *self = Checked {
            generation: self.generation,
            created: self.created,
            invalid: latest.or(self.invalid.take()),
            ..former.clone()
        };
    }
}

impl Origin {
    /// A state of the object with this UID.
    pub fn new(uid: &str, generation: i64, content: &str) -> Origin {
        Origin {
            uid: uid.into(),
            generation,
            content: (content.len() <= MAX_CONTENT_BYTES).then(|| content.into()),
        }
    }

    /// The content, for a stored copy.
    pub fn content(&self) -> Option<Value> {
        serde_json::from_str(self.content.as_deref()?).ok()
    }
}

/// A stored state of an object: a ControllerRevision.
#[derive(Clone, Debug, PartialEq)]
pub struct Revision {
    /// Namespace and name of the ControllerRevision.
    pub key: Key,
    /// The object in this state.
    pub object: Box<Object>,
}

/// What is to be changed in the cluster.
#[derive(Clone, Debug, PartialEq)]
pub enum Write {
    /// This state of an object is to be stored.
    Create {
        /// Kind, namespace and name of the object.
        id: RouteId,
        /// Its state.
        origin: Origin,
    },
    /// A ControllerRevision is no longer needed.
    Delete {
        /// Its namespace and name.
        revision: Key,
        /// Kind, namespace and name of the object.
        id: RouteId,
    },
}

impl Write {
    /// Kind, namespace and name of the object.
    pub fn id(&self) -> &RouteId {
        match self {
            Write::Create { id, .. } | Write::Delete { id, .. } => id,
        }
    }

    /// The name of the ControllerRevision.
    pub fn revision_name(&self) -> String {
        match self {
            Write::Create { id, origin } => {
                let kind = id.0.name().to_ascii_lowercase();
                format!("{kind}-{}-{}", origin.uid, origin.generation)
            }
            Write::Delete { revision, .. } => revision.name.to_string(),
        }
    }
}
