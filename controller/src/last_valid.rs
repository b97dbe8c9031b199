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

/// The length of a content that is kept. An invalid object whose former content was longer has no
/// effect.
const MAX_CONTENT_BYTES: usize = 128 * 1024;

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

/// Which state of an object is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InForce {
    /// The latest one, which is valid.
    Latest,
    /// An earlier one, because the latest one is invalid.
    Earlier,
    /// None: the latest one is invalid.
    Nothing,
}

/// An object whose last valid state stays in force.
pub trait FallBack: Sized + 'static {
    /// Which state is in force.
    fn in_force(&self) -> InForce;

    /// The state in force, or the latest one if none is. `None`: nothing of the object can be invalid.
    fn origin(&self) -> Option<&Origin>;

    /// Uses the state of `former`. The latest one remains for conditions.
    fn fall_back(&mut self, former: &Self);

    /// Falls back to the latest one of the former states, if the object is invalid.
    fn with_last_valid<'a>(mut self, formers: impl IntoIterator<Item = &'a Self>) -> Self
    where
        Self: 'a,
    {
        if self.in_force() == InForce::Latest {
            return self;
        }
        // An object may have the name of a deleted one.
        let uid = self.origin().map(|origin| origin.uid.clone());
        let is_valid = |former: &&Self| former.in_force() != InForce::Nothing;
        let formers = formers.into_iter().filter(is_valid);
        let usable = formers.filter_map(|former| {
            let origin = former.origin()?;
            let is_usable = Some(&origin.uid) == uid.as_ref() && origin.content.is_some();
            is_usable.then_some((origin.generation, former))
        });
        if let Some((_, former)) = usable.max_by_key(|(generation, _)| *generation) {
            self.fall_back(former);
        }
        self
    }
}

impl InForce {
    /// Of an object with this content in force, unless it is rejected.
    pub fn of<T>(content: &Result<T, Rejection>, invalid: &Option<Box<Invalid>>) -> InForce {
        match (content, invalid) {
            (Err(_), _) => InForce::Nothing,
            (Ok(_), None) => InForce::Latest,
            (Ok(_), Some(_)) => InForce::Earlier,
        }
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
        let in_force = match generation {
            // Objects from files have none.
            0 => "the last valid state".to_owned(),
            number => format!("generation {number}"),
        };
        match accepted {
            Some(accepted) if accepted.holds && *is_partial => {
                let message = format!("Fall Back to {in_force}: {message}");
                let accepted = Condition {
                    generation: Some(generation),
                    ..accepted
                };
                let partial = Condition::new(PARTIALLY_INVALID, true, UNSUPPORTED_VALUE, message);
                vec![accepted, partial]
            }
            Some(accepted) if accepted.holds => {
                let message = format!("{message}; {in_force} stays in force");
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
