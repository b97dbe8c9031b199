//! Manifests of the cluster tests' workloads, and parsers of their logs. Pure values.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

const ECHO: &str = "/echo.v1.EchoService/Echo";
const ECHO_STREAM_FAILED: &str = "Request failed: /echo.v1.EchoService/EchoStream:";

/// Deployment or Job with one of the sample programs.
#[derive(Clone, Copy)]
pub struct App<'a> {
    /// Name, and value of the label `app` of its pods.
    pub name: &'a str,
    /// Sample program: name of the container and suffix of the image.
    pub program: &'a str,
    /// Value of the annotation `diy-service-mesh/inject`, if any.
    pub inject: Option<&'a str>,
    /// Number of pods.
    pub replicas: u32,
    /// Endpoint of a client; unused by servers.
    pub endpoint: &'a str,
    /// Milliseconds between two requests of a client; empty for its default.
    pub interval_ms: &'a str,
}

impl App<'_> {
    /// An http-server with a Service of the same name on port 80.
    pub fn http_server() -> App<'static> {
        App {
            name: "server",
            program: "http-server",
            inject: Some("true"),
            replicas: 1,
            endpoint: "",
            interval_ms: "",
        }
    }

    /// A meshed pod of tests/authorizer, which is a client and an authorization server.
    pub fn authorizer(name: &'static str) -> App<'static> {
        App {
            name,
            program: "authorizer",
            ..Self::http_server()
        }
    }

    /// An http-client that sends a request to `http_server` each second.
    pub fn http_client() -> App<'static> {
        App {
            name: "client",
            program: "http-client",
            inject: Some("true"),
            replicas: 1,
            endpoint: "http://server/hello",
            interval_ms: "",
        }
    }

    /// Manifest of the Deployment.
    pub fn deployment(&self) -> String {
        object(
            "apps/v1",
            "Deployment",
            self.name,
            json!({
                "replicas": self.replicas, "selector": {"matchLabels": {"app": self.name}}, "template": self.pod("Always"),
            }),
        )
    }

    /// Manifest of the Service.
    pub fn service(&self) -> String {
        object(
            "v1",
            "Service",
            self.name,
            json!({"selector": {"app": self.name}, "ports": [{"port": 80, "targetPort": 8080}]}),
        )
    }

    /// Manifest of a Job that runs for a few seconds: a failing liveness probe stops the sample
    /// app.
    pub fn job(&self) -> String {
        let mut pod = self.pod("Never");
        pod["spec"]["containers"][0]["livenessProbe"] = json!({
            "exec": {"command": [format!("/usr/local/bin/{}", self.program), "--no-such-flag"]},
            "initialDelaySeconds": 8, "periodSeconds": 2, "failureThreshold": 1,
        });
        object(
            "batch/v1",
            "Job",
            self.name,
            json!({"backoffLimit": 0, "template": pod}),
        )
    }

    fn pod(&self, restart: &str) -> Value {
        let mut container = json!({
            "name": self.program,
            "image": format!("diy-sm-{}:dev", self.program),
            "imagePullPolicy": "IfNotPresent",
            "env": [{"name": "ENDPOINT", "value": self.endpoint}, {"name": "INTERVAL_MS", "value": self.interval_ms}],
            "securityContext": {"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]}},
        });
        if self.program.ends_with("server") {
            container["startupProbe"] =
                json!({"tcpSocket": {"port": 8080}, "periodSeconds": 1, "failureThreshold": 60});
        }
        let annotations = self
            .inject
            .map_or(json!({}), |value| json!({"diy-service-mesh/inject": value}));
        json!({
            "metadata": {"labels": {"app": self.name}, "annotations": annotations},
            "spec": {
                "restartPolicy": restart,
                "automountServiceAccountToken": false,
                "securityContext": {"runAsNonRoot": true, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [container],
            },
        })
    }
}

/// Counts of logged responses.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Responses {
    /// Responses with status 200.
    pub good: usize,
    /// Other responses and errors, each in one line.
    pub bad: Vec<String>,
    /// The last lines belong to a failure.
    in_failure: bool,
}

impl Responses {
    /// Parses logs of http-clients.
    pub fn count(logs: &str) -> Self {
        let mut responses = Self::default();
        logs.lines().for_each(|line| responses.add(line));
        responses
    }

    /// Fails unless as many requests have failed.
    pub fn expect_failures(&self, number: usize) -> Result<()> {
        ensure!(
            self.bad.len() == number,
            "{} successful responses, failures: {:#?}",
            self.good,
            self.bad
        );
        Ok(())
    }

    /// Parses the next line of a log. A failure lasts until the next response or error.
    pub fn add(&mut self, line: &str) {
        let status = line.strip_prefix("HTTP/1.1 ");
        let is_failed_call = line.starts_with("Request failed");
        if line.starts_with("Response #") || line.starts_with(ECHO_STREAM_FAILED) {
            // A stream ends with its server.
            self.in_failure = false;
        } else if line == ECHO || status.is_some_and(|status| status.starts_with("200")) {
            self.good += 1;
        } else if status.is_some() || is_failed_call {
            self.in_failure = true;
            self.bad.push(line.to_owned());
        } else if let Some(last) = self
            .bad
            .last_mut()
            .filter(|_| self.in_failure && !line.is_empty())
        {
            *last += ", ";
            *last += line;
        }
    }
}

/// Distinct words that follow `label` in a text, sorted.
pub fn distinct<'a>(text: &'a str, label: &str) -> Vec<&'a str> {
    let mut found: Vec<&str> = text
        .split(label)
        .skip(1)
        .filter_map(|rest| rest.split_whitespace().next())
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

fn object(api_version: &str, kind: &str, name: &str, spec: Value) -> String {
    json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "spec": spec})
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_other_status_codes_and_errors_as_failures() {
        let logs = "Response #1\nHTTP/1.1 200 OK\ncontent-length: 2\n\nhi\nRequest failed: http://server/hello: refused\n\
                    Response #2\nHTTP/1.1 503 Service Unavailable\nX-Mesh-Error: no-endpoint\n\nno endpoint\n\
                    Response #3\n/echo.v1.EchoService/Echo\n";
        let responses = Responses::count(logs);
        assert_eq!(responses.good, 2);
        assert_eq!(
            responses.bad,
            [
                "Request failed: http://server/hello: refused",
                "HTTP/1.1 503 Service Unavailable, X-Mesh-Error: no-endpoint, no endpoint"
            ]
        );
    }

    #[test]
    fn distinct_removes_duplicates() {
        assert_eq!(
            distinct(
                "Hostname: b Version: 1\nHostname: a x\nHostname: b",
                "Hostname: "
            ),
            ["a", "b"]
        );
    }
}
