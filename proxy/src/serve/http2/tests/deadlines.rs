//! Tests of `grpc-timeout`: the proxy ends calls at the deadline of the caller, and passes on the
//! time that is left. And of calls that the client cancels between two attempts.

use std::cell::{Cell, RefCell};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::limits::deadline::parse_grpc_timeout;

/// A gRPC request with this timeout.
fn within(timeout: &str) -> Request<()> {
    let mut request = grpc("/");
    let timeout = timeout.parse().unwrap();
    request.headers_mut().insert("grpc-timeout", timeout);
    request
}

#[test]
fn call_ends_at_the_deadline_of_the_caller() {
    on_worker(async {
        let (arrived, reset) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(None)));
        let address = app({
            let (arrived, reset) = (arrived.clone(), reset.clone());
            move |_, mut respond| {
                let (arrived, reset) = (arrived.clone(), reset.clone());
                async move {
                    arrived.set(true);
                    reset.set(poll_fn(|cx| respond.poll_reset(cx)).await.ok());
                }
            }
        })
        .await;
        let mesh = Mesh::new();
        let _frozen = freeze();
        let timeout = Duration::from_millis(50);
        for client in [
            mesh.client_of(address).await,
            mesh.inbound_client(address).await,
        ] {
            let mut client = client;
            let expire = async {
                until(|| arrived.take()).await;
                tokio::time::advance(2 * timeout).await;
            };
            let (response, ()) = tokio::join!(call(&mut client, within("50m")), expire);
            let (response, _) = response.unwrap();
            assert_local_reply(&response, 200, "timeout");
            assert_eq!(response.headers()["grpc-status"], "4");

            until(|| reset.take() == Some(Reason::CANCEL)).await;
        }
        // A response that has begun ends too.
        let address = app(|_, mut respond| async move {
            let head = Response::builder().header("content-type", "application/grpc");
            let head = head.body(()).unwrap();
            let _stream = respond.send_response(head, false).unwrap();
            std::future::pending::<()>().await;
        })
        .await;
        let mut client = mesh.client_of(address).await;
        let (response, _) = client.send_request(within("50m"), true).unwrap();
        let response = response.await.unwrap();
        tokio::time::advance(2 * timeout).await;
        let (_, trailers) = read(response).await.unwrap();
        assert_eq!(trailers.unwrap()["grpc-status"], "4");
    });
}

#[test]
fn passes_on_the_time_that_is_left() {
    on_worker(async {
        let seen: Rc<RefCell<Vec<String>>> = Rc::default();
        let address = app({
            let seen = seen.clone();
            move |request, mut respond| {
                let timeout = request.headers()["grpc-timeout"].to_str().unwrap();
                seen.borrow_mut().push(timeout.to_owned());
                let is_first = seen.borrow().len() == 1;
                async move {
                    if is_first {
                        tokio::time::pause();
                        tokio::time::advance(Duration::from_secs(2)).await;
                        tokio::time::resume();
                        return respond.send_reset(Reason::REFUSED_STREAM);
                    }
                    respond.send_response(Response::new(()), true).unwrap();
                }
            }
        })
        .await;
        let mut client = Mesh::new().client_of(address).await;
        let (response, _) = call(&mut client, within("25S")).await.unwrap();
        assert_eq!(response.status(), 200);
        let seen = seen.borrow();
        let [first, second] = &seen[..] else {
            panic!("{seen:?}")
        };
        // Until a time passes that counts, the field stays as it is.
        let at_first = parse_grpc_timeout(first.as_bytes()).unwrap();
        assert!(
            first == "25S" || at_first < Duration::from_secs(25),
            "{first}"
        );
        let left = parse_grpc_timeout(second.as_bytes()).unwrap();
        assert!(left <= Duration::from_secs(23), "{second}");
    });
}

fn retries_after_an_hour() -> Routes {
    let retry = RetryPolicy {
        statuses: vec![503],
        attempts: 1,
        backoff: Duration::from_secs(3600),
    };
    let rule = Rule {
        to_destination: true,
        retry: Some(Arc::new(retry)),
        ..Rule::default()
    };
    Routes::new(vec![Match::default()], vec![Arc::new(rule)])
}

#[test]
fn call_that_the_client_has_cancelled_is_not_sent_again() {
    on_worker(async {
        let requests = Rc::new(Cell::new(0));
        let count = requests.clone();
        let address = app(move |request, mut respond| {
            if request.uri().path() == "/fails" {
                count.set(count.get() + 1);
            }
            async move {
                let failed = Response::builder().status(503).body(()).unwrap();
                respond.send_response(failed, true).unwrap();
            }
        })
        .await;
        let (mesh, destination) =
            Mesh::with_routes(&[address], Some(retries_after_an_hour())).await;
        let mut client = mesh.client(&destination).await;
        let idle = Rc::strong_count(&destination);
        let (response, mut stream) = client.send_request(get("/fails"), false).unwrap();
        until(|| mesh.metric("retries_total{direction=\"outbound\"}") == 1).await;
        assert!(Rc::strong_count(&destination) > idle, "a request uses it");
        stream.send_reset(Reason::CANCEL);
        drop(response);
        // The proxy gives the request up, and does not wait for the time of the retry.
        until(|| Rc::strong_count(&destination) == idle).await;
        assert_eq!(requests.get(), 1);
    });
}

#[test]
fn http1_request_whose_client_has_left_is_not_sent_again() {
    on_worker(async {
        let (listener, address) = listen().await;
        let requests = Rc::new(Cell::new(0));
        let count = requests.clone();
        tokio::task::spawn_local(async move {
            loop {
                let (mut app, _) = listener.accept().await.unwrap();
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(app.read_u8().await.unwrap());
                }
                count.set(count.get() + 1);
                let failed = b"HTTP/1.1 503 Unavailable\r\nContent-Length: 0\r\n\r\n";
                app.write_all(failed).await.unwrap();
            }
        });
        let (mesh, destination) =
            Mesh::with_routes(&[address], Some(retries_after_an_hour())).await;
        let (mut client, stream) = connected().await;
        let flow = mesh.flow(Direction::Outbound, &destination, Caller::App, &stream);
        let served = crate::serve::http1::serve(Io::new(stream), flow);
        let served = tokio::task::spawn_local(served);
        let get = b"GET / HTTP/1.1\r\nHost: app\r\n\r\n";
        client.write_all(get).await.unwrap();
        until(|| mesh.metric("retries_total{direction=\"outbound\"}") == 1).await;
        drop(client);
        served.await.unwrap();
        assert_eq!(requests.get(), 1);
    });
}
