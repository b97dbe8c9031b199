//! Certificate authorities, and servers with a certificate of one.

use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::PrivatePkcs8KeyDer;

/// The parameters of a CA with this common name.
pub fn ca(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params
}

/// A server for one DNS name, and the CA of its certificate.
pub struct Server {
    /// The CA as PEM.
    pub root: String,
    /// The certificate as PEM.
    pub leaf: String,
    /// The private key of the certificate as PEM.
    pub key: String,
    /// The TLS configuration, without ALPN protocols.
    pub config: ServerConfig,
}

/// Issues a certificate for this name with a new CA.
pub fn server(name: &str) -> Server {
    let (ca, ca_key, key) = (ca("root"), KeyPair::generate(), KeyPair::generate());
    let (ca_key, key) = (ca_key.unwrap(), key.unwrap());
    let root = ca.self_signed(&ca_key).unwrap().pem();
    let leaf = CertificateParams::new([name.to_owned()]).unwrap();
    let leaf = leaf.signed_by(&key, &Issuer::new(ca, ca_key)).unwrap();
    let der = PrivatePkcs8KeyDer::from(key.serialize_der());
    let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![leaf.der().clone()], der.into())
        .unwrap();
    Server {
        root,
        leaf: leaf.pem(),
        key: key.serialize_pem(),
        config,
    }
}
