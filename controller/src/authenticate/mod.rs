//! Authentication of clients by bearer tokens: a token in, a [`Caller`] out. All RPCs except the
//! health check require it.
//!
//! Results are cached for a short time by the hash of the token. Tokens are never logged, stored or
//! part of a message.

mod cache;
pub mod jwks;
mod tokenreview;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use aws_lc_rs::digest;
use tokio::sync::Semaphore;
use tonic::metadata::MetadataMap;

use crate::metrics::Metrics;
use cache::Cache;
pub use jwks::Jwks;
pub use tokenreview::TokenReviews;

/// No token is longer: those of service accounts have one or two kB.
const MAX_TOKEN_BYTES: usize = 16 * 1024;
/// An accepted token is asked about again after this time at the latest.
const ACCEPTED_TTL: Duration = Duration::from_secs(60);
/// A refused one too: a token may be valid a moment later (a key that was just added, a clock
/// behind).
const REFUSED_TTL: Duration = Duration::from_secs(3);
/// How many answers of either sort are kept.
const MAX_CACHE_ENTRIES: usize = 10_000;
/// How many questions are under way at a time.
const MAX_CONCURRENT_REVIEWS: usize = 32;
/// How long a question may take, its wait for a turn included.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(5);

/// Who is calling, proven by a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The user name, for example `system:serviceaccount:shop:web`.
    pub user: Arc<str>,
    /// The pod that the token was made for and ends with; none for a token that is bound to no pod.
    pub pod: Option<PodRef>,
}

/// One pod, and not its successor of the same name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PodRef {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// Its UID.
    pub uid: Arc<str>,
}

impl PodRef {
    /// The pod of a service account's token: it is in the account's own namespace. None where a
    /// part is missing.
    fn of(user: &str, name: Option<&str>, uid: Option<&str>) -> Option<PodRef> {
        let (namespace, _) = user
            .strip_prefix("system:serviceaccount:")?
            .split_once(':')?;
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

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Why a call is refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AuthError {
    /// There is no `authorization` metadata.
    #[error("the call carries no token")]
    Missing,
    /// There is, but it is no bearer token.
    #[error("the `authorization` metadata is not `Bearer TOKEN`")]
    NoBearer,
    /// The token was looked at and refused.
    #[error("the token is refused: {0}")]
    Refused(Arc<str>),
    /// Nobody could look at the token.
    #[error("the token cannot be checked now: {0}")]
    Unreachable(Arc<str>),
}

/// The result of a successful review.
#[derive(Clone, Debug, PartialEq)]
struct Accepted {
    caller: Caller,
    /// The token's own end, in seconds since 1970; none where it does not say.
    expires: Option<u64>,
}

/// Who says whether a token is good.
pub enum Verifier {
    /// The Kubernetes API server.
    TokenReview(TokenReviews),
    /// A file with the issuer's public keys.
    Jwks(Jwks),
}

/// Checks the tokens of calls.
pub struct Authenticator {
    verifier: Verifier,
    turns: Semaphore,
    accepted: Mutex<Cache<Caller>>,
    refused: Mutex<Cache<Arc<str>>>,
    metrics: Arc<Metrics>,
}

type TokenHash = [u8; digest::SHA256_OUTPUT_LEN];

impl Authenticator {
    /// An authenticator that asks `verifier`.
    pub fn new(verifier: Verifier, metrics: Arc<Metrics>) -> Authenticator {
        Authenticator {
            verifier,
            turns: Semaphore::new(MAX_CONCURRENT_REVIEWS),
            accepted: Mutex::new(Cache::new(MAX_CACHE_ENTRIES)),
            // Apart from the accepted ones, so that a flood of rubbish does not drive them out.
            refused: Mutex::new(Cache::new(MAX_CACHE_ENTRIES)),
            metrics,
        }
    }

    /// Who makes the call that carries this metadata.
    pub async fn caller(&self, metadata: &MetadataMap) -> Result<Caller, AuthError> {
        let result = match bearer(metadata) {
            Ok(token) => self.check(token).await,
            Err(error) => Err(error),
        };
        self.count(&result);
        result
    }

    /// Whose token it is, where a call carries it in its message.
    pub async fn caller_by_token(&self, token: &str) -> Result<Caller, AuthError> {
        let result = if token.is_empty() {
            Err(AuthError::Missing)
        } else {
            self.check(token).await
        };
        self.count(&result);
        result
    }

    fn count(&self, result: &Result<Caller, AuthError>) {
        let counter = match result {
            Ok(_) => &self.metrics.calls_accepted,
            Err(AuthError::Unreachable(_)) => &self.metrics.calls_unchecked,
            Err(_) => &self.metrics.calls_refused,
        };
        counter.inc();
    }

    async fn check(&self, token: &str) -> Result<Caller, AuthError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(AuthError::Refused(
                format!("it is longer than {MAX_TOKEN_BYTES} bytes").into(),
            ));
        }
        let hash = hash(token);
        if let Some(known) = self.known(&hash) {
            return known;
        }
        let question = async {
            let _turn = self
                .turns
                .acquire()
                .await
                .expect("the semaphore is never closed");
            // Whoever had the turn before may have asked the same.
            match self.known(&hash) {
                Some(known) => known,
                None => self.ask(token, hash).await,
            }
        };
        match tokio::time::timeout(REVIEW_TIMEOUT, question).await {
            Ok(answer) => answer,
            Err(_) => Err(AuthError::Unreachable(
                format!("no answer within {} s", REVIEW_TIMEOUT.as_secs()).into(),
            )),
        }
    }

    fn known(&self, hash: &TokenHash) -> Option<Result<Caller, AuthError>> {
        let now = Instant::now();
        if let Some(caller) = self
            .accepted
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(hash, now)
        {
            return Some(Ok(caller));
        }
        let reason = self
            .refused
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(hash, now)?;
        Some(Err(AuthError::Refused(reason)))
    }

    async fn ask(&self, token: &str, hash: TokenHash) -> Result<Caller, AuthError> {
        let answer = match &self.verifier {
            Verifier::TokenReview(reviews) => reviews.review(token).await,
            Verifier::Jwks(jwks) => jwks.verify(token),
        };
        let now = Instant::now();
        match &answer {
            Ok(accepted) => {
                let until = now + cache_ttl(accepted.expires, SystemTime::now());
                self.accepted
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .put(hash, accepted.caller.clone(), until, now);
            }
            Err(AuthError::Refused(reason)) => {
                self.refused
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .put(hash, reason.clone(), now + REFUSED_TTL, now);
            }
            Err(_) => {}
        }
        answer.map(|accepted| accepted.caller)
    }
}

/// An accepted token is kept for a minute, and never beyond its own end.
fn cache_ttl(expires: Option<u64>, now: SystemTime) -> Duration {
    let Some(expires) = expires else {
        return ACCEPTED_TTL;
    };
    let end = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(expires));
    end.map_or(ACCEPTED_TTL, |end| {
        end.duration_since(now).unwrap_or_default()
    })
    .min(ACCEPTED_TTL)
}

fn bearer(metadata: &MetadataMap) -> Result<&str, AuthError> {
    let value = metadata
        .get("authorization")
        .ok_or(AuthError::Missing)?
        .to_str()
        .map_err(|_| AuthError::NoBearer)?;
    let (scheme, token) = value.split_once(' ').ok_or(AuthError::NoBearer)?;
    let token = token.trim();
    if scheme.eq_ignore_ascii_case("bearer") && !token.is_empty() {
        Ok(token)
    } else {
        Err(AuthError::NoBearer)
    }
}

fn hash(token: &str) -> TokenHash {
    let digest = digest::digest(&digest::SHA256, token.as_bytes());
    digest
        .as_ref()
        .try_into()
        .expect("a SHA-256 digest has 32 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(value: &str) -> MetadataMap {
        let mut metadata = MetadataMap::new();
        metadata.insert("authorization", value.parse().unwrap());
        metadata
    }

    #[test]
    fn the_scheme_may_be_written_in_any_case() {
        assert_eq!(bearer(&metadata("Bearer abc")), Ok("abc"));
        assert_eq!(bearer(&metadata("bearer abc")), Ok("abc"));
    }

    #[test]
    fn other_schemes_and_empty_tokens_are_no_bearer_tokens() {
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
    fn a_pod_is_one_with_every_part() {
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
    fn an_answer_is_never_kept_beyond_the_tokens_end() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        assert_eq!(cache_ttl(Some(1010), now), Duration::from_secs(10));
        assert_eq!(cache_ttl(Some(5000), now), ACCEPTED_TTL);
        assert_eq!(cache_ttl(Some(900), now), Duration::ZERO);
        assert_eq!(cache_ttl(Some(u64::MAX), now), ACCEPTED_TTL);
        assert_eq!(cache_ttl(None, now), ACCEPTED_TTL);
    }
}
