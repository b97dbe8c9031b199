//! What a pod's annotations ask for, read and checked. Pure: values in, values out.
//!
//! It never decides whether a pod can be injected ([`crate::patch`] does), and it never lets an unchecked value through to a
//! container's arguments.

use serde_json::Value;

/// Asks for the mesh: `true` or `false`, in any case of letters.
pub const INJECT: &str = "diy-service-mesh/inject";
/// Inbound ports that bypass the proxy.
pub const SKIP_INBOUND_PORTS: &str = "diy-service-mesh/skip-inbound-ports";
/// Outbound ports that bypass the proxy.
pub const SKIP_OUTBOUND_PORTS: &str = "diy-service-mesh/skip-outbound-ports";
/// How much of the traffic the proxy prints.
pub const DUMP: &str = "diy-service-mesh/dump";
/// The form in which the proxy prints it.
pub const DUMP_FORMAT: &str = "diy-service-mesh/dump-format";
/// Whether the proxy lets callers in that have no identity. A namespace may say it too, by a label of this name.
pub const INBOUND: &str = "diy-service-mesh/inbound";
/// Ports of the pod whose connections the proxy carries without detection.
pub const OPAQUE_PORTS: &str = "diy-service-mesh/opaque-ports";
/// Whether the proxy lets CONNECT requests through to the pod's containers.
pub const ALLOW_CONNECT: &str = "diy-service-mesh/allow-connect";
/// The maximum age of connections between proxies.
pub const MAX_CONNECTION_AGE: &str = "diy-service-mesh/max-connection-age";
/// Written by the injector, read by the controller: this pod has a proxy.
pub const STATUS: &str = "diy-service-mesh/status";
/// The value of [`STATUS`].
pub const STATUS_INJECTED: &str = "injected";

const DUMPS: [&str; 3] = ["full", "headers", "off"];
const DUMP_FORMATS: [&str; 2] = ["text", "json"];
/// Callers without an identity are refused, but for the kubelet's probes.
pub const STRICT: &str = "strict";
/// Callers without an identity are let in.
pub const PERMISSIVE: &str = "permissive";
const PORTS_FORM: &str =
    "ports from 1 to 65535 and ranges of them, separated by commas, such as 25,3306,9000-9100";
const DURATION_FORM: &str = "a duration from 1s to 8760h in one unit (s, m or h), such as 30m";
/// The longest duration: a year, in seconds.
const MAX_DURATION: u64 = 365 * 24 * 3600;

/// What the pod itself says about being in the mesh.
#[derive(Debug, PartialEq, Eq)]
pub enum Wish<'a> {
    /// It says `true`.
    Yes,
    /// It says `false`.
    No,
    /// It says nothing: its namespace decides.
    Unsaid,
    /// It says something else, which is taken for a mistake.
    Unclear(&'a str),
}

/// The checked settings of one pod.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// For `proxy-init --skip-inbound-ports`.
    pub skip_inbound_ports: Option<String>,
    /// For `proxy-init --skip-outbound-ports`.
    pub skip_outbound_ports: Option<String>,
    /// For `proxy --dump`.
    pub dump: Option<&'static str>,
    /// For `proxy --dump-format`.
    pub dump_format: Option<&'static str>,
    /// For `proxy --inbound`.
    pub inbound: Option<&'static str>,
    /// For `proxy --opaque-ports`.
    pub opaque_ports: Option<String>,
    /// For `proxy --allow-connect`.
    pub allow_connect: bool,
    /// For `proxy --max-connection-age`, in seconds.
    pub max_connection_age: Option<u64>,
}

/// Reads the pod's own word on being injected.
pub fn wish(pod: &Value) -> Wish<'_> {
    match annotation(pod, INJECT) {
        None => Wish::Unsaid,
        Some(value) if value.eq_ignore_ascii_case("true") => Wish::Yes,
        Some(value) if value.eq_ignore_ascii_case("false") => Wish::No,
        Some(value) => Wish::Unclear(value),
    }
}

/// The value of the pod's annotation `name`.
pub fn annotation<'a>(pod: &'a Value, name: &str) -> Option<&'a str> {
    pod.get("metadata")?.get("annotations")?.get(name)?.as_str()
}

impl Options {
    /// Reads all settings of the pod, or gives every problem in them, one sentence each.
    pub fn of(pod: &Value) -> Result<Self, Vec<String>> {
        let mut problems = Vec::new();
        let options = Self {
            skip_inbound_ports: ports(pod, SKIP_INBOUND_PORTS, &mut problems),
            skip_outbound_ports: ports(pod, SKIP_OUTBOUND_PORTS, &mut problems),
            dump: one_of(pod, DUMP, &DUMPS, &mut problems),
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

    /// Connections to this port never reach the proxy.
    pub fn skips_inbound(&self, port: u16) -> bool {
        self.skip_inbound_ports
            .as_deref()
            .is_some_and(|list| contains(list, port))
    }

    /// Connections to this port pass the proxy as bytes.
    pub fn is_opaque(&self, port: u16) -> bool {
        self.opaque_ports
            .as_deref()
            .is_some_and(|list| contains(list, port))
    }
}

/// Whether a checked list of ports contains this one.
fn contains(list: &str, port: u16) -> bool {
    let number = |text: &str| text.parse::<u16>().ok();
    list.split(',').any(|entry| {
        let (first, last) = entry.split_once('-').unwrap_or((entry, entry));
        matches!((number(first), number(last)), (Some(first), Some(last)) if (first..=last).contains(&port))
    })
}

/// The value of the pod's annotation `name`, unless it is empty.
fn non_empty<'a>(pod: &'a Value, name: &str) -> Option<&'a str> {
    annotation(pod, name).filter(|value| !value.trim().is_empty())
}

/// A list of ports without its blanks; none when the annotation is absent or empty.
fn ports(pod: &Value, name: &str, problems: &mut Vec<String>) -> Option<String> {
    let value = non_empty(pod, name)?;
    let entries: Option<Vec<String>> = value.split(',').map(port_or_range).collect();
    if entries.is_none() {
        problems.push(wrong(name, value, PORTS_FORM));
    }
    entries.map(|entries| entries.join(","))
}

fn port_or_range(entry: &str) -> Option<String> {
    let Some((first, last)) = entry.split_once('-') else {
        return Some(port(entry)?.to_string());
    };
    let (first, last) = (port(first)?, port(last)?);
    (first <= last).then(|| format!("{first}-{last}"))
}

/// Digits only: `u16::from_str` would take a plus sign too.
fn port(text: &str) -> Option<u16> {
    let text = text.trim();
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    text.parse().ok().filter(|port| *port != 0)
}

/// A duration in seconds; none when the annotation is absent or empty.
fn duration(pod: &Value, name: &str, problems: &mut Vec<String>) -> Option<u64> {
    let value = non_empty(pod, name)?;
    let seconds = seconds(value.trim());
    if seconds.is_none() {
        problems.push(wrong(name, value, DURATION_FORM));
    }
    seconds
}

fn seconds(text: &str) -> Option<u64> {
    let (number, unit) = text.split_at_checked(text.len() - 1)?;
    let unit = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return None,
    };
    // Digits only, as in a port.
    let number: u64 = number
        .parse()
        .ok()
        .filter(|_| number.bytes().all(|byte| byte.is_ascii_digit()))?;
    number
        .checked_mul(unit)
        .filter(|seconds| (1..=MAX_DURATION).contains(seconds))
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
        problems.push(wrong(
            name,
            value,
            &format!("one of {}", allowed.join(", ")),
        ));
    }
    found
}

/// Values come from people and go into messages that people read: cut, and with control characters made visible.
fn wrong(name: &str, value: &str, expected: &str) -> String {
    format!(
        "annotation {name} is {}, expected {expected}",
        quoted(value)
    )
}

/// A value as it is safe to show: escaped, at most 64 characters of it.
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
    fn the_wish_is_read_in_any_case_of_letters_and_nothing_else_counts_as_one() {
        assert_eq!(wish(&pod(INJECT, "true")), Wish::Yes);
        assert_eq!(wish(&pod(INJECT, "TRUE")), Wish::Yes);
        assert_eq!(wish(&pod(INJECT, "False")), Wish::No);
        assert_eq!(wish(&pod(INJECT, "enabled")), Wish::Unclear("enabled"));
        assert_eq!(wish(&pod(INJECT, " true")), Wish::Unclear(" true"));
        assert_eq!(wish(&pod(INJECT, "")), Wish::Unclear(""));
        assert_eq!(wish(&json!({"metadata": {}})), Wish::Unsaid);
        assert_eq!(wish(&json!({})), Wish::Unsaid);
    }

    #[test]
    fn ports_and_ranges_are_passed_on_without_their_blanks() {
        let read = |value| {
            Options::of(&pod(SKIP_INBOUND_PORTS, value)).map(|options| options.skip_inbound_ports)
        };
        assert_eq!(read("25"), Ok(Some("25".into())));
        assert_eq!(
            read(" 25, 3306 ,9000 - 9100 "),
            Ok(Some("25,3306,9000-9100".into()))
        );
        assert_eq!(read("007"), Ok(Some("7".into())));
        assert_eq!(read("80-80"), Ok(Some("80-80".into())));
        assert_eq!(read(" "), Ok(None));
    }

    #[test]
    fn a_bad_list_of_ports_is_refused_with_its_name_its_value_and_the_form_expected() {
        for bad in [
            "x",
            "0",
            "65536",
            "25,",
            ",",
            "9100-9000",
            "1-2-3",
            "-5",
            "5-",
            "+5",
            "25;26",
            "80 81",
            "0-10",
            "--help",
            "25\n26",
        ] {
            let problems = Options::of(&pod(SKIP_OUTBOUND_PORTS, bad)).expect_err(bad);
            assert_eq!(problems.len(), 1, "{bad}");
            assert!(
                problems[0].starts_with(&format!(
                    "annotation {SKIP_OUTBOUND_PORTS} is {bad:?}, expected ports"
                )),
                "{}",
                problems[0]
            );
        }
    }

    #[test]
    fn every_problem_is_told_at_once() {
        let pod = json!({"metadata": {"annotations": {SKIP_INBOUND_PORTS: "a", DUMP: "loud", DUMP_FORMAT: "xml"}}});
        let problems = Options::of(&pod).expect_err("three bad values");
        assert_eq!(problems.len(), 3);
        assert_eq!(
            problems[1],
            "annotation diy-service-mesh/dump is \"loud\", expected one of full, headers, off"
        );
    }

    #[test]
    fn a_long_value_is_cut_in_messages_and_never_inside_a_character() {
        let message = &Options::of(&pod(DUMP, &"é".repeat(1000))).expect_err("no such dump")[0];
        assert!(message.len() < 300 && message.contains("..."), "{message}");
    }

    #[test]
    fn dumps_are_named_in_any_case_of_letters() {
        let pod = json!({"metadata": {"annotations": {DUMP: "Headers", DUMP_FORMAT: "JSON"}}});
        let options = Options::of(&pod).expect("both are known");
        assert_eq!(
            (options.dump, options.dump_format),
            (Some("headers"), Some("json"))
        );
    }

    #[test]
    fn skipped_ports_are_known_one_by_one() {
        let options = Options::of(&pod(SKIP_INBOUND_PORTS, "25, 9000-9002")).expect("a good list");
        assert_eq!(
            [24, 25, 8999, 9000, 9002, 9003].map(|port| options.skips_inbound(port)),
            [false, true, false, true, true, false]
        );
        assert!(!Options::default().skips_inbound(25));
    }

    #[test]
    fn a_duration_is_passed_on_in_seconds() {
        let read = |value| {
            Options::of(&pod(MAX_CONNECTION_AGE, value)).map(|options| options.max_connection_age)
        };
        for (value, seconds) in [
            ("90s", 90),
            (" 30m ", 1800),
            ("12h", 43_200),
            ("8760h", MAX_DURATION),
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
                format!("annotation {MAX_CONNECTION_AGE} is {bad:?}, expected {DURATION_FORM}");
            assert_eq!(read(bad), Err(vec![problem]));
        }
    }

    #[test]
    fn connect_requests_are_allowed_by_true_alone() {
        let read =
            |value| Options::of(&pod(ALLOW_CONNECT, value)).map(|options| options.allow_connect);
        assert_eq!(
            (read("True"), read("false"), read("")),
            (Ok(true), Ok(false), Ok(false))
        );
        let problem =
            "annotation diy-service-mesh/allow-connect is \"yes\", expected one of true, false";
        assert_eq!(read("yes"), Err(vec![problem.into()]));
    }

    #[test]
    fn opaque_ports_have_the_form_of_skipped_ports() {
        let read =
            |value| Options::of(&pod(OPAQUE_PORTS, value)).map(|options| options.opaque_ports);
        assert_eq!(
            (read("25, 9000-9100"), read("")),
            (Ok(Some("25,9000-9100".into())), Ok(None))
        );
        assert!(read("smtp").is_err());
    }

    #[test]
    fn who_is_let_in_is_said_by_one_of_two_words() {
        let read = |value| Options::of(&pod(INBOUND, value)).map(|options| options.inbound);
        assert_eq!(
            (read("strict"), read("Permissive ")),
            (Ok(Some("strict")), Ok(Some("permissive")))
        );
        let problem =
            "annotation diy-service-mesh/inbound is \"mtls\", expected one of strict, permissive";
        assert_eq!(read("mtls"), Err(vec![problem.into()]));
    }
}
