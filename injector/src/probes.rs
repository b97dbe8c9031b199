//! What the kubelet asks a pod's containers, as the proxy's `--probe` has it: `http:PORT:PATH`, `tcp:PORT`, `grpc:PORT`. Pure.
//!
//! The kubelet has no identity in the mesh, so a strict proxy lets in exactly what is declared here. It never allows more than
//! one declared question: not a port as a whole for the sake of one path.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::annotations::{INBOUND, Options, PERMISSIVE, SKIP_INBOUND_PORTS};
use crate::patch::name_of;

const PROBES: [&str; 3] = ["startupProbe", "livenessProbe", "readinessProbe"];
const HOOKS: [&str; 2] = ["postStart", "preStop"];

/// The probes and lifecycle hooks of these containers that reach the pod through the proxy, each once; or every problem, one
/// sentence each.
pub fn of<'a>(
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
                Some(Err(hidden)) => problems.push(problem(container, name, &hidden)),
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

/// A probe that a proxy cannot tell from other connections, by its port.
enum Hidden {
    /// In the app's own TLS.
    Tls(u16),
    /// To a port where the proxy does not look.
    Opaque(u16),
}

/// One probe; none where it does not pass the proxy.
fn read(action: &Value, container: &Value, options: &Options) -> Result<Option<String>, Hidden> {
    let passes = |place: &Value| {
        port(place, container).filter(|port| to_the_pod(place) && !options.skips_inbound(*port))
    };
    if let Some(http) = action.get("httpGet") {
        let Some(port) = passes(http) else {
            return Ok(None);
        };
        if http.get("scheme").and_then(Value::as_str) == Some("HTTPS") {
            return Err(Hidden::Tls(port));
        }
        if options.is_opaque(port) {
            return Err(Hidden::Opaque(port));
        }
        let path = http.get("path").and_then(Value::as_str).unwrap_or_default();
        return Ok(Some(format!("http:{port}:{}", unexpanded(&target(path)))));
    }
    let simple = ["tcpSocket", "grpc"]
        .into_iter()
        .find_map(|kind| Some((kind, action.get(kind)?)));
    let Some((kind, port)) = simple.and_then(|(kind, place)| Some((kind, passes(place)?))) else {
        return Ok(None);
    };
    // A connection without a byte asks for nothing: that it is accepted is the answer.
    if kind == "grpc" && options.is_opaque(port) {
        return Err(Hidden::Opaque(port));
    }
    Ok(Some(format!("{}:{port}", kind.trim_end_matches("Socket"))))
}

/// The kubelet asks the pod's own address, unless it is told another host.
fn to_the_pod(place: &Value) -> bool {
    place
        .get("host")
        .and_then(Value::as_str)
        .unwrap_or_default()
        .is_empty()
}

/// The number of a port: itself, or what the container calls by that name, or, as the kubelet has it, a number in a string.
fn port(place: &Value, container: &Value) -> Option<u16> {
    let number = |value: &Value| {
        value
            .as_u64()
            .and_then(|number| u16::try_from(number).ok())
            .filter(|number| *number != 0)
    };
    let port = place.get("port")?;
    let Some(name) = port.as_str() else {
        return number(port);
    };
    let named = container
        .get("ports")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .find(|port| name_of(port) == name);
    named.map_or_else(
        || name.parse().ok().filter(|number| *number != 0),
        |port| number(port.get("containerPort")?),
    )
}

/// The path as it stands in the kubelet's request: with a slash in front, without a fragment, and in characters that a
/// request's first line can hold.
fn target(path: &str) -> String {
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

/// Kubernetes replaces `$(NAME)` in a container's arguments, and does not in a probe's path.
fn unexpanded(text: &str) -> String {
    text.replace('$', "$$")
}

fn problem(container: &Value, name: &str, hidden: &Hidden) -> String {
    let (port, what, instead) = match hidden {
        Hidden::Tls(port) => (
            port,
            format!(
                "speaks HTTPS to port {port}, which a strict proxy cannot tell from other callers' TLS"
            ),
            "without TLS",
        ),
        Hidden::Opaque(port) => (
            port,
            format!(
                "asks port {port}, which is opaque, so that a strict proxy cannot tell it from other callers"
            ),
            "that is not opaque",
        ),
    };
    format!(
        "container {}: its {name} {what}: probe a port {instead}, or leave port {port} to the application by the annotation \
         {SKIP_INBOUND_PORTS}, or set {INBOUND} to {PERMISSIVE}",
        name_of(container)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn probes(containers: &Value, options: &Options) -> Result<Vec<String>, Vec<String>> {
        of(containers.as_array().expect("a list").iter(), options)
    }

    #[test]
    fn every_kind_of_probe_and_hook_is_told_once() {
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
    fn what_does_not_pass_the_proxy_is_not_told() {
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
    fn a_named_port_is_one_of_the_same_container() {
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
    fn a_path_is_written_as_the_kubelet_sends_it_and_never_expanded() {
        assert_eq!(target("health?full=1#top"), "/health?full=1");
        assert_eq!(target("/a b/ü/%20"), "/a%20b/%C3%BC/%20");
        assert_eq!(target(""), "/");
        assert_eq!(unexpanded("/$(POD_NAME)/$$"), "/$$(POD_NAME)/$$$$");
    }

    #[test]
    fn a_probe_over_tls_is_refused_with_what_to_do() {
        let containers = json!([{"name": "a", "livenessProbe": {"httpGet": {"port": 8443, "scheme": "HTTPS", "path": "/health"}}}]);
        let problems = probes(&containers, &Options::default()).expect_err("TLS");
        assert!(
            problems[0].starts_with("container a: its livenessProbe speaks HTTPS to port 8443"),
            "{problems:?}"
        );
        assert!(
            problems[0].contains("diy-service-mesh/skip-inbound-ports"),
            "{problems:?}"
        );
    }

    #[test]
    fn a_probe_of_an_opaque_port_is_refused_unless_it_is_a_bare_connection() {
        let options = Options {
            opaque_ports: Some("5432,9000-9100".into()),
            ..Options::default()
        };
        let containers = json!([
            {"name": "a", "startupProbe": {"tcpSocket": {"port": 5432}}, "livenessProbe": {"httpGet": {"port": 9000}}},
            {"name": "b", "livenessProbe": {"grpc": {"port": 9100}}, "readinessProbe": {"httpGet": {"port": 80}}},
        ]);
        let problems = probes(&containers, &options).expect_err("two are hidden");
        let of = |container: &str, port: u16| {
            format!("container {container}: its livenessProbe asks port {port}, which is opaque")
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
