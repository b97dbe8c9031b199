//! The command line `mesh`, and the sandbox that it demonstrates the mesh in, which is also the harness of the end-to-end
//! tests. Nothing here is needed to run the mesh.

pub mod check;
pub mod cluster;
pub mod commands;
pub mod identity;
pub mod sandbox;
mod time;
