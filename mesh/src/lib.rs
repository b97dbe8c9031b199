//! The command line `mesh`. A cluster does not need this crate.

pub mod authorization;
pub mod changes;
pub mod check;
pub mod cluster;
pub mod commands;
pub mod controller;
pub mod dashboard;
pub mod edges;
pub mod egress;
pub mod files;
pub mod identity;
pub mod install;
mod names;
pub mod plan;
pub mod pods;
pub mod proxies;
pub mod routes;
pub mod sample;
pub(crate) mod terminal;
mod time;
pub mod traffic;
mod turns;
pub mod why;
pub mod yaml;
