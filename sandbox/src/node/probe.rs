//! Execution of container probes and HTTP lifecycle hooks, as a kubelet performs them. Supports
//! httpGet, tcpSocket and grpc.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use http_body_util::Empty;
use hyper::{Request, StatusCode, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use k8s_openapi::{
    api::core::v1::{Container, HTTPGetAction, Probe},
    apimachinery::pkg::util::intstr::IntOrString,
};
use tokio::{net::TcpStream, time};
use tonic::transport::Endpoint;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

/// A parsed probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Prober {
    handler: Handler,
    port: u16,
    timeout: Duration,
    pub(super) period: Duration,
    pub(super) failure_threshold: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Handler {
    Http {
        path: String,
        headers: Vec<(String, String)>,
        /// Every response is a success, as for a lifecycle hook.
        any_status: bool,
    },
    Tcp,
    Grpc {
        service: String,
    },
}

impl Prober {
    /// Parses a container's probe.
    pub(super) fn new(probe: &Probe, container: &Container) -> Result<Self> {
        let (handler, port) = if let Some(http) = &probe.http_get {
            http_handler(http, container, false)?
        } else if let Some(tcp) = &probe.tcp_socket {
            (Handler::Tcp, port(&tcp.port, container)?)
        } else if let Some(grpc) = &probe.grpc {
            (
                Handler::Grpc {
                    service: grpc.service.clone().unwrap_or_default(),
                },
                port(&IntOrString::Int(grpc.port), container)?,
            )
        } else {
            bail!("unsupported probe: the sandbox supports httpGet, tcpSocket and grpc")
        };
        let seconds = |value: Option<i32>, default: u64| {
            Duration::from_secs(
                value
                    .and_then(|value| value.try_into().ok())
                    .unwrap_or(default),
            )
        };
        Ok(Self {
            handler,
            port,
            timeout: seconds(probe.timeout_seconds, 1).max(Duration::from_secs(1)),
            period: seconds(probe.period_seconds, 10).max(Duration::from_secs(1)),
            failure_threshold: probe.failure_threshold.map_or(3, i32::unsigned_abs).max(1),
        })
    }

    /// Parses an HTTP preStop hook. Only the pod's grace period limits its duration.
    pub(super) fn pre_stop(http: &HTTPGetAction, container: &Container) -> Result<Self> {
        let (handler, port) = http_handler(http, container, true)?;
        Ok(Self {
            handler,
            port,
            timeout: Duration::MAX,
            period: Duration::ZERO,
            failure_threshold: 1,
        })
    }

    /// Performs one probe.
    pub(super) async fn probe(&self, ip: Ipv4Addr) -> Result<()> {
        let address = SocketAddr::from((ip, self.port));
        let attempt = async {
            match &self.handler {
                Handler::Tcp => TcpStream::connect(address)
                    .await
                    .map(drop)
                    .map_err(anyhow::Error::from),
                Handler::Http {
                    path,
                    headers,
                    any_status,
                } => {
                    let status = http_get(address, path, headers).await?;
                    let is_success = status.is_success() || status.is_redirection();
                    ensure!(*any_status || is_success, "status {status}");
                    Ok(())
                }
                Handler::Grpc { service } => grpc_health(address, service).await,
            }
        };
        let target = match &self.handler {
            Handler::Tcp => format!("tcp {address}"),
            Handler::Http { path, .. } => format!("GET http://{address}{path}"),
            Handler::Grpc { .. } => format!("gRPC health {address}"),
        };
        match time::timeout(self.timeout, attempt).await {
            Ok(result) => result.context(target),
            Err(_) => bail!("{target}: timed out after {} s", self.timeout.as_secs()),
        }
    }
}

fn http_handler(
    http: &HTTPGetAction,
    container: &Container,
    any_status: bool,
) -> Result<(Handler, u16)> {
    ensure!(
        http.scheme.as_deref().unwrap_or("HTTP") == "HTTP",
        "unsupported probe scheme HTTPS: the sandbox supports HTTP"
    );
    let headers = http
        .http_headers
        .iter()
        .flatten()
        .map(|header| (header.name.clone(), header.value.clone()))
        .collect();
    let path = http.path.as_deref().unwrap_or_default();
    let path = if path.starts_with('/') {
        path.to_owned()
    } else {
        format!("/{path}")
    };
    Ok((
        Handler::Http {
            path,
            headers,
            any_status,
        },
        port(&http.port, container)?,
    ))
}

/// Resolves a port number or the name of a container port.
fn port(port: &IntOrString, container: &Container) -> Result<u16> {
    match port {
        IntOrString::Int(number) => {
            u16::try_from(*number).with_context(|| format!("invalid port {number}"))
        }
        IntOrString::String(name) => {
            let mut ports = container.ports.iter().flatten();
            let port = ports
                .find(|port| port.name.as_ref() == Some(name))
                .with_context(|| format!("container port {name:?} not found"))?;
            u16::try_from(port.container_port)
                .with_context(|| format!("invalid port {}", port.container_port))
        }
    }
}

async fn http_get(
    address: SocketAddr,
    path: &str,
    headers: &[(String, String)],
) -> Result<StatusCode> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let mut request = Request::get(path)
        .header(header::HOST, address.to_string())
        .header(header::USER_AGENT, "kube-probe/sandbox")
        .header(header::CONNECTION, "close");
    for (name, value) in headers {
        request = request.header(name, value);
    }
    let request = request.body(Empty::<Bytes>::new())?;
    let driver = tokio::spawn(connection);
    let response = sender.send_request(request).await;
    driver.abort();
    Ok(response?.status())
}

async fn grpc_health(address: SocketAddr, service: &str) -> Result<()> {
    let channel = Endpoint::try_from(format!("http://{address}"))?
        .connect()
        .await?;
    let response = HealthClient::new(channel)
        .check(HealthCheckRequest {
            service: service.to_owned(),
        })
        .await?;
    let status = response.into_inner().status();
    ensure!(
        status == ServingStatus::Serving,
        "health status {}",
        status.as_str_name()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;

    fn container(yaml: &str) -> Container {
        serde_yaml_ng::from_str(yaml).unwrap()
    }

    #[test]
    fn applies_kubernetes_defaults_and_resolves_named_ports() {
        let container = container(
            "{name: a, ports: [{name: web, containerPort: 8080}], readinessProbe: {tcpSocket: {port: web}}}",
        );
        let prober = Prober::new(container.readiness_probe.as_ref().unwrap(), &container).unwrap();
        assert_eq!((prober.port, prober.failure_threshold), (8080, 3));
        assert_eq!(
            (prober.period, prober.timeout),
            (Duration::from_secs(10), Duration::from_secs(1))
        );
    }

    #[test]
    fn rejects_unsupported_probes_and_unknown_ports() {
        let container = container(
            "{name: a, readinessProbe: {exec: {command: [x]}}, livenessProbe: {httpGet: {port: web}}}",
        );
        assert!(Prober::new(container.readiness_probe.as_ref().unwrap(), &container).is_err());
        let error = Prober::new(container.liveness_probe.as_ref().unwrap(), &container)
            .unwrap_err()
            .to_string();
        assert!(error.contains("port \"web\" not found"), "{error}");
    }

    #[tokio::test]
    async fn probe_succeeds_only_for_healthy_servers_and_hook_for_all() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let container = container(&format!(
            "{{name: a, readinessProbe: {{tcpSocket: {{port: {port}}}}}, livenessProbe: {{httpGet: {{port: {port}}}}}}}"
        ));
        let tcp = Prober::new(container.readiness_probe.as_ref().unwrap(), &container).unwrap();
        let http = Prober::new(container.liveness_probe.as_ref().unwrap(), &container).unwrap();

        tcp.probe(Ipv4Addr::LOCALHOST).await.unwrap();
        drop(listener.accept().await.unwrap());
        let (up, ()) = tokio::join!(http.probe(Ipv4Addr::LOCALHOST), answer(&listener, "200 OK"));
        up.unwrap();
        let (down, ()) = tokio::join!(
            http.probe(Ipv4Addr::LOCALHOST),
            answer(&listener, "503 Service Unavailable")
        );
        assert!(format!("{:#}", down.unwrap_err()).contains("503"));
        let get = container.liveness_probe.as_ref().unwrap().http_get.as_ref();
        let hook = Prober::pre_stop(get.unwrap(), &container).unwrap();
        let (stopped, ()) = tokio::join!(
            hook.probe(Ipv4Addr::LOCALHOST),
            answer(&listener, "503 Service Unavailable")
        );
        stopped.unwrap();
        drop(listener);
        tcp.probe(Ipv4Addr::LOCALHOST).await.unwrap_err();
    }

    async fn answer(listener: &TcpListener, status: &str) {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            request.push(stream.read_u8().await.unwrap());
        }
        stream
            .write_all(format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n").as_bytes())
            .await
            .unwrap();
    }
}
