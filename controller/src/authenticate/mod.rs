//! Authentication of clients by bearer tokens: a token in, a [`Caller`] out. All RPCs except the
//! health check require it. RPCs that list pods also require the right to list pods.
//!
//! Results are cached for a short time by the hash of the token. Tokens are never logged, stored or
//! part of a message.

mod access;
pub mod jwks;
mod precheck;
mod tokenreview;

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use aws_lc_rs::digest;
use diy_mesh_control_plane::clock::Clock;
use diy_mesh_proto::TOKEN_AUDIENCE;
use diy_mesh_runtime::admission::{Admission, network};
use tonic::Status;
use tonic::metadata::MetadataMap;

use crate::metrics::Metrics;
use crate::object::PodRef;
pub use access::Namespaces;
pub use jwks::Jwks;

/// Tokens of service accounts have one or two kB.
const MAX_TOKEN_BYTES: usize = 16 * 1024;
/// Maximum cache time of an accepted token.
const ACCEPTED_TTL: Duration = Duration::from_secs(60);
/// Cache time of a rejected token, which may become valid (a new key, a clock that is behind).
const REFUSED_TTL: Duration = Duration::from_secs(3);
/// Cache time of the access of a user, so that a withdrawn permission has an effect soon.
const ACCESS_TTL: Duration = Duration::from_secs(10);
/// The capacity of each cache.
const MAX_CACHE_ENTRIES: usize = 10_000;
/// More reviews wait. They are held by addresses, so that a flood of one does not delay others.
const MAX_CONCURRENT_REVIEWS: usize = 32;
/// Time for a review, including its wait for a slot.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(5);

/// An authenticated client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The user name, for example `system:serviceaccount:shop:web`.
    pub user: Arc<str>,
    /// The pod that the token is bound to, if any.
    pub pod: Option<PodRef>,
}

impl PodRef {
    /// The pod of a service account's token, in the namespace of the account. `None` if a part is
    /// missing.
    fn of(user: &str, name: Option<&str>, uid: Option<&str>) -> Option<PodRef> {
        let namespace = access::namespace(user)?;
        let (name, uid) = (
            name.filter(|name| !name.is_empty())?,
            uid.filter(|uid| !uid.is_empty())?,
        );
        Some(PodRef {
            namespace: namespace.into(),
            name: name.into(),
            uid: uid.into(),
        })
    }
}

/// Why a call is rejected.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AuthError {
    /// The `authorization` metadata is missing.
    #[error("the call carries no token")]
    Missing,
    /// The `authorization` metadata is not a bearer token.
    #[error("the `authorization` metadata is not `Bearer TOKEN`")]
    NoBearer,
    /// The token is invalid.
    #[error("the token is refused: {0}")]
    Refused(Arc<str>),
    /// The token cannot be verified at the moment, or the access of its account.
    #[error("the token cannot be checked now: {0}")]
    Unreachable(Arc<str>),
    /// The account may not list pods.
    #[error(
        "{0} may not list pods, neither in all namespaces nor in its own; grant it that, or use the \
         token of the service account mesh-viewer in the namespace of the mesh"
    )]
    Forbidden(Arc<str>),
}

impl From<AuthError> for Status {
    fn from(error: AuthError) -> Status {
        match error {
            AuthError::Unreachable(_) => Status::unavailable(format!("{error}; try again")),
            AuthError::Forbidden(_) => Status::permission_denied(error.to_string()),
            _ => Status::unauthenticated(format!(
                "{error}. Send `authorization: Bearer TOKEN` with a service account token of the audience {TOKEN_AUDIENCE:?} \
                 (in a pod: a projected token; by hand: kubectl create token ACCOUNT --audience {TOKEN_AUDIENCE})"
            )),
        }
    }
}

fn refused(reason: &str) -> AuthError {
    AuthError::Refused(reason.into())
}

fn wrong_audience() -> String {
    format!("its audience is not {TOKEN_AUDIENCE:?}")
}

/// The result of a successful review.
#[derive(Clone, Debug, PartialEq)]
struct Accepted {
    caller: Caller,
    /// The expiry of the token, in seconds since 1970, if known.
    expires: Option<u64>,
}

/// The authority on tokens and on the access of accounts.
pub enum Verifier {
    /// The Kubernetes API server.
    Kubernetes(kube::Client),
    /// A file with the public keys of the token issuer, and the user that may list all pods.
    Jwks(Box<Jwks>, String),
}

/// Verifies the tokens of calls.
pub struct Authenticator {
    verifier: Verifier,
    clock: Clock,
    reviews: Arc<Admission<Option<IpAddr>>>,
    cache: Mutex<ResultCache>,
    metrics: Arc<Metrics>,
}

impl Authenticator {
    /// An authenticator that uses `verifier`.
    pub fn new(verifier: Verifier, clock: Clock, metrics: Arc<Metrics>) -> Authenticator {
        Authenticator {
            verifier,
            clock,
            reviews: Admission::new(MAX_CONCURRENT_REVIEWS),
            cache: Mutex::default(),
            metrics,
        }
    }

    /// The sender of a call with this metadata, from this address.
    pub async fn caller(
        &self,
        metadata: &MetadataMap,
        address: Option<IpAddr>,
    ) -> Result<Caller, AuthError> {
        self.count(match bearer(metadata) {
            Ok(token) => self.check(token, address).await,
            Err(error) => Err(error),
        })
    }

    /// The sender of a call with this token in its message, from this address.
    pub async fn caller_by_token(
        &self,
        token: &str,
        address: Option<IpAddr>,
    ) -> Result<Caller, AuthError> {
        self.count(match token {
            "" => Err(AuthError::Missing),
            token => self.check(token, address).await,
        })
    }

    fn count(&self, result: Result<Caller, AuthError>) -> Result<Caller, AuthError> {
        match &result {
            Ok(_) => &self.metrics.calls_accepted,
            Err(AuthError::Unreachable(_)) => &self.metrics.calls_unchecked,
            Err(_) => &self.metrics.calls_refused,
        }
        .inc();
        result
    }

    async fn check(&self, token: &str, address: Option<IpAddr>) -> Result<Caller, AuthError> {
        if token.len() > MAX_TOKEN_BYTES {
            let reason = format!("it is longer than {MAX_TOKEN_BYTES} bytes");
            return Err(refused(&reason));
        }
        if let Verifier::Kubernetes(_) = self.verifier {
            precheck::check(token, self.clock.now())?;
        }
        let hash = hash(token);
        if let Some(result) = self.cache().get(&hash, Instant::now()) {
            return result;
        }
        let review = || async {
            // The same token may have been reviewed during the wait.
            let cached = self.cache().get(&hash, Instant::now());
            match cached {
                Some(result) => result,
                None => self.review(token, hash).await,
            }
        };
        let begun = Instant::now();
        let result = self.within_time(address, review).await;
        let reviews = &self.metrics.token_reviews;
        reviews.observe(begun.elapsed().as_secs_f64());
        result
    }

    async fn review(&self, token: &str, hash: TokenHash) -> Result<Caller, AuthError> {
        let result = match &self.verifier {
            Verifier::Kubernetes(client) => tokenreview::review(client, token).await,
            Verifier::Jwks(keys, _) => keys.verify(token),
        };
        let (now, time) = (Instant::now(), self.clock.now());
        match &result {
            Ok(Accepted { caller, expires }) => {
                let until = now + cache_ttl(*expires, time);
                self.cache().accepted.put(hash, caller.clone(), until, now);
            }
            Err(AuthError::Refused(reason)) => {
                let until = now + REFUSED_TTL;
                self.cache().refused.put(hash, reason.clone(), until, now);
            }
            Err(_) => {}
        }
        result.map(|accepted| accepted.caller)
    }

    /// The namespaces whose pods the sender of a call from this address may list.
    pub async fn namespaces(
        &self,
        user: &Arc<str>,
        address: Option<IpAddr>,
    ) -> Result<Namespaces, AuthError> {
        let forbidden = || AuthError::Forbidden(user.clone());
        let client = match &self.verifier {
            Verifier::Kubernetes(client) => client,
            Verifier::Jwks(_, viewer) => {
                return Namespaces::of_account(user, viewer).ok_or_else(forbidden);
            }
        };
        let key = hash(user);
        let cached = self.cache().namespaces.get(&key, Instant::now());
        if let Some(namespaces) = cached {
            return namespaces.ok_or_else(forbidden);
        }
        let namespaces = self
            .within_time(address, || access::review(client, user))
            .await?;
        let now = Instant::now();
        let until = now + ACCESS_TTL;
        self.cache()
            .namespaces
            .put(key, namespaces.clone(), until, now);
        namespaces.ok_or_else(forbidden)
    }

    /// A request to the API server, in a slot of this address.
    async fn within_time<T, F: Future<Output = Result<T, AuthError>>>(
        &self,
        address: Option<IpAddr>,
        review: impl Fn() -> F,
    ) -> Result<T, AuthError> {
        let holder = [address.map(network)];
        let reviewed = self.reviews.run(&holder, review);
        let result = tokio::time::timeout(REVIEW_TIMEOUT, reviewed).await;
        result.unwrap_or_else(|_| {
            let reason = format!("no answer within {} s", REVIEW_TIMEOUT.as_secs());
            Err(AuthError::Unreachable(reason.into()))
        })
    }

    fn cache(&self) -> MutexGuard<'_, ResultCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The cache time of an accepted token, which ends with the token.
fn cache_ttl(expires: Option<u64>, now: SystemTime) -> Duration {
    let expires = expires.map(Duration::from_secs);
    match expires.and_then(|expires| SystemTime::UNIX_EPOCH.checked_add(expires)) {
        Some(end) => ACCEPTED_TTL.min(end.duration_since(now).unwrap_or_default()),
        None => ACCEPTED_TTL,
    }
}

fn bearer(metadata: &MetadataMap) -> Result<&str, AuthError> {
    let value = metadata.get("authorization").ok_or(AuthError::Missing)?;
    let value = value.to_str().map_err(|_| AuthError::NoBearer)?;
    let (scheme, token) = value.split_once(' ').ok_or(AuthError::NoBearer)?;
    let token = token.trim();
    if scheme.eq_ignore_ascii_case("bearer") && !token.is_empty() {
        Ok(token)
    } else {
        Err(AuthError::NoBearer)
    }
}

type TokenHash = [u8; digest::SHA256_OUTPUT_LEN];

fn hash(text: &str) -> TokenHash {
    let digest = digest::digest(&digest::SHA256, text.as_bytes());
    let bytes = digest.as_ref().try_into();
    bytes.expect("a SHA-256 digest has 32 bytes")
}

/// Results by token. The caches are separate, so that invalid tokens cannot evict valid ones.
#[derive(Default)]
struct ResultCache {
    accepted: Cache<Caller>,
    refused: Cache<Arc<str>>,
    /// By user. `None`: the user may not list pods.
    namespaces: Cache<Option<Namespaces>>,
}

impl ResultCache {
    fn get(&self, hash: &TokenHash, now: Instant) -> Option<Result<Caller, AuthError>> {
        let accepted = self.accepted.get(hash, now).map(Ok);
        let refused = || self.refused.get(hash, now);
        accepted.or_else(|| refused().map(|reason| Err(AuthError::Refused(reason))))
    }
}

/// A bounded map with expiring values. The oldest entry is evicted first.
struct Cache<T> {
    entries: HashMap<TokenHash, (T, Instant)>,
    order: VecDeque<TokenHash>,
    capacity: usize,
}

impl<T> Default for Cache<T> {
    fn default() -> Self {
        Cache {
            entries: HashMap::new(),
            order: VecDeque::new(),
            capacity: MAX_CACHE_ENTRIES,
        }
    }
}

impl<T: Clone> Cache<T> {
    /// The value, unless it has expired.
    fn get(&self, key: &TokenHash, now: Instant) -> Option<T> {
        let (value, until) = self.entries.get(key)?;
        (now < *until).then(|| value.clone())
    }

    /// Stores a value until it expires, and evicts expired entries and those beyond the capacity.
    fn put(&mut self, key: TokenHash, value: T, until: Instant, now: Instant) {
        if until <= now {
            return;
        }
        if self.entries.insert(key, (value, until)).is_none() {
            self.order.push_back(key);
        }
        while let Some(oldest) = self.order.front()
            && (self.order.len() > self.capacity || self.entries[oldest].1 <= now)
        {
            self.entries.remove(oldest);
            self.order.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::prelude::BASE64_URL_SAFE_NO_PAD;
    use serde_json::{Value, json};

    use super::*;

    fn metadata(value: &str) -> MetadataMap {
        let mut metadata = MetadataMap::new();
        metadata.insert("authorization", value.parse().unwrap());
        metadata
    }

    #[test]
    fn accepts_bearer_scheme_in_any_case() {
        assert_eq!(bearer(&metadata("Bearer abc")), Ok("abc"));
        assert_eq!(bearer(&metadata("bearer abc")), Ok("abc"));
    }

    #[test]
    fn rejects_other_schemes_and_empty_tokens() {
        assert_eq!(bearer(&MetadataMap::new()), Err(AuthError::Missing));
        for value in ["Basic abc", "Bearer", "Bearer  ", "abc"] {
            assert_eq!(
                bearer(&metadata(value)),
                Err(AuthError::NoBearer),
                "{value}"
            );
        }
    }

    #[test]
    fn pod_reference_requires_every_part() {
        let user = "system:serviceaccount:shop:web";
        let pod = PodRef::of(user, Some("web-1"), Some("u1")).unwrap();
        assert_eq!((pod.to_string().as_str(), &*pod.uid), ("shop/web-1", "u1"));
        for (user, name, uid) in [
            (user, None, Some("u")),
            (user, Some("p"), None),
            (user, Some(""), Some("u")),
            ("admin", Some("p"), Some("u")),
        ] {
            assert_eq!(PodRef::of(user, name, uid), None);
        }
    }

    #[test]
    fn cache_time_ends_with_the_token() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        assert_eq!(cache_ttl(Some(1010), now), Duration::from_secs(10));
        assert_eq!(cache_ttl(Some(5000), now), ACCEPTED_TTL);
        assert_eq!(cache_ttl(Some(900), now), Duration::ZERO);
        assert_eq!(cache_ttl(Some(u64::MAX), now), ACCEPTED_TTL);
        assert_eq!(cache_ttl(None, now), ACCEPTED_TTL);
    }

    #[test]
    fn status_names_the_remedy_and_the_responsible_side() {
        let status = Status::from(AuthError::Missing);
        assert_eq!(status.code(), tonic::Code::Unauthenticated);
        let message = status.message();
        assert!(message.contains("kubectl create token"), "{message}");
        let status = Status::from(AuthError::Unreachable("down".into()));
        assert_eq!(status.code(), tonic::Code::Unavailable);
    }

    /// An API server that accepts the token "good", and takes a second to reject others.
    fn api_server() -> kube::Client {
        let answer = async |request: http::Request<kube::client::Body>| {
            let body = http_body_util::BodyExt::collect(request.into_body()).await?;
            let mut review: Value = serde_json::from_slice(&body.to_bytes())?;
            let is_good = review["spec"]["token"]
                .as_str()
                .is_some_and(|token| token.ends_with("good"));
            if !is_good {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            review["status"] = json!({
                "authenticated": is_good, "audiences": [TOKEN_AUDIENCE], "user": {"username": "web"},
            });
            let body = kube::client::Body::from(review.to_string().into_bytes());
            Ok::<_, tower::BoxError>(http::Response::new(body))
        };
        kube::Client::new(
            tower::service_fn(move |request| Box::pin(answer(request))),
            "default",
        )
    }

    /// A token that only the API server can judge.
    fn token(signature: &str) -> String {
        let [header, claims] = [json!({"alg": "RS256"}), json!({"aud": TOKEN_AUDIENCE})]
            .map(|part| BASE64_URL_SAFE_NO_PAD.encode(part.to_string()));
        format!("{header}.{claims}.{signature}")
    }

    #[tokio::test(start_paused = true)]
    async fn flood_of_forged_tokens_does_not_delay_real_ones() {
        for flooders in [1, 8] {
            let metrics = Arc::new(Metrics::new(|_| Ok(())));
            let verifier = Verifier::Kubernetes(api_server());
            let authenticator = Arc::new(Authenticator::new(verifier, Clock::default(), metrics));
            for number in 0..1000 {
                let authenticator = authenticator.clone();
                let address = Some(IpAddr::from([10, 0, 0, number as u8 % flooders]));
                tokio::spawn(async move {
                    let token = token(&format!("forged-{number}"));
                    authenticator.caller_by_token(&token, address).await
                });
                tokio::task::yield_now().await;
            }
            let start = tokio::time::Instant::now();
            let address = Some(IpAddr::from([10, 0, 1, 1]));
            let real = authenticator.caller_by_token(&token("good"), address).await;
            assert_eq!(real.map(|caller| caller.user), Ok("web".into()));
            assert!(
                start.elapsed() < Duration::from_secs(2),
                "{:?}",
                start.elapsed()
            );
        }
    }

    #[tokio::test]
    async fn denied_calls_cost_the_api_server_one_answer_in_ten_seconds() {
        let reviews = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counter = reviews.clone();
        let answer = move |_: http::Request<kube::client::Body>| {
            counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let review = json!({
                "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
                "metadata": {}, "spec": {}, "status": {"allowed": false},
            });
            let body = kube::client::Body::from(review.to_string().into_bytes());
            Box::pin(async move { Ok::<_, tower::BoxError>(http::Response::new(body)) })
        };
        let client = kube::Client::new(tower::service_fn(answer), "default");
        let metrics = Arc::new(Metrics::new(|_| Ok(())));
        let authenticator =
            Authenticator::new(Verifier::Kubernetes(client), Clock::default(), metrics);
        let user: Arc<str> = "system:serviceaccount:shop:web".into();
        for _ in 0..1000 {
            let denied = authenticator.namespaces(&user, None).await;
            assert_eq!(denied, Err(AuthError::Forbidden(user.clone())));
        }
        // Both resources, in all namespaces and in its own one.
        assert_eq!(reviews.load(std::sync::atomic::Ordering::Relaxed), 4);
    }

    fn key(number: u8) -> TokenHash {
        [number; 32]
    }

    #[test]
    fn cache_entries_expire() {
        let now = Instant::now();
        let mut cache = Cache::default();
        cache.put(key(1), "a", now + Duration::from_secs(5), now);
        assert_eq!(cache.get(&key(1), now + Duration::from_secs(4)), Some("a"));
        assert_eq!(cache.get(&key(1), now + Duration::from_secs(5)), None);
        cache.put(key(2), "b", now, now);
        assert_eq!(cache.get(&key(2), now), None, "expired");
    }

    #[test]
    fn cache_evicts_the_oldest_entry_at_its_capacity() {
        let now = Instant::now();
        let later = now + Duration::from_secs(5);
        let mut cache = Cache {
            capacity: 3,
            ..Cache::default()
        };
        for number in 0..100 {
            cache.put(key(number), number, later, now);
        }
        assert_eq!(
            (0..100)
                .filter(|number| cache.get(&key(*number), now).is_some())
                .collect::<Vec<_>>(),
            [97, 98, 99]
        );
        for _ in 0..100 {
            cache.put(key(99), 99, later, now);
        }
        assert!(cache.order.len() <= 3 && cache.entries.len() <= 3);
        assert_eq!(cache.get(&key(99), now), Some(99), "replaced entries stay");
    }

    #[test]
    fn cache_evicts_expired_entries() {
        let now = Instant::now();
        let mut cache = Cache::default();
        cache.put(key(1), 1, now + Duration::from_secs(1), now);
        cache.put(
            key(2),
            2,
            now + Duration::from_secs(9),
            now + Duration::from_secs(2),
        );
        assert_eq!(cache.entries.len(), 1);
    }
}
