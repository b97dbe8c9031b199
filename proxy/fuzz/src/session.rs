//! A TLS session after its handshake: data, alerts, tickets and key updates from a peer that has
//! the keys, in any order. The keys are of a real handshake, without a socket. The results of the
//! session must equal the results of a model after RFC 8446.

use std::sync::{Arc, OnceLock};

use bytes::BytesMut;
use diy_mesh_proxy::secure::tls::record::{ContentType, OVERHEAD, Opener, Sealer, split_record};
use diy_mesh_proxy::secure::tls::{Buffered, Kernel, Session};
use rustls::client::{Resumption, UnbufferedClientConnection};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, UnbufferedStatus};
use rustls::{ClientConfig, ExtractedSecrets, RootCertStore, ServerConfig, SupportedCipherSuite};

const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;
const CLOSE_NOTIFY: u8 = 0;
const USER_CANCELED: u8 = 90;
/// The longest message that a session takes.
const MAX_MESSAGE: usize = 64 * 1024;
/// Records without a byte of data that a session takes in a row.
const MAX_RECORDS_WITHOUT_DATA: u32 = 32;

/// The first byte says who is the client, and whether the records come at once; the others are
/// records: kind, length, content.
pub fn session(bytes: &[u8]) {
    let Some((&mode, mut script)) = bytes.split_first() else {
        return;
    };
    let is_client = mode & 1 == 0;
    let (mut session, mut peer) = pair(is_client);
    let mut model = Model {
        is_client,
        ..Model::default()
    };
    let (mut sealed, mut expected, mut failed) = (Vec::new(), Vec::new(), false);
    while let Some((kind, content)) = next_record(&mut script) {
        sealed.extend(peer.seal(kind, content));
        failed |= model.take(kind, content, &mut expected).is_err();
        for _ in 0..std::mem::take(&mut model.updates) {
            peer.take_next_key();
        }
        if mode & 2 == 0 || failed || script.len() < 2 {
            let mut plain = Vec::new();
            let opened = session.open(&std::mem::take(&mut sealed), &mut plain);
            match opened {
                Ok(length) if !failed => assert_eq!(&plain[..length], &expected[..]),
                Ok(_) => panic!(
                    "{kind:?} of {} bytes, which must end the session",
                    content.len()
                ),
                // Whether a ticket is readable is rustls' to say.
                Err(error) => return assert!(failed || model.tickets > 0, "{error}"),
            }
            expected.clear();
        }
    }
    // Both directions have gone on with the same keys.
    if !model.ended && model.message.is_empty() {
        let record = peer.seal(ContentType::ApplicationData, b"in");
        let mut plain = Vec::new();
        let length = session
            .open(&record, &mut plain)
            .expect("the peer's next record");
        assert_eq!(&plain[..length], b"in");
    }
    for asked_for_a_key in [model.asked_for_a_key, false] {
        let mut out = vec![0; 2 * OVERHEAD + 8];
        let length = session
            .seal(ContentType::ApplicationData, b"out", &mut out)
            .expect("room for it");
        assert_eq!(
            peer.open_all(&out[..length]),
            (b"out".to_vec(), u32::from(asked_for_a_key))
        );
    }
}

/// The expected state of a session after its peer's records.
#[derive(Default)]
struct Model {
    is_client: bool,
    ended: bool,
    message: Vec<u8>,
    without_data: u32,
    tickets: u32,
    /// Keys that the peer takes from here on.
    updates: u32,
    /// The session has to take one, too.
    asked_for_a_key: bool,
}

/// The session must end.
struct InvalidRecord;

impl Model {
    fn take(
        &mut self,
        kind: ContentType,
        content: &[u8],
        data: &mut Vec<u8>,
    ) -> Result<(), InvalidRecord> {
        if self.ended {
            return Ok(());
        }
        self.without_data = if kind == ContentType::ApplicationData && !content.is_empty() {
            0
        } else {
            self.without_data + 1
        };
        let is_empty = content.is_empty() && kind != ContentType::ApplicationData;
        let interrupts = !self.message.is_empty() && kind != ContentType::Handshake;
        if is_empty || interrupts || self.without_data > MAX_RECORDS_WITHOUT_DATA {
            return Err(InvalidRecord);
        }
        match (kind, content) {
            (ContentType::ApplicationData, content) => data.extend_from_slice(content),
            (ContentType::Alert, [_, CLOSE_NOTIFY]) => self.ended = true,
            (ContentType::Alert, [_, USER_CANCELED]) => {}
            (ContentType::Alert, _) => return Err(InvalidRecord),
            (ContentType::Handshake, content) => {
                self.message.extend_from_slice(content);
                while self.take_message()? {}
            }
        }
        Ok(())
    }

    /// Whether there was a whole one.
    fn take_message(&mut self) -> Result<bool, InvalidRecord> {
        let &[kind, a, b, c, ref rest @ ..] = &self.message[..] else {
            return Ok(false);
        };
        let length = u32::from_be_bytes([0, a, b, c]) as usize;
        if length > MAX_MESSAGE {
            return Err(InvalidRecord);
        }
        let Some((body, rest)) = rest.split_at_checked(length) else {
            return Ok(false);
        };
        match (kind, body) {
            (NEW_SESSION_TICKET, _) if self.is_client => self.tickets += 1,
            (KEY_UPDATE, [asks @ (0 | 1)]) if rest.is_empty() => {
                self.updates += 1;
                self.asked_for_a_key |= *asks == 1;
            }
            _ => return Err(InvalidRecord),
        }
        self.message = rest.to_vec();
        Ok(true)
    }
}

/// The next record of a script.
fn next_record<'a>(script: &mut &'a [u8]) -> Option<(ContentType, &'a [u8])> {
    let (&[kind, length], rest) = script.split_first_chunk::<2>()?;
    let (content, rest) = rest.split_at(usize::from(length).min(rest.len()));
    *script = rest;
    Some((
        [
            ContentType::ApplicationData,
            ContentType::Handshake,
            ContentType::Alert,
        ][usize::from(kind) % 3],
        content,
    ))
}

/// The other end: it seals whatever the script says.
struct Peer {
    kernel: Kernel,
    sealer: Sealer,
    opener: Opener,
}

impl Peer {
    fn seal(&mut self, kind: ContentType, content: &[u8]) -> Vec<u8> {
        let mut record = vec![0; content.len() + OVERHEAD];
        let length = self
            .sealer
            .seal(kind, content, &mut record)
            .expect("room for it");
        assert_eq!(length, record.len());
        record
    }

    fn take_next_key(&mut self) {
        let (used, secrets) = match &mut self.kernel {
            Kernel::Client(kernel) => kernel.update_tx_secret(),
            Kernel::Server(kernel) => kernel.update_tx_secret(),
        }
        .expect("a next key");
        self.sealer = Sealer::new(used, &secrets).expect("a suite of TLS 1.3");
    }

    /// The data in `sealed`, and how many keys the session has taken.
    fn open_all(&mut self, mut sealed: &[u8]) -> (Vec<u8>, u32) {
        let (mut data, mut updates, mut out) = (Vec::new(), 0, vec![0; sealed.len()]);
        while let Ok(Some((record, rest))) = split_record(sealed) {
            sealed = rest;
            match self
                .opener
                .open(record, &mut out)
                .expect("sealed by the session")
            {
                (ContentType::ApplicationData, length) => data.extend_from_slice(&out[..length]),
                (ContentType::Handshake, length) => {
                    assert_eq!(out[..length], [KEY_UPDATE, 0, 0, 1, 0]);
                    updates += 1;
                    let (used, secrets) = match &mut self.kernel {
                        Kernel::Client(kernel) => kernel.update_rx_secret(),
                        Kernel::Server(kernel) => kernel.update_rx_secret(),
                    }
                    .expect("a next key");
                    self.opener = Opener::new(used, &secrets).expect("a suite of TLS 1.3");
                }
                (ContentType::Alert, _) => panic!("an alert before any end"),
            }
        }
        assert!(sealed.is_empty());
        (data, updates)
    }
}

/// The cipher suites of TLS 1.3.
pub(super) const SUITES: [SupportedCipherSuite; 3] = [
    aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256,
    aws_lc_rs::cipher_suite::TLS13_AES_256_GCM_SHA384,
    aws_lc_rs::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
];

/// Both ends of a connection after its handshake, with one of [`SUITES`].
pub(super) fn established(
    suite: usize,
) -> (UnbufferedClientConnection, UnbufferedServerConnection) {
    let (client, server) = &configs()[suite];
    let name = ServerName::try_from("peer").expect("a name");
    let mut client =
        UnbufferedClientConnection::new(client.clone(), name).expect("a configuration");
    let mut server = UnbufferedServerConnection::new(server.clone()).expect("a configuration");
    let (mut to_client, mut to_server) = (Vec::new(), Vec::new());
    while client.is_handshaking()
        || server.is_handshaking()
        || !to_server.is_empty()
        || !to_client.is_empty()
    {
        while turn(
            |bytes| step(client.process_tls_records(bytes), &mut to_server),
            &mut to_client,
        ) {}
        while turn(
            |bytes| step(server.process_tls_records(bytes), &mut to_client),
            &mut to_server,
        ) {}
    }
    (client, server)
}

/// A session of ours in this role, and its peer.
fn pair(is_client: bool) -> (Session, Peer) {
    let (client, server) = established(0);
    let (client_secrets, client) = client
        .dangerous_into_kernel_connection()
        .expect("a handshake that has ended");
    let (server_secrets, server) = server
        .dangerous_into_kernel_connection()
        .expect("a handshake that has ended");
    let (mut ours, mut theirs) = (
        (client_secrets, Kernel::Client(client)),
        (server_secrets, Kernel::Server(server)),
    );
    if !is_client {
        std::mem::swap(&mut ours, &mut theirs);
    }
    let session = session_of(ours.1, &ours.0);
    let (ExtractedSecrets { tx, rx }, kernel) = theirs;
    let sealer = Sealer::new(tx.0, &tx.1).expect("a suite of TLS 1.3");
    let opener = Opener::new(rx.0, &rx.1).expect("a suite of TLS 1.3");
    (
        session,
        Peer {
            kernel,
            sealer,
            opener,
        },
    )
}

pub(super) fn session_of(kernel: Kernel, secrets: &ExtractedSecrets) -> Session {
    let buffered = Buffered {
        incoming: BytesMut::new(),
        outgoing: BytesMut::new(),
        peer_closed: false,
    };
    Session::new(kernel, secrets, buffered).expect("a suite of TLS 1.3")
}

/// One step with what has come; false once nothing more can be done with it.
fn turn(step: impl FnOnce(&mut [u8]) -> (usize, bool), incoming: &mut Vec<u8>) -> bool {
    let (used, goes_on) = step(incoming);
    incoming.drain(..used);
    goes_on
}

fn step<Data>(status: UnbufferedStatus<'_, '_, Data>, outgoing: &mut Vec<u8>) -> (usize, bool) {
    let UnbufferedStatus { discard, state, .. } = status;
    let goes_on = match state.expect("two ends that agree") {
        ConnectionState::EncodeTlsData(mut data) => {
            if let Err(EncodeError::InsufficientSize(size)) = data.encode(&mut []) {
                let at = outgoing.len();
                outgoing.resize(at + size.required_size, 0);
                data.encode(&mut outgoing[at..]).expect("room for it");
            }
            true
        }
        ConnectionState::TransmitTlsData(data) => {
            data.done();
            true
        }
        _ => false,
    };
    (discard, goes_on)
}

/// For both ends and each suite, made once: the cheapest handshake there is. Tickets are the
/// script's.
fn configs() -> &'static [(Arc<ClientConfig>, Arc<ServerConfig>); 3] {
    static CONFIGS: OnceLock<[(Arc<ClientConfig>, Arc<ServerConfig>); 3]> = OnceLock::new();
    CONFIGS.get_or_init(|| {
        SUITES.map(|suite| {
            let certified = rcgen::generate_simple_self_signed(["peer".to_owned()]).expect("a key");
            let (leaf, key) = (
                certified.cert.der().clone(),
                certified.signing_key.serialize_der(),
            );
            let mut roots = RootCertStore::empty();
            roots.add(leaf.clone()).expect("a certificate");
            let mut provider = aws_lc_rs::default_provider();
            provider.kx_groups = vec![aws_lc_rs::kx_group::X25519];
            provider.cipher_suites = vec![suite];
            let provider = Arc::new(provider);
            let versions = &[&rustls::version::TLS13];
            let client = ClientConfig::builder_with_provider(provider.clone())
                .with_protocol_versions(versions)
                .expect("TLS 1.3");
            let mut client = client.with_root_certificates(roots).with_no_client_auth();
            client.enable_secret_extraction = true;
            client.resumption = Resumption::disabled();
            let server = ServerConfig::builder_with_provider(provider)
                .with_protocol_versions(versions)
                .expect("TLS 1.3");
            let server = server.with_no_client_auth();
            let mut server = server
                .with_single_cert(
                    vec![leaf],
                    PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key)),
                )
                .expect("a key");
            server.enable_secret_extraction = true;
            server.send_tls13_tickets = 0;
            (Arc::new(client), Arc::new(server))
        })
    })
}
