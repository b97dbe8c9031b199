//! The statuses of all kinds of objects, for their authors: which conditions they have, who writes
//! them into the cluster, and Kubernetes Events about objects without a status.
//!
//! The conditions of an object come from the index, and the condition `Programmed` from what
//! proxies acknowledge (`programmed.rs`). One replica holds the Lease and writes (`writer.rs`).

pub mod events;
pub mod lease;
pub mod merge;
pub mod programmed;
pub mod report;
pub mod statuses;
#[cfg(test)]
pub(crate) mod testing;
pub mod writer;
