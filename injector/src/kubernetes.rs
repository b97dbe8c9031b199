//! Keeps the certificates in a Secret that all replicas share, and the caBundle of the webhook configuration right.
//!
//! Level-triggered: whatever happens to either object, and every minute without a reason, both are read and put right. It
//! touches no other object, and of the webhook configuration nothing but caBundle.
//!
//! Two replicas may do the same at the same time: the API server lets one create or replace the Secret, the other then reads what
//! the first has written. A Secret that somebody deletes is written again from memory, so that callers notice nothing.

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::{Duration, SystemTime};

use futures::StreamExt;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use crate::certificate::{FIELDS, Material, Names};
use crate::keeper::{Error, Keeper};
use crate::server::stopped;

/// The Secret with the webhook's certificates.
pub const SECRET: &str = "diy-service-mesh-injector-tls";
/// Who the API server writes down as the one who set caBundle.
const MANAGER: &str = "diy-service-mesh-injector";
/// Both objects are read this often, should a watch have missed something; certificates that are due are renewed then.
const INTERVAL: Duration = Duration::from_secs(60);
/// How long a request to the API may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often a lost race is run again before the loss counts as an error.
const ATTEMPTS: usize = 5;
/// The first API server on whose nodes native sidecars are on by default.
const OLDEST: (u32, u32) = (1, 29);

/// Keeps both right until told to stop. Ends with an error only where trying again cannot help.
pub async fn keep(
    keeper: &Keeper,
    names: &Names,
    namespace: &str,
    webhook_configuration: &str,
    mut stop: watch::Receiver<bool>,
) -> Result<(), Error> {
    let client = Client::try_default()
        .await
        .map_err(|error| Error::Client(Box::new(error)))?;
    let mut shared = Shared::new(client, keeper, names, namespace, webhook_configuration);
    tokio::select! {
        () = stopped(&mut stop) => Ok(()),
        error = shared.run() => Err(error),
    }
}

/// The two objects, and what is known of them.
struct Shared<'a> {
    client: Client,
    secrets: Api<Secret>,
    configurations: Api<MutatingWebhookConfiguration>,
    /// The webhook configuration's name.
    name: &'a str,
    keeper: &'a Keeper,
    names: &'a Names,
    /// What was in the Secret the last time it was read.
    known: Option<Material>,
}

impl<'a> Shared<'a> {
    fn new(
        client: Client,
        keeper: &'a Keeper,
        names: &'a Names,
        namespace: &str,
        name: &'a str,
    ) -> Self {
        let secrets = Api::namespaced(client.clone(), namespace);
        let configurations = Api::all(client.clone());
        Self {
            client,
            secrets,
            configurations,
            name,
            keeper,
            names,
            known: None,
        }
    }

    async fn run(&mut self) -> Error {
        let secret = watcher::watch_object(self.secrets.clone(), SECRET).default_backoff();
        let configuration =
            watcher::watch_object(self.configurations.clone(), self.name).default_backoff();
        let (mut secret, mut configuration) = (pin!(secret), pin!(configuration));
        let mut timer = interval(INTERVAL);
        timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut pause = Duration::from_millis(250);
        let mut version_checked = false;
        loop {
            let done = async {
                if !version_checked {
                    self.check_version().await?;
                }
                self.put_right().await
            };
            match done.await {
                Err(error @ Error::TooOld(_)) => return error,
                Err(error) => {
                    tracing::error!(
                        error = with_causes(&error),
                        "certificates or caBundle may be out of date; trying again"
                    );
                    self.keeper.health.not_ready_yet(with_causes(&error));
                    sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(30));
                    continue;
                }
                Ok(()) => pause = Duration::from_millis(250),
            }
            version_checked = true;
            tokio::select! {
                Some(event) = secret.next() => log_failure(SECRET, event.err()),
                Some(event) = configuration.next() => log_failure(self.name, event.err()),
                _ = timer.tick() => {}
            }
        }
    }

    /// Native sidecars are what the mesh rests on: an older API server would drop the field, and pods would wait forever.
    async fn check_version(&self) -> Result<(), Error> {
        let version = api(
            "read the version of Kubernetes",
            self.client.apiserver_version(),
        )
        .await?;
        if is_too_old(&version.major, &version.minor) {
            Err(Error::TooOld(version.git_version))
        } else {
            Ok(())
        }
    }

    /// The Secret first, then caBundle: whoever connects with the new bundle finds the new certificate.
    async fn put_right(&mut self) -> Result<(), Error> {
        let material = self.material().await?;
        self.keeper.serve(&material)?;
        match self.ca_bundle(&material.bundle()).await {
            Ok(true) => self.keeper.health.ready_until(material.serving_ends()),
            Ok(false) => {
                let reason = format!("MutatingWebhookConfiguration {} does not exist", self.name);
                tracing::warn!(reason, "not ready");
                self.keeper.health.not_ready(reason);
            }
            Err(error) => return Err(error),
        }
        self.known = Some(material);
        Ok(())
    }

    /// What is in the Secret, after what is due was done.
    async fn material(&self) -> Result<Material, Error> {
        let mut attempt = 1;
        loop {
            let stored = api(
                &format!("read Secret {SECRET}"),
                self.secrets.get_opt(SECRET),
            )
            .await?;
            let (material, written) = match stored {
                None => {
                    let material = self.remembered()?;
                    tracing::info!("making Secret {SECRET}");
                    let secret = secret(
                        Secret {
                            type_: Some("kubernetes.io/tls".into()),
                            ..Secret::default()
                        },
                        &material,
                    );
                    (
                        material,
                        self.secrets.create(&PostParams::default(), &secret).await,
                    )
                }
                Some(stored) => {
                    let (material, is_new) = self.read(&stored)?;
                    if !is_new {
                        return Ok(material);
                    }
                    let secret = secret(stored, &material);
                    (
                        material,
                        self.secrets
                            .replace(SECRET, &PostParams::default(), &secret)
                            .await,
                    )
                }
            };
            match written {
                Ok(_) => return Ok(material),
                Err(error) if is_lost_race(&error) && attempt < ATTEMPTS => {
                    tracing::info!("another replica has written Secret {SECRET}: reading it");
                    attempt += 1;
                }
                Err(error) => {
                    return Err(Error::Api(
                        format!("write Secret {SECRET}"),
                        Box::new(error),
                    ));
                }
            }
        }
    }

    /// What the Secret holds or, where that cannot be used or is due, what it should hold; and whether that is new.
    fn read(&self, stored: &Secret) -> Result<(Material, bool), Error> {
        let field = |name: &str| {
            stored
                .data
                .as_ref()?
                .get(name)
                .map(|value| value.0.as_slice())
        };
        match Material::from_fields(field) {
            Err(error) => {
                tracing::error!(%error, "Secret {SECRET} cannot be used: writing it anew");
                Ok((self.remembered()?, true))
            }
            Ok(material) => match material.renewed(self.names, SystemTime::now())? {
                Some(renewed) => {
                    tracing::info!("renewing what is due in Secret {SECRET}");
                    Ok((renewed, true))
                }
                None => Ok((material, false)),
            },
        }
    }

    /// What was in use until now, and is still good; at the first start, something new.
    fn remembered(&self) -> Result<Material, Error> {
        let now = SystemTime::now();
        match &self.known {
            Some(known) => Ok(known
                .renewed(self.names, now)?
                .unwrap_or_else(|| known.clone())),
            None => Ok(Material::new(self.names, now)?),
        }
    }

    /// Puts caBundle right in every entry where it is not. False where there is no configuration to put right.
    async fn ca_bundle(&self, bundle: &str) -> Result<bool, Error> {
        let [read, write] = ["read", "put right the caBundle of"]
            .map(|what| format!("{what} MutatingWebhookConfiguration {}", self.name));
        let params = PatchParams {
            field_manager: Some(MANAGER.into()),
            ..PatchParams::default()
        };
        let mut attempt = 1;
        loop {
            let Some(configuration) = api(&read, self.configurations.get_opt(self.name)).await?
            else {
                return Ok(false);
            };
            let Some(patch) = ca_bundle_patch(&configuration, bundle) else {
                return Ok(true);
            };
            match api(
                &write,
                self.configurations
                    .patch(self.name, &params, &Patch::Strategic(patch)),
            )
            .await
            {
                Ok(_) => break,
                Err(Error::Api(_, error)) if is_lost_race(&error) && attempt < ATTEMPTS => {
                    tracing::info!(
                        "somebody else has changed MutatingWebhookConfiguration {}: reading it",
                        self.name
                    );
                    attempt += 1;
                }
                Err(error) => return Err(error),
            }
        }
        self.keeper.metrics.repair();
        tracing::info!(
            "caBundle of MutatingWebhookConfiguration {} put right",
            self.name
        );
        Ok(true)
    }
}

/// A patch for the entries whose caBundle differs, if any do. It names the version that was read, so that an entry which was taken out
/// in the meantime is not half put back. Nothing but caBundle is in it, so nothing else becomes ours.
fn ca_bundle_patch(
    configuration: &MutatingWebhookConfiguration,
    bundle: &str,
) -> Option<serde_json::Value> {
    let bundle = ByteString(bundle.as_bytes().to_vec());
    let webhooks = configuration.webhooks.iter().flatten();
    let wrong =
        webhooks.filter(|webhook| webhook.client_config.ca_bundle.as_ref() != Some(&bundle));
    let wrong: Vec<_> = wrong
        .map(|webhook| json!({"name": webhook.name, "clientConfig": {"caBundle": &bundle}}))
        .collect();
    let version = &configuration.metadata.resource_version;
    (!wrong.is_empty())
        .then(|| json!({"metadata": {"resourceVersion": version}, "webhooks": wrong}))
}

/// The Secret with this material in it. What others have put into it stays.
fn secret(mut secret: Secret, material: &Material) -> Secret {
    let data = secret.data.get_or_insert_default();
    data.retain(|name, _| !FIELDS.contains(&name.as_str()));
    data.extend(
        material
            .to_fields()
            .into_iter()
            .map(|(name, value)| (name.to_owned(), ByteString(value))),
    );
    if secret.metadata.name.is_none() {
        let labels = BTreeMap::from([(
            "app.kubernetes.io/part-of".into(),
            "diy-service-mesh".into(),
        )]);
        secret.metadata = ObjectMeta {
            name: Some(SECRET.into()),
            labels: Some(labels),
            ..ObjectMeta::default()
        };
    }
    secret
}

/// Cloud providers write minor versions such as "29+".
fn is_too_old(major: &str, minor: &str) -> bool {
    let number = |text: &str| {
        text.trim_end_matches(|c: char| !c.is_ascii_digit())
            .parse::<u32>()
            .ok()
    };
    matches!((number(major), number(minor)), (Some(major), Some(minor)) if (major, minor) < OLDEST)
}

/// Somebody else has written in the meantime.
fn is_lost_race(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409)
}

/// A request to the API that ends, and whose failure says what was tried.
async fn api<T>(what: &str, request: impl Future<Output = kube::Result<T>>) -> Result<T, Error> {
    match timeout(PATIENCE, request).await {
        Ok(answer) => answer.map_err(|error| Error::Api(what.into(), Box::new(error))),
        Err(_) => Err(Error::Silent(what.into())),
    }
}

/// A watch that failed is begun again by itself.
fn log_failure(name: &str, error: Option<watcher::Error>) {
    if let Some(error) = error {
        tracing::warn!(error = with_causes(&error), name, "watch interrupted");
    }
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configuration(bundles: &[(&str, Option<&str>)]) -> MutatingWebhookConfiguration {
        let webhooks: Vec<_> = bundles
            .iter()
            .map(|(name, bundle)| {
                let bundle = bundle.map(|bundle| ByteString(bundle.as_bytes().to_vec()));
                json!({"name": name, "clientConfig": {"caBundle": bundle}, "admissionReviewVersions": ["v1"], "sideEffects": "None"})
            })
            .collect();
        serde_json::from_value(json!({"metadata": {"resourceVersion": "7"}, "webhooks": webhooks}))
            .expect("a configuration")
    }

    #[test]
    fn a_right_ca_bundle_is_left_alone() {
        assert_eq!(
            ca_bundle_patch(
                &configuration(&[("a", Some("CA")), ("b", Some("CA"))]),
                "CA"
            ),
            None
        );
        assert_eq!(ca_bundle_patch(&configuration(&[]), "CA"), None);
    }

    #[test]
    fn a_wrong_or_missing_ca_bundle_is_put_right_and_nothing_else_is_touched() {
        let patch = ca_bundle_patch(
            &configuration(&[("a", Some("CA")), ("b", Some("old")), ("c", None)]),
            "CA",
        );
        let expected = json!({
            "metadata": {"resourceVersion": "7"},
            "webhooks": [
                {"name": "b", "clientConfig": {"caBundle": "Q0E="}},
                {"name": "c", "clientConfig": {"caBundle": "Q0E="}},
            ],
        });
        assert_eq!(patch, Some(expected));
    }

    #[test]
    fn a_secret_keeps_what_others_put_into_it_and_loses_what_is_out_of_date() {
        let material =
            Material::new(&Names::new(["injector".into()]), SystemTime::now()).expect("made");
        let fields = ["next-ca.crt", "tls.crt", "theirs"];
        let data = fields
            .into_iter()
            .map(|name| (name.into(), ByteString(b"x".to_vec())))
            .collect();
        let stored = Secret {
            data: Some(data),
            ..Secret::default()
        };
        let data = secret(stored, &material).data.expect("data");
        assert_eq!(
            data.keys().map(String::as_str).collect::<Vec<_>>(),
            ["ca.crt", "ca.key", "theirs", "tls.crt", "tls.key"]
        );
        assert_ne!(data["tls.crt"].0, b"x");
    }

    #[test]
    fn clusters_without_native_sidecars_are_told_from_others() {
        assert!(is_too_old("1", "28"));
        assert!(is_too_old("1", "28+"));
        assert!(!is_too_old("1", "29"));
        assert!(!is_too_old("1", "34+"));
        assert!(!is_too_old("2", "0"));
        assert!(!is_too_old("", ""));
    }
}
