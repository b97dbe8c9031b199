//! A sandbox: a cluster of one node made of Linux namespaces and processes, for trying and testing
//! the mesh without a cluster, containers or images. It takes Kubernetes manifests, admits pods
//! through the real injector, and runs the resulting programs. It has no Kubernetes API and
//! supports only the kinds and fields that the mesh needs.
//!
//! The client (`Sandbox`, in `client`) runs in the process that starts a sandbox: `mesh demo` or a
//! test. The node (`node`) is a process tree inside the sandbox's namespaces, which `enter`
//! creates. They communicate with the messages in `protocol`. Other processes of the user can ask about
//! the pods at a Unix socket (`socket`).

mod client;
mod enter;
mod exec;
pub mod internal;
mod launch;
pub mod manifest;
pub mod node;
pub mod page;
pub mod protocol;
pub mod socket;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use client::{Error, Sandbox, View};
pub use launch::LaunchError;

/// Locks a mutex, even if another thread panicked while holding it: every change of the data is
/// complete at that point.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
