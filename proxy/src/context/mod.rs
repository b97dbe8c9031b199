//! The context of a request along the path: its worker, the flow of its connection, its
//! destination, and the record of its exchange.

pub mod destination;
pub mod external;
pub mod flow;
pub mod log;
pub mod record;
pub mod state;
pub mod worker;
