//! The workloads of the cluster tests, made of the sample apps' images, and what their clients have to say. Text and values only.

use serde_json::{Value, json};

/// One app of a test: a Deployment, or a Job, of one of the sample programs.
#[derive(Clone, Copy)]
pub struct App<'a> {
    /// What it is called; its pods have the label `app` with this value.
    pub name: &'a str,
    /// The sample program: the container's name, and the end of its image's.
    pub program: &'a str,
    /// What its pods say about the mesh in the annotation `diy-service-mesh/inject`; None: nothing.
    pub inject: Option<&'a str>,
    /// How many pods.
    pub replicas: u32,
    /// Where a client calls; of no meaning to a server.
    pub endpoint: &'a str,
}

impl App<'_> {
    /// An http-server behind a Service of the same name, port 80.
    pub fn http_server() -> App<'static> {
        App {
            name: "server",
            program: "http-server",
            inject: Some("true"),
            replicas: 1,
            endpoint: "",
        }
    }

    /// An http-client that calls `http_server` each second.
    pub fn http_client() -> App<'static> {
        App {
            name: "client",
            program: "http-client",
            inject: Some("true"),
            replicas: 1,
            endpoint: "http://server/hello",
        }
    }

    /// The manifest of its Deployment.
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

    /// The manifest of its Service.
    pub fn service(&self) -> String {
        object(
            "v1",
            "Service",
            self.name,
            json!({"selector": {"app": self.name}, "ports": [{"port": 80, "targetPort": 8080}]}),
        )
    }

    /// The manifest of a Job that runs it for a few seconds: the kubelet ends it by a probe that fails, as nothing else ends a sample app.
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
            "env": [{"name": "ENDPOINT", "value": self.endpoint}],
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

/// What http-clients have printed, counted.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Answers {
    /// Answers with status 200.
    pub good: usize,
    /// Each line that tells of anything else.
    pub bad: Vec<String>,
}

impl Answers {
    /// Counts the lines of http-clients' logs.
    pub fn count(logs: &str) -> Self {
        let mut answers = Self::default();
        for line in logs.lines() {
            match line.strip_prefix("HTTP/1.1 ") {
                Some(status) if status.starts_with("200") => answers.good += 1,
                Some(_) => answers.bad.push(line.to_owned()),
                None if line.starts_with("Request failed") => answers.bad.push(line.to_owned()),
                None => {}
            }
        }
        answers
    }
}

/// The values that follow `label` in a text, each once, in order: `hostnames(logs, "Hostname: ")`.
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
    fn answers_other_than_200_and_failed_calls_are_bad() {
        let logs = "Response #1\nHTTP/1.1 200 OK\ncontent-length: 2\n\nhi\nRequest failed: http://server/hello: refused\n\
                    Response #2\nHTTP/1.1 503 Service Unavailable\n";
        let answers = Answers::count(logs);
        assert_eq!(answers.good, 1);
        assert_eq!(
            answers.bad,
            [
                "Request failed: http://server/hello: refused",
                "HTTP/1.1 503 Service Unavailable"
            ]
        );
    }

    #[test]
    fn values_are_found_once_each() {
        assert_eq!(
            distinct(
                "Hostname: b Version: 1\nHostname: a x\nHostname: b",
                "Hostname: "
            ),
            ["a", "b"]
        );
    }
}
