//! The probes of a pod, as values of the proxy's `--probe`: `http:PORT:PATH`, `tcp:PORT`,
//! `grpc:PORT`. Pure.
//!
//! The kubelet has no identity in the mesh. A strict proxy accepts unauthenticated requests that
//! match one of these values, and no other requests to the same port.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::annotations::{INBOUND, Options, PERMISSIVE, SKIP_INBOUND_PORTS};
use crate::pod::{list, name_of};

const PROBES: [&str; 3] = ["startupProbe", "livenessProbe", "readinessProbe"];
const HOOKS: [&str; 2] = ["postStart", "preStop"];

/// The probes and lifecycle hooks of the containers that pass through the proxy, without
/// duplicates. Returns one message per probe that a strict proxy cannot recognize.
pub fn exempt<'a>(
    containers: impl Iterator<Item = &'a Value>,
    options: &Options,
) -> Result<Vec<String>, Vec<String>> {
    let (mut probes, mut problems) = (Vec::new(), Vec::new());
    let mut seen = BTreeSet::new();
    for container in containers {
        let declared = PROBES.map(|name| (name, container.get(name)));
        let hooks = HOOKS.map(|name| {
            (
                name,
                container
                    .get("lifecycle")
                    .and_then(|lifecycle| lifecycle.get(name)),
            )
        });
        for (name, action) in declared.into_iter().chain(hooks) {
            match action.map(|action| read(action, container, options)) {
                Some(Ok(Some(probe))) if seen.insert(probe.clone()) => probes.push(probe),
                Some(Err(cause)) => problems.push(problem(container, name, &cause)),
                _ => {}
            }
        }
    }
    if problems.is_empty() {
        Ok(probes)
    } else {
        Err(problems)
    }
}

/// A probe that a proxy cannot distinguish from other connections to its port.
enum Unrecognizable {
    /// The probe uses TLS.
    Tls(u16),
    /// The port is opaque.
    Opaque(u16),
}

/// The value for one probe, or `None` if it does not pass through the proxy.
fn read(
    action: &Value,
    container: &Value,
    options: &Options,
) -> Result<Option<String>, Unrecognizable> {
    let proxied_port = |target: &Value| {
        port(target, container).filter(|port| is_pod(target) && !options.skips_inbound(*port))
    };
    if let Some(http) = action.get("httpGet") {
        let Some(port) = proxied_port(http) else {
            return Ok(None);
        };
        if http.get("scheme").and_then(Value::as_str) == Some("HTTPS") {
            return Err(Unrecognizable::Tls(port));
        }
        if options.is_opaque(port) {
            return Err(Unrecognizable::Opaque(port));
        }
        let path = http.get("path").and_then(Value::as_str).unwrap_or_default();
        return Ok(Some(format!(
            "http:{port}:{}",
            escape_dollar(&request_target(path))
        )));
    }
    let simple = ["tcpSocket", "grpc"]
        .into_iter()
        .find_map(|kind| Some((kind, proxied_port(action.get(kind)?)?)));
    let Some((kind, port)) = simple else {
        return Ok(None);
    };
    // A TCP probe sends no bytes, so it needs no detection.
    if kind == "grpc" && options.is_opaque(port) {
        return Err(Unrecognizable::Opaque(port));
    }
    Ok(Some(format!("{}:{port}", kind.trim_end_matches("Socket"))))
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

/// The request target that the kubelet sends for a path: with a leading slash, without a fragment,
/// percent-encoded.
fn request_target(path: &str) -> String {
    let path = path.split('#').next().unwrap_or_default();
    let mut target = String::from(if path.starts_with('/') { "" } else { "/" });
    for byte in path.bytes() {
        match byte {
            b'"' | b'<' | b'>' | b'\\' | b'^' | b'`' | b'{' | b'|' | b'}' => {
                target.push_str(&format!("%{byte:02X}"))
            }
            _ if byte.is_ascii_graphic() => target.push(char::from(byte)),
            _ => target.push_str(&format!("%{byte:02X}")),
        }
    }
    target
}

/// Escapes `$`: Kubernetes expands `$(NAME)` in arguments, but not in the path of a probe.
fn escape_dollar(text: &str) -> String {
    text.replace('$', "$$")
}

fn problem(container: &Value, name: &str, cause: &Unrecognizable) -> String {
    let (port, what, instead) = match cause {
        Unrecognizable::Tls(port) => (
            port,
            format!(
                "sends HTTPS to port {port}, which a strict proxy cannot distinguish from other TLS connections"
            ),
            "without TLS",
        ),
        Unrecognizable::Opaque(port) => (
            port,
            format!(
                "targets port {port}, which is opaque, so that a strict proxy cannot distinguish it from other connections"
            ),
            "that is not opaque",
        ),
    };
    format!(
        "container {}: its {name} {what}: probe a port {instead}, or exclude port {port} from the proxy with the annotation \
         {SKIP_INBOUND_PORTS}, or set {INBOUND} to {PERMISSIVE}",
        name_of(container)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn probes(containers: &Value, options: &Options) -> Result<Vec<String>, Vec<String>> {
        exempt(containers.as_array().expect("a list").iter(), options)
    }

    #[test]
    fn returns_each_probe_and_hook_once() {
        let containers = json!([
            {
                "name": "a",
                "ports": [{"name": "web", "containerPort": 8080}],
                "startupProbe": {"httpGet": {"path": "/start", "port": "web"}},
                "livenessProbe": {"httpGet": {"path": "/health", "port": "web"}},
                "readinessProbe": {"httpGet": {"path": "/health", "port": 8080}},
                "lifecycle": {"preStop": {"httpGet": {"path": "/stop", "port": "web"}}, "postStart": {"exec": {"command": ["x"]}}},
            },
            {"name": "b", "livenessProbe": {"tcpSocket": {"port": "9090"}}, "readinessProbe": {"grpc": {"port": 9091, "service": "x"}}},
            {"name": "c", "livenessProbe": {"exec": {"command": ["x"]}}, "readinessProbe": {"httpGet": {"port": 80}}},
        ]);
        let expected = [
            "http:8080:/start",
            "http:8080:/health",
            "http:8080:/stop",
            "tcp:9090",
            "grpc:9091",
            "http:80:/",
        ];
        assert_eq!(
            probes(&containers, &Options::default()),
            Ok(expected.map(str::to_owned).to_vec())
        );
    }

    #[test]
    fn omits_probes_that_bypass_the_proxy() {
        let options = Options {
            skip_inbound_ports: Some("25,8000-8999".into()),
            ..Options::default()
        };
        let containers = json!([
            {"name": "a", "livenessProbe": {"tcpSocket": {"port": 25}}, "readinessProbe": {"httpGet": {"port": 8443, "scheme": "HTTPS"}}},
            {"name": "b", "livenessProbe": {"httpGet": {"port": 80, "host": "example.com"}}, "readinessProbe": {"tcpSocket": {"port": "x"}}},
            {"name": "c", "livenessProbe": {"httpGet": {"port": 0}}, "readinessProbe": {"grpc": {"port": 70000}}, "startupProbe": null},
        ]);
        assert_eq!(probes(&containers, &options), Ok(Vec::new()));
    }

    #[test]
    fn resolves_port_names_within_the_container() {
        let containers = json!([
            {"name": "a", "ports": [{"name": "web", "containerPort": 1}]},
            {"name": "b", "ports": [{"name": "web", "containerPort": 2}], "livenessProbe": {"tcpSocket": {"port": "web"}}},
        ]);
        assert_eq!(
            probes(&containers, &Options::default()),
            Ok(vec!["tcp:2".into()])
        );
    }

    #[test]
    fn encodes_paths_as_the_kubelet_does() {
        assert_eq!(request_target("health?full=1#top"), "/health?full=1");
        assert_eq!(request_target("/a b/ü/%20"), "/a%20b/%C3%BC/%20");
        assert_eq!(request_target(""), "/");
        assert_eq!(escape_dollar("/$(POD_NAME)/$$"), "/$$(POD_NAME)/$$$$");
    }

    #[test]
    fn rejects_https_probe_with_advice() {
        let containers = json!([{"name": "a", "livenessProbe": {"httpGet": {"port": 8443, "scheme": "HTTPS", "path": "/health"}}}]);
        let problems = probes(&containers, &Options::default()).expect_err("TLS");
        assert!(
            problems[0].starts_with("container a: its livenessProbe sends HTTPS to port 8443"),
            "{problems:?}"
        );
        assert!(
            problems[0].contains("diy-service-mesh/skip-inbound-ports"),
            "{problems:?}"
        );
    }

    #[test]
    fn rejects_probes_of_opaque_ports_except_tcp() {
        let options = Options {
            opaque_ports: Some("5432,9000-9100".into()),
            ..Options::default()
        };
        let containers = json!([
            {"name": "a", "startupProbe": {"tcpSocket": {"port": 5432}}, "livenessProbe": {"httpGet": {"port": 9000}}},
            {"name": "b", "livenessProbe": {"grpc": {"port": 9100}}, "readinessProbe": {"httpGet": {"port": 80}}},
        ]);
        let problems = probes(&containers, &options).expect_err("opaque");
        let of = |container: &str, port: u16| {
            format!("container {container}: its livenessProbe targets port {port}, which is opaque")
        };
        assert!(
            problems.len() == 2
                && problems[0].starts_with(&of("a", 9000))
                && problems[1].starts_with(&of("b", 9100)),
            "{problems:?}"
        );
        let containers = json!([{"name": "a", "livenessProbe": {"tcpSocket": {"port": 5432}}}]);
        assert_eq!(probes(&containers, &options), Ok(vec!["tcp:5432".into()]));
    }
}
