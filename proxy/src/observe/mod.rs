//! What people and the controller see of the traffic: metrics, dumps, exceptions. And the probes of the
//! kubelet.

pub mod dump;
pub mod exceptions;
pub mod metrics;
pub mod probe;
pub mod trace;
