//! Steps 6 and 7: the endpoints of a backend, the choice of one, and connections to it.

pub mod balance;
pub mod connect;
pub(crate) mod multiplexed;
