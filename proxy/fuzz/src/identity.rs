//! Who a peer is: the text of an identity, and the certificate that names one. Neither has two readings.

use diy_mesh_proto::Identity;
use diy_mesh_proxy::identity::{Leaf, identity_of};
use rustls::pki_types::CertificateDer;

/// A peer's certificate; and the text of an identity.
pub fn identity(bytes: &[u8]) {
    if let Some(identity) = std::str::from_utf8(bytes)
        .ok()
        .and_then(|text| text.parse::<Identity>().ok())
    {
        assert_eq!(identity.as_str().as_bytes(), bytes, "another spelling");
        is_one(&identity);
    }
    let certificate = CertificateDer::from(bytes);
    let Ok((identity, until)) = identity_of(&certificate) else {
        assert!(Leaf::read(&certificate).is_err());
        return;
    };
    is_one(&identity);
    assert!(
        crate::contains(bytes, identity.as_str().as_bytes()),
        "{identity} is not in the certificate"
    );
    let leaf = Leaf::read(&certificate).expect("whoever is named by it has a certificate");
    assert_eq!((leaf.identity, leaf.not_after), (identity, until));
    // No other bytes are the same certificate.
    let longer = [bytes, b"\0"].concat();
    assert!(
        identity_of(&CertificateDer::from(longer)).is_err(),
        "bytes behind it are passed over"
    );
    assert!(
        identity_of(&CertificateDer::from(&bytes[..bytes.len() - 1])).is_err(),
        "its last byte is not looked at"
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
