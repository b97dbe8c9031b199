//! HTTP/2 (RFC 9113) for connections that one thread serves. [`Connection`] is the protocol without
//! sockets, clocks and tasks; [`Shared`] lets the tasks of streams use one.

mod connection;
mod error;
mod fields;
mod frame;
mod handle;
pub mod hpack;
mod message;
mod stream;
#[cfg(test)]
mod tests;

pub use connection::{Config, Connection, Role};
pub use error::{Error, ErrorCode, Violation};
pub use fields::Fields;
pub use frame::MAX_FRAME;
pub use handle::{Opened, Receiver, Sender, Shared};
pub use message::{Received, Request, Response};
