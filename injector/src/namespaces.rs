//! The labels and annotations of the namespaces of new pods. Each is read when a pod needs it, and
//! never cached: a label applies to the next pod, and an error rejects the pod.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use diy_mesh_runtime::admission::{Admission, network};
use diy_mesh_runtime::error_chain;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Client};
use tokio::time::timeout;

use crate::config;
use crate::kubernetes;
use crate::patch::NamespaceLabels;
use crate::publish;

/// Timeout of a read, well below the timeout of a review.
const READ_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of reads at a time. Bounds the connections to the Kubernetes API. Held by
/// addresses: anyone may send reviews.
const MAX_READS: usize = 64;

/// The namespaces of the cluster.
pub struct Namespaces {
    source: Source,
    reads: Arc<Admission<IpAddr>>,
}

/// The source of namespaces.
#[derive(Debug)]
pub enum Source {
    /// The Kubernetes API.
    Kubernetes(Box<Api<Namespace>>),
    /// A folder with one Namespace per file, `NAME.json`.
    Folder(PathBuf),
}

impl Source {
    fn kubernetes(client: Client) -> Self {
        Self::Kubernetes(Box::new(Api::all(client)))
    }
}

impl Namespaces {
    /// The namespaces in a folder, or the namespaces of the Kubernetes API.
    pub async fn open(folder: Option<&Path>) -> Result<Self, publish::Error> {
        let source = match folder {
            Some(folder) => Source::Folder(folder.to_owned()),
            None => Source::kubernetes(kubernetes::client().await?),
        };
        Ok(Self::new(source))
    }

    /// The namespaces of a source.
    pub fn new(source: Source) -> Self {
        let reads = Admission::new(MAX_READS);
        Self { source, reads }
    }

    /// Reads the labels of a namespace for a client, or returns the reason for a rejection.
    pub async fn labels(&self, name: &str, client: IpAddr) -> Result<NamespaceLabels, String> {
        let holder = [network(client)];
        let read = self.reads.run(&holder, || self.read(name));
        let read = timeout(READ_TIMEOUT, read).await;
        let timed_out = || format!("no response within {} seconds", READ_TIMEOUT.as_secs());
        let metadata = read.unwrap_or_else(|_| Err(timed_out())).map_err(|reason| {
            format!("cannot read the labels of namespace {name:?}, which decide about injection and strictness: {reason}; create the pod again, as its controller does, and run `mesh check` if it fails again")
        })?;
        Ok(NamespaceLabels::of_metadata(&metadata))
    }

    async fn read(&self, name: &str) -> Result<ObjectMeta, String> {
        config::namespace(name)?;
        match &self.source {
            // A read without a resource version is never older than the label that the API server
            // has confirmed.
            Source::Kubernetes(api) => {
                let namespace = api.get_metadata(name).await;
                let namespace = namespace.map_err(|error| error_chain(&error))?;
                Ok(namespace.metadata)
            }
            Source::Folder(folder) => {
                let file = folder.join(name).with_extension("json");
                let text = tokio::fs::read_to_string(&file).await;
                let namespace = text.and_then(|text| Ok(serde_json::from_str(&text)?));
                let namespace: Namespace =
                    namespace.map_err(|error| format!("{}: {error}", file.display()))?;
                Ok(namespace.metadata)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::annotations::{INBOUND, INJECT};

    use std::future::pending;

    use http::{Request, Response, StatusCode};
    use kube::client::Body;
    use serde_json::{Value, json};

    const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    /// The namespaces of an API server that gives all requests the same response.
    fn api(status: u16, response: Value) -> Namespaces {
        let service = tower::service_fn(move |request: Request<Body>| {
            assert_eq!(request.uri(), "/api/v1/namespaces/shop");
            let accepted = request.headers()["accept"].to_str().expect("text");
            assert!(accepted.contains("as=PartialObjectMetadata"), "{accepted}");
            let mut answer = Response::new(Body::from(response.to_string().into_bytes()));
            *answer.status_mut() = StatusCode::from_u16(status).expect("a status");
            async { Ok::<_, std::convert::Infallible>(answer) }
        });
        Namespaces::new(Source::kubernetes(Client::new(service, "default")))
    }

    #[tokio::test]
    async fn reads_labels_from_kubernetes() {
        for (inject, inbound, enabled, strict) in [
            ("enabled", "strict", true, true),
            ("enabled", "permissive", true, false),
            ("true", "Strict", false, false),
        ] {
            let labels = json!({INJECT: inject, INBOUND: inbound});
            let namespace = json!({
                "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
                "metadata": {"name": "shop", "labels": labels},
            });
            let labels = api(200, namespace).labels("shop", CLIENT).await;
            let other_mesh = None;
            let expected = NamespaceLabels {
                enabled,
                strict,
                other_mesh,
            };
            assert_eq!(labels, Ok(expected));
        }
    }

    #[tokio::test]
    async fn annotations_of_a_namespace_request_another_mesh_only() {
        let annotations =
            json!({INJECT: "enabled", INBOUND: "strict", "linkerd.io/inject": "enabled"});
        let namespace = json!({
            "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
            "metadata": {"name": "shop", "annotations": annotations},
        });
        let labels = api(200, namespace).labels("shop", CLIENT).await;
        let labels = labels.expect("a response");
        assert!(labels.other_mesh.is_some());
        let expected = NamespaceLabels {
            other_mesh: labels.other_mesh,
            ..NamespaceLabels::default()
        };
        assert_eq!(labels, expected);
    }

    #[tokio::test]
    async fn errors_name_the_namespace_the_cause_and_the_remedy() {
        let status = json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden", "code": 403,
            "message": "namespaces \"shop\" is forbidden",
        });
        let error = api(403, status)
            .labels("shop", CLIENT)
            .await
            .expect_err("forbidden");
        for part in ["namespace \"shop\"", "is forbidden", "create the pod again"] {
            assert!(error.contains(part), "{error}");
        }
        let error = api(200, json!({})).labels("../shop", CLIENT).await;
        assert!(error.is_err_and(|error| error.contains("expected a namespace")));
    }

    #[tokio::test(start_paused = true)]
    async fn api_server_that_does_not_respond_causes_an_error() {
        let service = tower::service_fn(|_: Request<Body>| {
            pending::<Result<Response<Body>, std::convert::Infallible>>()
        });
        let source = Source::kubernetes(Client::new(service, "default"));
        let namespaces = Namespaces::new(source);
        let error = namespaces
            .labels("shop", CLIENT)
            .await
            .expect_err("no response");
        assert!(error.contains("no response within 2 seconds"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn reads_of_one_client_leave_room_for_others() {
        // Never responds about one namespace.
        let service = tower::service_fn(async |request: Request<Body>| {
            if request.uri().path().ends_with("/slow") {
                pending::<()>().await;
            }
            let namespace = json!({
                "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
                "metadata": {"name": "shop"},
            });
            let body = Body::from(namespace.to_string().into_bytes());
            Ok::<_, std::convert::Infallible>(Response::new(body))
        });
        let source = Source::kubernetes(Client::new(service, "default"));
        let namespaces = Arc::new(Namespaces::new(source));
        let flood: Vec<_> = (0..10_000)
            .map(|_| {
                let namespaces = namespaces.clone();
                let hostile = IpAddr::from([10, 0, 0, 66]);
                tokio::spawn(async move { namespaces.labels("slow", hostile).await })
            })
            .collect();
        tokio::task::yield_now().await;
        let labels = namespaces.labels("shop", CLIENT).await;
        assert_eq!(labels, Ok(NamespaceLabels::default()));
        for read in flood {
            read.await.unwrap().expect_err("no response");
        }
    }
}
