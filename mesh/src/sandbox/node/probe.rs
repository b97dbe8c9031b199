//! Probes of containers, from the node's side, as a kubelet makes them: httpGet, tcpSocket, grpc. It decides nothing; the
//! container's supervisor does.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use http_body_util::Empty;
use hyper::{Request, client::conn::http1, header};
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

/// A probe, understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Check {
    kind: Kind,
    port: u16,
    timeout: Duration,
    pub(super) period: Duration,
    pub(super) initial_delay: Duration,
    pub(super) failures: u32,
    pub(super) successes: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Http {
        path: String,
        headers: Vec<(String, String)>,
    },
    Tcp,
    Grpc {
        service: String,
    },
}

impl Check {
    /// Reads a container's probe.
    pub(super) fn new(probe: &Probe, container: &Container) -> Result<Self> {
        let (kind, port) = if let Some(http) = &probe.http_get {
            http_check(http, container)?
        } else if let Some(tcp) = &probe.tcp_socket {
            (Kind::Tcp, port(&tcp.port, container)?)
        } else if let Some(grpc) = &probe.grpc {
            (
                Kind::Grpc {
                    service: grpc.service.clone().unwrap_or_default(),
                },
                port(&IntOrString::Int(grpc.port), container)?,
            )
        } else {
            bail!("the sandbox knows the probes httpGet, tcpSocket and grpc")
        };
        let seconds = |value: Option<i32>, default: u64| {
            Duration::from_secs(
                value
                    .and_then(|value| value.try_into().ok())
                    .unwrap_or(default),
            )
        };
        let count = |value: Option<i32>, default: u32| {
            value
                .and_then(|value| value.try_into().ok())
                .unwrap_or(default)
                .max(1)
        };
        Ok(Self {
            kind,
            port,
            timeout: seconds(probe.timeout_seconds, 1).max(Duration::from_secs(1)),
            period: seconds(probe.period_seconds, 10).max(Duration::from_secs(1)),
            initial_delay: seconds(probe.initial_delay_seconds, 0),
            failures: count(probe.failure_threshold, 3),
            successes: count(probe.success_threshold, 1),
        })
    }

    /// Reads a container's lifecycle hook, which has as long as the pod has.
    pub(super) fn hook(http: &HTTPGetAction, container: &Container) -> Result<Self> {
        let (kind, port) = http_check(http, container)?;
        let (none, forever) = (Duration::ZERO, Duration::from_secs(24 * 3600));
        Ok(Self {
            kind,
            port,
            timeout: forever,
            period: none,
            initial_delay: none,
            failures: 1,
            successes: 1,
        })
    }

    /// Probes once; the error says what was wrong.
    pub(super) async fn run(&self, ip: Ipv4Addr) -> Result<()> {
        let address = SocketAddr::from((ip, self.port));
        let attempt = async {
            match &self.kind {
                Kind::Tcp => TcpStream::connect(address)
                    .await
                    .map(drop)
                    .map_err(anyhow::Error::from),
                Kind::Http { path, headers } => http_get(address, path, headers).await,
                Kind::Grpc { service } => grpc_health(address, service).await,
            }
        };
        let what = match &self.kind {
            Kind::Tcp => format!("tcp {address}"),
            Kind::Http { path, .. } => format!("GET http://{address}{path}"),
            Kind::Grpc { .. } => format!("gRPC health {address}"),
        };
        match time::timeout(self.timeout, attempt).await {
            Ok(result) => result.context(what),
            Err(_) => bail!("{what}: no answer within {} s", self.timeout.as_secs()),
        }
    }
}

fn http_check(http: &HTTPGetAction, container: &Container) -> Result<(Kind, u16)> {
    ensure!(
        http.scheme.as_deref().unwrap_or("HTTP") == "HTTP",
        "the sandbox probes over HTTP, not HTTPS"
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
    Ok((Kind::Http { path, headers }, port(&http.port, container)?))
}

/// The number of a port that may be named.
fn port(port: &IntOrString, container: &Container) -> Result<u16> {
    match port {
        IntOrString::Int(number) => {
            u16::try_from(*number).with_context(|| format!("{number} is no port"))
        }
        IntOrString::String(name) => {
            let mut ports = container.ports.iter().flatten();
            let port = ports
                .find(|port| port.name.as_ref() == Some(name))
                .with_context(|| format!("the container has no port named {name}"))?;
            u16::try_from(port.container_port)
                .with_context(|| format!("{} is no port", port.container_port))
        }
    }
}

async fn http_get(address: SocketAddr, path: &str, headers: &[(String, String)]) -> Result<()> {
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
    // The connection's end is told by the response; its task ends with the probe.
    let driver = tokio::spawn(connection);
    let response = sender.send_request(request).await;
    driver.abort();
    let status = response?.status();
    ensure!(
        status.is_success() || status.is_redirection(),
        "status {status}"
    );
    Ok(())
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
        "it says {}",
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
    fn named_ports_and_kubernetes_defaults() {
        let container = container(
            "{name: a, ports: [{name: web, containerPort: 8080}], readinessProbe: {tcpSocket: {port: web}}}",
        );
        let check = Check::new(container.readiness_probe.as_ref().unwrap(), &container).unwrap();
        assert_eq!((check.port, check.failures, check.successes), (8080, 3, 1));
        assert_eq!(
            (check.period, check.timeout),
            (Duration::from_secs(10), Duration::from_secs(1))
        );
    }

    #[test]
    fn what_is_not_supported_is_an_error() {
        let container = container(
            "{name: a, readinessProbe: {exec: {command: [x]}}, livenessProbe: {httpGet: {port: web}}}",
        );
        assert!(Check::new(container.readiness_probe.as_ref().unwrap(), &container).is_err());
        let error = Check::new(container.liveness_probe.as_ref().unwrap(), &container)
            .unwrap_err()
            .to_string();
        assert!(error.contains("named web"), "{error}");
    }

    #[tokio::test]
    async fn probes_tell_up_from_down() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let container = container(&format!(
            "{{name: a, readinessProbe: {{tcpSocket: {{port: {port}}}}}, livenessProbe: {{httpGet: {{port: {port}}}}}}}"
        ));
        let tcp = Check::new(container.readiness_probe.as_ref().unwrap(), &container).unwrap();
        let http = Check::new(container.liveness_probe.as_ref().unwrap(), &container).unwrap();

        tcp.run(Ipv4Addr::LOCALHOST).await.unwrap();
        drop(listener.accept().await.unwrap());
        let (up, ()) = tokio::join!(http.run(Ipv4Addr::LOCALHOST), answer(&listener, "200 OK"));
        up.unwrap();
        let (down, ()) = tokio::join!(
            http.run(Ipv4Addr::LOCALHOST),
            answer(&listener, "503 Service Unavailable")
        );
        assert!(format!("{:#}", down.unwrap_err()).contains("503"));
        drop(listener);
        tcp.run(Ipv4Addr::LOCALHOST).await.unwrap_err();
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
