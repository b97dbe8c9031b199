//! The sources of the catalog, which send changes to the index.
//!
//! A source sends one [`Change::Reset`](crate::catalog::Change) per kind when it has listed
//! all objects, then changes. It decides nothing.

mod change;
pub mod claims;
mod convert;
pub mod definitions;
pub mod epoch;
pub mod files;
pub mod freshness;
mod injected;
pub mod kubernetes;
mod manifest;
pub mod marker;
mod objects;
mod resources;
mod slim;
#[cfg(test)]
pub(crate) mod testing;
mod watch;

pub use manifest::{parse, parse_object};
pub(crate) use resources::resource;
pub use resources::resources;

pub use change::{Change, Event};
