//! The data that the injector wrote into the spec of a pod: the settings and further arguments of
//! the proxy, and the arguments of proxy-init. Pure.
//!
//! The spec is immutable, except for images. Annotations and labels are not: they say nothing about
//! the pod that runs.

use diy_mesh_model::ports::PortSet;
use diy_mesh_model::sidecar::{OutboundUdp, Settings};

use super::convert::transport;
use super::slim::{self, Container, Pod, PodSpec};
use crate::kinds::pod::{ContainerPort, Inbound};

const PROXY: &str = "proxy";
const PROXY_INIT: &str = "proxy-init";
/// A variable of the proxy, which every version of the injector has set.
const TOKEN_FILE_VARIABLE: &str = "SERVICE_MESH_TOKEN_FILE";

/// The containers that the injector added to a pod.
pub(super) struct Injected<'a> {
    pod: &'a PodSpec,
    proxy: &'a Container,
    proxy_init: Option<&'a Container>,
}

impl<'a> Injected<'a> {
    /// `None` if the pod has no proxy.
    pub fn of(pod: &'a Pod) -> Option<Self> {
        let pod = pod.spec.as_ref()?;
        let containers = pod.init_containers.as_deref()?;
        let named = |name: &str| containers.iter().find(|container| container.name == name);
        let mut variables = named(PROXY)?.env.iter().flatten();
        variables.find(|variable| variable.name == TOKEN_FILE_VARIABLE)?;
        Some(Injected {
            pod,
            proxy: named(PROXY)?,
            proxy_init: named(PROXY_INIT),
        })
    }

    /// The ports that are not redirected to the proxy: the skipped ones, and the admin port.
    pub fn bypassed(&self) -> PortSet {
        let skipped = self.proxy_init;
        let skipped = skipped.map(|init| ports(init, "--skip-inbound-ports="));
        skipped.unwrap_or_default() | ports(self.proxy, "--admin-port=")
    }

    /// Whether UDP of the containers reaches the resolvers of the pod only.
    pub fn restricts_udp(&self) -> bool {
        let arguments = self.proxy_init.iter().flat_map(|init| &init.args).flatten();
        OutboundUdp::of_arguments(arguments.map(String::as_str)) == OutboundUdp::Dns
    }

    /// The inbound configuration of the proxy, and the ports that the application declares.
    pub fn inbound(&self) -> Inbound {
        let arguments = self.proxy.args.iter().flatten();
        let settings = Settings::of_arguments(arguments.map(String::as_str));
        let containers = self.pod.init_containers.iter().flatten();
        let containers = containers.chain(self.pod.containers.iter().flatten());
        let applications = containers.filter(|container| container.name != PROXY);
        let declared = applications.flat_map(|container| container.ports.iter().flatten());
        Inbound {
            strict: settings.strict,
            allow_connect: settings.allow_connect,
            plain_paths: settings.plain_paths,
            opaque_ports: settings.opaque_ports,
            ports: declared.filter_map(container_port).collect(),
        }
    }
}

/// `None` for a port that Kubernetes rejects.
fn container_port(port: &slim::ContainerPort) -> Option<ContainerPort> {
    Some(ContainerPort {
        name: port.name.as_deref().unwrap_or_default().into(),
        port: u16::try_from(port.container_port).ok()?,
        protocol: transport("protocol", port.protocol.as_deref()).ok()?,
    })
}

/// The ports in an argument, or no ports if it is invalid: then the program does not start.
fn ports(container: &Container, flag: &str) -> PortSet {
    let mut arguments = container.args.iter().flatten();
    let list = arguments.find_map(|argument| argument.strip_prefix(flag)?.parse().ok());
    list.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_yaml_ng::Value;

    use super::*;

    fn pod(value: Value) -> Pod {
        serde_yaml_ng::from_value(value).unwrap()
    }

    /// The pods of the injector's golden files: before and after injection.
    fn goldens() -> Vec<(String, Pod, Pod)> {
        let pods = goldens_in("../injector/tests/golden");
        assert!(pods.len() > 5);
        pods
    }

    fn goldens_in(folder: &str) -> Vec<(String, Pod, Pod)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        let mut pods = Vec::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let text = std::fs::read_to_string(&path).unwrap();
            let mut golden: Value = serde_yaml_ng::from_str(&text).unwrap();
            let golden = golden.as_mapping_mut().unwrap();
            let (input, patched) = (golden.remove("input"), golden.remove("patched"));
            if let Some(patched) = patched {
                pods.push((name, pod(input.unwrap()), pod(patched)));
            }
        }
        pods
    }

    #[test]
    fn reads_pods_of_the_previous_injector_as_those_of_this_one() {
        let now = goldens();
        let previous = goldens_in("tests/previous-injector");
        assert!(previous.len() > 2);
        for (name, _, before) in previous {
            let (_, _, now) = now.iter().find(|(other, ..)| *other == name).unwrap();
            let [before, now] = [&before, now].map(|pod| Injected::of(pod).unwrap());
            assert_eq!(before.inbound(), now.inbound(), "{name}");
            assert_eq!(before.bypassed(), now.bypassed(), "{name}");
            assert!(!before.restricts_udp(), "{name}");
        }
    }

    #[test]
    fn recognizes_every_pod_that_the_injector_patches_and_no_other() {
        for (name, before, after) in goldens() {
            assert!(Injected::of(&after).is_some(), "{name}");
            let was_injected = name.contains("earlier") || name.contains("again");
            assert_eq!(Injected::of(&before).is_some(), was_injected, "{name}");
        }
    }

    #[test]
    fn reads_ports_of_the_present_and_of_the_first_injector() {
        let (_, _, after) = goldens()
            .into_iter()
            .find(|(name, ..)| name == "all-annotations")
            .unwrap();
        let injected = Injected::of(&after).unwrap();
        assert_eq!(injected.bypassed().to_string(), "25,4001");
        assert!(injected.restricts_udp());
        let opaque = injected.inbound().opaque_ports;
        assert_eq!(opaque.to_string(), "25,9000-9100");
        let first = pod(serde_yaml_ng::from_str(
            "spec:
  containers: [{name: app, args: ['--opaque-ports=81', '--skip-inbound-ports=82']}]
  initContainers:
  - {name: proxy-init, args: [--inbound-port=4000, --outbound-port=5000, --admin-port=4001, --proxy-uid=1337, '--skip-inbound-ports=25,9000-9100']}
  - {name: other, args: ['--opaque-ports=83']}
  - name: proxy
    restartPolicy: Always
    args: [--inbound-port=4000, --outbound-port=5000, --admin-port=4001]
    env:
    - {name: SERVICE_MESH_CONTROLLER, value: 'http://controller:8080'}
    - {name: SERVICE_MESH_TOKEN_FILE, value: /var/run/secrets/diy-service-mesh/token}",
        )
        .unwrap());
        let injected = Injected::of(&first).unwrap();
        assert_eq!(injected.bypassed().to_string(), "25,4001,9000-9100");
        assert_eq!(injected.inbound(), Inbound::default());
    }
}
