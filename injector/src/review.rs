//! AdmissionReview v1: decodes the request, decides, encodes the response. Pure.
//!
//! [`crate::webhook`] reads and sends the bytes; [`crate::patch`] decides about the pod.

use diy_mesh_model::escape;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::ObjectReference;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::config::{self, Settings};
use crate::patch::{Candidate, NamespaceLabels, Verdict, decide, decide_ephemeral_containers};
use crate::pod::list;

const API_VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";

/// A malformed AdmissionReview.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The body is not JSON, or a field has a wrong type.
    #[error("the body is not an AdmissionReview: {0}")]
    Json(#[from] serde_json::Error),
    /// `apiVersion` or `kind` differ.
    #[error("expected apiVersion {API_VERSION} and kind {KIND}, got {0:?} and {1:?}")]
    Version(String, String),
    /// `request` is missing.
    #[error("the AdmissionReview has no request")]
    NoRequest,
    /// `request.object` is missing although the request creates or changes a pod.
    #[error(
        "request {0:?} of the AdmissionReview is for a pod, but its object is missing or not a JSON object"
    )]
    NoObject(String),
    /// The namespace of a pod is no name of a namespace.
    #[error("request {0:?} of the AdmissionReview is for a pod: {1}")]
    Namespace(String, &'static str),
}

/// The length of a name in Kubernetes.
const MAX_NAME_BYTES: usize = 253;

/// The outcome of a review, for logs and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The pod is admitted with a proxy.
    Injected,
    /// The pod is rejected.
    Denied,
    /// The pod is admitted unchanged.
    LeftAlone,
}

/// The response to a review.
#[derive(Debug)]
pub struct Reviewed {
    /// The AdmissionReview with the response, as JSON.
    pub body: Vec<u8>,
    /// The outcome.
    pub outcome: Outcome,
    /// Kind, namespace and name of the object, for logs.
    pub subject: String,
    /// Warnings and denial messages for the client.
    pub messages: Vec<String>,
    /// The object for an event with the messages. `None` for a dry run.
    pub concerned: Option<ObjectReference>,
}

/// Decodes an AdmissionReview, as JSON.
pub fn decode(body: &[u8]) -> Result<Request, Error> {
    let review: ReviewRequest = serde_json::from_slice(body)?;
    if review.api_version != API_VERSION || review.kind != KIND {
        return Err(Error::Version(review.api_version, review.kind));
    }
    let request = review.request.ok_or(Error::NoRequest)?;
    if matches!(operation(&request), Operation::Other) {
        return Ok(request);
    }
    if !request.object.is_object() {
        return Err(Error::NoObject(request.uid));
    }
    match config::namespace(&request.namespace) {
        Ok(_) => Ok(request),
        Err(reason) => Err(Error::Namespace(request.uid, reason)),
    }
}

/// Reviews a request. `labels` are the labels of the namespace of a new pod, or the reason why they
/// are unknown.
pub fn review(
    settings: &Settings,
    request: Request,
    labels: Result<NamespaceLabels, String>,
) -> Result<Reviewed, Error> {
    let verdict = match operation(&request) {
        Operation::Other => Verdict::NotRequested,
        Operation::CreatePod => decide(
            settings,
            Candidate {
                pod: &request.object,
                namespace: &request.namespace,
                labels: labels.as_ref().map_err(String::as_str).copied(),
            },
        ),
        Operation::AddEphemeralContainers => decide_ephemeral_containers(&request.object),
    };
    let subject = subject(&request);
    let concerned = (!request.dry_run).then(|| concerned(&request));
    let mut response = json!({"uid": request.uid, "allowed": true});
    let (outcome, messages) = respond(&mut response, verdict)?;
    let review = json!({"apiVersion": API_VERSION, "kind": KIND, "response": response});
    Ok(Reviewed {
        body: review.to_string().into_bytes(),
        outcome,
        subject,
        messages,
        concerned,
    })
}

/// The operation of a request.
enum Operation {
    CreatePod,
    AddEphemeralContainers,
    /// Nothing that the mesh decides about.
    Other,
}

fn operation(request: &Request) -> Operation {
    let Kind { group, kind } = &request.kind;
    let sub_resource = request.sub_resource.as_deref().unwrap_or_default();
    if !group.is_empty() || kind != "Pod" {
        return Operation::Other;
    }
    match (request.operation.as_str(), sub_resource) {
        ("CREATE", "") => Operation::CreatePod,
        ("UPDATE", "ephemeralcontainers") => Operation::AddEphemeralContainers,
        _ => Operation::Other,
    }
}

/// Uses `generateName` for pods of controllers, which have no name at admission. Not only API servers
/// send requests: names are shortened, and add no lines.
fn subject(request: &Request) -> String {
    let metadata = |field| {
        request
            .object
            .get("metadata")
            .and_then(|metadata| metadata.get(field))
            .and_then(Value::as_str)
    };
    let name = metadata("name")
        .filter(|name| !name.is_empty())
        .or(metadata("generateName"))
        .unwrap_or(&request.name);
    let mut subject = String::new();
    for (part, end) in [
        (&*request.kind.kind, " "),
        (&request.namespace, "/"),
        (name, ""),
    ] {
        let part = &part[..part.floor_char_boundary(MAX_NAME_BYTES)];
        escape::line(part.as_bytes(), &mut subject);
        subject.push_str(end);
    }
    subject
}

/// The pod if it exists, otherwise its controller, which tries to create it, otherwise the name of
/// the pod.
fn concerned(request: &Request) -> ObjectReference {
    let metadata = &request.object["metadata"];
    let text = |object: &Value, field: &str| {
        let text = object[field].as_str();
        text.filter(|text| text.len() <= MAX_NAME_BYTES)
            .map(str::to_owned)
    };
    let owner = list(metadata, "ownerReferences")
        .iter()
        .find(|owner| owner["controller"] == true);
    let namespace = Some(request.namespace.clone());
    match owner.filter(|_| metadata["uid"].is_null()) {
        Some(owner) => ObjectReference {
            api_version: text(owner, "apiVersion"),
            kind: text(owner, "kind"),
            name: text(owner, "name"),
            uid: text(owner, "uid"),
            namespace,
            ..ObjectReference::default()
        },
        None => ObjectReference {
            api_version: Some("v1".into()),
            kind: Some(request.kind.kind.clone()),
            name: text(metadata, "name").or_else(|| text(metadata, "generateName")),
            uid: text(metadata, "uid"),
            namespace,
            ..ObjectReference::default()
        },
    }
}

/// Adds a verdict to a response. Returns the outcome, and the messages for the client.
fn respond(response: &mut Value, verdict: Verdict) -> serde_json::Result<(Outcome, Vec<String>)> {
    let mut deny = |code: u16, reason: &str, message: String| {
        response["allowed"] = false.into();
        response["status"] = json!({"code": code, "reason": reason, "message": message});
        (Outcome::Denied, vec![message])
    };
    let (outcome, warnings) = match verdict {
        Verdict::Denied(message) => return Ok(deny(422, "Invalid", message)),
        Verdict::Unknown(message) => return Ok(deny(503, "ServiceUnavailable", message)),
        Verdict::NotRequested => (Outcome::LeftAlone, Vec::new()),
        Verdict::Skipped(warning) => (Outcome::LeftAlone, vec![warning]),
        Verdict::Injected(injection) => {
            response["auditAnnotations"] = json!({"proxy-injected": "true"});
            if !injection.patch.0.is_empty() {
                let patch = ByteString(serde_json::to_vec(&injection.patch)?);
                response["patchType"] = "JSONPatch".into();
                response["patch"] = json!(patch);
            }
            (Outcome::Injected, injection.warnings)
        }
    };
    if !warnings.is_empty() {
        response["warnings"] = json!(warnings);
    }
    Ok((outcome, warnings))
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ReviewRequest {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    request: Option<Request>,
}

/// The request of an AdmissionReview.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Request {
    uid: String,
    kind: Kind,
    sub_resource: Option<String>,
    #[serde(default)]
    name: String,
    #[serde(default)]
    namespace: String,
    operation: String,
    #[serde(default)]
    object: Value,
    #[serde(default)]
    dry_run: bool,
}

impl Request {
    /// The namespace of a new pod. Its labels are defaults for the pod.
    pub fn namespace_of_new_pod(&self) -> Option<&str> {
        matches!(operation(self), Operation::CreatePod).then_some(&self.namespace)
    }
}

#[derive(Debug, Deserialize)]
struct Kind {
    #[serde(default)]
    group: String,
    kind: String,
}
