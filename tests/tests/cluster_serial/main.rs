//! Tests on the cluster of KUBECONFIG that stop, break, replace or remove the mesh, require that no
//! other pod has a problem, or measure shares of requests. They run one at a time (`--test-threads=1`).

mod check;
mod disruption;
mod faults;
mod releases;
mod slow_replica;
mod stat;
mod uninstall;
