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
    address: SocketAddr,
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
    /// Parses the probe of a container at this address.
    pub(super) fn new(probe: &Probe, container: &Container, ip: Ipv4Addr) -> Result<Self> {
        let (handler, port) = if let Some(http) = &probe.http_get {
            (http_handler(http, false)?, http.port.clone())
        } else if let Some(tcp) = &probe.tcp_socket {
            (Handler::Tcp, tcp.port.clone())
        } else if let Some(grpc) = &probe.grpc {
            let service = grpc.service.clone().unwrap_or_default();
            (Handler::Grpc { service }, IntOrString::Int(grpc.port))
        } else {
            bail!("unsupported probe: the sandbox supports httpGet, tcpSocket and grpc")
        };
        let positive = |value: Option<i32>, default: u32| {
            let value = value.and_then(|value| value.try_into().ok());
            value.unwrap_or(default).max(1)
        };
        let seconds = |value, default| Duration::from_secs(positive(value, default).into());
        Ok(Self {
            handler,
            address: address(&port, container, ip)?,
            timeout: seconds(probe.timeout_seconds, 1),
            period: seconds(probe.period_seconds, 10),
            failure_threshold: positive(probe.failure_threshold, 3),
        })
    }

    /// Parses an HTTP preStop hook. Only the pod's grace period limits its duration.
    pub(super) fn pre_stop(
        http: &HTTPGetAction,
        container: &Container,
        ip: Ipv4Addr,
    ) -> Result<Self> {
        Ok(Self {
            handler: http_handler(http, true)?,
            address: address(&http.port, container, ip)?,
            timeout: Duration::MAX,
            period: Duration::ZERO,
            failure_threshold: 1,
        })
    }

    /// Performs one probe.
    pub(super) async fn probe(&self) -> Result<()> {
        let address = self.address;
        let target = match &self.handler {
            Handler::Tcp => format!("tcp {address}"),
            Handler::Http { path, .. } => format!("GET http://{address}{path}"),
            Handler::Grpc { .. } => format!("gRPC health {address}"),
        };
        match time::timeout(self.timeout, self.attempt()).await {
            Ok(result) => result.context(target),
            Err(_) => bail!("{target}: timed out after {} s", self.timeout.as_secs()),
        }
    }

    async fn attempt(&self) -> Result<()> {
        match &self.handler {
            Handler::Tcp => drop(TcpStream::connect(self.address).await?),
            Handler::Http {
                path,
                headers,
                any_status,
            } => {
                let status = http_get(self.address, path, headers).await?;
                let is_success = status.is_success() || status.is_redirection();
                ensure!(*any_status || is_success, "status {status}");
            }
            Handler::Grpc { service } => grpc_health(self.address, service).await?,
        }
        Ok(())
    }
}

fn http_handler(http: &HTTPGetAction, any_status: bool) -> Result<Handler> {
    ensure!(
        http.scheme.as_deref().unwrap_or("HTTP") == "HTTP",
        "unsupported probe scheme HTTPS: the sandbox supports HTTP"
    );
    let path = http.path.as_deref().unwrap_or_default();
    let headers = http.http_headers.iter().flatten();
    let headers = headers.map(|header| (header.name.clone(), header.value.clone()));
    Ok(Handler::Http {
        path: format!("/{}", path.strip_prefix('/').unwrap_or(path)),
        headers: headers.collect(),
        any_status,
    })
}

/// Resolves a port number or the name of a container port.
fn address(port: &IntOrString, container: &Container, ip: Ipv4Addr) -> Result<SocketAddr> {
    let number = match port {
        IntOrString::Int(number) => *number,
        IntOrString::String(name) => {
            let mut ports = container.ports.iter().flatten();
            let port = ports.find(|port| port.name.as_ref() == Some(name));
            let port = port.with_context(|| format!("container port {name:?} not found"))?;
            port.container_port
        }
    };
    let port = u16::try_from(number).with_context(|| format!("invalid port {number}"))?;
    Ok(SocketAddr::from((ip, port)))
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
        let prober = Prober::new(
            container.readiness_probe.as_ref().unwrap(),
            &container,
            Ipv4Addr::LOCALHOST,
        )
        .unwrap();
        assert_eq!((prober.address.port(), prober.failure_threshold), (8080, 3));
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
        assert!(
            Prober::new(
                container.readiness_probe.as_ref().unwrap(),
                &container,
                Ipv4Addr::LOCALHOST
            )
            .is_err()
        );
        let error = Prober::new(
            container.liveness_probe.as_ref().unwrap(),
            &container,
            Ipv4Addr::LOCALHOST,
        )
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
        let tcp = Prober::new(
            container.readiness_probe.as_ref().unwrap(),
            &container,
            Ipv4Addr::LOCALHOST,
        )
        .unwrap();
        let http = Prober::new(
            container.liveness_probe.as_ref().unwrap(),
            &container,
            Ipv4Addr::LOCALHOST,
        )
        .unwrap();

        tcp.probe().await.unwrap();
        drop(listener.accept().await.unwrap());
        let (up, ()) = tokio::join!(http.probe(), answer(&listener, "200 OK"));
        up.unwrap();
        let (down, ()) = tokio::join!(http.probe(), answer(&listener, "503 Service Unavailable"));
        assert!(format!("{:#}", down.unwrap_err()).contains("503"));
        let get = container.liveness_probe.as_ref().unwrap().http_get.as_ref();
        let hook = Prober::pre_stop(get.unwrap(), &container, Ipv4Addr::LOCALHOST).unwrap();
        let (stopped, ()) =
            tokio::join!(hook.probe(), answer(&listener, "503 Service Unavailable"));
        stopped.unwrap();
        drop(listener);
        tcp.probe().await.unwrap_err();
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
