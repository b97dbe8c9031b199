//! Admission: what an API server does with a new pod. It asks the mutating webhooks that apply, over HTTPS and with their own
//! certificate authority, and applies the JSON patch that comes back. It decides nothing about the mesh itself.

use std::{collections::BTreeMap, net::Ipv4Addr, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Request, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use k8s_openapi::{
    ByteString,
    api::{
        admissionregistration::v1::MutatingWebhook, core::v1::Pod, discovery::v1::EndpointSlice,
    },
    apimachinery::pkg::apis::meta::v1::LabelSelector,
};
use serde_json::{Value, json};
use tokio::{net::TcpStream, time};
use tokio_rustls::{
    TlsConnector,
    rustls::{
        ClientConfig, RootCertStore,
        pki_types::{CertificateDer, ServerName, pem::PemObject},
    },
};

use super::{cel, objects::Objects, services};

/// A webhook and where its servers are, in a moment.
#[derive(Clone, Debug)]
pub(super) struct Hook {
    pub(super) webhook: MutatingWebhook,
    pub(super) servers: Vec<Server>,
}

/// A pod behind a webhook's Service.
#[derive(Clone, Debug)]
pub(super) struct Server {
    pub(super) ip: Ipv4Addr,
    pub(super) port: u16,
    /// Where it has written its certificate authority.
    pub(super) ca_file: PathBuf,
}

/// The webhooks as they are now; `ca_file` names where the pod of a uid keeps its certificate authority.
pub(super) fn hooks(
    objects: &Objects,
    slices: &[EndpointSlice],
    ca_file: &dyn Fn(&str) -> PathBuf,
) -> Vec<Hook> {
    let webhooks = objects
        .webhooks
        .values()
        .flat_map(|config| config.webhooks.iter().flatten());
    webhooks
        .map(|webhook| Hook {
            webhook: webhook.clone(),
            servers: servers(webhook, objects, slices, ca_file).unwrap_or_default(),
        })
        .collect()
}

/// The ready pods behind a webhook's Service; `None` where there is no such Service.
fn servers(
    webhook: &MutatingWebhook,
    objects: &Objects,
    slices: &[EndpointSlice],
    ca_file: &dyn Fn(&str) -> PathBuf,
) -> Option<Vec<Server>> {
    let reference = webhook.client_config.service.as_ref()?;
    let service = objects
        .services
        .get(&(reference.namespace.clone(), reference.name.clone()))?;
    let wanted = service
        .spec
        .as_ref()?
        .ports
        .iter()
        .flatten()
        .find(|port| port.port == reference.port.unwrap_or(443))?;
    let name = wanted.name.as_deref().unwrap_or_default();
    let mut servers = Vec::new();
    for slice in services::slices_of(service, slices).filter(|slice| slice.address_type == "IPv4") {
        let same = slice
            .ports
            .iter()
            .flatten()
            .find(|port| port.name.as_deref().unwrap_or_default() == name);
        let Some(port) = same.and_then(|port| port.port?.try_into().ok()) else {
            continue;
        };
        let ready = slice.endpoints.iter().filter(|endpoint| {
            endpoint
                .conditions
                .as_ref()
                .is_some_and(|conditions| conditions.ready == Some(true))
        });
        servers.extend(ready.filter_map(|endpoint| {
            let uid = endpoint.target_ref.as_ref()?.uid.as_deref()?;
            Some(Server {
                ip: endpoint.addresses.first()?.parse().ok()?,
                port,
                ca_file: ca_file(uid),
            })
        }));
    }
    Some(servers)
}

/// Passes a new pod through the webhooks that apply.
pub(super) async fn admit(
    pod: Pod,
    namespace_labels: &BTreeMap<String, String>,
    hooks: &[Hook],
) -> Result<Pod> {
    let mut object = serde_json::to_value(pod)?;
    for hook in hooks {
        if applies(&hook.webhook, &object, namespace_labels)? {
            let answer = ask_any(hook, &object).await;
            if let Err(error) = answer.and_then(|answer| apply(&mut object, &answer)) {
                let name = &hook.webhook.name;
                if hook.webhook.failure_policy.as_deref() != Some("Ignore") {
                    return Err(error.context(format!("failed calling webhook \"{name}\"")));
                }
                tracing::warn!("webhook {name} failed and its failurePolicy is Ignore: {error:#}");
            }
        }
    }
    serde_json::from_value(object).context("a webhook's patch made it something else than a pod")
}

/// The webhook wants to see this new pod.
fn applies(
    webhook: &MutatingWebhook,
    object: &Value,
    namespace_labels: &BTreeMap<String, String>,
) -> Result<bool> {
    let names = |list: Option<&Vec<String>>, name: &str| {
        list.into_iter()
            .flatten()
            .any(|item| item == name || item == "*")
    };
    let ruled = webhook.rules.iter().flatten().any(|rule| {
        names(rule.operations.as_ref(), "CREATE") && names(rule.resources.as_ref(), "pods")
    });
    let labels: BTreeMap<String, String> =
        serde_json::from_value(object["metadata"]["labels"].clone()).unwrap_or_default();
    if !ruled
        || !selects(webhook.namespace_selector.as_ref(), namespace_labels)?
        || !selects(webhook.object_selector.as_ref(), &labels)?
    {
        return Ok(false);
    }
    for condition in webhook.match_conditions.iter().flatten() {
        let place = || {
            format!(
                "webhook {}, match condition {}",
                webhook.name, condition.name
            )
        };
        if !cel::evaluate(&condition.expression, object).with_context(place)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn selects(selector: Option<&LabelSelector>, labels: &BTreeMap<String, String>) -> Result<bool> {
    let Some(selector) = selector else {
        return Ok(true);
    };
    let mut holds = super::endpoints::matches(
        selector.match_labels.as_ref().unwrap_or(&BTreeMap::new()),
        Some(labels),
    );
    for requirement in selector.match_expressions.iter().flatten() {
        let value = labels.get(&requirement.key);
        let listed = || {
            value.is_some_and(|value| {
                requirement
                    .values
                    .iter()
                    .flatten()
                    .any(|item| item == value)
            })
        };
        holds &= match requirement.operator.as_str() {
            "In" => listed(),
            "NotIn" => !listed(),
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            other => bail!("unknown selector operator {other:?}"),
        };
    }
    Ok(holds)
}

async fn ask_any(hook: &Hook, object: &Value) -> Result<Value> {
    let service = hook
        .webhook
        .client_config
        .service
        .as_ref()
        .context("the sandbox reaches webhooks by a Service, not by a URL")?;
    let name = format!("{}.{}.svc", service.name, service.namespace);
    let path = service.path.as_deref().unwrap_or("/");
    let timeout = Duration::from_secs(
        hook.webhook
            .timeout_seconds
            .and_then(|seconds| seconds.try_into().ok())
            .unwrap_or(10),
    );
    let mut last = anyhow::anyhow!("no endpoints available for service \"{}\"", service.name);
    for server in &hook.servers {
        match time::timeout(timeout, ask(server, &name, path, timeout, object)).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => {
                last = error.context(format!("https://{name}{path} at {}", server.ip))
            }
            Err(_) => {
                last = anyhow::anyhow!(
                    "https://{name}{path} at {}: no answer within {} s",
                    server.ip,
                    timeout.as_secs()
                )
            }
        }
    }
    Err(last)
}

/// The response part of the AdmissionReview that comes back.
async fn ask(
    server: &Server,
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
    let connector = connector(server).await?;
    let stream = TcpStream::connect((server.ip, server.port)).await?;
    let stream = connector
        .connect(ServerName::try_from(name.to_owned())?, stream)
        .await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // Its end is told by the response.
    let driver = tokio::spawn(connection);
    let request = Request::post(format!("{path}?timeout={}s", timeout.as_secs()))
        .header(header::HOST, name)
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(serde_json::to_vec(&review)?)))?;
    let response = sender.send_request(request).await?;
    let status = response.status();
    let body = Limited::new(response.into_body(), 4 << 20)
        .collect()
        .await
        .map_err(|error| anyhow::anyhow!("{error}"))?
        .to_bytes();
    driver.abort();
    ensure!(
        status.is_success(),
        "status {status}: {}",
        String::from_utf8_lossy(&body)
    );
    let mut answer: Value = serde_json::from_slice(&body).context("the answer is no JSON")?;
    ensure!(
        answer["response"]["uid"] == uid,
        "the answer is for another request"
    );
    Ok(answer["response"].take())
}

async fn connector(server: &Server) -> Result<TlsConnector> {
    let pem = tokio::fs::read(&server.ca_file)
        .await
        .context("the injector has not written its certificate authority")?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        roots.add(certificate?)?;
    }
    let config = ClientConfig::builder()
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

fn apply(object: &mut Value, response: &Value) -> Result<()> {
    ensure!(
        response["allowed"] == true,
        "denied the request: {}",
        response["status"]["message"]
            .as_str()
            .unwrap_or("without a reason")
    );
    for warning in response["warnings"].as_array().into_iter().flatten() {
        tracing::warn!(
            "the injector warns: {}",
            warning.as_str().unwrap_or_default()
        );
    }
    if response["patch"].is_null() {
        return Ok(());
    }
    ensure!(
        response["patchType"] == "JSONPatch",
        "it answered with a patch of an unknown type"
    );
    let patch: ByteString =
        serde_json::from_value(response["patch"].clone()).context("its patch is no base64")?;
    let patch: json_patch::Patch =
        serde_json::from_slice(&patch.0).context("its patch is no JSON patch")?;
    json_patch::patch(object, &patch).context("its patch does not fit the pod")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn webhooks() -> Vec<MutatingWebhook> {
        let objects = crate::sandbox::manifest::embedded().objects().unwrap();
        let config = objects
            .into_iter()
            .find(|object| object["kind"] == "MutatingWebhookConfiguration")
            .unwrap();
        serde_json::from_value(config["webhooks"].clone()).unwrap()
    }

    /// Where a pod is sent to, by the entries that can stop it.
    fn asked(annotation: Option<&str>, inject: Option<&str>, inbound: Option<&str>) -> Vec<String> {
        let annotations: BTreeMap<&str, &str> = annotation
            .map(|value| ("diy-service-mesh/inject", value))
            .into_iter()
            .collect();
        let object = json!({"metadata": {"name": "p", "annotations": annotations}, "spec": {}});
        let mut labels =
            BTreeMap::from([("kubernetes.io/metadata.name".to_owned(), "shop".to_owned())]);
        labels.extend(inject.map(|value| ("diy-service-mesh/inject".to_owned(), value.to_owned())));
        labels
            .extend(inbound.map(|value| ("diy-service-mesh/inbound".to_owned(), value.to_owned())));
        let failing = webhooks()
            .into_iter()
            .filter(|webhook| webhook.failure_policy.as_deref() != Some("Ignore"));
        let asked = failing.filter(|webhook| applies(webhook, &object, &labels).unwrap());
        asked
            .filter_map(|webhook| webhook.client_config.service?.path)
            .collect()
    }

    #[test]
    fn only_pods_that_ask_are_sent_to_the_injector_and_those_once() {
        for (inbound, of_pods, of_namespaces) in [
            (None, "/inject", "/inject/enabled-namespace"),
            (Some("permissive"), "/inject", "/inject/enabled-namespace"),
            (
                Some("strict"),
                "/inject/strict-namespace",
                "/inject/enabled-strict-namespace",
            ),
        ] {
            let nobody: [&str; 0] = [];
            assert_eq!(asked(None, None, inbound), nobody);
            assert_eq!(asked(Some("True"), None, inbound), [of_pods]);
            assert_eq!(asked(Some("false"), None, inbound), nobody);
            assert_eq!(asked(None, Some("enabled"), inbound), [of_namespaces]);
            assert_eq!(asked(Some("true"), Some("enabled"), inbound), [of_pods]);
            assert_eq!(asked(Some("FALSE"), Some("enabled"), inbound), nobody);
            assert_eq!(asked(None, Some("other"), inbound), nobody);
        }
    }

    #[test]
    fn a_condition_that_cannot_be_evaluated_is_an_error_that_names_it() {
        let webhook = json!({"name": "w", "admissionReviewVersions": [], "clientConfig": {}, "sideEffects": "None",
            "rules": [{"operations": ["CREATE"], "resources": ["pods"]}], "matchConditions": [{"name": "odd", "expression": "oldObject == 1"}]});
        let webhook = serde_json::from_value(webhook).unwrap();
        let error = applies(&webhook, &json!({}), &BTreeMap::new()).unwrap_err();
        assert_eq!(
            format!("{error:#}"),
            "webhook w, match condition odd: Undeclared reference to 'oldObject'"
        );
    }

    #[test]
    fn patches_are_applied_and_refusals_are_told() {
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
