//! The resources of the mesh's containers, and of the pod as a whole. Pure.
//!
//! Kubernetes rejects a pod whose containers request more than `spec.resources` does, and takes the
//! QoS class of a pod from all of its containers. The injector therefore raises the resources of
//! the pod by the resources of the proxy, and gives a Guaranteed pod a proxy with equal requests
//! and limits. proxy-init ends before the other containers start: it has the resources of the
//! proxy, which changes neither sum.

use serde_json::{Map, Value, json};

use crate::containers::PROXY;
use crate::pod::name_of;
use crate::quantity::{MEBIBYTE, Quantity};
use crate::settings::{GUARANTEED_CPU, GUARANTEED_MEMORY, RESOURCES, Resource, SidecarSettings};

/// The least CPU time to which a limit of the pod may reduce the proxy.
pub const MIN_CPU: u128 = 100;
/// The least memory to which a limit of the pod may reduce the proxy.
pub const MIN_MEMORY: u128 = 64 * MEBIBYTE;

/// A resource that a pod requests, and how it is written.
struct Kind {
    name: &'static str,
    min: &'static (u128, &'static str),
    quantity: fn(u128) -> Quantity,
    of: fn(&mut SidecarSettings) -> &mut Resource,
}

const KINDS: [Kind; 2] = [
    Kind {
        name: "cpu",
        min: &(MIN_CPU, "100m"),
        quantity: Quantity::cpu,
        of: |settings| &mut settings.cpu,
    },
    Kind {
        name: "memory",
        min: &(MIN_MEMORY, "64Mi"),
        quantity: Quantity::memory,
        of: |settings| &mut settings.memory,
    },
];

/// The containers of a pod.
#[derive(Clone, Copy)]
pub struct Containers<'a> {
    /// The containers of an earlier injection.
    pub mesh: &'a [&'a Value],
    /// The other init containers.
    pub init: &'a [&'a Value],
    /// The containers that run after them.
    pub main: &'a [Value],
}

/// The `resources` of a container with these settings.
pub fn of_container(settings: &SidecarSettings) -> Value {
    let (mut requests, mut limits) = (Map::new(), Map::new());
    for (name, resource) in [("cpu", &settings.cpu), ("memory", &settings.memory)] {
        requests.insert(name.into(), resource.request().text.as_str().into());
        let limit = resource.limit.as_ref();
        limits.extend(limit.map(|limit| (name.to_owned(), limit.text.as_str().into())));
    }
    let mut resources = json!({"requests": requests});
    if !limits.is_empty() {
        resources["limits"] = limits.into();
    }
    resources
}

/// Fits the proxy and the pod to each other: changes the settings of the proxy, and
/// `spec.resources` of the pod where it has them. Returns warnings, or the reasons why the proxy does
/// not fit.
pub fn fit(
    settings: &mut SidecarSettings,
    pod: &mut Value,
    containers: Containers<'_>,
) -> Result<Vec<String>, Vec<String>> {
    let pod = pod.pointer_mut("/spec/resources");
    let Some(pod) = pod.filter(|pod| KINDS.iter().any(|kind| kind.is_in(pod))) else {
        let mut all = containers.init.iter().copied().chain(containers.main);
        let is_guaranteed = !containers.main.is_empty()
            && all.all(|container| is_guaranteed(&container["resources"], None));
        return Ok(guarantee(settings, is_guaranteed).into_iter().collect());
    };
    if settings.keeps_pod_resources {
        return reduce(settings, pod, containers).map(|()| Vec::new());
    }
    let old = containers.mesh.iter().find(|old| name_of(old) == PROXY);
    let old = old.and_then(|old| old.get("resources"));
    let burstable = guarantee(settings, is_guaranteed(pod, old));
    Ok(burstable
        .into_iter()
        .chain(raise(settings, pod, old))
        .collect())
}

impl Kind {
    /// Whether these resources include this one.
    fn is_in(&self, resources: &Value) -> bool {
        let mut lists = ["requests", "limits"].iter();
        lists.any(|list| quantity(resources, list, self.name).is_some())
    }
}

/// Whether requests and limits of CPU time and memory are equal, without the share of an earlier
/// proxy. An absent request is the limit.
fn is_guaranteed(resources: &Value, old: Option<&Value>) -> bool {
    KINDS.iter().all(|kind| {
        let without_old = |list| {
            let share = old.map_or(0, |old| share(old, list, kind.name));
            quantity(resources, list, kind.name).map(|quantity| quantity.saturating_sub(share))
        };
        let limit = without_old("limits");
        limit.is_some_and(|limit| limit > 0) && limit == without_old("requests").or(limit)
    })
}

/// Gives the proxy of a Guaranteed pod equal requests and limits, or returns a warning that the pod
/// becomes Burstable.
fn guarantee(settings: &mut SidecarSettings, is_guaranteed: bool) -> Option<String> {
    let exact = [&settings.cpu, &settings.memory].map(|resource| {
        let request = resource.request().thousandths;
        let limit = resource.limit.as_ref();
        let limit = limit.filter(|limit| limit.thousandths == request);
        limit.or(resource.guaranteed.as_ref()).cloned()
    });
    match exact {
        _ if !is_guaranteed => None,
        [Some(cpu), Some(memory)] => {
            settings.cpu.set_exactly(cpu);
            settings.memory.set_exactly(memory);
            None
        }
        _ => Some(format!(
            "the pod becomes Burstable, since requests and limits of the proxy differ: annotations {GUARANTEED_CPU} and {GUARANTEED_MEMORY}, such as \"500m\" and \"256Mi\", keep it Guaranteed"
        )),
    }
}

/// Raises the resources of the pod by the resources of the proxy, in place of an earlier proxy.
/// Returns a warning with the sums.
fn raise(settings: &SidecarSettings, pod: &mut Value, old: Option<&Value>) -> Option<String> {
    let new = of_container(settings);
    let mut raised = Vec::new();
    for list in ["requests", "limits"] {
        for kind in &KINDS {
            let Some(before) = quantity(pod, list, kind.name) else {
                continue;
            };
            let others = before.saturating_sub(old.map_or(0, |old| share(old, list, kind.name)));
            let sum = (kind.quantity)(others.saturating_add(share(&new, list, kind.name)));
            if sum.thousandths != before {
                let field = &mut pod[list][kind.name];
                raised.push(format!("{list}.{} from {field} to {}", kind.name, sum.text));
                *field = sum.text.into();
            }
        }
    }
    (!raised.is_empty()).then(|| {
        format!(
            "spec.resources of the pod is raised by the resources of the proxy: {}; annotation {RESOURCES}: keep leaves it as it is",
            raised.join(", ")
        )
    })
}

/// The part of the pod's requests or limits that a container takes. Without a limit, the container
/// takes its request: Kubernetes rejects requests of a pod above its limits.
fn share(container: &Value, list: &str, name: &str) -> u128 {
    quantity(container, list, name)
        .or_else(|| quantity(container, "requests", name))
        .unwrap_or_default()
}

/// Reduces the limits of the proxy to the limits of the pod, but not below the minimum.
fn reduce(
    settings: &mut SidecarSettings,
    pod: &Value,
    containers: Containers<'_>,
) -> Result<(), Vec<String>> {
    let mut problems = Vec::new();
    for kind in &KINDS {
        let Kind { name, min, .. } = kind;
        let remedy = format!("raise it, or remove annotation {RESOURCES}: keep");
        let resource = (kind.of)(settings);
        if let Some(limit) = quantity(pod, "limits", name)
            && resource
                .limit
                .as_ref()
                .is_none_or(|own| own.thousandths > limit)
        {
            if limit < min.0 {
                let limit = &pod["limits"][name];
                problems.push(format!(
                    "spec.resources.limits.{name} of the pod is {limit}, less than the {} that the proxy needs: {remedy}",
                    min.1
                ));
            }
            resource.limit = resource.limit.take().map(|_| (kind.quantity)(limit));
        }
        let request = resource.request();
        if let Some(total) = quantity(pod, "requests", name)
            && containers
                .requested(name)
                .saturating_add(request.thousandths)
                > total
        {
            let total = &pod["requests"][name];
            problems.push(format!(
                "spec.resources.requests.{name} of the pod is {total}, which the requests of its containers and {} of the proxy exceed: {remedy}",
                request.text
            ));
        }
    }
    if problems.is_empty() {
        Ok(())
    } else {
        Err(problems)
    }
}

impl Containers<'_> {
    /// The request of all containers, without the containers of the mesh, as Kubernetes adds it up:
    /// each init container runs alone, beside the sidecars before it.
    fn requested(self, name: &str) -> u128 {
        let request = |container: &Value| {
            let resources = &container["resources"];
            quantity(resources, "requests", name)
                .or_else(|| quantity(resources, "limits", name))
                .unwrap_or_default()
        };
        let (mut sidecars, mut peak) = (0_u128, 0);
        for container in self.init {
            let request = sidecars.saturating_add(request(container));
            if container["restartPolicy"] == "Always" {
                sidecars = request;
            }
            peak = request.max(peak);
        }
        let main = self.main.iter().map(request);
        main.fold(sidecars, u128::saturating_add).max(peak)
    }
}

/// A quantity of `requests` or `limits`, in thousandths. The API server rejects an invalid one.
fn quantity(resources: &Value, list: &str, name: &str) -> Option<u128> {
    let text = match field(field(resources, list)?, name)? {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    Quantity::parse(&text).map(|quantity| quantity.thousandths)
}

fn field<'a>(object: &'a Value, name: &str) -> Option<&'a Value> {
    object.get(name).filter(|value| !value.is_null())
}

#[cfg(test)]
mod tests;
