//! Step 4, inbound: the caller and its authorization, and rate limits.

pub mod edges;
pub mod external;
pub mod limit;
pub mod policy;
pub mod token;
