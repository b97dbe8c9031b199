//! Conditions on the claims of the token of a request.

use std::sync::Arc;

use serde_json::Value;

use super::Token;
use super::fields::Text;
use super::paths::check_length;
use super::truth::Truth;
use crate::mesh::v1 as proto;
use crate::policy::{Violation, violation};

/// Claims whose members are words (RFC 8693, section 4.2).
const WORDS: [&str; 2] = ["scope", "scp"];

/// A condition on a claim.
#[derive(Debug)]
pub(super) struct ClaimCondition {
    name: Box<str>,
    value: Text,
}

/// A claim by its name or, if that begins with `/`, by a JSON pointer (RFC 6901).
pub fn claim<'a>(claims: &'a Value, name: &str) -> Option<&'a Value> {
    let claim = if name.starts_with('/') {
        claims.pointer(name)
    } else {
        claims.get(name)
    };
    claim.filter(|claim| !claim.is_null())
}

/// The truth of all conditions of a policy on claims. Unknown without a token that it accepts.
pub(super) fn judge(
    conditions: &[Option<ClaimCondition>],
    token: Option<&Token>,
    policy: &Arc<str>,
) -> Truth {
    if conditions.is_empty() {
        return Truth::True;
    }
    let Some(token) = token.filter(|token| token.policies.contains(policy)) else {
        return Truth::Unknown;
    };
    !Truth::any_known(conditions, |one| (!one.holds(&token.claims)).into())
}

/// Checks the name of a claim.
pub(super) fn check_claim(field: &'static str, name: &str) -> Result<(), Violation> {
    if name.is_empty() || name == "/" {
        let expected = "the name of a claim, or a JSON pointer such as /realm_access/roles";
        return Err(violation(field, name, expected));
    }
    check_length(field, name)
}

impl ClaimCondition {
    pub(super) fn parse(message: &proto::AuthorizedField) -> Result<ClaimCondition, Violation> {
        check_claim("name", &message.name)?;
        Ok(ClaimCondition {
            name: message.name.as_str().into(),
            value: Text::parse("value", message)?,
        })
    }

    fn holds(&self, claims: &Value) -> bool {
        match claim(claims, &self.name) {
            None => false,
            Some(Value::Array(members)) => {
                self.value.is_any() || members.iter().any(|member| self.is_value(member))
            }
            Some(Value::String(words)) if WORDS.contains(&&*self.name) => {
                let mut words = words.split(' ');
                self.value.is_any() || words.any(|word| self.value.matches(word.as_bytes()))
            }
            Some(value) => self.is_value(value),
        }
    }

    fn is_value(&self, value: &Value) -> bool {
        match value {
            Value::String(text) => self.value.matches(text.as_bytes()),
            Value::Number(number) => self.value.matches(number.to_string().as_bytes()),
            Value::Bool(flag) => self.value.matches(flag.to_string().as_bytes()),
            Value::Null | Value::Array(_) | Value::Object(_) => self.value.is_any(),
        }
    }
}
