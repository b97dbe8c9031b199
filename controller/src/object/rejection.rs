//! Why an object, or a part of it, is not accepted. Plain values.

use diy_mesh_proto::policy::Violation;

use super::Condition;
use super::condition::UNSUPPORTED_VALUE;

/// The length of a value in an error.
const MAX_SHOWN_CHARS: usize = 64;
/// The length of an error. Each parent of a route has a copy of it.
const MAX_ERROR_CHARS: usize = 512;

/// Why a route, or a reference of it, is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Rejection {
    /// A reason of the specification.
    pub reason: &'static str,
    /// The field, its value and the expected value.
    pub message: String,
    /// Whether other rules of the route are valid.
    pub is_partial: bool,
}

impl Rejection {
    /// A rejection for a reason of the specification.
    pub fn new(reason: &'static str, message: String) -> Rejection {
        Rejection {
            reason,
            message,
            is_partial: false,
        }
    }

    /// The rejection with its effect.
    pub(crate) fn with(self, effect: &str) -> Rejection {
        Rejection {
            message: format!("{}; {effect}", self.message),
            ..self
        }
    }

    /// The condition of the route.
    pub fn condition(&self) -> Condition {
        Condition::new("Accepted", false, self.reason, self.message.clone())
    }
}

/// The start of an error, which may contain a value of any length.
pub(crate) fn shortened(error: &str) -> String {
    error.chars().take(MAX_ERROR_CHARS).collect()
}

/// A rejection that names the field, its value and the expected value.
pub(crate) fn unsupported(field: &str, value: &str, expected: &str) -> Rejection {
    Rejection::new(
        UNSUPPORTED_VALUE,
        format!("{field}: {}", not(value, expected)),
    )
}

/// Says that a value is not as expected.
pub(crate) fn not(value: &str, expected: &str) -> String {
    let shown: String = value.chars().take(MAX_SHOWN_CHARS).collect();
    format!("{shown:?} is not {expected}")
}

/// Rejects the value of the field `name` in the field `at`.
pub(crate) fn refuse<T>(
    at: &str,
    name: &str,
    value: impl ToString,
    expected: &str,
) -> Result<T, Rejection> {
    let field = format!("{at}.{name}");
    Err(unsupported(&field, &value.to_string(), expected))
}

/// Rejects lists that are longer than Kubernetes permits.
pub(crate) fn bounded<T>(field: &str, list: &[T], max: usize) -> Result<(), Rejection> {
    if list.len() <= max {
        Ok(())
    } else {
        let message = format!("{field}: {} entries are more than {max}", list.len());
        Err(Rejection::new(UNSUPPORTED_VALUE, message))
    }
}

/// The rejection of a value that proxies would reject.
pub(crate) fn violates(at: &str, violation: &Violation) -> Rejection {
    let dot = if violation.field.is_empty() { "" } else { "." };
    let field = format!("{at}{dot}{}", violation.field);
    unsupported(&field, &violation.value, &violation.expected)
}
