//! Detects mesh TLS by the ALPN extension of the ClientHello (RFC 8446, section 4.1.2; RFC 7301), and
//! reads the server name of others, without consuming bytes. Pure, bounded and total.

use rustls::server::Acceptor;

use super::Alpn;

/// Classification of the first bytes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hello {
    /// A prefix of a ClientHello.
    NeedMore,
    /// A ClientHello with an ALPN protocol of the mesh, from another proxy.
    Mesh,
    /// Anything else, including TLS of the application.
    Foreign,
}

const HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const ALPN: u16 = 16;
/// Maximum length of a record (RFC 8446, section 5.1).
const MAX_RECORD: usize = 1 << 14;

/// Classifies the first bytes of a connection. A ClientHello in several records is foreign.
pub fn inspect(bytes: &[u8]) -> Hello {
    let [kind, major, _, high, low, record @ ..] = bytes else {
        let beginning = [HANDSHAKE, 3];
        let length = bytes.len().min(2);
        return if bytes[..length] == beginning[..length] {
            Hello::NeedMore
        } else {
            Hello::Foreign
        };
    };
    let length = usize::from(u16::from_be_bytes([*high, *low]));
    if *kind != HANDSHAKE
        || *major != 3
        || length > MAX_RECORD
        || record.first().is_some_and(|kind| *kind != CLIENT_HELLO)
    {
        return Hello::Foreign;
    }
    let Some(record) = record.get(..length) else {
        return Hello::NeedMore;
    };
    if protocols(record).is_some_and(|list| {
        Reader(list)
            .vectors8()
            .any(|name| Alpn::from_name(name).is_some())
    }) {
        return Hello::Mesh;
    }
    Hello::Foreign
}

/// The server name in the first bytes of a TLS session (RFC 6066, section 3). `None` while they are
/// a prefix of a ClientHello. Empty without a name, or if they are anything else.
pub fn server_name(mut bytes: &[u8]) -> Option<String> {
    let mut acceptor = Acceptor::default();
    while !bytes.is_empty() {
        let is_read = acceptor.read_tls(&mut bytes).is_ok_and(|read| read > 0);
        match acceptor.accept() {
            Ok(None) if is_read => {}
            Ok(Some(accepted)) => {
                let hello = accepted.client_hello();
                return Some(hello.server_name().unwrap_or_default().to_owned());
            }
            Ok(None) | Err(_) => return Some(String::new()),
        }
    }
    None
}

/// Protocol list of the ALPN extension of a ClientHello.
fn protocols(record: &[u8]) -> Option<&[u8]> {
    let mut hello = Reader(record);
    hello.take(1)?;
    let length = hello.take(3)?;
    let length =
        usize::from(length[0]) << 16 | usize::from(length[1]) << 8 | usize::from(length[2]);
    let mut hello = Reader(hello.take(length)?);
    // Version and random, session ID, cipher suites, compression methods.
    hello.take(2 + 32)?;
    hello.vector8()?;
    hello.vector16()?;
    hello.vector8()?;
    let mut extensions = Reader(hello.vector16()?);
    while let Some(kind) = extensions.take(2) {
        let body = extensions.vector16()?;
        if u16::from_be_bytes([kind[0], kind[1]]) == ALPN {
            return Reader(body).vector16();
        }
    }
    None
}

/// Reads from the front of a slice. Methods return `None` at its end.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (piece, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(piece)
    }

    /// Reads a vector with a length of one byte.
    fn vector8(&mut self) -> Option<&'a [u8]> {
        let length = usize::from(self.take(1)?[0]);
        self.take(length)
    }

    /// Reads a vector with a length of two bytes.
    fn vector16(&mut self) -> Option<&'a [u8]> {
        let length = self.take(2)?;
        self.take(usize::from(u16::from_be_bytes([length[0], length[1]])))
    }

    fn vectors8(mut self) -> impl Iterator<Item = &'a [u8]> {
        std::iter::from_fn(move || self.vector8())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::client::UnbufferedClientConnection;
    use rustls::pki_types::ServerName;
    use rustls::unbuffered::ConnectionState;
    use rustls::{ClientConfig, RootCertStore};

    use super::*;

    /// A ClientHello of rustls that offers these protocols.
    fn hello(protocols: &[&[u8]]) -> Vec<u8> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions");
        let mut config = builder
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        let name = ServerName::try_from("example.org").expect("a name");
        let mut connection =
            UnbufferedClientConnection::new(Arc::new(config), name).expect("a connection");
        let mut out = vec![0; 8192];
        let ConnectionState::EncodeTlsData(mut data) = connection
            .process_tls_records(&mut [])
            .state
            .expect("a hello")
        else {
            panic!("a client sends first")
        };
        let length = data.encode(&mut out).expect("room");
        out.truncate(length);
        out
    }

    #[test]
    fn detects_mesh_client_hello_when_complete() {
        let mesh = hello(&[Alpn::Http2.name()]);
        for length in 0..mesh.len() {
            assert_eq!(inspect(&mesh[..length]), Hello::NeedMore, "{length}");
        }
        assert_eq!(inspect(&mesh), Hello::Mesh);
        assert_eq!(inspect(&[&mesh[..], b"more"].concat()), Hello::Mesh);
    }

    #[test]
    fn classifies_other_alpn_protocols_as_foreign() {
        let lists: [&[&[u8]]; 5] = [
            &[],
            &[b"h2", b"http/1.1"],
            &[b"diy-mesh/"],
            &[b"diy-mesh/other"],
            &[b"x-diy-mesh/http1"],
        ];
        for protocols in lists {
            assert_eq!(inspect(&hello(protocols)), Hello::Foreign, "{protocols:?}");
        }
    }

    #[test]
    fn classifies_other_bytes_as_foreign() {
        for bytes in [
            &b"GET / HTTP/1.1"[..],
            b"PRI",
            b"\0",
            b"\x16\x02",
            b"\x15\x03\x01\0\x02\x02\x28",
            b"\x16\x03\x01\0\x05\x02",
        ] {
            assert_eq!(inspect(bytes), Hello::Foreign, "{bytes:?}");
        }
        // Longer than a record may be.
        assert_eq!(inspect(b"\x16\x03\x01\x40\x01\x01"), Hello::Foreign);
    }
}
