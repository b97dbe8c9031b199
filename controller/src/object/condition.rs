//! The conditions of objects, and their types and reasons. Plain values.

/// A reason of the specification.
pub(crate) const UNSUPPORTED_VALUE: &str = "UnsupportedValue";
/// True while a part of a route or of a policy is invalid, and the rest applies.
pub const PARTIALLY_INVALID: &str = "PartiallyInvalid";
/// The condition of the mesh about headless Services: False while older ones decide at some pods.
pub const APPLIES_TO_ALL_PODS: &str = "diy-service-mesh.dev/AppliesToAllPods";
/// True while an AuthorizationPolicy has an ALLOW rule without a caller, destination or request.
pub const ALLOWS_ALL: &str = "diy-service-mesh.dev/AllowsAll";
/// The API server has dropped fields of the policy, so that its author may not know.
pub const FIELDS_DROPPED: &str = "FieldsDropped";
pub(crate) const OLDER_SERVICE: &str = "OlderService";
/// For references to backends.
pub const INVALID_KIND: &str = "InvalidKind";
/// For references to backends.
pub const BACKEND_NOT_FOUND: &str = "BackendNotFound";
/// For references to backends.
pub const REF_NOT_PERMITTED: &str = "RefNotPermitted";

/// A condition of `status.parents`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Condition {
    /// "Accepted", "ResolvedRefs", ...
    pub kind: &'static str,
    /// Whether it holds.
    pub holds: bool,
    /// A reason of the specification, or of a condition of the mesh.
    pub reason: &'static str,
    /// The error, its place, and the remedy.
    pub message: String,
    /// The generation of the route that it is about, if it may be an earlier one.
    pub generation: Option<i64>,
}

impl Condition {
    /// A condition.
    pub fn new(kind: &'static str, holds: bool, reason: &'static str, message: String) -> Self {
        Condition {
            kind,
            holds,
            reason,
            message,
            generation: None,
        }
    }

    /// The value in a status.
    pub fn status(&self) -> &'static str {
        if self.holds { "True" } else { "False" }
    }

    /// Whether its author has to do something.
    pub fn is_problem(&self) -> bool {
        self.holds == (self.kind == PARTIALLY_INVALID) || self.reason == FIELDS_DROPPED
    }
}
