//! Peers that flood a handshake: after its first message, one sends a Certificate message of 64 KiB in
//! fragments of one byte, each in a record with the longest padding. Pure: no sockets. The tests of
//! the memory of the whole process use it too.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use aws_lc_rs::aead::{AES_128_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Prk};
use rustls::crypto::{CryptoProvider, aws_lc_rs as crypto};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{
    ClientConfig, ClientConnection, KeyLog, RootCertStore, ServerConfig, ServerConnection,
};

/// The content of a record with the longest padding.
pub(crate) const PADDED: usize = 16 * 1024 + 1;
/// The number of records that do not exceed the limit of a handshake, with its first messages.
pub(crate) const ALLOWED: usize = 5;

/// The secrets of the handshakes of one peer.
#[derive(Debug, Default)]
struct Secrets(Mutex<HashMap<String, Vec<u8>>>);

impl KeyLog for Secrets {
    fn log(&self, label: &str, _: &[u8], secret: &[u8]) {
        self.0
            .lock()
            .unwrap()
            .insert(label.to_owned(), secret.to_owned());
    }
}

struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

/// The records of a Certificate message with one byte each, under the handshake key of one side.
pub(crate) struct Fragments {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    pub sequence: u64,
}

impl Fragments {
    fn new(secrets: &Secrets, side: &str) -> Self {
        let label = format!("{side}_HANDSHAKE_TRAFFIC_SECRET");
        let secret = Prk::new_less_safe(HKDF_SHA256, &secrets.0.lock().unwrap()[&label]);
        // HKDF-Expand-Label (RFC 8446, section 7.1).
        let expand = |label: &[u8], out: &mut [u8]| {
            let length = [0, out.len() as u8, 6 + label.len() as u8];
            let info = [&length[..], b"tls13 ", label, &[0]];
            let expanded = secret.expand(&info, Length(out.len()));
            expanded.unwrap().fill(out).unwrap();
        };
        let (mut key, mut iv) = ([0; 16], [0; NONCE_LEN]);
        expand(b"key", &mut key);
        expand(b"iv", &mut iv);
        Self {
            key: LessSafeKey::new(UnboundKey::new(&AES_128_GCM, &key).unwrap()),
            iv,
            sequence: 0,
        }
    }

    pub fn next(&mut self) -> Vec<u8> {
        let mut content = vec![0; PADDED];
        // Certificate, and its length; then zeros.
        let message = [11, 0, 0xff, 0xff];
        content[0] = message.get(self.sequence as usize).copied().unwrap_or(0);
        content[1] = 22;
        self.seal(content)
    }

    /// Protects a content and its type.
    pub fn seal(&mut self, mut content: Vec<u8>) -> Vec<u8> {
        let [high, low] = u16::try_from(content.len() + 16).unwrap().to_be_bytes();
        let header = [23, 3, 3, high, low];
        let mut nonce = self.iv;
        let number = self.sequence.to_be_bytes();
        nonce[4..]
            .iter_mut()
            .zip(number)
            .for_each(|(byte, other)| *byte ^= other);
        self.sequence += 1;
        let (nonce, aad) = (Nonce::assume_unique_for_key(nonce), Aad::from(header));
        self.key
            .seal_in_place_append_tag(nonce, aad, &mut content)
            .unwrap();
        [&header[..], &content].concat()
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider {
        cipher_suites: vec![crypto::cipher_suite::TLS13_AES_128_GCM_SHA256],
        ..crypto::default_provider()
    })
}

/// A client that sends its Certificate message in fragments.
pub(crate) struct HostileClient {
    tls: ClientConnection,
    secrets: Arc<Secrets>,
}

impl HostileClient {
    pub fn new(alpn: &[u8]) -> Self {
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        let secrets = Arc::<Secrets>::default();
        config.key_log = secrets.clone();
        config.alpn_protocols = vec![alpn.to_vec()];
        config.enable_sni = false;
        let name = ServerName::try_from("cart").unwrap();
        let tls = ClientConnection::new(Arc::new(config), name).unwrap();
        Self { tls, secrets }
    }

    /// The ClientHello.
    pub fn hello(&mut self) -> Vec<u8> {
        let mut hello = Vec::new();
        self.tls.write_tls(&mut hello).unwrap();
        hello
    }

    /// The fragments, if the ServerHello has arrived.
    pub fn receive(&mut self, bytes: &[u8]) -> Option<Fragments> {
        self.tls.read_tls(&mut &bytes[..]).unwrap();
        // Fails: it trusts no certificate.
        let _ = self.tls.process_new_packets();
        let has_keys = !self.secrets.0.lock().unwrap().is_empty();
        has_keys.then(|| Fragments::new(&self.secrets, "CLIENT"))
    }
}

/// A server that sends its Certificate message in fragments.
pub(crate) struct HostileServer {
    tls: ServerConnection,
    secrets: Arc<Secrets>,
}

impl HostileServer {
    pub fn new(alpn: &[u8], certificate: CertificateDer<'static>, key: Vec<u8>) -> Self {
        let key = PrivateKeyDer::try_from(key).unwrap();
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .unwrap();
        let secrets = Arc::<Secrets>::default();
        config.key_log = secrets.clone();
        config.alpn_protocols = vec![alpn.to_vec()];
        let tls = ServerConnection::new(Arc::new(config)).unwrap();
        Self { tls, secrets }
    }

    /// The ServerHello and the fragments, if the ClientHello has arrived.
    pub fn receive(&mut self, bytes: &[u8]) -> Option<(Vec<u8>, Fragments)> {
        self.tls.read_tls(&mut &bytes[..]).unwrap();
        self.tls.process_new_packets().unwrap();
        let mut flight = Vec::new();
        while self.tls.wants_write() {
            self.tls.write_tls(&mut flight).unwrap();
        }
        let length = flight.get(3..5)?;
        flight.truncate(5 + usize::from(u16::from_be_bytes([length[0], length[1]])));
        Some((flight, Fragments::new(&self.secrets, "SERVER")))
    }
}
