//! The state of the authority in a Secret, and the report of each replica in a Lease, all in the
//! namespace of the mesh.
//!
//! Writes of the state are merge patches of the mesh's own fields with the resource version that they are based
//! on.

use std::collections::BTreeMap;
use std::time::SystemTime;

use diy_mesh_control_plane::clock;
use diy_mesh_runtime::error_chain;
use futures::{Stream, StreamExt};
use k8s_openapi::ByteString;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use serde_json::{Value, json};

use super::{Store, StoreError, Stored, Written};
use crate::api::{self, API_TIMEOUT};
use crate::authority::publish::config_maps::{CONFIG_MAP, LABEL};
use crate::authority::state::{FIELDS, Fields};

/// The Secret with the CA.
pub const SECRET: &str = "diy-service-mesh-ca";
/// The annotation of a Lease with the report of its holder.
pub const REPORT: &str = "diy-service-mesh.dev/report";
/// The annotation of the Secret with the request.
pub const REQUEST: &str = "diy-service-mesh.dev/rotate-root";
/// The field manager of all writes.
pub const FIELD_MANAGER: &str = "diy-service-mesh-controller";

/// The store in a cluster.
pub struct Kubernetes {
    client: Client,
    namespace: String,
    secrets: Api<Secret>,
    leases: Api<Lease>,
    /// The ConfigMaps of all namespaces.
    published: Api<ConfigMap>,
}

impl Kubernetes {
    /// The store in this namespace.
    pub fn new(client: Client, namespace: &str) -> Kubernetes {
        Kubernetes {
            namespace: namespace.to_owned(),
            secrets: Api::namespaced(client.clone(), namespace),
            leases: Api::namespaced(client.clone(), namespace),
            published: Api::all(client.clone()),
            client,
        }
    }
}

impl Store for Kubernetes {
    fn place(&self) -> String {
        format!("Secret {}/{SECRET}", self.namespace)
    }

    async fn read(&self) -> Result<Option<Stored>, StoreError> {
        let action = format!("read {}", self.place());
        let secret = request(&action, &[], self.secrets.get_opt(SECRET)).await?;
        let Some(Secret { metadata, data, .. }) = secret.flatten() else {
            return Ok(None);
        };
        let fields = data.unwrap_or_default().into_iter();
        let fields = fields.filter(|(name, _)| FIELDS.contains(&name.as_str()));
        let annotations = metadata.annotations;
        Ok(Some(Stored {
            fields: fields.map(|(name, value)| (name, value.0)).collect(),
            request: annotations.and_then(|mut annotations| annotations.remove(REQUEST)),
            version: metadata.resource_version.unwrap_or_default(),
        }))
    }

    async fn date(&self) -> Option<SystemTime> {
        let date = clock::date(&self.client).await;
        let failed = |error| tracing::warn!("cannot read the time of the API server: {error}");
        date.map_err(failed).ok().flatten()
    }

    async fn traces(&self) -> Result<Vec<String>, StoreError> {
        let action = format!("list ConfigMaps {CONFIG_MAP}");
        let published = ListParams::default()
            .fields(&format!("metadata.name={CONFIG_MAP}"))
            .labels(&format!("{LABEL}={}", self.namespace));
        let published = request(&action, &[403], self.published.list(&published)).await?;
        let namespaces = published.into_iter().flatten();
        let namespaces = namespaces.filter_map(|map| map.metadata.namespace);
        let reports = self.reports().await?.into_keys();
        Ok(namespaces
            .map(|namespace| format!("ConfigMap {CONFIG_MAP} in namespace {namespace}"))
            .chain(reports.map(|name| format!("the report of replica {name}")))
            .collect())
    }

    async fn write(&self, fields: &Fields, before: Option<&Stored>) -> Result<Written, StoreError> {
        let action = format!("write {}", self.place());
        // The Secret exists already, has changed, or was deleted.
        let conflicts = [404, 409];
        let written = match before {
            None => {
                let (params, secret) = (PostParams::default(), secret(fields));
                request(&action, &conflicts, self.secrets.create(&params, &secret)).await?
            }
            Some(before) => {
                let patch = Patch::Merge(patch(fields, before));
                let params = PatchParams {
                    field_manager: Some(FIELD_MANAGER.into()),
                    ..PatchParams::default()
                };
                let write = self.secrets.patch(SECRET, &params, &patch);
                request(&action, &conflicts, write).await?
            }
        };
        Ok(written.map_or(Written::Conflict, |_| Written::Done))
    }

    fn changes(&self) -> impl Stream<Item = ()> + Send {
        watcher::watch_object(self.secrets.clone(), SECRET)
            .default_backoff()
            .map(|event| {
                if let Err(error) = event {
                    let error = error_chain(&error);
                    tracing::warn!("cannot watch Secret {SECRET}, retrying: {error}");
                }
            })
    }

    async fn reports(&self) -> Result<BTreeMap<String, String>, StoreError> {
        let action = format!("list Leases of {}", self.namespace);
        let params = ListParams::default().labels(&format!("{LABEL}={}", self.namespace));
        let leases = request(&action, &[], self.leases.list(&params)).await?;
        let report = |lease: Lease| {
            let report = lease.metadata.annotations?.remove(REPORT)?;
            Some((lease.spec?.holder_identity?, report))
        };
        Ok(leases.into_iter().flatten().filter_map(report).collect())
    }

    async fn report(&self, replica: &str, report: Option<&str>) -> Result<(), StoreError> {
        let name = lease_name(replica);
        let Some(report) = report else {
            let action = format!("delete Lease {name}");
            let params = DeleteParams::default();
            request(&action, &[404], self.leases.delete(&name, &params)).await?;
            return Ok(());
        };
        let action = format!("write Lease {name}");
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {
                "name": name,
                "labels": {"app.kubernetes.io/part-of": "diy-service-mesh", LABEL: self.namespace},
                "annotations": {REPORT: report},
            },
            "spec": {"holderIdentity": replica},
        });
        let (params, patch) = (
            PatchParams::apply(FIELD_MANAGER).force(),
            Patch::Apply(lease),
        );
        request(&action, &[], self.leases.patch(&name, &params, &patch)).await?;
        Ok(())
    }
}

/// The name of the Lease of a replica.
fn lease_name(replica: &str) -> String {
    format!("diy-service-mesh-replica-{}", replica.to_lowercase())
}

fn secret(fields: &Fields) -> Secret {
    let data = fields.iter();
    let data = data.map(|(name, value)| (name.clone(), ByteString(value.clone())));
    Secret {
        metadata: api::metadata(SECRET),
        type_: Some("kubernetes.io/tls".into()),
        data: Some(data.collect()),
        ..Secret::default()
    }
}

/// The merge patch from `before` to these fields.
fn patch(fields: &Fields, before: &Stored) -> Value {
    let mut data = serde_json::Map::new();
    for name in FIELDS {
        let (new, old) = (fields.get(name), before.fields.get(name));
        if new != old {
            let value = new.map(|new| ByteString(new.clone()));
            data.insert(name.to_owned(), json!(value));
        }
    }
    json!({"metadata": {"resourceVersion": before.version, "annotations": {REQUEST: null}}, "data": data})
}

/// Sends a request to the API, with a timeout. `None`: the API returned one of the `expected`
/// status codes.
async fn request<T>(
    action: &str,
    expected: &[u16],
    request: impl Future<Output = kube::Result<T>>,
) -> Result<Option<T>, StoreError> {
    match api::request(API_TIMEOUT, request).await {
        Ok(response) => Ok(Some(response)),
        Err(error) if expected.iter().any(|code| error.is(*code)) => Ok(None),
        Err(error) => Err(StoreError::Api(action.to_owned(), Box::new(error))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patch_names_its_version_and_changed_fields() {
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
        assert_eq!(patch(&after, &before), expected);
    }
}
