//! The observation of the traffic, for people and the controller: metrics, dumps, exceptions. And
//! the probes of the kubelet.

pub mod dump;
pub mod ended;
pub mod exceptions;
pub mod metrics;
pub mod probe;
pub mod recent;
pub mod trace;
