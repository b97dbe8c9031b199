//! Whom to trust, as the controller last said: [`Roots`], and [`Trust`], the one place of the process where the newest lie. Roots
//! come over the discovery stream and beside each certificate; what the stream says goes before. It verifies nobody itself.

use std::sync::Arc;
use std::time::Duration;

use diy_mesh_proto::mesh::v1 as proto;
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use thiserror::Error;
use tokio::sync::watch;

/// Why a set of roots is not taken: nothing of it is, then.
#[derive(Debug, Error)]
pub enum BadRoots {
    /// Nobody would be trusted.
    #[error("there is no certificate in them")]
    Empty,
    /// The text is damaged.
    #[error("they are not in PEM: {0}")]
    Pem(String),
    /// One of them is no certificate that signs.
    #[error("certificate {number} of them can't be a root: {reason}")]
    Anchor {
        /// Counted from 1.
        number: usize,
        /// What is wrong.
        reason: rustls::Error,
    },
}

/// Who may vouch for others.
#[derive(Clone, Debug)]
pub struct Roots {
    /// Equal versions, equal sets.
    pub version: String,
    /// As rustls wants them.
    pub store: Arc<RootCertStore>,
    /// Who signs now, where the controller said so.
    pub issuer: Option<Issuer>,
}

/// The authority that signs now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issuer {
    /// Its key identifier, hexadecimal.
    pub id: String,
    /// Certificates that another one signed are renewed within this time.
    pub renew_within: Duration,
}

impl Roots {
    /// As they come beside a certificate.
    pub fn parse(pem: &[u8], version: &str) -> Result<Self, BadRoots> {
        Ok(Self {
            version: version.to_owned(),
            store: Arc::new(store(pem)?),
            issuer: None,
        })
    }

    /// As they come over the stream.
    pub fn announced(roots: proto::Roots, version: &str) -> Result<Self, BadRoots> {
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

/// The certificates of a text in PEM, as roots.
pub fn store(pem: &[u8]) -> Result<RootCertStore, BadRoots> {
    let mut store = RootCertStore::empty();
    for (index, certificate) in CertificateDer::pem_slice_iter(pem).enumerate() {
        let certificate = certificate.map_err(|error| BadRoots::Pem(error.to_string()))?;
        store.add(certificate).map_err(|reason| BadRoots::Anchor {
            number: index + 1,
            reason,
        })?;
    }
    if store.is_empty() {
        Err(BadRoots::Empty)
    } else {
        Ok(store)
    }
}

/// The newest roots. Cheap to clone: all clones are one place.
#[derive(Clone, Debug)]
pub struct Trust(watch::Sender<Known>);

#[derive(Debug, Default)]
struct Known {
    roots: Option<Arc<Roots>>,
    /// They came over the stream that stands now.
    live: bool,
}

impl Default for Trust {
    fn default() -> Self {
        Self(watch::Sender::new(Known::default()))
    }
}

impl Trust {
    /// Over the stream: in the place of all others.
    pub fn announce(&self, roots: Roots) {
        self.0.send_replace(Known {
            roots: Some(Arc::new(roots)),
            live: true,
        });
    }

    /// The stream ended: until the next one what comes beside a certificate counts.
    pub fn stream_ended(&self) {
        self.0.send_if_modified(|known| {
            known.live = false;
            false
        });
    }

    /// Beside a certificate: it counts where no stream stands that may know better.
    pub fn mention(&self, roots: Roots) {
        self.0.send_if_modified(|known| {
            if known.live
                || known
                    .roots
                    .as_ref()
                    .is_some_and(|old| old.version == roots.version)
            {
                return false;
            }
            known.roots = Some(Arc::new(roots));
            true
        });
    }

    /// The newest roots; none before the first came.
    pub fn newest(&self) -> Option<Arc<Roots>> {
        self.0.borrow().roots.clone()
    }

    /// Who signs now, as far as the stream says so that stands.
    pub fn issuer(&self) -> Option<Issuer> {
        let known = self.0.borrow();
        known.roots.as_ref().filter(|_| known.live)?.issuer.clone()
    }

    /// Is told when there are newer ones.
    pub fn changes(&self) -> Changes {
        Changes(self.0.subscribe())
    }
}

/// See [`Trust::changes`].
pub struct Changes(watch::Receiver<Known>);

impl Changes {
    /// Done once there are newer roots than at the last time.
    pub async fn next(&mut self) {
        if self.0.changed().await.is_err() {
            // Nobody is left who could bring any.
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
    fn a_set_is_taken_as_a_whole_or_not_at_all() {
        let (one, other) = (Authority::new("one"), Authority::new("other"));
        assert_eq!(roots(&[&one, &other], "1").store.len(), 2);
        let damaged = format!("{}{}", one.pem(), other.pem().replacen("MII", "!!!", 1));
        let garbage = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".to_owned();
        for (pem, expected) in [
            (String::new(), "there is no certificate"),
            ("roots".to_owned(), "there is no certificate"),
            (damaged, "not in PEM"),
            (one.pem() + &garbage, "certificate 2 of them"),
        ] {
            let error = Roots::parse(pem.as_bytes(), "1")
                .expect_err(expected)
                .to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn the_streams_word_goes_before_what_comes_beside_a_certificate() {
        let authority = Authority::new("one");
        let (trust, version) = (Trust::default(), |trust: &Trust| {
            trust.newest().map(|roots| roots.version.clone())
        });
        assert_eq!(version(&trust), None);
        trust.mention(roots(&[&authority], "1"));
        assert_eq!(version(&trust).as_deref(), Some("1"));
        let issuer = Some(Issuer {
            id: "ab".to_owned(),
            renew_within: Duration::from_secs(9),
        });
        let announced = proto::Roots {
            pem: authority.pem().into_bytes(),
            issuer: "ab".to_owned(),
            renew_within_seconds: 9,
        };
        trust.announce(Roots::announced(announced, "2").unwrap());
        trust.mention(roots(&[&authority], "1"));
        assert_eq!(
            version(&trust).as_deref(),
            Some("2"),
            "the stream stands: it would have told"
        );
        assert_eq!(trust.issuer(), issuer);
        trust.stream_ended();
        assert_eq!(trust.issuer(), None, "it may have changed since");
        trust.mention(roots(&[&authority], "3"));
        assert_eq!(version(&trust).as_deref(), Some("3"));
    }

    #[tokio::test]
    async fn changes_are_told_once() {
        let (authority, trust) = (Authority::new("one"), Trust::default());
        let mut changes = trust.changes();
        for version in ["1", "1", "2"] {
            trust.mention(roots(&[&authority], version));
        }
        trust.stream_ended();
        changes.next().await;
        assert!(!changes.0.has_changed().unwrap());
    }
}
