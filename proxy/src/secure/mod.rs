//! Mutual TLS with other proxies and with the controller, the own identity, and the sockets below.

pub mod control;
pub mod identity;
pub mod io;
pub(crate) mod scratch;
pub mod tls;
