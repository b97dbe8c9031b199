//! Identities and workload certificates. Each has exactly one encoding.

use diy_mesh_model::identity::Identity;
use diy_mesh_proxy::secure::identity::{Leaf, identity_of};
use rustls::pki_types::CertificateDer;

/// Parses an identity, and a certificate.
pub fn identity(bytes: &[u8]) {
    if let Some(identity) = std::str::from_utf8(bytes)
        .ok()
        .and_then(|text| text.parse::<Identity>().ok())
    {
        assert_eq!(
            identity.as_str().as_bytes(),
            bytes,
            "more than one spelling"
        );
        is_one(&identity);
    }
    let certificate = CertificateDer::from(bytes);
    let Ok((identity, until)) = identity_of(&certificate) else {
        assert!(Leaf::parse(&certificate).is_err());
        return;
    };
    is_one(&identity);
    assert!(
        crate::contains(bytes, identity.as_str().as_bytes()),
        "{identity} is not in the certificate"
    );
    let leaf = Leaf::parse(&certificate).expect("a certificate with an identity");
    assert_eq!((leaf.identity, leaf.not_after), (identity, until));
    // The encoding is unique.
    let longer = [bytes, b"\0"].concat();
    assert!(
        identity_of(&CertificateDer::from(longer)).is_err(),
        "accepts trailing bytes"
    );
    assert!(
        identity_of(&CertificateDer::from(&bytes[..bytes.len() - 1])).is_err(),
        "accepts a truncated certificate"
    );
}

fn is_one(identity: &Identity) {
    let text = identity.as_str();
    assert_eq!(text.parse().as_ref(), Ok(identity));
    assert_eq!(
        Identity::new(
            identity.trust_domain(),
            identity.namespace(),
            identity.service_account()
        )
        .as_ref(),
        Ok(identity)
    );
    assert_eq!(
        Identity::from_user(identity.trust_domain(), &identity.user()).as_ref(),
        Ok(identity)
    );
    assert!(
        text.len() <= 2048
            && text
                .bytes()
                .all(|byte| byte.is_ascii_graphic() && !byte.is_ascii_uppercase()),
        "{text}"
    );
    // Policies and logs name it: it has no way out of its place in them.
    assert_eq!(text.split('/').count(), 7, "{text}");
}
