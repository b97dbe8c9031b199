//! A scrape of the admin port of a proxy with traffic.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::{Duration, Instant};

use diy_mesh_proxy::limits::lifetime::Lifetimes;
use diy_mesh_proxy::route::fault::FaultKind;
use diy_mesh_runtime::{Admin, Readiness};
use diy_mesh_testkit::http::send;
use diy_mesh_testkit::metrics::promtool;
use diy_mesh_testkit::net::{closed_address, listen, read_all, read_until};
use diy_mesh_testkit::wait::{on_worker, until};
use support::{App, Mesh, answering_app, write};

const GET: &str = "GET / HTTP/1.1\r\nHost: evil.test\r\nConnection: close\r\n\r\n";

/// Sends a request of an authenticated peer, and returns the response.
async fn call(mesh: &Mesh, request: &str) -> String {
    let hour = Duration::from_secs(3600);
    let lifetime = Lifetimes::new(None, fastrand::Rng::new()).sample(Instant::now(), hour, hour);
    let address = answering_app().await;
    let mut client = mesh.connect_peer(address, lifetime).await;
    write(&mut client, request).await;
    read_all(&mut client).await
}

/// The head and the body of a scrape.
async fn scrape(mesh: &Mesh, accept: &str) -> (String, String) {
    let metrics = mesh.metrics.clone();
    let admin = Admin::new(Readiness::default(), move || metrics.render());
    let (listener, address) = listen().await;
    tokio::task::spawn_local(admin.serve(listener));
    let accept = format!("Accept: {accept}\r\n");
    let (_, head, body) = send(address, "GET", "/metrics", &accept).await;
    (head, body)
}

#[test]
fn scrape_is_clean_in_both_formats() {
    on_worker(async {
        let mesh = Mesh::new();
        call(&mesh, GET).await;
        let mut client = mesh.connect_to(closed_address()).await;
        write(&mut client, GET).await;
        read_all(&mut client).await;
        mesh.metrics
            .fault(FaultKind::Abort, &"TrafficPolicy shop/a".into());
        let (head, open) = scrape(&mesh, "application/openmetrics-text;version=1.0.0").await;
        assert!(
            head.contains("application/openmetrics-text; version=1.0.0;"),
            "{head}"
        );
        assert!(open.ends_with("# EOF\n"), "{open}");
        let (head, text) = scrape(&mesh, "*/*").await;
        assert!(head.contains("text/plain; version=0.0.4;"), "{head}");
        let samples = |page: &str| page.lines().filter(|line| !line.starts_with('#')).count();
        assert_eq!(samples(&open), samples(&text));
        assert_eq!(promtool(&text), "");
    });
}

#[test]
fn inbound_requests_count_by_the_verified_caller_and_never_by_their_host() {
    on_worker(async {
        let mesh = Mesh::new();
        call(&mesh, GET).await;
        let caller = "service_peer_name=\"web\",service_peer_namespace=\"shop\"";
        until(|| mesh.requests(&[caller, "direction=\"inbound\"", "tls=\"mtls\""]) == 1).await;
        let mut client = mesh.connect_inbound(answering_app().await).await;
        write(&mut client, &GET.replace("GET", "BREW")).await;
        read_all(&mut client).await;
        let unknown = "service_peer_name=\"\",service_peer_namespace=\"\"";
        let labels = [unknown, "http_request_method=\"_OTHER\"", "tls=\"none\""];
        until(|| mesh.requests(&labels) == 1).await;
        let page = mesh.metrics.render();
        assert!(
            !page.contains("evil.test") && !page.contains("BREW"),
            "{page}"
        );
        let took =
            format!("http_server_request_duration_seconds_count{{http_route=\"\",{caller}}} 1");
        assert!(page.contains(&took), "{page}");
    });
}

/// The responses of an application, and the labels of their requests.
#[test]
fn incomplete_responses_and_grpc_web_failures_are_no_successes() {
    const WEB: &str = "HTTP/1.1 200 OK\r\nContent-Type: application/grpc-web-text\r\nTransfer-Encoding: chunked\r\n\r\n\
                       8\r\ngAAAAA1n\r\nc\r\ncnBjLXN0YXR1\r\n4\r\nczo3\r\n0\r\n\r\n";
    on_worker(async {
        for (request, response, labels) in [
            (
                "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
                "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf",
                ["http_response_status_code=\"200\"", "error_type=\"_OTHER\""],
            ),
            (
                "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
                "",
                [
                    "http_response_status_code=\"502\"",
                    "error_type=\"upstream-closed\"",
                ],
            ),
            (
                "POST / HTTP/1.1\r\nHost: a\r\nContent-Type: application/grpc-web-text\r\nContent-Length: 0\r\n\r\n",
                WEB,
                [
                    "rpc_response_status_code=\"PERMISSION_DENIED\"",
                    "error_type=\"\"",
                ],
            ),
        ] {
            let (mut app, address) = App::listen().await;
            let mesh = Mesh::new();
            let mut client = mesh.connect_to(address).await;
            write(&mut client, request).await;
            let mut served = app.accept().await;
            read_until(&mut served, "\r\n\r\n").await;
            write(&mut served, response).await;
            drop(served);
            until(|| mesh.requests(&labels) == 1).await;
        }
    });
}

#[test]
fn client_that_leaves_without_a_response_is_counted() {
    on_worker(async {
        let (mut app, address) = App::listen().await;
        let mesh = Mesh::new();
        let mut client = mesh.connect_to(address).await;
        write(&mut client, "GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        let _served = app.accept().await;
        client.set_zero_linger().unwrap();
        drop(client);
        let labels = ["http_response_status_code=\"\"", "error_type=\"_OTHER\""];
        until(|| mesh.requests(&labels) == 1).await;
    });
}
