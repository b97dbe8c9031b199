//! Steps 1 to 3 of a connection: accept, original destination, detection of the protocol.

pub mod connection;
pub mod detect;
pub mod listener;
pub mod redirect;
