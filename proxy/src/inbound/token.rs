//! The bearer token of a request (RFC 6750), and the claims that the application gets as fields, by
//! the issuers in the AuthorizationPolicies of the pod. Keys come from the controller: no proxy
//! fetches any. Pure but for the clock, with which the expiry of a token is compared.

mod verified;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use diy_mesh_jwt::{Expected, Keys, Refused, unverified_claims, unverified_key_id};
use diy_mesh_proto::MAX_UNKNOWN_KEYS;
use diy_mesh_proto::authorization::{claim, issuer_ports};
use diy_mesh_proto::mesh::v1 as proto;
use http::HeaderValue;
use serde::Deserialize;
use serde_json::Value;

use self::verified::Verified;
use crate::error::TokenRefusal;
use crate::http::credentials::{Credentials, field_value};

/// The tolerated difference to the clock of an issuer, in seconds.
const LEEWAY: u64 = 60;

/// The issuers of tokens in all policies of a pod.
#[derive(Debug)]
pub struct Issuers {
    verifiers: Vec<Verifier>,
}

/// An issuer, with the policies that have it.
#[derive(Debug)]
struct Verifier {
    message: proto::TokenIssuer,
    /// The keys, or `None` if they cannot be read: no token is valid then.
    keys: Option<Keys>,
    expected: Expected,
    policies: Vec<Accepting>,
    verified: Verified,
    /// A token has named a key that is not among `keys`. The only trace of such tokens: clients
    /// choose their number and their key IDs.
    lacks_key: AtomicBool,
}

/// A policy that accepts the tokens of an issuer.
#[derive(Debug)]
struct Accepting {
    name: Arc<str>,
    audit: bool,
    /// Empty: all.
    ports: Vec<u32>,
    /// The name of each field, and its claim.
    fields: Vec<(Arc<str>, String)>,
}

#[derive(Deserialize)]
struct Issued {
    iss: String,
}

impl Issuers {
    /// The issuers in a message, or `None` without issuers.
    pub fn compile(message: &proto::Authorization) -> Option<Issuers> {
        let mut verifiers: Vec<Verifier> = vec![];
        for policy in &message.policies {
            for issuer in &policy.issuers {
                let accepting = Accepting::new(policy, issuer);
                // Each is asked once, however many policies have it.
                let known = verifiers.iter_mut().find(|known| known.is_same(issuer));
                match known {
                    Some(known) => known.policies.push(accepting),
                    None => verifiers.push(Verifier::new(issuer, accepting)),
                }
            }
        }
        (!verifiers.is_empty()).then_some(Issuers { verifiers })
    }

    /// The names of the issuers of which tokens have named unknown keys since the last call. At most
    /// as many as a message has: the others follow in the next one.
    pub fn take_unknown_keys(&self) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        for verifier in &self.verifiers {
            if names.len() < MAX_UNKNOWN_KEYS && verifier.lacks_key.swap(false, Ordering::Relaxed) {
                names.insert(verifier.message.name.clone());
            }
        }
        names
    }

    /// Verifies the token of a request at a port.
    pub fn read(&self, port: u16, credentials: &mut Credentials) {
        match credentials.sent.take() {
            None => {}
            Some(Ok(token)) => {
                let values = self.verify(&token, port.into(), credentials);
                // The first policy wins.
                for (name, value) in values.into_iter().rev() {
                    credentials.set(&name, vec![value]);
                }
            }
            Some(Err(reason)) => credentials.refuse(TokenRefusal::of_token(reason)),
        }
    }

    /// Verifies a token. Returns the values of fields.
    fn verify(
        &self,
        token: &str,
        port: u32,
        credentials: &mut Credentials,
    ) -> Vec<(Arc<str>, HeaderValue)> {
        let mut values = vec![];
        let issuer = unverified_claims::<Issued>(token).map(|claims| claims.iss);
        let Some(issuer) = issuer else {
            let reason = "it is not a JWT with the claim iss";
            credentials.refuse(TokenRefusal::of_token(reason));
            return values;
        };
        credentials.refuse(TokenRefusal::of_policies("no policy has its issuer"));
        let of_issuer = self.verifiers.iter();
        for verifier in of_issuer.filter(|verifier| verifier.message.name == issuer) {
            let policies = verifier.policies.iter();
            let policies: Vec<_> = policies.filter(|policy| policy.is_at(port)).collect();
            if policies.is_empty() {
                continue;
            }
            let claims = match verifier.verify(token) {
                Ok(claims) => claims,
                Err(refusal) => {
                    credentials.refused = refusal;
                    continue;
                }
            };
            let accepted = credentials.token.get_or_insert_default();
            for policy in policies {
                accepted.policies.push(policy.name.clone());
                if !policy.audit {
                    values.extend(policy.values(&claims));
                }
            }
            accepted.claims = claims;
        }
        values
    }
}

impl Verifier {
    fn new(issuer: &proto::TokenIssuer, accepting: Accepting) -> Verifier {
        Verifier {
            keys: Keys::parse(issuer.keys.as_bytes()).ok(),
            expected: Expected::new(Some(&issuer.name), &issuer.audiences, LEEWAY),
            message: issuer.clone(),
            policies: vec![accepting],
            verified: Verified::default(),
            lacks_key: AtomicBool::new(false),
        }
    }

    fn is_same(&self, issuer: &proto::TokenIssuer) -> bool {
        let own = &self.message;
        own.name == issuer.name && own.audiences == issuer.audiences && own.keys == issuer.keys
    }

    fn verify(&self, token: &str) -> Result<Arc<Value>, TokenRefusal> {
        let unknown = || TokenRefusal::of_policies("the keys of its issuer are unknown");
        let keys = self.keys.as_ref().ok_or_else(unknown)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(u64::MAX, |elapsed| elapsed.as_secs());
        let verify = || keys.verify(token, &self.expected);
        let claims = self.verified.claims(token, now, verify);
        claims.map_err(|refused| {
            let is_about_keys = matches!(refused, Refused::UnknownKey | Refused::Signature);
            let id = unverified_key_id(token).filter(|_| is_about_keys);
            if id.is_some_and(|id| !keys.contains(&id)) {
                self.lacks_key.store(true, Ordering::Relaxed);
            }
            let is_of_token = matches!(
                refused,
                Refused::Malformed
                    | Refused::Symmetric
                    | Refused::Critical
                    | Refused::Expired
                    | Refused::NotYetValid
                    | Refused::Missing(_)
            );
            if is_of_token {
                TokenRefusal::of_token(refused.to_string())
            } else {
                TokenRefusal::of_policies(refused.to_string())
            }
        })
    }
}

impl Accepting {
    fn new(policy: &proto::AuthorizationPolicy, issuer: &proto::TokenIssuer) -> Accepting {
        let fields = issuer.fields.iter();
        let fields = fields.map(|field| (field.name.as_str().into(), field.claim.clone()));
        Accepting {
            name: policy.name.as_str().into(),
            audit: policy.audit,
            ports: issuer_ports(policy),
            fields: fields.collect(),
        }
    }

    fn is_at(&self, port: u32) -> bool {
        self.ports.is_empty() || self.ports.contains(&port)
    }

    fn values(&self, claims: &Value) -> impl Iterator<Item = (Arc<str>, HeaderValue)> {
        let fields = self.fields.iter();
        fields.filter_map(|(name, of)| Some((name.clone(), field_value(claim(claims, of)?)?)))
    }
}
