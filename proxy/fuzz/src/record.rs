//! TLS record protection: arbitrary input, and records sealed by a malicious peer.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use diy_mesh_proxy::secure::tls::record::{
    Alert, ContentType, MAX_PLAINTEXT, OVERHEAD, Opener, RecordError, Sealer, split_record,
};
use rustls::ConnectionTrafficSecrets;
use rustls::crypto::cipher::{AeadKey, Iv};

const KEY: [u8; 32] = [7; 32];
const IV: [u8; NONCE_LEN] = [9; NONCE_LEN];
const HEADER: usize = 5;
const TAG: usize = 16;
/// Maximum length of a record (RFC 8446, section 5.2).
const MAX_RECORD: usize = HEADER + MAX_PLAINTEXT + 256;

/// Checks arbitrary bytes as input, as plaintext and as content of a sealed record.
pub fn record(bytes: &[u8]) {
    splits_incrementally(bytes);
    rejects_forged_records(bytes);
    opens_own_records(bytes);
    opens_records_of_a_peer(bytes);
}

/// Every prefix gives the same record as the whole input, or is incomplete.
fn splits_incrementally(bytes: &[u8]) {
    let whole = split_record(bytes);
    match whole {
        Ok(Some((record, rest))) => {
            assert_eq!([record, rest].concat(), bytes);
            assert!((HEADER..=MAX_RECORD).contains(&record.len()));
        }
        Ok(None) => assert!(bytes.len() < MAX_RECORD),
        Err(_) => {}
    }
    for length in (0..bytes.len()).step_by(1 + bytes.len() / 256) {
        match (split_record(&bytes[..length]), whole) {
            (Ok(None), _) => {}
            (Ok(Some((early, _))), Ok(Some((record, _)))) => assert_eq!(early, record),
            (early, whole) => assert_eq!(early.err(), whole.err(), "at {length} bytes"),
        }
    }
}

/// Records that were not sealed with the key do not open.
fn rejects_forged_records(mut bytes: &[u8]) {
    let mut opener = opener();
    let mut out = vec![0; bytes.len()];
    while let Ok(Some((record, rest))) = split_record(bytes) {
        assert!(opener.open(record, &mut out).is_err());
        bytes = rest;
    }
}

/// A sealed record opens once and unmodified.
fn opens_own_records(bytes: &[u8]) {
    let Some((&first, plain)) = bytes.split_first() else {
        return;
    };
    let plain = &plain[..plain.len().min(MAX_PLAINTEXT)];
    let kind = [
        ContentType::Alert,
        ContentType::Handshake,
        ContentType::ApplicationData,
    ][usize::from(first) % 3];
    let mut sealer = Sealer::new(0, &secrets()).expect("a TLS 1.3 cipher suite");
    let mut record = vec![0; plain.len() + OVERHEAD];
    assert_eq!(sealer.seal(kind, plain, &mut record), Ok(record.len()));
    assert_eq!(split_record(&record), Ok(Some((&record[..], &[][..]))));
    let (mut opener, mut out) = (opener(), vec![0; record.len()]);
    if plain.is_empty() && kind != ContentType::ApplicationData {
        assert_eq!(
            opener
                .open(&record, &mut out)
                .map_err(|RecordError(alert, _)| alert),
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

/// Content type and padding of a sealed record are parsed as in RFC 8446, section 5.4.
fn opens_records_of_a_peer(bytes: &[u8]) {
    let inner = &bytes[..bytes.len().min(MAX_RECORD - HEADER - TAG)];
    let [high, low] = u16::try_from(inner.len() + TAG)
        .expect("at most a record")
        .to_be_bytes();
    let head = [ContentType::ApplicationData as u8, 3, 3, high, low];
    let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &KEY).expect("a valid key length"));
    let mut sealed = inner.to_vec();
    key.seal_in_place_append_tag(
        Nonce::assume_unique_for_key(IV),
        Aad::from(head),
        &mut sealed,
    )
    .expect("enough room");
    let record = [&head[..], &sealed].concat();
    let mut out = vec![0; record.len()];
    let opened = opener().open(&record, &mut out);
    let content = inner.iter().rposition(|byte| *byte != 0);
    let kind = content.and_then(|at| {
        [
            ContentType::Alert,
            ContentType::Handshake,
            ContentType::ApplicationData,
        ]
        .into_iter()
        .find(|kind| *kind as u8 == inner[at])
    });
    match (content, kind) {
        (Some(at), _) if at > MAX_PLAINTEXT => assert_eq!(
            opened.map_err(|RecordError(alert, _)| alert),
            Err(Alert::RecordOverflow)
        ),
        (Some(at), Some(kind)) if at > 0 || kind == ContentType::ApplicationData => {
            assert_eq!(opened, Ok((kind, at)));
            assert_eq!(out[..at], inner[..at]);
        }
        _ => assert_eq!(
            opened.map_err(|RecordError(alert, _)| alert),
            Err(Alert::UnexpectedMessage)
        ),
    }
}

fn opener() -> Opener {
    Opener::new(0, &secrets()).expect("a TLS 1.3 cipher suite")
}

fn secrets() -> ConnectionTrafficSecrets {
    ConnectionTrafficSecrets::Aes256Gcm {
        key: AeadKey::from(KEY),
        iv: Iv::new(IV),
    }
}
