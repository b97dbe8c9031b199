//! Workload identity: a SPIFFE ID (SPIFFE-ID standard, sections 2 and 4) of trust domain, namespace
//! and service account. All components use this strict parser.

use std::fmt;
use std::str::FromStr;

/// Default trust domain.
pub const TRUST_DOMAIN: &str = "cluster.local";

/// Maximum length of a SPIFFE ID in bytes (SPIFFE-ID, section 2.3).
const MAX_LENGTH: usize = 2048;
/// Maximum length of a trust domain in bytes (SPIFFE-ID, section 2.1).
const MAX_TRUST_DOMAIN_LENGTH: usize = 255;

/// Identity `spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/SERVICE-ACCOUNT`. The text form is canonical:
/// equal texts mean equal identities.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    text: Box<str>,
    /// End of the trust domain in `text`.
    trust_domain: usize,
    /// End of the namespace in `text`.
    namespace: usize,
}

/// Error of parsing an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid workload identity, expected spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/SERVICE-ACCOUNT: {0}"
)]
pub struct InvalidIdentity(&'static str);

const SCHEME: &str = "spiffe://";
const NAMESPACE: &str = "/ns/";
const SERVICE_ACCOUNT: &str = "/sa/";
/// The Kubernetes user names of service accounts.
const USER: &str = "system:serviceaccount:";

impl Identity {
    /// Creates an identity from its parts.
    pub fn new(
        trust_domain: &str,
        namespace: &str,
        service_account: &str,
    ) -> Result<Self, InvalidIdentity> {
        if trust_domain.len() > MAX_TRUST_DOMAIN_LENGTH || !is_name(trust_domain, b"-._") {
            return Err(InvalidIdentity(
                "the trust domain has characters other than a-z, 0-9, dot, hyphen and underscore",
            ));
        }
        if !is_name(namespace, b"-") {
            return Err(InvalidIdentity(
                "the namespace has characters other than a-z, 0-9 and hyphen",
            ));
        }
        if !is_name(service_account, b"-.") || matches!(service_account, "." | "..") {
            return Err(InvalidIdentity(
                "the service account has characters other than a-z, 0-9, dot and hyphen",
            ));
        }
        let text = format!(
            "{SCHEME}{trust_domain}{NAMESPACE}{namespace}{SERVICE_ACCOUNT}{service_account}"
        );
        if text.len() > MAX_LENGTH {
            return Err(InvalidIdentity("it is longer than 2048 bytes"));
        }
        let trust_domain = SCHEME.len() + trust_domain.len();
        Ok(Self {
            text: text.into(),
            trust_domain,
            namespace: trust_domain + NAMESPACE.len() + namespace.len(),
        })
    }

    /// Creates an identity from a Kubernetes user name, `system:serviceaccount:NAMESPACE:NAME`.
    pub fn from_user(trust_domain: &str, user: &str) -> Result<Self, InvalidIdentity> {
        let (namespace, service_account) =
            account(user).ok_or(InvalidIdentity("the user is not a service account"))?;
        Self::new(trust_domain, namespace, service_account)
    }

    /// The identity as a URI.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Trust domain, for example `cluster.local`.
    pub fn trust_domain(&self) -> &str {
        &self.text[SCHEME.len()..self.trust_domain]
    }

    /// Namespace of the workload.
    pub fn namespace(&self) -> &str {
        &self.text[self.trust_domain + NAMESPACE.len()..self.namespace]
    }

    /// Service account of the workload.
    pub fn service_account(&self) -> &str {
        &self.text[self.namespace + SERVICE_ACCOUNT.len()..]
    }

    /// Kubernetes user name of the service account.
    pub fn user(&self) -> String {
        user(self.namespace(), self.service_account())
    }
}

/// The Kubernetes user name of a service account.
pub fn user(namespace: &str, service_account: &str) -> String {
    format!("{USER}{namespace}:{service_account}")
}

/// The namespace and the name in the Kubernetes user name of a service account.
pub fn account(user: &str) -> Option<(&str, &str)> {
    user.strip_prefix(USER)?.split_once(':')
}

fn is_name(text: &str, others: &[u8]) -> bool {
    !text.is_empty()
        && text.bytes().all(|byte| {
            byte.is_ascii_lowercase() || byte.is_ascii_digit() || others.contains(&byte)
        })
}

impl FromStr for Identity {
    type Err = InvalidIdentity;

    fn from_str(text: &str) -> Result<Self, InvalidIdentity> {
        let rest = text
            .strip_prefix(SCHEME)
            .ok_or(InvalidIdentity("it does not start with spiffe://"))?;
        let parts: Vec<&str> = rest.split('/').take(6).collect();
        match parts[..] {
            [trust_domain, "ns", namespace, "sa", service_account] => {
                Self::new(trust_domain, namespace, service_account)
            }
            _ => Err(InvalidIdentity(
                "its path is not /ns/NAMESPACE/sa/SERVICE-ACCOUNT",
            )),
        }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_of_parts_and_text() {
        let identity = Identity::new("cluster.local", "shop", "web.v2").unwrap();
        assert_eq!(
            identity.as_str(),
            "spiffe://cluster.local/ns/shop/sa/web.v2"
        );
        assert_eq!(
            (
                identity.trust_domain(),
                identity.namespace(),
                identity.service_account()
            ),
            ("cluster.local", "shop", "web.v2")
        );
        assert_eq!(identity.as_str().parse(), Ok(identity.clone()));
        assert_eq!(identity.user(), "system:serviceaccount:shop:web.v2");
        assert_eq!(
            Identity::from_user("cluster.local", &identity.user()),
            Ok(identity)
        );
    }

    #[test]
    fn rejects_non_canonical_text() {
        for text in [
            "",
            "spiffe://",
            "spiffe://cluster.local",
            "spiffe://cluster.local/ns/shop",
            "spiffe://cluster.local/ns/shop/sa/",
            "spiffe://cluster.local/ns//sa/web",
            "spiffe:///ns/shop/sa/web",
            "SPIFFE://cluster.local/ns/shop/sa/web",
            "spiffe://Cluster.local/ns/shop/sa/web",
            "spiffe://cluster.local/ns/shop/sa/web/",
            "spiffe://cluster.local/ns/shop/sa/web?x",
            "spiffe://cluster.local/ns/shop/sa/w%65b",
            "spiffe://cluster.local/ns/shop/sa/..",
            "spiffe://cluster.local:443/ns/shop/sa/web",
            "spiffe://user@cluster.local/ns/shop/sa/web",
            "https://cluster.local/ns/shop/sa/web",
            "spiffe://cluster.local/ns/shop/sa/web\0",
        ] {
            assert!(text.parse::<Identity>().is_err(), "{text:?}");
        }
        assert!(
            format!("spiffe://{}/ns/a/sa/b", "a".repeat(256))
                .parse::<Identity>()
                .is_err()
        );
        assert!(
            format!("spiffe://a/ns/{}/sa/b", "a".repeat(2048))
                .parse::<Identity>()
                .is_err()
        );
    }

    #[test]
    fn rejects_users_that_are_not_service_accounts() {
        for user in [
            "",
            "kubernetes-admin",
            "system:node:one",
            "system:serviceaccount:shop",
            "system:serviceaccount:shop:web:more",
        ] {
            assert!(
                Identity::from_user("cluster.local", user).is_err(),
                "{user:?}"
            );
        }
    }
}
