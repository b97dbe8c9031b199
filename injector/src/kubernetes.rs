//! Reconciliation of the certificates with Kubernetes: a Secret that all replicas share, and the
//! `caBundle` of the webhook configuration.
//!
//! Level-triggered: every change of either object, and every minute, both are read and corrected.
//! The injector does not write other objects or other fields of the webhook configuration.
//!
//! The API server is the only client of the webhook, so its clock alone judges the certificates: the
//! `Date` of its responses.
//!
//! Replicas may write at the same time. The API server accepts one write; the other replica then
//! reads the result. A deleted Secret is written again from memory, so that clients notice no
//! change.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::pin;
use std::time::{Duration, SystemTime};

use diy_mesh_control_plane::clock;
use diy_mesh_runtime::{Backoff, error_chain};
use futures::StreamExt;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};

use crate::certificate::{FIELDS, KeyMaterial, Names};
use crate::config::Settings;
use crate::publish::{Error, Publisher};
use crate::version::{MIN_VERSION, is_below};

/// The Secret with the certificates of the webhook.
pub const SECRET: &str = "diy-service-mesh-injector-tls";
const FIELD_MANAGER: &str = "diy-service-mesh-injector";
/// Interval at which both objects are read without an event. Bounds the delay of renewals and of
/// missed events.
const RESYNC_INTERVAL: Duration = Duration::from_secs(60);
const API_TIMEOUT: Duration = Duration::from_secs(10);
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(250);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// A client of the cluster.
pub async fn client() -> Result<Client, Error> {
    Client::try_default()
        .await
        .map_err(|error| Error::Client(Box::new(error)))
}

/// Fills in empty images with the images of the init containers of the injector's pod. There,
/// unlike in variables, kustomize and other tools find and replace them.
pub async fn read_images(settings: &mut Settings, pod: &str) -> Result<(), Error> {
    let pods: Api<Pod> = Api::namespaced(client().await?, &settings.mesh_namespace);
    let pod = api(&format!("read pod {pod}"), pods.get(pod)).await?;
    let containers = pod.spec.and_then(|spec| spec.init_containers);
    let containers = containers.unwrap_or_default();
    for (container, image) in [
        ("proxy-image", &mut settings.proxy_image),
        ("proxy-init-image", &mut settings.proxy_init_image),
    ] {
        if image.is_empty() {
            let mut containers = containers.iter();
            let found = containers.find(|other| other.name == container);
            let found = found.and_then(|container| container.image.clone());
            *image = found.ok_or_else(|| Error::NoImage(container.into()))?;
        }
    }
    tracing::info!(
        proxy = settings.proxy_image,
        init = settings.proxy_init_image,
        "images of new pods"
    );
    Ok(())
}

/// Reconciles both objects forever. Returns an error only if a retry cannot succeed.
pub async fn run(
    client: Client,
    publisher: &Publisher,
    names: &Names,
    namespace: &str,
    webhook_configuration: &str,
) -> Result<Infallible, Error> {
    let mut reconciler = Reconciler {
        secrets: Api::namespaced(client.clone(), namespace),
        configurations: Api::all(client.clone()),
        client,
        configuration_name: webhook_configuration,
        publisher,
        names,
        current: None,
    };
    let secret_events = watcher::watch_object(reconciler.secrets.clone(), SECRET)
        .default_backoff()
        .map(|event| log_watch_error(SECRET, event.err()));
    let configuration_events =
        watcher::watch_object(reconciler.configurations.clone(), webhook_configuration)
            .default_backoff()
            .map(|event| log_watch_error(webhook_configuration, event.err()));
    let mut events = pin!(futures::stream::select(secret_events, configuration_events));
    loop {
        reconciler.reconcile_with_retries().await?;
        let _ = timeout(RESYNC_INTERVAL, events.next()).await;
    }
}

struct Reconciler<'a> {
    client: Client,
    secrets: Api<Secret>,
    configurations: Api<MutatingWebhookConfiguration>,
    configuration_name: &'a str,
    publisher: &'a Publisher,
    names: &'a Names,
    /// The content of the Secret after the last reconciliation.
    current: Option<KeyMaterial>,
}

impl Reconciler<'_> {
    async fn reconcile_with_retries(&mut self) -> Result<(), Error> {
        let mut backoff = Backoff::new(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL);
        loop {
            match self.reconcile().await {
                Ok(()) => return Ok(()),
                Err(error @ Error::UnsupportedVersion(_)) => return Err(error),
                Err(error @ Error::Conflict(_)) => tracing::info!(%error, "retrying"),
                Err(error) => {
                    let error = error_chain(&error);
                    tracing::error!(
                        error,
                        "cannot reconcile the certificates and the caBundle; retrying"
                    );
                    self.publisher.health.not_ready_yet(error);
                }
            }
            sleep(backoff.next_delay()).await;
        }
    }

    /// Writes the Secret before the `caBundle`: a client with the new bundle finds the new
    /// certificate.
    async fn reconcile(&mut self) -> Result<(), Error> {
        if self.current.is_none() {
            self.check_version().await?;
        }
        let now = self.now().await?;
        let material = self.reconcile_secret(now).await?;
        self.publisher.publish(&material)?;
        let health = &self.publisher.health;
        if self.reconcile_ca_bundle(&material.bundle()).await? {
            let left = material.serving_not_after().duration_since(now);
            health.ready_until(Instant::now() + left.unwrap_or_default());
        } else {
            let name = self.configuration_name;
            let reason = format!("MutatingWebhookConfiguration {name} does not exist");
            tracing::warn!(reason, "not ready");
            health.not_ready(reason);
        }
        self.current = Some(material);
        Ok(())
    }

    /// Fails on API servers without native sidecars: they drop `restartPolicy`, and pods never
    /// start.
    async fn check_version(&self) -> Result<(), Error> {
        let version = self.client.apiserver_version();
        let version = api("read the Kubernetes version", version).await?;
        if is_below(&format!("{}.{}", version.major, version.minor), MIN_VERSION) {
            return Err(Error::UnsupportedVersion(version.git_version));
        }
        Ok(())
    }

    /// The time of the API server. The own one if its responses have none.
    async fn now(&self) -> Result<SystemTime, Error> {
        let date = clock::date(&self.client);
        let date = api("read the time of the API server", date).await?;
        Ok(date.unwrap_or_else(SystemTime::now))
    }

    /// Creates the Secret, or replaces it if it is invalid or a renewal is due. Returns its
    /// content.
    async fn reconcile_secret(&self, now: SystemTime) -> Result<KeyMaterial, Error> {
        let params = PostParams::default();
        let read = self.secrets.get_opt(SECRET);
        let Some(stored) = api(&format!("read Secret {SECRET}"), read).await? else {
            tracing::info!("creating Secret {SECRET}");
            let material = self.current_or_generated(now)?;
            let secret = secret_with(new_secret(), &material);
            let create = self.secrets.create(&params, &secret);
            api(&format!("create Secret {SECRET}"), create).await?;
            return Ok(material);
        };
        let data = stored.data.as_ref();
        let material = match KeyMaterial::from_fields(|name| Some(data?.get(name)?.0.as_slice())) {
            Ok(material) => match material.renewed(self.names, now)? {
                Some(renewed) => {
                    tracing::info!("renewing certificates in Secret {SECRET}");
                    renewed
                }
                None => return Ok(material),
            },
            Err(error) => {
                tracing::error!(%error, "invalid Secret {SECRET}; replacing its content");
                self.current_or_generated(now)?
            }
        };
        // The API server rejects the replacement if the Secret has changed since it was read.
        let secret = secret_with(stored, &material);
        let replace = self.secrets.replace(SECRET, &params, &secret);
        api(&format!("replace Secret {SECRET}"), replace).await?;
        Ok(material)
    }

    /// The certificates in use, renewed if due, or new ones at the first start.
    fn current_or_generated(&self, now: SystemTime) -> Result<KeyMaterial, Error> {
        let Some(current) = &self.current else {
            return Ok(KeyMaterial::generate(self.names, now)?);
        };
        let renewed = current.renewed(self.names, now)?;
        Ok(renewed.unwrap_or_else(|| current.clone()))
    }

    /// Corrects the `caBundle` of every webhook. Returns false if the webhook configuration does
    /// not exist.
    async fn reconcile_ca_bundle(&self, bundle: &str) -> Result<bool, Error> {
        let name = self.configuration_name;
        let read = self.configurations.get_opt(name);
        let action = format!("read MutatingWebhookConfiguration {name}");
        let Some(configuration) = api(&action, read).await? else {
            return Ok(false);
        };
        let Some(patch) = ca_bundle_patch(&configuration, bundle) else {
            return Ok(true);
        };
        let params = PatchParams {
            field_manager: Some(FIELD_MANAGER.into()),
            ..PatchParams::default()
        };
        let patch = Patch::Strategic(patch);
        let patched = self.configurations.patch(name, &params, &patch);
        let action = format!("patch the caBundle of MutatingWebhookConfiguration {name}");
        api(&action, patched).await?;
        self.publisher.metrics.repairs.inc();
        tracing::info!("caBundle of MutatingWebhookConfiguration {name} corrected");
        Ok(true)
    }
}

/// A strategic merge patch for the webhooks whose `caBundle` differs from `bundle`, or `None` if
/// all match.
///
/// The patch contains the resource version, so that the API server rejects it if the configuration
/// has changed. `caBundle` is its only field, so that the injector owns only this field.
fn ca_bundle_patch(
    configuration: &MutatingWebhookConfiguration,
    bundle: &str,
) -> Option<serde_json::Value> {
    let bundle = ByteString(bundle.as_bytes().to_vec());
    let webhooks = configuration.webhooks.iter().flatten();
    let outdated: Vec<_> = webhooks
        .filter(|webhook| webhook.client_config.ca_bundle.as_ref() != Some(&bundle))
        .map(|webhook| json!({"name": webhook.name, "clientConfig": {"caBundle": &bundle}}))
        .collect();
    let version = &configuration.metadata.resource_version;
    (!outdated.is_empty())
        .then(|| json!({"metadata": {"resourceVersion": version}, "webhooks": outdated}))
}

fn new_secret() -> Secret {
    let labels = [(
        "app.kubernetes.io/part-of".into(),
        "diy-service-mesh".into(),
    )];
    Secret {
        metadata: ObjectMeta {
            name: Some(SECRET.into()),
            labels: Some(BTreeMap::from(labels)),
            ..ObjectMeta::default()
        },
        type_: Some("kubernetes.io/tls".into()),
        ..Secret::default()
    }
}

/// The Secret with its certificate fields replaced. Fields of other writers stay.
fn secret_with(mut secret: Secret, material: &KeyMaterial) -> Secret {
    let fields = material.to_fields().into_iter();
    let data = secret.data.get_or_insert_default();
    data.retain(|name, _| !FIELDS.contains(&name.as_str()));
    data.extend(fields.map(|(name, value)| (name.to_owned(), ByteString(value))));
    secret
}

/// Sends a request with a timeout. `action` completes the sentence "cannot ...".
async fn api<T>(action: &str, request: impl Future<Output = kube::Result<T>>) -> Result<T, Error> {
    match timeout(API_TIMEOUT, request).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(kube::Error::Api(status))) if status.code == 409 => {
            Err(Error::Conflict(action.into()))
        }
        Ok(Err(error)) => Err(Error::Api(action.into(), Box::new(error))),
        Err(_) => Err(Error::Timeout(action.into(), API_TIMEOUT.as_secs())),
    }
}

/// Logs the interruption of a watch, which restarts by itself.
fn log_watch_error(name: &str, error: Option<watcher::Error>) {
    if let Some(error) = error {
        tracing::warn!(error = error_chain(&error), name, "watch interrupted");
    }
}

#[cfg(test)]
mod tests;
