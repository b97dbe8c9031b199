//! The annotations of a pod that say whether it is injected, and was. Pure.
//!
//! [`crate::patch`] decides whether a pod is injected, [`crate::settings`] reads all others.

use serde_json::Value;

use crate::pod::annotation;
use crate::settings::SETTINGS;

/// Requests or refuses injection: `true` or `false`, case-insensitive.
pub const INJECT: &str = "diy-service-mesh/inject";
/// Whether the proxy accepts unauthenticated connections. Also a label of namespaces.
pub const INBOUND: &str = "diy-service-mesh/inbound";
/// Marks injected pods. Written by the injector, read by the controller.
pub const STATUS: &str = "diy-service-mesh/status";
/// The annotations that ask Prometheus to scrape a pod, where it is configured to read them.
pub const SCRAPE: [&str; 3] = [
    "prometheus.io/scrape",
    "prometheus.io/port",
    "prometheus.io/path",
];
/// The prefix of all annotations.
pub const PREFIX: &str = "diy-service-mesh/";
/// The value of [`STATUS`].
pub const STATUS_INJECTED: &str = "injected";

/// The value of [`INJECT`].
#[derive(Debug, PartialEq, Eq)]
pub enum InjectAnnotation<'a> {
    /// `true`
    Enabled,
    /// `false`
    Disabled,
    /// Absent: the namespace decides.
    Unset,
    /// Any other value.
    Invalid(&'a str),
}

/// Whether an annotation has the prefix of the mesh, but no meaning, such as one with a typo.
pub fn is_unknown(name: &str) -> bool {
    let mut known = SETTINGS.iter().map(|setting| setting.annotation);
    name.starts_with(PREFIX)
        && ![INJECT, STATUS].contains(&name)
        && known.all(|known| known != name)
}

/// Reads [`INJECT`].
pub fn inject(pod: &Value) -> InjectAnnotation<'_> {
    match annotation(pod, INJECT) {
        None => InjectAnnotation::Unset,
        Some(value) if value.eq_ignore_ascii_case("true") => InjectAnnotation::Enabled,
        Some(value) if value.eq_ignore_ascii_case("false") => InjectAnnotation::Disabled,
        Some(value) => InjectAnnotation::Invalid(value),
    }
}

/// A value for a message: escaped, and truncated after 64 characters.
pub fn quoted(value: &str) -> String {
    match value.char_indices().nth(64) {
        None => format!("{value:?}"),
        Some((end, _)) => format!("{:?}...", &value[..end]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(name: &str, value: &str) -> Value {
        json!({"metadata": {"annotations": {name: value}}, "spec": {}})
    }

    #[test]
    fn parses_inject_annotation_case_insensitively() {
        assert_eq!(inject(&pod(INJECT, "true")), InjectAnnotation::Enabled);
        assert_eq!(inject(&pod(INJECT, "TRUE")), InjectAnnotation::Enabled);
        assert_eq!(inject(&pod(INJECT, "False")), InjectAnnotation::Disabled);
        assert_eq!(
            inject(&pod(INJECT, "enabled")),
            InjectAnnotation::Invalid("enabled")
        );
        assert_eq!(
            inject(&pod(INJECT, " true")),
            InjectAnnotation::Invalid(" true")
        );
        assert_eq!(inject(&pod(INJECT, "")), InjectAnnotation::Invalid(""));
        assert_eq!(inject(&json!({"metadata": {}})), InjectAnnotation::Unset);
        assert_eq!(inject(&json!({})), InjectAnnotation::Unset);
    }
}
