//! What a certificate of our own says: from when until when, who signed it, which number it has. It verifies nothing.

use std::time::SystemTime;

use diy_mesh_proto::Identity;
use rustls::pki_types::CertificateDer;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::ParsedExtension;
use x509_parser::prelude::FromDer as _;

use super::verify::{NotThePeer, identity_of, system_time};

/// What there is to say of a workload's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// Whose it is.
    pub identity: Identity,
    /// When it begins.
    pub not_before: SystemTime,
    /// When it ends.
    pub not_after: SystemTime,
    /// Hexadecimal.
    pub serial: String,
    /// The key identifier of the authority that signed it, hexadecimal; empty where the certificate does not say.
    pub issuer: String,
}

impl Leaf {
    /// Reads a certificate.
    pub fn read(certificate: &CertificateDer<'_>) -> Result<Self, NotThePeer> {
        let (identity, not_after) = identity_of(certificate)?;
        let Ok((_, parsed)) = X509Certificate::from_der(certificate) else {
            return Err(NotThePeer::Unreadable);
        };
        let issuer =
            parsed
                .iter_extensions()
                .find_map(|extension| match extension.parsed_extension() {
                    ParsedExtension::AuthorityKeyIdentifier(authority) => {
                        authority.key_identifier.as_ref()
                    }
                    _ => None,
                });
        Ok(Self {
            identity,
            not_before: system_time(parsed.validity().not_before.timestamp()),
            not_after,
            serial: hex(parsed.raw_serial()),
            issuer: issuer.map_or_else(String::new, |id| hex(id.0)),
        })
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::testing::{Authority, WEB};
    use rcgen::SerialNumber;
    use std::time::{Duration, UNIX_EPOCH};

    #[test]
    fn a_certificate_tells_its_times_its_number_and_its_issuer() {
        let authority = Authority::new("one");
        let certificate = authority.leaf(WEB, |leaf| {
            leaf.serial_number = Some(SerialNumber::from_slice(&[0x0a, 0xff]));
            leaf.not_before = (UNIX_EPOCH + Duration::from_secs(2_000_000_000)).into();
            leaf.not_after = (UNIX_EPOCH + Duration::from_secs(2_000_000_060)).into();
        });
        let leaf = Leaf::read(&certificate).unwrap();
        assert_eq!(
            (leaf.serial.as_str(), leaf.identity.as_str()),
            ("0aff", WEB)
        );
        assert_eq!(
            leaf.not_after.duration_since(leaf.not_before).unwrap(),
            Duration::from_secs(60)
        );
        assert_eq!(leaf.issuer, authority.key_id());
        assert_eq!(
            Leaf::read(
                &authority.leaf(WEB, |leaf| leaf.use_authority_key_identifier_extension =
                    false)
            )
            .unwrap()
            .issuer,
            ""
        );
    }
}
