//! The plan of a request: every decision about it, before any of its bytes go upstream. Pure: a
//! function of the request, of the routes of its destination, of the time and of random numbers.
//! Later steps carry it out: `filters.rs`, `attempts.rs` and the protocols.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diy_mesh_proto::mesh::v1::Mirror;

use super::fault::Injection;
use super::matching::Match;
use super::session::{self, Session, Tag};
use super::{Answer, BackendRef, Changes, RetryPolicy, Rule, Service, cors, url};
use crate::error::{Failure, Limit};
use crate::http::edits::{Edits, MeshField};
use crate::http::fields::FieldEdit;
use crate::http::view::RequestView;
use crate::limits::deadline::Deadline;

/// The decisions about one request. The default is the plan of a request to a destination without
/// routes: it goes there, as it is.
#[derive(Debug, Default)]
pub struct Plan {
    /// Delays and aborts, in order.
    pub faults: Vec<Injection>,
    /// The response in place of a backend's response, after the faults.
    pub answer: Option<Answer>,
    /// The rule that it matched.
    rule: Option<Arc<Rule>>,
    /// The backend's index in the rule, or `None` for the destination itself.
    backend: Option<usize>,
    /// The rewritten target.
    target: Option<Vec<u8>>,
    /// Fields that the response gets.
    cors: Vec<FieldEdit>,
    /// The backends that get a copy.
    mirrors: Vec<Arc<str>>,
    session: Option<Box<Session>>,
}

impl From<Answer> for Plan {
    fn from(answer: Answer) -> Self {
        Self {
            answer: Some(answer),
            ..Self::default()
        }
    }
}

impl From<Failure> for Plan {
    fn from(failure: Failure) -> Self {
        Answer::Failure(failure).into()
    }
}

/// The settings of the attempts, from the plan of a request and the request itself.
#[derive(Clone, Debug, Default)]
pub struct AttemptSettings {
    /// The end of the whole exchange.
    pub deadline: Deadline,
    /// The time for each attempt.
    pub timeout: Option<Duration>,
    /// The retries that a route asks for.
    pub retries: Option<Arc<RetryPolicy>>,
    /// The endpoint that it prefers.
    pub preference: Preference,
    /// Attempts of earlier hops before the one with which this request came.
    pub previous: u32,
}

/// Which endpoint a request prefers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preference {
    /// The hash of the request's key. `None`: the policy does not ask for it, or the request has no
    /// key.
    pub hash: Option<u64>,
    /// The endpoint of the request's session.
    pub session: Option<Tag>,
}

impl Plan {
    /// The plan of a request that `selected` matches.
    pub(super) fn of_rule(
        rule: &Arc<Rule>,
        request: &RequestView<'_>,
        selected: &Match,
        service: &Service<'_>,
        now: fn() -> SystemTime,
        rng: &mut fastrand::Rng,
    ) -> Self {
        let plan = Self::decide(rule, request, selected, service, now, rng);
        Self {
            rule: Some(rule.clone()),
            ..plan.unwrap_or_else(Self::from)
        }
    }

    fn decide(
        rule: &Rule,
        request: &RequestView<'_>,
        selected: &Match,
        service: &Service<'_>,
        now: fn() -> SystemTime,
        rng: &mut fastrand::Rng,
    ) -> Result<Self, Answer> {
        if rule.is_invalid {
            return Err(Failure::InvalidBackend(rule.name.to_string()).into());
        }
        let cors = match &rule.cors {
            Some(cors) => cors::apply(cors, request).map_err(Answer::Reply)?,
            None => Vec::new(),
        };
        if let Some(redirect) = &rule.redirect {
            return Err(Answer::Reply(url::redirect(
                redirect, request, selected, service,
            )?));
        }
        let session = rule.session.as_ref().map(|session| {
            let path = selected.path.as_ref();
            Box::new(Session::new(session, request, path, seconds(now())))
        });
        let backend = if service.is_pod || rule.to_destination {
            None
        } else {
            // A session keeps its backend, also one with weight 0 (GEP-1619).
            let kept = session.as_ref().and_then(|one| rule.backend_of(one));
            Some(kept.map_or_else(|| rule.choose(rng), Ok)?)
        };
        let changes = rule.changes(backend);
        let is_drawn = |mirror: &&Mirror| rng.u32(..mirror.denominator) < mirror.numerator;
        let mirrors = changes.mirrors.iter().filter(is_drawn);
        let rewrite = changes.rewrite.as_ref();
        Ok(Self {
            mirrors: mirrors
                .map(|mirror| mirror.backend.as_str().into())
                .collect(),
            target: rewrite.and_then(|rewrite| url::target(rewrite, request, selected)),
            backend,
            cors,
            session,
            ..Self::default()
        })
    }

    /// The rule that the request matched, for logs.
    pub fn rule(&self) -> Option<&Arc<Rule>> {
        self.rule.as_ref()
    }

    /// The backend, or `None` for the destination itself.
    pub fn backend(&self) -> Option<&BackendRef> {
        self.rule.as_ref()?.backends[self.backend?].to.as_ref()
    }

    /// The backends that get a copy.
    pub fn mirrors(&self) -> &[Arc<str>] {
        &self.mirrors
    }

    /// How often, for how long and with which preference the request is sent. The time of the
    /// exchange begins now. `own` are the settings of the request itself.
    pub fn attempts(&self, own: AttemptSettings) -> AttemptSettings {
        let Some(rule) = self.applied() else {
            return own;
        };
        let deadline = Deadline::after(rule.request_timeout, Limit::Exchange);
        AttemptSettings {
            deadline: own.deadline.earlier(deadline),
            timeout: rule.backend_request_timeout,
            retries: rule.retry.clone(),
            preference: Preference {
                session: self.session.as_ref().and_then(|session| session.endpoint()),
                ..own.preference
            },
            ..own
        }
    }

    /// The rule that the request follows.
    fn applied(&self) -> Option<&Rule> {
        self.rule.as_deref().filter(|_| self.answer.is_none())
    }

    fn changes(&self) -> Option<&Changes> {
        Some(self.applied()?.changes(self.backend))
    }

    /// The plan, if the request is forwarded, or the answer in place of a backend's response.
    pub fn forwarded(self) -> Result<Self, Answer> {
        match self.answer {
            Some(answer) => Err(answer),
            None => Ok(self),
        }
    }

    /// The changes of the request's head: `own`, then the changes of the rule.
    pub fn request_edits<'a>(&'a self, own: Edits<'a>) -> Edits<'a> {
        self.changes().map_or(own, |changes| Edits {
            route: [&changes.request, &[], &[]],
            host: changes.rewrite.as_ref().and_then(url::host),
            target: self.target.as_deref(),
            ..own
        })
    }

    /// The changes of the response's head: first `own`, the changes of the mesh, then the changes of
    /// the rule, then the field of the session.
    pub fn response_edits<'a>(
        &'a self,
        own: &'a [MeshField<'a>],
        session: &'a Option<FieldEdit>,
    ) -> Edits<'a> {
        let edits = Edits::of(own);
        self.changes().map_or(edits, |changes| Edits {
            route: [&changes.response, &self.cors, session.as_slice()],
            ..edits
        })
    }

    /// The session's field in a response from the endpoint with this tag.
    pub fn session_edit(&self, endpoint: Tag) -> Option<FieldEdit> {
        let session = self.session.as_ref()?;
        let backend = self.backend().map(|to| &**to.name());
        let backend = session::tag(&[backend.unwrap_or_default()]);
        session.edit(backend, endpoint, seconds(SystemTime::now()))
    }
}

/// Seconds since 1970.
fn seconds(now: SystemTime) -> u64 {
    let elapsed = now.duration_since(UNIX_EPOCH);
    elapsed.map_or(0, |elapsed| elapsed.as_secs())
}
