//! The kubelet's network probes and lifecycle hooks of the pod. The kubelet cannot perform them
//! through the proxy: a listener accepts connections whether the application does or not, a strict
//! pod rejects callers without mesh TLS, and rate limits, faults and overload concern every request.
//! The injector therefore rewrites them to `/probes/INDEX` on the admin port, and passes the
//! originals to the proxy, which performs them here as the kubelet would.
//!
//! A request contains nothing but an index. It cannot make the proxy call anything else than what
//! the pod's manifest declares, at the pod's own address.

mod http;
mod perform;

use std::net::IpAddr;
use std::num::NonZeroU16;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ::http::StatusCode;
use diy_mesh_runtime::{Admin, Page};
use serde::Deserialize;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::observe::exceptions::{Event, Exceptions, Kind};
pub use perform::ProbeError;

/// The length of the name of a probe in exceptions.
const MAX_NAME_CHARS: usize = 100;

/// A probe, or a lifecycle hook if it has no timeout. Only the caller limits the duration of a
/// hook. It has the fields of a Kubernetes probe, with the number of a named port.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KubeletProbe {
    #[serde(flatten)]
    action: Action,
    timeout_seconds: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Action {
    HttpGet(HttpGet),
    TcpSocket(TcpSocket),
    Grpc(Grpc),
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct HttpGet {
    port: NonZeroU16,
    path: Option<String>,
    scheme: Option<String>,
    http_headers: Option<Vec<HttpHeader>>,
    /// The version of HTTP without TLS.
    #[serde(default)]
    protocol: HttpProtocol,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum HttpProtocol {
    #[default]
    Http1,
    /// HTTP/2 with prior knowledge.
    Http2,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct HttpHeader {
    name: String,
    #[serde(default)]
    value: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct TcpSocket {
    port: NonZeroU16,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct Grpc {
    port: NonZeroU16,
    service: Option<String>,
    #[serde(default)]
    mode: GrpcMode,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
enum GrpcMode {
    #[default]
    Plaintext,
    /// TLS with any certificate.
    #[serde(rename = "TLS")]
    Tls,
}

impl FromStr for KubeletProbe {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|error| {
            let example = r#"{"tcpSocket":{"port":8080},"timeoutSeconds":1}"#;
            format!("{error}; expected a probe in JSON, such as {example}")
        })
    }
}

impl KubeletProbe {
    fn is_hook(&self) -> bool {
        self.timeout_seconds.is_none()
    }

    fn timeout(&self) -> Duration {
        let limit = |seconds: u32| Duration::from_secs(seconds.max(1).into());
        self.timeout_seconds.map_or(Duration::MAX, limit)
    }
}

/// The pod, as the kubelet addresses it.
#[derive(Clone, Copy, Debug)]
pub struct Pod {
    /// Its own address.
    pub ip: IpAddr,
    /// The ports of the proxy. A probe never connects to them.
    pub proxy_ports: [u16; 3],
}

/// Adds a route for each probe: `/probes/0`, `/probes/1`, ...
pub fn add_routes(
    admin: Admin,
    probes: &[KubeletProbe],
    pod: Pod,
    exceptions: &Arc<Exceptions>,
) -> Admin {
    let probers = probes.iter().enumerate().map(|(index, probe)| {
        let prober = Arc::new(Prober {
            index,
            probe: probe.clone(),
            pod,
            name: probe.to_string().chars().take(MAX_NAME_CHARS).collect(),
            exceptions: exceptions.clone(),
            state: Mutex::default(),
        });
        (format!("/probes/{index}"), prober)
    });
    probers.fold(admin, |admin, (path, prober)| {
        admin.route(path, move || prober.clone().respond())
    })
}

/// Performs one probe, once at a time: concurrent requests get the same result.
struct Prober {
    index: usize,
    probe: KubeletProbe,
    pod: Pod,
    /// The description of the probe, in exceptions.
    name: String,
    exceptions: Arc<Exceptions>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    in_progress: Option<watch::Sender<Option<Outcome>>>,
    /// The last result was a failure.
    failed: bool,
}

type Outcome = Result<(), Arc<ProbeError>>;

impl Prober {
    async fn respond(self: Arc<Self>) -> Option<Page> {
        let mut receiver = self.subscribe();
        let outcome = receiver.wait_for(Option::is_some).await.ok()?.clone()?;
        match outcome {
            Ok(()) => Some(Page::text("ok\n")),
            // The kubelet takes every response to a hook for a success.
            Err(_) if self.probe.is_hook() => None,
            Err(error) => {
                let status = match *error {
                    // The kubelet's event contains the status only.
                    ProbeError::Status(status) if status.as_u16() >= 400 => status,
                    ProbeError::Timeout(_) => StatusCode::GATEWAY_TIMEOUT,
                    _ => StatusCode::SERVICE_UNAVAILABLE,
                };
                Some(Page::failure(status, format!("{error}\n")))
            }
        }
    }

    /// The result of the attempt in progress, or of a new one.
    fn subscribe(self: &Arc<Self>) -> watch::Receiver<Option<Outcome>> {
        let mut state = self.state();
        if let Some(attempt) = &state.in_progress {
            return attempt.subscribe();
        }
        let (sender, receiver) = watch::channel(None);
        state.in_progress = Some(sender.clone());
        tokio::spawn(self.clone().attempt(sender));
        receiver
    }

    /// Performs the probe and publishes the result. An attempt continues if its clients leave, so
    /// that a client cannot delay the kubelet; only a hook, which has no timeout, ends then.
    async fn attempt(self: Arc<Self>, results: watch::Sender<Option<Outcome>>) {
        let limit = self.probe.timeout();
        let performing = timeout(limit, perform::perform(&self.probe, &self.pod));
        let mut performing = std::pin::pin!(performing);
        let result = loop {
            tokio::select! {
                result = &mut performing => break result,
                () = results.closed(), if self.probe.is_hook() => {
                    let mut state = self.state();
                    if results.receiver_count() == 0 {
                        state.in_progress = None;
                        return;
                    }
                }
            }
        };
        let outcome = result.unwrap_or(Err(ProbeError::Timeout(limit)));
        self.report(&outcome);
        self.log_change(&outcome);
        self.state().in_progress = None;
        results.send_replace(Some(outcome.map_err(Arc::new)));
    }

    /// Counts the result of a probe.
    fn report(&self, outcome: &Result<(), ProbeError>) {
        let now = Instant::now();
        match outcome {
            _ if self.probe.is_hook() => {}
            Ok(()) => self.exceptions.count(Kind::Probe, &self.name, 1, now),
            Err(error) => {
                let event = Event {
                    kind: Kind::Probe,
                    destination: &self.name,
                    endpoint: "",
                    reason: &error.code(),
                };
                self.exceptions.record(event, 1, now);
            }
        }
    }

    /// Logs a failure after a success, and a success after a failure.
    fn log_change(&self, outcome: &Result<(), ProbeError>) {
        let (index, probe) = (self.index, &self.probe);
        let failed_before = std::mem::replace(&mut self.state().failed, outcome.is_err());
        match outcome {
            Err(error) if !failed_before => {
                tracing::info!("probe {index} failed: {probe}: {error}");
            }
            Ok(()) if failed_before => tracing::info!("probe {index} succeeds: {probe}"),
            _ => {}
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Display for KubeletProbe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.action {
            Action::HttpGet(get) => {
                let scheme = match get.protocol {
                    _ if get.is_https() => "HTTPS",
                    HttpProtocol::Http1 => "HTTP",
                    HttpProtocol::Http2 => "HTTP/2",
                };
                write!(f, "{scheme} GET {} on port {}", get.target(), get.port)
            }
            Action::TcpSocket(TcpSocket { port }) => write!(f, "TCP connection to port {port}"),
            Action::Grpc(Grpc { port, mode, .. }) => {
                let tls = match mode {
                    GrpcMode::Plaintext => "",
                    GrpcMode::Tls => " with TLS",
                };
                write!(f, "gRPC health check{tls} on port {port}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<KubeletProbe, String> {
        text.parse()
    }

    #[test]
    fn parses_kubernetes_probes_and_ignores_unknown_fields() {
        for (text, printed, timeout) in [
            (
                r#"{"httpGet":{"path":"a b","port":8443,"scheme":"HTTPS","httpHeaders":[{"name":"A","value":"1"}]},"timeoutSeconds":3}"#,
                "HTTPS GET /a%20b on port 8443",
                Duration::from_secs(3),
            ),
            (
                r#"{"httpGet":{"port":80,"host":"","later":true}}"#,
                "HTTP GET / on port 80",
                Duration::MAX,
            ),
            (
                r#"{"timeoutSeconds":0,"tcpSocket":{"port":1},"periodSeconds":5}"#,
                "TCP connection to port 1",
                Duration::from_secs(1),
            ),
            (
                r#"{"grpc":{"port":9,"service":null},"timeoutSeconds":1}"#,
                "gRPC health check on port 9",
                Duration::from_secs(1),
            ),
            (
                r#"{"grpc":{"port":9,"mode":"TLS"},"timeoutSeconds":1}"#,
                "gRPC health check with TLS on port 9",
                Duration::from_secs(1),
            ),
            (
                r#"{"httpGet":{"port":9,"protocol":"HTTP2"},"timeoutSeconds":1}"#,
                "HTTP/2 GET / on port 9",
                Duration::from_secs(1),
            ),
        ] {
            let probe = parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!((&*probe.to_string(), probe.timeout()), (printed, timeout));
            assert_eq!(probe.is_hook(), timeout == Duration::MAX);
        }
    }

    #[test]
    fn rejects_invalid_probes() {
        for text in [
            "",
            "tcp:80",
            "{}",
            "[]",
            r#"{"exec":{}}"#,
            r#"{"tcpSocket":{"port":0}}"#,
            r#"{"tcpSocket":{"port":65536}}"#,
            r#"{"tcpSocket":{"port":"web"}}"#,
            r#"{"tcpSocket":{"port":80},"timeoutSeconds":-1}"#,
            r#"{"httpGet":{"port":80,"protocol":"HTTP3"}}"#,
            r#"{"grpc":{"port":80,"mode":"MutualTLS"}}"#,
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains("expected a probe in JSON"), "{error}");
        }
    }
}
