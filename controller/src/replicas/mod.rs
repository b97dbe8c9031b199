//! The messages between the replicas of the controller: the certificates and trust of their
//! proxies, and how these apply routes and policies. Pure.
//!
//! They are annotations of the Secret of the certificate authority, which `crate::authority` reads
//! and writes.

pub mod exchange;
pub mod reports;
