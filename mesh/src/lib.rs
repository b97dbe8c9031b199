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
pub mod plan;
pub mod pods;
pub mod proxies;
pub mod routes;
pub mod sample;
mod time;
pub mod traffic;
pub mod why;
pub mod yaml;
