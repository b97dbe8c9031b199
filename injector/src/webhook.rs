//! The HTTP endpoint of the webhook: `POST /pods` with an AdmissionReview for [`crate::review`], and
//! the labels of the namespace of a new pod.
//!
//! Limits the size of a body, the number of JSON values in it, the size of all bodies in memory,
//! and the time of a review.

use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use diy_mesh_control_plane::events::Events;
use diy_mesh_runtime::admission::{Admission, Class, Slot, network};
use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use tokio::time::{timeout, timeout_at};

use crate::config::Settings;
use crate::metrics::Metrics;
use crate::namespaces::Namespaces;
use crate::patch::NamespaceLabels;
use crate::review::{self, Outcome};
use crate::server::ClientAddress;

/// The path. Earlier releases, which read the labels of the namespace from the path, respond to it
/// with 404: no pod of a strict namespace gets a permissive proxy during an upgrade.
pub const PATH: &str = "/pods";
/// The start of the paths of earlier releases, whose webhook configurations may still be in effect.
/// The labels in these paths have no effect.
const EARLIER_PATHS: &str = "/inject";
/// Maximum size of a body. The API server accepts objects of up to 3 MiB, and a review contains
/// one.
pub const MAX_BODY_BYTES: usize = 4 * 1024 * 1024;
/// Memory for bodies is divided into blocks of this size, which a body takes as its bytes arrive.
const BLOCK_BYTES: usize = 64 * 1024;
/// Maximum number of blocks. Further bytes wait. Held by addresses: anyone may send reviews.
const MAX_BLOCKS: usize = 256;
/// Time in which a body arrives, its wait for blocks included. The API server sends it at once.
const BODY_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of JSON values in a body. A parsed value takes up to a hundred times the memory
/// of its text; a large pod has some thousand values.
const MAX_VALUES: usize = 100_000;
/// Timeout of a review, below the 5 seconds of the webhook configuration.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(4);

/// The state that all requests share.
pub struct Webhook {
    settings: Settings,
    namespaces: Namespaces,
    metrics: Arc<Metrics>,
    events: Events,
    blocks: Arc<Admission<IpAddr>>,
}

impl Webhook {
    /// A webhook that injects containers with these settings.
    pub fn new(
        settings: Settings,
        namespaces: Namespaces,
        metrics: Arc<Metrics>,
        events: Events,
    ) -> Self {
        Self {
            settings,
            namespaces,
            metrics,
            events,
            blocks: Admission::new(MAX_BLOCKS),
        }
    }

    /// Handles a request. Errors become responses.
    pub async fn handle<B>(&self, request: Request<B>) -> Response<Full<Bytes>>
    where
        B: Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
    {
        let path = request.uri().path();
        if path != PATH && !path.starts_with(EARLIER_PATHS) {
            return error_response(
                StatusCode::NOT_FOUND,
                format!("unknown path: send POST {PATH}\n"),
            );
        }
        if request.method() != Method::POST {
            let mut response = error_response(
                StatusCode::METHOD_NOT_ALLOWED,
                format!("method not allowed: send POST {PATH}\n"),
            );
            response
                .headers_mut()
                .insert(ALLOW, HeaderValue::from_static("POST"));
            return response;
        }
        let started = Instant::now();
        let client = request.extensions().get().copied();
        let ClientAddress(client) = client.unwrap_or_default();
        let reviewed = timeout(REVIEW_TIMEOUT, self.review(request.into_body(), client))
            .await
            .unwrap_or(Err(Error::Timeout));
        let elapsed = started.elapsed().as_secs_f64();
        self.metrics.duration.observe(elapsed);
        reviewed.unwrap_or_else(|error| {
            self.metrics.errors.inc();
            tracing::warn!(%error, "review failed");
            error_response(error.status(), format!("{error}\n"))
        })
    }

    async fn review<B>(&self, body: B, client: IpAddr) -> Result<Response<Full<Bytes>>, Error>
    where
        B: Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
    {
        let deadline = tokio::time::Instant::now() + BODY_TIMEOUT;
        let slow = |_| Error::SlowBody;
        let holder = [network(client)];
        let first = timeout_at(deadline, self.blocks.acquire(&holder)).await;
        let first = first.map_err(slow)?;
        let reviewed = pin!(async {
            let read = timeout_at(deadline, self.read(body, &holder)).await;
            let (body, _blocks) = read.map_err(slow)??;
            first.set(Class::Idle);
            self.review_body(&body, client).await
        });
        // Others take the first block of a body, and with it all of the body.
        first.run(reviewed).await.unwrap_or(Err(Error::Overloaded))
    }

    async fn review_body(
        &self,
        body: &[u8],
        client: IpAddr,
    ) -> Result<Response<Full<Bytes>>, Error> {
        let request = review::decode(body)?;
        let labels = match request.namespace_of_new_pod() {
            Some(namespace) => self.namespaces.labels(namespace, client).await,
            None => Ok(NamespaceLabels::default()),
        };
        let reviewed = review::review(&self.settings, request, labels)?;
        let (subject, messages) = (&reviewed.subject, reviewed.messages.join("; "));
        match reviewed.outcome {
            Outcome::Injected => tracing::info!(%subject, %messages, "injected"),
            Outcome::Denied => tracing::warn!(%subject, %messages, "denied"),
            Outcome::LeftAlone => tracing::info!(%subject, %messages, "skipped"),
        }
        if let Some(object) = reviewed.concerned.filter(|_| !messages.is_empty()) {
            let reason = match reviewed.outcome {
                Outcome::Injected => "InjectionWarning",
                Outcome::Denied => "AdmissionDenied",
                Outcome::LeftAlone => "NotInjected",
            };
            self.events.warn(object, reason, "Inject", &messages);
        }
        self.metrics.outcome(reviewed.outcome);
        let mut response = Response::new(Full::from(reviewed.body));
        response
            .headers_mut()
            .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Ok(response)
    }

    /// Reads a body, and returns the blocks of memory that it takes beside its first one.
    async fn read<B>(&self, body: B, holder: &[IpAddr]) -> Result<(Vec<u8>, Blocks), Error>
    where
        B: Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
    {
        if body.size_hint().lower() > MAX_BODY_BYTES as u64 {
            return Err(Error::BodyTooLarge);
        }
        let (mut body, mut bytes, mut blocks) = (pin!(body), Vec::new(), Vec::new());
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| Error::IncompleteBody(error.into().to_string()))?;
            let data = frame.into_data().unwrap_or_default();
            let size = bytes.len() + data.len();
            if size > MAX_BODY_BYTES {
                return Err(Error::BodyTooLarge);
            }
            while blocks.len() + 1 < size.div_ceil(BLOCK_BYTES) {
                let block = self.blocks.acquire(holder).await;
                block.set(Class::InUse);
                blocks.push(block);
            }
            bytes.extend_from_slice(&data);
        }
        let is_separator = |byte: &&u8| matches!(byte, b',' | b'[' | b'{');
        if bytes.iter().filter(is_separator).count() > MAX_VALUES {
            return Err(Error::TooManyValues);
        }
        Ok((bytes, blocks))
    }
}

type Blocks = Vec<Slot<IpAddr>>;

/// The webhook as a handler for the HTTP server.
pub fn handler(webhook: Arc<Webhook>) -> impl Fn(Request<Incoming>) -> HandlerFuture + Clone {
    move |request| {
        let webhook = webhook.clone();
        Box::pin(async move { webhook.handle(request).await })
    }
}

/// The future of a response.
pub type HandlerFuture = std::pin::Pin<Box<dyn Future<Output = Response<Full<Bytes>>> + Send>>;

/// A request without a review.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("the body is larger than {MAX_BODY_BYTES} bytes")]
    BodyTooLarge,
    #[error("the body has more than {MAX_VALUES} values")]
    TooManyValues,
    #[error("the body ended early: {0}")]
    IncompleteBody(String),
    #[error("the body did not arrive within {} seconds", BODY_TIMEOUT.as_secs())]
    SlowBody,
    #[error(
        "the memory for bodies is in use, and the clients at this address have their share of it"
    )]
    Overloaded,
    #[error("the review took longer than {} seconds", REVIEW_TIMEOUT.as_secs())]
    Timeout,
    #[error(transparent)]
    Malformed(#[from] review::Error),
}

impl Error {
    fn status(&self) -> StatusCode {
        match self {
            Self::BodyTooLarge | Self::TooManyValues => StatusCode::PAYLOAD_TOO_LARGE,
            Self::IncompleteBody(_) | Self::Malformed(_) => StatusCode::BAD_REQUEST,
            Self::SlowBody | Self::Overloaded | Self::Timeout => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

fn error_response(status: StatusCode, message: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(message));
    *response.status_mut() = status;
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use http_body_util::Empty;
    use hyper::body::Frame;
    use serde_json::json;

    use clap::Parser;

    use crate::config::{Config, Flags};
    use crate::namespaces::Source;

    fn webhook() -> Webhook {
        let images = [
            "--image-to-deploy-proxy=p",
            "--image-to-deploy-proxy-init=i",
        ];
        let flags = Flags::parse_from(["injector"].iter().chain(&images));
        let settings = Config::from_flags(flags).expect("valid flags").settings;
        let namespaces = Namespaces::new(Source::Folder("/nowhere".into()));
        Webhook::new(settings, namespaces, Arc::default(), Events::new().0)
    }

    fn post<B>(body: B) -> Request<B> {
        Request::post(PATH).body(body).expect("a request")
    }

    async fn text(response: Response<Full<Bytes>>) -> String {
        let body = response
            .into_body()
            .collect()
            .await
            .expect("a full body")
            .to_bytes();
        String::from_utf8(body.to_vec()).expect("text")
    }

    #[tokio::test]
    async fn rejects_malformed_reviews_with_reason() {
        for (body, why) in [
            ("", "the body is not an AdmissionReview: EOF"),
            ("{", "the body is not an AdmissionReview: EOF"),
            ("[]", "the body is not an AdmissionReview: invalid length"),
            (
                "{}",
                "expected apiVersion admission.k8s.io/v1 and kind AdmissionReview, got \"\" and \"\"",
            ),
            (
                r#"{"apiVersion":"admission.k8s.io/v1beta1","kind":"AdmissionReview"}"#,
                "got \"admission.k8s.io/v1beta1\"",
            ),
            (
                r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}"#,
                "has no request",
            ),
            (
                r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","kind":{"kind":"Pod"},"operation":"CREATE"}}"#,
                "request \"u\" of the AdmissionReview is for a pod, but its object is missing",
            ),
        ] {
            let response = webhook().handle(post(Full::from(body))).await;
            assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{body}");
            let answer = text(response).await;
            assert!(answer.contains(why), "{body}: {answer}");
        }
    }

    #[tokio::test]
    async fn queues_events_about_the_controllers_of_pods() {
        let (events, mut queue) = Events::new();
        let webhook = Webhook {
            events,
            ..webhook()
        };
        let mut review = json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": {"uid": "u", "kind": {"kind": "Pod"}, "namespace": "shop", "operation": "CREATE", "object": {
                "metadata": {
                    "generateName": "web-", "annotations": {"diy-service-mesh/inject": "yes"},
                    "ownerReferences": [
                        {"apiVersion": "example.com/v1", "kind": "App", "name": "app", "uid": "1"},
                        {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "2", "controller": true},
                    ],
                },
                "spec": {"containers": []},
            }},
        });
        webhook.handle(post(Full::from(review.to_string()))).await;
        let (object, event) = queue.try_recv().expect("an event");
        assert_eq!(
            (
                object.kind.as_deref(),
                object.uid.as_deref(),
                object.namespace.as_deref()
            ),
            (Some("ReplicaSet"), Some("2"), Some("shop"))
        );
        assert_eq!(event.reason, "NotInjected");
        assert!(event.note.is_some_and(|note| note.contains("is \"yes\"")));

        review["request"]["dryRun"] = json!(true);
        webhook.handle(post(Full::from(review.to_string()))).await;
        assert!(queue.try_recv().is_none(), "a dry run has no side effect");
        review["request"]["dryRun"] = json!(false);
        review["request"]["object"]["metadata"]["annotations"]["diy-service-mesh/inject"] =
            json!("false");
        webhook.handle(post(Full::from(review.to_string()))).await;
        assert!(queue.try_recv().is_none(), "there is no message");
    }

    #[tokio::test]
    async fn names_of_any_client_are_bounded_and_add_no_lines_and_no_paths() {
        let (events, mut queue) = Events::new();
        let webhook = Webhook {
            events,
            ..webhook()
        };
        let review = |namespace: &str, name: &str, operation: &str| {
            json!({
                "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
                "request": {
                    "uid": "u", "kind": {"kind": "Pod"}, "namespace": namespace, "operation": operation,
                    "subResource": "ephemeralcontainers",
                    "object": {"metadata": {"name": name, "annotations": {"diy-service-mesh/inject": "yes"}}},
                },
            })
        };
        for namespace in ["", "a/b", "a/../b", "a\nb", "A"] {
            let review = review(namespace, "web", "UPDATE");
            let response = webhook.handle(post(Full::from(review.to_string()))).await;
            assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{namespace}");
        }
        let long = format!("web\n{}", "x".repeat(1_000_000));
        let mut created = review("shop", &long, "CREATE");
        created["request"]["subResource"] = json!(null);
        let request = review::decode(created.to_string().as_bytes()).expect("a review");
        let labels = Ok(NamespaceLabels::default());
        let reviewed = review::review(&webhook.settings, request, labels).expect("a response");
        let expected = format!("Pod shop/web\\n{}", "x".repeat(249));
        assert_eq!(reviewed.subject, expected);
        webhook.handle(post(Full::from(created.to_string()))).await;
        let (object, _) = queue.try_recv().expect("an event");
        assert_eq!(object.name, None);
    }

    #[tokio::test]
    async fn serves_only_post_requests_to_its_paths() {
        let get = Request::get(PATH).body(Empty::new()).expect("a request");
        let response = webhook().handle(get).await;
        assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED);
        assert_eq!(response.headers()[ALLOW], "POST");
        for (path, expected) in [
            ("/", StatusCode::NOT_FOUND),
            ("/pods/other", StatusCode::NOT_FOUND),
            ("/inject", StatusCode::BAD_REQUEST),
            ("/inject/enabled-strict-namespace", StatusCode::BAD_REQUEST),
        ] {
            let empty = Request::post(path).body(Empty::new()).expect("a request");
            assert_eq!(webhook().handle(empty).await.status(), expected, "{path}");
        }
    }

    #[tokio::test]
    async fn rejects_large_content_length_without_reading() {
        let response = webhook()
            .handle(post(Full::from(vec![b' '; MAX_BODY_BYTES + 1])))
            .await;
        assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
    }

    #[tokio::test]
    async fn rejects_too_many_values_without_parsing() {
        let body = format!("[{}0]", "{\"a\":0},".repeat(MAX_VALUES));
        assert!(body.len() < MAX_BODY_BYTES);
        let response = webhook().handle(post(Full::from(body))).await;
        assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
        assert_eq!(
            text(response).await,
            "the body has more than 100000 values\n"
        );
    }

    /// An endless body of unknown length.
    struct Endless;

    impl Body for Endless {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[b' '; 65536])))))
        }
    }

    #[tokio::test]
    async fn rejects_endless_body_at_the_limit() {
        assert_eq!(
            webhook().handle(post(Endless)).await.status(),
            StatusCode::PAYLOAD_TOO_LARGE
        );
    }

    /// A body of unknown length that never sends a byte.
    struct Silent;

    impl Body for Silent {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Pending
        }
    }

    #[tokio::test(start_paused = true)]
    async fn times_out_silent_clients_and_releases_their_buffer_space() {
        let webhook = webhook();
        let silent = (0..100).map(|_| webhook.handle(post(Silent)));
        for response in futures::future::join_all(silent).await {
            assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        }
        assert_eq!(webhook.blocks.used(&[]), 0);
        assert_eq!(
            webhook.handle(post(Full::from("{}"))).await.status(),
            StatusCode::BAD_REQUEST
        );
    }

    /// A body that sends a megabyte and then stalls.
    struct Stalled(bool);

    impl Body for Stalled {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            let data = || Ok(Frame::data(Bytes::from(vec![b' '; 1024 * 1024])));
            if std::mem::replace(&mut self.0, true) {
                Poll::Pending
            } else {
                Poll::Ready(Some(data()))
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn stalled_bodies_of_one_client_leave_memory_to_others() {
        let webhook = webhook();
        let stalled = (0..100).map(|_| webhook.handle(post(Stalled(false))));
        let honest = async {
            tokio::task::yield_now().await;
            let begun = tokio::time::Instant::now();
            let mut review = post(Full::from("{}"));
            let other = ClientAddress([10, 0, 0, 1].into());
            review.extensions_mut().insert(other);
            let status = webhook.handle(review).await.status();
            (status, begun.elapsed())
        };
        let (stalled, honest) = tokio::join!(futures::future::join_all(stalled), honest);
        assert_eq!(honest, (StatusCode::BAD_REQUEST, Duration::ZERO));
        let mut late = 0;
        for response in stalled {
            late +=
                usize::from(text(response).await == "the body did not arrive within 2 seconds\n");
        }
        assert_eq!(late, 99, "one has lost its memory");
    }
}
