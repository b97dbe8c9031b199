//! An outage of the injector on a cluster.

use anyhow::Result;

use super::{MESH, kubectl, wait_for};

/// Scales the injector to zero until drop.
pub struct InjectorOutage(());

impl InjectorOutage {
    /// Waits until no injector runs, and its Service has no endpoints.
    pub fn start() -> Result<Self> {
        let outage = Self(());
        kubectl(&["scale", "-n", MESH, "deployment/injector", "--replicas=0"])?;
        wait_for("the injector is down", || {
            let selector = "kubernetes.io/service-name=injector";
            let output = "jsonpath={.items[*].endpoints[*].addresses}";
            let slices = ["get", "endpointslices", "-n", MESH, "-l", selector];
            let addresses = kubectl(&[&slices[..], &["-o", output]].concat())?;
            let running = kubectl(&[
                "get",
                "pods",
                "-n",
                MESH,
                "-l",
                "app=injector",
                "-o",
                "name",
            ])?;
            Ok((addresses.is_empty() && running.trim().is_empty()).then_some(()))
        })?;
        Ok(outage)
    }
}

impl Drop for InjectorOutage {
    fn drop(&mut self) {
        if let Err(error) = kubectl(&["scale", "-n", MESH, "deployment/injector", "--replicas=2"]) {
            eprintln!("cannot scale up the injector: {error:#}");
        }
    }
}
