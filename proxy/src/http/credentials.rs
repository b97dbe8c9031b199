//! The credentials of a request besides the identity of its client: a bearer token (RFC 6750). And
//! the fields that the application gets in its place, which no client can set.

use std::sync::Arc;

use diy_mesh_proto::authorization::Token;
use diy_mesh_proto::field::is_same_name;
use http::HeaderValue;
use serde_json::Value;

use super::view::RequestView;
use crate::error::TokenRefusal;

/// The scheme of bearer tokens (RFC 6750).
const SCHEME: &str = "bearer";

/// The credentials of a request.
#[derive(Debug, Default)]
pub struct Credentials {
    /// The token as it was sent, until it is verified, or why there is not one token.
    pub sent: Option<Result<String, &'static str>>,
    /// Its token, or `None` without a token and before it is verified.
    pub token: Option<Token>,
    /// Why the token is not valid.
    pub refused: TokenRefusal,
    /// The fields that the application gets from the proxy, or does not get.
    pub fields: Vec<PolicyField>,
}

/// The names of fields that the application gets from policies, never from clients.
pub type PolicyFields = Arc<[Arc<str>]>;

/// A field with the value of a claim, or of an authorization server. `None` removes the field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyField(pub Arc<str>, pub Option<HeaderValue>);

impl Credentials {
    /// Without a token.
    pub fn new(fields: &PolicyFields) -> Self {
        let fields = fields.iter();
        Self {
            fields: fields.map(|name| PolicyField(name.clone(), None)).collect(),
            ..Self::default()
        }
    }

    /// Replaces the values of a field. Without values, the field is removed.
    pub fn set(&mut self, name: &Arc<str>, values: Vec<HeaderValue>) {
        let is_field = |field: &PolicyField| is_same_name(field.0.as_bytes(), name.as_bytes());
        let at = self.fields.iter().position(is_field).unwrap_or_default();
        self.fields.retain(|field| !is_field(field));
        let none = values.is_empty().then_some(None);
        let values = values.into_iter().map(Some).chain(none);
        let fields = values.map(|value| PolicyField(name.clone(), value));
        self.fields.splice(at..at, fields);
    }

    /// There is a token, which is not valid.
    pub fn refuse(&mut self, refusal: TokenRefusal) {
        self.token = Some(Token::default());
        self.refused = refusal;
    }
}

/// The token of a request. Servers that read several fields could find another one than the proxy.
pub fn bearer<'a>(request: &RequestView<'a>) -> Result<Option<&'a str>, &'static str> {
    let (mut token, mut lines) = (Ok(None), 0);
    request.head.visit(&mut |name, value| {
        if name.eq_ignore_ascii_case(b"authorization") {
            lines += 1;
            if !matches!(token, Err(_) | Ok(Some(_))) {
                token = bearer_of(value.trim_ascii());
            }
        }
    });
    match token {
        Ok(Some(_)) if lines > 1 => Err("the request has more than one Authorization field"),
        token => token,
    }
}

/// The token in the value of an Authorization field. Servers read other spellings of the scheme and of
/// the space after it as a token, too: these are not valid.
fn bearer_of(value: &[u8]) -> Result<Option<&str>, &'static str> {
    let is_printable = |byte: &u8| matches!(byte, b'\t' | b' '..=b'~');
    let text = str::from_utf8(value)
        .ok()
        .filter(|_| value.iter().all(is_printable));
    let text = text.ok_or("the Authorization field has a byte that is not printable ASCII")?;
    let (scheme, rest) = text.split_at(text.len().min(SCHEME.len()));
    if scheme.eq_ignore_ascii_case(SCHEME) && (rest.is_empty() || rest.starts_with([' ', '\t'])) {
        Ok(Some(rest.trim_ascii()))
    } else if text.to_ascii_lowercase().contains(SCHEME) {
        Err("the Authorization field is not of the form \"Bearer TOKEN\"")
    } else {
        Ok(None)
    }
}

/// A claim as the value of a field. Lists and objects have no form that all applications read alike.
pub fn field_value(claim: &Value) -> Option<HeaderValue> {
    let text = match claim {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        Value::Bool(flag) => flag.to_string(),
        _ => return None,
    };
    let is_whole = !text.is_empty() && text.trim() == text;
    HeaderValue::from_bytes(text.as_bytes())
        .ok()
        .filter(|_| is_whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_a_field_are_replaced_whatever_the_spelling_of_its_name_is() {
        let names: PolicyFields = ["X-User", "x-level"].map(Arc::from).into();
        let mut credentials = Credentials::new(&names);
        let value = |text| HeaderValue::from_static(text);
        credentials.set(&"x-user".into(), vec![value("ada")]);
        credentials.set(&"X_USER".into(), vec![value("eve"), value("bob")]);
        let fields = [
            PolicyField("X_USER".into(), Some(value("eve"))),
            PolicyField("X_USER".into(), Some(value("bob"))),
            PolicyField("x-level".into(), None),
        ];
        assert_eq!(credentials.fields, fields);
        credentials.set(&"X-LEVEL".into(), vec![]);
        assert_eq!(credentials.fields[2], PolicyField("X-LEVEL".into(), None));
    }
}
