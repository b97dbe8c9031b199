//! The rules of a pod's policies by port and by client: a call is judged by the rules that concern
//! it, however many there are.

use std::cmp::Reverse;
use std::sync::Arc;

use super::hash::hash;
use super::rule::{Condition, Facts, ISSUERS_REVISION, REVISION, Rule};
use super::sources::Source;
use super::truth::Truth;
use super::{Call, Denial, Nearest, Token};
use crate::mesh::v1 as proto;
use crate::mesh::v1::authorization_policy::Action;

/// Every port, and every client.
const ANY_PORT: u16 = 0;
const ANY_CLIENT: u64 = 0;

/// Policies, as if all of them were in force.
#[derive(Debug, Default)]
pub(super) struct Rules {
    allow: Index,
    deny: Index,
    external: Index,
    /// The position in the message of the policy of each rule of `external`.
    asking: Vec<usize>,
    /// The ports that ALLOW policies cover, in ascending order, with the first policy of each.
    covered: Vec<(u16, usize)>,
    /// The ports of policies with issuers, with each policy.
    issuing: Vec<(u16, usize)>,
    /// The names of the policies.
    names: Vec<Arc<str>>,
    /// The policy that sets the default to deny.
    denies_by_default: Option<Arc<str>>,
    /// Only plain paths have known readings.
    is_plain_only: bool,
}

/// The rules of one action.
#[derive(Debug, Default)]
struct Index {
    /// In the order of the policies.
    rules: Vec<Rule>,
    /// A set of elements for each rule: every path that matches has one of them.
    elements: Vec<u64>,
    /// Port, client and rule, in ascending order.
    entries: Vec<(u16, u64, usize)>,
    /// They deny, or ask an authorization server: conditions on GET hold for HEAD as well, which servers
    /// answer alike.
    denies: bool,
}

impl Rules {
    pub(super) fn compile(message: &proto::Authorization, with_audit: bool) -> Rules {
        let default_name = || message.default_name.as_str().into();
        let mut rules = Rules {
            denies_by_default: message.deny_by_default.then(default_name),
            is_plain_only: message.plain_paths,
            ..Rules::default()
        };
        rules.deny.denies = true;
        rules.external.denies = true;
        let policies = message.policies.iter().enumerate();
        let policies = policies.filter(|(_, policy)| with_audit || !policy.audit);
        let set: Vec<&str> = policies
            .clone()
            .flat_map(|(_, policy)| fields(policy))
            .collect();
        for (position, policy) in policies {
            rules.add(policy, &set);
            rules.asking.resize(rules.external.rules.len(), position);
        }
        rules.allow.entries.sort_unstable();
        rules.deny.entries.sort_unstable();
        rules.external.entries.sort_unstable();
        rules.covered.sort_unstable();
        rules.covered.dedup_by_key(|(port, _)| *port);
        rules
    }

    fn add(&mut self, policy: &proto::AuthorizationPolicy, set: &[&str]) {
        let name: Arc<str> = policy.name.as_str().into();
        // Invalid ports: the policy covers all.
        let ports = ports(&policy.ports).unwrap_or_else(|| vec![ANY_PORT]);
        let position = self.names.len();
        if !policy.issuers.is_empty() {
            let ports = self::ports(&issuer_ports(policy)).unwrap_or_else(|| vec![ANY_PORT]);
            self.issuing
                .extend(ports.iter().map(|port| (*port, position)));
        }
        match Action::try_from(policy.action) {
            Ok(Action::Allow) => {
                self.covered
                    .extend(ports.iter().map(|port| (*port, position)));
                self.allow.add(&name, &ports, &policy.rules, set);
            }
            Ok(Action::Deny) => self.deny.add(&name, &ports, &policy.rules, set),
            Ok(Action::ExternalAuth | Action::ExternalAuthWithBody)
                if policy.authorizer.is_some() || policy.routes.is_some() =>
            {
                self.external.add(&name, &ports, &policy.rules, set);
            }
            // One of a later release may deny everything.
            _ => {
                let unknown = proto::AuthorizationRule::default();
                self.deny.add(&name, &ports, &[unknown], set);
            }
        }
        self.names.push(name);
    }

    pub(super) fn judge(&self, call: &Call<'_>) -> Result<(), Denial> {
        if let Some(policy) = call.token.and_then(|token| self.refusing(token, call.port)) {
            return Err(Denial {
                refuses_token: true,
                ..Denial::of(policy)
            });
        }
        self.judge_facts(&Facts::new(call, self.is_plain_only))
    }

    pub(super) fn judge_before_token(&self, call: &Call<'_>) -> Result<(), Denial> {
        self.judge_facts(&Facts::before_token(call, self.is_plain_only))
    }

    fn judge_facts(&self, facts: &Facts<'_>) -> Result<(), Denial> {
        let call = facts.call;
        // No authorization server is asked about a connection.
        let external = || match call.request {
            None => self.external.first_match(facts),
            Some(_) => None,
        };
        if let Some(rule) = self.deny.first_match(facts).or_else(external) {
            return Err(Denial {
                rule: Some(rule.position),
                ..Denial::of(&rule.policy)
            });
        }
        let Some(policy) = self.covering(call.port) else {
            let default = self.denies_by_default.as_ref();
            return default.map_or(Ok(()), |policy| Err(Denial::of(policy)));
        };
        self.allow.any_match(facts).map_err(|nearest| Denial {
            nearest: nearest.map(|(rule, failed)| Nearest {
                rule: rule.position,
                failed,
            }),
            ..Denial::of(nearest.map_or(policy, |(rule, _)| &rule.policy))
        })
    }

    /// Whether an ALLOW rule names the host of a destination, at this port.
    pub(super) fn names(&self, host: &str, port: u16) -> bool {
        let mut rules = self.allow.at_port(port);
        rules.any(|rule| self.allow.rules[rule].names(host))
    }

    /// The positions of the policies whose authorization servers are asked about a call.
    pub(super) fn external(&self, call: &Call<'_>) -> Vec<usize> {
        if self.external.rules.is_empty() {
            return vec![];
        }
        let facts = Facts::new(call, self.is_plain_only);
        let rules = self.external.possible_matches(&facts);
        let mut policies: Vec<usize> = rules.map(|rule| self.asking[rule]).collect();
        policies.sort_unstable();
        policies.dedup();
        policies
    }

    /// The first policy with issuers at the port, unless an issuer of a policy at the port has issued
    /// the token.
    fn refusing(&self, token: &Token, port: u16) -> Option<&Arc<str>> {
        let issuing = self.issuing.iter();
        let at_port = issuing.filter(|(at, _)| [ANY_PORT, port].contains(at));
        let mut policies = at_port.map(|(_, policy)| &self.names[*policy]);
        let first = policies.clone().next()?;
        let is_accepted = policies.any(|policy| token.policies.contains(policy));
        (!is_accepted).then_some(first)
    }

    /// The first ALLOW policy that covers the port.
    fn covering(&self, port: u16) -> Option<&Arc<str>> {
        let first = |port| {
            let position = self.covered.binary_search_by_key(&port, |(port, _)| *port);
            position.ok().map(|position| self.covered[position].1)
        };
        let policies = [first(ANY_PORT), first(port)];
        let policy = policies.into_iter().flatten().min()?;
        Some(&self.names[policy])
    }
}

impl Index {
    fn add(
        &mut self,
        policy: &Arc<str>,
        ports: &[u16],
        rules: &[proto::AuthorizationRule],
        set: &[&str],
    ) {
        for (position, message) in rules.iter().enumerate() {
            // The ports of a rule of another revision are unknown too.
            let is_known = (REVISION..=ISSUERS_REVISION).contains(&message.revision);
            let of_rule = self::ports(&message.ports).filter(|_| is_known);
            let is_known = of_rule.is_some();
            let rule = Rule::compile(policy, position, message, is_known, set, self.denies);
            let clients = clients(&rule);
            for port in both(ports, &of_rule.unwrap_or_else(|| vec![ANY_PORT])) {
                let entry = |client: &u64| (port, *client, self.rules.len());
                self.entries.extend(clients.iter().map(entry));
            }
            self.elements.push(rule.elements());
            self.rules.push(rule);
        }
    }

    /// The first rule that is not false.
    fn first_match(&self, facts: &Facts<'_>) -> Option<&Rule> {
        let first = self.possible_matches(facts).min()?;
        Some(&self.rules[first])
    }

    /// The rules that are not false.
    fn possible_matches(&self, facts: &Facts<'_>) -> impl Iterator<Item = usize> {
        self.candidates(facts.call).filter(|rule| {
            facts.may_have(self.elements[*rule])
                && self.rules[*rule].judge(facts).truth != Truth::False
        })
    }

    /// Whether an ALLOW rule is true. If not, the nearest one and its first condition that is not.
    fn any_match(&self, facts: &Facts<'_>) -> Result<(), Option<(&Rule, Condition)>> {
        let mut nearest = None;
        for rule in self.candidates(facts.call) {
            let failed = if facts.may_have(self.elements[rule]) {
                self.rules[rule].judge(facts).failed
            } else {
                Some(Condition::Paths)
            };
            let Some(failed) = failed else {
                return Ok(());
            };
            nearest = nearest.max(Some((failed, Reverse(rule))));
        }
        let nearest = nearest.map(|(_, Reverse(rule))| rule);
        let nearest = nearest.or_else(|| self.at_port(facts.call.port).min());
        let nearest = nearest.map(|rule| &self.rules[rule]);
        Err(nearest.and_then(|rule| Some((rule, rule.judge(facts).failed?))))
    }

    /// The rules that may match a call.
    fn candidates(&self, call: &Call<'_>) -> impl Iterator<Item = usize> {
        let one = |client: u64| Some((client, client));
        // Rules about identities are unknown, not false, without one.
        let all = [Some((0, u64::MAX)), None, None];
        let identity = call.identity.filter(|_| !self.entries.is_empty());
        let clients = identity.map_or(all, |identity| {
            let (namespace, account) = (identity.namespace(), identity.service_account());
            [
                ANY_CLIENT,
                client(namespace, ""),
                client(namespace, account),
            ]
            .map(one)
        });
        let ports = [ANY_PORT, call.port].into_iter();
        ports.flat_map(move |port| {
            let ranges = clients.into_iter().flatten();
            ranges.flat_map(move |(first, last)| self.range((port, first), (port, last)))
        })
    }

    /// The rules at a port, for any client.
    fn at_port(&self, port: u16) -> impl Iterator<Item = usize> {
        let ports = [ANY_PORT, port].into_iter();
        ports.flat_map(|port| self.range((port, 0), (port, u64::MAX)))
    }

    fn range(&self, first: (u16, u64), last: (u16, u64)) -> impl Iterator<Item = usize> {
        let entries = &self.entries;
        let start = entries.partition_point(|(port, client, _)| (*port, *client) < first);
        let rest = &entries[start..];
        let length = rest.partition_point(|(port, client, _)| (*port, *client) <= last);
        rest[..length].iter().map(|(_, _, rule)| *rule)
    }
}

/// The ports at which a policy reads tokens: its own or those that its rules name. Empty: all.
pub fn issuer_ports(policy: &proto::AuthorizationPolicy) -> Vec<u32> {
    let rules = &policy.rules;
    let is_everywhere = rules.iter().any(|rule| rule.ports.is_empty());
    if is_everywhere || !policy.ports.is_empty() {
        return policy.ports.clone();
    }
    rules.iter().flat_map(|rule| rule.ports.clone()).collect()
}

/// The authorization servers of a policy.
pub fn authorizers(
    policy: &proto::AuthorizationPolicy,
) -> impl Iterator<Item = &proto::Authorizer> + Clone {
    let rules = policy.routes.iter().flat_map(|routes| &routes.rules);
    let of_rules = rules.filter_map(|rule| rule.authorizer.as_ref());
    policy.authorizer.iter().chain(of_rules)
}

/// The action of a policy with these servers.
pub fn asking_action<'a>(servers: impl IntoIterator<Item = &'a proto::Authorizer>) -> Action {
    if servers.into_iter().any(|server| server.max_body > 0) {
        Action::ExternalAuthWithBody
    } else {
        Action::ExternalAuth
    }
}

/// The names of the fields that the application gets from a policy.
pub fn fields(policy: &proto::AuthorizationPolicy) -> impl Iterator<Item = &str> {
    let claims = policy.issuers.iter().flat_map(|issuer| &issuer.fields);
    let answers = authorizers(policy).flat_map(|one| &one.response_fields);
    let claims = claims.map(|field| &*field.name);
    claims.chain(answers.map(|name| &**name))
}

/// The ports of a list, or `None` if one of them is not a port.
fn ports(list: &[u32]) -> Option<Vec<u16>> {
    if list.is_empty() {
        return Some(vec![ANY_PORT]);
    }
    let port = |port: &u32| u16::try_from(*port).ok().filter(|port| *port != ANY_PORT);
    list.iter().map(port).collect()
}

/// The ports in both lists.
fn both(ports: &[u16], others: &[u16]) -> Vec<u16> {
    match (ports, others) {
        ([ANY_PORT], ports) | (ports, [ANY_PORT]) => ports.to_vec(),
        _ => ports
            .iter()
            .copied()
            .filter(|port| others.contains(port))
            .collect(),
    }
}

/// The clients that a rule concerns.
fn clients(rule: &Rule) -> Vec<u64> {
    let of_source = |source: &Option<Source>| match source {
        Some(Source::Identity(identity)) if !identity.namespace.is_empty() => {
            client(&identity.namespace, &identity.service_account)
        }
        _ => ANY_CLIENT,
    };
    let any = || vec![ANY_CLIENT];
    let sources = rule.sources.as_deref();
    let mut clients = sources.map_or_else(any, |list| list.iter().map(of_source).collect());
    clients.sort_unstable();
    clients.dedup();
    clients
}

/// A service account, or, without one, all of a namespace. Others may have the same number: a rule
/// judges its sources itself.
fn client(namespace: &str, account: &str) -> u64 {
    let separator = std::iter::once(b'/');
    hash(namespace.bytes().chain(separator).chain(account.bytes())) | 1
}
