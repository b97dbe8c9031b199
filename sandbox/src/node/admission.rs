//! Admission of new pods, as an API server performs it: calls the matching mutating webhooks over
//! HTTPS, verifies them with their own certificate authority, and applies the returned JSON
//! patches.

use std::{collections::BTreeMap, net::Ipv4Addr, path::PathBuf, time::Duration};

use anyhow::{Context, Result, anyhow, ensure};
use diy_mesh_model::json;
use hyper::{Request, header};
use k8s_openapi::{
    ByteString,
    api::{admissionregistration::v1::MutatingWebhook, core::v1::Pod},
    apimachinery::pkg::apis::meta::v1::LabelSelector,
};
use kube::{
    Client, Config,
    core::{Selector, SelectorExt},
};
use serde_json::{Value, json};
use tokio::time;
use tokio_rustls::rustls::pki_types::{CertificateDer, pem::PemObject};

use super::{
    cel,
    objects::Objects,
    services::{self, items, text},
};

/// A webhook and the ready endpoints of its Service.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Webhook {
    config: MutatingWebhook,
    backends: Vec<Backend>,
}

/// An endpoint of a webhook's Service.
#[derive(Clone, Debug, PartialEq)]
struct Backend {
    ip: Ipv4Addr,
    port: u16,
    /// The file with the pod's certificate authority.
    ca_file: PathBuf,
}

/// The current webhooks. `ca_file` returns the certificate authority file of a pod by uid.
pub(super) fn webhooks(
    objects: &Objects,
    slices: &[Value],
    ca_file: impl Fn(&str) -> PathBuf,
) -> Vec<Webhook> {
    let configs = objects.of("MutatingWebhookConfiguration");
    let configs = configs.flat_map(|config| items(&config["webhooks"]));
    configs
        .filter_map(|config| {
            // `Objects` has checked the type.
            let parsed = json::read::<MutatingWebhook>(config).ok()?;
            let reference = &config["clientConfig"]["service"];
            let key = [&reference["namespace"], &reference["name"]].map(|one| text(one).to_owned());
            let service = objects.get("Service", &key.into());
            let port = reference["port"].as_u64().unwrap_or(443);
            Some(Webhook {
                config: parsed,
                backends: service.map_or(Vec::new(), |one| backends(one, port, slices, &ca_file)),
            })
        })
        .collect()
}

/// The ready endpoints of a Service port.
fn backends(
    service: &Value,
    port: u64,
    slices: &[Value],
    ca_file: impl Fn(&str) -> PathBuf,
) -> Vec<Backend> {
    let mut ports = items(&service["spec"]["ports"]);
    let Some(port) = ports.find(|one| one["port"] == port) else {
        return Vec::new();
    };
    let name = text(&port["name"]);
    let slices = services::slices_of(service, slices).filter(|one| one["addressType"] == "IPv4");
    let backends = slices.flat_map(|slice| {
        let port = services::port_named(slice, name).and_then(Value::as_u64);
        let port = port.and_then(|port| port.try_into().ok());
        let backend = |endpoint: &Value| {
            Some(Backend {
                ip: text(&endpoint["addresses"][0]).parse().ok()?,
                port: port?,
                ca_file: ca_file(endpoint["targetRef"]["uid"].as_str()?),
            })
        };
        services::ready_endpoints(slice)
            .filter_map(backend)
            .collect::<Vec<_>>()
    });
    backends.collect()
}

/// Calls all matching webhooks for a new pod. Returns the patched pod.
pub(super) async fn admit(
    pod: &Pod,
    namespace_labels: &Value,
    webhooks: &[Webhook],
) -> Result<Pod> {
    let mut object = serde_json::to_value(pod)?;
    for webhook in webhooks {
        let config = &webhook.config;
        if matches(config, &object, namespace_labels)? {
            let response = call(webhook, &object).await;
            if let Err(error) = response.and_then(|response| apply(&mut object, &response)) {
                let name = &config.name;
                if config.failure_policy.as_deref() != Some("Ignore") {
                    return Err(error.context(format!("failed calling webhook \"{name}\"")));
                }
                tracing::warn!(
                    "ignored failure of webhook {name} (failurePolicy Ignore): {error:#}"
                );
            }
        }
    }
    json::read(&object).context("the patched object is not a valid pod")
}

/// Whether the rules, selectors and match conditions of a webhook match a new pod.
fn matches(config: &MutatingWebhook, object: &Value, namespace_labels: &Value) -> Result<bool> {
    let contains = |list: Option<&Vec<String>>, name: &str| {
        let mut items = list.into_iter().flatten();
        items.any(|item| item == name || item == "*")
    };
    let rule_matches = config.rules.iter().flatten().any(|rule| {
        contains(rule.operations.as_ref(), "CREATE") && contains(rule.resources.as_ref(), "pods")
    });
    let labels = &object["metadata"]["labels"];
    if !rule_matches
        || !selects(config.namespace_selector.as_ref(), namespace_labels)?
        || !selects(config.object_selector.as_ref(), labels)?
    {
        return Ok(false);
    }
    for condition in config.match_conditions.iter().flatten() {
        let (webhook, name) = (&config.name, &condition.name);
        let result = cel::evaluate(&condition.expression, object);
        if !result.with_context(|| format!("webhook {webhook}, match condition {name}"))? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A missing selector selects everything.
fn selects(selector: Option<&LabelSelector>, labels: &Value) -> Result<bool> {
    let labels = json::read::<BTreeMap<String, String>>(labels).unwrap_or_default();
    let selector: Selector = selector.cloned().unwrap_or_default().try_into()?;
    Ok(selector.matches(&labels))
}

/// Calls the endpoints of a webhook one after another until one answers. Returns the response of
/// its AdmissionReview.
async fn call(webhook: &Webhook, object: &Value) -> Result<Value> {
    let service = webhook.config.client_config.service.as_ref();
    let service =
        service.context("unsupported clientConfig: the sandbox supports service references")?;
    let name = format!("{}.{}.svc", service.name, service.namespace);
    let path = service.path.as_deref().unwrap_or("/");
    let timeout = webhook.config.timeout_seconds.unwrap_or(10);
    let timeout = Duration::from_secs(timeout.unsigned_abs().into());
    let mut last_error = anyhow!("no endpoints available for service \"{}\"", service.name);
    for backend in &webhook.backends {
        let review = review(backend, &name, path, timeout, object);
        let error = match time::timeout(timeout, review).await {
            Ok(Ok(response)) => return Ok(response),
            Ok(Err(error)) => error,
            Err(_) => anyhow!("timed out after {} s", timeout.as_secs()),
        };
        last_error = error.context(format!("https://{name}{path} at {}", backend.ip));
    }
    Err(last_error)
}

/// Sends an AdmissionReview to one endpoint. Returns its response.
async fn review(
    backend: &Backend,
    name: &str,
    path: &str,
    timeout: Duration,
    object: &Value,
) -> Result<Value> {
    let uid = format!("{:032x}", fastrand::u128(..));
    let kind = json!({"group": "", "version": "v1", "kind": "Pod"});
    let resource = json!({"group": "", "version": "v1", "resource": "pods"});
    let review = json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": uid, "kind": kind, "resource": resource, "requestKind": kind, "requestResource": resource,
            "name": object["metadata"]["name"], "namespace": object["metadata"]["namespace"], "operation": "CREATE",
            "userInfo": {"username": "system:serviceaccount:kube-system:replicaset-controller"},
            "object": object, "oldObject": null, "dryRun": false, "options": {"apiVersion": "meta.k8s.io/v1", "kind": "CreateOptions"},
        },
    });
    let mut config = Config::new(format!("https://{}:{}", backend.ip, backend.port).parse()?);
    config.tls_server_name = Some(name.to_owned());
    config.root_cert = Some(authority(backend).await?);
    let request = Request::post(format!("{path}?timeout={}s", timeout.as_secs()))
        .header(header::CONTENT_TYPE, "application/json")
        .body(serde_json::to_vec(&review)?)?;
    let mut review: Value = Client::try_from(config)?.request(request).await?;
    ensure!(
        review["response"]["uid"] == uid,
        "the response has uid {}, expected {uid}",
        review["response"]["uid"]
    );
    Ok(review["response"].take())
}

/// The certificate authority of an endpoint.
async fn authority(backend: &Backend) -> Result<Vec<Vec<u8>>> {
    let pem = tokio::fs::read(&backend.ca_file)
        .await
        .context("the injector has not published its certificate authority")?;
    CertificateDer::pem_slice_iter(&pem)
        .map(|certificate| Ok(certificate?.to_vec()))
        .collect()
}

fn apply(object: &mut Value, response: &Value) -> Result<()> {
    let reason = &response["status"]["message"];
    ensure!(
        response["allowed"] == true,
        "denied the request: {}",
        reason.as_str().unwrap_or("no reason given")
    );
    if response["patch"].is_null() {
        return Ok(());
    }
    let patch = json::read::<ByteString>(&response["patch"]).context("the patch is not base64")?;
    let patch: json_patch::Patch =
        serde_json::from_slice(&patch.0).context("the patch is not a JSON patch")?;
    json_patch::patch(object, &patch).context("the patch does not apply to the pod")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn webhooks() -> Vec<MutatingWebhook> {
        let objects = crate::manifest::embedded().objects().unwrap();
        let config = objects
            .into_iter()
            .find(|object| object["kind"] == "MutatingWebhookConfiguration")
            .unwrap();
        serde_json::from_value(config["webhooks"].clone()).unwrap()
    }

    /// The names of the matching webhooks with failure policy Fail.
    fn matching(
        annotation: Option<&str>,
        inject: Option<&str>,
        inbound: Option<&str>,
    ) -> Vec<String> {
        let annotations: BTreeMap<&str, &str> = annotation
            .map(|value| ("diy-service-mesh/inject", value))
            .into_iter()
            .collect();
        let object = json!({"metadata": {"name": "p", "annotations": annotations}, "spec": {}});
        let mut labels = json!({"kubernetes.io/metadata.name": "shop"});
        for (name, value) in [("inject", inject), ("inbound", inbound)] {
            if let Some(value) = value {
                labels[format!("diy-service-mesh/{name}")] = json!(value);
            }
        }
        let failing = webhooks()
            .into_iter()
            .filter(|webhook| webhook.failure_policy.as_deref() != Some("Ignore"));
        failing
            .filter(|webhook| matches(webhook, &object, &labels).unwrap())
            .map(|webhook| webhook.name)
            .collect()
    }

    #[test]
    fn matches_at_most_one_webhook_and_only_for_requested_injection() {
        let (pod, namespace) = (
            ["injector.diy-service-mesh.dev"],
            ["namespace.injector.diy-service-mesh.dev"],
        );
        for inbound in [None, Some("permissive"), Some("strict")] {
            let none: [&str; 0] = [];
            assert_eq!(matching(None, None, inbound), none);
            assert_eq!(matching(Some("True"), None, inbound), pod);
            assert_eq!(matching(Some("false"), None, inbound), none);
            assert_eq!(matching(None, Some("enabled"), inbound), namespace);
            assert_eq!(matching(Some("true"), Some("enabled"), inbound), pod);
            assert_eq!(matching(Some("FALSE"), Some("enabled"), inbound), none);
            assert_eq!(matching(None, Some("other"), inbound), none);
        }
    }

    #[test]
    fn ephemeral_containers_match_only_in_injected_pods() {
        let webhooks = webhooks();
        let condition = webhooks
            .iter()
            .find(|webhook| webhook.name.starts_with("ephemeral-containers."))
            .and_then(|webhook| webhook.match_conditions.as_ref()?.first())
            .unwrap();
        let matches = |init_containers: Value| {
            let object = json!({"spec": {"initContainers": init_containers}});
            cel::evaluate(&condition.expression, &object).unwrap()
        };
        let token = json!([{"name": "A", "value": "b"}, {"name": "SERVICE_MESH_TOKEN_FILE"}]);
        assert!(matches(
            json!([{"name": "proxy-init"}, {"name": "proxy", "env": token}])
        ));
        assert!(!matches(json!([{"name": "other", "env": token}])));
        assert!(!matches(json!([{"name": "proxy"}])));
        assert!(!cel::evaluate(&condition.expression, &json!({"spec": {}})).unwrap());
    }

    #[test]
    fn error_names_the_invalid_match_condition() {
        let webhook = json!({"name": "w", "admissionReviewVersions": [], "clientConfig": {}, "sideEffects": "None",
            "rules": [{"operations": ["CREATE"], "resources": ["pods"]}], "matchConditions": [{"name": "odd", "expression": "oldObject == 1"}]});
        let webhook = serde_json::from_value(webhook).unwrap();
        let error = matches(&webhook, &json!({}), &json!({})).unwrap_err();
        assert_eq!(
            format!("{error:#}"),
            "webhook w, match condition odd: Undeclared reference to 'oldObject'"
        );
    }

    #[test]
    fn applies_patches_and_reports_denials() {
        let mut object = json!({"a": 1});
        // [{"op":"add","path":"/b","value":2}]
        let patch = "W3sib3AiOiJhZGQiLCJwYXRoIjoiL2IiLCJ2YWx1ZSI6Mn1d";
        apply(
            &mut object,
            &json!({"allowed": true, "patchType": "JSONPatch", "patch": patch}),
        )
        .unwrap();
        assert_eq!(object, json!({"a": 1, "b": 2}));
        let error = apply(
            &mut object,
            &json!({"allowed": false, "status": {"message": "not today"}}),
        )
        .unwrap_err();
        assert_eq!(error.to_string(), "denied the request: not today");
    }
}
