//! The records of TLS 1.3 (RFC 8446, section 5), sealed and opened from one buffer into another, which is the only copy that is
//! made of them. Pure: reads no socket, and decides nothing about what came. The keys are from the handshake (`handshake.rs`).

use aws_lc_rs::aead::{
    AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey,
};
use rustls::ConnectionTrafficSecrets;

/// The most plain bytes of one record.
pub const MOST_PLAIN: usize = 16 * 1024;
/// What a sealed record has more than its plain bytes: head, kind, tag.
pub const OVERHEAD: usize = HEAD + 1 + TAG;
const HEAD: usize = 5;
const TAG: usize = 16;
/// The longest that may follow a head (section 5.2).
const MOST_SEALED: usize = MOST_PLAIN + 256;

/// Records that one key seals at most: 2^24.5 is the limit of AES-GCM (section 5.5).
const WORN: u64 = 1 << 23;

/// What a record carries. The values are the wire's (section 5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Why a session ends.
    Alert = 21,
    /// What the two ends say to each other: new keys, tickets.
    Handshake = 22,
    /// What they are there for. On the outside all records say so.
    Data = 23,
}

/// What is wrong with a record: the alert that tells the peer, and words that tell people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken(pub Alert, pub &'static str);

/// Alerts that we send. The values are the wire's (section 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Alert {
    /// This side writes no more.
    CloseNotify = 0,
    /// Not now, or never.
    UnexpectedMessage = 10,
    /// Not sealed by the peer's key, or not as the next record.
    BadRecordMac = 20,
    /// Longer than any record may be.
    RecordOverflow = 22,
    /// Not readable.
    DecodeError = 50,
    /// Our own fault.
    InternalError = 80,
}

/// One direction's key and how often it was used.
struct Key {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    used: u64,
}

impl Key {
    fn new(used: u64, secrets: &ConnectionTrafficSecrets) -> Option<Self> {
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
            used,
        })
    }

    /// The number of the record, over the key's own (section 5.3). No two of one key are the same.
    fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, number) in nonce[NONCE_LEN - 8..]
            .iter_mut()
            .zip(self.used.to_be_bytes())
        {
            *byte ^= number;
        }
        self.used += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

/// Seals what this side writes.
pub struct Sealer {
    key: Key,
    most: u64,
}

impl Sealer {
    /// With the key of these secrets, which has sealed so many records. None for a suite that is not one of TLS 1.3's.
    pub fn new(used: u64, secrets: &ConnectionTrafficSecrets) -> Option<Self> {
        Some(Self {
            key: Key::new(used, secrets)?,
            most: WORN,
        })
    }

    /// The key must seal no more but the message that brings the next.
    pub fn is_worn(&self) -> bool {
        self.key.used >= self.most
    }

    /// Writes one record to the beginning of `out`: its length. `plain` is no longer than [`MOST_PLAIN`].
    pub fn seal(&mut self, kind: Kind, plain: &[u8], out: &mut [u8]) -> Result<usize, Broken> {
        const FAILED: Broken = Broken(Alert::InternalError, "a record could not be sealed");
        let length = HEAD + plain.len() + 1 + TAG;
        let (head, rest) = out
            .get_mut(..length)
            .and_then(|out| out.split_first_chunk_mut::<HEAD>())
            .ok_or(FAILED)?;
        let [high, low] = u16::try_from(length - HEAD)
            .map_err(|_| FAILED)?
            .to_be_bytes();
        *head = [Kind::Data as u8, 3, 3, high, low];
        let (sealed, last) = rest.split_at_mut(plain.len());
        let nonce = self.key.nonce();
        self.key
            .key
            .seal_out_of_place_scatter(nonce, Aad::from(*head), plain, sealed, &[kind as u8], last)
            .map_err(|_| FAILED)?;
        Ok(length)
    }

    /// Worn after so many records more.
    #[cfg(test)]
    pub fn wear(&mut self, left: u64) {
        self.most = self.key.used + left;
    }
}

/// Opens what the peer has written.
pub struct Opener(Key);

impl Opener {
    /// With the key of these secrets, which has opened so many records. None for a suite that is not one of TLS 1.3's.
    pub fn new(used: u64, secrets: &ConnectionTrafficSecrets) -> Option<Self> {
        Key::new(used, secrets).map(Self)
    }

    /// Writes a record's plain bytes to the beginning of `out`: what they are, and how many.
    pub fn open(&mut self, record: &[u8], out: &mut [u8]) -> Result<(Kind, usize), Broken> {
        const FORGED: Broken = Broken(
            Alert::BadRecordMac,
            "a record is not the peer's, or not its next",
        );
        const TOO_LONG: Broken = Broken(Alert::RecordOverflow, "a record is too long");
        let (head, rest) = record.split_first_chunk::<HEAD>().ok_or(FORGED)?;
        let (sealed, tag) = rest.split_last_chunk::<TAG>().ok_or(FORGED)?;
        let out = out.get_mut(..sealed.len()).ok_or(TOO_LONG)?;
        let nonce = self.0.nonce();
        self.0
            .key
            .open_separate_gather(nonce, Aad::from(*head), sealed, tag, out)
            .map_err(|_| FORGED)?;
        // Zeros may follow the kind, to hide the length (section 5.4).
        let at = out
            .iter()
            .rposition(|byte| *byte != 0)
            .ok_or(Broken(Alert::UnexpectedMessage, "a record carries nothing"))?;
        if at > MOST_PLAIN {
            return Err(TOO_LONG);
        }
        let kind = [Kind::Alert, Kind::Handshake, Kind::Data]
            .into_iter()
            .find(|kind| *kind as u8 == out[at]);
        match kind.ok_or(Broken(
            Alert::UnexpectedMessage,
            "a record carries something unknown",
        ))? {
            Kind::Alert | Kind::Handshake if at == 0 => Err(Broken(
                Alert::UnexpectedMessage,
                "a record carries an empty message",
            )),
            kind => Ok((kind, at)),
        }
    }
}

/// A record, and what follows it.
pub type First<'a> = (&'a [u8], &'a [u8]);

/// The first record of `bytes`; none while it has not fully come.
pub fn split(bytes: &[u8]) -> Result<Option<First<'_>>, Broken> {
    let Some(([outside, _, _, high, low], _)) = bytes.split_first_chunk::<HEAD>() else {
        return Ok(None);
    };
    if *outside != Kind::Data as u8 {
        return Err(Broken(Alert::UnexpectedMessage, "a record is not sealed"));
    }
    let length = usize::from(u16::from_be_bytes([*high, *low]));
    if length > MOST_SEALED {
        return Err(Broken(Alert::RecordOverflow, "a record is too long"));
    }
    Ok(bytes.split_at_checked(HEAD + length))
}

#[cfg(test)]
mod tests {
    use rustls::crypto::cipher::{AeadKey, Iv};

    use super::*;

    /// Both ends of one direction. The third suite, AES-128, is the one that sessions use: see their tests.
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

    fn seal(sealer: &mut Sealer, kind: Kind, plain: &[u8]) -> Vec<u8> {
        let mut out = vec![0; plain.len() + OVERHEAD];
        assert_eq!(sealer.seal(kind, plain, &mut out).unwrap(), out.len());
        out
    }

    #[test]
    fn what_is_sealed_is_opened() {
        for (mut sealer, mut opener) in pairs() {
            for (kind, length) in [
                (Kind::Data, 0),
                (Kind::Data, 1),
                (Kind::Handshake, 300),
                (Kind::Data, MOST_PLAIN),
                (Kind::Alert, 2),
            ] {
                let plain: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
                let record = seal(&mut sealer, kind, &plain);
                let (first, rest) = split(&record).unwrap().unwrap();
                assert_eq!((first, rest), (&record[..], &[][..]));
                let mut out = vec![1; record.len()];
                assert_eq!(opener.open(first, &mut out).unwrap(), (kind, length));
                assert_eq!(&out[..length], plain);
            }
        }
    }

    #[test]
    fn a_record_that_was_changed_repeated_or_left_out_is_not_opened() {
        for change in [0, 3, 5, 12, 30] {
            for (mut sealer, mut opener) in pairs() {
                let mut record = seal(&mut sealer, Kind::Data, b"some bytes");
                record[change] ^= 1;
                assert_eq!(
                    opener.open(&record, &mut [0; 100]).unwrap_err().0,
                    Alert::BadRecordMac,
                    "byte {change}"
                );
            }
        }
        for (mut sealer, mut opener) in pairs() {
            let [first, _, third] =
                [b"1", b"2", b"3"].map(|plain| seal(&mut sealer, Kind::Data, plain));
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
    fn padding_is_dropped_and_what_it_leaves_empty_is_refused_unless_it_is_data() {
        // A kind of its own choice, sealed as the last plain byte with zeros after it, is what a peer that pads would send.
        for (mut sealer, mut opener) in pairs() {
            let mut record = vec![0; 100];
            let padded = |sealer: &mut Sealer, plain: &[u8], record: &mut Vec<u8>| {
                let [high, low] = u16::try_from(plain.len() + TAG).unwrap().to_be_bytes();
                let head = [23, 3, 3, high, low];
                *record = [&head[..], plain].concat();
                let nonce = sealer.key.nonce();
                let tag = sealer
                    .key
                    .key
                    .seal_in_place_separate_tag(nonce, Aad::from(head), &mut record[HEAD..])
                    .unwrap();
                record.extend_from_slice(tag.as_ref());
            };
            padded(&mut sealer, b"abc\x17\0\0\0\0", &mut record);
            assert_eq!(
                opener.open(&record, &mut [0; 100]).unwrap(),
                (Kind::Data, 3)
            );
            padded(&mut sealer, &[0; 20], &mut record);
            assert_eq!(
                opener.open(&record, &mut [0; 100]).unwrap_err().0,
                Alert::UnexpectedMessage
            );
            // Only data may be empty.
            padded(&mut sealer, b"\x17\0", &mut record);
            assert_eq!(
                opener.open(&record, &mut [0; 100]).unwrap(),
                (Kind::Data, 0)
            );
            for kind in [b"\x15\0", b"\x16\0"] {
                padded(&mut sealer, kind, &mut record);
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
            padded(&mut sealer, &[b'a'; MOST_PLAIN + 2], &mut record);
            assert_eq!(
                opener
                    .open(&record, &mut vec![0; 2 * MOST_PLAIN])
                    .unwrap_err()
                    .0,
                Alert::RecordOverflow
            );
        }
    }

    #[test]
    fn heads_are_looked_at_before_anything_is_waited_for() {
        assert_eq!(split(&[23, 3, 3, 0]), Ok(None));
        assert_eq!(split(&[23, 3, 3, 0, 2, 1]), Ok(None));
        assert_eq!(
            split(&[23, 3, 3, 0, 1, 1, 2]),
            Ok(Some((&[23, 3, 3, 0, 1, 1][..], &[2][..])))
        );
        assert_eq!(
            split(&[20, 3, 3, 0, 1, 1]).unwrap_err().0,
            Alert::UnexpectedMessage
        );
        assert_eq!(
            split(&[23, 3, 3, 0x41, 1]).unwrap_err().0,
            Alert::RecordOverflow
        );
        let mut rng = fastrand::Rng::with_seed(11);
        for _ in 0..10_000 {
            let mut bytes: Vec<u8> = (0..rng.usize(0..60)).map(|_| rng.u8(..)).collect();
            if let Some(first) = bytes.first_mut() {
                *first = 23;
            }
            if let Ok(Some((record, _))) = split(&bytes) {
                assert!(pairs()[0].1.open(record, &mut [0; 64]).is_err());
            }
        }
    }
}
