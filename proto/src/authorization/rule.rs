//! A rule, and the verdict of its conditions on a call. The same for ALLOW and DENY.

use std::cell::OnceCell;
use std::sync::Arc;

use super::claims::{self, ClaimCondition};
use super::fields::{self, FieldCondition, Fields, HostPattern};
use super::paths::Paths;
use super::readings::{ANY_ELEMENT, Readings};
use super::sources::Source;
use super::truth::Truth;
use super::{Call, Request};
use crate::mesh::v1 as proto;

/// The revision of rules.
pub const REVISION: u32 = 1;
/// The revision of rules in a policy with issuers, the latest revision that this release knows.
pub const ISSUERS_REVISION: u32 = 2;

/// The conditions of a rule, in the order in which they are judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Condition {
    /// The rule is of a release with other conditions.
    Revision,
    /// The client is not among the sources.
    Sources,
    /// The destination is not among the destinations, of calls by the pod.
    Destinations,
    /// The client is among those that are excluded.
    NotSources,
    /// The connection carries no HTTP.
    Requests,
    /// The path.
    Paths,
    /// The method.
    Methods,
    /// The host.
    Hosts,
    /// A header field.
    Headers,
    /// A claim of the token, or there is no token with claims.
    Claims,
}

impl Condition {
    /// The name of the field.
    pub fn as_str(self) -> &'static str {
        match self {
            Condition::Revision => "revision",
            Condition::Sources => "sources",
            Condition::Destinations => "destinations",
            Condition::NotSources => "notSources",
            Condition::Requests => "requests",
            Condition::Paths => "paths",
            Condition::Methods => "methods",
            Condition::Hosts => "hosts",
            Condition::Headers => "headers",
            Condition::Claims => "claims",
        }
    }
}

/// A call, and what is derived from it once for all rules.
pub(super) struct Facts<'a> {
    pub(super) call: &'a Call<'a>,
    is_plain_only: bool,
    /// The token is not verified yet.
    is_before_token: bool,
    readings: OnceCell<Readings<'a>>,
    fields: OnceCell<Fields>,
}

impl<'a> Facts<'a> {
    pub(super) fn new(call: &'a Call<'a>, is_plain_only: bool) -> Self {
        Self {
            call,
            is_plain_only,
            is_before_token: false,
            readings: OnceCell::new(),
            fields: OnceCell::new(),
        }
    }

    /// The same for a request whose token is not verified yet.
    pub(super) fn before_token(call: &'a Call<'a>, is_plain_only: bool) -> Self {
        Self {
            is_before_token: true,
            ..Self::new(call, is_plain_only)
        }
    }

    /// The readings of the path, or `None` if the connection carries no HTTP.
    fn readings(&self) -> Option<&Readings<'a>> {
        let request = self.call.request?;
        let readings = || Readings::of(request.path(), self.is_plain_only);
        Some(self.readings.get_or_init(readings))
    }

    /// The header fields, or `None` if the connection carries no HTTP.
    pub(super) fn fields(&self) -> Option<&Fields> {
        let request = self.call.request?;
        Some(self.fields.get_or_init(|| Fields::of(request)))
    }

    /// Whether the path may have one of these elements.
    pub(super) fn may_have(&self, elements: u64) -> bool {
        elements == ANY_ELEMENT
            || self
                .readings()
                .is_none_or(|readings| readings.may_have(elements))
    }
}

/// The truth of conditions, and the first of them that is not true.
#[derive(Clone, Copy)]
pub(super) struct Verdict {
    pub(super) truth: Truth,
    pub(super) failed: Option<Condition>,
}

impl Verdict {
    fn of(condition: Condition, truth: Truth) -> Verdict {
        Verdict {
            truth,
            failed: (truth != Truth::True).then_some(condition),
        }
    }

    /// The conjunction with further conditions, which are judged only if they matter.
    fn and(self, next: impl FnOnce() -> Verdict) -> Verdict {
        if self.truth == Truth::False {
            return self;
        }
        let next = next();
        Verdict {
            truth: self.truth.min(next.truth),
            failed: self.failed.or(next.failed),
        }
    }
}

/// A compiled rule. A source that is not known is None.
#[derive(Debug)]
pub(super) struct Rule {
    pub(super) policy: Arc<str>,
    /// The index of the rule in the policy.
    pub(super) position: usize,
    is_known: bool,
    pub(super) sources: Option<Vec<Option<Source>>>,
    not_sources: Vec<Option<Source>>,
    requests: Vec<RequestCondition>,
}

/// Conditions on a request, all of which hold. An unknown condition is `None`.
#[derive(Debug)]
struct RequestCondition {
    methods: Vec<Box<[u8]>>,
    /// The rule denies, or asks an authorization server.
    denies: bool,
    paths: Paths,
    hosts: Vec<Option<HostPattern>>,
    headers: Vec<Option<FieldCondition>>,
    claims: Vec<Option<ClaimCondition>>,
}

impl Rule {
    /// Compiles a rule. If it is not known, its conditions do not matter. `set` are the fields that
    /// applications get from the proxy. `denies`: what may match does.
    pub(super) fn compile(
        policy: &Arc<str>,
        position: usize,
        message: &proto::AuthorizationRule,
        is_known: bool,
        set: &[&str],
        denies: bool,
    ) -> Rule {
        let mut rule = Rule {
            policy: policy.clone(),
            position,
            is_known,
            sources: None,
            not_sources: vec![],
            requests: vec![],
        };
        if rule.is_known {
            let sources = message.sources.as_ref();
            rule.sources = sources.map(|list| known(&list.sources, Source::parse));
            rule.not_sources = known(&message.not_sources, Source::parse);
            let requests = message.requests.iter();
            let requests = requests.map(|one| RequestCondition::compile(one, set, denies));
            rule.requests = requests.collect();
        }
        rule
    }

    /// A set of which each path that matches has an element.
    pub(super) fn elements(&self) -> u64 {
        let sets = self.requests.iter().map(|request| request.paths.elements());
        let all = sets.fold(0, |all, set| all | set);
        if self.requests.is_empty() {
            ANY_ELEMENT
        } else {
            all
        }
    }

    /// Whether the host is among its sources, the destinations of egress.
    pub(super) fn names(&self, host: &str) -> bool {
        let sources = self.sources.iter().flatten().flatten();
        let mut hosts = sources.filter_map(Source::host);
        hosts.any(|pattern| pattern.matches(host.as_bytes()))
    }

    /// The verdict on a call at a port of the rule.
    pub(super) fn judge(&self, facts: &Facts<'_>) -> Verdict {
        if !self.is_known {
            return Verdict::of(Condition::Revision, Truth::Unknown);
        }
        let is_any = |sources: &[Option<Source>]| {
            Truth::any_known(sources, |source| source.truth(facts.call))
        };
        let sources = self.sources.as_deref().map_or(Truth::True, is_any);
        Verdict::of(Condition::Sources, sources)
            .and(|| Verdict::of(Condition::NotSources, !is_any(&self.not_sources)))
            .and(|| self.judge_request(facts))
    }

    fn judge_request(&self, facts: &Facts<'_>) -> Verdict {
        if self.requests.is_empty() {
            return Verdict::of(Condition::Requests, Truth::True);
        }
        let Some(request) = facts.call.request else {
            return Verdict::of(Condition::Requests, Truth::Unknown);
        };
        let mut result = Verdict::of(Condition::Requests, Truth::False);
        for condition in &self.requests {
            let verdict = condition.judge(request, facts, &self.policy);
            if verdict.failed.is_none() {
                return verdict;
            }
            result.truth = result.truth.max(verdict.truth);
            result.failed = result.failed.max(verdict.failed);
        }
        result
    }
}

impl RequestCondition {
    fn compile(message: &proto::RequestMatch, set: &[&str], denies: bool) -> RequestCondition {
        let methods = message.methods.iter();
        let mut headers = known(&message.headers, FieldCondition::parse);
        for header in &mut headers {
            header.take_if(|header| header.is_any(set));
        }
        RequestCondition {
            methods: methods.map(|method| method.as_bytes().into()).collect(),
            denies,
            paths: Paths::compile(&message.paths),
            hosts: known(&message.hosts, |host| HostPattern::parse(host)),
            headers,
            claims: known(&message.claims, ClaimCondition::parse),
        }
    }

    fn judge(&self, request: &dyn Request, facts: &Facts<'_>, policy: &Arc<str>) -> Verdict {
        Verdict::of(Condition::Paths, self.judge_path(facts))
            .and(|| {
                let methods = fields::judge_method(&self.methods, request.method(), self.denies);
                Verdict::of(Condition::Methods, methods)
            })
            .and(|| Verdict::of(Condition::Hosts, fields::judge_hosts(&self.hosts, request)))
            .and(|| {
                let headers = fields::judge_fields(&self.headers, facts);
                Verdict::of(Condition::Headers, headers)
            })
            .and(|| {
                let claims = if facts.is_before_token && !self.claims.is_empty() {
                    // The token decides.
                    (!self.denies).into()
                } else {
                    claims::judge(&self.claims, facts.call.token, policy)
                };
                Verdict::of(Condition::Claims, claims)
            })
    }

    fn judge_path(&self, facts: &Facts<'_>) -> Truth {
        if self.paths.is_empty() {
            return Truth::True;
        }
        let readings = facts.readings();
        readings.map_or(Truth::Unknown, |readings| self.paths.truth(readings))
    }
}

/// Compiles each item. One that is not known is None.
fn known<M, T, E>(messages: &[M], parse: impl Fn(&M) -> Result<T, E>) -> Vec<Option<T>> {
    messages.iter().map(|message| parse(message).ok()).collect()
}
