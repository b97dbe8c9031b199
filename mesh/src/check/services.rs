//! Checks of Services: their selectors match pods, and these have their target ports. Pure.

use std::collections::{BTreeMap, BTreeSet};

use diy_mesh_control_plane::pods::ContainerPort;
use diy_mesh_injector::containers::PROXY;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;

use super::facts::Facts;
use super::workloads::Workload;
use super::{Finding, Findings, count, or_ok};
use crate::edges;
use crate::pods::{self, Pod};

type Labels = BTreeMap<String, String>;

/// The Services of the mesh select its components, and Services in namespaces with meshed pods
/// select pods or the template of a workload, which may be scaled to zero.
pub(super) fn services(facts: &Facts) -> Findings<'_> {
    let services = facts.services.as_ref()?;
    let (pods, workloads) = (facts.pods.as_ref()?, facts.workloads.as_ref()?);
    let broken = broken_components(facts, services);
    let text = "not select the pods of its Deployment: proxies and the API server cannot connect to it; connected proxies stay connected";
    let (one, many) = ("Service of the mesh does", "Services of the mesh do");
    let broken =
        Finding::problem(text, "mesh install | kubectl apply -f -").about(broken, one, many);
    let meshed: BTreeSet<String> = pods::meshed(pods)
        .filter_map(ResourceExt::namespace)
        .collect();
    let in_meshed = services
        .iter()
        .filter(|service| meshed.contains(&service.namespace().unwrap_or_default()));
    let (mut unmatched, mut unknown, mut number) = (Vec::new(), Vec::new(), 0);
    for service in in_meshed {
        number += 1;
        if let Some(selector) = selector(service)
            && !is_matched(&service.namespace(), selector, pods, workloads)
        {
            unmatched.push(describe(service, selector));
        }
        let ports = unknown_ports(service, pods).into_iter();
        unknown.extend(ports.map(|(_, text)| format!("{}: {text}", pods::name(service))));
    }
    let text = "no pod and no workload: requests fail with no-endpoint";
    let advice = "correct spec.selector of the Service, or the labels of the pods";
    let finding = Finding::problem(text, advice);
    let unmatched = finding.about(unmatched, "Service selects", "Services select");
    let text = "whose pods declare no such port: connections fail with no-endpoint or are refused";
    let advice = "correct targetPort of the Service, or the ports of the containers";
    let finding = Finding::warning(text, advice);
    let unknown = finding.about(unknown, "target port", "target ports");
    let number = count(number, "Service", "Services");
    let text =
        format!("{number} in namespaces with meshed pods, no selector or port without a match");
    Ok(or_ok([broken, unmatched, unknown], text))
}

/// Why no pod listens on the target port of `NAMESPACE/NAME:PORT`, as far as pods declare ports.
pub(super) fn target_port_hint(
    destination: &str,
    services: &[Service],
    pods: &[Pod],
) -> Option<String> {
    let (name, port) = destination.rsplit_once(':')?;
    let port: i32 = port.parse().ok()?;
    let service = services
        .iter()
        .find(|service| pods::name(*service) == name)?;
    let mut unknown = unknown_ports(service, pods).into_iter();
    unknown.find_map(|(number, text)| (number == port).then_some(text))
}

/// The ports of a Service with TCP target ports that its pods do not declare, and a description. A
/// number matters only where pods declare ports.
fn unknown_ports(service: &Service, pods: &[Pod]) -> Vec<(i32, String)> {
    let Some(selector) = selector(service) else {
        return Vec::new();
    };
    let pods: Vec<&Pod> = pods
        .iter()
        .filter(|pod| pod.namespace() == service.namespace() && pods::is_active(pod))
        .filter(|pod| matches(selector, pod.labels()))
        .collect();
    let declared: Vec<&ContainerPort> = pods.iter().flat_map(|pod| declared_ports(pod)).collect();
    if pods.is_empty() {
        return Vec::new();
    }
    let described: BTreeSet<String> = declared
        .iter()
        .map(|port| match &port.name {
            Some(name) => format!("{} ({name})", port.container_port),
            None => port.container_port.to_string(),
        })
        .collect();
    let described = if described.is_empty() {
        "no port".to_owned()
    } else {
        Vec::from_iter(described).join(", ")
    };
    let is_unknown = |target: &IntOrString| match target {
        IntOrString::Int(number) => {
            let mut ports = declared.iter();
            !declared.is_empty() && ports.all(|port| port.container_port != *number)
        }
        IntOrString::String(name) => {
            let mut ports = declared.iter();
            ports.all(|port| port.name.as_ref() != Some(name))
        }
    };
    let ports = service
        .spec
        .iter()
        .flat_map(|spec| spec.ports.iter().flatten());
    let ports = ports.filter(|port| port.protocol.as_deref().unwrap_or("TCP") == "TCP");
    let unknown = ports.filter_map(|port| {
        let target = port.target_port.clone();
        let target = target.unwrap_or(IntOrString::Int(port.port));
        let shown = match &target {
            IntOrString::Int(number) => number.to_string(),
            IntOrString::String(name) => format!("{name:?}"),
        };
        let text = format!("targetPort {shown}, its pods have {described}");
        is_unknown(&target).then_some((port.port, text))
    });
    unknown.collect()
}

/// The TCP ports that the containers of a pod declare, without the ports of the proxy.
fn declared_ports(pod: &Pod) -> impl Iterator<Item = &ContainerPort> {
    let containers = pod.spec.iter().flat_map(|spec| {
        let sidecars = spec.init_containers.iter().flatten();
        let containers = spec.containers.iter().flatten();
        containers.chain(sidecars.filter(|container| container.name != PROXY))
    });
    containers
        .flat_map(|container| container.ports.iter().flatten())
        .filter(|port| port.protocol.as_deref().unwrap_or("TCP") == "TCP")
}

/// The Services of controller and injector that do not exist or select other pods.
fn broken_components(facts: &Facts, services: &[Service]) -> Vec<String> {
    let is_read = (facts.only.as_ref()).is_none_or(|only| *only == facts.namespace);
    let deployments = facts.deployments.iter().filter(|_| is_read).flatten();
    let components = deployments.filter_map(|deployment| {
        let name = deployment.name_any();
        let template = &deployment.spec.as_ref()?.template;
        let labels = template.metadata.as_ref()?.labels.as_ref()?;
        ["controller", "injector"]
            .contains(&name.as_str())
            .then_some((name, labels))
    });
    let broken = components.filter_map(|(name, labels)| {
        let service = services.iter().find(|service| {
            service.name_any() == name && service.namespace().as_ref() == Some(&facts.namespace)
        });
        match service.map(|service| (service, selector(service))) {
            None => Some(format!("{}/{name} does not exist", facts.namespace)),
            Some((service, None)) => Some(describe(service, &Labels::new())),
            Some((service, Some(selector))) => {
                (!matches(selector, labels)).then(|| describe(service, selector))
            }
        }
    });
    broken.collect()
}

/// `None` if other clients maintain the endpoints of the Service.
fn selector(service: &Service) -> Option<&Labels> {
    let selector = service.spec.as_ref()?.selector.as_ref()?;
    (!selector.is_empty()).then_some(selector)
}

fn is_matched(
    namespace: &Option<String>,
    selector: &Labels,
    pods: &[Pod],
    workloads: &[Workload],
) -> bool {
    let mut pods = pods.iter().filter(|pod| pod.namespace() == *namespace);
    let mut workloads = workloads
        .iter()
        .filter(|workload| Some(&workload.namespace) == namespace.as_ref());
    pods.any(|pod| matches(selector, pod.labels()))
        || workloads.any(|workload| matches(selector, &workload.labels))
}

fn matches(selector: &Labels, labels: &Labels) -> bool {
    selector
        .iter()
        .all(|(name, value)| labels.get(name) == Some(value))
}

fn describe(service: &Service, selector: &Labels) -> String {
    let selector = edges::labels(selector);
    format!("{}: selector {selector:?}", pods::name(service))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::{
        Level,
        facts::testing::{deployment, meshed, object, ready, unknown_facts},
    };
    use super::*;

    fn service(namespace: &str, name: &str, selector: Value) -> Service {
        object(json!({
            "metadata": {"namespace": namespace, "name": name},
            "spec": {"selector": selector},
        }))
    }

    fn facts(services: Vec<Service>) -> Facts {
        let mut till = meshed("till", ready());
        till.metadata.labels = Some([("app".to_owned(), "till".to_owned())].into());
        let component = |name: &str| deployment(name, 2, json!([]));
        Facts {
            services: Ok(services),
            pods: Ok(vec![till]),
            workloads: Ok(Vec::new()),
            deployments: Ok(vec![component("controller"), component("injector")]),
            ..unknown_facts()
        }
    }

    fn own(app: &str) -> Vec<Service> {
        let own = |name: &str, app: &str| service("service-mesh", name, json!({"app": app}));
        vec![own("controller", app), own("injector", "injector")]
    }

    #[test]
    fn reports_services_of_the_mesh_that_do_not_select_their_component() {
        let finding = |services| services_of(&facts(services));
        assert_eq!(finding(own("controller"))[0].level, Level::Ok);
        // It has endpoints, but they are endpoints of another component.
        let broken = finding(own("injector"));
        assert_eq!(
            (broken[0].level, broken[0].details.as_slice()),
            (
                Level::Problem,
                &["service-mesh/controller: selector \"app=injector\"".to_owned()][..]
            )
        );
        let missing = finding(own("controller")[..1].to_vec());
        assert_eq!(missing[0].details, ["service-mesh/injector does not exist"]);
    }

    #[test]
    fn reports_services_that_select_no_pod() {
        let with = |service: Service| {
            let mut services = own("controller");
            services.push(service);
            facts(services)
        };
        let level = |facts: &Facts| services_of(facts)[0].level;
        assert_eq!(
            level(&with(service("shop", "till", json!({"app": "till"})))),
            Level::Ok
        );
        let broken = with(service("shop", "till", json!({"app": "till", "tier": "x"})));
        assert_eq!(
            services_of(&broken)[0].details,
            ["shop/till: selector \"app=till,tier=x\""]
        );
        // Without a selector, another client maintains the endpoints.
        assert_eq!(
            level(&with(service("shop", "till", json!(null)))),
            Level::Ok
        );
        assert_eq!(
            level(&with(service("other", "till", json!({"app": "nothing"})))),
            Level::Ok,
            "no meshed pod is there"
        );
    }

    #[test]
    fn reports_target_ports_that_no_pod_declares() {
        let details = |container: Value, target: Value| {
            let mut services = own("controller");
            services.push(object(json!({
                "metadata": {"namespace": "shop", "name": "till"},
                "spec": {"selector": {"app": "till"}, "ports": [
                    {"port": 80, "targetPort": target},
                    {"port": 53, "targetPort": 53, "protocol": "UDP"},
                ]},
            })));
            let mut facts = facts(services);
            let pod = &mut facts.pods.as_mut().unwrap()[0];
            pod.spec.as_mut().unwrap().containers = Some(vec![object(container)]);
            services_of(&facts).remove(0).details
        };
        let web = json!({"name": "web", "ports": [{"containerPort": 8080, "name": "web"}]});
        for target in [json!(8080), json!("web")] {
            assert_eq!(details(web.clone(), target), [""; 0]);
        }
        let line = |target: &str, ports: &str| {
            [format!(
                "shop/till: targetPort {target}, its pods have {ports}"
            )]
        };
        assert_eq!(
            details(web.clone(), json!(8081)),
            line("8081", "8080 (web)")
        );
        assert_eq!(details(web, json!("http")), line("\"http\"", "8080 (web)"));
        // Pods need not declare the numbers of their ports.
        let bare = json!({"name": "web"});
        assert_eq!(details(bare.clone(), json!(8081)), [""; 0]);
        assert_eq!(details(bare, json!("web")), line("\"web\"", "no port"));
    }

    #[test]
    fn accepts_services_of_workloads_without_pods() {
        let mut services = own("controller");
        services.push(service("shop", "web", json!({"app": "web"})));
        let mut facts = facts(services);
        assert_eq!(services_of(&facts)[0].level, Level::Problem);
        let web = json!({
            "kind": "Deployment", "metadata": {"namespace": "shop", "name": "web"},
            "spec": {"replicas": 0, "selector": {}, "template": {
                "metadata": {"labels": {"app": "web"}}, "spec": {"containers": []}}},
        });
        let web = super::super::workloads::workload(&web, &[]);
        facts.workloads = Ok(vec![web.expect("complete")]);
        assert_eq!(services_of(&facts)[0].level, Level::Ok);
    }

    fn services_of(facts: &Facts) -> Vec<Finding> {
        super::services(facts).unwrap()
    }
}
