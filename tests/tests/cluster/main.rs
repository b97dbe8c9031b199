//! Tests on the cluster of KUBECONFIG that use the mesh and do not change it. They run side by side,
//! each in its own namespace.

mod admission;
mod authorization;
mod check;
mod drill;
mod egress;
mod external;
mod features;
mod invalid_routes;
mod policies;
mod probes;
mod retries;
mod routes;
mod smi;
mod tokens;
mod traffic;
mod traffic_shift;
mod walkthrough;
mod why;
mod xbackend;
mod your_own_app;
