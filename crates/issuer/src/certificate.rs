//! Parsed certificates. Pure: the caller passes the time. Contains no private keys.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use aws_lc_rs::digest::{SHA256, digest};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::{GeneralName, ParsedExtension};

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

/// A parsed certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// The certificate as DER.
    pub der: CertificateDer<'static>,
    /// The certificate as one PEM block, with a final line feed.
    pub pem: String,
    /// The subject, for example `CN=diy-service-mesh CA`.
    pub subject: String,
    /// The common name of the subject, or an empty text.
    pub common_name: String,
    /// The issuer, in the format of the subject.
    pub issuer: String,
    /// The start of the validity.
    pub not_before: SystemTime,
    /// The end of the validity.
    pub not_after: SystemTime,
    /// The bits of the public key.
    pub public_key: Vec<u8>,
    /// The subject key identifier, hexadecimal, if the extension is present.
    pub key_id: Option<String>,
    /// Whether the certificate is a CA whose key usage permits signing of certificates.
    pub may_sign: bool,
    /// The path length constraint; `None` if there is no limit.
    pub path_length: Option<u32>,
    /// The DNS names of the subject alternative name.
    pub dns_names: Vec<String>,
    /// The IP addresses of the subject alternative name.
    pub addresses: Vec<IpAddr>,
}

impl Certificate {
    /// Parses the certificates of a PEM text, in their order. Ignores other blocks. Returns at
    /// least one, or an error message.
    pub fn all(pem: &[u8]) -> Result<Vec<Certificate>, String> {
        let text = std::str::from_utf8(pem)
            .map_err(|_| "it is not PEM: it is not UTF-8 text".to_owned())?;
        let blocks: Vec<&str> = text
            .split_inclusive(END)
            .filter_map(|part| part.find(BEGIN).map(|begin| &part[begin..]))
            .collect();
        if blocks.is_empty() {
            return Err(format!("it contains no PEM block that begins with {BEGIN}"));
        }
        let mut all = Vec::new();
        for (position, block) in blocks.iter().enumerate() {
            all.push(
                Certificate::one(block)
                    .map_err(|reason| format!("certificate number {}: {reason}", position + 1))?,
            );
        }
        Ok(all)
    }

    fn one(block: &str) -> Result<Certificate, String> {
        let der = CertificateDer::from_pem_slice(block.as_bytes())
            .map_err(|error| format!("invalid PEM block: {error}"))?;
        let parsed = parse(&der)?;
        let usage = parsed
            .key_usage()
            .map_err(|error| format!("invalid key usage: {error}"))?;
        let alternative_names = match parsed.subject_alternative_name() {
            Ok(Some(extension)) => extension.value.general_names.as_slice(),
            _ => &[],
        };
        Ok(Certificate {
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
            key_id: subject_key_id(&parsed).map(hex),
            path_length: match parsed.basic_constraints() {
                Ok(Some(constraints)) => constraints.value.path_len_constraint,
                _ => None,
            },
            may_sign: parsed.is_ca() && usage.is_none_or(|usage| usage.value.key_cert_sign()),
            der: der.clone(),
        })
    }

    /// The SHA-256 fingerprint, hexadecimal: the output of `openssl x509 -fingerprint -sha256`
    /// without colons.
    pub fn fingerprint(&self) -> String {
        hex(digest(&SHA256, &self.der).as_ref())
    }

    /// Whether `other` has signed the certificate.
    pub fn is_signed_by(&self, other: &Certificate) -> bool {
        let (Ok(own), Ok(other)) = (parse(&self.der), parse(&other.der)) else {
            return false;
        };
        own.issuer() == other.subject() && own.verify_signature(Some(other.public_key())).is_ok()
    }

    /// Whether the validity has ended at `now`.
    pub fn has_expired(&self, now: SystemTime) -> bool {
        now >= self.not_after
    }

    /// Whether the certificate is a root.
    pub fn is_self_signed(&self) -> bool {
        self.is_signed_by(self)
    }
}

/// Parses a certificate, and rejects bytes after it.
pub(crate) fn parse<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, String> {
    match x509_parser::parse_x509_certificate(der) {
        Ok(([], certificate)) => Ok(certificate),
        Ok(_) => Err("unexpected bytes after the certificate".to_owned()),
        Err(error) => Err(format!("it is not an X.509 certificate: {error}")),
    }
}

pub(crate) fn subject_key_id<'a>(certificate: &'a X509Certificate<'_>) -> Option<&'a [u8]> {
    let extensions = certificate.extensions().iter();
    extensions
        .filter_map(|extension| match extension.parsed_extension() {
            ParsedExtension::SubjectKeyIdentifier(id) => Some(id.0),
            _ => None,
        })
        .next()
}

fn ip_address(name: &GeneralName<'_>) -> Option<IpAddr> {
    let GeneralName::IPAddress(octets) = name else {
        return None;
    };
    let v4 = <[u8; 4]>::try_from(*octets).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(*octets).map(IpAddr::from))
        .ok()
}

/// A time in seconds since 1970. Earlier times become 1970.
pub(crate) fn time(seconds: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or_default())
}

/// A certificate as PEM.
pub fn pem(certificate: &CertificateDer<'_>) -> String {
    to_pem("CERTIFICATE", certificate)
}

fn to_pem(label: &str, der: &[u8]) -> String {
    let config = ::pem::EncodeConfig::new().set_line_ending(::pem::LineEnding::LF);
    ::pem::encode_config(&::pem::Pem::new(label, der), config)
}

/// A private key as PEM.
pub fn private_key_pem(key: &PrivateKeyDer<'_>) -> String {
    let label = match key {
        PrivateKeyDer::Pkcs1(_) => "RSA PRIVATE KEY",
        PrivateKeyDer::Sec1(_) => "EC PRIVATE KEY",
        _ => "PRIVATE KEY",
    };
    to_pem(label, key.secret_der())
}

/// Bytes as lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
