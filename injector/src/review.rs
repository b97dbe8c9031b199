//! AdmissionReview v1 in, AdmissionReview v1 out: the words that the API server and the webhook exchange. Pure.
//!
//! It never sees a connection, and [`crate::patch`] never sees a review.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::patch::{Candidate, NamespaceLabels, Settings, Verdict, decide};

const API_VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";

/// A review that cannot be answered.
#[derive(Debug, thiserror::Error)]
pub enum Malformed {
    /// It is not JSON, or not of a review's shape.
    #[error("the body is no AdmissionReview: {0}")]
    Shape(#[from] serde_json::Error),
    /// It is something else, or of another version.
    #[error("expected apiVersion {API_VERSION} and kind {KIND}, got {0:?} and {1:?}")]
    Version(String, String),
    /// It asks nothing.
    #[error("the AdmissionReview has no request")]
    NoRequest,
    /// It is about the creation of a pod and holds none.
    #[error(
        "the AdmissionReview's request {0:?} creates a pod, and its object is missing or no object"
    )]
    NoObject(String),
}

/// How a review ended, for logs and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The pod joins the mesh.
    Injected,
    /// The pod is not created.
    Denied,
    /// The pod is created as it is.
    LeftAlone,
}

/// The answer to one review.
#[derive(Debug)]
pub struct Answer {
    /// The AdmissionReview to send back.
    pub body: Vec<u8>,
    /// How it ended.
    pub outcome: Outcome,
    /// Whose review it was, for a line in the log.
    pub subject: String,
    /// What the requester is told.
    pub messages: Vec<String>,
}

/// Answers one review.
pub fn answer(
    settings: &Settings,
    body: &[u8],
    labels: NamespaceLabels,
) -> Result<Answer, Malformed> {
    let review: Review = serde_json::from_slice(body)?;
    if review.api_version != API_VERSION || review.kind != KIND {
        return Err(Malformed::Version(review.api_version, review.kind));
    }
    let request = review.request.ok_or(Malformed::NoRequest)?;
    let verdict = if creates_a_pod(&request) {
        if !request.object.is_object() {
            return Err(Malformed::NoObject(request.uid));
        }
        decide(
            settings,
            Candidate {
                pod: &request.object,
                namespace: &request.namespace,
                labels,
            },
        )
    } else {
        Verdict::NotAsked
    };
    let subject = subject(&request);
    let (response, outcome) = response(request.uid, verdict)?;
    let mut messages = response.warnings.clone();
    messages.extend(response.status.iter().map(|status| status.message.clone()));
    let body = serde_json::to_vec(&Reply {
        api_version: API_VERSION,
        kind: KIND,
        response,
    })?;
    Ok(Answer {
        body,
        outcome,
        subject,
        messages,
    })
}

/// Only pods, and only their creation: not a pod's subresources, not its updates.
fn creates_a_pod(request: &Request) -> bool {
    let Kind { group, kind } = &request.kind;
    request.operation == "CREATE"
        && group.is_empty()
        && kind == "Pod"
        && request
            .sub_resource
            .as_deref()
            .unwrap_or_default()
            .is_empty()
}

/// A pod that a controller creates has no name yet when the webhook sees it.
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
    format!("{} {}/{name}", request.kind.kind, request.namespace)
}

fn response(uid: String, verdict: Verdict) -> Result<(Response, Outcome), serde_json::Error> {
    let mut response = Response {
        uid,
        allowed: true,
        ..Response::default()
    };
    let outcome = match verdict {
        Verdict::NotAsked => Outcome::LeftAlone,
        Verdict::LeftAlone(warning) => {
            response.warnings = vec![warning];
            Outcome::LeftAlone
        }
        Verdict::Denied(message) => {
            response.allowed = false;
            response.status = Some(Status {
                code: 422,
                reason: "Invalid",
                message,
            });
            Outcome::Denied
        }
        Verdict::Injected(injection) => {
            response.warnings = injection.warnings;
            response.audit_annotations = BTreeMap::from([("proxy-injected", "true")]);
            if !injection.patch.0.is_empty() {
                response.patch_type = Some("JSONPatch");
                response.patch = Some(ByteString(serde_json::to_vec(&injection.patch)?));
            }
            Outcome::Injected
        }
    };
    Ok((response, outcome))
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    request: Option<Request>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Request {
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
}

#[derive(Deserialize)]
struct Kind {
    #[serde(default)]
    group: String,
    kind: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Reply {
    api_version: &'static str,
    kind: &'static str,
    response: Response,
}

#[derive(Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Response {
    uid: String,
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Status>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<ByteString>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    audit_annotations: BTreeMap<&'static str, &'static str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

#[derive(Serialize)]
struct Status {
    code: u16,
    reason: &'static str,
    message: String,
}
