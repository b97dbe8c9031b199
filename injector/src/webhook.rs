//! The webhook over HTTP: `POST /inject` with an AdmissionReview, answered by [`crate::review`]. The path says what the labels of the
//! pod's namespace ask for, so that the injector needs to read no namespaces.
//!
//! It bounds what callers can make it hold: the size of one body, before and after parsing, of all bodies together, and the time
//! that one takes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Body, Incoming};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::metrics::Metrics;
use crate::patch::{NamespaceLabels, Settings};
use crate::review::{self, Outcome};

/// The path for pods that ask for the mesh themselves.
pub const PATH: &str = "/inject";
/// The path for pods whose namespace asks for the mesh. (A query would be nicer; webhook configurations take none.)
pub const PATH_FOR_ENABLED_NAMESPACES: &str = "/inject/enabled-namespace";
/// The path for pods that ask for the mesh themselves, in a namespace that wants it strict.
pub const PATH_FOR_STRICT_NAMESPACES: &str = "/inject/strict-namespace";
/// The path for pods whose namespace asks for the mesh, and wants it strict.
pub const PATH_FOR_ENABLED_STRICT_NAMESPACES: &str = "/inject/enabled-strict-namespace";
/// The API server takes objects of up to 3 MiB; a review holds one and little more.
pub const BODY_LIMIT: usize = 4 * 1024 * 1024;
/// All bodies at hand together, in KiB. Who finds no room waits for it.
const BODIES_LIMIT: usize = 16 * 1024;
/// Values in one body. Parsed, a value takes a hundred times the room of its text; a large pod has some thousand.
const VALUES_LIMIT: usize = 100_000;
/// The API server waits for 5 seconds.
const TIME_LIMIT: Duration = Duration::from_secs(4);

/// What every request needs.
#[derive(Debug)]
pub struct Webhook {
    settings: Settings,
    metrics: Arc<Metrics>,
    room: Semaphore,
}

impl Webhook {
    /// A webhook that injects what the settings say.
    pub fn new(settings: Settings, metrics: Arc<Metrics>) -> Self {
        Self {
            settings,
            metrics,
            room: Semaphore::new(BODIES_LIMIT),
        }
    }

    /// Answers one request. Never fails: a failure is an answer too.
    pub async fn handle<B>(&self, request: Request<B>) -> Response<Full<Bytes>>
    where
        B: Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
    {
        let Some(labels) = labels(request.uri().path()) else {
            return refusal(
                StatusCode::NOT_FOUND,
                format!("nothing here: the webhook is POST {PATH}\n"),
            );
        };
        if request.method() != Method::POST {
            let mut response = refusal(
                StatusCode::METHOD_NOT_ALLOWED,
                format!("the webhook is POST {PATH}\n"),
            );
            response
                .headers_mut()
                .insert(ALLOW, HeaderValue::from_static("POST"));
            return response;
        }
        let started = Instant::now();
        let answered = timeout(TIME_LIMIT, self.review(request.into_body(), labels))
            .await
            .unwrap_or(Err(Failure::Late));
        self.metrics.duration(started.elapsed());
        answered.unwrap_or_else(|failure| {
            self.metrics.error();
            tracing::warn!(%failure, "review not answered");
            refusal(failure.status(), format!("{failure}\n"))
        })
    }

    async fn review<B>(
        &self,
        body: B,
        labels: NamespaceLabels,
    ) -> Result<Response<Full<Bytes>>, Failure>
    where
        B: Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
    {
        let (body, _room) = self.body(body).await?;
        let answer = review::answer(&self.settings, &body, labels)?;
        let (subject, messages) = (&answer.subject, answer.messages.join("; "));
        match answer.outcome {
            Outcome::Injected => tracing::info!(%subject, %messages, "injected"),
            Outcome::Denied => tracing::warn!(%subject, %messages, "denied"),
            Outcome::LeftAlone => tracing::info!(%subject, %messages, "left alone"),
        }
        self.metrics.outcome(answer.outcome);
        let mut response = Response::new(Full::from(answer.body));
        response
            .headers_mut()
            .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Ok(response)
    }

    /// Reads a body once there is room for it, and keeps the room for as long as the body is needed.
    async fn body<B>(&self, body: B) -> Result<(Bytes, tokio::sync::SemaphorePermit<'_>), Failure>
    where
        B: Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
    {
        let most = body.size_hint().upper().map_or(BODY_LIMIT, |size| {
            usize::try_from(size).unwrap_or(usize::MAX)
        });
        if most > BODY_LIMIT {
            return Err(Failure::TooLarge);
        }
        let kibibytes = u32::try_from(most / 1024 + 1).expect("the limit of a body fits");
        let room = self
            .room
            .acquire_many(kibibytes)
            .await
            .expect("the semaphore is never closed");
        let body = Limited::new(body, BODY_LIMIT)
            .collect()
            .await
            .map_err(|error| match error.downcast::<LengthLimitError>() {
                Ok(_) => Failure::TooLarge,
                Err(error) => Failure::Broken(error.to_string()),
            })?;
        let body = body.to_bytes();
        if body
            .iter()
            .filter(|byte| matches!(byte, b',' | b'[' | b'{'))
            .count()
            > VALUES_LIMIT
        {
            return Err(Failure::TooMany);
        }
        Ok((body, room))
    }
}

/// What a path says of the pod's namespace; none for a path that is not there.
pub fn labels(path: &str) -> Option<NamespaceLabels> {
    let (enabled, strict) = match path {
        PATH => (false, false),
        PATH_FOR_ENABLED_NAMESPACES => (true, false),
        PATH_FOR_STRICT_NAMESPACES => (false, true),
        PATH_FOR_ENABLED_STRICT_NAMESPACES => (true, true),
        _ => return None,
    };
    Some(NamespaceLabels { enabled, strict })
}

/// The handler for `server::serve`.
pub fn handler(webhook: Arc<Webhook>) -> impl Fn(Request<Incoming>) -> HandlerFuture + Clone {
    move |request| {
        let webhook = webhook.clone();
        Box::pin(async move { webhook.handle(request).await })
    }
}

/// The future of one answer.
pub type HandlerFuture = std::pin::Pin<Box<dyn Future<Output = Response<Full<Bytes>>> + Send>>;

/// Why a review got no answer. All of them are the caller's doing but the lateness, which may be either's.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("the body is larger than {BODY_LIMIT} bytes")]
    TooLarge,
    #[error("the body has more than {VALUES_LIMIT} values")]
    TooMany,
    #[error("the body ended early: {0}")]
    Broken(String),
    #[error("the review was not complete and answered within {} seconds", TIME_LIMIT.as_secs())]
    Late,
    #[error(transparent)]
    Malformed(#[from] review::Malformed),
}

impl Failure {
    fn status(&self) -> StatusCode {
        match self {
            Self::TooLarge | Self::TooMany => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Broken(_) | Self::Malformed(_) => StatusCode::BAD_REQUEST,
            Self::Late => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

fn refusal(status: StatusCode, message: String) -> Response<Full<Bytes>> {
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

    use crate::patch::ImagePullPolicy;

    fn webhook() -> Webhook {
        let settings = Settings {
            proxy_image: "proxy".into(),
            proxy_init_image: "init".into(),
            image_pull_policy: ImagePullPolicy::IfNotPresent,
            controller_address: "https://controller".into(),
            controller_identity: "spiffe://cluster.local/ns/service-mesh/sa/controller".into(),
            mesh_namespace: "service-mesh".into(),
        };
        Webhook::new(settings, Arc::default())
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
    async fn what_is_no_review_is_a_bad_request_that_says_why() {
        for (body, why) in [
            ("", "the body is no AdmissionReview: EOF"),
            ("{", "the body is no AdmissionReview: EOF"),
            ("[]", "the body is no AdmissionReview: invalid length"),
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
                "request \"u\" creates a pod, and its object is missing",
            ),
        ] {
            let response = webhook().handle(post(Full::from(body))).await;
            assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{body}");
            let answer = text(response).await;
            assert!(answer.contains(why), "{body}: {answer}");
        }
    }

    #[tokio::test]
    async fn only_post_inject_is_there() {
        let get = Request::get(PATH).body(Empty::new()).expect("a request");
        let response = webhook().handle(get).await;
        assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED);
        assert_eq!(response.headers()[ALLOW], "POST");
        let elsewhere = Request::post("/").body(Empty::new()).expect("a request");
        assert_eq!(
            webhook().handle(elsewhere).await.status(),
            StatusCode::NOT_FOUND
        );
    }

    #[tokio::test]
    async fn a_body_that_announces_too_much_is_refused_unread() {
        let response = webhook()
            .handle(post(Full::from(vec![b' '; BODY_LIMIT + 1])))
            .await;
        assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
    }

    #[tokio::test]
    async fn a_body_that_would_blow_up_when_parsed_is_refused_unparsed() {
        let body = format!("[{}0]", "{\"a\":0},".repeat(VALUES_LIMIT));
        assert!(body.len() < BODY_LIMIT);
        let response = webhook().handle(post(Full::from(body))).await;
        assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
        assert_eq!(
            text(response).await,
            "the body has more than 100000 values\n"
        );
    }

    /// Frames without end, of no announced length.
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
    async fn a_body_that_never_ends_is_cut_at_the_limit() {
        assert_eq!(
            webhook().handle(post(Endless)).await.status(),
            StatusCode::PAYLOAD_TOO_LARGE
        );
    }

    /// A body of unknown length whose first byte never comes.
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
    async fn silent_callers_are_let_go_and_their_room_is_free_again() {
        let webhook = webhook();
        let silent = (0..100).map(|_| webhook.handle(post(Silent)));
        for response in futures::future::join_all(silent).await {
            assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        }
        assert_eq!(webhook.room.available_permits(), BODIES_LIMIT);
        assert_eq!(
            webhook.handle(post(Full::from("{}"))).await.status(),
            StatusCode::BAD_REQUEST
        );
    }
}
