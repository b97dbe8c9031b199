//! Usable and unusable CAs, and verification of signed certificates by openssl, rustls and the
//! SPIFFE library.

use std::process::Command;

use diy_mesh_model::identity::Identity;
use diy_mesh_testkit::has_program;
use rcgen::{
    CertifiedIssuer, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519, PKCS_RSA_SHA256,
};
use rustls::RootCertStore;
use rustls::pki_types::UnixTime;
use rustls::server::WebPkiClientVerifier;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::ParsedExtension;
use x509_parser::prelude::FromDer;

use super::*;

const HOUR: Duration = Duration::from_secs(3600);

fn params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params.use_authority_key_identifier_extension = true;
    params
}

fn root(
    params: CertificateParams,
    algorithm: &'static rcgen::SignatureAlgorithm,
) -> CertifiedIssuer<'static, KeyPair> {
    CertifiedIssuer::self_signed(params, KeyPair::generate_for(algorithm).unwrap()).unwrap()
}

fn below(
    above: &CertifiedIssuer<'static, KeyPair>,
    params: CertificateParams,
) -> CertifiedIssuer<'static, KeyPair> {
    CertifiedIssuer::signed_by(
        params,
        KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).unwrap(),
        above,
    )
    .unwrap()
}

fn load(chain: &[&CertifiedIssuer<'static, KeyPair>]) -> Result<Issuer, IssuerError> {
    let text: String = chain.iter().map(|certificate| certificate.pem()).collect();
    Issuer::from_pem(&text, &chain[0].key().serialize_pem(), SystemTime::now())
}

fn error(chain: &[&CertifiedIssuer<'static, KeyPair>]) -> String {
    load(chain).unwrap_err().to_string()
}

/// A request of `shop/web`, and its identity.
fn request() -> (Request, Identity) {
    let (request, identity, _) = request_with_key();
    (request, identity)
}

fn request_with_key() -> (Request, Identity, KeyPair) {
    let identity = Identity::new("cluster.local", "shop", "web").unwrap();
    let mut requested = params(&identity.user());
    requested.use_authority_key_identifier_extension = false;
    requested.subject_alt_names = vec![SanType::DnsName("admin.shop".try_into().unwrap())];
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    let csr = requested.serialize_request(&key).unwrap();
    (
        Request::parse(csr.der(), &identity.user()).unwrap(),
        identity,
        key,
    )
}

#[test]
fn openssl_and_spiffe_accept_signatures_of_each_key_algorithm() {
    for algorithm in [
        &PKCS_ECDSA_P384_SHA384,
        &PKCS_ECDSA_P256_SHA256,
        &PKCS_ED25519,
        &PKCS_RSA_SHA256,
    ] {
        let root = root(params("The root"), algorithm);
        let issuer = load(&[&root]).unwrap();
        let (request, identity, key) = request_with_key();
        let signed = issuer
            .sign(&request, identity.as_str(), SystemTime::now(), HOUR)
            .unwrap();
        verify(&signed, &root.pem(), issuer.chain_pem(), &identity);
        let svid = spiffe::X509Svid::parse_from_der(&signed.der, key.serialized_der()).unwrap();
        assert_eq!(svid.spiffe_id().to_string(), identity.as_str());
    }
}

#[test]
fn chain_contains_intermediates_without_the_root() {
    let root = root(params("The root"), &PKCS_ED25519);
    let (upper, lower) = (below(&root, params("Upper")), params("Lower"));
    let lower = below(&upper, lower);
    for chain in [&[&lower, &upper][..], &[&lower, &upper, &root]] {
        let issuer = load(chain).unwrap();
        assert_eq!(issuer.chain_pem(), lower.pem() + &upper.pem());
        let (request, identity) = request();
        verify(
            &issuer
                .sign(&request, identity.as_str(), SystemTime::now(), HOUR)
                .unwrap(),
            &root.pem(),
            issuer.chain_pem(),
            &identity,
        );
    }
}

/// Verifies a certificate with openssl.
fn verify(signed: &Signed, roots: &str, intermediates: &str, identity: &Identity) {
    if !has_program("openssl") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in [
        ("roots", roots),
        ("intermediates", intermediates),
        ("leaf", &signed.pem),
    ] {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let mut openssl = Command::new("openssl");
    openssl.current_dir(dir.path()).args([
        "verify",
        "-x509_strict",
        "-purpose",
        "sslserver",
        "-CAfile",
        "roots",
    ]);
    if !intermediates.is_empty() {
        openssl.args(["-untrusted", "intermediates"]);
    }
    let output = openssl.arg("leaf").output().unwrap();
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    let output = Command::new("openssl")
        .current_dir(dir.path())
        .args(["x509", "-in", "leaf", "-noout", "-text"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    for part in [
        &format!("URI:{identity}\n"),
        "CA:FALSE",
        "Digital Signature\n",
        "TLS Web Server Authentication, TLS Web Client Authentication\n",
        "NIST CURVE: P-256",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(
        !text.contains("DNS:") && !text.contains("Certificate Sign"),
        "{text}"
    );
}

#[test]
fn signed_certificate_has_expected_fields() {
    let root = root(params("The root"), &PKCS_ECDSA_P384_SHA384);
    let issuer = load(&[&root]).unwrap();
    let ((request, identity), now) = (request(), SystemTime::now());
    let signed = issuer.sign(&request, identity.as_str(), now, HOUR).unwrap();
    let (_, leaf) = X509Certificate::from_der(&signed.der).unwrap();
    let seconds = |time: SystemTime| {
        time.duration_since(SystemTime::UNIX_EPOCH)
            .unwrap()
            .as_secs() as i64
    };
    assert_eq!(
        leaf.validity().not_before.timestamp(),
        seconds(now - BACKDATED)
    );
    assert_eq!(leaf.validity().not_after.timestamp(), seconds(now + HOUR));
    assert_eq!(hex(leaf.raw_serial()), signed.serial);
    assert_eq!(signed.serial.len(), 32);
    let authority =
        leaf.extensions()
            .iter()
            .find_map(|extension| match extension.parsed_extension() {
                ParsedExtension::AuthorityKeyIdentifier(identifier) => {
                    identifier.key_identifier.as_ref().map(|id| hex(id.0))
                }
                _ => None,
            });
    assert_eq!(authority.as_deref(), Some(issuer.id()));
    assert_ne!(
        signed.serial,
        issuer
            .sign(&request, identity.as_str(), now, HOUR)
            .unwrap()
            .serial
    );
    assert!(format!("{issuer:?}").len() < 200, "Debug omits the key");
}

#[test]
fn leaf_expires_no_later_than_its_issuer() {
    let now = SystemTime::now();
    let mut short = params("Short");
    short.not_before = (now - HOUR).into();
    short.not_after = (now + Duration::from_secs(60)).into();
    let issuer = load(&[&root(short, &PKCS_ED25519)]).unwrap();
    let (request, identity) = request();
    assert_eq!(
        issuer
            .sign(&request, identity.as_str(), now, HOUR)
            .unwrap()
            .not_after,
        issuer.not_after()
    );
    assert_eq!(
        issuer
            .sign(&request, identity.as_str(), now + HOUR, HOUR)
            .unwrap_err(),
        SignError::Expired
    );
    assert_eq!(
        issuer
            .sign(&request, identity.as_str(), now, Duration::MAX)
            .unwrap()
            .not_after,
        issuer.not_after()
    );
}

#[test]
fn serving_certificate_has_its_names() {
    let issuer = load(&[&root(params("The root"), &PKCS_ECDSA_P384_SHA384)]).unwrap();
    let identity = Identity::new("cluster.local", "service-mesh", "controller").unwrap();
    let names = [
        "controller.service-mesh.svc".to_owned(),
        "localhost".to_owned(),
    ];
    let serving = issuer
        .sign_serving(
            Some(identity.as_str()),
            &names,
            &["127.0.0.1".parse().unwrap()],
            SystemTime::now(),
            HOUR,
        )
        .unwrap();
    let (_, leaf) = X509Certificate::from_der(&serving.chain[0]).unwrap();
    let all = leaf
        .subject_alternative_name()
        .unwrap()
        .unwrap()
        .value
        .general_names
        .iter()
        .map(ToString::to_string);
    let all: Vec<String> = all.collect();
    assert_eq!(all.len(), 4, "{all:?}");
    assert!(
        all[0].contains(identity.as_str()) && all[1].contains(&names[0]),
        "{all:?}"
    );
}

#[test]
fn rejects_unusable_ca_with_reason() {
    let good = root(params("Good"), &PKCS_ECDSA_P384_SHA384);
    let mut leaf = params("Leaf");
    leaf.is_ca = IsCa::NoCa;
    assert!(
        error(&[&root(leaf, &PKCS_ED25519)]).contains("\"CN=Leaf\" is not a certificate authority")
    );
    let mut unsigning = params("Crl");
    unsigning.key_usages = vec![KeyUsagePurpose::CrlSign];
    assert!(error(&[&root(unsigning, &PKCS_ED25519)]).contains("lacks keyCertSign"));
    let mut old = params("Old");
    old.not_after = (SystemTime::now() - HOUR).into();
    assert!(error(&[&root(old, &PKCS_ED25519)]).contains("has expired"));
    let mut young = params("Young");
    young.not_before = (SystemTime::now() + HOUR).into();
    assert!(error(&[&root(young, &PKCS_ED25519)]).contains("is not valid before"));
    let mut narrow = params("Narrow");
    narrow.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    let narrow = root(narrow, &PKCS_ED25519);
    assert!(load(&[&narrow]).is_ok(), "it signs leaves only");
    let reason = error(&[&below(&narrow, params("Below")), &narrow]);
    assert!(
        reason
            .contains("\"CN=Narrow\" allows 0 authorities below it (path length), and there are 1"),
        "{reason}"
    );
    let unrelated = root(params("Good"), &PKCS_ED25519);
    assert!(
        error(&[&below(&good, params("Below")), &unrelated])
            .contains("\"CN=Below\" is not signed by the certificate after it")
    );
    let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for (chain, reason) in [
        ("", "it contains no certificate"),
        (broken, "cannot parse certificate 1"),
    ] {
        let error = Issuer::from_pem(chain, "", SystemTime::now()).unwrap_err();
        assert!(
            matches!(&error, IssuerError::Chain(text) if text.contains(reason)),
            "{error}"
        );
    }
    let curve = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P521_SHA512).unwrap();
    for (key, reason) in [
        (
            unrelated.key().serialize_pem(),
            "does not belong to the certificate of \"CN=Good\"",
        ),
        ("x".to_owned(), "no private key of a supported type"),
        (curve.serialize_pem(), "no private key of a supported type"),
    ] {
        let error = Issuer::from_pem(&good.pem(), &key, SystemTime::now()).unwrap_err();
        assert!(
            matches!(&error, IssuerError::Key(text) if text.contains(reason)),
            "{error}"
        );
    }
}

#[test]
fn accepts_openssl_ca_with_sec1_key_and_any_name() {
    if !has_program("openssl") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let run = |arguments: &str| {
        let output = Command::new("openssl")
            .current_dir(dir.path())
            .args(arguments.split(' '))
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{arguments}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    };
    let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
    // openssl writes "EC PARAMETERS" before "EC PRIVATE KEY".
    run("ecparam -name prime256v1 -genkey -out key");
    run(
        "req -x509 -new -key key -subj /O=Shop/CN=Own -days 30 -addext basicConstraints=critical,CA:TRUE -out crt",
    );
    assert!(
        Issuer::from_pem(&read("crt"), &read("key"), SystemTime::now()).is_ok(),
        "without key usage"
    );
    // Repeated attributes, several attributes in one RDN, long names, non-ASCII names, an empty
    // name.
    let long = format!("/O={}/OU={}/CN=Own", "o".repeat(60), "u".repeat(60));
    for name in [
        "/O=Shop/CN=Own",
        "/DC=com/DC=shop/CN=Own",
        "/O=Shop/OU=one/OU=two",
        "/C=DE/OU=one+CN=Own",
        "/CN=Läden",
        &long,
        "/",
    ] {
        let extensions =
            "-addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign";
        run(&format!(
            "req -x509 -new -utf8 -key key -subj {name} -days 30 {extensions} -out crt"
        ));
        let issuer = Issuer::from_pem(&read("crt"), &read("key"), SystemTime::now())
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let (request, identity) = request();
        let signed = issuer
            .sign(&request, identity.as_str(), SystemTime::now(), HOUR)
            .unwrap();
        let (_, leaf) = X509Certificate::from_der(&signed.der).unwrap();
        let (_, own) = X509Certificate::from_der(&issuer.certificate).unwrap();
        assert_eq!(leaf.issuer().as_raw(), own.subject().as_raw(), "{name}");
        if name != "/" {
            verify(&signed, &read("crt"), "", &identity);
        }
        verify_as_proxy(&issuer.certificate, &signed.der)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn certificate_of_another_generated_ca_has_an_unknown_issuer() {
    let [issuer, other] = [(); 2].map(|()| {
        let generated = self_signed("cluster.local", "CA", SystemTime::now(), HOUR);
        let (certificate, key) = generated.unwrap();
        Issuer::from_pem(&certificate, &key, SystemTime::now()).unwrap()
    });
    let (request, identity) = request();
    let signed = issuer.sign(&request, identity.as_str(), SystemTime::now(), HOUR);
    let leaf = &signed.unwrap().der;
    verify_as_proxy(&issuer.certificate, leaf).unwrap();
    let error = verify_as_proxy(&other.certificate, leaf).unwrap_err();
    assert_eq!(
        error,
        rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer)
    );
}

fn verify_as_proxy(
    root: &CertificateDer<'static>,
    leaf: &CertificateDer<'static>,
) -> Result<(), rustls::Error> {
    let mut roots = RootCertStore::empty();
    roots.add(root.clone())?;
    let provider = std::sync::Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    WebPkiClientVerifier::builder_with_provider(roots.into(), provider)
        .build()
        .unwrap()
        .verify_client_cert(leaf, &[], UnixTime::now())
        .map(|_| ())
}
