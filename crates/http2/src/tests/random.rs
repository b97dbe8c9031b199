//! Frames in pieces, and frames and acts in random order: a connection ends in order.

use std::task::{Context, Poll, Waker};

use fastrand::Rng;

use super::bench::*;
use super::*;
use crate::frame::setting;
use crate::{Connection, Shared};

/// The pieces in which bytes arrive make no difference.
#[test]
fn frames_may_arrive_byte_by_byte() {
    let conversation = [
        PREFACE,
        &settings(&[(setting::INITIAL_WINDOW_SIZE, 1 << 20)]),
        &headers(1, 0, &POST),
        &data(1, 0, 300),
        &frame(kind::HEADERS, 0, 3, &block(&GET)[..10]),
        &continuation(3, flag::END_HEADERS, &block(&GET)[10..]),
        &padded_data(1, flag::END_STREAM, 20, 200),
        &reset(3, ErrorCode::CANCEL),
        &ping(),
        &headers(5, flag::END_STREAM, &[("a", "b")]),
        &window_update(0, 0),
    ]
    .concat();
    let results = [1, 2, 7, 9, 100, conversation.len()].map(|step| {
        let shared = Shared::new(config(Role::Server));
        let mut rest = Vec::new();
        let mut result = Ok(());
        for piece in conversation.chunks(step) {
            rest.extend(piece);
            match shared.with(|connection| connection.receive(&rest)) {
                Ok(length) => drop(rest.drain(..length)),
                Err(violation) => result = Err(violation),
            }
        }
        let output = shared.with(|connection| connection.output().to_vec());
        let opened: Vec<_> = std::iter::from_fn(|| shared.accept()).collect();
        let buffered: Vec<_> = opened
            .iter()
            .map(|opened| opened.receiver.buffered())
            .collect();
        (result, output, buffered)
    });
    assert_eq!(
        results[0].0.map_err(|violation| violation.code),
        Err(ErrorCode::PROTOCOL_ERROR)
    );
    assert_eq!(results[0].2, [320, 0]);
    for result in &results {
        assert_eq!(*result, results[0]);
    }
}

#[test]
fn random_frames_end_in_order() {
    for seed in 0..600 {
        let _seed = Seed(seed);
        let mut rng = Rng::with_seed(seed);
        let role = [Role::Client, Role::Server][usize::from(rng.bool())];
        let mut bench = Bench::of(Config {
            max_streams: 4,
            connection_window: 65_535,
            max_output: 20_000,
            ..config(role)
        });
        let mut rest = Vec::new();
        for _ in 0..300 {
            match rng.u8(..6) {
                0..3 => {
                    rest.extend(random_frame(&mut rng));
                    if rng.u8(..50) == 0 {
                        let at = rng.usize(..rest.len());
                        rest[at] ^= 1 << rng.u8(..8);
                    }
                    let received = bench.with(|connection| connection.receive(&rest));
                    if let Ok(length) = received {
                        rest.drain(..length);
                    }
                    bench.accept();
                }
                3 if role == Role::Client && bench.ended().is_none() => {
                    if bench.with(|connection| connection.accepts_streams()) {
                        bench.open("POST", rng.bool());
                    }
                }
                4 if !bench.streams.is_empty() => {
                    let at = rng.usize(..bench.streams.len());
                    if rng.u8(..4) == 0 {
                        bench.streams.swap_remove(at);
                    } else {
                        random_act(&mut rng, &bench.streams[at]);
                    }
                }
                5 if rng.u8(..20) == 0 => bench.with(Connection::drain),
                _ => bench.flush(),
            }
            if role == Role::Server {
                assert!(bench.open_streams() <= 4);
            }
            if bench.ended().is_some() {
                break;
            }
        }
        bench.close(ErrorCode::NO_ERROR);
        bench.streams.clear();
        bench.flush();
        assert_eq!(bench.open_streams(), 0);
        assert!(!bench.has_streams());
    }
}

/// A frame of a peer that knows the protocol, and respects it rarely.
fn random_frame(rng: &mut Rng) -> Vec<u8> {
    let stream = [0, 1, 3, 5, 7, 9, 11, 13, 2, MAX_31][rng.usize(..10)];
    let blocks = [
        block(&GET),
        block(&POST),
        block(&OK),
        block(&[("a", "b")]),
        block(&[]),
        block(&[(":status", "103")]),
    ];
    let block = &blocks[rng.usize(..blocks.len())];
    let flags = [
        0,
        flag::END_STREAM,
        flag::END_HEADERS,
        flag::END_HEADERS | flag::END_STREAM,
        rng.u8(..),
    ];
    let flags = flags[rng.usize(..flags.len())];
    let end = flags & flag::END_STREAM;
    match rng.u8(..20) {
        0..5 => frame(kind::HEADERS, flags | flag::END_HEADERS, stream, block),
        5 => frame(kind::HEADERS, flags, stream, block),
        6 => continuation(stream, flags, block),
        7..11 => data(stream, end, rng.usize(..16_385)),
        11 => padded_data(stream, end, rng.usize(..100), rng.u8(..)),
        12 => reset(stream, ErrorCode(rng.u32(..20))),
        13 => window_update(stream, rng.u32(..100_000)),
        14 => window_update(0, rng.u32(1..100_000)),
        15 => settings(&[(rng.u16(1..9), [0, 1, 100, 65_535, 1 << 20][rng.usize(..5)])]),
        16 => go_away(stream, ErrorCode(rng.u32(..20))),
        17 => priority(stream, rng.u32(..20)),
        18 => ping(),
        _ => {
            let kind = rng.u8(..12);
            frame(kind, flags, stream, &vec![rng.u8(..); rng.usize(..20)])
        }
    }
}

/// Does something with a stream that its task may do.
fn random_act(rng: &mut Rng, stream: &Stream) {
    let cx = &Context::from_waker(Waker::noop());
    let (sender, receiver) = (&stream.sender, &stream.receiver);
    match rng.u8(..8) {
        0 => drop(sender.respond(&response(200, &[]), rng.bool())),
        1 => drop(sender.respond(&response(103, &[]), false)),
        2..4 if sender.poll_ready(cx).is_ready() => {
            let length = rng.usize(..40_000);
            drop(sender.send(vec![0; length].into(), rng.u8(..4) == 0));
        }
        4 => drop(sender.send_trailers(Fields::default())),
        5 => sender.reset(ErrorCode::CANCEL),
        6 => drop(receiver.poll_response(cx)),
        _ => {
            if let Poll::Ready(Some(Ok(data))) = receiver.poll_data(cx) {
                receiver.release(data.len());
            }
        }
    }
}
