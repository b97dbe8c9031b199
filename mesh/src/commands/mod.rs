//! What `mesh` can be asked to do; a command is a file.

pub mod demo;
mod output;
