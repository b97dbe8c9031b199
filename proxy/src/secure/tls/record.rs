//! TLS 1.3 record protection (RFC 8446, section 5): seals and opens records from one buffer into
//! another, without further copies. Servers outside of the mesh may select TLS 1.2, whose records
//! have another form (RFC 5246, section 6.2.3.3; RFC 5288; RFC 7905). Pure: no sockets. The handshake
//! (`handshake.rs`) provides the keys, the session (`session.rs`) interprets the content.

use aws_lc_rs::aead::{
    AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey,
};
use rustls::ConnectionTrafficSecrets;

/// Maximum length of the plaintext of one record.
pub const MAX_PLAINTEXT: usize = 16 * 1024;
/// Bytes that sealing adds to the plaintext: header, content type, tag.
pub const OVERHEAD: usize = HEADER + 1 + TAG;
const HEADER: usize = 5;
const TAG: usize = 16;
/// The part of the nonce that AES-GCM records of TLS 1.2 have (RFC 5288, section 3).
const EXPLICIT_NONCE: usize = 8;
/// Maximum length after the header (section 5.2).
const MAX_CIPHERTEXT: usize = MAX_PLAINTEXT + 256;

/// Maximum number of records sealed with one key. The limit of AES-GCM is 2^24.5 (section 5.5).
const MAX_RECORDS_PER_KEY: u64 = 1 << 23;

/// Content type of a record (section 5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ContentType {
    /// An alert.
    Alert = 21,
    /// A post-handshake message: key updates, tickets.
    Handshake = 22,
    /// Application data. The header of every protected record of TLS 1.3 has this type.
    ApplicationData = 23,
}

impl ContentType {
    fn parse(byte: u8) -> Result<Self, RecordError> {
        let mut all = [Self::Alert, Self::Handshake, Self::ApplicationData].into_iter();
        let known = all.find(|content_type| *content_type as u8 == byte);
        known.ok_or(RecordError(
            Alert::UnexpectedMessage,
            "record of unknown content type",
        ))
    }
}

/// An invalid record: the alert to send to the peer, and a description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordError(pub Alert, pub &'static str);

/// Alerts that the proxy sends (section 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Alert {
    /// The sender closes its direction.
    CloseNotify = 0,
    /// An unexpected message.
    UnexpectedMessage = 10,
    /// Decryption failed.
    BadRecordMac = 20,
    /// A record exceeds the maximum length.
    RecordOverflow = 22,
    /// A message cannot be parsed.
    DecodeError = 50,
    /// An error of the proxy.
    InternalError = 80,
}

/// Key of one direction and its sequence number.
struct Key {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    sequence: u64,
    /// In TLS 1.2, the number of nonce bytes in each record.
    tls12: Option<usize>,
}

impl Key {
    fn new(sequence: u64, secrets: &ConnectionTrafficSecrets) -> Option<Self> {
        let (algorithm, key, iv) = match secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => return None,
        };
        let key = LessSafeKey::new(UnboundKey::new(algorithm, key.as_ref()).ok()?);
        Some(Self {
            key,
            iv: iv.as_ref().try_into().ok()?,
            sequence,
            tls12: None,
        })
    }

    /// The same key, for TLS 1.2 if `is_tls12`.
    fn of_version(self, is_tls12: bool) -> Self {
        let explicit = if *self.key.algorithm() == CHACHA20_POLY1305 {
            0
        } else {
            EXPLICIT_NONCE
        };
        Self {
            tls12: is_tls12.then_some(explicit),
            ..self
        }
    }

    /// The additional data that TLS 1.2 authenticates with the next record.
    fn tls12_aad(&self, content_type: u8, length: usize) -> Aad<[u8; 13]> {
        let mut aad = [0; 13];
        aad[..8].copy_from_slice(&self.sequence.to_be_bytes());
        aad[8..11].copy_from_slice(&[content_type, 3, 3]);
        // A record has at most 16 KiB.
        aad[11..].copy_from_slice(&(length as u16).to_be_bytes());
        Aad::from(aad)
    }

    /// Nonce of the next record: sequence number XOR IV (section 5.3). Unique per key.
    fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, number) in nonce[NONCE_LEN - 8..]
            .iter_mut()
            .zip(self.sequence.to_be_bytes())
        {
            *byte ^= number;
        }
        self.sequence += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

/// Seals outgoing records.
pub struct Sealer {
    key: Key,
    max_records: u64,
}

impl Sealer {
    /// A sealer that continues at a sequence number. `None` for cipher suites other than AES-GCM and
    /// ChaCha20-Poly1305.
    pub fn new(sequence: u64, secrets: &ConnectionTrafficSecrets) -> Option<Self> {
        Some(Self {
            key: Key::new(sequence, secrets)?,
            max_records: MAX_RECORDS_PER_KEY,
        })
    }

    /// The same one, for TLS 1.2 if `is_tls12`.
    pub fn of_version(self, is_tls12: bool) -> Self {
        Self {
            key: self.key.of_version(is_tls12),
            ..self
        }
    }

    /// Whether the key must be replaced before further data.
    pub fn needs_key_update(&self) -> bool {
        self.key.sequence >= self.max_records
    }

    /// Seals one record into the beginning of `out` and returns its length. `plaintext` has at most
    /// [`MAX_PLAINTEXT`] bytes.
    pub fn seal(
        &mut self,
        content_type: ContentType,
        plaintext: &[u8],
        out: &mut [u8],
    ) -> Result<usize, RecordError> {
        const FAILED: RecordError = RecordError(Alert::InternalError, "failed to seal a record");
        let inner = [content_type as u8];
        // The header, the nonce in the record, and the content type after the plaintext.
        let (outer, explicit, inner): (_, _, &[u8]) = match self.key.tls12 {
            None => (ContentType::ApplicationData, 0, &inner),
            Some(explicit) => (content_type, explicit, &[]),
        };
        let length = HEADER + explicit + plaintext.len() + inner.len() + TAG;
        let (header, rest) = out
            .get_mut(..length)
            .and_then(|out| out.split_first_chunk_mut::<HEADER>())
            .ok_or(FAILED)?;
        let [high, low] = u16::try_from(length - HEADER)
            .map_err(|_| FAILED)?
            .to_be_bytes();
        *header = [outer as u8, 3, 3, high, low];
        let aad13 = Aad::from(*header);
        let aad12 = (self.key.tls12).map(|_| self.key.tls12_aad(outer as u8, plaintext.len()));
        let nonce = self.key.nonce();
        let (nonce_of_record, rest) = rest.split_at_mut(explicit);
        nonce_of_record.copy_from_slice(&nonce.as_ref()[NONCE_LEN - explicit..]);
        let (sealed, last) = rest.split_at_mut(plaintext.len());
        let key = &self.key.key;
        let result = match aad12 {
            None => key.seal_out_of_place_scatter(nonce, aad13, plaintext, sealed, inner, last),
            Some(aad) => key.seal_out_of_place_scatter(nonce, aad, plaintext, sealed, inner, last),
        };
        result.map_err(|_| FAILED)?;
        Ok(length)
    }

    /// Requires a key update after `records` further records.
    #[cfg(test)]
    pub fn limit_records(&mut self, records: u64) {
        self.max_records = self.key.sequence + records;
    }
}

/// Opens incoming records.
pub struct Opener(Key);

impl Opener {
    /// An opener that continues at a sequence number. `None` for cipher suites other than AES-GCM and
    /// ChaCha20-Poly1305.
    pub fn new(sequence: u64, secrets: &ConnectionTrafficSecrets) -> Option<Self> {
        Key::new(sequence, secrets).map(Self)
    }

    /// The same one, for TLS 1.2 if `is_tls12`.
    pub fn of_version(self, is_tls12: bool) -> Self {
        Self(self.0.of_version(is_tls12))
    }

    /// Splits the first record off `bytes`. `None` if it is incomplete. The header of a record of TLS
    /// 1.2 has its content type.
    pub fn split<'a>(&self, bytes: &'a [u8]) -> Result<Option<Split<'a>>, RecordError> {
        match bytes.first() {
            Some(21 | 22) if self.0.tls12.is_some() => split_any_record(bytes),
            _ => split_record(bytes),
        }
    }

    /// Opens a record into the beginning of `out` and returns content type and length of the
    /// plaintext.
    pub fn open(
        &mut self,
        record: &[u8],
        out: &mut [u8],
    ) -> Result<(ContentType, usize), RecordError> {
        const DECRYPTION_FAILED: RecordError =
            RecordError(Alert::BadRecordMac, "record decryption failed");
        const TOO_LONG: RecordError =
            RecordError(Alert::RecordOverflow, "record exceeds the maximum length");
        let (header, rest) = record
            .split_first_chunk::<HEADER>()
            .ok_or(DECRYPTION_FAILED)?;
        if let Some(explicit) = self.0.tls12 {
            let (explicit, rest) = rest.split_at_checked(explicit).ok_or(DECRYPTION_FAILED)?;
            let (sealed, tag) = rest.split_last_chunk::<TAG>().ok_or(DECRYPTION_FAILED)?;
            if sealed.len() > MAX_PLAINTEXT {
                return Err(TOO_LONG);
            }
            let out = out.get_mut(..sealed.len()).ok_or(TOO_LONG)?;
            let aad = self.0.tls12_aad(header[0], sealed.len());
            let mut nonce = *self.0.nonce().as_ref();
            nonce[NONCE_LEN - explicit.len()..].copy_from_slice(explicit);
            let nonce = Nonce::assume_unique_for_key(nonce);
            let opened = (self.0.key).open_separate_gather(nonce, aad, sealed, tag, out);
            opened.map_err(|_| DECRYPTION_FAILED)?;
            return Ok((ContentType::parse(header[0])?, sealed.len()));
        }
        let (sealed, tag) = rest.split_last_chunk::<TAG>().ok_or(DECRYPTION_FAILED)?;
        let out = out.get_mut(..sealed.len()).ok_or(TOO_LONG)?;
        let nonce = self.0.nonce();
        self.0
            .key
            .open_separate_gather(nonce, Aad::from(*header), sealed, tag, out)
            .map_err(|_| DECRYPTION_FAILED)?;
        // Zero padding may follow the content type (section 5.4).
        let at = out.iter().rposition(|byte| *byte != 0).ok_or(RecordError(
            Alert::UnexpectedMessage,
            "record without content type",
        ))?;
        if at > MAX_PLAINTEXT {
            return Err(TOO_LONG);
        }
        match ContentType::parse(out[at])? {
            ContentType::Alert | ContentType::Handshake if at == 0 => Err(RecordError(
                Alert::UnexpectedMessage,
                "record with an empty message",
            )),
            content_type => Ok((content_type, at)),
        }
    }
}

/// A record, and the bytes after it.
pub type Split<'a> = (&'a [u8], &'a [u8]);

/// Splits the first record of TLS 1.3 off `bytes`. `None` if it is incomplete.
pub fn split_record(bytes: &[u8]) -> Result<Option<Split<'_>>, RecordError> {
    match bytes.first() {
        Some(content_type) if *content_type != ContentType::ApplicationData as u8 => Err(
            RecordError(Alert::UnexpectedMessage, "record is not protected"),
        ),
        _ => split_any_record(bytes),
    }
}

fn split_any_record(bytes: &[u8]) -> Result<Option<Split<'_>>, RecordError> {
    let Some(([_, _, _, high, low], _)) = bytes.split_first_chunk::<HEADER>() else {
        return Ok(None);
    };
    let length = usize::from(u16::from_be_bytes([*high, *low]));
    if length > MAX_CIPHERTEXT {
        return Err(RecordError(
            Alert::RecordOverflow,
            "record exceeds the maximum length",
        ));
    }
    Ok(bytes.split_at_checked(HEADER + length))
}

#[cfg(test)]
mod tests {
    use rustls::crypto::cipher::{AeadKey, Iv};

    use super::*;

    #[test]
    fn opens_sealed_records_of_tls_1_2() {
        for (sealer, opener) in pairs() {
            let (mut sealer, mut opener) = (sealer.of_version(true), opener.of_version(true));
            for (content_type, length) in [
                (ContentType::ApplicationData, 0),
                (ContentType::ApplicationData, MAX_PLAINTEXT),
                (ContentType::Alert, 2),
            ] {
                let plaintext = vec![7; length];
                let mut record = vec![0; length + 40];
                let sealed = sealer.seal(content_type, &plaintext, &mut record).unwrap();
                record.truncate(sealed);
                assert_eq!(record[0], content_type as u8);
                let (first, rest) = opener.split(&record).unwrap().unwrap();
                assert!(first == record && rest.is_empty());
                let mut out = vec![1; record.len()];
                let opened = opener.open(first, &mut out).unwrap();
                assert_eq!(opened, (content_type, length));
                assert_eq!(&out[..length], plaintext);
            }
            for change in [0, 4, 5, 20, 40] {
                let mut record = vec![0; 100];
                let sealed = sealer.seal(ContentType::ApplicationData, &[1; 64], &mut record);
                record.truncate(sealed.unwrap());
                let mut changed = record.clone();
                changed[change] ^= 1;
                if change == 4 {
                    changed.pop();
                }
                let before = opener.0.sequence;
                let failed = opener.open(&changed, &mut [0; 100]);
                assert_eq!(failed.unwrap_err().0, Alert::BadRecordMac, "byte {change}");
                opener.0.sequence = before;
                opener.open(&record, &mut [0; 100]).unwrap();
            }
            for length in 0..24 {
                assert!(opener.open(&[23; 24][..length], &mut [0; 100]).is_err());
            }
            assert!(opener.split(&[20, 3, 3, 0, 1, 1]).is_err());
        }
    }

    /// Both ends of one direction. Session tests cover the third suite, AES-128.
    fn pairs() -> [(Sealer, Opener); 2] {
        let (iv, key) = (|| Iv::new([9; NONCE_LEN]), || AeadKey::from([7; 32]));
        let aes = ConnectionTrafficSecrets::Aes256Gcm {
            key: key(),
            iv: iv(),
        };
        let chacha = ConnectionTrafficSecrets::Chacha20Poly1305 {
            key: key(),
            iv: iv(),
        };
        [aes, chacha].map(|secrets| {
            (
                Sealer::new(3, &secrets).unwrap(),
                Opener::new(3, &secrets).unwrap(),
            )
        })
    }

    fn seal(sealer: &mut Sealer, content_type: ContentType, plaintext: &[u8]) -> Vec<u8> {
        let mut out = vec![0; plaintext.len() + OVERHEAD];
        assert_eq!(
            sealer.seal(content_type, plaintext, &mut out).unwrap(),
            out.len()
        );
        out
    }

    #[test]
    fn opens_sealed_records() {
        for (mut sealer, mut opener) in pairs() {
            for (content_type, length) in [
                (ContentType::ApplicationData, 0),
                (ContentType::ApplicationData, 1),
                (ContentType::Handshake, 300),
                (ContentType::ApplicationData, MAX_PLAINTEXT),
                (ContentType::Alert, 2),
            ] {
                let plaintext: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
                let record = seal(&mut sealer, content_type, &plaintext);
                let (first, rest) = split_record(&record).unwrap().unwrap();
                assert_eq!((first, rest), (&record[..], &[][..]));
                let mut out = vec![1; record.len()];
                assert_eq!(
                    opener.open(first, &mut out).unwrap(),
                    (content_type, length)
                );
                assert_eq!(&out[..length], plaintext);
            }
        }
    }

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<_> = hex.split_whitespace().flat_map(str::bytes).collect();
        let byte = |pair: &[u8]| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap();
        digits.chunks(2).map(byte).collect()
    }

    /// The application data and the alerts of the handshake in RFC 8448, section 3.
    #[test]
    fn seals_and_opens_the_records_of_rfc_8448() {
        let data: Vec<u8> = (0..50).collect();
        for (key, iv, sequence, records) in [
            (
                "17422dda596ed5d9acd890e3c63f5051",
                "5b78923dee08579033e523d9",
                0,
                [
                    "17 03 03 00 43 a2 3f 70 54 b6 2c 94 d0 af fa fe 82 28 ba 55 cb ef ac ea 42 f9 14
                     aa 66 bc ab 3f 2b 98 19 a8 a5 b4 6b 39 5b d5 4a 9a 20 44 1e 2b 62 97 4e 1f 5a 62
                     92 a2 97 70 14 bd 1e 3d ea e6 3a ee bb 21 69 49 15 e4",
                    "17 03 03 00 13 c9 87 27 60 65 56 66 b7 4d 7f f1 15 3e fd 6d b6 d0 b0 e3",
                ],
            ),
            (
                "9f02283b6c9c07efc26bb9f2ac92e356",
                "cf782b88dd83549aadf1e984",
                1,
                [
                    "17 03 03 00 43 2e 93 7e 11 ef 4a c7 40 e5 38 ad 36 00 5f c4 a4 69 32 fc 32 25 d0
                     5f 82 aa 1b 36 e3 0e fa f9 7d 90 e6 df fc 60 2d cb 50 1a 59 a8 fc c4 9c 4b f2 e5
                     f0 a2 1c 00 47 c2 ab f3 32 54 0d d0 32 e1 67 c2 95 5d",
                    "17 03 03 00 13 b5 8f d6 71 66 eb f5 99 d2 47 20 cf be 7e fa 7a 88 64 a9",
                ],
            ),
        ] {
            let key = || Key {
                key: LessSafeKey::new(UnboundKey::new(&AES_128_GCM, &bytes(key)).unwrap()),
                iv: bytes(iv).try_into().unwrap(),
                sequence,
                tls12: None,
            };
            let (key, mut opener) = (key(), Opener(key()));
            let max_records = MAX_RECORDS_PER_KEY;
            let mut sealer = Sealer { key, max_records };
            let contents = [
                (ContentType::ApplicationData, &data[..]),
                (ContentType::Alert, &[1, 0]),
            ];
            for ((content_type, content), record) in contents.into_iter().zip(records) {
                let record = bytes(record);
                assert_eq!(seal(&mut sealer, content_type, content), record);
                let mut out = vec![0; record.len()];
                let opened = opener.open(&record, &mut out).unwrap();
                assert_eq!(opened, (content_type, content.len()));
                assert_eq!(&out[..content.len()], content);
            }
        }
    }

    #[test]
    fn rejects_modified_replayed_and_reordered_records() {
        for change in [0, 3, 5, 12, 30] {
            for (mut sealer, mut opener) in pairs() {
                let mut record = seal(&mut sealer, ContentType::ApplicationData, b"some bytes");
                record[change] ^= 1;
                assert_eq!(
                    opener.open(&record, &mut [0; 100]).unwrap_err().0,
                    Alert::BadRecordMac,
                    "byte {change}"
                );
            }
        }
        for (mut sealer, mut opener) in pairs() {
            let [first, _, third] = [b"1", b"2", b"3"]
                .map(|plaintext| seal(&mut sealer, ContentType::ApplicationData, plaintext));
            opener.open(&first, &mut [0; 100]).unwrap();
            assert_eq!(
                opener.open(&third, &mut [0; 100]).unwrap_err().0,
                Alert::BadRecordMac
            );
            assert_eq!(
                opener.open(&first, &mut [0; 100]).unwrap_err().0,
                Alert::BadRecordMac
            );
        }
    }

    #[test]
    fn removes_padding_and_rejects_empty_messages() {
        // Seals a plaintext that already has content type and padding.
        for (mut sealer, mut opener) in pairs() {
            let mut record = vec![0; 100];
            let padded = |sealer: &mut Sealer, plaintext: &[u8], record: &mut Vec<u8>| {
                let [high, low] = u16::try_from(plaintext.len() + TAG).unwrap().to_be_bytes();
                let header = [23, 3, 3, high, low];
                *record = [&header[..], plaintext].concat();
                let nonce = sealer.key.nonce();
                let tag = sealer
                    .key
                    .key
                    .seal_in_place_separate_tag(nonce, Aad::from(header), &mut record[HEADER..])
                    .unwrap();
                record.extend_from_slice(tag.as_ref());
            };
            padded(&mut sealer, b"abc\x17\0\0\0\0", &mut record);
            assert_eq!(
                opener.open(&record, &mut [0; 100]).unwrap(),
                (ContentType::ApplicationData, 3)
            );
            padded(&mut sealer, &[0; 20], &mut record);
            assert_eq!(
                opener.open(&record, &mut [0; 100]).unwrap_err().0,
                Alert::UnexpectedMessage
            );
            // Only application data may be empty.
            padded(&mut sealer, b"\x17\0", &mut record);
            assert_eq!(
                opener.open(&record, &mut [0; 100]).unwrap(),
                (ContentType::ApplicationData, 0)
            );
            for content_type in [b"\x15\0", b"\x16\0"] {
                padded(&mut sealer, content_type, &mut record);
                assert_eq!(
                    opener.open(&record, &mut [0; 100]).unwrap_err().0,
                    Alert::UnexpectedMessage
                );
            }
            padded(&mut sealer, b"abc\x63", &mut record);
            assert_eq!(
                opener.open(&record, &mut [0; 100]).unwrap_err().0,
                Alert::UnexpectedMessage
            );
            padded(&mut sealer, &[b'a'; MAX_PLAINTEXT + 2], &mut record);
            assert_eq!(
                opener
                    .open(&record, &mut vec![0; 2 * MAX_PLAINTEXT])
                    .unwrap_err()
                    .0,
                Alert::RecordOverflow
            );
        }
    }

    #[test]
    fn validates_header_before_the_record_is_complete() {
        assert_eq!(split_record(&[23, 3, 3, 0]), Ok(None));
        assert_eq!(split_record(&[23, 3, 3, 0, 2, 1]), Ok(None));
        assert_eq!(
            split_record(&[23, 3, 3, 0, 1, 1, 2]),
            Ok(Some((&[23, 3, 3, 0, 1, 1][..], &[2][..])))
        );
        assert_eq!(
            split_record(&[20, 3, 3, 0, 1, 1]).unwrap_err().0,
            Alert::UnexpectedMessage
        );
        assert_eq!(
            split_record(&[23, 3, 3, 0x41, 1]).unwrap_err().0,
            Alert::RecordOverflow
        );
        let mut rng = fastrand::Rng::with_seed(11);
        for _ in 0..10_000 {
            let mut bytes: Vec<u8> = (0..rng.usize(0..60)).map(|_| rng.u8(..)).collect();
            if let Some(first) = bytes.first_mut() {
                *first = 23;
            }
            if let Ok(Some((record, _))) = split_record(&bytes) {
                assert!(pairs()[0].1.open(record, &mut [0; 64]).is_err());
            }
        }
    }
}
