//! Invariants of the proxy's readers of foreign bytes, whatever the bytes. Each function here is a
//! target: libFuzzer calls it with bytes of its own invention (`targets/`, `make fuzz`),
//! `tests/corpus.rs` with the seeds in `corpus/` and with random changes of them. A target panics
//! where the proxy violates an invariant, so each goes beyond "no panic". Never part of an image.

mod authorization;
mod detect;
mod grpc;
mod hello;
mod http1;
mod http2;
mod identity;
mod record;
mod request;
mod rustls_peer;
mod session;
mod token;
mod trace;
mod values;

pub use authorization::authorization;
pub use detect::detect;
pub use grpc::grpc;
pub use hello::hello;
pub use http1::{body, head};
pub use http2::http2;
pub use identity::identity;
pub use record::record;
pub use request::request;
pub use rustls_peer::rustls_peer;
pub use session::session;
pub use token::token;
pub use trace::trace;
pub use values::values;

/// Takes any bytes, and panics where what must hold does not.
pub type Target = fn(&[u8]);

/// All targets. Each has a folder of its name in `corpus/`, and a file in `targets/`.
pub const TARGETS: [(&str, Target); 15] = [
    ("authorization", authorization),
    ("body", body),
    ("detect", detect),
    ("grpc", grpc),
    ("head", head),
    ("hello", hello),
    ("http2", http2),
    ("identity", identity),
    ("record", record),
    ("request", request),
    ("rustls-peer", rustls_peer),
    ("session", session),
    ("token", token),
    ("trace", trace),
    ("values", values),
];

/// Longer than anything that detection waits for: a record of TLS, or a request line with its
/// method.
const LONG: usize = 17 * 1024;

/// A verdict on the first bytes of a connection stands once it has been given, however many more
/// bytes follow, and bytes enough bring one about. `waits` is the answer that is none yet.
fn settles<Verdict: Copy + PartialEq + std::fmt::Debug>(
    bytes: &[u8],
    waits: Verdict,
    judge: impl Fn(&[u8]) -> Verdict,
) {
    // Each beginning of a short input; some of a long one, or a run would try few of them.
    let step = 1 + bytes.len() / 256;
    let mut verdict = waits;
    for length in (0..bytes.len()).step_by(step).chain([bytes.len()]) {
        let next = judge(&bytes[..length]);
        assert!(
            verdict == waits || next == verdict,
            "{verdict:?} became {next:?} with {length} bytes"
        );
        verdict = next;
    }
    let mut longer = bytes.to_vec();
    for more in [
        &b"a"[..],
        b" HTTP/1.1\r\n\r\n",
        b"\n\0\x16\x03",
        &[b'a'; LONG],
        b" HTTP/1.1\r\n",
        b"\0\n",
    ] {
        longer.extend_from_slice(more);
        let next = judge(&longer);
        assert!(
            verdict == waits || next == verdict,
            "{verdict:?} became {next:?} with {} more bytes",
            longer.len() - bytes.len()
        );
        verdict = next;
    }
    assert_ne!(verdict, waits, "with {} bytes", longer.len());
}

/// Whether `part` stands in `whole`.
fn contains(whole: &[u8], part: &[u8]) -> bool {
    whole.windows(part.len()).any(|window| window == part)
}
