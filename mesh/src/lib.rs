//! The command line `mesh` and the sandbox, which `mesh demo` and the end-to-end tests use. A
//! cluster does not need this crate.

pub mod check;
pub mod cluster;
pub mod commands;
pub mod controller;
pub mod identity;
pub mod routes;
pub mod sandbox;
mod time;
