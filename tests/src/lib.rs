//! What the end-to-end tests share; the tests themselves stand in tests/.

pub mod cluster;
pub mod sandbox;
