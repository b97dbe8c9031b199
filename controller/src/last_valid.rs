//! The last valid state of an object, which stays in force while the object is invalid. Pure.
//!
//! Routes, splits and policies are checked after the API server has stored them. An invalid change
//! gets a condition, and the traffic stays as it is: the "Fall Back" of the Gateway API
//! (`RouteConditionPartiallyInvalid`). `crate::index::revisions` restores such states after a
//! restart.

use std::sync::Arc;

use serde_json::Value;

use crate::index::object::{Key, Object};
use crate::routes::attach::RouteId;
use crate::routes::model::Rejection;
use crate::routes::{Condition, PARTIALLY_INVALID, ParentReference, UNSUPPORTED_VALUE};

/// The length of a spec that is kept. An invalid object whose former spec was longer has no effect.
const MAX_SPEC_BYTES: usize = 128 * 1024;

/// The state of an object that is in force.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The UID of the object, or empty.
    pub uid: Arc<str>,
    /// The generation of the state.
    pub generation: i64,
    /// Its spec, unless it is too long.
    pub spec: Option<Arc<str>>,
}

/// The latest state of an object, which is invalid.
#[derive(Clone, Debug, PartialEq)]
pub struct Invalid {
    /// Why it is not accepted.
    pub rejection: Rejection,
    /// Its parents or targets.
    pub parents: Vec<ParentReference>,
}

/// An object whose last valid state stays in force.
pub trait FallBack: Sized {
    /// The object, if it has this type.
    fn of_object(object: &Object) -> Option<&Self>;

    /// The state in force, or the latest one if none is.
    fn origin(&self) -> &Origin;

    /// Whether the latest state is invalid.
    fn is_invalid(&self) -> bool;

    /// Whether a state is in force.
    fn is_in_force(&self) -> bool;

    /// Whether an earlier state is in force.
    fn has_fallen_back(&self) -> bool {
        self.is_invalid() && self.is_in_force()
    }

    /// Uses the state of `former`. The latest one remains for conditions.
    fn fall_back(&mut self, former: &Self);

    /// Falls back to the latest one of the former states, if the object is invalid.
    fn with_last_valid<'a>(mut self, formers: impl IntoIterator<Item = &'a Self>) -> Self
    where
        Self: 'a,
    {
        if !self.is_invalid() {
            return self;
        }
        // An object may have the name of a deleted one.
        let uid = self.origin().uid.clone();
        let is_usable = |former: &&Self| {
            let Origin { uid: of, spec, .. } = former.origin();
            former.is_in_force() && *of == uid && spec.is_some()
        };
        let formers = formers.into_iter().filter(is_usable);
        if let Some(former) = formers.max_by_key(|former| former.origin().generation) {
            self.fall_back(former);
        }
        self
    }
}

impl Origin {
    /// A state of the object with this UID.
    pub fn new(uid: &str, generation: i64, spec: &str) -> Origin {
        Origin {
            uid: uid.into(),
            generation,
            spec: (spec.len() <= MAX_SPEC_BYTES).then(|| spec.into()),
        }
    }

    /// The spec, for a stored copy.
    pub fn spec(&self) -> Option<Value> {
        serde_json::from_str(self.spec.as_deref()?).ok()
    }
}

impl Invalid {
    /// The latest state of an object, whose content is replaced by that of a former one.
    pub fn replace<T: Clone>(
        content: &mut Result<T, Rejection>,
        parents: &mut Vec<ParentReference>,
        invalid: &mut Option<Box<Invalid>>,
        former: (&Result<T, Rejection>, &[ParentReference]),
    ) {
        let content = std::mem::replace(content, former.0.clone());
        let parents = std::mem::replace(parents, former.1.to_vec());
        if let Err(rejection) = content {
            *invalid = Some(Box::new(Invalid { rejection, parents }));
        }
    }

    /// The conditions at a parent, where the state in force is `accepted` if it has this parent.
    pub fn conditions(&self, origin: &Origin, accepted: Option<Condition>) -> Vec<Condition> {
        let Rejection {
            reason,
            message,
            is_partial,
        } = &self.rejection;
        let generation = origin.generation;
        match accepted {
            Some(accepted) if accepted.holds && *is_partial => {
                let message = format!("Fall Back to generation {generation}: {message}");
                let accepted = Condition {
                    generation: Some(generation),
                    ..accepted
                };
                let partial = Condition::new(PARTIALLY_INVALID, true, UNSUPPORTED_VALUE, message);
                vec![accepted, partial]
            }
            Some(accepted) if accepted.holds => {
                let message = format!("{message}; generation {generation} stays in force");
                vec![Rejection::new(reason, message).condition()]
            }
            _ => vec![self.rejection.condition()],
        }
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
