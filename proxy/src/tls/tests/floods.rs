//! Peers that flood a handshake, in both roles: fragments of one byte, each in a record with the
//! longest padding. rustls keeps the records of a message until it is complete.

use std::collections::HashMap;
use std::sync::Mutex;

use aws_lc_rs::aead::{AES_128_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Prk};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, KeyLog, ServerConfig, ServerConnection};

use super::slots::{FLOODER, GATEWAY, Slots};
use super::*;
use crate::identity::ServerVerifier;

/// The content of a record with the longest padding.
const PADDED: usize = 16 * 1024 + 1;
/// The number of records that do not exceed the limit of a handshake, with its first messages.
const ALLOWED: usize = 5;

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
struct Fragments {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    sequence: u64,
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

    fn next(&mut self) -> Vec<u8> {
        let mut content = vec![0; PADDED];
        // Certificate, and its length; then zeros.
        let message = [11, 0, 0xff, 0xff];
        content[0] = message.get(self.sequence as usize).copied().unwrap_or(0);
        content[1] = 22;
        let [high, low] = u16::try_from(PADDED + 16).unwrap().to_be_bytes();
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

    /// Sends this many records.
    async fn send(&mut self, stream: &mut TcpStream, count: usize) -> std::io::Result<()> {
        for _ in 0..count {
            stream.write_all(&self.next()).await?;
        }
        Ok(())
    }
}

/// A client whose handshake has come to its Certificate message.
async fn hostile_client(slots: &Slots, from: [u8; 4]) -> (TcpStream, Fragments) {
    let verifier = ServerVerifier::new(slots.authority.roots(), CART.parse().unwrap());
    let mut config = ClientConfig::builder_with_provider(super::super::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    let secrets = Arc::<Secrets>::default();
    config.key_log = secrets.clone();
    config.alpn_protocols = vec![super::super::Alpn::Http2.name().to_vec()];
    config.enable_sni = false;
    let name = ServerName::try_from("cart").unwrap();
    let mut tls = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = slots.connect(from).await.unwrap();
    let mut hello = Vec::new();
    tls.write_tls(&mut hello).unwrap();
    stream.write_all(&hello).await.unwrap();
    while secrets.0.lock().unwrap().is_empty() {
        let mut bytes = [0; 4096];
        let read = stream.read(&mut bytes).await.unwrap();
        assert!(read > 0, "no ServerHello");
        tls.read_tls(&mut &bytes[..read]).unwrap();
        let _ = tls.process_new_packets();
    }
    (stream, Fragments::new(&secrets, "CLIENT"))
}

/// A server that has sent its ServerHello.
async fn hostile_server(authority: &Authority, mut stream: TcpStream) -> (TcpStream, Fragments) {
    let secrets = Arc::<Secrets>::default();
    let certified = credentials(authority, CART, |_| {}).certified.clone();
    let mut config = ServerConfig::builder_with_provider(super::super::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(certified)));
    config.alpn_protocols = vec![super::super::Alpn::Http2.name().to_vec()];
    config.key_log = secrets.clone();
    let mut tls = ServerConnection::new(Arc::new(config)).unwrap();
    while !tls.wants_write() {
        let mut bytes = [0; 4096];
        let read = stream.read(&mut bytes).await.unwrap();
        tls.read_tls(&mut &bytes[..read]).unwrap();
        tls.process_new_packets().unwrap();
    }
    let mut flight = Vec::new();
    while tls.wants_write() {
        tls.write_tls(&mut flight).unwrap();
    }
    let hello = 5 + usize::from(u16::from_be_bytes([flight[3], flight[4]]));
    stream.write_all(&flight[..hello]).await.unwrap();
    (stream, Fragments::new(&secrets, "SERVER"))
}

async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::task::yield_now().await;
    }
}

#[test]
fn server_bounds_and_charges_the_input_of_a_handshake() {
    on_worker(async {
        let slots = Slots::new(200, "").await;
        let used = || slots.inbound.memory(Direction::Inbound).buffers.used();
        let (mut stream, mut fragments) = hostile_client(&slots, FLOODER).await;
        fragments.send(&mut stream, ALLOWED).await.unwrap();
        until(|| used() > ALLOWED * PADDED).await;
        // The proxy closes the connection, with an error where bytes are unread.
        while fragments.send(&mut stream, 1).await.is_ok() {
            assert!(fragments.sequence < 4000, "the handshake goes on");
        }
        until(|| used() == 0).await;
        let rejected = "failures_total{direction=\"inbound\",code=\"handshake-failed\"} 1";
        let page = slots.inbound.metrics.render();
        assert!(page.contains(rejected), "{page}");
        assert!(
            slots.call(FLOODER).await.is_ok(),
            "the next handshake succeeds"
        );
    });
}

#[test]
fn client_bounds_and_charges_the_input_of_a_handshake() {
    on_worker(async {
        let authority = Authority::new("root");
        let side = Side::new(
            Some(credentials(&authority, WEB, |_| {})),
            "",
            Discovery::off(),
        );
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let used = || side.worker.memory(Direction::Outbound).buffers.used();
        let server = async {
            let (mut stream, mut fragments) =
                hostile_server(&authority, listener.accept().await.unwrap().0).await;
            fragments.send(&mut stream, ALLOWED).await.unwrap();
            until(|| used() > ALLOWED * PADDED).await;
            let flood = fragments.send(&mut stream, 4000).await;
            assert!(flood.is_err(), "the handshake goes on");
        };
        let stream = TcpStream::connect(address).await.unwrap();
        let cart = CART.parse().unwrap();
        let tls = &side.worker.tls;
        let connect = tls.connect(Io::new(stream), address, &cart, super::super::Alpn::Http2);
        let (connected, ()) = tokio::join!(connect, server);
        let failure = connected.err().unwrap().to_string();
        assert!(failure.contains("more than 98304 bytes"), "{failure}");
        assert_eq!(used(), 0);
    });
}

#[test]
fn floods_of_handshakes_stay_within_the_budget() {
    on_worker(async {
        let slots = Slots::with_memory(app().await, 400, 1024 * 1024, "").await;
        let buffers = slots.inbound.memory(Direction::Inbound).buffers.clone();
        let mut held = Vec::new();
        while slots.rejections() == 0 {
            let from = [127, 0, 1, held.len() as u8];
            let (mut stream, mut fragments) = hostile_client(&slots, from).await;
            let before = slots.rejections();
            fragments.send(&mut stream, ALLOWED).await.unwrap();
            held.push(stream);
            let wanted = buffers.limit().min(held.len() * ALLOWED * PADDED);
            until(|| buffers.used() >= wanted || slots.rejections() > before).await;
            assert!(
                buffers.used() <= buffers.limit(),
                "{} bytes",
                buffers.used()
            );
        }
        assert!(held.len() > 2, "{} handshakes", held.len());
        let answer = slots.call_without_tls(GATEWAY).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    });
}
