//! The sandbox: a cluster of one node for trying and testing the mesh, made of Linux namespaces and processes; no cluster, no
//! containers, no images. It takes Kubernetes manifests, passes pods through the real injector, and runs the programs that come
//! out. It is no Kubernetes: it has no API, and knows of each object what the mesh needs.
//!
//! It has two halves. The outer half, `Sandbox` (in `client`), lives in the process that wants a sandbox: `mesh demo` or a test.
//! The inner half (`node`) is a process tree inside of namespaces of its own, entered in `enter`; they talk in `protocol`.

mod client;
pub mod enter;
pub mod exec;
mod launch;
pub mod manifest;
pub mod node;
pub mod protocol;

pub use client::{Error, Sandbox, View};
pub use launch::LaunchError;
