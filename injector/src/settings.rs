//! The settings of a sidecar: one list ([`SETTINGS`]) of the annotations that set them, with their
//! values, defaults and checks, and one value ([`SidecarSettings`]) that they are read into. Pure.
//!
//! Flags of the injector replace the defaults of some of them for the mesh. `docs/reference/annotations.md` has
//! the rows of the list.

use std::fmt::Display;
use std::str::FromStr;

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use diy_mesh_model::ports::PortSet;
use diy_mesh_model::sidecar::{OutboundUdp, Settings};
use serde_json::Value;

use crate::annotations::{INBOUND, quoted};
use crate::pod::annotation;
use crate::quantity::{MEBIBYTE, Quantity};
use crate::resources::{MIN_CPU, MIN_MEMORY};

/// Rejects unauthenticated connections.
pub const STRICT: &str = "strict";
/// Accepts unauthenticated connections.
pub const PERMISSIVE: &str = "permissive";
/// The annotation of outbound UDP.
pub const OUTBOUND_UDP: &str = "diy-service-mesh/outbound-udp";
/// The annotation of the CPU time of a proxy in a Guaranteed pod.
pub const GUARANTEED_CPU: &str = "diy-service-mesh/guaranteed-cpu";
/// The annotation of the memory of a proxy in a Guaranteed pod.
pub const GUARANTEED_MEMORY: &str = "diy-service-mesh/guaranteed-memory";
/// The annotation that keeps the resources of the pod.
pub const RESOURCES: &str = "diy-service-mesh/resources";
/// The annotation of the drain period.
pub const DRAIN: &str = "diy-service-mesh/proxy-drain";

const MODES: [&str; 2] = [STRICT, PERMISSIVE];
const FORMATS: [&str; 2] = ["text", "json"];
const DUMPS: [&str; 3] = ["full", "headers", "off"];
const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];
const PORTS: &str = "ports and ranges: `25,9000-9100`";
/// One year.
const MAX_AGE_SECONDS: u64 = 365 * 24 * 3600;
const MAX_DRAIN_SECONDS: u64 = 3600;
/// The least memory that a proxy divides among its connections.
const MIN_MEMORY_LIMIT: u128 = 32 * MEBIBYTE;

/// The settings of a sidecar, checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SidecarSettings {
    /// The settings of the proxy.
    pub proxy: Settings,
    /// Inbound ports that bypass the proxy.
    pub skip_inbound_ports: PortSet,
    /// Outbound ports that bypass the proxy.
    pub skip_outbound_ports: PortSet,
    /// The UDP that the containers may send.
    pub outbound_udp: OutboundUdp,
    /// CPU time.
    pub cpu: Resource,
    /// Memory.
    pub memory: Resource,
    /// Whether the resources of the pod stay as they are, instead of being raised.
    pub keeps_pod_resources: bool,
}

/// The request and the limit of a container for a resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resource {
    request: Quantity,
    /// The most that the container gets.
    pub limit: Option<Quantity>,
    /// The request and the limit in a Guaranteed pod.
    pub guaranteed: Option<Quantity>,
}

/// A setting, and the annotation of pods that sets it.
pub struct Setting {
    /// The annotation.
    pub annotation: &'static str,
    /// The values, in Markdown.
    pub values: &'static str,
    /// The effect of the setting, in Markdown.
    pub description: &'static str,
    /// The flag of the injector with the default of the mesh.
    pub flag: Option<Flag>,
    /// Checks a value and sets it. The error is what was expected.
    read: fn(&mut SidecarSettings, &str) -> Result<(), String>,
}

/// A flag of the injector: the default of a setting for the mesh.
pub struct Flag {
    /// Its name, without hyphens before it.
    pub name: &'static str,
    /// The environment variable.
    pub variable: &'static str,
    /// The value without both.
    pub default: &'static str,
}

/// All settings.
pub static SETTINGS: [Setting; 22] = [
    Setting {
        annotation: INBOUND,
        values: "`permissive` (default), `strict`",
        description: "`strict`: reject callers without mesh TLS",
        flag: None,
        read: |settings, value| {
            let mode = one_of(&MODES, value);
            set(&mut settings.proxy.strict, mode.map(|mode| mode == STRICT))
        },
    },
    Setting {
        annotation: "diy-service-mesh/skip-inbound-ports",
        values: PORTS,
        description: "inbound connections to these ports of the pod bypass the proxy",
        flag: None,
        read: |settings, value| set(&mut settings.skip_inbound_ports, parsed(value)),
    },
    Setting {
        annotation: "diy-service-mesh/skip-outbound-ports",
        values: PORTS,
        description: "outbound connections to these destination ports bypass the proxy",
        flag: None,
        read: |settings, value| set(&mut settings.skip_outbound_ports, parsed(value)),
    },
    Setting {
        annotation: OUTBOUND_UDP,
        values: "`all` (default), `dns`",
        description: "`dns`: UDP of the containers reaches port 53 of the pod's resolvers and the clients of its own UDP servers; [all else is refused](#outbound-udp)",
        flag: None,
        read: |settings, value| set(&mut settings.outbound_udp, parsed(value)),
    },
    Setting {
        annotation: "diy-service-mesh/opaque-ports",
        values: PORTS,
        description: "connections to these ports of the pod are opaque: the proxy forwards bytes, without detection and without `X-Called-By`",
        flag: None,
        read: |settings, value| set(&mut settings.proxy.opaque_ports, parsed(value)),
    },
    Setting {
        annotation: "diy-service-mesh/allow-connect",
        values: "`\"true\"`, `\"false\"` (default)",
        description: "whether the proxy forwards CONNECT requests to the pod's containers",
        flag: None,
        read: |settings, value| set(&mut settings.proxy.allow_connect, boolean(value)),
    },
    Setting {
        annotation: "diy-service-mesh/plain-paths",
        values: "`\"true\"`, `\"false\"` (default)",
        description: "whether [rules about paths](#authorization-policies) match plain paths only",
        flag: None,
        read: |settings, value| set(&mut settings.proxy.plain_paths, boolean(value)),
    },
    Setting {
        annotation: "diy-service-mesh/egress-private-names",
        values: "`\"true\"` (default), `\"false\"`",
        description: "whether a name that a [policy of egress](#egress) allows may lead to a private address",
        flag: flag("egress-private-names", "EGRESS_PRIVATE_NAMES", "true"),
        read: |settings, value| {
            let allowed = boolean(value);
            set(
                &mut settings.proxy.refuse_private_names,
                allowed.map(|yes| !yes),
            )
        },
    },
    Setting {
        annotation: "diy-service-mesh/observe-edges",
        values: "`\"true\"` (default), `\"false\"`",
        description: "whether the proxy reports [what the pod is called by](#observed-calls)",
        flag: flag("proxy-observe-edges", "PROXY_OBSERVE_EDGES", "true"),
        read: |settings, value| {
            let observed = boolean(value);
            set(&mut settings.proxy.hide_edges, observed.map(|yes| !yes))
        },
    },
    Setting {
        annotation: "diy-service-mesh/max-connection-age",
        values: "a duration from `1s` to `8760h` in `s`, `m` or `h`: `30m`",
        description: "the [maximum age](#connection-age) of connections between proxies; HTTP connections end gracefully before it, others are reset",
        flag: None,
        read: |settings, value| {
            let expected = "from 1s to 8760h in one unit (s, m or h), such as 30m";
            let age = seconds(value, MAX_AGE_SECONDS, expected);
            set(&mut settings.proxy.max_connection_age, age.map(Some))
        },
    },
    Setting {
        annotation: "diy-service-mesh/dump",
        values: "`full`, `headers` (default), `off`",
        description: "[what the proxy prints](#dumps) of requests and responses",
        flag: flag("proxy-dump", "PROXY_DUMP", "headers"),
        read: |settings, value| set(&mut settings.proxy.dump, owned(&DUMPS, value)),
    },
    Setting {
        annotation: "diy-service-mesh/dump-format",
        values: "`text` (default), `json`",
        description: "the format of this output",
        flag: None,
        read: |settings, value| set(&mut settings.proxy.dump_format, owned(&FORMATS, value)),
    },
    Setting {
        annotation: "diy-service-mesh/proxy-cpu-request",
        values: "a quantity: `100m`",
        description: "CPU time that the proxy requests",
        flag: flag("proxy-cpu-request", "PROXY_CPU_REQUEST", "50m"),
        read: |settings, value| set(&mut settings.cpu.request, quantity(value)),
    },
    Setting {
        annotation: "diy-service-mesh/proxy-cpu-limit",
        values: "a quantity: `500m`, or `none` (default)",
        description: "limit of the CPU time of the proxy; a limit adds latency to the traffic of the pod",
        flag: flag("proxy-cpu-limit", "PROXY_CPU_LIMIT", "none"),
        read: |settings, value| {
            let limit = limit(value, 1, "above 0, such as 500m");
            set(&mut settings.cpu.limit, limit)
        },
    },
    Setting {
        annotation: "diy-service-mesh/proxy-memory-request",
        values: "a quantity: `64Mi`",
        description: "[memory](#memory) that the proxy requests",
        flag: flag("proxy-memory-request", "PROXY_MEMORY_REQUEST", "16Mi"),
        read: |settings, value| set(&mut settings.memory.request, quantity(value)),
    },
    Setting {
        annotation: "diy-service-mesh/proxy-memory-limit",
        values: "a quantity of at least `32Mi`, or `none`",
        description: "limit of the [memory](#memory) of the proxy",
        flag: flag("proxy-memory-limit", "PROXY_MEMORY_LIMIT", "256Mi"),
        read: |settings, value| {
            let limit = limit(value, MIN_MEMORY_LIMIT, "of at least 32Mi, such as 256Mi");
            set(&mut settings.memory.limit, limit)
        },
    },
    Setting {
        annotation: GUARANTEED_CPU,
        values: "a quantity of at least `100m`, or `none`",
        description: "request and limit of CPU time in a [Guaranteed pod](#resources-of-pods)",
        flag: flag("guaranteed-cpu", "GUARANTEED_CPU", "500m"),
        read: |settings, value| {
            let quantity = limit(value, MIN_CPU, "of at least 100m, such as 500m");
            set(&mut settings.cpu.guaranteed, quantity)
        },
    },
    Setting {
        annotation: GUARANTEED_MEMORY,
        values: "a quantity of at least `64Mi`, or `none` (default)",
        description: "request and limit of memory in a [Guaranteed pod](#resources-of-pods)",
        flag: flag("guaranteed-memory", "GUARANTEED_MEMORY", "none"),
        read: |settings, value| {
            let quantity = limit(value, MIN_MEMORY, "of at least 64Mi, such as 256Mi");
            set(&mut settings.memory.guaranteed, quantity)
        },
    },
    Setting {
        annotation: RESOURCES,
        values: "`raise` (default), `keep`",
        description: "whether the injector [raises the pod-level resources](#resources-of-pods) by the resources of the proxy",
        flag: None,
        read: |settings, value| {
            let choice = one_of(&["raise", "keep"], value);
            set(
                &mut settings.keeps_pod_resources,
                choice.map(|choice| choice == "keep"),
            )
        },
    },
    Setting {
        annotation: "diy-service-mesh/proxy-log",
        values: "a level (`error`, `warn`, `info`, `debug`, `off`, and `trace` in debug builds), or levels by module: `info,diy_mesh_proxy::discovery=debug`",
        description: "log filter of the proxy",
        flag: flag("proxy-log", "PROXY_LOG", "info"),
        read: |settings, value| set(&mut settings.proxy.log, log(value)),
    },
    Setting {
        annotation: "diy-service-mesh/proxy-log-format",
        values: "`text` (default), `json`",
        description: "format of the proxy's log",
        flag: flag("proxy-log-format", "PROXY_LOG_FORMAT", "text"),
        read: |settings, value| set(&mut settings.proxy.log_format, owned(&FORMATS, value)),
    },
    Setting {
        annotation: DRAIN,
        values: "a duration from `1s` to `1h`: `30s`",
        description: "drain period of the proxy after SIGTERM; the pod's `terminationGracePeriodSeconds` must be longer",
        flag: flag("proxy-drain", "PROXY_DRAIN", "20s"),
        read: |settings, value| {
            let expected = "from 1s to 1h in one unit (s, m or h), such as 30s";
            let drain = seconds(value, MAX_DRAIN_SECONDS, expected);
            set(&mut settings.proxy.drain, drain)
        },
    },
];

/// The settings whose annotation must not be blank. A blank one is none for all others.
const NEVER_BLANK: [&str; 3] = [INBOUND, OUTBOUND_UDP, "diy-service-mesh/dump-format"];

const fn flag(name: &'static str, variable: &'static str, default: &'static str) -> Option<Flag> {
    Some(Flag {
        name,
        variable,
        default,
    })
}

impl SidecarSettings {
    /// The settings of a pod: its annotations, then the settings of `self`. Adds one message per
    /// invalid annotation to `problems`.
    pub fn for_pod(&self, pod: &Value, problems: &mut Vec<String>) -> Self {
        let mut settings = self.clone();
        for setting in &SETTINGS {
            let name = setting.annotation;
            let value = annotation(pod, name);
            let is_set = |value: &&str| !value.trim().is_empty() || NEVER_BLANK.contains(&name);
            if let Some(value) = value.filter(is_set)
                && let Err(expected) = (setting.read)(&mut settings, value.trim())
            {
                problems.push(format!(
                    "annotation {name} is {}, {expected}",
                    quoted(value)
                ));
            }
        }
        settings
    }
}

impl Resource {
    /// The request. One above the limit counts as the limit.
    pub fn request(&self) -> &Quantity {
        let limit = self.limit.as_ref();
        limit
            .filter(|limit| limit.thousandths < self.request.thousandths)
            .unwrap_or(&self.request)
    }

    /// The request and the limit are this quantity.
    pub fn set_exactly(&mut self, quantity: Quantity) {
        self.request.clone_from(&quantity);
        self.limit = Some(quantity);
    }
}

/// The flags with the defaults of the mesh.
fn flags() -> impl Iterator<Item = (&'static Setting, &'static Flag)> {
    SETTINGS
        .iter()
        .filter_map(|setting| Some((setting, setting.flag.as_ref()?)))
}

impl Args for SidecarSettings {
    fn augment_args(command: Command) -> Command {
        command.args(flags().map(|(setting, flag)| {
            let check = move |text: &str| {
                (setting.read)(&mut SidecarSettings::default(), text).map(|()| text.to_owned())
            };
            Arg::new(flag.name)
                .long(flag.name)
                .env(flag.variable)
                .value_name("VALUE")
                .default_value(flag.default)
                .value_parser(check)
                .help(format!("Default of the annotation {}", setting.annotation))
        }))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SidecarSettings {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut settings = Self::default();
        settings.update_from_arg_matches(matches)?;
        Ok(settings)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        flags().try_for_each(|(setting, flag)| {
            let value = matches.get_one::<String>(flag.name);
            let value = value.map_or(flag.default, String::as_str);
            (setting.read)(self, value).map_err(|expected| {
                clap::Error::raw(clap::error::ErrorKind::InvalidValue, expected)
            })
        })
    }
}

fn set<T>(setting: &mut T, value: Result<T, String>) -> Result<(), String> {
    *setting = value?;
    Ok(())
}

fn parsed<T: FromStr<Err: Display>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: T::Err| error.to_string())
}

fn boolean(text: &str) -> Result<bool, String> {
    one_of(&["true", "false"], text).map(|value| value == "true")
}

fn one_of(known: &[&'static str], text: &str) -> Result<&'static str, String> {
    let mut all = known.iter().copied();
    let found = all.find(|known| text.eq_ignore_ascii_case(known));
    found.ok_or_else(|| format!("expected one of {}", known.join(", ")))
}

fn owned(known: &[&'static str], text: &str) -> Result<String, String> {
    one_of(known, text).map(str::to_owned)
}

/// A duration in seconds, from 1 to `max`.
fn seconds(text: &str, max: u64, expected: &str) -> Result<u64, String> {
    let seconds = duration(text).filter(|seconds| (1..=max).contains(seconds));
    seconds.ok_or_else(|| format!("expected a duration {expected}"))
}

/// A duration in one unit, `30s`, `5m` or `1h`, in seconds.
pub fn duration(text: &str) -> Option<u64> {
    let units = [('s', 1), ('m', 60), ('h', 3600)];
    units.iter().find_map(|(unit, seconds)| {
        // `FromStr` of integers also accepts a plus sign.
        let number = text
            .strip_suffix(*unit)
            .filter(|text| !text.starts_with('+'))?;
        number.parse::<u64>().ok()?.checked_mul(*seconds)
    })
}

fn quantity(text: &str) -> Result<Quantity, String> {
    Quantity::parse(text)
        .filter(|quantity| quantity.thousandths > 0)
        .ok_or("expected a Kubernetes quantity above 0, such as 100m or 64Mi".into())
}

/// A limit of at least `min` thousandths, or none.
fn limit(text: &str, min: u128, expected: &str) -> Result<Option<Quantity>, String> {
    match quantity(text) {
        _ if text.eq_ignore_ascii_case("none") => Ok(None),
        Ok(quantity) if quantity.thousandths >= min => Ok(Some(quantity)),
        _ => Err(format!(
            "expected a Kubernetes quantity {expected}, or none"
        )),
    }
}

/// A level, or modules with levels. Stricter than the parser of the proxy, which takes an unknown
/// level for a module.
fn log(text: &str) -> Result<String, String> {
    let is_valid = text.split(',').all(|part| {
        let (module, level) = part.split_once('=').unwrap_or(("module", part));
        let is_module = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
        !module.is_empty()
            && module.chars().all(is_module)
            && LEVELS.iter().any(|known| level.eq_ignore_ascii_case(known))
    });
    is_valid
        .then(|| text.into())
        .ok_or("expected a log level (error, warn, info, debug, trace, off), or levels by module, such as info,diy_mesh_proxy::discovery=debug".to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::resources::of_container;

    fn defaults() -> SidecarSettings {
        let command = SidecarSettings::augment_args(Command::new("injector"));
        let matches = command.get_matches_from(["injector"]);
        SidecarSettings::from_arg_matches(&matches).expect("valid defaults")
    }

    fn for_pod(annotations: &Value) -> Result<SidecarSettings, Vec<String>> {
        let pod = json!({"metadata": {"annotations": annotations}});
        let mut problems = Vec::new();
        let settings = defaults().for_pod(&pod, &mut problems);
        if problems.is_empty() {
            Ok(settings)
        } else {
            Err(problems)
        }
    }

    /// The annotation with this end of its name.
    fn named(name: &str) -> &'static str {
        let mut all = SETTINGS.iter().map(|setting| setting.annotation);
        all.find(|annotation| annotation.ends_with(&format!("/{name}")))
            .expect("a setting")
    }

    #[test]
    fn annotations_replace_defaults() {
        assert_eq!(for_pod(&json!({})), Ok(defaults()));
        let settings = for_pod(&json!({
            INBOUND: "Strict ", named("skip-inbound-ports"): " 25, 9000 - 9100",
            named("skip-outbound-ports"): "3306", OUTBOUND_UDP: " DNS", named("opaque-ports"): "5432",
            named("allow-connect"): " True", named("plain-paths"): "true", named("observe-edges"): "false",
            named("egress-private-names"): "False",
            named("max-connection-age"): " 30m ",
            named("dump"): "Full", named("dump-format"): "JSON",
            named("proxy-cpu-request"): "0.5", named("proxy-cpu-limit"): "2",
            named("proxy-memory-request"): " 64Mi", named("proxy-memory-limit"): "None",
            named("resources"): "keep", named("proxy-log"): "warn,diy_mesh_proxy::discovery=DEBUG",
            named("proxy-log-format"): "json", DRAIN: "2m",
        }));
        let settings = settings.expect("valid annotations");
        assert_eq!(
            of_container(&settings),
            json!({"requests": {"cpu": "0.5", "memory": "64Mi"}, "limits": {"cpu": "2"}})
        );
        let ports = |text: &str| text.parse::<PortSet>().expect("valid");
        let expected = SidecarSettings {
            proxy: Settings {
                strict: true,
                opaque_ports: ports("5432"),
                allow_connect: true,
                plain_paths: true,
                refuse_private_names: true,
                hide_edges: true,
                verify_redirect: false,
                max_connection_age: Some(1800),
                dump: "full".into(),
                dump_format: "json".into(),
                log: "warn,diy_mesh_proxy::discovery=DEBUG".into(),
                log_format: "json".into(),
                drain: 120,
            },
            skip_inbound_ports: ports("25,9000-9100"),
            skip_outbound_ports: ports("3306"),
            outbound_udp: OutboundUdp::Dns,
            cpu: settings.cpu.clone(),
            memory: settings.memory.clone(),
            keeps_pod_resources: true,
        };
        assert_eq!(settings, expected);
    }

    #[test]
    fn blank_annotations_are_none_but_those_that_choose() {
        for setting in &SETTINGS {
            let read = for_pod(&json!({setting.annotation: " "}));
            if NEVER_BLANK.contains(&setting.annotation) {
                assert_eq!(read.expect_err("a blank choice").len(), 1)
            } else {
                assert_eq!(read, Ok(defaults()), "{}", setting.annotation)
            }
        }
    }

    #[test]
    fn requests_do_not_exceed_limits() {
        let resources = |annotations| of_container(&for_pod(&annotations).expect("valid"));
        let [cpu, memory] = ["proxy-cpu-limit", "proxy-memory-limit"].map(named);
        assert_eq!(
            resources(json!({cpu: "5m", named("proxy-memory-request"): "1Gi", memory: "512Mi"})),
            json!({"requests": {"cpu": "5m", "memory": "512Mi"}, "limits": {"cpu": "5m", "memory": "512Mi"}})
        );
        assert_eq!(
            resources(json!({memory: "none"})),
            json!({"requests": {"cpu": "50m", "memory": "16Mi"}})
        );
    }

    #[test]
    fn converts_durations_to_seconds() {
        for (value, expected) in [
            ("90s", 90),
            ("30m", 1800),
            ("12h", 43_200),
            ("8760h", MAX_AGE_SECONDS),
        ] {
            let seconds = seconds(value, MAX_AGE_SECONDS, "");
            assert_eq!(seconds, Ok(expected), "{value}");
        }
    }

    #[test]
    fn rejects_invalid_values_with_name_value_and_format() {
        let huge = format!("{}h", u64::MAX);
        for (name, values) in [
            ("inbound", &["mtls", ""][..]),
            (
                "skip-outbound-ports",
                &["x", "25,", "+5", "0-10", "--help", "25\n26"],
            ),
            ("outbound-udp", &["none", "", "dns,all"]),
            ("allow-connect", &["yes"]),
            (
                "max-connection-age",
                &[
                    "30", "m", "30 m", "+30m", "-1s", "0s", "0h", "1.5h", "1h30m", "30M", "1d",
                    "8761h", "30é", &huge,
                ],
            ),
            ("dump", &["loud"]),
            ("dump-format", &["xml"]),
            (
                "proxy-cpu-request",
                &["0", "none", "-1", "1 m", "1.2.3", "inf", "10x", "."],
            ),
            ("proxy-cpu-limit", &["0m", "much"]),
            ("proxy-memory-limit", &["31Mi", "32M", "8"]),
            ("guaranteed-cpu", &["99m", "some"]),
            ("guaranteed-memory", &["63Mi", "1"]),
            ("resources", &["leave"]),
            (
                "proxy-log",
                &[
                    "debg",
                    "info,",
                    "info;debug",
                    "a b=info",
                    "=info",
                    "x=--help",
                ],
            ),
            ("proxy-log-format", &["xml"]),
            ("proxy-drain", &["20", "0s", "2h", "61m"]),
        ] {
            let name = named(name);
            for value in values {
                let problems = for_pod(&json!({name: value})).expect_err(value);
                let start = format!("annotation {name} is {value:?}, expected ");
                assert!(
                    problems.len() == 1 && problems[0].starts_with(&start),
                    "{problems:?}"
                );
            }
        }
    }

    #[test]
    fn reports_all_invalid_annotations() {
        let annotations =
            json!({named("skip-inbound-ports"): "a", INBOUND: "mtls", named("dump-format"): "xml"});
        let problems = for_pod(&annotations).expect_err("three invalid values");
        assert_eq!(problems.len(), 3);
        assert_eq!(
            problems[2],
            "annotation diy-service-mesh/dump-format is \"xml\", expected one of text, json"
        );
    }

    #[test]
    fn truncates_long_values_at_a_character_boundary() {
        let long = json!({named("dump-format"): "é".repeat(1000)});
        let message = &for_pod(&long).expect_err("invalid value")[0];
        assert!(message.len() < 300 && message.contains("..."), "{message}");
    }
}
