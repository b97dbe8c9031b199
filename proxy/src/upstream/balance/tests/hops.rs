//! Retries of a request over several proxies: each proxy tells the next one, which does not retry
//! then, and no application gets to know.

use crate::endpoint::EndpointInfo;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use h2::Reason;

use super::*;
use crate::observe::recent::Query;
use crate::observe::recent::testing::without_ids;
use crate::secure::tls::Alpn;
use crate::upstream::connect::{Dialer, Remote};
use diy_mesh_model::code::Code;
use diy_mesh_proto::traffic::Flow;

/// A meshed endpoint that records the heads of requests between the proxies. It answers each with
/// 200.
async fn recording_peer(authority: &Authority, heads: Rc<RefCell<Vec<String>>>) -> EndpointInfo {
    let cart = credentials(authority, CART, |_| {});
    let side = Side::new(Some(cart), "", Discovery::off());
    let listener = TcpListener::bind("127.0.0.2:0").await.expect("loopback");
    let address = listener.local_addr().expect("bound");
    tokio::task::spawn_local(async move {
        loop {
            let (stream, peer) = listener.accept().await.expect("a connection");
            let mut io = Io::new(stream);
            poll_fn(|cx| io.poll_fill(cx)).await.expect("a ClientHello");
            let (mut io, ..) = side.accept(io, peer).await.expect("a peer");
            let head = read_until(&mut io, "\r\n\r\n").await;
            heads.borrow_mut().push(head);
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            io.write_all(answer).await.expect("it reads");
            io.shutdown().await.expect("it is open");
        }
    });
    meshed(address)
}

/// A meshed endpoint that answers HTTP/2 and allows a table of this size for the compression of heads.
/// It records the field `n` of each request and the identifier of its exchange.
async fn compressing_peer(
    authority: &Authority,
    table: u32,
    seen: Rc<RefCell<Vec<[String; 2]>>>,
) -> EndpointInfo {
    let cart = credentials(authority, CART, |_| {});
    let side = Side::new(Some(cart), "", Discovery::off());
    let listener = TcpListener::bind("127.0.0.2:0").await.expect("loopback");
    let address = listener.local_addr().expect("bound");
    tokio::task::spawn_local(async move {
        let (stream, peer) = listener.accept().await.expect("a connection");
        let mut io = Io::new(stream);
        poll_fn(|cx| io.poll_fill(cx)).await.expect("a ClientHello");
        let (io, ..) = side.accept(io, peer).await.expect("a peer");
        let mut server = h2::server::Builder::new();
        let server = server.header_table_size(table).handshake::<_, Bytes>(io);
        let mut connection = server.await.expect("a preface");
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            let field = |name| request.headers()[name].to_str().expect("a text").to_owned();
            seen.borrow_mut().push(["n", "x-mesh-exchange"].map(field));
            let sent = respond.send_response(Response::new(()), true);
            sent.expect("the stream is open");
        }
    });
    meshed(address)
}

/// A connection of an authenticated peer to the proxy of an endpoint.
async fn peer_of(service: &Service, endpoint: usize) -> Io {
    let (worker, slot) = (&service.caller.worker, service.caller.worker.slot());
    let dialer = Dialer::new(
        &worker.tls,
        tokio::time::Instant::now(),
        Duration::from_secs(5),
        &slot,
    );
    let remote = Remote::from(&meshed(service.addresses[endpoint]));
    dialer.dial(&remote, Alpn::Http1).await.expect("a peer")
}

/// The retries that the proxy of an endpoint denied because of an earlier hop.
fn denied(service: &Service, endpoint: usize) -> u64 {
    let name =
        "diy_mesh_proxy_retries_denied_total{direction=\"inbound\",reason=\"previous-attempt\"}";
    metrics::value(&service.endpoints[endpoint].metrics.render(), name)
}

#[test]
fn retry_announces_previous_attempts_to_the_next_proxy() {
    on_worker(async {
        let authority = Authority::new("root");
        let heads = Rc::new(RefCell::new(Vec::new()));
        // The first request is sent to either endpoint first.
        while heads.borrow().len() < 20 {
            let refusing = meshed((std::net::Ipv4Addr::new(127, 0, 0, 2), 1).into());
            let recording = recording_peer(&authority, heads.clone()).await;
            let service = Service::with(&authority, vec![refusing, recording]).await;
            let answer = service.call(POST).await;
            assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        }
        let announced = "x-mesh-previous-attempts: 1\r\n\r\n";
        let heads: Vec<_> = heads
            .borrow()
            .iter()
            .map(|head| without_ids(head))
            .collect();
        let (retries, others): (Vec<_>, Vec<_>) =
            heads.iter().partition(|head| head.ends_with(announced));
        assert!(!retries.is_empty() && !others.is_empty(), "{heads:?}");
        assert!(others.iter().all(|head| !head.contains("x-mesh-")));
        assert_eq!(retries[0].replace(announced, "\r\n"), *others[0]);
    });
}

#[test]
fn exchange_has_one_identifier_in_the_mesh_and_none_at_applications() {
    on_worker(async {
        let service = Service::new(&[app().await]).await;
        let forged = "GET /a?b HTTP/1.1\r\nHost: cart\r\nX-Mesh-Exchange: 127.0.0.1-000000000001\r\n\
                      x_mesh.exchange: 127.0.0.1-000000000002\r\nConnection: close\r\n\r\n";
        let plain = service.caller.connect(&Backend::alone(app().await)).await;
        for answer in [service.call(forged).await, exchange(plain, forged).await] {
            assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
            let seen = answer.to_ascii_lowercase();
            assert!(
                seen.contains("get /a?b ") && !seen.contains("exchange"),
                "{answer}"
            );
        }
        let recent = |side: &Side| side.worker.recent.query(Query::After(0)).exchanges;
        let (caller, callee) = (recent(&service.caller), recent(&service.endpoints[0]));
        assert_eq!((caller.len(), callee.len()), (2, 1));
        assert_eq!(caller[0].id, callee[0].id);
        assert_ne!(caller[0].id, caller[1].id);
        assert_eq!(caller[0].subject(), "GET /a?***");
        let course = caller[0].course.as_ref().expect("it is recent");
        assert_eq!(course.attempts[0].endpoint, service.addresses[0]);
        assert!(course.attempts[0].identity.is_some() && callee[0].identity.is_some());
    });
}

#[test]
fn identifier_reaches_a_peer_whatever_table_it_allows() {
    on_worker(async {
        // No table; a table with room for the identifier only; the default.
        for table in [0, 64, 4096] {
            let (authority, seen) = (Authority::new("root"), Rc::default());
            let peer = compressing_peer(&authority, table, Rc::clone(&seen)).await;
            let service = Service::with(&authority, vec![peer]).await;
            let stream = service.caller.connect(&service.destination).await;
            let (mut client, connection) = h2::client::handshake(stream).await.expect("a preface");
            tokio::task::spawn_local(async move { drop(connection.await) });
            // The first one alone: the settings of the peer have arrived with its response.
            for numbers in [0..1, 1..100, 100..200] {
                let mut responses = Vec::new();
                for n in numbers {
                    let ready = poll_fn(|cx| client.poll_ready(cx)).await;
                    ready.expect("it is open");
                    let request = Request::builder().uri("http://cart/").header("n", n);
                    let request = request.body(()).expect("valid");
                    responses.push(client.send_request(request, true).expect("ready").0);
                }
                for response in responses {
                    assert_eq!(response.await.expect("a response").status(), 200);
                }
            }
            let seen = seen.borrow();
            let numbers: BTreeSet<_> = seen.iter().map(|[n, _]| n.clone()).collect();
            let ids: BTreeSet<_> = seen.iter().map(|[_, id]| id.clone()).collect();
            assert_eq!([seen.len(), numbers.len(), ids.len()], [200; 3], "{table}");
            assert!(ids.iter().all(|id| id.len() == 12), "{ids:?}");
        }
    });
}

#[test]
fn peer_names_only_exchanges_of_its_own_pod() {
    on_worker(async {
        let service = Service::new(&[app().await]).await;
        let own = "127.0.0.1-00000000002a";
        for (value, is_taken) in [
            ("00000000002a", true),
            ("10.9.9.9-00000000002b", false),
            ("00000000002B", false),
            ("2b", false),
        ] {
            let request = format!(
                "GET / HTTP/1.1\r\nHost: cart\r\nX-Mesh-Exchange: {value}\r\nConnection: close\r\n\r\n"
            );
            let mut peer = peer_of(&service, 0).await;
            peer.write_all(request.as_bytes()).await.expect("it reads");
            let answer = read_all(&mut peer).await;
            assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
            let recent = &service.endpoints[0].worker.recent;
            let last = recent
                .query(Query::After(0))
                .exchanges
                .pop()
                .expect("it ended");
            let id = last.id.expect("an identifier").to_string();
            assert_eq!(id == own, is_taken, "{value}: {id}");
        }
    });
}

#[test]
fn response_that_is_cut_off_is_a_failure_at_both_proxies() {
    on_worker(async {
        let cut = listening(async |mut stream| {
            read_until(&mut stream, "\r\n\r\n").await;
            let part = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc";
            stream.write_all(part).await.expect("it reads");
        });
        let service = Service::new(&[cut.await]).await;
        let request = "GET / HTTP/1.1\r\nHost: cart\r\nConnection: close\r\n\r\n";
        let mut client = service.caller.connect(&service.destination).await;
        client.write_all(request.as_bytes()).await.expect("open");
        // The client sees a reset, as without the mesh.
        let answer = read_all(&mut client).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer:?}");
        for side in [&service.caller, &service.endpoints[0]] {
            let recent = side.worker.recent.query(Query::After(0)).exchanges;
            assert!(recent[0].is_failure(), "{recent:?}");
            assert_eq!(recent[0].status().as_deref(), Some("200"));
        }
    });
}

#[test]
fn error_of_the_callees_proxy_is_a_failure_at_both_proxies_and_none_of_its_application() {
    on_worker(async {
        let forging = listening(async |mut stream| {
            read_until(&mut stream, "\r\n\r\n").await;
            let forged =
                b"HTTP/1.1 403 Forbidden\r\nX-Mesh-Error: denied\r\nContent-Length: 0\r\n\r\n";
            stream.write_all(forged).await.expect("it reads");
        });
        let service = Service::new(&[forging.await]).await;
        for (method, status, error) in [
            ("CONNECT cart:80", "405", Some(Code::ConnectNotAllowed)),
            ("GET /", "403", None),
        ] {
            let request = format!("{method} HTTP/1.1\r\nHost: cart\r\nConnection: close\r\n\r\n");
            let answer = service.call(&request).await;
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status} ")),
                "{answer}"
            );
            let recent = |side: &Side| side.worker.recent.query(Query::After(0)).exchanges;
            let [caller, callee] = [&service.caller, &service.endpoints[0]].map(|side| {
                let last = recent(side).pop().expect("it ended");
                assert_eq!(last.is_failure(), error.is_some(), "{last:?}");
                assert!(!last.course.as_ref().expect("a course").cut_off);
                last
            });
            assert_eq!(caller.peer_error(), error);
            let own = callee.failure.map(|failure| failure.code);
            assert_eq!(own.as_deref(), error.map(Code::label));
            assert!(caller.failure.is_none());
        }
        for side in [&service.caller, &service.endpoints[0]] {
            let now = std::time::Instant::now();
            let flows = side.worker.metrics.requests.traffic(now).flows;
            let total = |count: fn(&Flow) -> u64| flows.iter().map(count).sum::<u64>();
            assert_eq!(
                [total(|one| one.requests), total(|one| one.failures)],
                [2, 1]
            );
        }
    });
}

#[test]
fn failure_names_the_exchange_that_both_proxies_know() {
    on_worker(async {
        let service = Service::new(&[closed_address()]).await;
        let answer = service.call(POST).await;
        let id = answer
            .lines()
            .find_map(|line| line.strip_prefix("x-mesh-exchange: "));
        let query = Query::Id(id.expect("a field").parse().expect("an identifier"));
        let recent = |side: &Side| side.worker.recent.query(query).exchanges;
        let caller = recent(&service.caller);
        assert_eq!(
            caller[0].failure.as_ref().expect("it failed").code,
            "connect-failed",
            "{answer}"
        );
        assert_eq!(recent(&service.endpoints[0])[0].id, caller[0].id);
    });
}

#[test]
fn no_application_gets_previous_attempts() {
    on_worker(async {
        let service = Service::new(&[app().await]).await;
        let forged = "GET / HTTP/1.1\r\nHost: cart\r\nX-Mesh-Previous-Attempts: 1\r\n\
                      x_mesh.previous!attempts: 2\r\nConnection: close\r\n\r\n";
        let mut peer = peer_of(&service, 0).await;
        peer.write_all(forged.as_bytes()).await.expect("it reads");
        for answer in [
            read_all(&mut peer).await,
            service.call(forged).await,
            exchange(
                service.caller.connect(&Backend::alone(app().await)).await,
                forged,
            )
            .await,
        ] {
            assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
            let seen = answer.to_ascii_lowercase();
            assert!(
                seen.contains("get / ") && !seen.contains("previous"),
                "{answer}"
            );
        }
    });
}

/// An HTTP/1 application that closes each connection at the start of its second request.
async fn short_lived_app() -> SocketAddr {
    listening(async |mut stream| {
        let Some(_) = read_head(&mut stream).await else {
            return;
        };
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
        stream.write_all(answer).await.expect("it reads");
        // The connection ends with this task.
        let _ = stream.read_u8().await;
    })
    .await
}

#[test]
fn proxy_does_not_retry_what_an_earlier_hop_has_retried() {
    on_worker(async {
        let service = Service::new(&[short_lived_app().await]).await;
        let mut peer = peer_of(&service, 0).await;
        for (field, status) in [
            ("", "200 "),
            ("", "200 "),
            ("x-mesh-previous-attempts: 1\r\n", "502 "),
        ] {
            let request = format!("GET / HTTP/1.1\r\nHost: cart\r\n{field}\r\n");
            peer.write_all(request.as_bytes()).await.expect("it reads");
            let end = if field.is_empty() { "\r\n\r\n" } else { "\n" };
            let answer = read_until(&mut peer, end).await;
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status}")),
                "{answer}"
            );
        }
        assert_eq!(denied(&service, 0), 1);

        // The same over HTTP/2: the second application refuses all streams.
        let refusing = listening(async |stream| {
            let mut connection = h2::server::handshake(stream).await.expect("a preface");
            while let Some(Ok((_, mut respond))) = connection.accept().await {
                respond.send_reset(Reason::REFUSED_STREAM);
            }
        });
        let service = Service::new(&[closed_address(), refusing.await]).await;
        assert_eq!(http2_failures(&service).await, 100);
        assert!(denied(&service, 1) > 0);
    });
}
