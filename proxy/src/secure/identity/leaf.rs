//! Fields of a workload certificate: validity, serial number, issuer. Verifies nothing.

use std::time::SystemTime;

use diy_mesh_model::identity::Identity;
use rustls::pki_types::CertificateDer;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::ParsedExtension;
use x509_parser::prelude::FromDer as _;

use super::verify::{PeerError, identity_of, system_time};

/// A parsed workload certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// Identity of the subject.
    pub identity: Identity,
    /// Start of the validity.
    pub not_before: SystemTime,
    /// End of the validity.
    pub not_after: SystemTime,
    /// Serial number, hexadecimal.
    pub serial: String,
    /// Authority key identifier, hexadecimal; empty if the extension is absent.
    pub issuer: String,
}

impl Leaf {
    /// Parses a DER certificate.
    pub fn parse(certificate: &CertificateDer<'_>) -> Result<Self, PeerError> {
        let (identity, not_after) = identity_of(certificate)?;
        let Ok((_, parsed)) = X509Certificate::from_der(certificate) else {
            return Err(PeerError::InvalidEncoding);
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
    use crate::secure::identity::testing::{Authority, WEB};
    use rcgen::SerialNumber;
    use std::time::{Duration, UNIX_EPOCH};

    #[test]
    fn parses_validity_serial_and_issuer() {
        let authority = Authority::new("one");
        let certificate = authority.leaf(WEB, |leaf| {
            leaf.serial_number = Some(SerialNumber::from_slice(&[0x0a, 0xff]));
            leaf.not_before = (UNIX_EPOCH + Duration::from_secs(2_000_000_000)).into();
            leaf.not_after = (UNIX_EPOCH + Duration::from_secs(2_000_000_060)).into();
        });
        let leaf = Leaf::parse(&certificate).unwrap();
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
            Leaf::parse(
                &authority.leaf(WEB, |leaf| leaf.use_authority_key_identifier_extension =
                    false)
            )
            .unwrap()
            .issuer,
            ""
        );
    }
}
