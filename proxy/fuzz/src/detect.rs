//! Step 3: what a connection carries, told from its first bytes. How they are cut by the network
//! must make no difference.

use diy_mesh_proxy::detect::{
    Protocol, RequestDetector, RequestLineDetector, Verdict, classify, classify_inbound,
    classify_inbound_opaque, guess, is_http2_server,
};
use diy_mesh_proxy::tls::{Hello, inspect};

/// The first bytes of a client, or of a server.
pub fn detect(bytes: &[u8]) {
    for judge in [classify, classify_inbound, classify_inbound_opaque] {
        crate::settles(bytes, Verdict::NeedMore, judge);
    }
    let (outbound, inbound) = (classify(bytes), classify_inbound(bytes));
    assert_ne!(
        outbound,
        Verdict::Known(Protocol::MeshTls),
        "only what comes in is looked at for it"
    );
    let expected = match inspect(bytes) {
        Hello::Mesh => Verdict::Known(Protocol::MeshTls),
        Hello::NeedMore => Verdict::NeedMore,
        Hello::Foreign => outbound,
    };
    assert_eq!(inbound, expected);
    if outbound == Verdict::NeedMore {
        let guess = guess(bytes);
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
            early == outbound || early == Verdict::NeedMore && detector.update(rest) == outbound,
            "{early:?}, then {outbound:?}"
        );
    }
    // One byte at a time, nothing is skipped.
    let mut by_byte = RequestDetector::default();
    let reference = bytes
        .iter()
        .map(|byte| by_byte.update(&[*byte]))
        .find(|verdict| *verdict != Verdict::NeedMore);
    assert_eq!(
        RequestDetector::default().update(bytes),
        reference.unwrap_or(Verdict::NeedMore)
    );
    assert!(
        !is_http2_server(bytes) || outbound != Verdict::Known(Protocol::Http2),
        "a client's word and a server's"
    );
}
