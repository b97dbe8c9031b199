//! The sources of the keys of issuers, and the keys in the status of a policy. Plain values.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Key;

/// Characters of a message in a status.
pub(crate) const MAX_MESSAGE: usize = 512;

/// Where keys are.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// A Secret of the namespace of the policy, and the key in it.
    Secret(Key, String),
    /// A URL with the scheme https.
    Url(String),
}

/// As the status has it: it tells which field of the spec the keys are of.
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Secret(key, entry) => write!(f, "Secret {}/{entry}", key.name),
            Source::Url(url) => f.write_str(url),
        }
    }
}

/// An entry of `status.issuers`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Entry {
    /// The source.
    pub source: String,
    /// The latest valid keys, as a JWK set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keys: Option<String>,
    /// Why the latest attempt to fetch keys failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

impl Entry {
    /// Records the result of an attempt. Returns whether it differs from the one before.
    pub(crate) fn record(&mut self, result: Result<String, String>) -> bool {
        let before = self.clone();
        match result {
            Ok(keys) => {
                self.keys = Some(keys);
                self.message = None;
            }
            Err(message) => self.message = Some(message.chars().take(MAX_MESSAGE).collect()),
        }
        *self != before
    }
}
