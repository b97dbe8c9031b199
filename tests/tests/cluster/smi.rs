//! TrafficSplits and HTTPRouteGroups of the Service Mesh Interface on a cluster: their effect on
//! requests under load.

use anyhow::{Result, ensure};
use diy_mesh_tests::cluster::load::Load;
use diy_mesh_tests::cluster::smi::Definitions;
use diy_mesh_tests::cluster::{in_namespace, versions, wait_for};
use diy_mesh_tests::routes::{route_group, traffic_split};

#[test]
fn split_shares_the_requests_of_its_group() -> Result<()> {
    in_namespace("smi", |namespace| {
        let _definitions = Definitions::install()?;
        versions::start(namespace)?;
        let load = Load::start(namespace, versions::clients(3))?;
        let name = &namespace.name;
        for percentage in [30, 100, 60] {
            namespace.apply(&traffic_split(name, percentage, ""))?;
            versions::wait_for_share(namespace, percentage)?;
        }
        // Only the requests of the group are split: the requests of all clients, then none.
        namespace.apply(&route_group(name, "{user-agent: 'diy-http-client/.*'}"))?;
        namespace.apply(&traffic_split(name, 100, "testers"))?;
        versions::wait_for_share(namespace, 100)?;
        namespace.apply(&route_group(name, "{user-agent: other}"))?;
        versions::wait_for_share(namespace, 0)?;
        // Problems are Events about the split, which has no status.
        namespace.kubectl(&["delete", "httproutegroup", "testers"])?;
        wait_for("an Event about the missing group", || {
            let events = namespace.kubectl(&["get", "events.events.k8s.io", "-o", "json"])?;
            let is_named = ["RouteNotAccepted", "TrafficSplit", "testers does not exist"]
                .iter()
                .all(|text| events.contains(text));
            ensure!(is_named, "{events}");
            Ok(Some(()))
        })?;
        versions::wait_for_share(namespace, 0)?;
        namespace.kubectl(&["delete", "trafficsplit", "web"])?;
        load.expect_no_failure()
    })
}
