//! The permitted callers of pods, and the permitted destinations of pods outside of the cluster.
//! Judges calls by the policies that the proxies of the pods have, with the evaluator of the
//! proxies. Parts of a call may be unknown. Pure.

mod assume;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    str::FromStr,
    sync::Arc,
};

use diy_mesh_controller::explain::authorization;
use diy_mesh_controller::index::Index;
use diy_mesh_controller::object::Key;
use diy_mesh_model::identity::{Identity, TRUST_DOMAIN};
use diy_mesh_proto::{
    authorization::{Authorization, Call as Judged, Denial, Request, Token, authorizers, edge},
    mesh::v1::{
        self as proto, AuthorizedPath, Workload, authorization_policy::Action,
        get_authorization_response::Pod, workload::InboundMode,
    },
};
use serde::Serialize;
use serde_json::Value;

/// The client of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// Without an identity.
    Unauthenticated,
    /// Namespace and name of a service account of the trust domain of the mesh.
    Account(String, String),
    /// A SPIFFE ID.
    Spiffe(Identity),
}

impl Caller {
    /// The identity, in the trust domain of the called pod.
    fn identity(&self, pod: &Pod) -> Option<Identity> {
        match self {
            Self::Unauthenticated => None,
            Self::Spiffe(identity) => Some(identity.clone()),
            Self::Account(namespace, name) => {
                let pod: Option<Identity> = pod.identity.parse().ok();
                let domain = pod.as_ref().map_or(TRUST_DOMAIN, Identity::trust_domain);
                Identity::new(domain, namespace, name).ok()
            }
        }
    }
}

impl FromStr for Caller {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "unauthenticated" {
            return Ok(Self::Unauthenticated);
        }
        if text.starts_with("spiffe:") {
            let identity = text.parse().map(Self::Spiffe);
            return identity.map_err(|error| format!("{error}"));
        }
        let expected = "expected NAMESPACE/SERVICE-ACCOUNT, a SPIFFE ID, or unauthenticated";
        let (namespace, name) = text.split_once('/').ok_or(expected)?;
        Identity::new(TRUST_DOMAIN, namespace, name).map_err(|error| error.to_string())?;
        Ok(Self::Account(namespace.to_owned(), name.to_owned()))
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unauthenticated => f.write_str("unauthenticated"),
            Self::Account(namespace, name) => write!(f, "{namespace}/{name}"),
            Self::Spiffe(identity) => f.write_str(identity.as_str()),
        }
    }
}

/// A Service or a pod, and one of its ports, or 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Namespace and name.
    pub key: Key,
    /// A port of the Service or of the pod. 0: all of them.
    pub port: u32,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, port) = text.split_once(':').unwrap_or((text, "0"));
        let port = port.parse::<u16>().ok();
        let parts: Vec<&str> = name.split('/').collect();
        match (&parts[..], port) {
            ([namespace, name], Some(port)) if !namespace.is_empty() && !name.is_empty() => {
                let (key, port) = (Key::new(namespace, name), port.into());
                Ok(Self { key, port })
            }
            _ => Err("expected NAMESPACE/NAME or NAMESPACE/NAME:PORT of a Service or a pod".into()),
        }
    }
}

/// A destination outside of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The name in the ClientHello or in Host. `None`: there is none.
    pub host: Option<String>,
    /// The address. `None`: not known.
    pub address: Option<IpAddr>,
    /// The port.
    pub port: u16,
}

impl FromStr for Destination {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.to_ascii_lowercase();
        let expected = "expected HOST:PORT or ADDRESS:PORT of a destination outside of the cluster";
        let (host, port) = edge::destination(&text).ok_or(expected)?;
        let address = text.parse().ok().map(|address: SocketAddr| address.ip());
        Ok(Self {
            host: address.is_none().then(|| host.to_owned()),
            address,
            port,
        })
    }
}

/// A call. Absent fields are not known.
#[derive(Clone, Debug)]
pub struct Call {
    /// The client.
    pub caller: Caller,
    /// The address of the client.
    pub address: Option<IpAddr>,
    /// The request, unless the connection carries no HTTP.
    pub request: Option<Head>,
}

/// The head of a request. Absent fields are not known.
#[derive(Clone, Debug)]
pub struct Head {
    /// The method.
    pub method: String,
    /// The path, without the query.
    pub path: Path,
    /// The host.
    pub host: Option<String>,
    /// The header fields.
    pub fields: Option<Vec<(String, String)>>,
    /// The claims of a token that all issuers of the policies accept.
    pub token: Claims,
}

/// The knowledge about the token of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Claims {
    /// Its claims, an object.
    Known(Value),
    /// There is none.
    Absent,
    /// Nothing: it may be absent, or invalid.
    Unknown,
}

/// The knowledge about a path.
#[derive(Clone, Debug, PartialEq)]
pub enum Path {
    /// All of it.
    Known(String),
    /// A pattern that it matches.
    Like(AuthorizedPath),
    /// Nothing.
    Unknown,
}

impl Claims {
    /// The token against the call, and for it.
    fn assumed(&self, message: &proto::Authorization) -> [Option<Token>; 2] {
        let policies = message.policies.iter();
        let policies: Vec<_> = policies.map(|policy| policy.name.as_str().into()).collect();
        let valid = |claims: &Value| {
            let (policies, claims) = (policies.clone(), Arc::new(claims.clone()));
            Some(Token { policies, claims })
        };
        match self {
            Self::Known(claims) => [valid(claims), valid(claims)],
            Self::Absent => [None, None],
            // At best, conditions on claims that would have to hold are removed.
            Self::Unknown => [Some(Token::default()), valid(&Value::Null)],
        }
    }
}

impl Request for Head {
    fn method(&self) -> &[u8] {
        self.method.as_bytes()
    }

    fn path(&self) -> &[u8] {
        match &self.path {
            Path::Known(path) => path.as_bytes(),
            // Conditions that it decides are replaced.
            _ => assume::SOME_PATH,
        }
    }

    fn hosts(&self, each: &mut dyn FnMut(&[u8])) {
        // No condition matches an address.
        each(self.host.as_deref().unwrap_or("[::]").as_bytes());
    }

    fn fields(&self, each: &mut dyn FnMut(&[u8], &[u8])) {
        for (name, value) in self.fields.iter().flatten() {
            each(name.as_bytes(), value.as_bytes());
        }
    }
}

/// Whether a call is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It is.
    Allowed,
    /// An authorization server decides.
    Asks,
    /// It depends on what is not known.
    Unknown,
    /// It is not.
    Denied,
}

/// The verdict on a call at a port of a pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Verdict {
    /// Whether it is allowed.
    pub verdict: Outcome,
    /// Why, for people.
    pub reason: String,
    /// The policy that decides.
    pub policy: Option<String>,
    /// Its rule: the one that matches, or the nearest one.
    pub rule: Option<usize>,
    /// The first field of the nearest rule that does not match.
    pub field: Option<&'static str>,
    /// The additional denial by the policies under audit.
    pub audit: Option<String>,
}

impl Verdict {
    fn new(verdict: Outcome, reason: impl Into<String>) -> Self {
        Self {
            verdict,
            reason: reason.into(),
            policy: None,
            rule: None,
            field: None,
            audit: None,
        }
    }

    fn denial(verdict: Outcome, denial: &Denial) -> Self {
        let nearest = denial.nearest;
        Self {
            policy: Some(denial.policy.to_string()).filter(|policy| !policy.is_empty()),
            rule: denial.rule.or(nearest.map(|nearest| nearest.rule)),
            field: nearest.map(|nearest| nearest.failed.as_str()),
            ..Self::new(verdict, denial.to_string())
        }
    }
}

/// The pods that a target is about, of an index. `None`: it is not there.
pub fn pods(index: &Index, target: &Target) -> Option<Vec<Pod>> {
    let pods = authorization::pods(index, &target.key)?;
    let pod = |key: &Key| authorization::pod(index, &target.key, target.port, key);
    Some(pods.iter().filter_map(pod).collect())
}

/// A port, the verdict there, and the pods that have it.
pub type Row = (u32, Verdict, Vec<String>);

/// The verdicts at all ports of the pods.
pub fn verdicts(pods: &[Pod], call: &Call) -> Vec<Row> {
    let judged = pods.iter().flat_map(|pod| {
        let ports = pod.ports.iter();
        ports.map(move |port| (pod, *port, judge(pod, *port, call)))
    });
    grouped(judged)
}

/// The verdicts on a call by the pods to outside of the cluster.
pub fn outbound_verdicts(pods: &[Pod], to: &Destination) -> Vec<Row> {
    let judged = pods.iter();
    grouped(judged.map(|pod| (pod, to.port.into(), judge_outbound(pod, to))))
}

fn grouped<'a>(judged: impl Iterator<Item = (&'a Pod, u32, Verdict)>) -> Vec<Row> {
    let mut all: BTreeMap<_, Vec<String>> = BTreeMap::new();
    for (pod, port, verdict) in judged {
        let name = format!("{}/{}", pod.namespace, pod.name);
        all.entry((port, verdict)).or_default().push(name);
    }
    let all = all.into_iter();
    all.map(|((port, verdict), pods)| (port, verdict, pods))
        .collect()
}

/// The configuration of the proxy of a pod, or the verdict without a proxy.
fn told(pod: &Pod) -> Result<&Workload, Verdict> {
    if pod.identity.is_empty() {
        return Err(Verdict::new(Outcome::Allowed, "the pod has no proxy"));
    }
    pod.workload.as_ref().ok_or_else(|| {
        let reason = "a policy of the mesh is invalid, or policies cannot be read: the proxy keeps \
                      those that it has";
        Verdict::new(Outcome::Unknown, reason)
    })
}

/// The verdict on a call by a pod to outside of the cluster.
pub fn judge_outbound(pod: &Pod, to: &Destination) -> Verdict {
    let call = Call {
        caller: Caller::Unauthenticated,
        address: to.address,
        request: None,
    };
    match told(pod) {
        Err(verdict) => verdict,
        Ok(workload) => {
            let message = workload.egress.clone().unwrap_or_default();
            judge_policies(&message, Some(to), None, to.port.into(), &call)
        }
    }
}

/// The verdict on a call at a port of a pod.
pub fn judge(pod: &Pod, port: u32, call: &Call) -> Verdict {
    if pod.bypassed.contains(&port) && !pod.identity.is_empty() {
        return Verdict::new(Outcome::Allowed, "the port bypasses the proxy");
    }
    let workload = match told(pod) {
        Ok(workload) => workload,
        Err(verdict) => return verdict,
    };
    let is_strict = workload.inbound_mode() == InboundMode::Strict;
    if is_strict && call.caller == Caller::Unauthenticated {
        return Verdict::new(Outcome::Denied, "the pod is strict: mutual TLS is required");
    }
    let mut opaque = workload.opaque_ports.iter();
    let is_opaque = opaque.any(|range| (range.first..=range.last).contains(&port));
    let request = call.request.clone().filter(|_| !is_opaque);
    let method = request.as_ref().map(|head| &*head.method);
    if method.is_some_and(|method| method.eq_ignore_ascii_case("CONNECT"))
        && !workload.allow_connect
    {
        return Verdict::new(Outcome::Denied, "the pod does not allow CONNECT");
    }
    let call = Call {
        request,
        ..call.clone()
    };
    let message = workload.authorization.clone().unwrap_or_default();
    let identity = call.caller.identity(pod);
    judge_policies(&message, None, identity.as_ref(), port, &call)
}

/// The verdict of policies, with what is not known assumed against the call, and for it.
fn judge_policies(
    message: &proto::Authorization,
    outbound: Option<&Destination>,
    identity: Option<&Identity>,
    port: u32,
    call: &Call,
) -> Verdict {
    let judged = Judged {
        identity,
        address: call.address.unwrap_or(Ipv4Addr::UNSPECIFIED.into()),
        port: port.try_into().unwrap_or_default(),
        host: outbound.and_then(|to| to.host.as_deref()),
        request: call.request.as_ref().map(|request| request as &dyn Request),
        token: None,
    };
    let [worst, best] = [false, true].map(|is_allowed| assume::assume(message, call, is_allowed));
    let [pessimist, optimist] = [&worst, &best].map(|message| {
        let compiled = Authorization::compile(message);
        match outbound {
            Some(_) => compiled.outbound(),
            None => compiled,
        }
    });
    let tokens = call
        .request
        .as_ref()
        .map(|head| head.token.assumed(message));
    let [at_worst, at_best] = [0, 1].map(|at| {
        let token = tokens.as_ref().and_then(|tokens| tokens[at].as_ref());
        Judged { token, ..judged }
    });
    let verdict = match (pessimist.judge(&at_worst), optimist.judge(&at_best)) {
        (_, Err(denial)) => return Verdict::denial(Outcome::Denied, &denial),
        (Err(denial), Ok(())) => Verdict::denial(Outcome::Unknown, &denial),
        (Ok(()), Ok(())) => {
            let certain = optimist.external(&at_best);
            let asked = asked(message, &pessimist.external(&at_worst), certain.is_empty());
            asked.unwrap_or_else(|| allowed(&worst, &at_worst))
        }
    };
    let would_be = optimist.audit(&at_best).map(|denial| denial.to_string());
    let may_be = || Some(format!("cannot tell: {}", pessimist.audit(&at_worst)?));
    Verdict {
        audit: would_be.or_else(may_be),
        ..verdict
    }
}

/// The verdict on a call about which the servers of the policies at these positions are asked,
/// perhaps. `None`: there are none.
fn asked(
    message: &proto::Authorization,
    positions: &[usize],
    is_uncertain: bool,
) -> Option<Verdict> {
    let policies = positions.iter().map(|at| &message.policies[*at]);
    let server = |policy: &proto::AuthorizationPolicy| {
        let servers = authorizers(policy).map(|server| match &*server.backend {
            "" => "no server",
            name => name,
        });
        let servers = Vec::from_iter(BTreeSet::from_iter(servers)).join(" or ");
        format!("{servers} allows it ({})", policy.name)
    };
    let servers: Vec<String> = policies.clone().map(server).collect();
    let outcome = if is_uncertain {
        Outcome::Unknown
    } else {
        Outcome::Asks
    };
    let reason = format!("allowed if {}", servers.join(" and "));
    Some(Verdict {
        policy: Some(policies.clone().next()?.name.clone()),
        ..Verdict::new(outcome, reason)
    })
}

/// Why a call is allowed: the first rule that allows it on its own.
fn allowed(message: &proto::Authorization, call: &Judged<'_>) -> Verdict {
    let policies = message.policies.iter();
    let allowing = policies.filter(|policy| !policy.audit && policy.action() == Action::Allow);
    for policy in allowing {
        for (position, rule) in policy.rules.iter().enumerate() {
            let alone = proto::Authorization {
                policies: vec![proto::AuthorizationPolicy {
                    name: policy.name.clone(),
                    action: policy.action,
                    ports: policy.ports.clone(),
                    rules: vec![rule.clone()],
                    issuers: policy.issuers.clone(),
                    ..proto::AuthorizationPolicy::default()
                }],
                deny_by_default: true,
                ..proto::Authorization::default()
            };
            if Authorization::compile(&alone).judge(call).is_ok() {
                let reason = format!("{}, rules[{position}]", policy.name);
                return Verdict {
                    policy: Some(policy.name.clone()),
                    rule: Some(position),
                    ..Verdict::new(Outcome::Allowed, reason)
                };
            }
        }
    }
    Verdict::new(
        Outcome::Allowed,
        "no ALLOW policy covers the port, and no DENY rule matches",
    )
}

#[cfg(test)]
mod tests;
