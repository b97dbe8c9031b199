//! grpc-client and grpc-server as processes on loopback.

mod support;

use diy_mesh_proto::echo::v1::EchoRequest;
use diy_mesh_proto::echo::v1::echo_service_client::EchoServiceClient;
use diy_mesh_testkit::process::Signal;
use support::{GRPC_CLIENT, GRPC_SERVER, run, start, start_server};
use tonic::Code;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

#[test]
fn echoes_and_prints_both_methods() {
    let (mut server, port) = start_server(GRPC_SERVER, &[]);
    let mut client = start(
        GRPC_CLIENT,
        &[("ENDPOINT", &format!("http://127.0.0.1:{port}"))],
    );
    let echo = |message| {
        format!(
            "\n\nEcho from the grpc-server service! Hostname: tester Version: 1.0 Message: {message}\n"
        )
    };
    client.wait_for(&echo("Hello #2"));
    client.wait_for(&echo("Hello #2 of this stream"));
    let output = client.output();
    assert!(
        output.contains("Response #1\n/echo.v1.EchoService/Echo"),
        "{output}"
    );
    assert!(!output.contains("failed"), "{output}");
    for method in ["Echo", "EchoStream"] {
        server.wait_for(&format!("\n/echo.v1.EchoService/{method}\n"));
    }
    let output = server.wait_for("\n\nHello #2 of this stream\n---");
    assert!(
        output.contains(&format!(
            "user-agent: diy-grpc-client/{}",
            env!("CARGO_PKG_VERSION")
        )),
        "{output}"
    );

    // The client's open stream does not delay the shutdown.
    server.signal(Signal::SIGTERM);
    assert_eq!(server.exit().code(), Some(0));
    assert!(
        !server.output().contains("requests in flight"),
        "{}",
        server.output()
    );
    client.wait_for(
        "Request failed: /echo.v1.EchoService/EchoStream: Unavailable: the server ended the stream",
    );
    client.signal(Signal::SIGTERM);
    assert_eq!(client.exit().code(), Some(0));
}

#[test]
fn client_reconnects_after_server_restart() {
    let (server, port) = start_server(GRPC_SERVER, &[("HOSTNAME", "first")]);
    let client = start(
        GRPC_CLIENT,
        &[("ENDPOINT", &format!("http://localhost:{port}"))],
    );
    client.wait_for("Hostname: first Version: 1.0 Message: Hello #1 of this stream");
    drop(server);
    client.wait_for("Request failed: /echo.v1.EchoService/EchoStream");
    client.wait_for("Request failed: /echo.v1.EchoService/Echo:");
    let port = port.to_string();
    let _server = start(
        GRPC_SERVER,
        &[
            ("LISTEN_PORT", &port),
            ("HOSTNAME", "second"),
            ("VERSION", "2.0"),
        ],
    );
    client.wait_for("Hostname: second Version: 2.0 Message: Hello #1 of this stream");
    client.wait_for("Hostname: second Version: 2.0 Message: Hello #2 of this stream");
}

#[tokio::test(flavor = "multi_thread")]
async fn serves_health_and_ends_health_watches_at_shutdown() {
    let (mut server, port) = start_server(GRPC_SERVER, &[]);
    let mut health = HealthClient::new(connect(port).await);
    for service in ["", "echo.v1.EchoService"] {
        let request = HealthCheckRequest {
            service: service.to_owned(),
        };
        let response = health.check(request).await.expect("received").into_inner();
        assert_eq!(response.status(), ServingStatus::Serving, "{service}");
    }
    let mut watch = health
        .watch(HealthCheckRequest {
            service: String::new(),
        })
        .await
        .expect("watched")
        .into_inner();
    assert_eq!(
        watch
            .message()
            .await
            .expect("received")
            .expect("a message")
            .status(),
        ServingStatus::Serving
    );
    server.signal(Signal::SIGTERM);
    while watch.message().await.is_ok_and(|message| message.is_some()) {}
    assert_eq!(server.exit().code(), Some(0));
    assert!(
        !server.output().contains("requests in flight"),
        "{}",
        server.output()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn fail_rate_fails_messages() {
    let (server, port) = start_server(GRPC_SERVER, &[("FAIL_RATE", "100")]);
    let mut echo = EchoServiceClient::new(connect(port).await);
    let request = || EchoRequest {
        message: "x".to_owned(),
    };
    assert_eq!(
        echo.echo(request()).await.expect_err("fails").code(),
        Code::Internal
    );
    let mut stream = echo
        .echo_stream(tokio_stream::iter([request(), request()]))
        .await
        .expect("opened")
        .into_inner();
    assert_eq!(
        stream.message().await.expect_err("fails").code(),
        Code::Internal
    );
    assert_eq!(
        server
            .wait_for("Request #2")
            .matches("Failed to process request")
            .count(),
        1
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn stream_ends_after_last_client_message() {
    let (_server, port) = start_server(GRPC_SERVER, &[]);
    let mut echo = EchoServiceClient::new(connect(port).await);
    let messages = tokio_stream::iter((0..100).map(|n| EchoRequest {
        message: n.to_string(),
    }));
    let mut responses = echo
        .echo_stream(messages)
        .await
        .expect("opened")
        .into_inner();
    for n in 0..100 {
        assert_eq!(
            responses
                .message()
                .await
                .expect("received")
                .expect("a message")
                .message,
            n.to_string()
        );
    }
    assert_eq!(responses.message().await.expect("closed normally"), None);
}

#[test]
fn rejects_invalid_configuration_with_exit_code_2() {
    for (variable, value, expected) in [
        ("LISTEN_PORT", "-1", "'-1' for '--listen-port"),
        ("FAIL_RATE", "101", "'101' for '--fail-rate"),
    ] {
        let (code, _, report) = run(GRPC_SERVER, &[], &[(variable, value)]);
        assert_eq!(code, 2);
        assert!(report.contains(expected), "{report}");
    }
    assert_eq!(run(GRPC_CLIENT, &["--endpoint", "grpc://a/"], &[]).0, 2);
}

#[test]
fn prints_help_and_version() {
    for (program, name) in [(GRPC_SERVER, "grpc-server"), (GRPC_CLIENT, "grpc-client")] {
        let (code, version, _) = run(program, &["--version"], &[]);
        assert_eq!(
            (code, version),
            (0, format!("{name} {}\n", env!("CARGO_PKG_VERSION")))
        );
        assert_eq!(run(program, &["--help"], &[]).0, 0);
    }
}

async fn connect(port: u16) -> Channel {
    Endpoint::from_shared(format!("http://127.0.0.1:{port}"))
        .expect("valid")
        .connect()
        .await
        .expect("connected")
}
