//! End-to-end tests in sandboxes: pods are network namespaces and processes. One program, so that the
//! tests run side by side: each sandbox has its own namespaces, and its addresses, ports and files are
//! local to them.

#![allow(clippy::unwrap_used)]

mod api_server;
mod authorization;
mod basics;
mod cleanup;
mod clocks;
mod commands;
mod connections;
mod demo_socket;
mod differential;
mod disk;
mod drill;
mod exceptions;
mod faults;
mod identity;
mod lifecycle;
mod policies;
mod probes;
mod prometheus;
mod real_servers;
mod resilience;
mod rootless;
mod rotation;
mod routes;
mod smi;
mod soak;
mod strict;
mod traffic;
mod walkthrough;
mod wrapped;
mod zones;
