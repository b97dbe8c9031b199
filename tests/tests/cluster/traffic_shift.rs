//! Traffic that moves between versions on a cluster: a canary under load.

use anyhow::{Result, ensure};
use diy_mesh_tests::cluster::gateway_api::{apply_canary, install};
use diy_mesh_tests::cluster::load::Load;
use diy_mesh_tests::cluster::{in_namespace, versions};

#[test]
fn canary_is_shifted_under_load_without_a_failed_request() -> Result<()> {
    in_namespace("shift", |namespace| {
        install()?;
        versions::start(namespace)?;
        apply_canary(namespace, 10)?;
        let load = Load::start(namespace, versions::clients(3))?;
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
