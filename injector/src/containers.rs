//! What a meshed pod gains: the two containers and the volume, as Kubernetes reads them. Pure.
//!
//! The one owner of the mesh's ports and of the proxy's uid: proxy-init and proxy take them as required flags and have no
//! defaults of their own. Values that the API server would fill in are written out where another of its defaults could
//! differ, so that a pod that comes back compares equal.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::annotations::Options;
use crate::patch::Settings;

/// The name of the sidecar.
pub const PROXY: &str = "proxy";
/// The name of the container that sets up the redirection.
pub const PROXY_INIT: &str = "proxy-init";
/// The name of the volume with the proxy's token.
pub const TOKEN_VOLUME: &str = "diy-service-mesh-token";
/// The ConfigMap with the certificates that the mesh trusts, which the controller keeps in every namespace that has meshed pods.
pub const ROOTS_CONFIG_MAP: &str = "diy-service-mesh-roots";
/// The key in it, and the file that the proxy reads.
pub const ROOTS: &str = "roots.pem";
/// Where that volume is mounted, in the proxy only.
pub const TOKEN_FOLDER: &str = "/var/run/secrets/diy-service-mesh";
/// Where Kubernetes mounts a pod's credentials for its API, in every container that it finds. The mesh's have no use for them.
pub const API_TOKEN_FOLDER: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The user that the proxy runs as, and whose traffic is not redirected.
pub const PROXY_UID: i64 = 1337;
/// A proxy-init of ours has this flag: how it is told from a stranger of the same name.
pub const PROXY_INIT_MARK: &str = "--proxy-uid";
/// A proxy of ours has this variable: how it is told from a stranger of the same name.
pub const PROXY_MARK: &str = "SERVICE_MESH_TOKEN_FILE";

/// The ports that the proxy listens on in a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    /// Redirected inbound connections.
    pub inbound: u16,
    /// Redirected outbound connections.
    pub outbound: u16,
    /// Probes and metrics.
    pub admin: u16,
}

impl Ports {
    /// The usual ports: what every pod gets whose own containers leave them free.
    pub const USUAL: Self = Self {
        inbound: 4000,
        outbound: 5000,
        admin: 4001,
    };

    /// The usual ports, each moved up to the next one that no container of the pod declares. None when there is none.
    pub fn clear_of(declared: impl IntoIterator<Item = u16>) -> Option<Self> {
        let mut taken: BTreeSet<u16> = declared.into_iter().collect();
        let mut next = |wanted: u16| {
            let free = (wanted..=u16::MAX).find(|port| !taken.contains(port))?;
            taken.insert(free);
            Some(free)
        };
        Some(Self {
            inbound: next(Self::USUAL.inbound)?,
            admin: next(Self::USUAL.admin)?,
            outbound: next(Self::USUAL.outbound)?,
        })
    }
}

/// The container that sets up the redirection and exits.
pub fn proxy_init(settings: &Settings, ports: Ports, options: &Options) -> Value {
    let mut args = vec![
        format!("--inbound-port={}", ports.inbound),
        format!("--outbound-port={}", ports.outbound),
        format!("--admin-port={}", ports.admin),
        format!("{PROXY_INIT_MARK}={PROXY_UID}"),
    ];
    args.extend(
        options
            .skip_inbound_ports
            .iter()
            .map(|list| format!("--skip-inbound-ports={list}")),
    );
    args.extend(
        options
            .skip_outbound_ports
            .iter()
            .map(|list| format!("--skip-outbound-ports={list}")),
    );
    json!({
        "name": PROXY_INIT,
        "image": settings.proxy_init_image,
        "imagePullPolicy": settings.image_pull_policy.as_str(),
        "args": args,
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "64Mi"}},
        // Root and two capabilities, whatever the pod says for its containers, and nothing else.
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "capabilities": {"add": ["NET_ADMIN", "NET_RAW"], "drop": ["ALL"]},
            "privileged": false,
            "readOnlyRootFilesystem": true,
            "runAsGroup": 0,
            "runAsNonRoot": false,
            "runAsUser": 0,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    })
}

/// The proxy: a native sidecar, which starts before the pod's own containers and ends after them. `probes` are what the kubelet may
/// ask the pod although it has no identity.
pub fn proxy(settings: &Settings, ports: Ports, options: &Options, probes: &[String]) -> Value {
    let mut args = vec![
        format!("--inbound-port={}", ports.inbound),
        format!("--outbound-port={}", ports.outbound),
        format!("--admin-port={}", ports.admin),
    ];
    args.extend(options.dump.iter().map(|dump| format!("--dump={dump}")));
    args.extend(
        options
            .dump_format
            .iter()
            .map(|format| format!("--dump-format={format}")),
    );
    args.extend(
        options
            .inbound
            .iter()
            .map(|mode| format!("--inbound={mode}")),
    );
    args.extend(
        options
            .opaque_ports
            .iter()
            .map(|list| format!("--opaque-ports={list}")),
    );
    args.extend(options.allow_connect.then(|| "--allow-connect".to_owned()));
    args.extend(
        options
            .max_connection_age
            .iter()
            .map(|seconds| format!("--max-connection-age={seconds}")),
    );
    args.extend(probes.iter().map(|probe| format!("--probe={probe}")));
    json!({
        "name": PROXY,
        "image": settings.proxy_image,
        "imagePullPolicy": settings.image_pull_policy.as_str(),
        "restartPolicy": "Always",
        "args": args,
        "env": [
            {"name": "SERVICE_MESH_CONTROLLER", "value": settings.controller_address},
            {"name": "SERVICE_MESH_CONTROLLER_IDENTITY", "value": settings.controller_identity},
            {"name": "SERVICE_MESH_ROOTS_FILE", "value": format!("{TOKEN_FOLDER}/{ROOTS}")},
            {"name": PROXY_MARK, "value": format!("{TOKEN_FOLDER}/token")},
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}},
            {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}},
        ],
        "ports": [{"name": "mesh-admin", "containerPort": ports.admin, "protocol": "TCP"}],
        // The pod's other containers start once this succeeds. Two minutes without a controller, then a fresh start.
        "startupProbe": probe("/ready", ports.admin, 1, 1, 120),
        "readinessProbe": probe("/ready", ports.admin, 2, 2, 3),
        // A restart breaks every connection of the pod, so it takes a minute of silence.
        "livenessProbe": probe("/live", ports.admin, 10, 5, 6),
        // No limit on CPU: throttling a proxy shows as latency of everything behind it.
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"]},
            "privileged": false,
            "readOnlyRootFilesystem": true,
            "runAsGroup": PROXY_UID,
            "runAsNonRoot": true,
            "runAsUser": PROXY_UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [{"name": TOKEN_VOLUME, "mountPath": TOKEN_FOLDER, "readOnly": true}],
    })
}

fn probe(path: &str, port: u16, period: u32, timeout: u32, failures: u32) -> Value {
    json!({
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
        "successThreshold": 1,
    })
}

/// The proxy's token, for the controller's ears only, and the certificates by which it knows the controller. A pod waits for both.
pub fn token_volume() -> Value {
    json!({
        "name": TOKEN_VOLUME,
        "projected": {
            "defaultMode": 420,
            "sources": [
                {"serviceAccountToken": {"audience": "diy-service-mesh", "expirationSeconds": 3600, "path": "token"}},
                {"configMap": {"name": ROOTS_CONFIG_MAP, "items": [{"key": ROOTS, "path": ROOTS}]}},
            ],
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_the_usual_ones_unless_a_container_declares_them() {
        assert_eq!(Ports::clear_of([80, 8080]), Some(Ports::USUAL));
        assert_eq!(
            Ports::clear_of([5000, 5001]),
            Some(Ports {
                outbound: 5002,
                ..Ports::USUAL
            })
        );
        assert_eq!(
            Ports::clear_of([4000]),
            Some(Ports {
                inbound: 4001,
                admin: 4002,
                outbound: 5000
            })
        );
        assert_eq!(Ports::clear_of(1..=u16::MAX), None);
    }
}
