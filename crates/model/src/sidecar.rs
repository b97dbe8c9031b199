//! The settings of a sidecar in the spec of its pod, as the injector writes and proxy and controller
//! read them: one JSON argument of the proxy. The spec is immutable, annotations are not.
//!
//! Pods of earlier releases have a flag of the proxy for each setting. The proxy knows these flags
//! still, and reads the settings as the flags that they stand for.

use std::ffi::OsString;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ports::PortSet;

/// The settings of a sidecar. Fields that a reader does not know are of a later injector.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Settings {
    /// Whether unauthenticated connections are rejected.
    pub strict: bool,
    /// Inbound ports without protocol detection.
    pub opaque_ports: PortSet,
    /// Whether the proxy forwards CONNECT requests to the containers of the pod.
    pub allow_connect: bool,
    /// Whether rules of AuthorizationPolicies about paths match plain paths only.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub plain_paths: bool,
    /// Whether a name that a policy allows leads to no private address.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub refuse_private_names: bool,
    /// Whether the proxy reports nothing about what the pod is called by.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub hide_edges: bool,
    /// Whether the proxy verifies that proxy-init has redirected connections, before it is ready. Pods
    /// of earlier releases have other rules.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub verify_redirect: bool,
    /// Maximum age of connections between proxies, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_connection_age: Option<u64>,
    /// Detail of the traffic that the proxy prints: `full`, `headers` or `off`.
    pub dump: String,
    /// Format of the printed traffic: `text` or `json`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub dump_format: String,
    /// Log filter.
    pub log: String,
    /// Format of the log: `text` or `json`.
    pub log_format: String,
    /// Drain period in seconds.
    pub drain: u64,
}

impl Settings {
    /// The argument of the proxy.
    pub fn argument(&self) -> String {
        let json = serde_json::to_string(self).expect("all keys are strings");
        format!("{FLAG}{json}")
    }

    /// The settings in the arguments of a proxy, read as the proxy reads them. The default, if they are
    /// invalid: then the proxy does not start.
    pub fn of_arguments<'a>(arguments: impl Iterator<Item = &'a str>) -> Self {
        let flags = Self::expand(arguments.map(OsString::from)).unwrap_or_default();
        let mut flags = flags.iter().filter_map(|flag| flag.to_str());
        let value = |name: &str| flags.clone().find_map(|flag| flag.strip_prefix(name));
        let text = |name: &str| value(name).unwrap_or_default().to_owned();
        let number = |name: &str| value(name).and_then(|number| number.parse().ok());
        let opaque_ports = value("--opaque-ports=").map(PortSet::from_str);
        Self {
            strict: value("--inbound=") == Some("strict"),
            opaque_ports: opaque_ports.and_then(Result::ok).unwrap_or_default(),
            max_connection_age: number("--max-connection-age="),
            dump: text("--dump="),
            dump_format: text("--dump-format="),
            log: text("--log="),
            log_format: text("--log-format="),
            drain: number("--drain-seconds=").unwrap_or_default(),
            allow_connect: flags.clone().any(|flag| flag == "--allow-connect"),
            plain_paths: flags.clone().any(|flag| flag == "--plain-paths"),
            refuse_private_names: flags.clone().any(|flag| flag == "--refuse-private-names"),
            hide_edges: flags.clone().any(|flag| flag == "--hide-edges"),
            verify_redirect: flags.any(|flag| flag == "--verify-redirect"),
        }
    }

    /// The arguments of a proxy with the flags that its settings stand for. Fails if the settings
    /// are invalid.
    pub fn expand(
        arguments: impl Iterator<Item = OsString>,
    ) -> Result<Vec<OsString>, serde_json::Error> {
        let mut expanded = Vec::new();
        for argument in arguments {
            let text = argument.to_str();
            match text.and_then(|text| text.strip_prefix(FLAG)) {
                Some(json) => {
                    let settings: Self = json.parse()?;
                    expanded.extend(settings.flags().map(OsString::from));
                }
                None => expanded.push(argument),
            }
        }
        Ok(expanded)
    }

    /// A flag for each setting, except for those without a value.
    fn flags(&self) -> impl Iterator<Item = String> {
        let number = |number: Option<u64>| number.map_or(String::new(), |one| one.to_string());
        let inbound = if self.strict { "strict" } else { "permissive" };
        let values = [
            ("inbound", inbound.to_owned()),
            ("opaque-ports", self.opaque_ports.to_string()),
            ("max-connection-age", number(self.max_connection_age)),
            ("dump", self.dump.clone()),
            ("dump-format", self.dump_format.clone()),
            ("log", self.log.clone()),
            ("log-format", self.log_format.clone()),
            (
                "drain-seconds",
                number(Some(self.drain).filter(|drain| *drain > 0)),
            ),
        ];
        let values = values.into_iter().filter(|(_, value)| !value.is_empty());
        let flags = values.map(|(name, value)| format!("--{name}={value}"));
        let switches = [
            (self.allow_connect, "--allow-connect"),
            (self.plain_paths, "--plain-paths"),
            (self.refuse_private_names, "--refuse-private-names"),
            (self.hide_edges, "--hide-edges"),
            (self.verify_redirect, "--verify-redirect"),
        ];
        let switches = switches.into_iter().filter(|(is_on, _)| *is_on);
        flags.chain(switches.map(|(_, flag)| flag.to_owned()))
    }
}

impl FromStr for Settings {
    type Err = serde_json::Error;

    fn from_str(json: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(json)
    }
}

/// The flag of the proxy, before its value.
const FLAG: &str = "--settings=";

/// The UDP that the containers of a pod may send: an argument of proxy-init. Pods of earlier
/// releases have none, and may send all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutboundUdp {
    /// All of it, past the proxy.
    #[default]
    All,
    /// To port 53 of the pod's resolvers.
    Dns,
}

/// A text that is no [`OutboundUdp`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected one of all, dns")]
pub struct InvalidOutboundUdp;

impl OutboundUdp {
    /// The argument of proxy-init, or `None` for the default.
    pub fn argument(self) -> Option<String> {
        (self != Self::All).then(|| format!("{UDP_FLAG}{self}"))
    }

    /// The value in the arguments of proxy-init. The default, if it is invalid: then proxy-init fails,
    /// and the pod does not start.
    pub fn of_arguments<'a>(mut arguments: impl Iterator<Item = &'a str>) -> Self {
        let value = arguments.find_map(|argument| argument.strip_prefix(UDP_FLAG));
        value
            .and_then(|value| value.parse().ok())
            .unwrap_or_default()
    }
}

impl FromStr for OutboundUdp {
    type Err = InvalidOutboundUdp;

    fn from_str(text: &str) -> Result<Self, InvalidOutboundUdp> {
        let mut all = [Self::All, Self::Dns].into_iter();
        all.find(|one| text.eq_ignore_ascii_case(&one.to_string()))
            .ok_or(InvalidOutboundUdp)
    }
}

impl fmt::Display for OutboundUdp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::All => "all",
            Self::Dns => "dns",
        })
    }
}

/// The flag of proxy-init, before its value.
const UDP_FLAG: &str = "--outbound-udp=";

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            strict: true,
            opaque_ports: "25,9000-9100".parse().unwrap(),
            allow_connect: true,
            plain_paths: true,
            refuse_private_names: true,
            hide_edges: true,
            verify_redirect: true,
            max_connection_age: Some(1800),
            dump: "full".into(),
            dump_format: "json".into(),
            log: "info,a=debug".into(),
            log_format: "text".into(),
            drain: 20,
        }
    }

    #[test]
    fn round_trip_of_the_argument() {
        let argument = settings().argument();
        let arguments = ["--admin-port=4001", &argument];
        assert_eq!(Settings::of_arguments(arguments.into_iter()), settings());
        let json = "{\"strict\":true,\"opaquePorts\":\"25,9000-9100\",\"allowConnect\":true,\"plainPaths\":true,\"refusePrivateNames\":true,\"hideEdges\":true,\"verifyRedirect\":true,";
        assert!(
            argument.starts_with(&format!("--settings={json}")),
            "{argument}"
        );
    }

    #[test]
    fn reads_the_flags_of_earlier_releases() {
        let flags: Vec<String> = settings().flags().collect();
        let read = Settings::of_arguments(flags.iter().map(String::as_str));
        assert_eq!(read, settings());
        let none = ["--inbound=permissive", "--allow-connections"];
        assert_eq!(
            Settings::of_arguments(none.into_iter()),
            Settings::default()
        );
    }

    /// Arguments that no injector writes: the controller reads the same settings from them as the
    /// proxy.
    #[test]
    fn flags_beside_the_settings_are_read_as_the_proxy_reads_them() {
        let empty = Settings::default().argument();
        let arguments = [&*empty, "--opaque-ports=25", "--allow-connect"];
        let read = Settings::of_arguments(arguments.into_iter());
        assert!(read.opaque_ports.contains(25) && read.allow_connect && !read.strict);
    }

    #[test]
    fn settings_stand_for_flags() {
        let arguments = ["proxy", &settings().argument(), "--workers=2"].map(OsString::from);
        let expected = [
            "proxy",
            "--inbound=strict",
            "--opaque-ports=25,9000-9100",
            "--max-connection-age=1800",
            "--dump=full",
            "--dump-format=json",
            "--log=info,a=debug",
            "--log-format=text",
            "--drain-seconds=20",
            "--allow-connect",
            "--plain-paths",
            "--refuse-private-names",
            "--hide-edges",
            "--verify-redirect",
            "--workers=2",
        ];
        assert_eq!(Settings::expand(arguments.into_iter()).unwrap(), expected);
        let later = "--settings={\"strict\":true,\"ofALaterRelease\":[1]}";
        let expanded = Settings::expand([later.into()].into_iter()).unwrap();
        assert_eq!(expanded, ["--inbound=strict"]);
    }

    #[test]
    fn outbound_udp_is_absent_in_the_arguments_of_the_default() {
        let read = |arguments: &[&str]| OutboundUdp::of_arguments(arguments.iter().copied());
        assert_eq!(OutboundUdp::All.argument(), None);
        let argument = OutboundUdp::Dns.argument().unwrap();
        assert_eq!(argument, "--outbound-udp=dns");
        assert_eq!(read(&["--proxy-uid=1337", &argument]), OutboundUdp::Dns);
        for none in [&["--proxy-uid=1337"][..], &["--outbound-udp=none"], &[]] {
            assert_eq!(read(none), OutboundUdp::All, "{none:?}");
        }
        assert_eq!("DNS".parse(), Ok(OutboundUdp::Dns));
        assert_eq!("".parse::<OutboundUdp>(), Err(InvalidOutboundUdp));
    }

    #[test]
    fn invalid_settings_do_not_count() {
        for json in [
            "",
            "{",
            "{\"strict\":1}",
            "{\"opaquePorts\":\"0\"}",
            "{\"strict\":true,\"strict\":false}",
        ] {
            let argument = format!("--settings={json}");
            let arguments = ["--inbound=strict", &argument].into_iter();
            assert_eq!(Settings::of_arguments(arguments), Settings::default());
            let arguments = [argument.into()].into_iter();
            assert!(Settings::expand(arguments).is_err(), "{json}");
        }
    }
}
