//! The data plane: one small proxy beside each pod. Every TCP connection of the pod passes through it, redirected by the
//! rules that proxy-init set. This file is the map; the two paths stand in `inbound.rs` and `outbound.rs`.
//!
//! The main thread runs what is slow and shared: the admin server, discovery, the writer of dumps. Each worker thread
//! has its own listeners, pools and balancers, so that a request stays on one core and takes no lock.

pub mod balance;
pub mod control;
pub mod discovery;
pub mod dump;
pub mod error;
pub mod io;
pub mod metrics;
