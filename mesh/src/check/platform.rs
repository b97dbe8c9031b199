//! Checks of the Kubernetes version, the components of the mesh, and their versions. Pure.

use std::collections::BTreeMap;

use diy_mesh_injector::version::{MIN_VERSION, is_below};
use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{Container, PodSpec},
};
use kube::ResourceExt;

use super::facts::Facts;
use super::{Finding, Findings, count, or_ok};
use crate::pods::{self, Pod};

const UPGRADE_ADVICE: &str = "upgrade to Kubernetes 1.29 or newer: the proxies are native sidecars, which older versions do not support";

/// The API server and the kubelets support native sidecars.
pub(super) fn kubernetes(facts: &Facts) -> Findings<'_> {
    let server = &facts.version.git_version;
    let mut findings = Vec::new();
    let version = format!("{}.{}", facts.version.major, facts.version.minor);
    if is_below(&version, MIN_VERSION) {
        findings.push(Finding::problem(
            format!("the version of the API server, {server}, is too old"),
            UPGRADE_ADVICE,
        ));
    }
    let versions = facts.nodes.as_ref().map(|nodes| {
        let version = |node: &k8s_openapi::api::core::v1::Node| {
            let info = node.status.as_ref()?.node_info.as_ref()?;
            Some((node.metadata.name.clone()?, info.kubelet_version.clone()))
        };
        nodes.iter().filter_map(version).collect::<Vec<_>>()
    });
    match versions {
        Err(reason) => findings.push(Finding::unknown(&format!("kubelets: {reason}"))),
        Ok(nodes) => {
            let old: Vec<String> = nodes
                .iter()
                .filter(|(_, version)| is_below(version, MIN_VERSION))
                .map(|(name, version)| format!("{name}: {version}"))
                .collect();
            let finding = Finding::problem("with a kubelet that is too old", UPGRADE_ADVICE);
            findings.extend(finding.about(old, "node", "nodes"));
            if findings.is_empty() {
                let nodes = count(nodes.len(), "node", "nodes");
                findings.push(Finding::ok(format!("Kubernetes {server}, {nodes}")));
            }
        }
    }
    Ok(findings)
}

/// The controller is available.
pub(super) fn controller(facts: &Facts) -> Findings<'_> {
    let effect = "proxies receive no certificates and no endpoint changes; they continue with the last known state";
    component(facts, "controller", effect)
}

/// The injector is available.
pub(super) fn injector(facts: &Facts) -> Findings<'_> {
    let effect = "pods that request injection cannot be created";
    component(facts, "injector", effect)
}

fn component<'a>(facts: &'a Facts, name: &str, effect: &str) -> Findings<'a> {
    let namespace = &facts.namespace;
    let Some(deployment) = find(facts.deployments.as_ref()?, name) else {
        let text = format!("Deployment {namespace}/{name} not found");
        let advice = "install the mesh (mesh install | kubectl apply -f -), or set its namespace with --mesh-namespace";
        return Ok(vec![Finding::problem(text, advice)]);
    };
    let spec = deployment.spec.as_ref();
    let desired = spec.and_then(|spec| spec.replicas).unwrap_or(1);
    let status = deployment.status.as_ref();
    let available = status.and_then(|status| status.available_replicas);
    let available = available.unwrap_or(0);
    if desired == 0 {
        let text = format!("Deployment {namespace}/{name} is scaled to 0 replicas: {effect}");
        let advice = format!("kubectl scale -n {namespace} deployment/{name} --replicas=2");
        return Ok(vec![Finding::problem(text, advice)]);
    }
    let text = format!("{available} of {desired} replicas are available");
    let advice = format!(
        "kubectl describe -n {namespace} deployment/{name}; kubectl logs -n {namespace} deployment/{name}"
    );
    Ok(vec![match available {
        0 => Finding::problem(format!("{text}: {effect}"), advice),
        _ if available < desired => Finding::warning(text, advice),
        _ => Finding::ok(text),
    }])
}

fn find<'a>(deployments: &'a [Deployment], name: &str) -> Option<&'a Deployment> {
    deployments
        .iter()
        .find(|deployment| deployment.name_any() == name)
}

/// All components have one version, and running proxies have the image that new pods receive.
pub(super) fn versions(facts: &Facts) -> Findings<'_> {
    let deployments = facts.deployments.as_deref().unwrap_or_default();
    let container = |name| container(deployments, name);
    let (Some(controller), Some(injector)) = (container("controller"), container("injector"))
    else {
        return Ok(Vec::new());
    };
    let init = pod_spec(deployments, "injector").and_then(|spec| spec.init_containers.as_ref());
    let init = init.into_iter().flatten();
    let image = init
        .filter(|container| container.name == "proxy-image")
        .find_map(|container| container.image.as_deref());
    let proxy = variable(injector, "IMAGE_TO_DEPLOY_PROXY").or(image);
    let proxy = proxy.unwrap_or_default();
    let images = [
        controller.image.as_deref().unwrap_or_default(),
        injector.image.as_deref().unwrap_or_default(),
        proxy,
    ];
    let mut findings = Vec::new();
    if images.iter().any(|image| tag(image) != tag(images[0])) {
        let text = "controller, injector and the proxies of new pods have different versions";
        let advice = "complete the upgrade: apply the manifests of one version";
        let finding = Finding::warning(text, advice);
        findings.push(finding.with_details(images.map(str::to_owned)));
    }
    match &facts.pods {
        Err(reason) => findings.push(Finding::unknown(reason)),
        Ok(pods) => findings.extend(outdated_proxies(pods, proxy)),
    }
    if let Ok(mesh) = &facts.identity {
        let mut versions: BTreeMap<&str, usize> = BTreeMap::new();
        let known = mesh.workloads.iter().map(|one| &*one.proxy_version);
        for version in known.filter(|version| !version.is_empty()) {
            *versions.entry(version).or_default() += 1;
        }
        if versions.len() > 1 {
            let details = versions.iter().map(|(version, number)| {
                format!("{version}: {}", count(*number, "proxy", "proxies"))
            });
            let text = "the running proxies have different versions";
            let advice = "restart the workloads with older proxies: kubectl rollout restart";
            findings.push(Finding::warning(text, advice).with_details(details));
        }
    }
    let text = format!("all components have one version ({})", tag(images[0]));
    Ok(or_ok(findings.into_iter().map(Some), text))
}

fn outdated_proxies(pods: &[Pod], expected: &str) -> Option<Finding> {
    let image =
        |pod: &Pod| Some(pods::proxy(pod)?.image.clone()?).filter(|image| image != expected);
    let others: Vec<String> = pods::meshed(pods)
        .filter_map(|pod| Some(format!("{}: {}", pods::name(pod), image(pod)?)))
        .collect();
    let text = format!("with another proxy image than new pods ({expected})");
    let advice = "a pod keeps its proxy image: restart its workload with kubectl rollout restart";
    Finding::warning(text, advice).about(others, "pod", "pods")
}

fn variable<'a>(container: &'a Container, name: &str) -> Option<&'a str> {
    let mut variables = container.env.iter().flatten();
    let variable = variables.find(|variable| variable.name == name)?;
    variable.value.as_deref()
}

/// The container of a component.
pub(super) fn container<'a>(deployments: &'a [Deployment], name: &str) -> Option<&'a Container> {
    pod_spec(deployments, name)?.containers.first()
}

fn pod_spec<'a>(deployments: &'a [Deployment], name: &str) -> Option<&'a PodSpec> {
    find(deployments, name)?
        .spec
        .as_ref()?
        .template
        .spec
        .as_ref()
}

/// The digest or tag of an image.
pub(super) fn tag(image: &str) -> &str {
    let last = image.rsplit('/').next().unwrap_or_default();
    last.split_once('@')
        .or_else(|| last.split_once(':'))
        .map_or("latest", |(_, tag)| tag)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{
        Level,
        facts::testing::{deployment, meshed, object, ready, unknown_facts},
    };
    use super::*;

    fn with_components(available: i32, proxy: &str) -> Facts {
        let env = json!([{"name": "IMAGE_TO_DEPLOY_PROXY", "value": proxy}]);
        Facts {
            deployments: Ok(vec![
                deployment("controller", available, json!([])),
                deployment("injector", 2, env),
            ]),
            pods: Ok(vec![meshed("a", ready())]),
            ..unknown_facts()
        }
    }

    #[test]
    fn parses_image_tags() {
        assert_eq!(
            ["a:1.0", "host:5000/a", "x/a:1@sha256:00"].map(tag),
            ["1.0", "latest", "sha256:00"]
        );
    }

    #[test]
    fn reports_old_kubelets_with_their_nodes() {
        let node = |name: &str, version: &str| {
            let info = json!({"kubeletVersion": version, "architecture": "", "bootID": "", "containerRuntimeVersion": "", "kernelVersion": "",
                "kubeProxyVersion": "", "machineID": "", "operatingSystem": "", "osImage": "", "systemUUID": ""});
            object(json!({"metadata": {"name": name}, "status": {"nodeInfo": info}}))
        };
        let findings = kubernetes(&Facts {
            nodes: Ok(vec![node("a", "v1.34.0"), node("b", "v1.27.1")]),
            ..unknown_facts()
        })
        .unwrap();
        assert_eq!(
            (findings[0].level, findings[0].details.as_slice()),
            (Level::Problem, &["b: v1.27.1".to_owned()][..])
        );
        let findings = kubernetes(&Facts {
            nodes: Ok(vec![node("a", "v1.34.0")]),
            ..unknown_facts()
        })
        .unwrap();
        assert_eq!(findings, [Finding::ok("Kubernetes v1.34.1, 1 node")]);
    }

    #[test]
    fn reports_unavailable_components() {
        let levels = |facts: &Facts| {
            let findings = [controller(facts).unwrap(), injector(facts).unwrap()].concat();
            findings
                .iter()
                .map(|finding| finding.level)
                .collect::<Vec<_>>()
        };
        assert_eq!(levels(&with_components(2, "")), [Level::Ok, Level::Ok]);
        assert_eq!(levels(&with_components(1, "")), [Level::Warning, Level::Ok]);
        assert_eq!(levels(&with_components(0, "")), [Level::Problem, Level::Ok]);
        let mut facts = with_components(0, "");
        let deployment = &mut facts.deployments.as_mut().unwrap()[0];
        deployment.spec.as_mut().unwrap().replicas = Some(0);
        let scaled = &controller(&facts).unwrap()[0];
        assert!(
            scaled.level == Level::Problem && scaled.text.contains("is scaled to 0 replicas"),
            "{scaled:?}"
        );
        let missing = controller(&Facts {
            deployments: Ok(Vec::new()),
            ..unknown_facts()
        })
        .unwrap();
        assert!(
            missing[0]
                .text
                .contains("Deployment service-mesh/controller not found"),
            "{missing:?}"
        );
    }

    #[test]
    fn warns_of_different_versions() {
        let levels = |proxy: &str| {
            versions(&with_components(2, proxy))
                .unwrap()
                .iter()
                .map(|finding| finding.level)
                .collect::<Vec<_>>()
        };
        assert_eq!(levels("diy-sm-proxy:1.0"), [Level::Ok]);
        assert_eq!(
            levels("diy-sm-proxy:1.1"),
            [Level::Warning, Level::Warning],
            "the tag of new pods, and the pod with the old one"
        );
        let mut facts = with_components(2, "");
        let injector = &mut facts.deployments.as_mut().unwrap()[1];
        let pod = injector.spec.as_mut().unwrap().template.spec.as_mut();
        let pod = pod.unwrap();
        pod.containers[0].env = None;
        pod.init_containers = Some(vec![object(
            json!({"name": "proxy-image", "image": "diy-sm-proxy:1.0"}),
        )]);
        assert_eq!(versions(&facts).unwrap()[0].level, Level::Ok);
    }
}
