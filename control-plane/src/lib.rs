//! Shared parts of controller and injector: TLS servers for clients without an identity, and
//! Kubernetes Events. The data plane does not use them.

pub mod events;
pub mod tls;
