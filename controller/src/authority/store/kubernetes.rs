//! The authority's state in a Secret, the replicas' reports in a ConfigMap, both in the mesh's own
//! namespace.
//!
//! Writes are merge patches that name the version which they were made from, and none of anybody
//! else's fields.

use std::collections::BTreeMap;
use std::time::Duration;

use diy_mesh_runtime::error_chain;
use futures::{Stream, StreamExt};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::{Store, StoreError, Stored, Written};
use crate::authority::material::{FIELDS, Fields};

/// The Secret with the CA.
pub const SECRET: &str = "diy-service-mesh-ca";
/// The ConfigMap with the replicas' reports.
pub const REPORTS: &str = "diy-service-mesh-identity";
/// The annotation of the Secret that asks for something.
pub const REQUEST: &str = "diy-service-mesh.dev/rotate-root";
/// Who the API server writes down as the one who has written.
pub const MANAGER: &str = "diy-service-mesh-controller";
/// How long a request to the API may take.
const API_TIMEOUT: Duration = Duration::from_secs(10);

/// The store of a cluster.
pub struct Kubernetes {
    namespace: String,
    secrets: Api<Secret>,
    config_maps: Api<ConfigMap>,
}

impl Kubernetes {
    /// The store in the mesh's namespace.
    pub fn new(client: Client, namespace: &str) -> Kubernetes {
        let (secrets, config_maps) = (
            Api::namespaced(client.clone(), namespace),
            Api::namespaced(client, namespace),
        );
        Kubernetes {
            namespace: namespace.to_owned(),
            secrets,
            config_maps,
        }
    }
}

impl Store for Kubernetes {
    fn place(&self) -> String {
        format!("Secret {}/{SECRET}", self.namespace)
    }

    async fn read(&self) -> Result<Option<Stored>, StoreError> {
        let secret = api(
            format!("read {}", self.place()),
            self.secrets.get_opt(SECRET),
        )
        .await?;
        Ok(secret.map(|secret| {
            let data = secret.data.unwrap_or_default().into_iter();
            let request = secret
                .metadata
                .annotations
                .and_then(|mut all| all.remove(REQUEST));
            Stored {
                fields: data
                    .filter(|(name, _)| FIELDS.contains(&name.as_str()))
                    .map(|(name, value)| (name, value.0))
                    .collect(),
                request,
                version: secret.metadata.resource_version.unwrap_or_default(),
            }
        }))
    }

    async fn write(&self, fields: &Fields, before: Option<&Stored>) -> Result<Written, StoreError> {
        let what = format!("write {}", self.place());
        let written = match before {
            None => api_or_status(
                what.clone(),
                self.secrets.create(&PostParams::default(), &secret(fields)),
            )
            .await?
            .map(|_| ()),
            Some(before) => {
                let patch = Patch::Merge(difference(fields, before));
                api_or_status(what.clone(), self.secrets.patch(SECRET, &params(), &patch))
                    .await?
                    .map(|_| ())
            }
        };
        match written {
            Ok(()) => Ok(Written::Done),
            // It exists already, it has changed, or it was deleted.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(Written::Raced),
            Err(error) => Err(StoreError::Api(what, Box::new(error))),
        }
    }

    fn changes(&self) -> impl Stream<Item = ()> + Send {
        watcher::watch_object(self.secrets.clone(), SECRET)
            .default_backoff()
            .map(|event| {
                if let Err(error) = event {
                    tracing::warn!(
                        "the watch of {SECRET} was interrupted: {}",
                        error_chain(&error)
                    );
                }
            })
    }

    async fn reports(&self) -> Result<BTreeMap<String, String>, StoreError> {
        let reports = api(
            format!("read ConfigMap {REPORTS}"),
            self.config_maps.get_opt(REPORTS),
        )
        .await?;
        Ok(reports.and_then(|reports| reports.data).unwrap_or_default())
    }

    async fn report(&self, name: &str, report: Option<&str>) -> Result<(), StoreError> {
        let what = format!("write ConfigMap {REPORTS}");
        let patch = Patch::Merge(json!({"data": {name: report}}));
        let patched = api_or_status(
            what.clone(),
            self.config_maps.patch(REPORTS, &params(), &patch),
        )
        .await?;
        match (patched, report) {
            (Ok(_), _) | (Err(kube::Error::Api(_)), None) => Ok(()),
            (Err(kube::Error::Api(status)), Some(report)) if status.code == 404 => {
                let data = Some(BTreeMap::from([(name.to_owned(), report.to_owned())]));
                let reports = ConfigMap {
                    metadata: metadata(REPORTS),
                    data,
                    ..ConfigMap::default()
                };
                match api_or_status(
                    what.clone(),
                    self.config_maps.create(&PostParams::default(), &reports),
                )
                .await?
                {
                    Ok(_) => Ok(()),
                    // Another replica has made it at this moment: the next report finds it.
                    Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
                    Err(error) => Err(StoreError::Api(what, Box::new(error))),
                }
            }
            (Err(error), _) => Err(StoreError::Api(what, Box::new(error))),
        }
    }
}

fn params() -> PatchParams {
    PatchParams {
        field_manager: Some(MANAGER.into()),
        ..PatchParams::default()
    }
}

fn metadata(name: &str) -> ObjectMeta {
    let labels = BTreeMap::from([(
        "app.kubernetes.io/part-of".into(),
        "diy-service-mesh".into(),
    )]);
    ObjectMeta {
        name: Some(name.into()),
        labels: Some(labels),
        ..ObjectMeta::default()
    }
}

fn secret(fields: &Fields) -> Secret {
    let data = fields
        .iter()
        .map(|(name, value)| (name.clone(), ByteString(value.clone())))
        .collect();
    Secret {
        metadata: metadata(SECRET),
        type_: Some("kubernetes.io/tls".into()),
        data: Some(data),
        ..Secret::default()
    }
}

/// A patch from what was read to these fields. It names the version that was read, so that it
/// applies to nothing else.
fn difference(fields: &Fields, before: &Stored) -> Value {
    let mut data = serde_json::Map::new();
    for name in FIELDS {
        match (fields.get(name), before.fields.get(name)) {
            (Some(new), old) if Some(new) != old => {
                data.insert(name.to_owned(), json!(ByteString(new.clone())))
            }
            (None, Some(_)) => data.insert(name.to_owned(), Value::Null),
            _ => None,
        };
    }
    json!({"metadata": {"resourceVersion": before.version, "annotations": {REQUEST: null}}, "data": data})
}

/// A request to the API that ends, and whose failure says what was tried.
async fn api<T>(
    what: String,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, StoreError> {
    api_or_status(what.clone(), request)
        .await?
        .map_err(|error| StoreError::Api(what, Box::new(error)))
}

/// The same, where an answer of the API may mean something.
async fn api_or_status<T>(
    what: String,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<kube::Result<T>, StoreError> {
    timeout(API_TIMEOUT, request)
        .await
        .map_err(|_| StoreError::Silent(what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_names_its_version_removes_what_is_over_and_touches_nothing_else() {
        let field = |name: &str, value: &str| (name.to_owned(), value.as_bytes().to_vec());
        let before = Stored {
            fields: [
                field("tls.crt", "old"),
                field("tls.key", "key"),
                field("next.crt", "new"),
            ]
            .into(),
            request: None,
            version: "7".into(),
        };
        let after = [field("tls.crt", "new"), field("tls.key", "key")].into();
        let expected = json!({
            "metadata": {"resourceVersion": "7", "annotations": {"diy-service-mesh.dev/rotate-root": null}},
            "data": {"tls.crt": "bmV3", "next.crt": null},
        });
        assert_eq!(difference(&after, &before), expected);
    }
}
