//! Step 3: what a connection carries, told from its first bytes. How they are cut by the network must make no difference.

use diy_mesh_proxy::detect::{Protocol, Verdict, classify, classify_inbound, is_http2_server, take_a_guess};
use diy_mesh_proxy::tls::{Hello, look};

/// The first bytes of a client, or of a server.
pub fn detect(bytes: &[u8]) {
    for judge in [classify, classify_inbound] {
        crate::settles(bytes, Verdict::NeedMore, judge);
    }
    let (outbound, inbound) = (classify(bytes), classify_inbound(bytes));
    assert_ne!(outbound, Verdict::Known(Protocol::MeshTls), "only what comes in is looked at for it");
    let expected = match look(bytes) {
        Hello::Mesh => Verdict::Known(Protocol::MeshTls),
        Hello::NeedMore => Verdict::NeedMore,
        Hello::Foreign => outbound,
    };
    assert_eq!(inbound, expected);
    let guess = take_a_guess(bytes);
    assert!(matches!(guess, Protocol::Http1 | Protocol::Opaque), "{guess:?}");
    assert!(guess != Protocol::Http1 || outbound != Verdict::Known(Protocol::Http2), "a guess against what is known");
    assert!(!is_http2_server(bytes) || outbound != Verdict::Known(Protocol::Http2), "a client's word and a server's");
}
