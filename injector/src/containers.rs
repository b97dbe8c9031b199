//! The containers and the volume that injection adds to a pod. Pure.
//!
//! The single source of the mesh's ports and of the proxy's uid: proxy-init and proxy take them as
//! required flags without defaults. Fields that the API server sets by default are explicit where
//! its defaults vary, so that an injected pod that is reviewed again compares equal.

use std::collections::BTreeSet;

use diy_mesh_model::ports::PortSet;
use diy_mesh_model::sidecar;
use serde_json::{Value, json};

use crate::config::Settings;
use crate::resources;
use crate::settings::SidecarSettings;

/// The name of the proxy container.
pub const PROXY: &str = "proxy";
/// The name of the init container that configures traffic redirection.
pub const PROXY_INIT: &str = "proxy-init";
/// The name of the volume with the proxy's token and the root certificates.
pub const TOKEN_VOLUME: &str = "diy-service-mesh-token";
/// The ConfigMap with the root certificates, which the controller writes to every namespace with
/// meshed pods.
pub const ROOTS_CONFIG_MAP: &str = "diy-service-mesh-roots";
/// The key in that ConfigMap, and the name of the mounted file.
pub const ROOTS: &str = "roots.pem";
/// The mount path of the volume, in the proxy only.
pub const TOKEN_PATH: &str = "/var/run/secrets/diy-service-mesh";
/// The mount path of Kubernetes API credentials, which the mesh's containers do not use.
pub const API_TOKEN_PATH: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The uid of the proxy, whose traffic is not redirected, unless a container of the pod has it.
pub const FIRST_PROXY_UID: i64 = 1337;
/// A flag of proxy-init, which identifies the injected container.
pub const PROXY_UID_FLAG: &str = "--proxy-uid";
/// The flag for the admin port.
pub const ADMIN_PORT_FLAG: &str = "--admin-port";
/// A variable of the proxy, which identifies the injected container.
pub const TOKEN_FILE_VARIABLE: &str = "SERVICE_MESH_TOKEN_FILE";

/// The listener ports of a proxy.
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
    /// The ports of a pod whose containers do not declare these ports.
    pub const DEFAULT: Self = Self {
        inbound: 4000,
        outbound: 5000,
        admin: 4001,
    };

    /// Whether the proxy listens on this port.
    pub fn contains(self, port: u16) -> bool {
        [self.inbound, self.outbound, self.admin].contains(&port)
    }

    /// The default ports, each incremented to the next one that is not declared. `None` if there is
    /// none.
    pub fn avoiding(declared: impl IntoIterator<Item = u16>) -> Option<Self> {
        let mut taken: BTreeSet<u16> = declared.into_iter().collect();
        let mut next_free = |default: u16| {
            let free = (default..=u16::MAX).find(|port| !taken.contains(port))?;
            taken.insert(free);
            Some(free)
        };
        Some(Self {
            inbound: next_free(Self::DEFAULT.inbound)?,
            admin: next_free(Self::DEFAULT.admin)?,
            outbound: next_free(Self::DEFAULT.outbound)?,
        })
    }
}

/// The uid of the proxy of a pod whose containers run as these users.
pub fn free_uid(taken: impl Iterator<Item = i64>) -> i64 {
    let taken: BTreeSet<i64> = taken.collect();
    let mut free = (FIRST_PROXY_UID..).filter(|uid| !taken.contains(uid));
    free.next().expect("a pod has fewer containers than users")
}

/// The init container that configures traffic redirection.
pub fn proxy_init(settings: &Settings, own: &SidecarSettings, ports: Ports, uid: i64) -> Value {
    let mut args = port_args(ports);
    args.push(format!("{PROXY_UID_FLAG}={uid}"));
    args.extend(ports_arg("--skip-inbound-ports", &own.skip_inbound_ports));
    args.extend(ports_arg("--skip-outbound-ports", &own.skip_outbound_ports));
    args.extend(own.outbound_udp.argument());
    json!({
        "name": PROXY_INIT,
        "image": settings.proxy_init_image,
        "imagePullPolicy": settings.image_pull_policy,
        "args": args,
        "resources": resources::of_container(own),
        // Explicit values override the security context of the pod.
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

/// The proxy as a native sidecar: starts before the containers of the pod and stops after them.
/// `own` are the settings of this proxy, `probes` its arguments for the probes of the pod.
pub fn proxy(
    settings: &Settings,
    own: &SidecarSettings,
    ports: Ports,
    uid: i64,
    probes: Vec<String>,
) -> Value {
    let mut args = port_args(ports);
    // The image of proxy-init is of the same release.
    let own_proxy = sidecar::Settings {
        verify_redirect: true,
        ..own.proxy.clone()
    };
    args.push(own_proxy.argument());
    args.extend(probes);
    json!({
        "name": PROXY,
        "image": settings.proxy_image,
        "imagePullPolicy": settings.image_pull_policy,
        "restartPolicy": "Always",
        "args": args,
        "env": [
            {"name": "SERVICE_MESH_CONTROLLER", "value": settings.controller_address},
            {"name": "SERVICE_MESH_CONTROLLER_IDENTITY", "value": settings.controller_identity},
            {"name": "SERVICE_MESH_ROOTS_FILE", "value": format!("{TOKEN_PATH}/{ROOTS}")},
            {"name": TOKEN_FILE_VARIABLE, "value": format!("{TOKEN_PATH}/token")},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}},
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}},
            {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}},
        ],
        "ports": [{"name": "mesh-admin", "containerPort": ports.admin, "protocol": "TCP"}],
        // The containers of the pod start after this probe succeeds. The kubelet restarts the proxy
        // after two minutes.
        "startupProbe": probe("/ready", ports.admin, 1, 1, 120),
        "readinessProbe": probe("/ready", ports.admin, 2, 2, 3),
        // A restart closes all connections of the pod, hence the threshold of one minute.
        "livenessProbe": probe("/live", ports.admin, 10, 5, 6),
        "resources": resources::of_container(own),
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"]},
            "privileged": false,
            "readOnlyRootFilesystem": true,
            "runAsGroup": uid,
            "runAsNonRoot": true,
            "runAsUser": uid,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [{"name": TOKEN_VOLUME, "mountPath": TOKEN_PATH, "readOnly": true}],
    })
}

fn port_args(ports: Ports) -> Vec<String> {
    vec![
        format!("--inbound-port={}", ports.inbound),
        format!("--outbound-port={}", ports.outbound),
        format!("{ADMIN_PORT_FLAG}={}", ports.admin),
    ]
}

fn ports_arg(flag: &str, ports: &PortSet) -> Option<String> {
    (!ports.is_empty()).then(|| format!("{flag}={ports}"))
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

/// The proxy's token for the controller, and the root certificates. The kubelet starts the pod when
/// both exist.
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
    fn avoids_declared_ports() {
        assert_eq!(Ports::avoiding([80, 8080]), Some(Ports::DEFAULT));
        assert_eq!(
            Ports::avoiding([5000, 5001]),
            Some(Ports {
                outbound: 5002,
                ..Ports::DEFAULT
            })
        );
        assert_eq!(
            Ports::avoiding([4000]),
            Some(Ports {
                inbound: 4001,
                admin: 4002,
                outbound: 5000
            })
        );
        assert_eq!(Ports::avoiding(1..=u16::MAX), None);
    }
}
