//! How many certificates one core signs in a second, from the request as it came to the answer as it goes, without the network and
//! without the token's check: `cargo run --release --example certificates`.
#![allow(missing_docs, clippy::unwrap_used)]

use std::time::{Duration, Instant, SystemTime};

use diy_mesh_controller::authority::self_signed;
use diy_mesh_controller::issuer::{Issuer, Request};
use diy_mesh_proto::Identity;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};

const LIFE: Duration = Duration::from_secs(24 * 60 * 60);

fn main() {
    let identity = Identity::new("cluster.local", "shop", "web").unwrap();
    let (certificate, key) = self_signed("cluster.local", SystemTime::now(), LIFE).unwrap();
    let issuer = Issuer::from_pem(&certificate, &key, SystemTime::now()).unwrap();
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, identity.user());
    let csr = params.serialize_request(&KeyPair::generate().unwrap()).unwrap().pem().unwrap();

    let (start, mut count) = (Instant::now(), 0);
    while start.elapsed() < Duration::from_secs(3) {
        let request = Request::parse(csr.as_bytes(), &identity.user()).unwrap();
        let signed = issuer.sign(&request, &identity, SystemTime::now(), LIFE).unwrap();
        assert!(!(signed.pem + issuer.chain_pem()).is_empty());
        count += 1;
    }
    println!("{:.0} certificates a second on one core (P-256 requests, P-384 authority)", f64::from(count) / start.elapsed().as_secs_f64());
}
