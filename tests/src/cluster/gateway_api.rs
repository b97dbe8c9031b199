//! The definitions of the Gateway API on a cluster, from its Go module. They are never part of this
//! repository.

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Namespace, kubectl, wait_for};
use crate::repository::root;
use crate::routes::{canary, http_route};

/// The condition of a valid route.
pub const ACCEPTED: [&str; 3] = ["Accepted", "True", "Accepted"];
/// Prevents the installation of the experimental channel.
const SAFE_UPGRADES: &str = "safe-upgrades.gateway.networking.k8s.io";
/// The definitions that differ between the channels, and that the mesh reads.
const EXPERIMENTAL: [&str; 4] = [
    "k8s.io_httproutes",
    "k8s.io_grpcroutes",
    "k8s.io_tcproutes",
    "x-k8s.io_xbackends",
];

/// Installs the standard channel if the cluster has no HTTPRoutes.
pub fn install() -> Result<()> {
    let installed = kubectl(&["get", "crd", "httproutes.gateway.networking.k8s.io"]);
    if installed.is_err() {
        apply(&definitions("standard")?)?;
    }
    Ok(())
}

/// Held by a test that depends on the channel.
static CHANNEL: Mutex<()> = Mutex::new(());

fn lock() -> MutexGuard<'static, ()> {
    CHANNEL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The standard channel: no other test replaces it until the result is dropped.
pub fn standard() -> impl Drop {
    lock()
}

/// The experimental channel, until it is dropped. Tests that need it run one after the other.
pub struct Experimental(
    #[expect(dead_code, reason = "held until it is dropped")] MutexGuard<'static, ()>,
);

impl Experimental {
    /// Replaces the standard channel.
    pub fn install() -> Result<Self> {
        let this = Self(lock());
        let folder = definitions("experimental")?;
        let names = [SAFE_UPGRADES, "--ignore-not-found"];
        for kind in [
            "validatingadmissionpolicybinding",
            "validatingadmissionpolicy",
        ] {
            kubectl(&[&["delete", kind], &names[..]].concat())?;
        }
        for name in EXPERIMENTAL {
            let file = folder.join(format!("gateway.networking.{name}.yaml"));
            // The policy has an effect for some seconds after its deletion.
            wait_for("the experimental channel is installed", || {
                apply(&file).map(Some)
            })?;
        }
        Ok(this)
    }
}

impl Drop for Experimental {
    fn drop(&mut self) {
        let definitions_of_channel = [
            "tcproutes.gateway.networking.k8s.io",
            "xbackends.gateway.networking.x-k8s.io",
            "--ignore-not-found",
        ];
        let deleted = kubectl(&[&["delete", "crd"], &definitions_of_channel[..]].concat());
        let restored = definitions("standard").and_then(|folder| apply(&folder));
        for result in [deleted.map(drop), restored] {
            if let Err(error) = result {
                eprintln!("cannot restore the standard channel of the Gateway API: {error:#}");
            }
        }
    }
}

/// The folder with the definitions of a channel, in the version of the conformance tests.
fn definitions(channel: &str) -> Result<PathBuf> {
    let output = Command::new("go")
        .args(["mod", "download", "-json", "sigs.k8s.io/gateway-api"])
        .current_dir(root().join("tests/conformance"))
        .output()
        .context("cannot start go, which downloads the definitions of the Gateway API")?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "go mod download: {error}");
    let module: Value = serde_json::from_slice(&output.stdout)?;
    let folder = module["Dir"].as_str().context("the module has a folder")?;
    Ok(PathBuf::from(folder).join("config/crd").join(channel))
}

fn apply(path: &std::path::Path) -> Result<()> {
    let path = path.to_str().context("the path is UTF-8")?;
    let apply = ["apply", "--server-side", "--force-conflicts", "-f", path];
    kubectl(&apply).map(drop)
}

/// Applies HTTPRoute `web`, which sends a percentage of the requests to version 2.0, and returns it
/// once it is accepted.
pub fn apply_canary(namespace: &Namespace, percentage: u32) -> Result<Value> {
    let name = &namespace.name;
    let rules = format!("[{}]", canary(percentage));
    namespace.apply(&http_route(name, "web", name, &rules))?;
    wait_for_condition(namespace, "httproute", "web", ACCEPTED)
}

/// A route of a namespace as the API server has it.
pub fn route(namespace: &Namespace, kind: &str, name: &str) -> Result<Value> {
    let json = namespace.kubectl(&["get", kind, name, "-o", "json"])?;
    serde_json::from_str(&json).context("kubectl prints JSON")
}

/// Waits until the mesh has written this status and this reason of a condition, for the current
/// generation of a route or of a policy, and returns it.
pub fn wait_for_condition(
    namespace: &Namespace,
    kind: &str,
    name: &str,
    condition: [&str; 3],
) -> Result<Value> {
    let what = format!("{kind} {name} has the condition {condition:?}");
    wait_for(&what, || {
        let route = route(namespace, kind, name)?;
        let entries = ["parents", "ancestors"].map(|field| route["status"][field].as_array());
        let conditions = entries
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry["controllerName"] == "diy-service-mesh.dev/controller")
            .flat_map(|entry| entry["conditions"].as_array().into_iter().flatten());
        let is_it = |one: &Value| {
            [&one["type"], &one["status"], &one["reason"]] == condition
                && one["observedGeneration"] == route["metadata"]["generation"]
        };
        if conditions.clone().any(is_it) {
            Ok(Some(route.clone()))
        } else {
            Err(anyhow::anyhow!("status: {:#}", route["status"]))
        }
    })
}
