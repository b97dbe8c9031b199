//! The differential test: random valid exchanges between a raw client and a raw server, once through
//! the mesh and once past it. The transcripts of both ends must be equal, except for the fields that
//! the documentation names.
//!
//! A seed and the number of an exchange determine what both ends send, so the two programs need not
//! coordinate otherwise. The server keeps the transcripts of what it has received, and the client
//! asks for them at a third port.

pub mod client;
mod http1;
mod http2;
mod opaque;
pub mod server;

use std::fmt::Write;
use std::time::Duration;

use fastrand::Rng;

/// A port is the way of its connections: the annotations of the pods exclude [`DIRECT`] and the
/// ports after it from the mesh.
pub const MESH: u16 = 9000;
/// The same past the mesh.
pub const DIRECT: u16 = 9002;
/// Where the client asks for transcripts, past the mesh.
pub const TRANSCRIPTS: u16 = 9004;
/// The first port of servers that speak first is the one after [`MESH`] or [`DIRECT`].
const SERVER_FIRST: u16 = 1;

/// Both ends wait so long for bytes that do not arrive.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The first byte of a connection without HTTP.
const OPAQUE: u8 = 0;

/// The field with the key of an exchange.
const KEY: &str = "exchange";

/// The RNG of one use: the seed, the number of the exchange and the use give its values.
fn rng(seed: u64, number: u64, usage: u64) -> Rng {
    let mut rng = Rng::with_seed(seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    Rng::with_seed(rng.u64(..) ^ usage.wrapping_mul(0xd1b5_4a32_d192_ed03))
}

/// Random bytes of a random number: mostly few, seldom many.
fn bytes(rng: &mut Rng) -> Vec<u8> {
    let length = match rng.u8(..20) {
        0 => 0,
        1 => rng.usize(..100_000),
        2..5 => rng.usize(..5_000),
        _ => rng.usize(..200),
    };
    (0..length).map(|_| rng.u8(..)).collect()
}

/// Splits bytes into pieces, which are written one by one.
fn pieces<'a>(rng: &mut Rng, mut bytes: &'a [u8]) -> Vec<&'a [u8]> {
    let mut pieces = Vec::new();
    while !bytes.is_empty() {
        let most = if rng.bool() { bytes.len() } else { 100 };
        let (piece, rest) = bytes.split_at(rng.usize(1..=most.min(bytes.len())));
        pieces.push(piece);
        bytes = rest;
        if pieces.len() == 10 {
            pieces.push(std::mem::take(&mut bytes));
        }
    }
    pieces.retain(|piece| !piece.is_empty());
    pieces
}

/// Bytes as a text, without loss: of many bytes, their number and a digest.
fn text(bytes: &[u8]) -> String {
    if bytes.len() <= 500 {
        return bytes.escape_ascii().to_string();
    }
    // FNV-1a.
    let digest = bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |digest, byte| {
            (digest ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
        });
    format!("{} bytes, digest {digest:016x}", bytes.len())
}

fn big_endian(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// The names of the fields that may differ, in requests, responses, trailers, or in all of them.
#[derive(Clone)]
pub struct Omitted(Vec<(String, String)>);

impl Omitted {
    /// Parses `PART:NAME,...`, in lower case.
    pub fn parse(text: &str) -> Option<Self> {
        let pairs = text.split(',').map(|pair| {
            let (part, name) = pair.split_once(':')?;
            let is_part = ["all", "requests", "responses", "trailers"].contains(&part);
            is_part.then(|| (part.to_owned(), name.to_owned()))
        });
        pairs.collect::<Option<_>>().map(Self)
    }

    /// The names of one part of messages.
    fn of(&self, part: &str) -> Vec<String> {
        let names = self.0.iter().filter(|(of, _)| of == part || of == "all");
        names.map(|(_, name)| name.clone()).collect()
    }
}

/// Adds the lines of the fields to a transcript, except those with these names.
fn write_fields<'a>(
    transcript: &mut String,
    fields: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    omitted: &[String],
) {
    for (name, value) in fields {
        if omitted
            .iter()
            .all(|one| !name.eq_ignore_ascii_case(one.as_bytes()))
        {
            let (name, value) = (name.escape_ascii(), value.escape_ascii());
            writeln!(transcript, "  {name}: {value}").expect("a String has room");
        }
    }
}
