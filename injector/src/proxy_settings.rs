//! The settings of proxies that have a default for the mesh (flags of the injector) and a value per
//! pod (annotations): resources, log, drain period, dumps. Pure.

use clap::Args;
use serde_json::{Map, Value, json};

use crate::annotations::{
    CPU_LIMIT, CPU_REQUEST, DRAIN, DUMP, LOG, LOG_FORMAT, MEMORY_LIMIT, MEMORY_REQUEST, non_empty,
    quoted, seconds,
};

/// The least memory that a proxy divides among its connections.
const MIN_MEMORY_LIMIT: u128 = 32 * 1024 * 1024 * 1000;
const MAX_DRAIN_SECONDS: u64 = 3600;
const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];

/// The settings of a proxy.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct ProxySettings {
    /// CPU time that a proxy requests
    #[arg(long, env, value_name = "QUANTITY", value_parser = quantity, default_value = "10m")]
    pub proxy_cpu_request: Quantity,
    /// Limit of the CPU time of a proxy, or none. A limit adds latency to the traffic of the pod
    #[arg(long, env, value_name = "QUANTITY", value_parser = limit, default_value = "none")]
    pub proxy_cpu_limit: Limit,
    /// Memory that a proxy requests
    #[arg(long, env, value_name = "QUANTITY", value_parser = quantity, default_value = "16Mi")]
    pub proxy_memory_request: Quantity,
    /// Limit of the memory of a proxy, at least 32Mi, or none
    #[arg(long, env, value_name = "QUANTITY", value_parser = memory_limit, default_value = "256Mi")]
    pub proxy_memory_limit: Limit,
    /// Log level of a proxy, or a filter by module
    #[arg(long, env, value_name = "FILTER", value_parser = log, default_value = "info")]
    pub proxy_log: String,
    /// Format of the log of a proxy: text or json
    #[arg(long, env, value_name = "FORMAT", value_parser = log_format, default_value = "text")]
    pub proxy_log_format: &'static str,
    /// Drain period of a proxy after SIGTERM, from 1s to 1h
    #[arg(long, env, value_name = "DURATION", value_parser = drain, default_value = "20s")]
    pub proxy_drain: u64,
    /// What a proxy prints of requests and responses: full, headers or off
    #[arg(long, env, value_name = "MODE", value_parser = dump, default_value = "headers")]
    pub proxy_dump: &'static str,
}

impl ProxySettings {
    /// The settings of the proxy of a pod: its annotations, then these defaults. Adds one message
    /// per invalid annotation to `problems`.
    pub fn for_pod(&self, pod: &Value, problems: &mut Vec<String>) -> Self {
        let mut settings = self.clone();
        let mut annotations = Annotations { pod, problems };
        annotations.read(CPU_REQUEST, quantity, &mut settings.proxy_cpu_request);
        annotations.read(CPU_LIMIT, limit, &mut settings.proxy_cpu_limit);
        annotations.read(MEMORY_REQUEST, quantity, &mut settings.proxy_memory_request);
        annotations.read(MEMORY_LIMIT, memory_limit, &mut settings.proxy_memory_limit);
        annotations.read(LOG, log, &mut settings.proxy_log);
        annotations.read(LOG_FORMAT, log_format, &mut settings.proxy_log_format);
        annotations.read(DRAIN, drain, &mut settings.proxy_drain);
        annotations.read(DUMP, dump, &mut settings.proxy_dump);
        settings
    }

    /// The resources of the container. A request above the limit counts as the limit.
    pub fn resources(&self) -> Value {
        let (mut requests, mut limits) = (Map::new(), Map::new());
        for (resource, request, limit) in [
            ("cpu", &self.proxy_cpu_request, &self.proxy_cpu_limit),
            (
                "memory",
                &self.proxy_memory_request,
                &self.proxy_memory_limit,
            ),
        ] {
            let limit = limit.0.as_ref();
            let request = limit
                .filter(|limit| limit.thousandths < request.thousandths)
                .unwrap_or(request);
            requests.insert(resource.into(), request.text.as_str().into());
            if let Some(limit) = limit {
                limits.insert(resource.into(), limit.text.as_str().into());
            }
        }
        let mut resources = json!({"requests": requests});
        if !limits.is_empty() {
            resources["limits"] = limits.into();
        }
        resources
    }
}

/// The annotations of a pod, and one message per invalid one.
struct Annotations<'a> {
    pod: &'a Value,
    problems: &'a mut Vec<String>,
}

impl Annotations<'_> {
    /// Replaces `setting` with the value of an annotation that is present and not blank.
    fn read<T>(&mut self, name: &str, parse: fn(&str) -> Result<T, &'static str>, setting: &mut T) {
        let Some(value) = non_empty(self.pod, name) else {
            return;
        };
        match parse(value.trim()) {
            Ok(value) => *setting = value,
            Err(expected) => {
                let value = quoted(value);
                let problem = format!("annotation {name} is {value}, {expected}");
                self.problems.push(problem);
            }
        }
    }
}

/// A quantity of a resource above 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quantity {
    text: String,
    /// Rounded up.
    thousandths: u128,
}

/// The limit of a resource, if there is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit(Option<Quantity>);

fn quantity(text: &str) -> Result<Quantity, &'static str> {
    const EXPECTED: &str = "expected a Kubernetes quantity above 0, such as 100m or 64Mi";
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.');
    let (number, unit) = text.split_at(end.unwrap_or(text.len()));
    let unit: f64 = match unit {
        "m" => 1e-3,
        "" => 1.0,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "Ki" => 1024.0,
        "Mi" => 1024.0 * 1024.0,
        "Gi" => 1024.0 * 1024.0 * 1024.0,
        "Ti" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return Err(EXPECTED),
    };
    let number: f64 = number.parse().map_err(|_| EXPECTED)?;
    // Saturates at u128::MAX.
    let thousandths = (number * unit * 1000.0).ceil() as u128;
    if thousandths == 0 {
        return Err(EXPECTED);
    }
    Ok(Quantity {
        text: text.into(),
        thousandths,
    })
}

fn limit(text: &str) -> Result<Limit, &'static str> {
    if text.eq_ignore_ascii_case("none") {
        return Ok(Limit(None));
    }
    let quantity = quantity(text);
    quantity
        .map(|quantity| Limit(Some(quantity)))
        .map_err(|_| "expected a Kubernetes quantity above 0, such as 500m, or none")
}

fn memory_limit(text: &str) -> Result<Limit, &'static str> {
    limit(text)
        .ok()
        .filter(|limit| {
            limit
                .0
                .as_ref()
                .is_none_or(|limit| limit.thousandths >= MIN_MEMORY_LIMIT)
        })
        .ok_or("expected a Kubernetes quantity of at least 32Mi, such as 256Mi, or none")
}

/// A level, or modules with levels. Stricter than the parser of the proxy, which takes an unknown
/// level for a module.
fn log(text: &str) -> Result<String, &'static str> {
    let is_valid = text.split(',').all(|part| {
        let (module, level) = part.split_once('=').unwrap_or(("module", part));
        let is_module = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
        !module.is_empty()
            && module.chars().all(is_module)
            && LEVELS.iter().any(|known| level.eq_ignore_ascii_case(known))
    });
    is_valid
        .then(|| text.into())
        .ok_or("expected a log level (error, warn, info, debug, trace, off), or levels by module, such as info,diy_mesh_proxy::discovery=debug")
}

fn drain(text: &str) -> Result<u64, &'static str> {
    seconds(text)
        .filter(|seconds| *seconds <= MAX_DRAIN_SECONDS)
        .ok_or("expected a duration from 1s to 1h in one unit (s, m or h), such as 30s")
}

fn dump(text: &str) -> Result<&'static str, &'static str> {
    one_of(&["full", "headers", "off"], text).ok_or("expected one of full, headers, off")
}

fn log_format(text: &str) -> Result<&'static str, &'static str> {
    one_of(&["text", "json"], text).ok_or("expected one of text, json")
}

fn one_of(known: &[&'static str], text: &str) -> Option<&'static str> {
    let mut known = known.iter().copied();
    known.find(|known| text.eq_ignore_ascii_case(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn defaults() -> ProxySettings {
        ProxySettings {
            proxy_cpu_request: quantity("10m").expect("valid"),
            proxy_cpu_limit: limit("none").expect("valid"),
            proxy_memory_request: quantity("16Mi").expect("valid"),
            proxy_memory_limit: memory_limit("256Mi").expect("valid"),
            proxy_log: "info".into(),
            proxy_log_format: "text",
            proxy_drain: 20,
            proxy_dump: "headers",
        }
    }

    fn for_pod(annotations: Value) -> Result<ProxySettings, Vec<String>> {
        let pod = json!({"metadata": {"annotations": annotations}});
        let mut problems = Vec::new();
        let settings = defaults().for_pod(&pod, &mut problems);
        if problems.is_empty() {
            Ok(settings)
        } else {
            Err(problems)
        }
    }

    #[test]
    fn annotations_replace_defaults() {
        assert_eq!(for_pod(json!({LOG: " "})), Ok(defaults()));
        let settings = for_pod(json!({
            CPU_REQUEST: "0.5", CPU_LIMIT: "2", MEMORY_REQUEST: " 64Mi", MEMORY_LIMIT: "None",
            LOG: "warn,diy_mesh_proxy::discovery=DEBUG", DRAIN: "2m", DUMP: "Full",
        }));
        let settings = settings.expect("valid annotations");
        assert_eq!(
            settings.resources(),
            json!({"requests": {"cpu": "0.5", "memory": "64Mi"}, "limits": {"cpu": "2"}})
        );
        assert_eq!(
            (
                settings.proxy_log.as_str(),
                settings.proxy_drain,
                settings.proxy_dump
            ),
            ("warn,diy_mesh_proxy::discovery=DEBUG", 120, "full")
        );
    }

    #[test]
    fn requests_do_not_exceed_limits() {
        let resources = |annotations| for_pod(annotations).expect("valid").resources();
        assert_eq!(
            resources(json!({CPU_LIMIT: "5m", MEMORY_REQUEST: "1Gi", MEMORY_LIMIT: "512Mi"})),
            json!({"requests": {"cpu": "5m", "memory": "512Mi"}, "limits": {"cpu": "5m", "memory": "512Mi"}})
        );
        assert_eq!(
            resources(json!({MEMORY_LIMIT: "none"})),
            json!({"requests": {"cpu": "10m", "memory": "16Mi"}})
        );
    }

    #[test]
    fn rejects_invalid_values() {
        for (name, values) in [
            (
                CPU_REQUEST,
                &["0", "none", "-1", "1 m", "1.2.3", "inf", "1e3", "10x", "."][..],
            ),
            (CPU_LIMIT, &["0m", "much"]),
            (MEMORY_LIMIT, &["31Mi", "32M", "8"]),
            (
                LOG,
                &[
                    "debg",
                    "info,",
                    "info;debug",
                    "a b=info",
                    "=info",
                    "x=--help",
                ],
            ),
            (DRAIN, &["20", "0s", "2h", "61m"]),
            (DUMP, &["loud"]),
            (LOG_FORMAT, &["xml"]),
        ] {
            for value in values {
                let problems = for_pod(json!({name: value})).expect_err(value);
                assert!(
                    problems[0].starts_with(&format!("annotation {name} is {value:?}, expected ")),
                    "{problems:?}"
                );
            }
        }
    }
}
