//! Step 3: what a connection carries, told from its first bytes. How they are cut by the network
//! must make no difference.

use diy_mesh_proxy::http::request_line::{RequestDetector, RequestLineDetector};
use diy_mesh_proxy::path::detect::{Detector, Rules, is_http2_server};
use diy_mesh_proxy::protocol::Protocol;
use diy_mesh_proxy::secure::tls::{Hello, inspect};

/// The first bytes of a client, or of a server.
pub fn detect(bytes: &[u8]) {
    let classify = |rules, bytes: &[u8]| Detector::new(rules).update(bytes);
    for rules in [
        Rules::Inner,
        Rules::Inspected,
        Rules::Inbound,
        Rules::InboundOpaque,
    ] {
        crate::settles(bytes, None, |bytes| classify(rules, bytes));
        let mut growing = Detector::new(rules);
        let growing =
            (0..=bytes.len().min(2048)).find_map(|length| growing.update(&bytes[..length]));
        let beginning = &bytes[..bytes.len().min(2048)];
        assert_eq!(
            growing,
            classify(rules, beginning),
            "byte by byte, and at once"
        );
    }
    let (outbound, inbound) = (
        classify(Rules::Inner, bytes),
        classify(Rules::Inbound, bytes),
    );
    assert_ne!(
        outbound,
        Some(Protocol::MeshTls),
        "only what comes in is looked at for it"
    );
    let expected = match inspect(bytes) {
        Hello::Mesh => Some(Protocol::MeshTls),
        Hello::NeedMore => None,
        Hello::Foreign => outbound,
    };
    assert_eq!(inbound, expected);
    if outbound.is_none() {
        let guess = Detector::new(Rules::Inner).guess(bytes);
        assert!(
            matches!(guess, Protocol::Http1 | Protocol::Opaque),
            "{guess:?}"
        );
    }
    if !bytes.starts_with(b"PRI") && bytes.len() < crate::LONG / 2 {
        let (mut detector, (first, rest)) = (
            RequestLineDetector::default(),
            bytes.split_at(bytes.len() / 2),
        );
        let early = detector.update(first);
        assert!(
            early == outbound || early.is_none() && detector.update(rest) == outbound,
            "{early:?}, then {outbound:?}"
        );
    }
    // One byte at a time, nothing is skipped.
    let mut by_byte = RequestDetector::default();
    let reference = bytes.iter().find_map(|byte| by_byte.update(&[*byte]));
    assert_eq!(RequestDetector::default().update(bytes), reference);
    assert!(
        !is_http2_server(bytes) || outbound != Some(Protocol::Http2),
        "a client's word and a server's"
    );
}
