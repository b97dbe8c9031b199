//! A pod as it is asked for in, the verdict and the JSON patch out: the injector's heart. Pure and idempotent.
//!
//! Works on plain JSON, so that fields of a Kubernetes newer than this program survive. It never touches what is not the
//! mesh's: it adds two init containers, a volume and an annotation.

use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, Patch, PatchOperation, RemoveOperation};
use serde_json::{Map, Value};

use crate::annotations::{self, Options, Wish, quoted};
use crate::containers::{
    self, PROXY, PROXY_INIT, PROXY_INIT_MARK, PROXY_MARK, PROXY_UID, Ports, TOKEN_VOLUME,
};
use crate::probes;

/// What the injected containers are made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The image of the sidecar.
    pub proxy_image: String,
    /// The image of the container that sets up the redirection.
    pub proxy_init_image: String,
    /// When the kubelet pulls them.
    pub image_pull_policy: ImagePullPolicy,
    /// Where the proxies find the controller.
    pub controller_address: String,
    /// Whom the controller's certificate must name.
    pub controller_identity: String,
    /// The namespace of the mesh itself, whose pods are left alone.
    pub mesh_namespace: String,
}

/// When the kubelet pulls an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImagePullPolicy {
    /// At every start.
    Always,
    /// When the node does not have it.
    IfNotPresent,
    /// Not at all.
    Never,
}

impl ImagePullPolicy {
    /// Every policy that Kubernetes knows.
    pub const ALL: [Self; 3] = [Self::Always, Self::IfNotPresent, Self::Never];

    /// As Kubernetes spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Always => "Always",
            Self::IfNotPresent => "IfNotPresent",
            Self::Never => "Never",
        }
    }
}

/// A pod that is about to be created.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// The pod, as the API server sends it.
    pub pod: &'a Value,
    /// Where it is created; the pod itself need not say.
    pub namespace: &'a str,
    /// What that namespace says on behalf of its pods.
    pub labels: NamespaceLabels,
}

/// What a namespace's labels say on behalf of its pods. A pod's own word counts more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NamespaceLabels {
    /// Its pods join the mesh.
    pub enabled: bool,
    /// Those that do refuse callers without an identity.
    pub strict: bool,
}

/// What becomes of a pod.
#[derive(Debug, PartialEq)]
pub enum Verdict {
    /// Nobody asked: it is created as it is.
    NotAsked,
    /// It is created as it is, and whoever creates it is told why.
    LeftAlone(String),
    /// It is not created, for the reason given.
    Denied(String),
    /// It joins the mesh.
    Injected(Box<Injection>),
}

/// A pod that joins the mesh.
#[derive(Debug, PartialEq)]
pub struct Injection {
    /// The pod as it will be.
    pub pod: Value,
    /// What leads there; empty when the pod is so already.
    pub patch: Patch,
    /// What whoever creates it should know.
    pub warnings: Vec<String>,
}

/// Nobody reads more than these at a time.
const PROBLEMS_TOLD: usize = 10;

/// Decides on one pod.
pub fn decide(settings: &Settings, candidate: Candidate<'_>) -> Verdict {
    match annotations::wish(candidate.pod) {
        Wish::No => return Verdict::NotAsked,
        Wish::Unsaid if !candidate.labels.enabled => return Verdict::NotAsked,
        Wish::Unclear(value) => {
            let name = annotations::INJECT;
            return Verdict::LeftAlone(format!(
                "not injected: annotation {name} is {}, expected \"true\" or \"false\"",
                quoted(value)
            ));
        }
        Wish::Yes | Wish::Unsaid => {}
    }
    if let Some(reason) = unfit(settings, candidate) {
        return Verdict::LeftAlone(format!("not injected: {reason}"));
    }
    match inject(settings, candidate) {
        Ok(injection) => Verdict::Injected(Box::new(injection)),
        Err(mut problems) => {
            problems.truncate(PROBLEMS_TOLD);
            Verdict::Denied(problems.join("; "))
        }
    }
}

/// Why a pod can have no proxy, although somebody asked for one.
fn unfit(settings: &Settings, candidate: Candidate<'_>) -> Option<String> {
    let pod = candidate.pod;
    if candidate.namespace == settings.mesh_namespace {
        return Some(format!(
            "namespace {} is the mesh's own",
            candidate.namespace
        ));
    }
    if pod.pointer("/spec/hostNetwork").and_then(Value::as_bool) == Some(true) {
        return Some(
            "the pod uses the host's network (hostNetwork), whose traffic the mesh leaves alone"
                .into(),
        );
    }
    if annotations::annotation(pod, "kubernetes.io/config.mirror").is_some() {
        return Some(
            "the pod is static: its kubelet reads it from a file, which no webhook can change"
                .into(),
        );
    }
    if pod.pointer("/spec/os/name").and_then(Value::as_str) == Some("windows") {
        return Some("the pod runs on Windows".into());
    }
    None
}

/// The pod with everything that the mesh adds, or every reason why that cannot be.
fn inject(settings: &Settings, candidate: Candidate<'_>) -> Result<Injection, Vec<String>> {
    let pod = candidate.pod;
    let parts = Parts::of(pod)?;
    let mut problems = conflicts(&parts);
    let mut options = Options::of(pod).unwrap_or_else(|wrong| {
        problems.extend(wrong);
        Options::default()
    });
    options.inbound = options
        .inbound
        .or(candidate.labels.strict.then_some(annotations::STRICT));
    let ports = Ports::clear_of(parts.declared_ports()).unwrap_or_else(|| {
        problems
            .push("the pod's containers declare every port that the proxy could listen on".into());
        Ports::USUAL
    });
    let mut probes = Vec::new();
    if options.inbound == Some(annotations::STRICT) {
        probes = probes::of(parts.own_containers(), &options).unwrap_or_else(|wrong| {
            problems.extend(wrong);
            Vec::new()
        });
    }
    if !problems.is_empty() {
        return Err(problems);
    }

    let mut injected = pod.clone();
    let ours = [
        containers::proxy_init(settings, ports, &options),
        containers::proxy(settings, ports, &options, &probes),
    ];
    set(
        &mut injected,
        "spec",
        "initContainers",
        Value::Array(parts.init_containers_with(ours)),
    );
    set(
        &mut injected,
        "spec",
        "volumes",
        Value::Array(parts.volumes_with(containers::token_volume())),
    );
    let mut marks = parts.annotations.cloned().unwrap_or_default();
    marks.insert(
        annotations::STATUS.into(),
        annotations::STATUS_INJECTED.into(),
    );
    set(
        &mut injected,
        "metadata",
        "annotations",
        Value::Object(marks),
    );

    let patch = operations(pod, &injected);
    let warnings = moved(ports).into_iter().collect();
    Ok(Injection {
        pod: injected,
        patch,
        warnings,
    })
}

fn moved(ports: Ports) -> Option<String> {
    let Ports {
        inbound,
        outbound,
        admin,
    } = ports;
    (ports != Ports::USUAL).then(|| {
        format!("a container declares a port that the proxy uses; it listens on {inbound} (inbound), {outbound} (outbound), {admin} (admin) instead")
    })
}

/// The parts of a pod that injection looks at, known to have the right shape.
struct Parts<'a> {
    annotations: Option<&'a Map<String, Value>>,
    init_containers: &'a [Value],
    containers: &'a [Value],
    ephemeral_containers: &'a [Value],
    volumes: &'a [Value],
    run_as_user: Option<i64>,
}

impl<'a> Parts<'a> {
    fn of(pod: &'a Value) -> Result<Self, Vec<String>> {
        let mut problems = Vec::new();
        for part in ["metadata", "spec"] {
            if !pod.get(part).is_some_and(Value::is_object) {
                problems.push(format!("the pod has no {part}"));
            }
        }
        let mut list = |path: &str| match pod.pointer(path) {
            None | Some(Value::Null) => &[],
            Some(Value::Array(items)) if items.iter().all(Value::is_object) => items.as_slice(),
            Some(_) => {
                problems.push(format!("the pod's {path} is not a list of objects"));
                &[][..]
            }
        };
        let init_containers = list("/spec/initContainers");
        let containers = list("/spec/containers");
        let ephemeral_containers = list("/spec/ephemeralContainers");
        let volumes = list("/spec/volumes");
        let annotations = match pod.pointer("/metadata/annotations") {
            None | Some(Value::Null) => None,
            Some(Value::Object(map)) => Some(map),
            Some(_) => {
                problems.push("the pod's /metadata/annotations is not a map".into());
                None
            }
        };
        let run_as_user = pod
            .pointer("/spec/securityContext/runAsUser")
            .and_then(Value::as_i64);
        if !problems.is_empty() {
            return Err(problems);
        }
        Ok(Self {
            annotations,
            init_containers,
            containers,
            ephemeral_containers,
            volumes,
            run_as_user,
        })
    }

    /// The containers that are not the mesh's.
    fn own_containers(&self) -> impl Iterator<Item = &'a Value> {
        let init = self
            .init_containers
            .iter()
            .filter(|container| !is_ours(container));
        init.chain(self.containers).chain(self.ephemeral_containers)
    }

    /// The TCP ports that the pod's own containers say they listen on.
    fn declared_ports(&self) -> impl Iterator<Item = u16> {
        let ports = self
            .own_containers()
            .filter_map(|container| container.get("ports")?.as_array())
            .flatten();
        let ports = ports.filter(|port| {
            port.get("protocol")
                .and_then(Value::as_str)
                .is_none_or(|protocol| protocol == "TCP")
        });
        ports.filter_map(|port| u16::try_from(port.get("containerPort")?.as_u64()?).ok())
    }

    /// Ours first, then the pod's own in their order. What others added to ours (defaults, a mount, a variable) stays.
    fn init_containers_with(&self, ours: [Value; 2]) -> Vec<Value> {
        let old = |new: &Value| {
            self.init_containers
                .iter()
                .find(|old| is_ours(old) && old.get("name") == new.get("name"))
        };
        let ours = ours
            .into_iter()
            .map(|new| old(&new).map_or_else(|| new.clone(), |old| updated(old, &new)));
        ours.chain(
            self.init_containers
                .iter()
                .filter(|container| !is_ours(container))
                .cloned(),
        )
        .collect()
    }

    fn volumes_with(&self, ours: Value) -> Vec<Value> {
        let mut volumes = self.volumes.to_vec();
        overlay_list(&mut volumes, &[ours], "name");
        volumes
    }
}

/// What the pod has that the mesh cannot live with.
fn conflicts(parts: &Parts<'_>) -> Vec<String> {
    let mut problems = Vec::new();
    for container in parts.own_containers() {
        let name = name_of(container);
        if name == PROXY || name == PROXY_INIT {
            problems.push(format!("the pod has a container of its own named {name:?}, which is the name of one of the mesh's: rename it"));
        }
        let user = container
            .pointer("/securityContext/runAsUser")
            .and_then(Value::as_i64)
            .or(parts.run_as_user);
        if user == Some(PROXY_UID) {
            problems.push(format!(
                "container {} runs as user {PROXY_UID}, which is the proxy's, so that its traffic would bypass the mesh: choose another user",
                quoted(name)
            ));
        }
    }
    if parts
        .volumes
        .iter()
        .any(|volume| name_of(volume) == TOKEN_VOLUME && volume.get("projected").is_none())
    {
        problems.push(format!("the pod has a volume of its own named {TOKEN_VOLUME:?}, which is the name of the mesh's: rename it"));
    }
    problems
}

/// Whether an init container is one that an injector put there, of this version or of an older one.
fn is_ours(container: &Value) -> bool {
    let list = |field| {
        container
            .get(field)
            .and_then(Value::as_array)
            .map(Vec::as_slice)
            .unwrap_or_default()
    };
    match name_of(container) {
        PROXY => list("env")
            .iter()
            .any(|variable| name_of(variable) == PROXY_MARK),
        PROXY_INIT => list("args")
            .iter()
            .filter_map(Value::as_str)
            .any(|arg| arg.starts_with(PROXY_INIT_MARK)),
        _ => false,
    }
}

/// The name of a container, a volume, a variable or a port.
pub(crate) fn name_of(object: &Value) -> &str {
    object
        .get("name")
        .and_then(Value::as_str)
        .unwrap_or_default()
}

/// An injected container brought to today's state. A command would give our arguments to another program, and credentials for
/// the Kubernetes API, which Kubernetes gives to all containers before a webhook's second look, would be there for nothing.
fn updated(old: &Value, new: &Value) -> Value {
    let mut container = old.clone();
    overlay(&mut container, new);
    if let Some(fields) = container.as_object_mut() {
        fields.remove("command");
        if let Some(mounts) = fields.get_mut("volumeMounts").and_then(Value::as_array_mut) {
            mounts.retain(|mount| {
                mount.get("mountPath").and_then(Value::as_str) != Some(containers::API_TOKEN_FOLDER)
            });
        }
    }
    container
}

/// Lays `ours` over `base`: maps field by field, lists of named things by name, all else replaced. Doing it again changes nothing.
fn overlay(base: &mut Value, ours: &Value) {
    match (base, ours) {
        (Value::Object(base), Value::Object(ours)) => {
            for (field, value) in ours {
                overlay(base.entry(field.clone()).or_insert(Value::Null), value);
            }
        }
        (Value::Array(base), Value::Array(ours)) if let Some(key) = key_of(ours) => {
            overlay_list(base, ours, key)
        }
        (base, ours) => *base = ours.clone(),
    }
}

/// Each of `ours` takes the place of the first item of its name, or the last place; further items of its name go.
fn overlay_list(base: &mut Vec<Value>, ours: &[Value], key: &str) {
    for item in ours {
        let mut seen = false;
        base.retain_mut(|other| {
            if other.get(key) != item.get(key) {
                return true;
            }
            other.clone_from(item);
            !std::mem::replace(&mut seen, true)
        });
        if !seen {
            base.push(item.clone());
        }
    }
}

/// What tells the items of a list apart, if anything does: Kubernetes merges its lists by the same fields.
fn key_of(items: &[Value]) -> Option<&'static str> {
    ["mountPath", "name"]
        .into_iter()
        .find(|key| items.iter().all(|item| item.get(key).is_some()))
}

fn set(pod: &mut Value, part: &str, field: &str, value: Value) {
    if let Some(part) = pod.get_mut(part).and_then(Value::as_object_mut) {
        part.insert(field.into(), value);
    }
}

/// The operations that lead from one pod to the other, valid also where lists and maps are missing.
fn operations(before: &Value, after: &Value) -> Patch {
    let mut patch = Vec::new();
    match (
        before.pointer("/metadata/annotations"),
        after.pointer("/metadata/annotations"),
    ) {
        (Some(Value::Object(old)), Some(Value::Object(new))) => {
            let changed = new
                .iter()
                .filter(|(name, value)| old.get(*name) != Some(value));
            patch
                .extend(changed.map(|(name, value)| add(["metadata", "annotations", name], value)));
        }
        (_, new) => patch.extend(new.map(|new| add(["metadata", "annotations"], new))),
    }
    for list in ["initContainers", "volumes"] {
        let items = |pod: &Value| {
            pod.get("spec")
                .and_then(|spec| spec.get(list))
                .and_then(Value::as_array)
                .cloned()
        };
        match (items(before), items(after)) {
            (Some(old), Some(new)) => list_operations(list, &old, &new, &mut patch),
            (_, new) => patch.extend(new.map(|new| add(["spec", list], &Value::Array(new)))),
        }
    }
    Patch(patch)
}

/// Takes out what is not in common from where the two lists begin to differ to where they are alike again, and puts the new in.
fn list_operations(list: &str, old: &[Value], new: &[Value], patch: &mut Vec<PatchOperation>) {
    let start = old
        .iter()
        .zip(new)
        .take_while(|(old, new)| old == new)
        .count();
    let (old, new) = (&old[start..], &new[start..]);
    let end = old
        .iter()
        .rev()
        .zip(new.iter().rev())
        .take_while(|(old, new)| old == new)
        .count();
    for _ in 0..old.len() - end {
        patch.push(PatchOperation::Remove(RemoveOperation {
            path: pointer(["spec", list, &start.to_string()]),
        }));
    }
    for (offset, item) in new[..new.len() - end].iter().enumerate() {
        patch.push(add(["spec", list, &(start + offset).to_string()], item));
    }
}

fn add<const N: usize>(path: [&str; N], value: &Value) -> PatchOperation {
    PatchOperation::Add(AddOperation {
        path: pointer(path),
        value: value.clone(),
    })
}

fn pointer<const N: usize>(path: [&str; N]) -> PointerBuf {
    PointerBuf::from_tokens(path)
}
