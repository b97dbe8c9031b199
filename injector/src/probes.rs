//! The probes and lifecycle hooks that the proxy performs for the kubelet. Pure.
//!
//! The proxy accepts each connection to the pod, so that a TCP probe would succeed without an
//! application. A strict proxy rejects the kubelet, which has no identity in the mesh, and rate
//! limits, faults and overload concern all requests that pass a proxy. The probes of each meshed
//! pod therefore become `httpGet` of `/probes/INDEX` on the admin port, and the originals become
//! values of the proxy's `--kubelet-probe`. A pod that is reviewed again gets its originals back
//! first, so that containers of other webhooks and other ports of the proxy make no difference.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::annotations::quoted;
use crate::containers::{ADMIN_PORT_FLAG, Ports};
use crate::pod::{list, name_of};
use crate::settings::SidecarSettings;

const PROBES: [&str; 3] = ["startupProbe", "livenessProbe", "readinessProbe"];
const HOOKS: [&str; 2] = ["postStart", "preStop"];
const ACTIONS: [&str; 4] = ["httpGet", "tcpSocket", "grpc", "exec"];
/// The fields of the actions that the proxy performs.
const FIELDS: [(&str, &[&str]); 3] = [
    (
        "httpGet",
        &["path", "port", "host", "scheme", "httpHeaders", "protocol"],
    ),
    ("tcpSocket", &["port", "host"]),
    ("grpc", &["port", "service", "mode"]),
];
/// The fields with few values.
const VALUES: [(&str, &[&str]); 2] = [
    ("protocol", &["HTTP1", "HTTP2"]),
    ("mode", &["Plaintext", "TLS"]),
];
/// The proxy's flag for one probe.
const FLAG: &str = "--kubelet-probe";

/// Rewrites the probes of containers, one after another.
pub struct Rewriter<'a> {
    settings: &'a SidecarSettings,
    ports: Ports,
    previous: Previous,
    /// The arguments of the proxy for the probes so far.
    pub arguments: Vec<String>,
    /// Warnings about probes with fields that the proxy does not know.
    pub warnings: Vec<String>,
}

/// The result of an earlier injection into the same pod.
#[derive(Debug, Default)]
pub struct Previous {
    admin_port: Option<u64>,
    /// The original of each path.
    originals: HashMap<String, Value>,
}

impl Previous {
    /// Reads the arguments of an injected proxy.
    pub fn of(proxy: &Value) -> Self {
        let arguments = || list(proxy, "args").iter().filter_map(Value::as_str);
        let values = |flag: &'static str| {
            arguments().filter_map(move |argument| argument.strip_prefix(flag)?.strip_prefix('='))
        };
        let originals = values(FLAG).enumerate().filter_map(|(index, value)| {
            let original = serde_json::from_str(&unescape_dollar(value)).ok()?;
            Some((path(index), original))
        });
        Self {
            admin_port: values(ADMIN_PORT_FLAG).find_map(|port| port.parse().ok()),
            originals: originals.collect(),
        }
    }

    /// The original of a rewritten probe.
    fn original(&self, action: &Map<String, Value>) -> Option<&Map<String, Value>> {
        let get = action.get("httpGet")?;
        let port = get.get("port").and_then(Value::as_u64);
        let path = get.get("path")?.as_str()?;
        (port.is_some() && port == self.admin_port && is_pod(get))
            .then(|| self.originals.get(path)?.as_object())
            .flatten()
    }
}

impl<'a> Rewriter<'a> {
    /// A rewriter for a pod with these settings and ports of the proxy.
    pub fn new(settings: &'a SidecarSettings, ports: Ports, previous: Previous) -> Self {
        Self {
            settings,
            ports,
            previous,
            arguments: Vec::new(),
            warnings: Vec::new(),
        }
    }

    /// The container with the probes that the kubelet performs through the proxy.
    pub fn rewrite(&mut self, container: &Value) -> Value {
        let mut rewritten = container.clone();
        for name in PROBES {
            if let Some(Value::Object(probe)) = rewritten.get_mut(name) {
                let timeout = probe.get("timeoutSeconds").and_then(Value::as_u64);
                // The default of Kubernetes, also for 0.
                let timeout = timeout.filter(|seconds| *seconds != 0).unwrap_or(1);
                self.rewrite_action(probe, container, Some(timeout));
            }
        }
        for name in HOOKS {
            let hook = rewritten
                .get_mut("lifecycle")
                .and_then(|lifecycle| lifecycle.get_mut(name));
            if let Some(Value::Object(hook)) = hook {
                self.rewrite_action(hook, container, None);
            }
        }
        rewritten
    }

    /// Rewrites one probe, or a hook, which has no timeout.
    fn rewrite_action(
        &mut self,
        action: &mut Map<String, Value>,
        container: &Value,
        timeout: Option<u64>,
    ) {
        if let Some(original) = self.previous.original(action) {
            let original = original.clone();
            action.remove("httpGet");
            action.extend(original.into_iter().filter(|(key, _)| is_action(key)));
        }
        let Some((kind, port)) = self.proxied(action, container, timeout.is_none()) else {
            return;
        };
        if let Some(unknown) = unknown_field(kind, &action[kind]) {
            // A proxy accepts TCP connections without an application, and a strict one rejects the
            // requests of the kubelet.
            let is_kept = kind != "tcpSocket" && !self.settings.proxy.strict;
            self.warnings.push(format!(
                "field {} of a probe of container {} is unknown to the proxy, {}",
                quoted(&unknown),
                quoted(name_of(container)),
                if is_kept {
                    "so that the kubelet performs the probe, as a caller without mesh TLS"
                } else {
                    "which performs the probe without it"
                }
            ));
            if is_kept {
                return;
            }
            if let Some(Value::Object(target)) = action.get_mut(kind) {
                target.retain(|field, value| !is_unknown(kind, field, value));
            }
        }
        let mut target = action.remove(kind).unwrap_or_default();
        target["port"] = port.into();
        let mut original = Map::from_iter([(kind.to_owned(), target)]);
        original.extend(timeout.map(|seconds| ("timeoutSeconds".to_owned(), seconds.into())));
        let value = escape_dollar(&Value::Object(original).to_string());
        let path = path(self.arguments.len());
        self.arguments.push(format!("{FLAG}={value}"));
        let get = json!({"path": path, "port": self.ports.admin, "scheme": "HTTP"});
        action.insert("httpGet".to_owned(), get);
    }

    /// The kind and the port of a probe that the proxy performs.
    fn proxied(
        &self,
        action: &Map<String, Value>,
        container: &Value,
        is_hook: bool,
    ) -> Option<(&'static str, u16)> {
        let mut kinds = ACTIONS
            .into_iter()
            .filter(|kind| action.get(*kind).is_some_and(Value::is_object));
        let (Some(kind), None) = (kinds.next(), kinds.next()) else {
            return None;
        };
        let is_supported = match kind {
            "httpGet" => true,
            "tcpSocket" | "grpc" => !is_hook,
            _ => false,
        };
        let target = &action[kind];
        let port = port(target, container)?;
        let bypasses = self.settings.skip_inbound_ports.contains(port) || self.ports.contains(port);
        (is_supported && is_pod(target) && !bypasses).then_some((kind, port))
    }
}

/// The path of the first field that the proxy does not know, or knows with other values.
fn unknown_field(kind: &str, target: &Value) -> Option<String> {
    let mut fields = target.as_object()?.iter();
    let (name, _) = fields.find(|(name, value)| is_unknown(kind, name, value))?;
    Some(format!("{kind}.{name}"))
}

fn is_unknown(kind: &str, name: &str, value: &Value) -> bool {
    let lists = |table: &[(&str, &[&str])], key: &str, item: Option<&str>| {
        let row = table.iter().find(|(row, _)| *row == key);
        row.map(|(_, items)| item.is_some_and(|item| items.contains(&item)))
    };
    let is_known = lists(&FIELDS, kind, Some(name)) == Some(true)
        && lists(&VALUES, name, value.as_str()) != Some(false);
    !is_known && !value.is_null()
}

fn path(index: usize) -> String {
    format!("/probes/{index}")
}

fn is_action(key: &str) -> bool {
    ACTIONS.contains(&key)
}

/// Whether the kubelet sends the probe to the pod, which is the default without `host`.
fn is_pod(target: &Value) -> bool {
    target
        .get("host")
        .and_then(Value::as_str)
        .unwrap_or_default()
        .is_empty()
}

/// The port number: given as a number, as the name of a port of the container, or as digits in a
/// string.
fn port(target: &Value, container: &Value) -> Option<u16> {
    let number = |value: &Value| {
        value
            .as_u64()
            .and_then(|number| u16::try_from(number).ok())
            .filter(|number| *number != 0)
    };
    let port = target.get("port")?;
    let Some(name) = port.as_str() else {
        return number(port);
    };
    let named = list(container, "ports")
        .iter()
        .find(|port| name_of(port) == name);
    named.map_or_else(
        || name.parse().ok().filter(|number| *number != 0),
        |port| number(port.get("containerPort")?),
    )
}

/// Escapes `$`: Kubernetes expands `$(NAME)` in arguments, but not in probes.
fn escape_dollar(text: &str) -> String {
    text.replace('$', "$$")
}

fn unescape_dollar(text: &str) -> String {
    text.replace("$$", "$")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORTS: Ports = Ports::DEFAULT;

    /// The rewritten container and the originals.
    fn rewrite(container: &Value, settings: &SidecarSettings) -> (Value, Vec<Value>) {
        let mut rewriter = Rewriter::new(settings, PORTS, Previous::default());
        let rewritten = rewriter.rewrite(container);
        let originals = rewriter.arguments.iter().map(|argument| {
            let value = argument.strip_prefix("--kubelet-probe=").expect("the flag");
            serde_json::from_str(&unescape_dollar(value)).expect("JSON")
        });
        (rewritten, originals.collect())
    }

    fn admin(index: usize) -> Value {
        json!({"path": format!("/probes/{index}"), "port": 4001, "scheme": "HTTP"})
    }

    #[test]
    fn rewrites_probes_and_keeps_their_other_fields() {
        let container = json!({
            "name": "a",
            "ports": [{"name": "web", "containerPort": 8080}],
            "startupProbe": {"tcpSocket": {"port": "web"}, "failureThreshold": 30},
            "livenessProbe": {"grpc": {"port": 9000, "service": "x"}, "timeoutSeconds": 3},
            "readinessProbe": {"httpGet": {"path": "/", "port": "8443", "scheme": "HTTPS"}, "timeoutSeconds": 0},
        });
        let (rewritten, originals) = rewrite(&container, &SidecarSettings::default());
        assert_eq!(
            rewritten["startupProbe"],
            json!({"httpGet": admin(0), "failureThreshold": 30})
        );
        assert_eq!(
            rewritten["livenessProbe"],
            json!({"httpGet": admin(1), "timeoutSeconds": 3})
        );
        assert_eq!(
            originals,
            [
                json!({"tcpSocket": {"port": 8080}, "timeoutSeconds": 1}),
                json!({"grpc": {"port": 9000, "service": "x"}, "timeoutSeconds": 3}),
                json!({"httpGet": {"path": "/", "port": 8443, "scheme": "HTTPS"}, "timeoutSeconds": 1}),
            ]
        );
    }

    #[test]
    fn rewrites_http_probes_and_hooks() {
        let get = json!({"httpGet": {"path": "/$(A)", "port": 80, "httpHeaders": [{"name": "A", "value": "$$"}]}});
        let container = json!({
            "name": "a", "livenessProbe": get,
            "lifecycle": {"preStop": get, "postStart": {"exec": {"command": ["x"]}}},
        });
        let (rewritten, originals) = rewrite(&container, &SidecarSettings::default());
        let lifecycle =
            json!({"preStop": {"httpGet": admin(1)}, "postStart": {"exec": {"command": ["x"]}}});
        assert_eq!(rewritten["lifecycle"], lifecycle);
        let mut probe = get.clone();
        probe["timeoutSeconds"] = json!(1);
        assert_eq!(originals, [probe, get]);
    }

    #[test]
    fn keeps_probes_that_do_not_pass_the_proxy_and_invalid_ones() {
        let options = SidecarSettings {
            skip_inbound_ports: "25,8000-8999".parse().expect("valid"),
            ..SidecarSettings::default()
        };
        for probe in [
            json!({"tcpSocket": {"port": 25}}),
            json!({"httpGet": {"port": 8443, "scheme": "HTTPS"}}),
            json!({"httpGet": {"port": 80, "host": "example.com"}}),
            json!({"httpGet": {"port": 4001, "path": "/probes/0"}}),
            json!({"tcpSocket": {"port": "unknown"}}),
            json!({"httpGet": {"port": 0}}),
            json!({"grpc": {"port": 70000}}),
            json!({"exec": {"command": ["x"]}}),
            json!({"tcpSocket": {"port": 80}, "grpc": {"port": 80}}),
            json!({"tcpSocket": null}),
            json!([]),
            Value::Null,
        ] {
            let container = json!({"name": "a", "livenessProbe": probe});
            assert_eq!(
                rewrite(&container, &options),
                (container.clone(), Vec::new())
            );
        }
        let hook = json!({"lifecycle": {"preStop": {"tcpSocket": {"port": 80}}}});
        assert_eq!(rewrite(&hook, &options), (hook.clone(), Vec::new()));
    }

    #[test]
    fn probes_with_unknown_fields_stay_where_the_kubelet_can_perform_them() {
        let known = json!({"name": "a",
            "livenessProbe": {"httpGet": {"port": 80, "protocol": "HTTP2", "later": null}},
            "readinessProbe": {"grpc": {"port": 80, "mode": "TLS"}}});
        let options = SidecarSettings::default();
        let mut rewriter = Rewriter::new(&options, PORTS, Previous::default());
        rewriter.rewrite(&known);
        assert_eq!((rewriter.arguments.len(), rewriter.warnings.len()), (2, 0));

        let mut strict = SidecarSettings::default();
        strict.proxy.strict = true;
        for (probe, field, kept) in [
            (
                json!({"httpGet": {"port": 80, "protocol": "HTTP3"}}),
                "httpGet.protocol",
                true,
            ),
            (
                json!({"httpGet": {"port": 80, "later": {}}}),
                "httpGet.later",
                true,
            ),
            (
                json!({"grpc": {"port": 80, "mode": "MutualTLS"}}),
                "grpc.mode",
                true,
            ),
            (
                json!({"tcpSocket": {"port": 80, "later": 1}}),
                "tcpSocket.later",
                false,
            ),
        ] {
            let container = json!({"name": "a", "livenessProbe": probe});
            for (options, kept) in [(&options, kept), (&strict, false)] {
                let mut rewriter = Rewriter::new(options, PORTS, Previous::default());
                let rewritten = rewriter.rewrite(&container);
                assert_eq!(rewritten == container, kept, "{rewritten}");
                let [warning] = &rewriter.warnings[..] else {
                    panic!("{:?}", rewriter.warnings)
                };
                let start = format!(
                    "field {field:?} of a probe of container \"a\" is unknown to the proxy"
                );
                assert!(warning.starts_with(&start), "{warning}");
                let (_, name) = field.split_once('.').expect("two parts");
                assert!(
                    rewriter
                        .arguments
                        .iter()
                        .all(|argument| !argument.contains(name))
                );
                assert_eq!(rewriter.arguments.is_empty(), kept);
            }
        }
    }

    #[test]
    fn restores_the_originals_of_an_earlier_injection() {
        let probe = json!({"tcpSocket": {"port": 80}, "timeoutSeconds": 2, "periodSeconds": 5});
        let get = json!({"httpGet": {"path": "/$(A)", "port": 81}});
        let options = SidecarSettings::default();
        let first = json!({"livenessProbe": probe, "lifecycle": {"preStop": get}});
        let mut rewriter = Rewriter::new(&options, PORTS, Previous::default());
        let once = rewriter.rewrite(&first);
        let mut arguments = vec!["--admin-port=4001".to_owned()];
        arguments.extend(rewriter.arguments.clone());
        let proxy = json!({"args": arguments});

        // Another webhook has added a container before it, whose port moves the admin port.
        let ports = Ports {
            admin: 4002,
            ..PORTS
        };
        let mut again = Rewriter::new(&options, ports, Previous::of(&proxy));
        again.rewrite(&json!({"readinessProbe": {"tcpSocket": {"port": 4001}}}));
        let twice = again.rewrite(&once);
        assert_eq!(
            twice["livenessProbe"],
            json!({
                "httpGet": {"path": "/probes/1", "port": 4002, "scheme": "HTTP"}, "timeoutSeconds": 2, "periodSeconds": 5,
            })
        );
        assert_eq!(again.arguments[1..], rewriter.arguments);

        // The port of the hook bypasses the proxy now: the original comes back.
        let skipped = SidecarSettings {
            skip_inbound_ports: "81".parse().expect("valid"),
            ..SidecarSettings::default()
        };
        let mut again = Rewriter::new(&skipped, PORTS, Previous::of(&proxy));
        assert_eq!(again.rewrite(&once)["lifecycle"]["preStop"], get);
        assert_eq!(again.arguments, rewriter.arguments[..1]);
    }
}
