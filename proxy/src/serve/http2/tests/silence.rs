//! Tests of endpoints that are silent, that do not acknowledge what they read, or that accept few streams.

use std::cell::RefCell;
use std::time::Instant;

use tokio::io::AsyncReadExt;

use super::hostile::frame;
use super::hostile::{END_HEADERS, END_STREAM, HEADERS, PING, PREFACE, RST_STREAM, Raw, SETTINGS};
use super::raw::{End, OK, settings};
use super::*;
use crate::upstream::connect::Pool;

const SECOND: Duration = Duration::from_secs(1);

/// The checks of a worker, every two seconds until this one.
fn maintain_until(pool: &Pool, start: Instant, seconds: std::ops::RangeInclusive<u64>) {
    for second in seconds.step_by(2) {
        pool.http2.maintain(start + Duration::from_secs(second));
    }
}

fn pool_of(destination: &Rc<Backend>) -> Rc<Pool> {
    let endpoint = destination.pick(&[], &mut fastrand::Rng::new()).unwrap();
    endpoint.pool().clone()
}

fn respond_to_all(stream: u32, _: u8) -> Vec<u8> {
    frame(HEADERS, END_HEADERS | END_STREAM, stream, OK)
}

#[test]
fn silent_endpoint_gets_no_new_streams_and_keeps_open_ones() {
    on_worker(async {
        let (listener, address) = listen().await;
        let destination = Backend::alone(address);
        let pool = pool_of(&destination);
        let mesh = Mesh::new();
        let mut client = mesh.client(&destination).await;
        let (response, _) = client.send_request(get("/"), true).unwrap();
        let (silent, _) = listener.accept().await.unwrap();
        let mut silent = Raw(silent);
        let mut preface = [0; PREFACE.len() - 9];
        silent.0.read_exact(&mut preface).await.unwrap();
        silent.send(&settings(&[])).await;
        silent.wait_for(HEADERS).await.unwrap();
        // The proxy has read the SETTINGS.
        silent.send(&frame(PING, 0, 0, &[0; 8])).await;
        silent.wait_for(PING).await.unwrap();
        let start = Instant::now();
        maintain_until(&pool, start, 0..=600);
        assert_eq!(pool.http2.len(), 1);
        // A further request waits for the SETTINGS of a new connection.
        let (other, _) = client.send_request(get("/other"), true).unwrap();
        let (second, _) = listener.accept().await.unwrap();
        let other = other.await.unwrap();
        assert_eq!(other.headers()["x-mesh-error"], "connect-timeout");
        assert_eq!(other.status(), 504);
        drop(second);
        // The first one gets its response when the endpoint goes on.
        silent.send(&respond_to_all(1, 0)).await;
        assert_eq!(response.await.unwrap().status(), 200);
    });
}

#[test]
fn pause_of_the_proxy_is_no_silence_of_its_peers() {
    on_worker(async {
        let (address, app) = End::app(settings(&[]), |_, _| Vec::new()).await;
        let destination = Backend::alone(address);
        let pool = pool_of(&destination);
        let mut client = Mesh::new().client(&destination).await;
        let (_waiting, _) = client.send_request(get("/"), true).unwrap();
        let app = app.await;
        until(|| app.seen.heads.borrow().len() == 1).await;
        app.sync().await;
        let start = Instant::now();
        pool.http2.maintain(start);
        pool.http2.maintain(start + 35 * SECOND);
        // The connection takes a further stream.
        let (_other, _) = client.send_request(get("/"), true).unwrap();
        until(|| app.seen.heads.borrow().len() == 2).await;
    });
}

#[test]
fn connection_that_acknowledges_settings_is_not_silent() {
    on_worker(async {
        let (address, app) = End::app(settings(&[]), |_, _| Vec::new()).await;
        let destination = Backend::alone(address);
        let pool = pool_of(&destination);
        let mut client = Mesh::new().client(&destination).await;
        let (_waiting, _) = client.send_request(get("/"), true).unwrap();
        let app = app.await;
        until(|| app.seen.heads.borrow().len() == 1).await;
        app.sync().await;
        let start = Instant::now();
        for round in 0..10 {
            let before = app.seen.settings.get();
            maintain_until(&pool, start, 12 * round..=12 * round + 10);
            until(|| app.seen.settings.get() > before).await;
            // The proxy has read the acknowledgment.
            app.sync().await;
        }
        let (_other, _) = client.send_request(get("/"), true).unwrap();
        until(|| app.seen.heads.borrow().len() == 2).await;
    });
}

#[test]
fn closes_connection_of_endpoint_that_never_acknowledges_settings() {
    on_worker(async {
        let (listener, address) = listen().await;
        let destination = Backend::alone(address);
        let pool = pool_of(&destination);
        let mut client = Mesh::new().client(&destination).await;
        let (_call, mut stream) = client.send_request(get("/"), true).unwrap();
        let (app, _) = listener.accept().await.unwrap();
        let mut app = Raw(app);
        app.0.read_exact(&mut [0; PREFACE.len() - 9]).await.unwrap();
        app.send(&frame(SETTINGS, 0, 0, &[])).await;
        app.wait_for(HEADERS).await.unwrap();
        let _other_call = client.send_request(get("/"), true).unwrap();
        app.wait_for(HEADERS).await.unwrap();
        stream.send_reset(Reason::CANCEL);
        app.wait_for(RST_STREAM).await.unwrap();
        let start = Instant::now();
        for second in (0..=40).step_by(2) {
            // It is not silent.
            app.send(&frame(PING, 0, 0, &[0; 8])).await;
            app.wait_for(PING).await.unwrap();
            pool.http2.maintain(start + Duration::from_secs(second));
            assert_eq!(pool.http2.len(), usize::from(second < 40), "{second} s");
        }
    });
}

#[test]
fn requests_leave_an_endpoint_that_sends_no_settings() {
    on_worker(async {
        // It accepts connections, and sends nothing.
        let (listener, silent) = listen().await;
        let accepting = tokio::task::spawn_local(async move {
            let mut open = Vec::new();
            loop {
                open.push(listener.accept().await.unwrap());
            }
        });
        let (mesh, destination) = Mesh::with_service(&[named_app("fine").await, silent]).await;
        let mut client = mesh.client(&destination).await;
        let statuses: Rc<RefCell<Vec<u16>>> = Rc::default();
        for _ in 0..90 {
            poll_fn(|cx| client.poll_ready(cx)).await.unwrap();
            let (response, _) = client.send_request(get("/"), true).unwrap();
            let statuses = statuses.clone();
            tokio::task::spawn_local(async move {
                let status = response.await.unwrap().status();
                statuses.borrow_mut().push(status.as_u16());
            });
        }
        let pool = destination.endpoint(silent).unwrap().pool().clone();
        until(|| statuses.borrow().len() == 89).await;
        // One was sent to it, which goes to the other endpoint when the time for SETTINGS has passed.
        pool.http2.maintain(Instant::now() + 6 * SECOND);
        assert!(pool.http2.is_empty());
        until(|| statuses.borrow().len() == 90).await;
        assert_eq!(*statuses.borrow(), [200; 90]);
        accepting.abort();
    });
}

#[test]
fn endpoint_with_few_streams_serves_all_requests() {
    on_worker(async {
        for limit in [1, 10] {
            let mut settings = h2::server::Builder::new();
            settings.max_concurrent_streams(limit);
            let address = app_with(settings, echo).await;
            let mesh = Mesh::new();
            let mut client = mesh.client_of(address).await;
            for _ in 0..2 {
                let mut responses = Vec::new();
                for _ in 0..90 {
                    poll_fn(|cx| client.poll_ready(cx)).await.unwrap();
                    responses.push(client.send_request(get("/"), true).unwrap().0);
                }
                for response in responses {
                    assert_eq!(response.await.unwrap().status(), 200);
                }
            }
        }
    });
}
