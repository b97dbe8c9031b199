//! Code shared by the end-to-end tests and the tests of the repository, which are in `tests/tests`.

pub mod cluster;
pub mod dashboard;
pub mod differential;
pub mod examples;
pub mod observability;
pub mod repository;
pub mod routes;
pub mod sandbox;
