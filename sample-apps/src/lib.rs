//! What the four sample programs share: their configuration, how they listen, how they print HTTP, how they stop.
//!
//! The programs themselves are in `src/bin`, one file each, and are the subjects of the tutorial: two clients that call, two servers that
//! answer. They are ordinary programs and know nothing of the mesh: nothing here names a proxy, a certificate or a mesh header.

pub mod config;
pub mod dump;
pub mod heard;
pub mod listen;
pub mod process;
