//! Metrics of gRPC calls: a call that has failed never counts as a success.

use super::*;
use diy_mesh_testkit::wait::until;

/// Responds as the path says, and ends calls as applications do.
async fn call_app() -> SocketAddr {
    app(|request, mut respond| async move {
        let path = request.uri().path().to_owned();
        let kind = request.headers()["content-type"].clone();
        let mut head = Response::new(());
        head.headers_mut().insert("content-type", kind);
        if path == "/trailers-only" {
            head.headers_mut().insert("grpc-status", 14.into());
            respond.send_response(head, true).unwrap();
            return;
        }
        let mut stream = respond.send_response(head, false).unwrap();
        match &*path {
            "/reset" => stream.send_reset(Reason::INTERNAL_ERROR),
            "/silent" => {
                // The client resets the stream.
                let _ = poll_fn(|cx| stream.poll_reset(cx)).await;
            }
            "/web" => {
                let frames = b"\0\0\0\0\x02hi\x80\0\0\0\x10grpc-status: 13\r\n";
                for byte in frames.chunks(1) {
                    let data = Bytes::copy_from_slice(byte);
                    stream.send_data(data, false).unwrap();
                }
                stream.send_data(Bytes::new(), true).unwrap();
            }
            "/none" => stream.send_data(Bytes::new(), true).unwrap(),
            status => {
                let mut trailers = HeaderMap::new();
                trailers.insert("grpc-status", status[1..].parse().unwrap());
                stream.send_trailers(trailers).unwrap();
            }
        }
    })
    .await
}

#[test]
fn grpc_calls_count_by_the_status_that_the_client_gets() {
    on_worker(async {
        let (address, mesh) = (call_app().await, Mesh::new());
        let mut client = mesh.client_of(address).await;
        for (path, kind, status, error) in [
            ("/0", "application/grpc", "OK", ""),
            ("/5", "application/grpc+proto", "NOT_FOUND", ""),
            ("/2", "application/grpc", "UNKNOWN", "UNKNOWN"),
            ("/77", "application/grpc", "_OTHER", "_OTHER"),
            (
                "/trailers-only",
                "application/grpc",
                "UNAVAILABLE",
                "UNAVAILABLE",
            ),
            ("/reset", "application/grpc;a=b", "UNKNOWN", "UNKNOWN"),
            ("/none", "application/grpc+json", "UNKNOWN", "UNKNOWN"),
            ("/web", "application/grpc-web", "INTERNAL", "INTERNAL"),
            ("/silent", "application/grpc", "CANCELLED", ""),
        ] {
            let call = format!("rpc_response_status_code=\"{status}\",error_type=\"{error}\"");
            let labels = ["http_request_method=\"POST\"", &*call];
            let before = mesh.requests(&labels);
            let request = Request::post(format!("http://app{path}")).header("content-type", kind);
            let (response, mut stream) = client
                .send_request(request.body(()).unwrap(), true)
                .unwrap();
            // Fails if the stream is reset.
            match response.await {
                Ok(_) if path == "/silent" => stream.send_reset(Reason::CANCEL),
                Ok(response) => drop(read(response).await),
                Err(error) => assert!(path == "/reset" && error.is_reset(), "{error}"),
            }
            until(|| mesh.requests(&labels) != before).await;
        }
        let page = mesh.metrics.render();
        let calls = "rpc_client_call_duration_seconds_count{http_route=\"\",service_peer_name=\"\"";
        assert!(page.contains(calls), "{page}");
        assert!(!page.contains("http_client_request_duration_seconds_count"));
    });
}

#[test]
fn grpc_call_that_the_proxy_fails_has_its_status_and_the_code_of_the_mesh() {
    on_worker(async {
        let mesh = Mesh::new();
        let mut client = mesh.client_of(closed_address()).await;
        call(&mut client, grpc("/a")).await.unwrap();
        let error = "rpc_response_status_code=\"UNAVAILABLE\",error_type=\"connect-failed\"";
        until(|| mesh.requests(&[error]) > 0).await;
    });
}
