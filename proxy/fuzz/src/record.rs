//! TLS records after the handshake: those of anybody, and those that a peer has sealed who means ill.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use diy_mesh_proxy::tls::record::{
    Alert, Broken, Kind, MOST_PLAIN, OVERHEAD, Opener, Sealer, split,
};
use rustls::ConnectionTrafficSecrets;
use rustls::crypto::cipher::{AeadKey, Iv};

const KEY: [u8; 32] = [7; 32];
const IV: [u8; NONCE_LEN] = [9; NONCE_LEN];
const HEAD: usize = 5;
const TAG: usize = 16;
/// The longest that a record may be (RFC 8446, section 5.2).
const LONGEST: usize = HEAD + MOST_PLAIN + 256;

/// What came over the socket; and what a peer has sealed.
pub fn record(bytes: &[u8]) {
    comes_by_pieces(bytes);
    forged(bytes);
    sealed_by_us(bytes);
    sealed_by_the_peer(bytes);
}

/// Where a record ends is told by its first bytes, which wait for no more than a record.
fn comes_by_pieces(bytes: &[u8]) {
    let whole = split(bytes);
    match whole {
        Ok(Some((record, rest))) => {
            assert_eq!([record, rest].concat(), bytes);
            assert!((HEAD..=LONGEST).contains(&record.len()));
        }
        Ok(None) => assert!(bytes.len() < LONGEST),
        Err(_) => {}
    }
    for length in (0..bytes.len()).step_by(1 + bytes.len() / 256) {
        match (split(&bytes[..length]), whole) {
            (Ok(None), _) => {}
            (Ok(Some((early, _))), Ok(Some((record, _)))) => assert_eq!(early, record),
            (early, whole) => assert_eq!(early.err(), whole.err(), "at {length} bytes"),
        }
    }
}

/// Nothing is opened that was not sealed with the key.
fn forged(mut bytes: &[u8]) {
    let mut opener = opener();
    let mut out = vec![0; bytes.len()];
    while let Ok(Some((record, rest))) = split(bytes) {
        assert!(opener.open(record, &mut out).is_err());
        bytes = rest;
    }
}

/// What is sealed is opened, once, and only as it was sealed.
fn sealed_by_us(bytes: &[u8]) {
    let Some((&first, plain)) = bytes.split_first() else {
        return;
    };
    let plain = &plain[..plain.len().min(MOST_PLAIN)];
    let kind = [Kind::Alert, Kind::Handshake, Kind::Data][usize::from(first) % 3];
    let mut sealer = Sealer::new(0, &secrets()).expect("a suite of TLS 1.3");
    let mut record = vec![0; plain.len() + OVERHEAD];
    assert_eq!(sealer.seal(kind, plain, &mut record), Ok(record.len()));
    assert_eq!(split(&record), Ok(Some((&record[..], &[][..]))));
    let (mut opener, mut out) = (opener(), vec![0; record.len()]);
    if plain.is_empty() && kind != Kind::Data {
        assert_eq!(
            opener
                .open(&record, &mut out)
                .map_err(|Broken(alert, _)| alert),
            Err(Alert::UnexpectedMessage)
        );
        return;
    }
    assert_eq!(opener.open(&record, &mut out), Ok((kind, plain.len())));
    assert_eq!(&out[..plain.len()], plain);
    assert!(opener.open(&record, &mut out).is_err(), "opened twice");
    let at = usize::from(first) % record.len();
    record[at] ^= 1;
    assert!(
        self::opener().open(&record, &mut out).is_err(),
        "byte {at} was changed"
    );
}

/// A record of the peer's own making: what is in it is looked at as it stands in RFC 8446, section 5.4.
fn sealed_by_the_peer(bytes: &[u8]) {
    let inside = &bytes[..bytes.len().min(LONGEST - HEAD - TAG)];
    let [high, low] = u16::try_from(inside.len() + TAG)
        .expect("no longer than a record")
        .to_be_bytes();
    let head = [Kind::Data as u8, 3, 3, high, low];
    let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &KEY).expect("a key's length"));
    let mut sealed = inside.to_vec();
    key.seal_in_place_append_tag(
        Nonce::assume_unique_for_key(IV),
        Aad::from(head),
        &mut sealed,
    )
    .expect("room for all of it");
    let record = [&head[..], &sealed].concat();
    let mut out = vec![0; record.len()];
    let opened = opener().open(&record, &mut out);
    let content = inside.iter().rposition(|byte| *byte != 0);
    let kind = content.and_then(|at| {
        [Kind::Alert, Kind::Handshake, Kind::Data]
            .into_iter()
            .find(|kind| *kind as u8 == inside[at])
    });
    match (content, kind) {
        (Some(at), _) if at > MOST_PLAIN => assert_eq!(
            opened.map_err(|Broken(alert, _)| alert),
            Err(Alert::RecordOverflow)
        ),
        (Some(at), Some(kind)) if at > 0 || kind == Kind::Data => {
            assert_eq!(opened, Ok((kind, at)));
            assert_eq!(out[..at], inside[..at]);
        }
        _ => assert_eq!(
            opened.map_err(|Broken(alert, _)| alert),
            Err(Alert::UnexpectedMessage)
        ),
    }
}

fn opener() -> Opener {
    Opener::new(0, &secrets()).expect("a suite of TLS 1.3")
}

fn secrets() -> ConnectionTrafficSecrets {
    ConnectionTrafficSecrets::Aes256Gcm {
        key: AeadKey::from(KEY),
        iv: Iv::new(IV),
    }
}
