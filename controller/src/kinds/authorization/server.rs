//! The external authorization server of a policy, and its condition. Pure.

use std::fmt;

use crate::object::{Condition, Key, Rejection};

/// A port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// The Service.
    pub service: Key,
    /// Its port.
    pub port: u16,
}

/// The name of the backend in messages.
impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.service, self.port)
    }
}

impl Server {
    /// The condition of a policy with this server, which the catalog has or lacks.
    pub fn condition(&self, exists: Result<(), Rejection>) -> Condition {
        let (reason, message) = match exists {
            Ok(()) => (
                "ResolvedRefs",
                format!("the authorization server {self} exists"),
            ),
            Err(Rejection {
                reason, message, ..
            }) => (reason, format!("spec.externalAuth.backendRef: {message}")),
        };
        Condition::new("ResolvedRefs", reason == "ResolvedRefs", reason, message)
    }
}
