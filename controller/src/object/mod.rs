//! The vocabulary of all kinds of objects: names, metadata, conditions and references. Plain
//! values, and how they are read from JSON. Imports no other folder.

mod checked;
pub mod condition;
pub mod fields;
pub mod issuer_keys;
mod key;
pub mod kind;
mod meta;
pub(crate) mod rejection;
pub mod status;
mod target;
pub mod version;

pub use checked::Checked;
pub use condition::Condition;
pub use key::{Key, ObjectId, PodRef};
pub use kind::Kind;
pub use meta::Meta;
pub use rejection::Rejection;
pub use status::{ObjectStatus, TargetStatus, Withheld};
pub use target::TargetReference;
