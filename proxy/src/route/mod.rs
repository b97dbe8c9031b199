//! Step 5: the routes of a destination, as the Gateway API defines them. The first match of a request
//! selects a rule; the rule responds itself, or selects a backend by weight and says what changes on
//! the way (`plan.rs`). Pure: `discovery/routes.rs` makes these values, `flow.rs` resolves the backends.
//!
//! Messages of the controller in them have been checked (`diy_mesh_proto::route`).

pub mod cors;
pub mod fault;
pub mod matching;
mod plan;
pub mod session;
mod size;
#[cfg(test)]
mod tests;
pub mod url;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use diy_mesh_proto::mesh::v1::{Cors, Mirror, Redirect, SessionPersistence, UrlRewrite};
use get_size2::{GetSize, StandardTracker};

use crate::endpoint::ExternalHost;
use crate::error::Failure;
use crate::http::fields::FieldEdit;
use crate::http::reply::LocalReply;
use fault::Fault;
use matching::{Match, MatchInput, Matches};
pub use plan::{AttemptSettings, Plan, Preference};
use session::Session;

/// The routes of a destination.
#[derive(Debug, Default)]
pub struct Routes {
    /// In order of precedence.
    matches: Matches,
    rules: Vec<Arc<Rule>>,
    /// The rule of connections that carry no HTTP.
    tcp: Option<Arc<Rule>>,
    faults: Vec<Fault>,
    /// Why there are none: the controller sent routes that this proxy rejected.
    rejection: Option<String>,
    size: usize,
}

/// Only the same routes are equal: expressions cannot be compared.
impl PartialEq for Routes {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Routes {}

/// The treatment of the requests of a match.
#[derive(Debug, Default)]
pub struct Rule {
    /// The object that the rule comes from.
    pub name: Arc<str>,
    /// Chosen by weight.
    pub backends: Vec<RouteBackend>,
    /// The destination is the backend.
    pub to_destination: bool,
    /// The rule cannot be applied: its requests fail, also those to a pod.
    pub is_invalid: bool,
    /// The changes of all requests of the rule.
    pub changes: Arc<Changes>,
    /// The rule responds with a redirect.
    pub redirect: Option<Redirect>,
    /// Requests of other origins.
    pub cors: Option<Cors>,
    /// The time for the exchange.
    pub request_timeout: Option<Duration>,
    /// The time for each attempt.
    pub backend_request_timeout: Option<Duration>,
    /// The retries, or `None`: the proxy retries requests that are safe to repeat.
    pub retry: Option<Arc<RetryPolicy>>,
    /// Requests of a session go to one endpoint.
    pub session: Option<SessionPersistence>,
}

/// The retries that a rule asks for. The budget of the backend limits them too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Statuses that are retried, besides closed connections and timeouts of attempts.
    pub statuses: Vec<u16>,
    /// Attempts after the first one.
    pub attempts: u32,
    /// Time between two attempts.
    pub backoff: Duration,
}

/// A backend of a rule.
#[derive(Debug)]
pub struct RouteBackend {
    /// The backend, or `None` if the route names something else.
    pub to: Option<BackendRef>,
    /// Its share of the sum of weights.
    pub weight: u32,
    /// The changes of the rule and of this backend.
    pub changes: Arc<Changes>,
}

/// Where a rule sends requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackendRef {
    /// "NAMESPACE/SERVICE:PORT".
    Service(Arc<str>),
    /// A host outside of the cluster.
    External(Arc<ExternalHost>),
}

impl BackendRef {
    /// The name for logs and dumps.
    pub fn name(&self) -> &Arc<str> {
        match self {
            Self::Service(name) => name,
            Self::External(host) => &host.name,
        }
    }
}

/// The changes of a rule and a backend.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    /// Changes of the request's fields.
    pub request: Vec<FieldEdit>,
    /// Changes of the response's fields.
    pub response: Vec<FieldEdit>,
    /// The change of the request's host and path.
    pub rewrite: Option<UrlRewrite>,
    /// Copies.
    pub mirrors: Vec<Mirror>,
}

/// A response in place of a backend's response.
#[derive(Debug)]
pub enum Answer {
    /// The response of a rule.
    Reply(LocalReply),
    /// There is no way for the request.
    Failure(Failure),
}

impl From<Failure> for Answer {
    fn from(failure: Failure) -> Self {
        Self::Failure(failure)
    }
}

impl Routes {
    /// Routes with these rules. `matches` refer to them by index.
    pub fn new(matches: Vec<Match>, rules: Vec<Arc<Rule>>) -> Self {
        Self {
            matches: Matches::new(matches),
            rules,
            ..Self::default()
        }
    }

    /// These routes, with faults.
    pub fn with_faults(self, faults: Vec<Fault>) -> Self {
        Self { faults, ..self }
    }

    /// The same routes with a rule for connections that carry no HTTP.
    pub fn with_connections(self, tcp: Option<Arc<Rule>>) -> Self {
        Self { tcp, ..self }
    }

    /// The backend of a connection that carries no HTTP, or `None` for the destination itself.
    pub fn connection_backend(
        &self,
        rng: &mut fastrand::Rng,
    ) -> Result<Option<&BackendRef>, Failure> {
        let Some(rule) = &self.tcp else {
            return Ok(None);
        };
        let index = rule.choose(rng)?;
        Ok(rule.backends[index].to.as_ref())
    }

    /// The same routes, measured.
    pub fn measured(self) -> Self {
        let (size, _) = self.get_size_with_tracker(StandardTracker::new());
        Self { size, ..self }
    }

    /// The memory that they take, in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Routes that this proxy cannot apply.
    pub fn rejected(reason: String) -> Self {
        Self {
            rejection: Some(reason),
            ..Self::default()
        }
    }

    /// Why they are rejected, if they are.
    pub fn rejection(&self) -> Option<&str> {
        self.rejection.as_deref()
    }

    /// The names of the objects that the rules come from.
    pub fn names(&self) -> BTreeSet<&Arc<str>> {
        let rules = self.rules.iter().chain(&self.tcp);
        rules.map(|rule| &rule.name).collect()
    }

    /// Whether requests fail.
    pub fn is_rejected(&self) -> bool {
        self.rejection.is_some()
    }

    /// The plan of a request to `service`. A pod stays the backend.
    pub fn plan(
        &self,
        request: &MatchInput<'_>,
        service: &Service<'_>,
        now: fn() -> SystemTime,
        rng: &mut fastrand::Rng,
    ) -> Plan {
        let faults = match fault::draw(&self.faults, request, rng) {
            Ok(faults) => faults,
            Err(part) => return Failure::TooLargeToMatch(part).into(),
        };
        let mut plan = match self.select(request, service) {
            Ok(selected) => {
                let rule = &self.rules[selected.rule];
                Plan::of_rule(rule, &request.request, selected, service, now, rng)
            }
            Err(failure) => failure.into(),
        };
        plan.faults = faults;
        plan
    }

    /// The first match of a request.
    fn select(&self, request: &MatchInput<'_>, service: &Service<'_>) -> Result<&Match, Failure> {
        if let Some(reason) = &self.rejection {
            let service = service.name.to_owned();
            let reason = reason.clone();
            return Err(Failure::InvalidRoutes { service, reason });
        }
        let selected = self.matches.first(request);
        let selected = selected.map_err(Failure::TooLargeToMatch)?;
        selected.ok_or_else(|| Failure::NoRoute(service.name.to_owned()))
    }
}

/// The destination of a request, as far as its routes depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Service<'a> {
    /// Namespace and name.
    pub name: &'a str,
    /// The destination is a pod of a headless Service. It stays the backend.
    pub is_pod: bool,
    /// The original destination.
    pub address: std::net::SocketAddr,
}

impl Rule {
    /// Chooses a backend by weight.
    fn choose(&self, rng: &mut fastrand::Rng) -> Result<usize, Failure> {
        let total: u64 = self.backends.iter().map(|one| u64::from(one.weight)).sum();
        let no_backend = || Failure::InvalidBackend(self.name.to_string());
        if total == 0 {
            return Err(no_backend());
        }
        let mut at = match self.backends.len() {
            1 => 0,
            _ => rng.u64(..total),
        };
        for (index, backend) in self.backends.iter().enumerate() {
            match at.checked_sub(backend.weight.into()) {
                Some(rest) => at = rest,
                None if backend.to.is_some() => return Ok(index),
                None => break,
            }
        }
        Err(no_backend())
    }

    /// The backend of a session that has begun.
    fn backend_of(&self, session: &Session) -> Option<usize> {
        let tag = session.backend()?;
        let is_kept = |one: &RouteBackend| {
            let to = one.to.as_ref();
            to.is_some_and(|to| session::tag(&[to.name()]) == tag)
        };
        self.backends.iter().position(is_kept)
    }

    fn changes(&self, backend: Option<usize>) -> &Arc<Changes> {
        backend.map_or(&self.changes, |index| &self.backends[index].changes)
    }
}
