//! Who may call, what health and probes say, and how it ends.
#![allow(clippy::unwrap_used)]

mod support;

use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_testkit::tokens::Signer;
use diy_mesh_testkit::wait::soon;
use serde_json::json;
use support::{Sandbox, claims, config, replace, web};
use tonic::{Code, Request, Status};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{
    HealthCheckRequest, HealthCheckResponse, health_check_response::ServingStatus,
};

fn refused<T>(result: Result<T, Status>) -> String {
    let status = result.err().expect("the call is refused");
    assert_eq!(status.code(), Code::Unauthenticated, "{status:?}");
    assert!(
        status.message().contains("audience \"diy-service-mesh\""),
        "{}",
        status.message()
    );
    status.message().to_owned()
}

#[tokio::test]
async fn every_rpc_requires_a_token() {
    let sandbox = Sandbox::start(&[]).await;
    let mut client = sandbox.client().await;
    let sign = proto::SignCertificateRequest::default;
    let watch = proto::WatchServicesRequest::default;
    client.token = None;
    refused(client.services(&[]).await);
    refused(client.try_discover().await);
    refused(client.client.watch_services(client.request(watch())).await);
    let message = refused(client.client.sign_certificate(client.request(sign())).await);
    assert!(
        message.starts_with("the call carries no token."),
        "{message}"
    );
}

#[tokio::test]
async fn rejects_invalid_tokens_with_the_reason() {
    let sandbox = Sandbox::start(&[]).await;
    let mut client = sandbox.client().await;
    let with = |claim: &str, value: serde_json::Value| {
        let mut claims = claims();
        claims[claim] = value;
        sandbox.issuer.sign(&claims)
    };
    let cases = [
        (with("aud", json!(["another"])), "its audience is not"),
        (with("exp", json!(1_000_000)), "it has expired"),
        (
            with("iss", json!("https://somebody.else")),
            "its issuer is not",
        ),
        (
            Signer::named("first").sign(&claims()),
            "its signature is not by",
        ),
        ("rubbish".to_owned(), "it is not a JWT"),
        ("x".repeat(20_000), "longer than 16384 bytes"),
    ];
    for (token, reason) in cases {
        client.token = Some(token.clone());
        // Asked twice: the second answer comes from the cache, and is the same.
        for _ in 0..2 {
            let message = refused(client.services(&[]).await);
            assert!(message.contains(reason), "{reason}: {message}");
            assert!(
                !message.contains(&token),
                "a token is never part of a message"
            );
        }
    }
    let mut request = Request::new(proto::GetServicesRequest::default());
    request
        .metadata_mut()
        .insert("authorization", "Basic abc".parse().unwrap());
    assert!(refused(client.client.get_services(request).await).contains("not `Bearer TOKEN`"));
    let (_, metrics) = sandbox.admin("/metrics").await;
    assert!(
        metrics.contains("calls_total{result=\"refused\"} 13\n"),
        "{metrics}"
    );
}

#[tokio::test]
async fn reloads_keys_of_the_token_issuer() {
    let sandbox = Sandbox::start(&[]).await;
    let next = Signer::named("second");
    let mut client = sandbox.client().await;
    client.services(&[]).await.unwrap();
    replace(&sandbox.dir.path().join("jwks.json"), &next.jwks());
    client.token = Some(next.sign(&claims()));
    client.services(&[]).await.unwrap();
}

#[tokio::test]
async fn rejects_large_message_and_keeps_the_connection() {
    let sandbox = Sandbox::start(&[]).await;
    let mut client = sandbox.client().await;
    let names = vec!["shop/web"; 100_000];
    assert_eq!(
        client.services(&names).await.unwrap_err().code(),
        Code::OutOfRange
    );
    client.services(&[]).await.unwrap();
}

#[tokio::test]
async fn health_and_admin_require_no_token() {
    let sandbox = Sandbox::start(&[("web.yaml", web(&["10.0.0.1"]))]).await;
    let mut health = HealthClient::new(sandbox.channel().await);
    sandbox.client().await.services(&[]).await.unwrap();
    for service in ["", "mesh.v1.ServiceMeshService"] {
        let mut watch = health
            .watch(HealthCheckRequest {
                service: service.into(),
            })
            .await
            .unwrap()
            .into_inner();
        until(&mut watch, ServingStatus::Serving).await;
    }
    assert_eq!(sandbox.admin("/live").await.0, 200);
    assert_eq!(sandbox.admin("/ready").await.0, 200);
    assert_eq!(sandbox.admin("/elsewhere").await.0, 404);
    let (_, metrics) = sandbox.admin("/metrics").await;
    assert!(
        metrics.contains("catalog_objects{kind=\"Service\"} 1\n"),
        "{metrics}"
    );
}

async fn until(watch: &mut tonic::Streaming<HealthCheckResponse>, wanted: ServingStatus) {
    loop {
        let response = soon(watch.message()).await.unwrap().unwrap();
        if response.status() == wanted {
            return;
        }
    }
}

#[tokio::test]
async fn shutdown_ends_streams_and_does_not_wait_for_clients() {
    let mut sandbox = Sandbox::start(&[("web.yaml", web(&["10.0.0.1"]))]).await;
    let mut client = sandbox.client().await;
    let mut discover = client.discover().await;
    discover.subscribe("10.96.0.7:80", "").await;
    discover.said().await;
    let mut services = client.watch(&[]).await;
    let mut health = HealthClient::new(sandbox.channel().await)
        .watch(HealthCheckRequest::default())
        .await
        .unwrap()
        .into_inner();
    until(&mut health, ServingStatus::Serving).await;

    sandbox.stop();
    until(&mut health, ServingStatus::NotServing).await;
    let status = discover.answer().await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(
        status.message().contains("shutting down"),
        "{}",
        status.message()
    );
    let status = loop {
        if let Err(status) = services.message().await {
            break status;
        }
    };
    assert_eq!(status.code(), Code::Unavailable);
    // The health watch is still open: it does not block the shutdown.
    sandbox.ended().await;
}

#[tokio::test]
async fn names_the_setting_of_a_used_port() {
    let sandbox = Sandbox::start(&[]).await;
    let config = diy_mesh_controller::Config {
        admin_listen: sandbox.address,
        ..config(sandbox.dir.path())
    };
    let error = diy_mesh_controller::run(config, std::future::pending())
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains(&format!(
            "cannot listen on {} (ADMIN_LISTEN)",
            sandbox.address
        )),
        "{error}"
    );
}
