//! Authorization: the AuthorizationPolicies that select a pod, compiled, and the verdict on a call.
//! The proxy of the pod judges with it, and tools predict what it would judge. Pure.

mod check;
mod claims;
pub mod edge;
mod fields;
mod hash;
mod index;
mod paths;
mod readings;
mod rule;
mod sources;
#[cfg(test)]
mod tests;
mod truth;

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use diy_mesh_model::identity::Identity;

use crate::mesh::v1 as proto;
pub use check::{MAX_ISSUERS, MAX_ITEMS, MAX_RULES, check, check_egress, check_issuer};
pub use claims::claim;
use edge::Patterns;
pub use fields::{host_name, may_be_get};
use index::Rules;
pub use index::{asking_action, authorizers, fields, issuer_ports};
pub use readings::{decoded_pattern, has_certain_elements, other_readings};
pub use rule::{Condition, ISSUERS_REVISION, REVISION};

/// The subject of a verdict: a request, or a connection that carries no HTTP. For egress, the other
/// end is the destination.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    /// The identity of the client, if it has authenticated.
    pub identity: Option<&'a Identity>,
    /// The address of the client, or of the destination.
    pub address: IpAddr,
    /// The port of the pod, or of the destination.
    pub port: u16,
    /// The name of the destination.
    pub host: Option<&'a str>,
    /// The request. Absent: the connection carries no HTTP.
    pub request: Option<&'a dyn Request>,
    /// The token of the request.
    pub token: Option<&'a Token>,
}

/// A bearer token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Token {
    /// The names of the policies with an issuer that has issued the token. Empty: the token is not
    /// valid.
    pub policies: Vec<Arc<str>>,
    /// Its claims.
    pub claims: Arc<serde_json::Value>,
}

/// A request's head as it is forwarded, with all that a server may read from it.
pub trait Request {
    /// The method as it was sent.
    fn method(&self) -> &[u8];
    /// The path as it was sent, without the query.
    fn path(&self) -> &[u8];
    /// Calls `each` with every host that a server may use: of the target or of `:authority`, and of
    /// each field Host.
    fn hosts(&self, each: &mut dyn FnMut(&[u8]));
    /// Calls `each` with the name and value of every field, in order.
    fn fields(&self, each: &mut dyn FnMut(&[u8], &[u8]));
}

/// The compiled policies of a pod.
#[derive(Debug, Default)]
pub struct Authorization {
    enforced: Rules,
    /// With those under audit, if there are any.
    audited: Option<Rules>,
    /// The patterns of `enforced` and `audited`.
    patterns: Patterns,
    /// The policies are about calls by the pod.
    is_outbound: bool,
}

/// Why a call is denied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denial {
    /// The policy of the rule, or the policy that sets the default (it may be empty). Where no rule
    /// matches, the policy of the nearest rule or else the first policy that covers the port. For
    /// example "AuthorizationPolicy shop/web".
    pub policy: Arc<str>,
    /// The index of the DENY rule that matches. Absent: no ALLOW rule matches, or the default is to
    /// deny.
    pub rule: Option<usize>,
    /// The ALLOW rule that is nearest to a match. Absent: there is none at this port, a DENY rule
    /// matches, or the default is to deny.
    pub nearest: Option<Nearest>,
    /// The call has a token that no policy at its port accepts. The policy is the first of them.
    pub refuses_token: bool,
}

impl Denial {
    fn of(policy: &Arc<str>) -> Denial {
        Denial {
            policy: policy.clone(),
            rule: None,
            nearest: None,
            refuses_token: false,
        }
    }
}

/// An ALLOW rule that does not match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nearest {
    /// Its index in the policy.
    pub rule: usize,
    /// Its first condition that is not true.
    pub failed: Condition,
}

/// For messages: the policy, and its rule or default that decides.
impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&*self.policy, self.rule) {
            (policy, None) if self.refuses_token => {
                write!(f, "{policy}: the token is not valid for any of its issuers")
            }
            (policy, Some(rule)) => write!(f, "{policy}, rules[{rule}]"),
            ("", None) => f.write_str("the default"),
            (policy, None) => {
                write!(f, "{policy}: no rule matches")?;
                let Some(Nearest { rule, failed }) = self.nearest else {
                    return Ok(());
                };
                let failed = failed.as_str();
                write!(f, ", the nearest is rules[{rule}] but for its {failed}")
            }
        }
    }
}

impl Authorization {
    /// Compiles the policies. A part that this release does not know is a condition with an unknown
    /// result.
    pub fn compile(message: &proto::Authorization) -> Authorization {
        let has_audit = message.policies.iter().any(|policy| policy.audit);
        Authorization {
            enforced: Rules::compile(message, false),
            audited: has_audit.then(|| Rules::compile(message, true)),
            patterns: Patterns::compile(message),
            is_outbound: false,
        }
    }

    /// The policies as policies about calls by the pod: their denials name destinations.
    pub fn outbound(self) -> Authorization {
        Authorization {
            is_outbound: true,
            ..self
        }
    }

    /// Whether the call is allowed.
    pub fn judge(&self, call: &Call<'_>) -> Result<(), Denial> {
        self.judge_by(&self.enforced, call)
    }

    fn judge_by(&self, rules: &Rules, call: &Call<'_>) -> Result<(), Denial> {
        rules.judge(call).map_err(|mut denial| {
            if let Some(nearest) = &mut denial.nearest
                && nearest.failed == Condition::Sources
                && self.is_outbound
            {
                nearest.failed = Condition::Destinations;
            }
            denial
        })
    }

    /// The denial of a request that no token changes: by a DENY rule without claims, or because no
    /// ALLOW rule matches whatever the claims are.
    pub fn judge_before_token(&self, call: &Call<'_>) -> Result<(), Denial> {
        self.enforced.judge_before_token(call)
    }

    /// Whether an ALLOW rule of egress names the host, at this port.
    pub fn names(&self, host: &str, port: u16) -> bool {
        self.enforced.names(host, port)
    }

    /// The positions in the message of the policies whose authorization servers are asked about a
    /// request that [`judge`](Self::judge) allows: it is allowed if each of them allows it. With
    /// routes, the request selects a rule, and the server of this rule is asked, if it has one.
    pub fn external(&self, call: &Call<'_>) -> Vec<usize> {
        self.enforced.external(call)
    }

    /// The denial of a call that [`judge`](Self::judge) allows, if the policies under audit were in
    /// force too.
    pub fn audit(&self, call: &Call<'_>) -> Option<Denial> {
        let audited = self.audited.as_ref()?;
        let denial = self.judge_by(audited, call).err()?;
        self.judge(call).is_ok().then_some(denial)
    }

    /// The most specific pattern of the policies, enforced or under audit, that the path of a request
    /// matches, whatever the other conditions of its rule. `None` without such a pattern: a pattern
    /// that matches every path does not count.
    pub fn pattern(&self, port: u16, path: &[u8]) -> Option<&proto::AuthorizedPath> {
        self.patterns.find(port, path)
    }
}
