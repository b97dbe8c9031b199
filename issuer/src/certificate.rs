//! A certificate, and what of it decisions are made by. Pure: text in, facts out; the time is passed in.
//!
//! The first stop of whatever the authority reads. It never sees a private key.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use aws_lc_rs::digest::{SHA256, digest};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::{GeneralName, ParsedExtension};

use crate::hex;

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

/// A certificate that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// Its bytes.
    pub der: CertificateDer<'static>,
    /// Its one block of PEM, with a line feed at the end.
    pub pem: String,
    /// Its subject, as people write it, for example `CN=diy-service-mesh CA`.
    pub subject: String,
    /// The subject's common name, or nothing.
    pub common_name: String,
    /// Who signed it, as people write it.
    pub issuer: String,
    /// From when it counts.
    pub not_before: SystemTime,
    /// Until when it counts.
    pub not_after: SystemTime,
    /// Its public key's bits.
    pub public_key: Vec<u8>,
    /// Its subject key identifier, hexadecimal, where it has one.
    pub key_id: Option<String>,
    /// Whether it may sign certificates: it says that it is a CA, and its key usage does not exclude it.
    pub may_sign: bool,
    /// How many further CAs it allows below it; none: any number.
    pub path_length: Option<u32>,
    /// The DNS names of its subject alternative name.
    pub dns_names: Vec<String>,
    /// The IP addresses of its subject alternative name.
    pub addresses: Vec<IpAddr>,
}

impl Certificate {
    /// All certificates of a PEM text, in its order; other kinds of block are left out. At least one, or why not.
    pub fn all(pem: &[u8]) -> Result<Vec<Certificate>, String> {
        let text = std::str::from_utf8(pem)
            .map_err(|_| "it is not PEM: it is not even text".to_owned())?;
        let blocks: Vec<&str> = text
            .split_inclusive(END)
            .filter_map(|part| part.find(BEGIN).map(|begin| &part[begin..]))
            .collect();
        if blocks.is_empty() {
            return Err(format!("it holds no PEM block that begins with {BEGIN}"));
        }
        let mut all = Vec::new();
        for (position, block) in blocks.iter().enumerate() {
            all.push(
                Certificate::one(block).map_err(|reason| {
                    format!("its certificate number {}: {reason}", position + 1)
                })?,
            );
        }
        Ok(all)
    }

    fn one(block: &str) -> Result<Certificate, String> {
        let der = CertificateDer::from_pem_slice(block.as_bytes())
            .map_err(|error| format!("the PEM block is broken: {error}"))?;
        let parsed = parse(&der)?;
        let usage = parsed
            .key_usage()
            .map_err(|error| format!("its key usage is broken: {error}"))?;
        let key_id =
            parsed
                .extensions()
                .iter()
                .find_map(|extension| match extension.parsed_extension() {
                    ParsedExtension::SubjectKeyIdentifier(id) => Some(hex(id.0)),
                    _ => None,
                });
        let alternative_names = match parsed.subject_alternative_name() {
            Ok(Some(extension)) => extension.value.general_names.as_slice(),
            _ => &[],
        };
        let certificate = Certificate {
            dns_names: alternative_names
                .iter()
                .filter_map(|name| match name {
                    GeneralName::DNSName(name) => Some((*name).to_owned()),
                    _ => None,
                })
                .collect(),
            addresses: alternative_names.iter().filter_map(ip_address).collect(),
            pem: block
                .lines()
                .map(str::trim)
                .filter(|line| !line.is_empty())
                .flat_map(|line| [line, "\n"])
                .collect(),
            subject: parsed.subject().to_string(),
            common_name: parsed
                .subject()
                .iter_common_name()
                .find_map(|name| name.as_str().ok())
                .unwrap_or_default()
                .to_owned(),
            issuer: parsed.issuer().to_string(),
            not_before: time(parsed.validity().not_before.timestamp()),
            not_after: time(parsed.validity().not_after.timestamp()),
            public_key: parsed.public_key().subject_public_key.data.to_vec(),
            key_id,
            path_length: match parsed.basic_constraints() {
                Ok(Some(constraints)) => constraints.value.path_len_constraint,
                _ => None,
            },
            may_sign: parsed.is_ca() && usage.is_none_or(|usage| usage.value.key_cert_sign()),
            der: der.clone(),
        };
        Ok(certificate)
    }

    /// SHA-256 over its bytes, hexadecimal: what `openssl x509 -fingerprint -sha256` shows, without colons.
    pub fn fingerprint(&self) -> String {
        hex(digest(&SHA256, &self.der).as_ref())
    }

    /// Whether `other`'s key has signed it.
    pub fn is_signed_by(&self, other: &Certificate) -> bool {
        let (Ok(own), Ok(other)) = (parse(&self.der), parse(&other.der)) else {
            return false;
        };
        own.issuer() == other.subject() && own.verify_signature(Some(other.public_key())).is_ok()
    }

    /// Whether its validity has ended at `now`.
    pub fn has_expired(&self, now: SystemTime) -> bool {
        now >= self.not_after
    }

    /// Whether it is a root: signed by its own key.
    pub fn is_self_signed(&self) -> bool {
        self.is_signed_by(self)
    }
}

fn parse<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, String> {
    match x509_parser::parse_x509_certificate(der) {
        Ok(([], certificate)) => Ok(certificate),
        Ok(_) => Err("bytes follow the certificate".to_owned()),
        Err(error) => Err(format!("it is no X.509 certificate: {error}")),
    }
}

fn ip_address(name: &GeneralName<'_>) -> Option<IpAddr> {
    let GeneralName::IPAddress(octets) = name else {
        return None;
    };
    let v4 = <[u8; 4]>::try_from(*octets).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(*octets).map(IpAddr::from))
        .ok()
}

fn time(seconds: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or_default())
}
