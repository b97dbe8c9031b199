//! The effect of a change of policies on the calls that proxies saw. Pure.

use std::collections::BTreeSet;

use diy_mesh_controller::catalog::Change;
use diy_mesh_controller::explain::authorization;
use diy_mesh_controller::index::Index;
use diy_mesh_controller::kinds::{Object, Pod};
use diy_mesh_proto::mesh::v1::{
    AuthorizationPolicy, Edge, authorization_policy::Action,
    get_authorization_response::Pod as Row, get_edges_response::Group, workload::InboundMode,
};
use serde::Serialize;

use crate::{
    authorization::{Destination, Outcome, Verdict, judge, judge_outbound},
    edges::{self, Observed},
    time::format_duration,
};

/// The effect of a change.
#[derive(Debug, Default, Serialize)]
pub struct Plan {
    /// Groups of pods that the change is about.
    pub groups: usize,
    /// Kinds of calls to them that were seen.
    pub calls: usize,
    /// The shortest and the longest observation of them, in seconds.
    pub watched: Option<(u64, u64)>,
    /// Calls that would be denied, allowed again, a question to an authorization server, or whose
    /// outcome is not known.
    pub effects: Vec<Effect>,
    /// Ports that no rule of the new policies is about, and pods whose calls to outside of the cluster
    /// need a rule now.
    pub closed: Vec<Closed>,
    /// Groups whose calls were not all kept.
    pub incomplete: Vec<String>,
    /// Reasons why what was seen does not show what the change does.
    pub unseen: Vec<String>,
    /// The policies of the pods after the change.
    #[serde(skip)]
    policies: BTreeSet<String>,
    /// The namespaces and accounts of pods that become strict.
    #[serde(skip)]
    strict: BTreeSet<String>,
}

/// The new verdict on a kind of calls.
#[derive(Debug, Serialize)]
pub struct Effect {
    /// The called pods, or those that call outside of the cluster.
    pub pods: String,
    /// The called port.
    pub port: u32,
    /// The calls.
    pub call: String,
    /// The verdict.
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// A port that ALLOW policies cover, without a rule for it, or all outside of the cluster.
#[derive(Debug, Serialize)]
pub struct Closed {
    /// The pods.
    pub pods: String,
    /// Their port. `None`: calls by them to outside of the cluster.
    pub port: Option<u32>,
    /// The first of the policies.
    pub policy: String,
}

/// Compares what `before` and `after` say about the calls. `is_strict`: the pods become strict.
pub fn plan(
    observed: &Observed,
    [before, after]: [&mut Index; 2],
    is_strict: impl Fn(&Group) -> bool,
    now: u64,
) -> Plan {
    let mut plan = Plan::default();
    for (at, group) in observed.groups.iter().enumerate() {
        if group.service_account.is_empty() {
            plan.incomplete.push(edges::title(group));
            continue;
        }
        let pod = edges::pod(group, &format!("#{at}"), &observed.trust_domain);
        let (Some(old), Some(mut new)) = (row(before, pod.clone()), row(after, pod)) else {
            continue;
        };
        plan.policies.extend(policies(&new));
        if let Some(workload) = new.workload.as_mut().filter(|_| is_strict(group)) {
            let (namespace, account) = (&group.namespace, &group.service_account);
            let names = [namespace.clone(), format!("{namespace}/{account}")];
            plan.strict.extend(names);
            workload.set_inbound_mode(InboundMode::Strict);
        }
        if old != new {
            plan.add(group, &old, &new, now);
        }
    }
    plan
}

/// The configuration of the proxy of a pod.
fn row(index: &mut Index, pod: Pod) -> Option<Row> {
    let key = pod.key.clone();
    index.apply(Change::Apply(Object::Pod(pod)));
    authorization::pod(index, &key, 0, &key)
}

/// The policies of a pod.
fn policies(row: &Row) -> Vec<String> {
    let workload = row.workload.as_ref();
    let inbound = workload.and_then(|workload| workload.authorization.as_ref());
    let outbound = workload.and_then(|workload| workload.egress.as_ref());
    let inbound = inbound.map(|inbound| (&inbound.policies, &inbound.default_name));
    let outbound = outbound.map(|outbound| (&outbound.policies, &outbound.default_name));
    let both = inbound.into_iter().chain(outbound);
    let names = both.flat_map(|(policies, default)| {
        let names = policies.iter().map(|policy| &policy.name);
        names.chain([default])
    });
    names.cloned().collect()
}

impl Plan {
    /// Adds what was not seen: pods of these new policies, pods that become strict, and more than
    /// `min_watch` seconds.
    pub fn add_unseen<'a>(
        &mut self,
        policies: impl Iterator<Item = String>,
        strict: impl Iterator<Item = &'a String>,
        min_watch: u64,
    ) {
        let policies = policies.filter(|name| !self.policies.contains(name));
        let policies =
            policies.map(|name| format!("{name} is about no pod whose proxy has reported"));
        let strict = strict.filter(|name| !self.strict.contains(*name));
        let strict = strict.map(|name| format!("no proxy of pods of {name} has reported"));
        self.unseen = policies.chain(strict).collect();
        if let Some((shortest, _)) = self.watched.filter(|(shortest, _)| *shortest < min_watch) {
            let [shortest, min] = [shortest, min_watch].map(format_duration);
            let reason = format!("pods were watched for {shortest} only, less than {min}");
            self.unseen.push(reason);
        }
    }

    /// The gravest verdict on what was allowed.
    pub fn outcome(&self) -> Outcome {
        let verdicts = self.effects.iter().map(|effect| effect.verdict.verdict);
        let incomplete = (!self.incomplete.is_empty()).then_some(Outcome::Unknown);
        verdicts.chain(incomplete).max().unwrap_or(Outcome::Allowed)
    }

    fn add(&mut self, group: &Group, old: &Row, new: &Row, now: u64) {
        let since = now.saturating_sub(group.since.try_into().unwrap_or(now));
        let (shortest, longest) = self.watched.unwrap_or((since, since));
        self.watched = Some((shortest.min(since), longest.max(since)));
        self.groups += 1;
        let is_call = |edge: &&Edge| edge.silent.is_none();
        let pods = edges::title(group);
        let edges = group.edges.iter().filter_map(|seen| seen.edge.as_ref());
        let edges = edges.filter(is_call);
        self.calls += edges.clone().count();
        for edge in edges.clone() {
            let Some((port, call, [before, after])) = verdicts(edge, [old, new]) else {
                continue;
            };
            let is_news = after.verdict != Outcome::Allowed || before.verdict == Outcome::Denied;
            if is_news && before != after {
                self.effects.push(Effect {
                    pods: pods.clone(),
                    port,
                    call,
                    verdict: after,
                });
            }
        }
        let seen = edges.map(|edge| edge.port).filter(|port| *port > 0);
        let ports: BTreeSet<u32> = new.ports.iter().copied().chain(seen).collect();
        let closed = ports.into_iter().filter_map(|port| {
            let policy = closed(new, port).filter(|_| closed(old, port).is_none())?;
            let pods = pods.clone();
            Some(Closed {
                pods,
                port: Some(port),
                policy,
            })
        });
        self.closed.extend(closed);
        let closing = closing(new).filter(|_| closing(old).is_none());
        self.closed.extend(closing.map(|policy| Closed {
            pods: pods.clone(),
            port: None,
            policy,
        }));
        self.incomplete.extend(group.incomplete.then_some(pods));
    }
}

/// The port and the text of the calls of an edge, and the verdicts on them.
fn verdicts(edge: &Edge, rows: [&Row; 2]) -> Option<(u32, String, [Verdict; 2])> {
    if edge.destination.is_empty() {
        let calls = edges::calls(edge);
        let gravest = |row| {
            let verdicts = calls.iter().map(|call| judge(row, edge.port, call));
            verdicts.max_by_key(|verdict| verdict.verdict)
        };
        let [old, new] = rows.map(gravest);
        return Some((edge.port, edges::describe(edge), [old?, new?]));
    }
    let to: Destination = edge.destination.parse().ok()?;
    let call = format!("to {}", edge.destination);
    let verdicts = rows.map(|row| judge_outbound(row, &to));
    Some((to.port.into(), call, verdicts))
}

/// The policy that denies calls to outside of the cluster unless a rule allows them: the first
/// ALLOW policy, or the policy of the default.
fn closing(row: &Row) -> Option<String> {
    let egress = row.workload.as_ref()?.egress.as_ref()?;
    let mut policies = egress.policies.iter();
    let is_closing = |policy: &&AuthorizationPolicy| {
        !policy.audit && policy.action() == Action::Allow && policy.ports.is_empty()
    };
    let default = egress.deny_by_default.then_some(&egress.default_name);
    let first = policies.find(is_closing).map(|policy| &policy.name);
    first.or(default).cloned()
}

/// The first ALLOW policy that covers a port, if no rule of them is about it.
fn closed(row: &Row, port: u32) -> Option<String> {
    let has = |ports: &[u32]| ports.is_empty() || ports.contains(&port);
    let authorization = row.workload.as_ref()?.authorization.as_ref()?;
    let policies = authorization.policies.iter();
    let mut covering = policies
        .filter(|policy| !policy.audit && policy.action() == Action::Allow && has(&policy.ports));
    let first = covering.clone().next()?;
    let is_open = covering.any(|policy| policy.rules.iter().any(|rule| has(&rule.ports)));
    (!is_open).then(|| first.name.clone())
}

#[cfg(test)]
pub(crate) mod tests;
