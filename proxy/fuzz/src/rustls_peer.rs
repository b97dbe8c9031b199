//! A TLS session after its handshake, with rustls at the other end: both ends must agree on every
//! byte, in both directions, across key updates, and until one of them closes. A record that was
//! changed on its way ends both.

use diy_mesh_proxy::secure::tls::record::{ContentType, MAX_PLAINTEXT, OVERHEAD};
use diy_mesh_proxy::secure::tls::{Kernel, Session};
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, UnbufferedStatus};

use crate::session::{SUITES, established, session_of};

/// Key updates without data in between, of which both ends take 32.
const MAX_KEY_UPDATES: u8 = 16;

/// The data of a record that is changed.
const DATA: &[u8] = b"data";
/// The length of the authentication tag.
const TAG: usize = 16;

/// The first byte selects the client and the cipher suite. Each other three bytes are a step: what
/// happens, and the length of the data or the place of a changed byte.
pub fn rustls_peer(bytes: &[u8]) {
    let Some((&role, script)) = bytes.split_first() else {
        return;
    };
    let (mut session, mut peer) = pair(role & 1 == 0, usize::from(role >> 1) % SUITES.len());
    let (mut key_updates, mut number) = (0, 0);
    for step in script.chunks_exact(3) {
        let length = usize::from(u16::from_be_bytes([step[1], step[2]]));
        // No two pieces of data are alike.
        number += 1;
        let data: Vec<u8> = (1..=length).map(|at| (at * number % 251) as u8).collect();
        match step[0] % 6 {
            0 | 1 if length > 0 => {
                key_updates = 0;
                let mut records = peer.seal(&data);
                assert_eq!(opened(&mut session, &mut records), Some(data));
            }
            2 | 3 => {
                let mut records = sealed(&mut session, &data);
                let received = peer.receive(&mut records).expect("records of the session");
                assert_eq!(received, (data, false));
            }
            4 if key_updates < MAX_KEY_UPDATES => {
                key_updates += 1;
                let mut records = peer.update_key();
                assert_eq!(opened(&mut session, &mut records), Some(Vec::new()));
            }
            5 if length % 2 == 0 => return close(session, peer),
            5 => return change(session, peer, length),
            _ => {}
        }
    }
}

/// The session seals an alert, after which rustls sees the end.
fn close(mut session: Session, mut peer: Peer) {
    let mut records = vec![0; 2 * OVERHEAD + 8];
    let length = session
        .seal(ContentType::Alert, &[1, 0], &mut records)
        .expect("room for it");
    records.truncate(length);
    let received = peer.receive(&mut records).expect("an alert of the session");
    assert_eq!(received, (Vec::new(), true));
}

/// Both ends reject a record in which one bit differs.
fn change(mut session: Session, mut peer: Peer, place: usize) {
    let (mut to_peer, mut to_session) = (sealed(&mut session, DATA), peer.seal(DATA));
    for records in [&mut to_peer, &mut to_session] {
        // Not the header: without its length, the record would be incomplete. rustls ignores the
        // rest of it. An answer to a key update may come before the data.
        let changed = records.len() - 1 - place % (DATA.len() + 1 + TAG);
        records[changed] ^= 1 << (place % 7);
    }
    assert_eq!(opened(&mut session, &mut to_session), None, "{place}");
    assert!(peer.receive(&mut to_peer).is_err(), "{place}");
}

fn sealed(session: &mut Session, data: &[u8]) -> Vec<u8> {
    let (mut records, mut filled) = (vec![0; data.len() + 8 * OVERHEAD], 0);
    for piece in data.chunks(MAX_PLAINTEXT) {
        filled += session
            .seal(ContentType::ApplicationData, piece, &mut records[filled..])
            .expect("room for it");
    }
    records.truncate(filled);
    records
}

/// The plaintext that the session reads from complete records, or `None` if it rejects them.
fn opened(session: &mut Session, records: &mut [u8]) -> Option<Vec<u8>> {
    let mut plain = Vec::new();
    let length = session.open(records, &mut plain).ok()?;
    plain.truncate(length);
    Some(plain)
}

/// rustls, in the role that the session has not.
enum Peer {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

fn pair(is_client: bool, suite: usize) -> (Session, Peer) {
    let (client, server) = established(suite);
    let kept = "a handshake that has ended";
    if is_client {
        let (secrets, kernel) = client.dangerous_into_kernel_connection().expect(kept);
        let session = session_of(Kernel::Client(kernel), &secrets);
        (session, Peer::Server(server))
    } else {
        let (secrets, kernel) = server.dangerous_into_kernel_connection().expect(kept);
        let session = session_of(Kernel::Server(kernel), &secrets);
        (session, Peer::Client(client))
    }
}

impl Peer {
    /// The data in complete records, and whether the session has closed.
    fn receive(&mut self, records: &mut [u8]) -> Result<(Vec<u8>, bool), rustls::Error> {
        let (mut data, mut used) = (Vec::new(), 0);
        loop {
            let rest = &mut records[used..];
            let (discard, next) = match self {
                Self::Client(client) => take(client.process_tls_records(rest), &mut data)?,
                Self::Server(server) => take(server.process_tls_records(rest), &mut data)?,
            };
            used += discard;
            match next {
                Next::Step => {}
                Next::Blocked | Next::Closed => {
                    assert_eq!(used, records.len());
                    return Ok((data, matches!(next, Next::Closed)));
                }
            }
        }
    }

    fn seal(&mut self, data: &[u8]) -> Vec<u8> {
        match self {
            Self::Client(client) => encrypt(client.process_tls_records(&mut []), data),
            Self::Server(server) => encrypt(server.process_tls_records(&mut []), data),
        }
    }

    fn update_key(&mut self) -> Vec<u8> {
        let records = match self {
            Self::Client(client) => {
                refresh(client.process_tls_records(&mut []));
                encode(client.process_tls_records(&mut []))
            }
            Self::Server(server) => {
                refresh(server.process_tls_records(&mut []));
                encode(server.process_tls_records(&mut []))
            }
        };
        let received = self.receive(&mut []).expect("no records");
        assert_eq!(received, (Vec::new(), false));
        records
    }
}

enum Next {
    Step,
    Blocked,
    Closed,
}

fn take<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    data: &mut Vec<u8>,
) -> Result<(usize, Next), rustls::Error> {
    let UnbufferedStatus {
        mut discard, state, ..
    } = status;
    let next = match state? {
        ConnectionState::ReadTraffic(mut traffic) => {
            while let Some(record) = traffic.next_record() {
                let record = record?;
                discard += record.discard;
                data.extend_from_slice(record.payload);
            }
            Next::Step
        }
        ConnectionState::TransmitTlsData(sent) => {
            sent.done();
            Next::Step
        }
        ConnectionState::WriteTraffic(_) => Next::Blocked,
        ConnectionState::PeerClosed => Next::Closed,
        other => panic!("unexpected state: {other:?}"),
    };
    Ok((discard, next))
}

fn encrypt<Data>(status: UnbufferedStatus<'_, '_, Data>, data: &[u8]) -> Vec<u8> {
    match status.state.expect("an open connection") {
        ConnectionState::WriteTraffic(mut traffic) => {
            let mut records = vec![0; data.len() + 8 * OVERHEAD];
            let length = traffic.encrypt(data, &mut records).expect("room for it");
            records.truncate(length);
            records
        }
        other => panic!("unexpected state: {other:?}"),
    }
}

fn refresh<Data>(status: UnbufferedStatus<'_, '_, Data>) {
    match status.state.expect("an open connection") {
        ConnectionState::WriteTraffic(traffic) => {
            traffic.refresh_traffic_keys().expect("a next key")
        }
        other => panic!("unexpected state: {other:?}"),
    }
}

fn encode<Data>(status: UnbufferedStatus<'_, '_, Data>) -> Vec<u8> {
    let mut records = Vec::new();
    match status.state.expect("an open connection") {
        ConnectionState::EncodeTlsData(mut data) => {
            if let Err(EncodeError::InsufficientSize(size)) = data.encode(&mut []) {
                records.resize(size.required_size, 0);
                data.encode(&mut records).expect("room for it");
            }
        }
        other => panic!("unexpected state: {other:?}"),
    }
    records
}
