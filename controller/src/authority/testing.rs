//! CAs of operators and stored fields for the unit tests of the authority.

use std::time::{Duration, SystemTime};

use diy_mesh_testkit::authority::ca;
use rcgen::{CertificateParams, KeyPair, SignatureAlgorithm};

use super::state::Fields;

pub(super) const YEAR: Duration = Duration::from_secs(365 * 86_400);

pub(super) fn start() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000)
}

/// A CA of an operator, self-signed or signed by another.
pub(super) struct TestCa {
    params: CertificateParams,
    pub(super) key: KeyPair,
    pub(super) pem: String,
}

pub(super) fn operator_ca(
    name: &str,
    by: Option<&TestCa>,
    algorithm: &'static SignatureAlgorithm,
    change: impl FnOnce(&mut CertificateParams),
) -> TestCa {
    let mut params = ca(name);
    params.not_before = start().into();
    params.not_after = (start() + YEAR).into();
    change(&mut params);
    let key = KeyPair::generate_for(algorithm).unwrap();
    let certificate = match by {
        None => params.self_signed(&key).unwrap(),
        Some(by) => params
            .signed_by(&key, &rcgen::Issuer::from_params(&by.params, &by.key))
            .unwrap(),
    };
    TestCa {
        pem: certificate.pem(),
        params,
        key,
    }
}

pub(super) fn fields(all: &[(&str, &str)]) -> Fields {
    all.iter()
        .map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec()))
        .collect()
}

pub(super) fn secret(chain: &[&TestCa], roots: &[&TestCa]) -> Fields {
    let pem = |all: &[&TestCa]| all.iter().map(|made| made.pem.as_str()).collect::<String>();
    let mut all = fields(&[
        ("tls.crt", &pem(chain)),
        ("tls.key", &chain[0].key.serialize_pem()),
    ]);
    if !roots.is_empty() {
        all.extend(fields(&[("ca.crt", &pem(roots))]));
    }
    all
}
