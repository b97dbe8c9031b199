//! Steps 4 to 8: carries out the plan of each request, one protocol a file or folder. `exchange.rs`
//! carries each request through them: `filters.rs` stands between the plan and the first attempt,
//! `attempts.rs` decides on another one.

pub(crate) mod attempts;
pub mod call;
pub mod copy;
mod exchange;
pub(crate) mod external;
pub(crate) mod filters;
pub mod http1;
pub mod http2;
pub mod mirror;
pub mod opaque;
mod outside;
pub mod trace;
