//! Values that several components read or write, each with one type, one parser and one text form.
//! Beside `proto`, so that proxy-init and the injector stay free of gRPC. No sockets, clock or
//! Kubernetes types.

pub mod access;
pub mod code;
pub mod escape;
pub mod exchange;
mod exchange_id;
pub mod identity;
pub mod interfaces;
pub mod json;
pub mod ports;
pub mod sidecar;
pub mod state;
