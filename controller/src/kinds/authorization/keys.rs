//! The public keys of issuers that their policies do not contain. Each replica fetches them from
//! Secrets and URLs (`crate::fetch`), and the one that holds the Lease writes them into the status
//! of the policy. Replicas read them only there: they agree, and neither a restart nor an outage of
//! an issuer loses keys. Pure.

use serde_json::{Value, json};

use crate::object::Condition;
use crate::object::fields::field;
use crate::object::issuer_keys::{Entry, Source};

/// The length of a set of keys.
pub const MAX_KEY_BYTES: usize = 64 * 1024;

/// Keys that a policy has from its status, or lacks.
#[derive(Clone, Debug, PartialEq)]
pub struct Fetched {
    /// The claim `iss` of the tokens.
    pub issuer: String,
    /// Where they are.
    pub source: Source,
    /// The policy has some.
    pub has_keys: bool,
    /// Why the latest attempt to fetch them failed.
    pub message: Option<String>,
}

/// The entries in the status of a policy.
pub fn entries(status: &str) -> Vec<Entry> {
    serde_json::from_str(field(status, "issuers")).unwrap_or_default()
}

/// The condition of a policy with such keys.
pub fn condition(fetched: &[Fetched]) -> Option<Condition> {
    let reason = |one: &Fetched| {
        let message = one
            .message
            .as_deref()
            .unwrap_or("they were not fetched yet");
        format!("{}: {message}", one.source)
    };
    let list =
        |all: &mut dyn Iterator<Item = &Fetched>| all.map(reason).collect::<Vec<_>>().join("; ");
    let missing = list(&mut fetched.iter().filter(|one| !one.has_keys));
    let stale = list(&mut fetched.iter().filter(|one| one.message.is_some()));
    let message = match (&*missing, &*stale) {
        _ if fetched.is_empty() => return None,
        ("", "") => "the keys of all issuers are known".to_owned(),
        ("", stale) => format!("the latest known keys are in use; {stale}"),
        (missing, _) => format!("no token of the issuer is valid without its keys; {missing}"),
    };
    Some(match &*missing {
        "" => Condition::new("ResolvedRefs", true, "ResolvedRefs", message),
        _ => Condition::new("ResolvedRefs", false, "KeysNotFound", message),
    })
}

/// `status.issuers` with the entries that were fetched since. `None`: there is nothing to change.
pub fn merge(desired: &[(Source, Entry)], status: &Value) -> Option<Value> {
    let before = entries(&status.to_string());
    let merged = desired.iter().map(|(source, fetched)| {
        let source = source.to_string();
        let known = before.iter().find(|known| known.source == source);
        let known = known.cloned().unwrap_or_default();
        let was_tried = fetched.keys.is_some() || fetched.message.is_some();
        let latest = if was_tried { fetched } else { &known };
        Entry {
            source,
            keys: fetched.keys.clone().or_else(|| known.keys.clone()),
            message: latest.message.clone(),
        }
    });
    let merged: Vec<Entry> = merged.collect();
    (merged != before).then(|| json!(merged))
}

#[cfg(test)]
mod tests;
