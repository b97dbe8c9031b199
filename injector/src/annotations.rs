//! The annotations of a pod, parsed and checked. Pure.
//!
//! [`crate::patch`] decides whether a pod is injected. Only checked values reach the arguments of a
//! container.

use std::str::FromStr;

use diy_mesh_model::ports::{InvalidPorts, PortSet};
use serde_json::Value;

use crate::pod::annotation;

/// Requests or refuses injection: `true` or `false`, case-insensitive.
pub const INJECT: &str = "diy-service-mesh/inject";
/// Inbound ports that bypass the proxy.
pub const SKIP_INBOUND_PORTS: &str = "diy-service-mesh/skip-inbound-ports";
/// Outbound ports that bypass the proxy.
pub const SKIP_OUTBOUND_PORTS: &str = "diy-service-mesh/skip-outbound-ports";
/// Detail of the traffic that the proxy prints.
pub const DUMP: &str = "diy-service-mesh/dump";
/// Format of the printed traffic.
pub const DUMP_FORMAT: &str = "diy-service-mesh/dump-format";
/// Whether the proxy accepts unauthenticated connections: [`STRICT`] or [`PERMISSIVE`]. Also a
/// label of namespaces.
pub const INBOUND: &str = "diy-service-mesh/inbound";
/// Inbound ports without protocol detection.
pub const OPAQUE_PORTS: &str = "diy-service-mesh/opaque-ports";
/// Whether the proxy forwards CONNECT requests to the containers of the pod.
pub const ALLOW_CONNECT: &str = "diy-service-mesh/allow-connect";
/// Maximum age of connections between proxies.
pub const MAX_CONNECTION_AGE: &str = "diy-service-mesh/max-connection-age";
/// CPU time that the proxy requests.
pub const CPU_REQUEST: &str = "diy-service-mesh/proxy-cpu-request";
/// Limit of the CPU time of the proxy.
pub const CPU_LIMIT: &str = "diy-service-mesh/proxy-cpu-limit";
/// Memory that the proxy requests.
pub const MEMORY_REQUEST: &str = "diy-service-mesh/proxy-memory-request";
/// Limit of the memory of the proxy.
pub const MEMORY_LIMIT: &str = "diy-service-mesh/proxy-memory-limit";
/// Log filter of the proxy.
pub const LOG: &str = "diy-service-mesh/proxy-log";
/// Format of the log of the proxy.
pub const LOG_FORMAT: &str = "diy-service-mesh/proxy-log-format";
/// Drain period of the proxy.
pub const DRAIN: &str = "diy-service-mesh/proxy-drain";
/// Marks injected pods. Written by the injector, read by the controller.
pub const STATUS: &str = "diy-service-mesh/status";
/// The prefix of all annotations.
pub const PREFIX: &str = "diy-service-mesh/";
/// All annotations.
pub const ALL: [&str; 17] = [
    INJECT,
    SKIP_INBOUND_PORTS,
    SKIP_OUTBOUND_PORTS,
    DUMP,
    DUMP_FORMAT,
    INBOUND,
    OPAQUE_PORTS,
    ALLOW_CONNECT,
    MAX_CONNECTION_AGE,
    CPU_REQUEST,
    CPU_LIMIT,
    MEMORY_REQUEST,
    MEMORY_LIMIT,
    LOG,
    LOG_FORMAT,
    DRAIN,
    STATUS,
];
/// The value of [`STATUS`].
pub const STATUS_INJECTED: &str = "injected";

const DUMP_FORMATS: [&str; 2] = ["text", "json"];
/// Rejects unauthenticated connections.
pub const STRICT: &str = "strict";
/// Accepts unauthenticated connections.
pub const PERMISSIVE: &str = "permissive";
const DURATION_FORMAT: &str = "a duration from 1s to 8760h in one unit (s, m or h), such as 30m";
/// One year.
const MAX_DURATION_SECONDS: u64 = 365 * 24 * 3600;

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

/// The checked annotations of a pod, as arguments of its containers.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// For `proxy-init --skip-inbound-ports`.
    pub skip_inbound_ports: PortSet,
    /// For `proxy-init --skip-outbound-ports`.
    pub skip_outbound_ports: PortSet,
    /// For `proxy --dump-format`.
    pub dump_format: Option<&'static str>,
    /// For `proxy --inbound`.
    pub inbound: Option<&'static str>,
    /// For `proxy --opaque-ports`.
    pub opaque_ports: PortSet,
    /// For `proxy --allow-connect`.
    pub allow_connect: bool,
    /// For `proxy --max-connection-age`, in seconds.
    pub max_connection_age: Option<u64>,
}

/// Whether an annotation has the prefix of the mesh, but no meaning, such as one with a typo.
pub fn is_unknown(name: &str) -> bool {
    name.starts_with(PREFIX) && !ALL.contains(&name)
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

impl Options {
    /// Reads all annotations. Returns one message per invalid value.
    pub fn from_pod(pod: &Value) -> Result<Self, Vec<String>> {
        let mut problems = Vec::new();
        let options = Self {
            skip_inbound_ports: ports(pod, SKIP_INBOUND_PORTS, &mut problems),
            skip_outbound_ports: ports(pod, SKIP_OUTBOUND_PORTS, &mut problems),
            dump_format: one_of(pod, DUMP_FORMAT, &DUMP_FORMATS, &mut problems),
            inbound: one_of(pod, INBOUND, &[STRICT, PERMISSIVE], &mut problems),
            opaque_ports: ports(pod, OPAQUE_PORTS, &mut problems),
            allow_connect: non_empty(pod, ALLOW_CONNECT).is_some()
                && one_of(pod, ALLOW_CONNECT, &["true", "false"], &mut problems) == Some("true"),
            max_connection_age: duration(pod, MAX_CONNECTION_AGE, &mut problems),
        };
        if problems.is_empty() {
            Ok(options)
        } else {
            Err(problems)
        }
    }
}

/// The value of an annotation that is present and not blank.
pub(crate) fn non_empty<'a>(pod: &'a Value, name: &str) -> Option<&'a str> {
    annotation(pod, name).filter(|value| !value.trim().is_empty())
}

/// A list of ports; empty without the annotation.
fn ports(pod: &Value, name: &str, problems: &mut Vec<String>) -> PortSet {
    let value = annotation(pod, name).unwrap_or_default();
    value.parse().unwrap_or_else(|error: InvalidPorts| {
        problems.push(format!("annotation {name} is {}, {error}", quoted(value)));
        PortSet::default()
    })
}

/// Parses digits only; `FromStr` of integers also accepts a plus sign.
fn digits<T: FromStr>(text: &str) -> Option<T> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten()
}

/// A duration in seconds.
fn duration(pod: &Value, name: &str, problems: &mut Vec<String>) -> Option<u64> {
    let value = non_empty(pod, name)?;
    let seconds = seconds(value.trim());
    if seconds.is_none() {
        problems.push(invalid(name, value, DURATION_FORMAT));
    }
    seconds
}

pub(crate) fn seconds(text: &str) -> Option<u64> {
    let (number, unit) = text.split_at_checked(text.len() - 1)?;
    let unit = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return None,
    };
    digits::<u64>(number)?
        .checked_mul(unit)
        .filter(|seconds| (1..=MAX_DURATION_SECONDS).contains(seconds))
}

fn one_of(
    pod: &Value,
    name: &str,
    allowed: &[&'static str],
    problems: &mut Vec<String>,
) -> Option<&'static str> {
    let value = annotation(pod, name)?;
    let found = allowed
        .iter()
        .find(|known| value.trim().eq_ignore_ascii_case(known))
        .copied();
    if found.is_none() {
        problems.push(invalid(
            name,
            value,
            &format!("one of {}", allowed.join(", ")),
        ));
    }
    found
}

fn invalid(name: &str, value: &str, expected: &str) -> String {
    format!(
        "annotation {name} is {}, expected {expected}",
        quoted(value)
    )
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

    #[test]
    fn rejects_invalid_port_list_with_name_value_and_format() {
        for bad in ["x", "25,", "+5", "0-10", "--help", "25\n26"] {
            let problems = Options::from_pod(&pod(SKIP_OUTBOUND_PORTS, bad)).expect_err(bad);
            let problem = format!("annotation {SKIP_OUTBOUND_PORTS} is {bad:?}, {InvalidPorts}");
            assert_eq!(problems, [problem]);
        }
    }

    #[test]
    fn reports_all_invalid_annotations() {
        let pod = json!({"metadata": {"annotations": {SKIP_INBOUND_PORTS: "a", INBOUND: "mtls", DUMP_FORMAT: "xml"}}});
        let problems = Options::from_pod(&pod).expect_err("three invalid values");
        assert_eq!(problems.len(), 3);
        assert_eq!(
            problems[1],
            "annotation diy-service-mesh/dump-format is \"xml\", expected one of text, json"
        );
    }

    #[test]
    fn truncates_long_values_at_a_character_boundary() {
        let message =
            &Options::from_pod(&pod(DUMP_FORMAT, &"é".repeat(1000))).expect_err("invalid value")[0];
        assert!(message.len() < 300 && message.contains("..."), "{message}");
    }

    #[test]
    fn parses_dump_format_case_insensitively() {
        let options = Options::from_pod(&pod(DUMP_FORMAT, "JSON")).expect("a valid value");
        assert_eq!(options.dump_format, Some("json"));
    }

    #[test]
    fn converts_durations_to_seconds() {
        let read = |value| {
            Options::from_pod(&pod(MAX_CONNECTION_AGE, value))
                .map(|options| options.max_connection_age)
        };
        for (value, seconds) in [
            ("90s", 90),
            (" 30m ", 1800),
            ("12h", 43_200),
            ("8760h", MAX_DURATION_SECONDS),
        ] {
            assert_eq!(read(value), Ok(Some(seconds)), "{value}");
        }
        assert_eq!((read(""), read(" ")), (Ok(None), Ok(None)));
        let huge = format!("{}h", u64::MAX);
        for bad in [
            "30", "m", "30 m", "+30m", "-1s", "0s", "0h", "1.5h", "1h30m", "30M", "1d", "8761h",
            "30é", &huge,
        ] {
            let problem =
                format!("annotation {MAX_CONNECTION_AGE} is {bad:?}, expected {DURATION_FORMAT}");
            assert_eq!(read(bad), Err(vec![problem]));
        }
    }

    #[test]
    fn allows_connect_only_for_true() {
        let read = |value| {
            Options::from_pod(&pod(ALLOW_CONNECT, value)).map(|options| options.allow_connect)
        };
        assert_eq!(
            (read("True"), read("false"), read("")),
            (Ok(true), Ok(false), Ok(false))
        );
        let problem =
            "annotation diy-service-mesh/allow-connect is \"yes\", expected one of true, false";
        assert_eq!(read("yes"), Err(vec![problem.into()]));
    }

    #[test]
    fn parses_port_lists() {
        let annotations = json!({SKIP_INBOUND_PORTS: " 25, 9000 - 9100", OPAQUE_PORTS: " "});
        let pod = json!({"metadata": {"annotations": annotations}});
        let options = Options::from_pod(&pod).expect("valid lists");
        assert_eq!(options.skip_inbound_ports.to_string(), "25,9000-9100");
        assert!(options.opaque_ports.is_empty() && options.skip_outbound_ports.is_empty());
    }

    #[test]
    fn parses_inbound_mode() {
        let read = |value| Options::from_pod(&pod(INBOUND, value)).map(|options| options.inbound);
        assert_eq!(
            (read("strict"), read("Permissive ")),
            (Ok(Some("strict")), Ok(Some("permissive")))
        );
        let problem =
            "annotation diy-service-mesh/inbound is \"mtls\", expected one of strict, permissive";
        assert_eq!(read("mtls"), Err(vec![problem.into()]));
    }
}
