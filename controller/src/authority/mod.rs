//! Who vouches for the mesh now: the issuer that signs, and the roots that everybody verifies by. What signs, serves and tells
//! proxies whom to trust watches this one value.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use aws_lc_rs::digest;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use tokio::sync::watch;

use crate::issuer::{Issuer, hex, pem};

/// What the controller signs with, and whom it tells everybody to trust. The two change together.
#[derive(Debug)]
pub struct Trust {
    /// Who signs.
    pub issuer: Arc<Issuer>,
    /// Whom everybody verifies by.
    pub roots: Arc<Roots>,
    /// Within what time proxies whose certificate another issuer signed shall renew it, each at a moment of its own choice.
    pub renew_within: Duration,
}

/// A set of trust roots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// All of them.
    pub pem: String,
    /// Equal for equal sets, on each replica: the first half of the SHA-256 over the sorted certificates, hexadecimal.
    pub version: String,
    /// All of them, sorted, none twice.
    pub certificates: Vec<CertificateDer<'static>>,
}

impl Roots {
    /// The set of these certificates.
    pub fn new(certificates: impl IntoIterator<Item = CertificateDer<'static>>) -> Roots {
        let mut certificates: Vec<_> = certificates.into_iter().collect();
        certificates.sort_by(|one, other| one.as_ref().cmp(other.as_ref()));
        certificates.dedup();
        let mut hash = digest::Context::new(&digest::SHA256);
        certificates.iter().for_each(|certificate| hash.update(certificate));
        let version = hex(&hash.finish().as_ref()[..16]);
        Roots { pem: certificates.iter().map(|certificate| pem(certificate)).collect(), version, certificates }
    }

    /// The set of the certificates in a text.
    pub fn from_pem(text: &str) -> Result<Roots, rustls::pki_types::pem::Error> {
        let certificates: Vec<_> = CertificateDer::pem_slice_iter(text.as_bytes()).collect::<Result<_, _>>()?;
        Ok(Roots::new(certificates))
    }
}

/// A handle to the trust that is in force. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Authority {
    trust: watch::Sender<Arc<Trust>>,
}

impl Authority {
    /// With this trust in force until another one is [published](Authority::publish).
    pub fn fixed(trust: Trust) -> Authority {
        Authority { trust: watch::Sender::new(Arc::new(trust)) }
    }

    /// The trust in force, now and whenever it changes.
    pub fn trust(&self) -> watch::Receiver<Arc<Trust>> {
        self.trust.subscribe()
    }

    /// Puts another trust in force.
    pub fn publish(&self, trust: Trust) {
        self.trust.send_replace(Arc::new(trust));
    }
}

/// A new root that signs by itself: its certificate and its key, as PEM.
pub fn self_signed(trust_domain: &str, now: SystemTime, life: Duration) -> Result<(String, String), rcgen::Error> {
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384)?;
    let mut params = rcgen::CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(rcgen::DnType::CommonName, format!("DIY Service Mesh, {trust_domain}"));
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Constrained(0));
    params.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign, rcgen::KeyUsagePurpose::CrlSign];
    params.use_authority_key_identifier_extension = true;
    params.not_before = (now - crate::issuer::BACKDATED).into();
    params.not_after = (now + life).into();
    Ok((params.self_signed(&key)?.pem(), key.serialize_pem()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_sets_have_equal_versions_in_whatever_order_they_are_given() {
        let now = SystemTime::now();
        let new = || self_signed("cluster.local", now, Duration::from_secs(3600)).unwrap().0;
        let (one, other) = (new(), new());
        let roots = |text: &str| Roots::from_pem(text).unwrap();
        let both = roots(&(one.clone() + &other));
        assert_eq!(both, roots(&format!("{other}{one}{other}")));
        assert_eq!(both.version.len(), 32);
        assert_ne!(both.version, roots(&one).version);
        assert_eq!(roots(&both.pem), both);
        assert!(Roots::from_pem("-----BEGIN CERTIFICATE-----\nx").is_err());
    }

    #[tokio::test]
    async fn a_change_reaches_whoever_watches() {
        let now = SystemTime::now();
        let trust = || {
            let (certificate, key) = self_signed("cluster.local", now, Duration::from_secs(3600)).unwrap();
            let issuer = Issuer::from_pem(&certificate, &key, now).unwrap();
            Trust { issuer: issuer.into(), roots: Roots::from_pem(&certificate).unwrap().into(), renew_within: Duration::ZERO }
        };
        let authority = Authority::fixed(trust());
        let mut watcher = authority.trust();
        let before = watcher.borrow_and_update().roots.version.clone();
        authority.publish(trust());
        watcher.changed().await.unwrap();
        assert_ne!(watcher.borrow().roots.version, before);
    }
}
