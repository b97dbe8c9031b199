//! Code shared by the four sample programs: configuration, listening, dumps of HTTP messages,
//! process lifecycle.
//!
//! The programs are in `src/bin`, one file each: two clients and two servers for the tutorial. They
//! are ordinary programs without any reference to a proxy, a certificate or a mesh header.

pub mod config;
pub mod dump;
pub mod listen;
pub mod process;
