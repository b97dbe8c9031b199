//! Routes of the Gateway API: HTTPRoutes, GRPCRoutes, TCPRoutes and ReferenceGrants with Services as
//! parents, and with Services and hosts outside of the cluster as backends. Pure: `parse.rs` reads
//! objects, `attach.rs` merges the routes of a Service, and `crate::index::routes` applies both to the
//! catalog.

pub mod attach;
pub mod backend;
pub mod canary;
pub(crate) mod external;
pub(crate) mod filters;
pub(crate) mod matches;
pub mod model;
pub mod parse;
#[allow(missing_docs)]
pub mod spec;

/// The reasons of conditions that do not hold, as the specification names them.
const UNSUPPORTED_PROTOCOL: &str = "UnsupportedProtocol";
const INCOMPATIBLE_FILTERS: &str = "IncompatibleFilters";
const NO_MATCHING_PARENT: &str = "NoMatchingParent";
const CONFLICTED: &str = "Conflicted";

#[cfg(test)]
pub(crate) mod tests;
