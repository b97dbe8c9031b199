//! Endpoints that reject requests because of their load: they get fewer requests and no quarantine,
//! and other endpoints get the rejected requests, within the retry budget.

use super::*;
use crate::endpoint::EndpointInfo;

/// An HTTP/1 application that answers each request with this status line and these fields. Returns
/// its address and the number of requests.
async fn http1_app(head: &'static str) -> (SocketAddr, Rc<Cell<usize>>) {
    let requests = Rc::new(Cell::new(0));
    let counter = requests.clone();
    let address = listening(async move |mut stream| {
        while read_head(&mut stream).await.is_some() {
            counter.set(counter.get() + 1);
            let answer = format!("HTTP/1.1 {head}\r\nContent-Length: 0\r\n\r\n");
            // The proxy may have closed.
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    })
    .await;
    (address, requests)
}

/// A gRPC application that answers each call with these fields, without a message.
async fn grpc_app(
    fields: &'static [(&'static str, &'static str)],
) -> (SocketAddr, Rc<Cell<usize>>) {
    let requests = Rc::new(Cell::new(0));
    let counter = requests.clone();
    let address = http2_app(move || {
        counter.set(counter.get() + 1);
        let fields = fields.iter();
        fields
            .fold(Response::builder(), |head, (name, value)| {
                head.header(*name, *value)
            })
            .body(())
            .expect("valid")
    })
    .await;
    (address, requests)
}

/// Sends this request `count` times. Returns the number of responses with status 200.
async fn successes(service: &Service, request: &str, count: usize) -> usize {
    let mut successes = 0;
    for _ in 0..count {
        let answer = service.call(request).await;
        assert!(!answer.contains("x-mesh-error"), "{answer}");
        successes += usize::from(answer.starts_with("HTTP/1.1 200 "));
    }
    successes
}

/// The endpoints that are quarantined.
fn quarantined(service: &Service) -> usize {
    let endpoint = |side: &SocketAddr| service.destination.endpoint(*side);
    let endpoints = service.addresses.iter().filter_map(endpoint);
    let now = std::time::Instant::now();
    endpoints.filter(|one| one.is_quarantined(now)).count()
}

#[test]
fn requests_that_an_overloaded_endpoint_rejects_go_to_another_one() {
    on_worker(async {
        let (rejecting, rejected) = http1_app("429 Too Many Requests").await;
        let service = Service::new(&[rejecting, app().await]).await;
        assert_eq!(successes(&service, GET, 100).await, 100);
        assert!((1..=30).contains(&rejected.get()), "{}", rejected.get());
        assert_eq!(quarantined(&service), 0);
        let fields = &[("grpc-status", "8"), ("grpc-retry-pushback-ms", "0")];
        let (rejecting, rejected) = grpc_app(fields).await;
        let service = Service::new(&[rejecting, http2_app(Response::default).await]).await;
        assert_eq!(http2_failures_of(&service, Method::POST).await, 0);
        assert!((1..=30).contains(&rejected.get()), "{}", rejected.get());
        assert_eq!(quarantined(&service), 0);
    });
}

#[test]
fn overload_of_all_endpoints_adds_at_most_the_budget() {
    on_worker(async {
        let (one, other) = (
            http1_app("429 Too Many Requests").await,
            http1_app("429 Too Many Requests").await,
        );
        let service = Service::new(&[one.0, other.0]).await;
        let begun = std::time::Instant::now();
        assert_eq!(successes(&service, GET, 200).await, 0);
        let seconds = begun.elapsed().as_secs() as usize;
        let attempts = one.1.get() + other.1.get();
        // The budget grows by one retry per second.
        assert!(
            (211..=200 + 40 + 10 + seconds + 1).contains(&attempts),
            "{attempts}"
        );
        assert_eq!(quarantined(&service), 0);
    });
}

#[test]
fn endpoint_gets_no_retry_before_retry_after() {
    on_worker(async {
        for head in [
            "429 Too Many Requests\r\nRetry-After: 600",
            "503 Service Unavailable\r\nRetry-After: Tue, 31 Dec 2999 23:59:59 GMT",
        ] {
            let (one, other) = (http1_app(head).await, http1_app(head).await);
            let service = Service::new(&[one.0, other.0]).await;
            assert_eq!(successes(&service, GET, 30).await, 0);
            let attempts = one.1.get() + other.1.get();
            assert_eq!(attempts, 31, "only the first request was sent twice");
        }
        for (pushback, retries) in [("600000", 1), ("-1", 0)] {
            let fields: &[_] = match pushback {
                "-1" => &[("grpc-status", "8"), ("grpc-retry-pushback-ms", "-1")],
                _ => &[("grpc-status", "8"), ("grpc-retry-pushback-ms", "600000")],
            };
            let (one, other) = (grpc_app(fields).await, grpc_app(fields).await);
            let service = Service::new(&[one.0, other.0]).await;
            assert_eq!(http2_failures(&service).await, 100);
            let attempts = one.1.get() + other.1.get();
            assert_eq!(attempts, 100 + retries, "{pushback}");
        }
    });
}

#[test]
fn rejection_that_may_have_had_an_effect_is_retried_only_if_idempotent() {
    on_worker(async {
        for head in [
            "503 Service Unavailable\r\nRetry-After: 0",
            "429 Too Many Requests",
            "429 Too Many Requests\r\nRetry-After: 0",
        ] {
            let (rejecting, rejected) = http1_app(head).await;
            let service = Service::new(&[rejecting, app().await]).await;
            let answered = successes(&service, POST, 30).await;
            assert_eq!((answered + rejected.get(), quarantined(&service)), (30, 0));
            assert!(rejected.get() > 0);
            let service = Service::new(&[rejecting, app().await]).await;
            assert_eq!(successes(&service, GET, 30).await, 30);
        }
        // A gRPC server replies so after the handler has run, if its response is too large.
        let (rejecting, rejected) = grpc_app(&[("grpc-status", "8")]).await;
        let service = Service::new(&[rejecting, http2_app(Response::default).await]).await;
        let failures = http2_failures_of(&service, Method::POST).await;
        assert_eq!((failures, quarantined(&service)), (rejected.get(), 0));
        assert!(failures > 0);
    });
}

/// An HTTP/1 application that rejects each request, with a body of `length` bytes, of which it sends
/// `sent` after the head. Counts its connections.
async fn app_with_body(length: usize, sent: usize, connections: Rc<Cell<usize>>) -> EndpointInfo {
    let address = listening(async move |mut stream| {
        connections.set(connections.get() + 1);
        while read_head(&mut stream).await.is_some() {
            let head = format!("HTTP/1.1 429 x\r\nContent-Length: {length}\r\n\r\n");
            // The proxy may have closed.
            let _ = stream.write_all(head.as_bytes()).await;
            tokio::task::yield_now().await;
            let _ = stream.write_all(&vec![b'x'; sent]).await;
        }
    })
    .await;
    EndpointInfo::bare(address)
}

#[test]
fn response_in_whose_place_another_attempt_follows_costs_no_connection() {
    on_worker(async {
        let authority = Authority::new("root");
        for (length, sent, is_kept) in [
            (0, 0, true),
            (5000, 5000, true),
            (100_000, 100_000, false),
            (10, 0, false),
        ] {
            let connections = Rc::new(Cell::new(0));
            let app = async || app_with_body(length, sent, connections.clone()).await;
            let service = Service::with(&authority, vec![app().await, app().await]).await;
            for _ in 0..10 {
                // The last response is passed on, whether it ends or not.
                let mut client = service.caller.connect(&service.destination).await;
                client.write_all(GET.as_bytes()).await.expect("it is open");
                client.read_exact(&mut [0; 12]).await.expect("a status");
                if length == sent {
                    drop(client.read_to_end(&mut Vec::new()).await)
                } else {
                    drop(client)
                }
            }
            if is_kept {
                assert!(connections.get() < 6, "{length}: {}", connections.get())
            } else {
                assert!(connections.get() >= 11, "{length}: {}", connections.get())
            }
        }
    });
}
