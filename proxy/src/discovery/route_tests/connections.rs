//! Tests of routes for connections that carry no HTTP.

use super::*;

/// A server that sends its name first, then what it receives, until the client closes.
async fn banner(name: &'static str) -> SocketAddr {
    let (listener, address) = listen().await;
    tokio::task::spawn_local(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::task::spawn_local(async move {
                // Fails if the proxy did not need the connection.
                let _ = stream.write_all(name.as_bytes()).await;
                let (mut from, mut to) = stream.split();
                let _ = tokio::io::copy(&mut from, &mut to).await;
            });
        }
    });
    address
}

fn with_connections(rule: proto::RouteRule, routes: proto::Routes) -> proto::Routes {
    proto::Routes {
        tcp: Some(rule),
        ..routes
    }
}

/// Sends bytes, then the end. Returns all that the server sends, or that the connection was reset.
async fn exchange(mesh: &Mesh, bytes: &[u8]) -> Result<String, std::io::ErrorKind> {
    let mut client = mesh.connect().await;
    client.write_all(bytes).await.unwrap();
    client.shutdown().await.unwrap();
    let mut received = String::new();
    let read = client.read_to_string(&mut received).await;
    read.map(|_| received).map_err(|error| error.kind())
}

#[test]
fn connections_without_http_have_weights_of_their_own() {
    on_worker(async {
        let (one, two) = (banner("one").await, banner("two").await);
        let (web, _) = app("web").await;
        let requests = super::one(to(&[("shop/web:80", 1)]));
        let mesh = Mesh::new(
            with_connections(to(&[(V1, 80), (V2, 20)]), requests),
            &[(V1, one), (V2, two), ("shop/web:80", web)],
        )
        .await;
        let mut canary = 0;
        for _ in 0..200 {
            let received = exchange(&mesh, b"\0\x01 client first ").await.unwrap();
            canary += usize::from(received.starts_with("two"));
            assert!(received.ends_with("\0\x01 client first "), "{received:?}");
        }
        // Within five standard deviations of 40.
        assert!((12..=68).contains(&canary), "{canary} of 200");
        // The proxy dials while the client is silent.
        let mut client = mesh.connect().await;
        let mut name = [0; 3];
        client.read_exact(&mut name).await.unwrap();
        assert!([b"one", b"two"].contains(&&name), "{name:?}");
        assert_eq!(body(&mesh.http1("GET / HTTP/1.1").await), "web");
    });
}

#[test]
fn connection_keeps_its_choice_over_several_dials() {
    on_worker(async {
        let rule = to(&[(V1, 1), ("", 1)]);
        let mesh = Mesh::new(with_connections(rule, routes(vec![], vec![])), &[]).await;
        let mut failures = 0;
        for port in 1..=200 {
            let flow = Flow {
                called_by: Default::default(),
                counted: Default::default(),
                slot: mesh.worker.slot(),
                worker: mesh.worker.clone(),
                direction: Direction::Outbound,
                peer: ([127, 0, 0, 1], port).into(),
                original: mesh.destination.address().unwrap(),
                destination: mesh.destination.clone(),
                caller: Caller::App,
            };
            let first = flow.connection_backend().await.is_err();
            for _ in 0..3 {
                assert_eq!(flow.connection_backend().await.is_err(), first, "{port}");
            }
            failures += usize::from(first);
        }
        assert!((60..=140).contains(&failures), "{failures} of 200");
    });
}

#[test]
fn connections_to_invalid_backends_and_backends_without_endpoints_are_reset() {
    on_worker(async {
        for rule in [to(&[("", 1)]), to(&[(V1, 0)]), to(&[]), to(&[(V1, 1)])] {
            let requests = routes(vec![], vec![]);
            let mesh = Mesh::new(with_connections(rule, requests), &[]).await;
            let received = exchange(&mesh, b"\0\x01").await;
            assert_eq!(received, Err(std::io::ErrorKind::ConnectionReset));
        }
    });
}

#[test]
fn rules_of_connections_with_more_than_backends_are_rejected() {
    let timeout = proto::RouteRule {
        request_timeout: 1,
        ..to(&[(V1, 1)])
    };
    let mut filtered = to(&[(V1, 1)]);
    filtered.backends[0].filters = vec![proto::RouteFilter { kind: None }];
    for rule in [timeout, filtered, to(&[("no name", 1)])] {
        let rejection = rejection(with_connections(rule, routes(vec![], vec![])));
        assert!(rejection.contains("rule of connections"), "{rejection}");
    }
}
