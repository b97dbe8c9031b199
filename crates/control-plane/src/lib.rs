//! Shared parts of controller and injector: the trusted time, TLS servers for clients without an
//! identity, and Kubernetes Events. The data plane does not use them.

pub mod clock;
pub mod events;
pub mod tls;
