//! The kinds of the Service Mesh Interface, as routes (`split.rs`) and as AuthorizationPolicies
//! (`traffic_target.rs`). Pure.

pub mod split;
pub mod traffic_target;
