//! Tests of clients that do not read their responses: they slow themselves only, and what they give up
//! is given up at the application.

use super::hostile::{END_HEADERS, END_STREAM, GET, HEADERS, RST_STREAM, frame};
use super::raw::{DATA, End, OK, settings};
use super::*;
use crate::limits::memory::Memory;

const RESPONSE: usize = 5 * 1024 * 1024;

/// Responds with 5 MB in the windows that it gets, except to `/quick`.
async fn large_responses() -> SocketAddr {
    app(|request: Request<RecvStream>, mut respond| async move {
        let is_quick = request.uri().path() == "/quick";
        let mut body = respond.send_response(Response::new(()), is_quick).unwrap();
        if is_quick {
            return;
        }
        let mut left = RESPONSE;
        while left > 0 {
            body.reserve_capacity(left.min(64 * 1024));
            let Some(Ok(capacity)) = poll_fn(|cx| body.poll_capacity(cx)).await else {
                return;
            };
            left -= capacity;
            if body.send_data(vec![7; capacity].into(), left == 0).is_err() {
                return;
            }
        }
    })
    .await
}

fn mesh_of(bytes: usize) -> Mesh {
    let context = WorkerContext {
        memory: Memory::new(bytes),
        ..WorkerContext::for_a_test("")
    };
    let (metrics, drain) = (context.metrics.clone(), context.drain.clone());
    Mesh {
        worker: Worker::new(context),
        metrics,
        drain,
        dumped: Output::default(),
    }
}

#[test]
fn slow_readers_do_not_block_other_requests_to_the_same_app() {
    on_worker(async {
        const MIB: usize = 1024 * 1024;
        for direction in [Direction::Outbound, Direction::Inbound] {
            for limit in [32, 64, 128, 256, 2048] {
                let mesh = mesh_of(limit * MIB);
                let destination = Backend::alone(large_responses().await);
                let mut slow = Vec::new();
                for _ in 0..40 {
                    let client = End::client(&mesh, &destination, direction, 65_535).await;
                    client.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, GET));
                    slow.push(client);
                }
                // Each has as much as its window takes, or was cut off.
                let has_enough = |client: &End| {
                    let is_reset = client.seen.resets.borrow().contains_key(&1);
                    let is_cut_off = is_reset || client.seen.is_closed.get();
                    is_cut_off || client.seen.data_of(1).len() == 65_535
                };
                until(|| slow.iter().all(has_enough)).await;
                let caller = match direction {
                    Direction::Inbound => Caller::Unauthenticated,
                    Direction::Outbound => Caller::App,
                };
                let quick = mesh.carry(direction, &destination, caller).await;
                let mut quick = connect(quick).await;
                for _ in 0..100 {
                    let (response, _) = call(&mut quick, get("/quick")).await.unwrap();
                    assert_eq!(response.status(), 200, "{direction:?} {limit}");
                }
            }
        }
    });
}

#[test]
fn stream_that_the_client_gives_up_is_reset_at_the_app_at_once() {
    on_worker(async {
        for direction in [Direction::Outbound, Direction::Inbound] {
            for window in [0, 10, 65_535] {
                let mesh = Mesh::new();
                // Sends all that its windows allow at first.
                let chunk = [0; 16_000];
                let respond = move |stream, _| {
                    let head = frame(HEADERS, END_HEADERS, stream, OK);
                    [head, frame(DATA, 0, stream, &chunk)].concat()
                };
                let (address, app) = End::app(settings(&[]), respond).await;
                let backend = Backend::alone(address);
                let client = End::client(&mesh, &backend, direction, window).await;
                let streams = || (0..4).map(|index| 2 * index + 1);
                for stream in streams() {
                    client.send(frame(HEADERS, END_HEADERS | END_STREAM, stream, GET));
                }
                let app = app.await;
                until(|| app.seen.heads.borrow().len() == 4).await;
                // The window of the connection is used up.
                let used = 4 * 16_000;
                let left = 65_535 - used;
                for (stream, size) in [(1, 1_000), (3, left as usize - 1_000)] {
                    app.send(frame(DATA, 0, stream, &vec![0; size]));
                }
                app.sync().await;
                until(|| client.seen.heads.borrow().len() == 4).await;
                for stream in streams() {
                    client.send(frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes()));
                }
                until(|| app.seen.resets.borrow().len() == 4).await;
                let all_cancelled = app.seen.resets.borrow().values().all(|code| *code == 8);
                assert!(all_cancelled, "{:?}", app.seen.resets.borrow());
                client.sync().await;
                app.sync().await;
            }
        }
    });
}
