//! Shared parts of controller, injector and command line: the trusted time, TLS servers for clients
//! without an identity, Kubernetes Events, and the fields of Pods that they read. The data plane does
//! not use them.

pub mod clock;
pub mod events;
#[allow(missing_docs)]
pub mod pods;
pub mod tls;
