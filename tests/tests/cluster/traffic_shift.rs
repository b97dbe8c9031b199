//! Traffic that moves between versions on a cluster: a canary under load.

use std::process::Command;

use anyhow::{Result, ensure};
use diy_mesh_tests::cluster::gateway_api::{apply_canary, install};
use diy_mesh_tests::cluster::load::Load;
use diy_mesh_tests::cluster::{Namespace, in_namespace, versions};
use diy_mesh_tests::dashboard::Dashboard;
use diy_mesh_tests::sandbox::programs;
use serde_json::json;

#[test]
fn canary_is_shifted_under_load_without_a_failed_request() -> Result<()> {
    in_namespace("shift", |namespace| {
        install()?;
        versions::start(namespace)?;
        let load = Load::start(namespace, versions::clients(3))?;
        leads_from_the_service_to_its_workloads(namespace)?;
        for percentage in [10, 50, 100] {
            apply_canary(namespace, percentage)?;
            versions::wait_for_share(namespace, percentage)?;
            load.expect_no_failure()?;
        }
        // All requests reach the canary, and stay there.
        let before = versions::responses(namespace)?;
        load.expect_no_failure()?;
        let after = versions::responses(namespace)?;
        ensure!(
            before[0] == after[0] && before[1] < after[1],
            "{before:?} {after:?}"
        );
        Ok(())
    })
}

/// The dashboard has it from the controller, which knows the endpoints.
fn leads_from_the_service_to_its_workloads(namespace: &Namespace) -> Result<()> {
    let mut command = Command::new(programs().join("mesh"));
    command.args(["dashboard", "--namespace", &namespace.name]);
    let dashboard = Dashboard::start(command)?;
    let name = |name: &str| format!("{}/{name}", namespace.name);
    dashboard.expect_services(&json!({name("web"): [name("web-v1")]}))
}
