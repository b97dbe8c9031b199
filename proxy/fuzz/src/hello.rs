//! Whether bytes begin the mesh's TLS. `inspect` must find in a ClientHello all that rustls reads
//! in it.

use diy_mesh_proxy::secure::tls::{Alpn, Hello, inspect};
use rustls::server::Acceptor;

/// A record's head, and a handshake message's.
const HEADS: usize = 5 + 4;

/// The first bytes of a connection to a pod.
pub fn hello(bytes: &[u8]) {
    crate::settles(bytes, Hello::NeedMore, inspect);
    let verdict = inspect(bytes);
    if verdict == Hello::Mesh {
        let all = [Alpn::Http1, Alpn::Http2, Alpn::Opaque, Alpn::Inspected];
        assert!(
            all.iter().any(|alpn| crate::contains(bytes, alpn.name())),
            "the mesh's, and names none of its protocols"
        );
    }
    if is_in_one_record(bytes) && rustls_reads_the_meshs(bytes) {
        assert_eq!(verdict, Hello::Mesh, "rustls would have taken it");
    }
}

/// A ClientHello that is spread over several records is not the mesh's.
fn is_in_one_record(bytes: &[u8]) -> bool {
    let Some((&[22, _, _, high, low, 1, zero, middle, last], _)) =
        bytes.split_first_chunk::<HEADS>()
    else {
        return false;
    };
    u32::from_be_bytes([0, zero, middle, last]) + 4 <= u32::from(u16::from_be_bytes([high, low]))
}

fn rustls_reads_the_meshs(bytes: &[u8]) -> bool {
    let mut acceptor = Acceptor::default();
    let mut rest = bytes;
    while !rest.is_empty() {
        if !acceptor.read_tls(&mut rest).is_ok_and(|read| read > 0) {
            return false;
        }
        match acceptor.accept() {
            Ok(None) => {}
            Ok(Some(accepted)) => {
                let hello = accepted.client_hello();
                return hello
                    .alpn()
                    .is_some_and(|mut names| names.any(|name| Alpn::from_name(name).is_some()));
            }
            Err(_) => return false,
        }
    }
    false
}
