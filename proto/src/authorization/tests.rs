//! Tests of verdicts: helpers, and what the parts of a rule mean.

use std::fmt;

use super::*;
use crate::mesh::v1::authorization_policy::Action;
use crate::mesh::v1::authorized_path::Kind as PathKind;
use crate::mesh::v1::{
    AuthorizationPolicy, AuthorizationRule, AuthorizationSource, AuthorizationSources,
    AuthorizedField, AuthorizedPath, Authorizer, ClaimField, IdentityMatch, RequestMatch,
    TokenIssuer, Unauthenticated, authorization_source, authorized_field,
};
use crate::mesh::v1::{RouteAuthorization, route_authorization};

mod checks;
mod claims;
mod confusion;
mod egress;
mod naive;
mod policies;
mod random;
mod readers;
mod spellings;

/// A request.
#[derive(Clone, Default)]
struct Head {
    method: Vec<u8>,
    path: Vec<u8>,
    hosts: Vec<Vec<u8>>,
    fields: Vec<(Vec<u8>, Vec<u8>)>,
}

impl fmt::Debug for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |bytes: &[u8]| {
            String::from_utf8_lossy(bytes)
                .chars()
                .take(200)
                .collect::<String>()
        };
        write!(f, "{} {}", text(&self.method), text(&self.path))?;
        for host in &self.hosts {
            write!(f, " @{}", text(host))?;
        }
        for (name, value) in &self.fields {
            write!(f, " {}={:?}", text(name), text(value))?;
        }
        Ok(())
    }
}

impl Request for Head {
    fn method(&self) -> &[u8] {
        &self.method
    }

    fn path(&self) -> &[u8] {
        &self.path
    }

    fn hosts(&self, each: &mut dyn FnMut(&[u8])) {
        for host in &self.hosts {
            each(host);
        }
    }

    fn fields(&self, each: &mut dyn FnMut(&[u8], &[u8])) {
        for (name, value) in &self.fields {
            each(name, value);
        }
    }
}

fn get(path: &str) -> Head {
    Head {
        method: b"GET".into(),
        path: path.into(),
        hosts: vec![b"web".into()],
        fields: vec![],
    }
}

fn with_hosts(hosts: &[&str]) -> Head {
    Head {
        hosts: hosts.iter().map(|host| (*host).into()).collect(),
        ..get("/")
    }
}

fn with_fields(fields: &[(&str, &str)]) -> Head {
    let fields = fields.iter();
    Head {
        fields: fields
            .map(|(name, value)| ((*name).into(), (*value).into()))
            .collect(),
        ..get("/")
    }
}

fn identity(text: &str) -> Identity {
    let (namespace, account) = text.split_once('/').unwrap();
    Identity::new("cluster.local", namespace, account).unwrap()
}

/// A call from an address of IPv4 to port 80.
fn call<'a>(identity: Option<&'a Identity>, request: Option<&'a dyn Request>) -> Call<'a> {
    Call {
        identity,
        address: [10, 0, 0, 1].into(),
        port: 80,
        host: None,
        request,
        token: None,
    }
}

fn policy(name: &str, action: Action, rules: Vec<AuthorizationRule>) -> AuthorizationPolicy {
    AuthorizationPolicy {
        name: name.into(),
        action: action.into(),
        rules,
        ..AuthorizationPolicy::default()
    }
}

fn rule() -> AuthorizationRule {
    AuthorizationRule {
        revision: REVISION,
        ..AuthorizationRule::default()
    }
}

fn from(sources: &[AuthorizationSource]) -> AuthorizationRule {
    AuthorizationRule {
        sources: Some(AuthorizationSources {
            sources: sources.to_vec(),
        }),
        ..rule()
    }
}

fn about(request: RequestMatch) -> AuthorizationRule {
    AuthorizationRule {
        requests: vec![request],
        ..rule()
    }
}

fn source(kind: authorization_source::Kind) -> AuthorizationSource {
    AuthorizationSource { kind: Some(kind) }
}

/// "NAMESPACE/ACCOUNT", of which each part may be empty.
fn client(text: &str) -> AuthorizationSource {
    let (namespace, account) = text.split_once('/').unwrap();
    source(authorization_source::Kind::Identity(IdentityMatch {
        trust_domain: "cluster.local".into(),
        namespace: namespace.into(),
        service_account: account.into(),
    }))
}

fn block(text: &str) -> AuthorizationSource {
    source(authorization_source::Kind::IpBlock(text.into()))
}

fn unauthenticated() -> AuthorizationSource {
    source(authorization_source::Kind::Unauthenticated(
        Unauthenticated {},
    ))
}

/// Written as "exact:/a", "prefix:/a", "suffix:.html" or "template:/{*}".
fn path(text: &str) -> AuthorizedPath {
    let (kind, value) = text.split_once(':').unwrap();
    let kind = match kind {
        "exact" => PathKind::Exact,
        "prefix" => PathKind::Prefix,
        "suffix" => PathKind::Suffix,
        "template" => PathKind::Template,
        other => panic!("unknown kind {other}"),
    };
    AuthorizedPath {
        kind: Some(kind(value.into())),
    }
}

fn paths(texts: &[&str]) -> RequestMatch {
    RequestMatch {
        paths: texts.iter().map(|text| path(text)).collect(),
        ..RequestMatch::default()
    }
}

fn hosts(hosts: &[&str]) -> RequestMatch {
    RequestMatch {
        hosts: hosts.iter().map(|host| (*host).into()).collect(),
        ..RequestMatch::default()
    }
}

/// Written as "exact:a", "prefix:a", "suffix:a" or "present:".
fn header(name: &str, text: &str) -> RequestMatch {
    let (kind, value) = text.split_once(':').unwrap();
    let kind = match kind {
        "exact" => authorized_field::Kind::Exact(value.into()),
        "prefix" => authorized_field::Kind::Prefix(value.into()),
        "suffix" => authorized_field::Kind::Suffix(value.into()),
        "present" => authorized_field::Kind::Present(Default::default()),
        other => panic!("unknown kind {other}"),
    };
    RequestMatch {
        headers: vec![AuthorizedField {
            name: name.into(),
            kind: Some(kind),
        }],
        ..RequestMatch::default()
    }
}

fn compile(policies: Vec<AuthorizationPolicy>) -> Authorization {
    Authorization::compile(&proto::Authorization {
        policies,
        ..proto::Authorization::default()
    })
}

/// Whether a request passes a policy of one rule.
fn passes(action: Action, condition: &RequestMatch, head: &Head) -> bool {
    let policy = policy("p", action, vec![about(condition.clone())]);
    let caller = identity("shop/web");
    compile(vec![policy])
        .judge(&call(Some(&caller), Some(head)))
        .is_ok()
}
