//! The CustomResourceDefinitions of the custom kinds: which version of a kind is installed, and
//! which of its optional fields. The objects of the kind are watched in that version, as soon as
//! and as long as it is installed.
//!
//! Each kind has a watch of its own definition only, by name: the manifests permit no others. A
//! definition that was never read, for example without this permission, tells nothing: the versions
//! of its kind are then requested in turn until one is found.

use std::collections::BTreeMap;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1 as apiextensions;
use kube::api::ListParams;
use kube::core::{ApiResource, DynamicObject};
use kube::{Api, Client};
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::watch::{self, Receiver, Sender};

use super::convert::ConvertError;
use super::objects::{Context, Objects};
use super::resources::{parse, resource, resources};
use super::watch::{Sink, Target, Update, watch};
use crate::api::{API_TIMEOUT, ApiError, request};
use crate::object::Kind;

/// The optional fields of a kind that its definition lacks in the version that the mesh reads.
pub fn lacking_fields(kind: Kind, definition: &Value) -> Vec<&'static str> {
    let spec = Spec::of(definition);
    match spec.version(kind) {
        Some((_, version)) => version.lacking(kind),
        None => kind.row().optional_fields.to_vec(),
    }
}

/// Why the mesh does not read an installed kind, if its definition serves no version that it knows.
pub fn unsupported(kind: Kind, definition: &Value) -> Option<String> {
    let spec = Spec::of(definition);
    match spec.version(kind) {
        Some(_) => None,
        None => Some(Installed::Unsupported(spec.served_names()).describe(kind)),
    }
}

/// Whether the definition of a kind exists, and is not being deleted. Reads it now: its watch may be
/// late.
pub(super) async fn is_kept(client: &Client, kind: Kind) -> Result<bool, ApiError> {
    let definitions = Api::<DynamicObject>::all_with(client.clone(), &definitions());
    let named = ListParams::default().fields(&selector(kind));
    let listed = request(API_TIMEOUT, definitions.list_metadata(&named)).await?;
    let mut listed = listed.items.iter();
    Ok(listed.any(|one| one.metadata.deletion_timestamp.is_none()))
}

/// The resource of definitions.
fn definitions() -> ApiResource {
    ApiResource::erase::<apiextensions::CustomResourceDefinition>(&())
}

/// Selects the definition of a kind.
fn selector(kind: Kind) -> String {
    let ApiResource { plural, group, .. } = resource(kind);
    format!("metadata.name={plural}.{group}")
}

/// Sends all objects of a custom kind, then changes, whenever the kind is installed. Never ends.
pub(super) async fn watch_custom(client: &Client, kind: Kind, context: Context<'_>) {
    let ApiResource { plural, group, .. } = resource(kind);
    let name = format!("{plural}.{group}");
    let (definitions, selector) = (definitions(), selector(kind));
    let target = Target {
        name: format!("{} {name}", definitions.kind),
        client: client.clone(),
        resources: vec![definitions.clone()],
        pages: context.pages,
        fields: Some(&selector),
        page_size: 1,
        permission: format!(
            "{} of {} with the name {name}",
            definitions.plural, definitions.group
        ),
    };
    let (versions, known) = watch::channel(None);
    let mut definition = DefinitionSink {
        kind,
        installed: None,
        versions,
    };
    tokio::join!(
        watch(target, &mut definition, context.timing),
        follow(client, kind, known, context)
    );
}

/// The versions of a kind to request, in this order. An empty list: the kind is not installed.
/// `None`: its definition was not requested yet.
type Versions = Option<Vec<ApiResource>>;

/// Watches the objects in the known versions. Never ends.
async fn follow(client: &Client, kind: Kind, mut known: Receiver<Versions>, context: Context<'_>) {
    let mut objects = Objects::new(kind, client, context);
    loop {
        let versions = known.borrow_and_update().clone();
        let until_they_change = async {
            match versions.as_deref() {
                None => {}
                Some([]) => objects.remove().await,
                Some(versions) => objects.watch(versions.to_vec(), None).await,
            }
            std::future::pending().await
        };
        tokio::select! {
            () = until_they_change => {}
            changed = known.changed() => if changed.is_err() { return },
        }
    }
}

/// Receives the definition of a kind, and decides on the versions to request.
struct DefinitionSink {
    kind: Kind,
    /// The state that was logged last.
    installed: Option<Installed>,
    versions: Sender<Versions>,
}

impl Sink for DefinitionSink {
    type Item = Installed;
    const IGNORES_INVALID: bool = false;

    fn convert(&self, json: &str) -> Result<Installed, ConvertError> {
        Ok(Installed::of(self.kind, &parse(json)?))
    }

    fn confirm(&mut self, _: usize) {}

    async fn send(&mut self, update: Update<Installed>, _: Option<u64>) {
        let installed = match update {
            Update::Reset(mut listed) => listed.pop(),
            Update::Apply(installed) => Some(installed),
            Update::Delete(_) => None,
            Update::Bookmark => return,
        };
        let installed = installed.unwrap_or(Installed::No);
        if self.installed.as_ref() == Some(&installed) {
            return;
        }
        let text = installed.describe(self.kind);
        match installed {
            Installed::Unsupported(_) => tracing::warn!("{text}"),
            _ => tracing::info!("{text}"),
        }
        self.versions.send_if_modified(|versions| {
            let now = Some(installed.versions());
            std::mem::replace(versions, now.clone()) != now
        });
        self.installed = Some(installed);
    }

    fn failed(&mut self, _: String) {
        self.versions.send_if_modified(|versions| {
            let is_unknown = versions.is_none();
            versions.get_or_insert_with(|| resources(self.kind));
            is_unknown
        });
    }
}

/// Whether a kind is installed.
#[derive(Clone, Debug, PartialEq)]
enum Installed {
    /// No definition.
    No,
    /// The API server does not serve the kind yet.
    NotEstablished,
    /// The definition has no version that the mesh reads. These are served.
    Unsupported(Vec<String>),
    /// In this version, without these optional fields.
    Yes(ApiResource, Vec<&'static str>),
}

impl Installed {
    fn of(kind: Kind, definition: &Definition) -> Installed {
        let conditions = definition.status.iter().flat_map(|one| &one.conditions);
        let mut conditions = conditions.flatten();
        if !conditions.any(|one| one.kind == "Established" && one.status == "True") {
            return Installed::NotEstablished;
        }
        match definition.spec.version(kind) {
            Some((resource, version)) => Installed::Yes(resource, version.lacking(kind)),
            None => Installed::Unsupported(definition.spec.served_names()),
        }
    }

    /// The versions to request.
    fn versions(&self) -> Vec<ApiResource> {
        match self {
            Installed::Yes(resource, _) => vec![resource.clone()],
            _ => Vec::new(),
        }
    }

    /// For the log.
    fn describe(&self, kind: Kind) -> String {
        match self {
            Installed::No => format!("{kind} is not installed"),
            Installed::NotEstablished => {
                format!("{kind} is not installed: its definition is not established yet")
            }
            Installed::Unsupported(served) => {
                let expected = resources(kind).into_iter();
                let expected = expected.map(|resource| resource.version);
                format!(
                    "{kind} is not used: its definition serves {served:?}, expected one of {:?}",
                    Vec::from_iter(expected)
                )
            }
            Installed::Yes(resource, lacking) if lacking.is_empty() => {
                format!("{kind} {} is installed", resource.version)
            }
            Installed::Yes(resource, lacking) => format!(
                "{kind} {} is installed, without {}: TrafficPolicies have these fields",
                resource.version,
                lacking.join(" and ")
            ),
        }
    }
}

/// A CustomResourceDefinition without its largest part: its schemas have up to several hundred
/// kilobytes.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Definition {
    spec: Spec,
    status: Option<Status>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Spec {
    versions: Vec<Version>,
}

impl Spec {
    /// The spec of a definition.
    fn of(definition: &Value) -> Spec {
        serde_json::from_str(&definition["spec"].to_string()).unwrap_or_default()
    }

    /// The version that the mesh reads.
    fn version(&self, kind: Kind) -> Option<(ApiResource, &Version)> {
        resources(kind).into_iter().find_map(|resource| {
            let version = self.served().find(|one| one.name == resource.version)?;
            Some((resource, version))
        })
    }

    fn served_names(&self) -> Vec<String> {
        self.served().map(|version| version.name.clone()).collect()
    }

    fn served(&self) -> impl Iterator<Item = &Version> {
        self.versions.iter().filter(|version| version.served)
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Version {
    name: String,
    served: bool,
    schema: BTreeMap<String, Schema>,
}

impl Version {
    fn lacking(&self, kind: Kind) -> Vec<&'static str> {
        let root = self.schema.get("openAPIV3Schema");
        let rules = root.and_then(|root| root.properties.get("spec")?.properties.get("rules"));
        let rule = rules.and_then(|rules| rules.items.as_deref());
        let has = |field: &str| rule.is_some_and(|rule| rule.properties.contains_key(field));
        let optional = kind.row().optional_fields.iter().copied();
        optional.filter(|field| !has(field)).collect()
    }
}

/// The names of the fields of an object, and of the entries of a list.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Schema {
    properties: BTreeMap<String, Schema>,
    items: Option<Box<Schema>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    /// Null at first.
    conditions: Option<Vec<Condition>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Condition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
}

#[cfg(test)]
mod tests;
