//! Trust roots: one set as [`Roots`], the newest set of the process in [`Trust`]. Roots arrive on
//! the discovery stream and with each certificate. Roots from the stream take precedence. Verifies
//! nothing itself.
//!
//! A rotation announces a root before it drops another. If new roots have no root in common with
//! the known ones, the mesh has lost its CA. Peers learn of the new roots at different times, so
//! the former roots stay trusted while peers renew their certificates.

use std::sync::Arc;
use std::time::Duration;

use diy_mesh_proto::mesh::v1 as proto;
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use thiserror::Error;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// Maximum time for which former roots stay trusted.
const MAX_OVERLAP: Duration = Duration::from_secs(600);

/// An invalid set of roots, which is rejected as a whole.
#[derive(Debug, Error)]
pub enum RootsError {
    /// The set is empty.
    #[error("no certificate found, expected PEM")]
    Empty,
    /// The text is not PEM.
    #[error("invalid PEM: {0}")]
    Pem(String),
    /// A certificate cannot be a trust anchor.
    #[error("certificate {number} is not a valid root: {reason}")]
    Anchor {
        /// Position, counted from 1.
        number: usize,
        /// Why it is invalid.
        reason: rustls::Error,
    },
}

/// A set of trust roots.
#[derive(Clone, Debug)]
pub struct Roots {
    /// Version, equal for equal sets.
    pub version: String,
    /// Announced trust anchors.
    pub store: Arc<RootCertStore>,
    /// Trust anchors that verify peers: the announced ones and former ones during an overlap.
    pub trusted: Arc<RootCertStore>,
    /// Current issuer, if the controller announced it.
    pub issuer: Option<Issuer>,
}

/// The certificate authority that issues new certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issuer {
    /// Key identifier, hexadecimal.
    pub id: String,
    /// Time to renew certificates of other issuers. Zero if former roots must not be trusted.
    pub renew_within: Duration,
}

impl Roots {
    /// Parses roots that arrive with a certificate.
    pub fn parse(pem: &[u8], version: &str) -> Result<Self, RootsError> {
        let store = Arc::new(parse_roots(pem)?);
        Ok(Self {
            version: version.to_owned(),
            trusted: store.clone(),
            store,
            issuer: None,
        })
    }

    /// Converts roots of the discovery stream.
    pub fn from_stream(roots: proto::Roots, version: &str) -> Result<Self, RootsError> {
        let renew_within = Duration::from_secs(roots.renew_within_seconds.into());
        let issuer = (!roots.issuer.is_empty()).then_some(Issuer {
            id: roots.issuer,
            renew_within,
        });
        Ok(Self {
            issuer,
            ..Self::parse(&roots.pem, version)?
        })
    }

    /// Whether both sets announce a common trust anchor.
    fn overlaps(&self, other: &Self) -> bool {
        let mut anchors = self.store.roots.iter();
        anchors.any(|anchor| other.store.roots.contains(anchor))
    }
}

/// Parses PEM certificates as trust anchors.
pub fn parse_roots(pem: &[u8]) -> Result<RootCertStore, RootsError> {
    let mut store = RootCertStore::empty();
    for (index, certificate) in CertificateDer::pem_slice_iter(pem).enumerate() {
        let certificate = certificate.map_err(|error| RootsError::Pem(error.to_string()))?;
        store
            .add(certificate)
            .map_err(|reason| RootsError::Anchor {
                number: index + 1,
                reason,
            })?;
    }
    if store.is_empty() {
        Err(RootsError::Empty)
    } else {
        Ok(store)
    }
}

/// The newest roots. Clones share their state.
#[derive(Clone, Debug)]
pub struct Trust(watch::Sender<State>);

#[derive(Debug, Default)]
struct State {
    roots: Option<Arc<Roots>>,
    /// Whether the roots are from the open discovery stream.
    live: bool,
    /// End of the trust in former roots.
    overlap_end: Option<Instant>,
}

impl State {
    /// Replaces the roots. Former ones stay trusted for the time in which peers renew their
    /// certificates, if they have none in common with the new ones.
    fn replace(&mut self, mut roots: Roots) {
        let issuer = roots.issuer.as_ref();
        let overlap = issuer.map_or(MAX_OVERLAP, |issuer| issuer.renew_within.min(MAX_OVERLAP));
        let (now, before) = (Instant::now(), self.overlap_end.take());
        if let Some(known) = self.roots.take().filter(|_| !overlap.is_zero()) {
            let is_former = |anchor: &&_| !known.store.roots.contains(anchor);
            let former: Vec<_> = if known.overlaps(&roots) {
                known.trusted.roots.iter().filter(is_former).collect()
            } else {
                known.trusted.roots.iter().collect()
            };
            if !former.is_empty() {
                let end = before.filter(|_| known.overlaps(&roots));
                self.overlap_end = Some(end.unwrap_or(now + overlap).min(now + overlap));
                let mut trusted = RootCertStore::clone(&roots.store);
                trusted.roots.extend(former.into_iter().cloned());
                roots.trusted = Arc::new(trusted);
            }
        }
        self.roots = Some(Arc::new(roots));
    }

    /// Ends the trust in former roots.
    fn end_overlap(&mut self) {
        self.overlap_end = None;
        if let Some(roots) = &mut self.roots {
            let mut alone = Roots::clone(roots);
            alone.trusted = alone.store.clone();
            *roots = Arc::new(alone);
        }
    }
}

impl Default for Trust {
    fn default() -> Self {
        Self(watch::Sender::new(State::default()))
    }
}

impl Trust {
    /// Replaces the roots by roots from the discovery stream.
    pub fn set_from_stream(&self, roots: Roots) {
        self.0.send_modify(|state| {
            state.replace(roots);
            state.live = true;
        });
    }

    /// Records that the stream closed: roots that arrive with a certificate are accepted until the
    /// next stream.
    pub fn stream_closed(&self) {
        self.0.send_if_modified(|state| {
            state.live = false;
            false
        });
    }

    /// Replaces the roots by those that arrived with a certificate, unless the current ones are
    /// from an open stream.
    pub fn set_from_certificate(&self, roots: Roots) {
        self.0.send_if_modified(|state| {
            if state.live
                || state
                    .roots
                    .as_ref()
                    .is_some_and(|old| old.version == roots.version)
            {
                return false;
            }
            state.replace(roots);
            true
        });
    }

    /// The newest roots; `None` before the first ones.
    pub fn newest(&self) -> Option<Arc<Roots>> {
        self.0.borrow().roots.clone()
    }

    /// The current issuer; `None` without an open stream.
    pub fn issuer(&self) -> Option<Issuer> {
        let state = self.0.borrow();
        state.roots.as_ref().filter(|_| state.live)?.issuer.clone()
    }

    /// A receiver of changes.
    pub fn changes(&self) -> Changes {
        Changes {
            trust: self.clone(),
            receiver: self.0.subscribe(),
        }
    }
}

/// See [`Trust::changes`].
pub struct Changes {
    trust: Trust,
    receiver: watch::Receiver<State>,
}

impl Changes {
    /// Waits for other roots than at the previous call, or for the end of the trust in former ones.
    pub async fn next(&mut self) {
        let end = self.receiver.borrow().overlap_end;
        tokio::select! {
            changed = self.receiver.changed() => changed.expect("`trust` is a sender"),
            () = sleep_until(end.unwrap_or_else(Instant::now)), if end.is_some() => {
                self.trust.0.send_modify(State::end_overlap);
                self.receiver.mark_unchanged();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secure::identity::testing::Authority;

    fn roots(authorities: &[&Authority], version: &str) -> Roots {
        let pem: String = authorities
            .iter()
            .map(|authority| authority.pem())
            .collect();
        Roots::parse(pem.as_bytes(), version).unwrap()
    }

    #[test]
    fn rejects_a_set_with_an_invalid_certificate() {
        let (one, other) = (Authority::new("one"), Authority::new("other"));
        assert_eq!(roots(&[&one, &other], "1").store.len(), 2);
        let damaged = format!("{}{}", one.pem(), other.pem().replacen("MII", "!!!", 1));
        let garbage = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".to_owned();
        for (pem, expected) in [
            (String::new(), "no certificate found"),
            ("roots".to_owned(), "no certificate found"),
            (damaged, "invalid PEM"),
            (one.pem() + &garbage, "certificate 2 is not"),
        ] {
            let error = Roots::parse(pem.as_bytes(), "1")
                .expect_err(expected)
                .to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn roots_of_an_open_stream_take_precedence() {
        let authority = Authority::new("one");
        let (trust, version) = (Trust::default(), |trust: &Trust| {
            trust.newest().map(|roots| roots.version.clone())
        });
        assert_eq!(version(&trust), None);
        trust.set_from_certificate(roots(&[&authority], "1"));
        assert_eq!(version(&trust).as_deref(), Some("1"));
        let issuer = Some(Issuer {
            id: "ab".to_owned(),
            renew_within: Duration::from_secs(9),
        });
        let message = proto::Roots {
            pem: authority.pem().into_bytes(),
            issuer: "ab".to_owned(),
            renew_within_seconds: 9,
        };
        trust.set_from_stream(Roots::from_stream(message, "2").unwrap());
        trust.set_from_certificate(roots(&[&authority], "1"));
        assert_eq!(version(&trust).as_deref(), Some("2"), "the stream is open");
        assert_eq!(trust.issuer(), issuer);
        trust.stream_closed();
        assert_eq!(trust.issuer(), None, "the issuer may have changed");
        trust.set_from_certificate(roots(&[&authority], "3"));
        assert_eq!(version(&trust).as_deref(), Some("3"));
    }

    #[tokio::test]
    async fn notifies_once_per_version() {
        let (authority, trust) = (Authority::new("one"), Trust::default());
        let mut changes = trust.changes();
        for version in ["1", "1", "2"] {
            trust.set_from_certificate(roots(&[&authority], version));
        }
        trust.stream_closed();
        changes.next().await;
        assert!(!changes.receiver.has_changed().unwrap());
    }

    /// The versions of the announced roots, and the number of roots that verify peers.
    fn trusted(trust: &Trust) -> (String, usize) {
        let roots = trust.newest().unwrap();
        (roots.version.clone(), roots.trusted.len())
    }

    fn announce(trust: &Trust, authorities: &[&Authority], version: &str, renew_within: u64) {
        let issuer = Some(Issuer {
            id: "ab".to_owned(),
            renew_within: Duration::from_secs(renew_within),
        });
        trust.set_from_stream(Roots {
            issuer,
            ..roots(authorities, version)
        });
    }

    #[tokio::test(start_paused = true)]
    async fn former_roots_stay_trusted_for_a_time_after_a_replacement() {
        let (old, new, next) = ["old", "new", "next"].map(Authority::new).into();
        let trust = Trust::default();
        let mut changes = trust.changes();
        announce(&trust, &[&old], "1", 60);
        announce(&trust, &[&new], "2", 60);
        assert_eq!(trusted(&trust), ("2".to_owned(), 2), "both, for 60 s");
        changes.next().await;
        tokio::time::sleep(Duration::from_secs(40)).await;
        announce(&trust, &[&new, &next], "3", 60);
        assert_eq!(trusted(&trust), ("3".to_owned(), 3), "20 s more");
        changes.next().await;
        let start = Instant::now();
        changes.next().await;
        assert_eq!(start.elapsed().as_secs(), 20);
        assert_eq!(trusted(&trust), ("3".to_owned(), 2));
        announce(&trust, &[&next], "4", 60);
        assert_eq!(
            trusted(&trust),
            ("4".to_owned(), 1),
            "a rotation drops roots"
        );
        trust.stream_closed();
        trust.set_from_certificate(roots(&[&old], "1"));
        assert_eq!(trusted(&trust), ("1".to_owned(), 2));
        announce(&trust, &[&old], "1", 0);
        assert_eq!(trusted(&trust), ("1".to_owned(), 1), "a forced rotation");
        announce(&trust, &[&new], "2", 0);
        assert_eq!(trusted(&trust), ("2".to_owned(), 1));
    }
}
