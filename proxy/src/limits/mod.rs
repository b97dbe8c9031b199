//! Bounds of connections: memory, lifetimes, timeouts, deadlines.

pub mod deadline;
pub mod lifetime;
pub mod memory;
pub mod timeouts;
