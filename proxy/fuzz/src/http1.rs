//! HTTP/1 from untrusted peers. Whatever the proxy accepts, it forwards so that every reader sees
//! the same message.

use bytes::{Bytes, BytesMut};
use diy_mesh_proxy::http::edits::{Edits, MeshField};
use diy_mesh_proxy::protocol::MAX_SECTION;
use diy_mesh_proxy::serve::http1::body::Relay;
use diy_mesh_proxy::serve::http1::head::{Framing, HeadSearch, RequestHead, ResponseHead, Version};
use http::HeaderValue;

const CALLER: &str = "spiffe://cluster.local/ns/shop/sa/web";
/// The fields that say where a message ends and where it goes; and the caller's identity.
const NEVER_IN_TRAILERS: [&str; 3] = ["content-length", "transfer-encoding", "host"];
/// More fields no head has.
const MOST_FIELDS: usize = 128;
/// The most that waits to be decoded: trailers that have not fully come.
const MOST_WAITING: usize = 16 * 1024;

/// The head of a request, or of a response.
pub fn head(bytes: &[u8]) {
    let found = HeadSearch::default().find_end(bytes);
    let mut search = HeadSearch::default();
    let by_pieces = (0..=bytes.len())
        .map(|length| search.find_end(&bytes[..length]))
        .find(|found| *found != Ok(None));
    let by_pieces = by_pieces.unwrap_or(Ok(None));
    assert_eq!(by_pieces.ok(), found.ok(), "byte by byte, and at once");
    let Ok(end) = found else { return };
    let Some(end) = end else {
        return assert!(bytes.len() <= MAX_SECTION);
    };
    assert!(end <= MAX_SECTION);
    let raw = Bytes::copy_from_slice(&bytes[..end]);
    if let Ok(request) = RequestHead::parse(raw.clone()) {
        request_head(&request);
    }
    for method in [&b"GET"[..], b"HEAD", b"CONNECT"] {
        if let Ok(mut response) = ResponseHead::parse(raw.clone(), method) {
            response_head(&response, method);
            without_chunks(&mut response, method);
        }
    }
}

fn request_head(request: &RequestHead) {
    assert_ne!(
        request.framing,
        Framing::UntilClose,
        "a request ends before its connection"
    );
    let caller = HeaderValue::from_static(CALLER);
    let edits = [MeshField("X-Called-By", Some(&caller))];
    let called = Edits::of(&edits)
        .fields(request.fields())
        .filter(|(name, _)| names_a_caller(name));
    assert!(
        called.map(|(_, value)| value).eq([CALLER.as_bytes()]),
        "the proxy sets the identity of the caller"
    );
    for called_by in [None, Some(&caller)] {
        let mut out = BytesMut::new();
        let edit = MeshField("X-Called-By", called_by);
        request.write(&mut out, Edits::of(&[edit]));
        if is_over_a_limit(&out) {
            continue;
        }
        let again = RequestHead::parse(one_head(&out)).expect("what was accepted once");
        assert_eq!(
            (again.method(), again.target(), again.version),
            (request.method(), request.target(), request.version)
        );
        assert_eq!(
            (again.framing, again.connection.upgrade),
            (request.framing, request.connection.upgrade)
        );
        let called = again
            .fields()
            .filter(|(name, _)| names_a_caller(name))
            .map(|(_, value)| value);
        assert!(called.eq(called_by.map(HeaderValue::as_bytes)), "{out:?}");
        let ours = |name: &[u8]| name == b"Connection" || names_a_caller(name);
        in_order(
            again.fields().filter(|(name, _)| !ours(name)),
            request.fields(),
        );
        let mut twice = BytesMut::new();
        again.write(&mut twice, Edits::of(&[edit]));
        assert_eq!(twice, out);
    }
}

fn response_head(response: &ResponseHead, method: &[u8]) {
    assert!(
        (100..=999).contains(&response.status),
        "{}",
        response.status
    );
    for connection in [None, Some("close"), Some("keep-alive")] {
        let mut out = BytesMut::new();
        response.write(&mut out, Edits::default(), connection);
        if is_over_a_limit(&out) {
            continue;
        }
        let again = ResponseHead::parse(one_head(&out), method).expect("what was accepted once");
        assert_eq!(
            (again.status, again.reason(), again.framing),
            (response.status, response.reason(), response.framing)
        );
        assert_eq!(again.version, Version::Http11);
        assert_eq!(
            (again.connection.close, again.connection.keep_alive),
            (
                connection == Some("close"),
                connection == Some("keep-alive")
            )
        );
        in_order(
            again.fields().filter(|(name, _)| name != b"Connection"),
            response.fields(),
        );
        let mut twice = BytesMut::new();
        again.write(&mut twice, Edits::default(), connection);
        assert_eq!(twice, out);
    }
}

/// To a client of HTTP/1.0.
fn without_chunks(response: &mut ResponseHead, method: &[u8]) {
    response.drop_chunks();
    let mut out = BytesMut::new();
    response.write(&mut out, Edits::default(), None);
    if is_over_a_limit(&out) {
        return;
    }
    let again = ResponseHead::parse(one_head(&out), method).expect("what was accepted once");
    let expected = if response.framing == Framing::Chunked {
        Framing::UntilClose
    } else {
        response.framing
    };
    assert_eq!(again.framing, expected);
}

/// The next hop refuses it, as it says, where a head was at a limit already and the proxy's own
/// words came to it.
fn is_over_a_limit(out: &[u8]) -> bool {
    let fields = out.iter().filter(|byte| **byte == b'\n').count() - 2;
    out.len() > MAX_SECTION || fields > MOST_FIELDS
}

/// The output is one head, without bytes that a more careless reader takes for a line's end.
fn one_head(out: &BytesMut) -> Bytes {
    assert_eq!(
        HeadSearch::default().find_end(out),
        Ok(Some(out.len())),
        "{out:?}"
    );
    let ends = out.windows(2).filter(|pair| pair == b"\r\n").count();
    let alone = out
        .iter()
        .filter(|byte| matches!(byte, b'\r' | b'\n' | b'\0'))
        .count();
    assert_eq!(alone, 2 * ends, "{out:?}");
    out.clone().freeze()
}

/// In every spelling that a server might take for it.
fn names_a_caller(name: &[u8]) -> bool {
    String::from_utf8_lossy(name)
        .to_ascii_lowercase()
        .replace('_', "-")
        == "x-called-by"
}

/// No field was added, changed or moved.
fn in_order<'a>(
    sent: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    came: impl Iterator<Item = (&'a [u8], &'a [u8])>,
) {
    let mut came = came;
    for field in sent {
        assert!(
            came.any(|one| one == field),
            "{field:?} was not there, or not in this place"
        );
    }
}

/// A body behind its head, and what follows it.
pub fn body(bytes: &[u8]) {
    chunked(bytes);
    for length in [0, 1, bytes.len() / 2, bytes.len(), bytes.len() + 1] {
        let taken = Taken::by_pieces_of(
            bytes.len().max(1),
            bytes,
            Framing::Length(length as u64),
            false,
        );
        let (body, left) = bytes.split_at(length.min(bytes.len()));
        assert_eq!(
            (&taken.body[..], &taken.framed[..], &taken.left[..]),
            (body, body, left)
        );
        assert_eq!((taken.ended, taken.broken), (length <= bytes.len(), false));
    }
    let taken = Taken::by_pieces_of(7, bytes, Framing::UntilClose, false);
    assert_eq!(
        (
            &taken.body[..],
            &taken.framed[..],
            taken.ended,
            taken.broken
        ),
        (bytes, bytes, false, false)
    );
}

fn chunked(bytes: &[u8]) {
    let whole = Taken::by_pieces_of(bytes.len().max(1), bytes, Framing::Chunked, false);
    let plain = Taken::by_pieces_of(bytes.len().max(1), bytes, Framing::Chunked, true);
    assert_eq!(plain.framed, plain.body);
    assert_eq!(
        (&plain.body, plain.ended, plain.broken),
        (&whole.body, whole.ended, whole.broken)
    );
    assert!(
        whole.ended || whole.broken || whole.left.len() <= MOST_WAITING,
        "{} bytes wait",
        whole.left.len()
    );
    let (read, trailers) = careless(&whole.framed);
    assert_eq!(read, whole.body, "what was framed anew");
    assert_eq!(trailers.is_some(), whole.ended, "its end is the end");
    if let Some(trailers) = trailers {
        assert_eq!(
            HeadSearch::default().find_end(&[b"x\r\n", trailers].concat()),
            Ok(Some(3 + trailers.len())),
            "one end"
        );
        let names = trailers
            .split(|byte| *byte == b'\n')
            .filter_map(|line| line.split(|byte| *byte == b':').next());
        for name in names.map(String::from_utf8_lossy) {
            let forbidden = NEVER_IN_TRAILERS
                .iter()
                .any(|never| name.eq_ignore_ascii_case(never))
                || names_a_caller(name.as_bytes());
            assert!(!forbidden, "{name} in trailers");
        }
        let again = Taken::by_pieces_of(whole.framed.len(), &whole.framed, Framing::Chunked, false);
        assert_eq!(
            (again.framed, again.left, again.ended),
            (whole.framed.clone(), Vec::new(), true)
        );
    }
    for step in [1, 2, 5, 61] {
        let pieces = Taken::by_pieces_of(step, bytes, Framing::Chunked, false);
        assert_eq!(
            (&pieces.body, pieces.ended, pieces.broken),
            (&whole.body, whole.ended, whole.broken),
            "by pieces of {step}"
        );
        let (read, rest) = careless(&pieces.framed);
        assert_eq!((&read, rest), (&whole.body, trailers));
        assert!(
            !pieces.ended || pieces.left == whole.left,
            "by pieces of {step} it ends elsewhere"
        );
    }
}

/// The result of reading bytes that hold a body.
struct Taken {
    body: Vec<u8>,
    framed: Vec<u8>,
    left: Vec<u8>,
    ended: bool,
    broken: bool,
}

impl Taken {
    fn by_pieces_of(step: usize, bytes: &[u8], framing: Framing, plain: bool) -> Self {
        let mut relay = Relay::new(framing, BytesMut::new(), plain);
        let (mut from, mut body, mut broken) = (BytesMut::new(), Vec::new(), false);
        for piece in bytes.chunks(step) {
            from.extend_from_slice(piece);
            broken = relay
                .decode_buffered(&mut from, &mut |data| body.extend_from_slice(data))
                .is_err();
            if broken {
                break;
            }
        }
        Self {
            body,
            framed: relay.pending().to_vec(),
            left: from.to_vec(),
            ended: relay.is_read(),
            broken,
        }
    }
}

/// Reads chunks with no care for anything but what the proxy writes: the body, and the trailers
/// with their end if it has come.
fn careless(mut framed: &[u8]) -> (Vec<u8>, Option<&[u8]>) {
    let mut body = Vec::new();
    while !framed.is_empty() {
        let end = framed
            .windows(2)
            .position(|pair| pair == b"\r\n")
            .expect("a size ends with CR LF");
        let size = std::str::from_utf8(&framed[..end])
            .ok()
            .and_then(|size| usize::from_str_radix(size, 16).ok())
            .expect("a size");
        framed = &framed[end + 2..];
        if size == 0 {
            return (body, Some(framed));
        }
        let (data, rest) = framed.split_at(size);
        body.extend_from_slice(data);
        framed = rest.strip_prefix(b"\r\n").expect("a chunk ends with CR LF");
    }
    (body, None)
}
