//! The injection decision: a pod in, a verdict and a JSON patch out. Pure and idempotent.
//!
//! Works on plain JSON, so that unknown fields of later Kubernetes versions survive. Adds two init
//! containers, a volume and annotations, rewrites probes, raises pod-level resources, and changes
//! nothing else.

use json_patch::Patch;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Map, Value};

use crate::annotations::{self, InjectAnnotation, quoted};
use crate::config::Settings;
use crate::containers::{
    self, FIRST_PROXY_UID, PROXY, PROXY_INIT, PROXY_UID_FLAG, Ports, TOKEN_FILE_VARIABLE,
    TOKEN_VOLUME,
};
use crate::diff;
use crate::other_mesh::{self, OtherMesh};
use crate::pod::{PodView, annotation, list, name_of};
use crate::probes::{Previous, Rewriter};
use crate::resources::{self, Containers};
use crate::settings::{DRAIN, STRICT, SidecarSettings};

/// A pod that is about to be created.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// The pod, as the API server sends it.
    pub pod: &'a Value,
    /// The namespace of the request. The pod itself may not name it.
    pub namespace: &'a str,
    /// The labels of that namespace, or the reason why they are unknown.
    pub labels: Result<NamespaceLabels, &'a str>,
}

/// The settings in the labels of a namespace for its pods, unless a pod says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NamespaceLabels {
    /// Pods are injected.
    pub enabled: bool,
    /// Injected pods reject unauthenticated connections.
    pub strict: bool,
    /// Another mesh injects its proxy, which an annotation of the namespace may request, too.
    pub other_mesh: Option<&'static OtherMesh>,
}

impl NamespaceLabels {
    /// The settings of a namespace with these labels and annotations.
    pub fn of<'a>(
        label: impl Fn(&str) -> Option<&'a str>,
        annotation: impl Fn(&str) -> Option<&'a str>,
    ) -> Self {
        Self {
            enabled: label(annotations::INJECT) == Some("enabled"),
            strict: label(annotations::INBOUND) == Some(STRICT),
            other_mesh: OtherMesh::of_namespace(|name| label(name).or_else(|| annotation(name))),
        }
    }

    /// The settings of a namespace with this metadata.
    pub fn of_metadata(metadata: &ObjectMeta) -> Self {
        let [labels, annotations] = [&metadata.labels, &metadata.annotations];
        Self::of(
            |name| labels.as_ref()?.get(name).map(String::as_str),
            |name| annotations.as_ref()?.get(name).map(String::as_str),
        )
    }
}

/// The decision about a pod.
#[derive(Debug, PartialEq)]
pub enum Verdict {
    /// Neither the pod nor its namespace requests injection.
    NotRequested,
    /// The pod is admitted without a proxy, with a warning.
    Skipped(String),
    /// The pod is rejected, with a message.
    Denied(String),
    /// The pod is rejected for now, because the labels of its namespace are unknown.
    Unknown(String),
    /// The pod is admitted with a proxy.
    Injected(Box<Injection>),
}

/// An injected pod.
#[derive(Debug, PartialEq)]
pub struct Injection {
    /// The pod after injection.
    pub pod: Value,
    /// The patch from the original pod; empty if the pod is up to date.
    pub patch: Patch,
    /// Warnings for the client that creates the pod.
    pub warnings: Vec<String>,
}

/// Maximum number of problems in a denial message.
const MAX_REPORTED_PROBLEMS: usize = 10;
/// The default of `terminationGracePeriodSeconds`.
const DEFAULT_GRACE_PERIOD: u64 = 30;

/// Decides about a pod.
pub fn decide(settings: &Settings, candidate: Candidate<'_>) -> Verdict {
    match (annotations::inject(candidate.pod), candidate.labels) {
        (InjectAnnotation::Disabled, _) => return Verdict::NotRequested,
        (InjectAnnotation::Unset, Ok(labels)) if !labels.enabled => return Verdict::NotRequested,
        (InjectAnnotation::Invalid(value), _) => {
            return Verdict::Skipped(format!(
                "not injected: annotation {} is {}, expected \"true\" or \"false\"",
                annotations::INJECT,
                quoted(value)
            ));
        }
        (InjectAnnotation::Enabled | InjectAnnotation::Unset, _) => {}
    }
    if let Some(reason) = ineligible(settings, candidate) {
        return Verdict::Skipped(format!("not injected: {reason}"));
    }
    let labels = match candidate.labels {
        Ok(labels) => labels,
        Err(reason) => return Verdict::Unknown(reason.into()),
    };
    if let Some(reason) = other_mesh::reason(candidate.pod, labels.other_mesh) {
        // The webhook of the other mesh may come after the first call of this one.
        if has_proxy(candidate.pod) {
            return Verdict::Denied(reason);
        }
        return Verdict::Skipped(format!("not injected: {reason}"));
    }
    match inject(settings, candidate.pod, labels) {
        Ok(injection) => Verdict::Injected(Box::new(injection)),
        Err(mut problems) => {
            problems.truncate(MAX_REPORTED_PROBLEMS);
            Verdict::Denied(problems.join("; "))
        }
    }
}

/// Decides about a pod to which ephemeral containers are added. Injected pods reject those that
/// would bypass the proxy.
pub fn decide_ephemeral_containers(pod: &Value) -> Verdict {
    if !has_proxy(pod) {
        return Verdict::NotRequested;
    }
    let spec = pod.get("spec").unwrap_or(&Value::Null);
    let (injected, _) = split(list(spec, "initContainers"));
    let proxy = injected.into_iter().find(|one| name_of(one) == PROXY);
    let proxy_uid = proxy.and_then(user).unwrap_or(FIRST_PROXY_UID);
    let conflicts =
        users(pod, list(spec, "ephemeralContainers")).filter(|(_, user)| *user == proxy_uid);
    let problems = conflicts.take(MAX_REPORTED_PROBLEMS).map(|(container, _)| {
        format!(
            "container {} runs as user {proxy_uid}, which is reserved for the proxy, so that its traffic would bypass the mesh: choose another user",
            quoted(name_of(container))
        )
    });
    let problems: Vec<_> = problems.collect();
    if problems.is_empty() {
        return Verdict::NotRequested;
    }
    Verdict::Denied(problems.join("; "))
}

/// The reason why a pod cannot have a proxy, if there is one.
fn ineligible(settings: &Settings, candidate: Candidate<'_>) -> Option<String> {
    let Candidate { pod, namespace, .. } = candidate;
    if namespace == settings.mesh_namespace {
        return Some(format!("namespace {namespace} belongs to the mesh"));
    }
    let reason = if pod.pointer("/spec/hostNetwork").and_then(Value::as_bool) == Some(true) {
        "the pod uses the network of its node (hostNetwork)"
    } else if annotation(pod, "kubernetes.io/config.mirror").is_some() {
        "the pod is a static pod, which webhooks cannot change"
    } else if pod.pointer("/spec/os/name").and_then(Value::as_str) == Some("windows") {
        "the pod runs on Windows"
    } else {
        return None;
    };
    Some(reason.into())
}

/// Injects the proxy, or returns every problem that prevents it.
fn inject(
    settings: &Settings,
    pod: &Value,
    labels: NamespaceLabels,
) -> Result<Injection, Vec<String>> {
    let view = PodView::new(pod)?;
    let mut problems = conflicts(&view);
    let mut own = settings.proxy.clone();
    own.proxy.strict = labels.strict;
    let mut own = own.for_pod(pod, &mut problems);
    let ports = Ports::avoiding(declared_ports(&view)).unwrap_or_else(|| {
        problems.push("the containers of the pod declare all ports from 4000 to 65535, which leaves none for the proxy".into());
        Ports::DEFAULT
    });
    if !problems.is_empty() {
        return Err(problems);
    }

    let mut injected = pod.clone();
    let (old, others) = split(view.init_containers);
    let containers = Containers {
        mesh: &old,
        init: &others,
        main: view.containers,
    };
    let resource_warnings = resources::fit(&mut own, &mut injected, containers)?;
    let previous = old.iter().find(|container| name_of(container) == PROXY);
    let previous = previous
        .map(|proxy| Previous::of(proxy))
        .unwrap_or_default();
    let mut probes = Rewriter::new(&own, ports, previous);
    let others: Vec<Value> = others
        .into_iter()
        .map(|other| probes.rewrite(other))
        .collect();
    if !view.containers.is_empty() {
        let containers = view
            .containers
            .iter()
            .map(|container| probes.rewrite(container));
        injected["spec"]["containers"] = containers.collect();
    }
    let uid = containers::free_uid(users(pod, app_containers(&view)).map(|(_, user)| user));
    let containers = [
        containers::proxy_init(settings, &own, ports, uid),
        containers::proxy(settings, &own, ports, uid, probes.arguments),
    ];
    let mut volumes = view.volumes.to_vec();
    diff::merge_list(&mut volumes, &[containers::token_volume()], "name");
    let mut annotations = view.annotations.cloned().unwrap_or_default();
    annotations.insert(
        annotations::STATUS.into(),
        annotations::STATUS_INJECTED.into(),
    );
    scrape(&mut annotations, ports, &old);
    injected["spec"]["initContainers"] = init_containers(&old, containers, others).into();
    injected["spec"]["volumes"] = volumes.into();
    injected["metadata"]["annotations"] = annotations.into();

    Ok(Injection {
        patch: diff::patch(pod, &injected),
        pod: injected,
        warnings: port_warning(ports)
            .into_iter()
            .chain(drain_warning(pod, &own))
            .chain(resource_warnings)
            .chain(probes.warnings)
            .chain(unknown_annotations(&view))
            .collect(),
    })
}

/// Announces the metrics of the proxy, unless the pod has annotations of its own about its metrics.
/// Annotations of an earlier injection have the port of the earlier proxy.
fn scrape(annotations: &mut Map<String, Value>, ports: Ports, old: &[&Value]) {
    let [enabled, port, path] = annotations::SCRAPE;
    let mut declared = old
        .iter()
        .flat_map(|container| list(container, "ports"))
        .filter_map(|port| port.get("containerPort")?.as_u64());
    let is_free = match annotations.get(port) {
        Some(port) => {
            let port = port.as_str().and_then(|port| port.parse().ok());
            declared.any(|former| Some(former) == port)
        }
        None => ![enabled, path]
            .iter()
            .any(|name| annotations.contains_key(*name)),
    };
    if is_free {
        annotations.insert(port.to_owned(), ports.admin.to_string().into());
        for (name, value) in [(enabled, "true"), (path, "/metrics")] {
            annotations.entry(name).or_insert_with(|| value.into());
        }
    }
}

fn port_warning(ports: Ports) -> Option<String> {
    let Ports {
        inbound,
        outbound,
        admin,
    } = ports;
    (ports != Ports::DEFAULT).then(|| {
        format!("a container declares a default port of the proxy; the proxy listens on {inbound} (inbound), {outbound} (outbound) and {admin} (admin) instead")
    })
}

fn unknown_annotations(view: &PodView<'_>) -> impl Iterator<Item = String> {
    let names = view.annotations.into_iter().flat_map(|map| map.keys());
    names
        .filter(|name| annotations::is_unknown(name))
        .take(MAX_REPORTED_PROBLEMS)
        .map(|name| format!("annotation {} is unknown and has no effect", quoted(name)))
}

/// The kubelet ends the proxy with the pod, also before the end of a drain period that the pod
/// asks for.
fn drain_warning(pod: &Value, own: &SidecarSettings) -> Option<String> {
    annotation(pod, DRAIN)?;
    let grace_period = pod
        .pointer("/spec/terminationGracePeriodSeconds")
        .and_then(Value::as_u64)
        .unwrap_or(DEFAULT_GRACE_PERIOD);
    (own.proxy.drain > grace_period).then(|| {
        format!(
            "annotation {} is longer than terminationGracePeriodSeconds of the pod, {grace_period}: set a longer one",
            DRAIN
        )
    })
}

/// The containers of the pod, without the containers of the mesh.
fn app_containers<'a>(view: &PodView<'a>) -> impl Iterator<Item = &'a Value> {
    let init = view
        .init_containers
        .iter()
        .filter(|container| !is_injected(container));
    init.chain(view.containers)
}

/// The TCP ports that the containers of the pod declare.
fn declared_ports(view: &PodView<'_>) -> impl Iterator<Item = u16> {
    app_containers(view)
        .flat_map(|container| list(container, "ports"))
        .filter(|port| {
            let protocol = port.get("protocol").and_then(Value::as_str);
            protocol.is_none_or(|protocol| protocol == "TCP")
        })
        .filter_map(|port| u16::try_from(port.get("containerPort")?.as_u64()?).ok())
}

/// The init containers of an earlier injection, and the others.
fn split(init_containers: &[Value]) -> (Vec<&Value>, Vec<&Value>) {
    init_containers
        .iter()
        .partition(|container| is_injected(container))
}

/// The mesh's containers, then the others in their order. Fields that others added to the mesh's
/// containers stay.
fn init_containers(old: &[&Value], injected: [Value; 2], others: Vec<Value>) -> Vec<Value> {
    let updated = injected.into_iter().map(|new| {
        match old.iter().find(|old| name_of(old) == name_of(&new)) {
            Some(old) => updated(old, &new),
            None => new,
        }
    });
    updated.chain(others).collect()
}

/// The names of the pod that conflict with names of the mesh.
fn conflicts(view: &PodView<'_>) -> Vec<String> {
    let mut problems = Vec::new();
    for container in app_containers(view) {
        let name = name_of(container);
        if name == PROXY || name == PROXY_INIT {
            problems.push(format!(
                "the pod has a container named {name:?}, which is reserved for the mesh: rename it"
            ));
        }
    }
    let is_conflict =
        |volume: &Value| name_of(volume) == TOKEN_VOLUME && volume.get("projected").is_none();
    if view.volumes.iter().any(is_conflict) {
        problems.push(format!(
            "the pod has a volume named {TOKEN_VOLUME:?}, which is reserved for the mesh: rename it"
        ));
    }
    problems
}

/// The containers with a user, their own or the pod's. The user of an image is not in the pod.
fn users<'a>(
    pod: &Value,
    containers: impl IntoIterator<Item = &'a Value>,
) -> impl Iterator<Item = (&'a Value, i64)> {
    let default = pod.get("spec").and_then(user);
    let containers = containers.into_iter();
    containers.filter_map(move |container| Some((container, user(container).or(default)?)))
}

/// The user in the security context of a pod or a container.
fn user(object: &Value) -> Option<i64> {
    object.pointer("/securityContext/runAsUser")?.as_i64()
}

/// Whether a pod is injected.
fn has_proxy(pod: &Value) -> bool {
    let spec = pod.get("spec").unwrap_or(&Value::Null);
    list(spec, "initContainers").iter().any(is_injected)
}

/// Whether this or an earlier version of the injector added an init container.
fn is_injected(container: &Value) -> bool {
    match name_of(container) {
        PROXY => list(container, "env")
            .iter()
            .any(|variable| name_of(variable) == TOKEN_FILE_VARIABLE),
        PROXY_INIT => list(container, "args")
            .iter()
            .filter_map(Value::as_str)
            .any(|arg| arg.starts_with(PROXY_UID_FLAG)),
        _ => false,
    }
}

/// An injected container brought up to date. Removes a `command`: it would pass the arguments to
/// another program. Also removes the mount of Kubernetes API credentials: Kubernetes adds it to all
/// containers before it calls the webhook again.
fn updated(old: &Value, new: &Value) -> Value {
    let mut container = old.clone();
    diff::merge(&mut container, new);
    if let Some(fields) = container.as_object_mut() {
        fields.remove("command");
        if let Some(mounts) = fields.get_mut("volumeMounts").and_then(Value::as_array_mut) {
            mounts.retain(|mount| {
                mount.get("mountPath").and_then(Value::as_str) != Some(containers::API_TOKEN_PATH)
            });
        }
    }
    container
}
