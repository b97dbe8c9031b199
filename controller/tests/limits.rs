//! The limits of the process and of its clients, with real sockets.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;

use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_testkit::http::get;
use diy_mesh_testkit::metrics;
use diy_mesh_testkit::process::Process;
use diy_mesh_testkit::tokens::Signer;
use diy_mesh_testkit::wait::{eventually, soon};
use futures::future::join_all;
use rustls::pki_types::ServerName;
use support::{Discover, Sandbox, scratch, web};
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpSocket, TcpStream};
use tonic::{Code, Status};

async fn connect_from(source: &str, address: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(format!("{source}:0").parse().unwrap()).unwrap();
    socket.connect(address).await.unwrap()
}

fn has_nothing_to_read(stream: &TcpStream) -> bool {
    let read = stream.try_read(&mut [0]);
    read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

/// The bytes of a ClientHello.
fn client_hello() -> Vec<u8> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let mut client = rustls::ClientConnection::new(config.into(), name).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    hello
}

fn exhausted<T>(result: Result<T, Status>) -> String {
    let status = result.err().expect("the call is rejected");
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    status.message().to_owned()
}

#[tokio::test]
async fn silent_connections_do_not_delay_a_proxy() {
    let sandbox = Sandbox::start(&[]).await;
    let mut silent = Vec::new();
    for _ in 0..1500 {
        silent.push(TcpStream::connect(sandbox.address).await.unwrap());
    }
    sandbox.client().await.discover().await;
    assert!(silent.iter().all(has_nothing_to_read), "they are open");
}

/// A slot goes to the address with the fewest slots, whoever else waits for one.
#[tokio::test]
async fn unfinished_handshakes_do_not_delay_a_proxy_of_another_address() {
    for (addresses, connections) in [(1, 1500), (6, 400)] {
        let sandbox = Sandbox::start(&[]).await;
        let (hello, mut unfinished) = (client_hello(), Vec::new());
        for source in 2..2 + addresses {
            for _ in 0..connections {
                let source = format!("127.0.0.{source}");
                let mut stream = connect_from(&source, sandbox.address).await;
                stream.write_all(&hello).await.unwrap();
                unfinished.push(stream);
            }
        }
        sandbox.client().await.discover().await;
        let last = unfinished.last().unwrap();
        assert!(has_nothing_to_read(last), "it waits for a slot");
    }
}

#[tokio::test]
async fn proxies_behind_one_address_all_get_in() {
    let sandbox = Arc::new(Sandbox::start(&[]).await);
    eventually("the catalog is synced", async || {
        match sandbox.admin("/ready").await {
            (200, _) => Ok(()),
            (_, reason) => Err(reason),
        }
    })
    .await;
    let proxies = (0..2000).map(|uid| {
        let sandbox = sandbox.clone();
        tokio::spawn(async move {
            let mut proxy = sandbox.pod(uid).await;
            (proxy.discover().await, proxy)
        })
    });
    let proxies = join_all(proxies).await;
    assert!(proxies.iter().all(|proxy| proxy.is_ok()));
    let (_, metrics) = sandbox.admin("/metrics").await;
    let line = "diy_mesh_controller_streams{rpc=\"Discover\"} 2000\n";
    assert!(metrics.contains(line), "{metrics}");
}

#[tokio::test]
async fn connection_without_an_authenticated_call_ends() {
    let sandbox = Sandbox::start(&[]).await;
    let mut client = sandbox.client().await;
    client.token = Some("rubbish".into());
    let mut health = tonic_health::pb::health_client::HealthClient::new(sandbox.channel().await);
    let watch = health.watch(tonic_health::pb::HealthCheckRequest::default());
    let mut watch = watch.await.unwrap().into_inner();
    // It ends, whatever else the client does.
    soon(async { while let Ok(Some(_)) = watch.message().await {} }).await;
    sandbox.client().await.discover().await;
}

#[tokio::test]
async fn long_names_end_the_stream() {
    let sandbox = Sandbox::start(&[]).await;
    let mut client = sandbox.client().await;
    let zeros = "0".repeat(100);
    for (destination, version) in [
        ("10.96.0.7:80", "x".repeat(65)),
        (&format!("10.96.0.7:{zeros}80"), String::new()),
    ] {
        let mut discover = client.discover().await;
        discover.subscribe(destination, &version).await;
        let status = discover.answer().await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{destination}");
        assert!(status.message().contains("64 bytes"), "{status:?}");
    }
}

#[tokio::test]
async fn calls_and_connections_of_a_pod_are_limited() {
    let sandbox = Sandbox::start(&[]).await;
    let (mut one, mut two) = (sandbox.pod(1).await, sandbox.pod(1).await);
    let mut open: Vec<Discover> = Vec::new();
    for _ in 0..8 {
        open.push(one.discover().await);
        open.push(two.discover().await);
    }
    let message = exhausted(one.try_discover().await);
    assert!(message.contains("16 open calls"), "{message}");
    sandbox.pod(2).await.discover().await;
    drop(open);
    let mut clients = vec![one, two];
    while clients.len() < 16 {
        let mut client = sandbox.pod(1).await;
        client.services(&[]).await.unwrap();
        clients.push(client);
    }
    let message = exhausted(sandbox.pod(1).await.services(&[]).await);
    assert!(message.contains("16 connections"), "{message}");
    clients[0].services(&[]).await.unwrap();
    sandbox.pod(2).await.services(&[]).await.unwrap();
}

/// Container runtimes start a process with a soft limit of 1,024 open files.
#[tokio::test]
async fn raises_the_limit_of_open_files() {
    let dir = scratch();
    let dir = dir.path();
    for folder in ["catalog", "ca"] {
        std::fs::create_dir(dir.join(folder)).unwrap();
    }
    std::fs::write(dir.join("jwks.json"), Signer::named("a").jwks()).unwrap();
    let mut controller = Process::start(
        Command::new("sh")
            .args(["-c", "ulimit -Sn 64 && exec \"$0\" \"$@\""])
            .arg(env!("CARGO_BIN_EXE_controller"))
            .args(["--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0"])
            .arg(format!("--catalog=files:{}/catalog", dir.display()))
            .arg(format!("--ca=files:{}/ca", dir.display()))
            .arg(format!("--authenticator=jwks:{}/jwks.json", dir.display())),
    );
    let line = controller.line(" admin=").await;
    let (_, admin) = line.split_once(" admin=").unwrap();
    let (_, metrics) = get(admin.parse().unwrap(), "/metrics").await;
    let files = metrics::value(&metrics, "diy_mesh_controller_max_open_files");
    assert!(files > 64, "{files} files can be open");
    assert!(metrics.contains("\ndiy_mesh_controller_open_files "));
    assert!(metrics.contains("\ndiy_mesh_controller_resident_memory_bytes "));
}

#[test]
fn missing_cluster_is_reported_once() {
    let output = Command::new(env!("CARGO_BIN_EXE_controller"))
        .env_clear()
        .env("HOME", "/nonexistent")
        .output()
        .unwrap();
    let log = [output.stdout, output.stderr].concat();
    let log = String::from_utf8_lossy(&log);
    assert_eq!(output.status.code(), Some(1), "{log}");
    assert_eq!(log.matches("No such file or directory").count(), 1, "{log}");
    assert!(log.contains("expected a service account in a pod"), "{log}");
}

/// hyper reads a response ahead of what it sends: it is charged until it has been sent nevertheless.
#[tokio::test]
async fn responses_that_the_client_does_not_read_are_charged_until_they_are_sent() {
    let slices = (0..60).map(|slice| {
        let address = |one| format!("10.{slice}.{}.{}", one / 250, one % 250);
        let endpoints = (0..1000).map(|one| format!("- {{addresses: ['{}']}}\n", address(one)));
        format!(
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: web-{slice}, namespace: shop, \
             labels: {{kubernetes.io/service-name: web}}}}\naddressType: IPv4\n\
             ports: [{{name: {}, port: 8080}}]\nendpoints:\n{}",
            "a".repeat(63),
            endpoints.collect::<String>()
        )
    });
    let file = format!("{}{}", web(&[]), slices.collect::<String>());
    let sandbox = Sandbox::start(&[("web.yaml", file)]).await;
    let pod = sandbox.pod(1).await;
    for path in ["GetServices", "WatchServices"] {
        // As streams, both of which this client does not read.
        let path = format!("/mesh.v1.ServiceMeshService/{path}");
        let mut grpc = tonic::client::Grpc::new(sandbox.channel().await);
        grpc = grpc.max_decoding_message_size(64 << 20);
        grpc.ready().await.unwrap();
        let codec = tonic_prost::ProstCodec::<proto::GetServicesRequest, proto::GetServicesResponse>::default();
        let request = pod.request(proto::GetServicesRequest::default());
        let response = grpc.server_streaming(request, path.parse().unwrap(), codec);
        let mut response = response.await.unwrap().into_inner();
        // Two MiB are in the window of the client, and the answer has five.
        until_charged(&sandbox, |bytes| bytes > 5_000_000).await;
        while !matches!(response.message().await, Ok(None) | Err(_)) {
            if path.ends_with("WatchServices") {
                break;
            }
        }
        until_charged(&sandbox, |bytes| bytes <= 4096).await;
    }
}

async fn until_charged(sandbox: &Sandbox, is_it: impl Fn(u64) -> bool) {
    eventually("the charge", async || {
        let (_, page) = sandbox.admin("/metrics").await;
        let used = metrics::value(&page, "diy_mesh_controller_budget_bytes{of=\"used\"}");
        is_it(used).then_some(()).ok_or(used)
    })
    .await;
}
