//! Trust roots: one set as [`Roots`], the newest set of the process in [`Trust`]. Roots arrive on
//! the discovery stream and with each certificate; those of the stream take precedence. Verifies
//! nothing itself.

use std::sync::Arc;
use std::time::Duration;

use diy_mesh_proto::mesh::v1 as proto;
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use thiserror::Error;
use tokio::sync::watch;

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
    /// Trust anchors.
    pub store: Arc<RootCertStore>,
    /// Current issuer, if the controller announced it.
    pub issuer: Option<Issuer>,
}

/// The certificate authority that issues new certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issuer {
    /// Key identifier, hexadecimal.
    pub id: String,
    /// Time to renew certificates of other issuers.
    pub renew_within: Duration,
}

impl Roots {
    /// Parses roots that arrive with a certificate.
    pub fn parse(pem: &[u8], version: &str) -> Result<Self, RootsError> {
        Ok(Self {
            version: version.to_owned(),
            store: Arc::new(parse_roots(pem)?),
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
}

impl Default for Trust {
    fn default() -> Self {
        Self(watch::Sender::new(State::default()))
    }
}

impl Trust {
    /// Replaces the roots by those of the discovery stream.
    pub fn set_from_stream(&self, roots: Roots) {
        self.0.send_replace(State {
            roots: Some(Arc::new(roots)),
            live: true,
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
            state.roots = Some(Arc::new(roots));
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
        Changes(self.0.subscribe())
    }
}

/// See [`Trust::changes`].
pub struct Changes(watch::Receiver<State>);

impl Changes {
    /// Waits for newer roots than at the previous call.
    pub async fn next(&mut self) {
        if self.0.changed().await.is_err() {
            // All senders are dropped.
            std::future::pending().await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::testing::Authority;

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
        assert!(!changes.0.has_changed().unwrap());
    }
}
