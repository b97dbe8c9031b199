//! Tests of session persistence, from the controller's message to the response.

use std::collections::BTreeSet;

use super::*;

fn sticky(rule: proto::RouteRule) -> proto::Routes {
    one(proto::RouteRule {
        session_persistence: Some(proto::SessionPersistence {
            cookie: "sid".to_owned(),
            ..proto::SessionPersistence::default()
        }),
        ..rule
    })
}

/// The cookie that a response sets, without its attributes.
fn cookie(response: &str) -> Option<String> {
    let line = response
        .lines()
        .find_map(|line| line.strip_prefix("set-cookie: "));
    let (pair, attributes) = line?.split_once("; ").expect("attributes");
    assert_eq!(attributes, "Path=/; HttpOnly; SameSite=Strict");
    Some(pair.to_owned())
}

#[test]
fn session_keeps_its_backend_whatever_the_weights() {
    on_worker(async {
        let ((v1, _), (v2, _)) = (app("v1").await, app("v2").await);
        let rule = |weights: [u32; 2]| sticky(to(&[(V1, weights[0]), (V2, weights[1])]));
        let mut mesh = Mesh::new(rule([1, 0]), &[(V1, v1), (V2, v2)]).await;
        assert_eq!(mesh.rejection("1").await, "");
        let first = mesh.http1("GET / HTTP/1.1").await;
        let session = cookie(&first).expect("a session begins");
        assert!(!session.contains(&v1.to_string()), "{session}");
        for (version, weights) in [("2", [1, 1]), ("3", [0, 1])] {
            mesh.updates.send(routed(version, rule(weights))).unwrap();
            assert_eq!(mesh.rejection(version).await, "");
            for _ in 0..10 {
                let head = format!("GET / HTTP/1.1\r\nCookie: a=b; {session}");
                let response = mesh.http1(&head).await;
                assert_eq!((body(&response), cookie(&response)), ("v1", None));
            }
        }
        assert_eq!(
            body(&mesh.http1("GET / HTTP/1.1").await),
            "v2",
            "a new client"
        );
        // The backend is no longer in the rule: another session begins.
        mesh.updates
            .send(routed("4", sticky(to(&[(V2, 1)]))))
            .unwrap();
        assert_eq!(mesh.rejection("4").await, "");
        let response = mesh
            .http1(&format!("GET / HTTP/1.1\r\nCookie: {session}"))
            .await;
        assert_eq!(body(&response), "v2");
        assert!(cookie(&response).is_some_and(|other| other != session));
    });
}

/// The destination itself has these endpoints.
fn with_endpoints(version: &str, endpoints: &[SocketAddr]) -> DiscoverResponse {
    let routes = sticky(proto::RouteRule {
        to_destination: true,
        ..to(&[])
    });
    let endpoint = |address: &SocketAddr| proto::Endpoint {
        address: address.to_string(),
        ..proto::Endpoint::default()
    };
    let mut response = routed(version, routes);
    if let Some(Update::Snapshot(snapshot)) = &mut response.update {
        snapshot.endpoints = endpoints.iter().map(endpoint).collect();
    }
    response
}

#[test]
fn session_keeps_its_endpoint_until_it_leaves_in_both_versions_of_http() {
    on_worker(async {
        let (mut http1, mut http2) = (Vec::new(), Vec::new());
        for name in ["a", "b", "c", "d"] {
            http1.push(app(name).await.0);
            http2.push(app2(name).await.0);
        }
        let mut mesh = Mesh::new(sticky(to(&[])), &[]).await;
        assert_eq!(mesh.rejection("1").await, "");
        mesh.updates.send(with_endpoints("2", &http1)).unwrap();
        assert_eq!(mesh.rejection("2").await, "");
        let first = mesh.http1("GET / HTTP/1.1").await;
        let session = cookie(&first).expect("a session begins");
        let head = format!("GET / HTTP/1.1\r\nCookie: {session}");
        for _ in 0..10 {
            assert_eq!(body(&mesh.http1(&head).await), body(&first));
        }
        let mut names = BTreeSet::new();
        while names.len() < 4 {
            names.insert(body(&mesh.http1("GET / HTTP/1.1").await).to_owned());
        }
        let at = ["a", "b", "c", "d"]
            .iter()
            .position(|name| *name == body(&first));
        http1.remove(at.expect("one of them"));
        mesh.updates.send(with_endpoints("3", &http1)).unwrap();
        assert_eq!(mesh.rejection("3").await, "");
        let moved = mesh.http1(&head).await;
        let session = cookie(&moved).expect("another session begins");
        let head = format!("GET / HTTP/1.1\r\nCookie: {session}");
        for _ in 0..10 {
            assert_eq!(body(&mesh.http1(&head).await), body(&moved));
        }

        mesh.updates.send(with_endpoints("4", &http2)).unwrap();
        assert_eq!(mesh.rejection("4").await, "");
        let get = |cookie: &str| {
            let request = Request::get("http://web/").header("cookie", cookie);
            request.body(()).unwrap()
        };
        let (response, first) = mesh.http2(get("a=b")).await;
        let set = response.headers()["set-cookie"].to_str().unwrap();
        let (session, _) = set.split_once("; ").unwrap();
        for _ in 0..10 {
            let (response, name) = mesh.http2(get(session)).await;
            assert_eq!(name, first);
            assert!(!response.headers().contains_key("set-cookie"));
        }
    });
}
