//! Who a workload is: its SPIFFE ID (the SPIFFE-ID standard, sections 2 and 4), made of its trust domain, namespace and service
//! account. The one parser for all parts of the mesh; pure, strict, and shared so that no two of them disagree.

use std::fmt;
use std::str::FromStr;

/// The trust domain, unless the mesh is told another one.
pub const TRUST_DOMAIN: &str = "cluster.local";

/// The most that a SPIFFE ID may have (SPIFFE-ID, section 2.3).
const LONGEST: usize = 2048;
/// The most that a trust domain may have (SPIFFE-ID, section 2.1).
const LONGEST_TRUST_DOMAIN: usize = 255;

/// `spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/SERVICE-ACCOUNT`. Two are equal where their text is: there is one spelling of each.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    text: Box<str>,
    /// Where the trust domain ends in `text`.
    trust_domain: usize,
    /// Where the namespace ends in `text`.
    namespace: usize,
}

/// Why a text is not the identity of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotAnIdentity(&'static str);

impl fmt::Display for NotAnIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "not a workload's SPIFFE ID (spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/SERVICE-ACCOUNT): {}",
            self.0
        )
    }
}

impl std::error::Error for NotAnIdentity {}

const SCHEME: &str = "spiffe://";
const NAMESPACE: &str = "/ns/";
const SERVICE_ACCOUNT: &str = "/sa/";

impl Identity {
    /// Puts an identity together.
    pub fn new(
        trust_domain: &str,
        namespace: &str,
        service_account: &str,
    ) -> Result<Self, NotAnIdentity> {
        if trust_domain.len() > LONGEST_TRUST_DOMAIN || !is_name(trust_domain, b"-._") {
            return Err(NotAnIdentity(
                "the trust domain is not made of a-z, 0-9, dot, hyphen and underscore",
            ));
        }
        if !is_name(namespace, b"-") {
            return Err(NotAnIdentity(
                "the namespace is not made of a-z, 0-9 and hyphen",
            ));
        }
        if !is_name(service_account, b"-.") || matches!(service_account, "." | "..") {
            return Err(NotAnIdentity(
                "the service account is not made of a-z, 0-9, dot and hyphen",
            ));
        }
        let text = format!(
            "{SCHEME}{trust_domain}{NAMESPACE}{namespace}{SERVICE_ACCOUNT}{service_account}"
        );
        if text.len() > LONGEST {
            return Err(NotAnIdentity("it is longer than 2048 bytes"));
        }
        let trust_domain = SCHEME.len() + trust_domain.len();
        Ok(Self {
            text: text.into(),
            trust_domain,
            namespace: trust_domain + NAMESPACE.len() + namespace.len(),
        })
    }

    /// Of a service account's user name, as Kubernetes writes it: `system:serviceaccount:NAMESPACE:NAME`.
    pub fn of_user(trust_domain: &str, user: &str) -> Result<Self, NotAnIdentity> {
        let name = user
            .strip_prefix("system:serviceaccount:")
            .and_then(|name| name.split_once(':'));
        let (namespace, service_account) =
            name.ok_or(NotAnIdentity("the user is no service account"))?;
        Self::new(trust_domain, namespace, service_account)
    }

    /// The whole of it, as a URI.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// For example `cluster.local`.
    pub fn trust_domain(&self) -> &str {
        &self.text[SCHEME.len()..self.trust_domain]
    }

    /// The workload's namespace.
    pub fn namespace(&self) -> &str {
        &self.text[self.trust_domain + NAMESPACE.len()..self.namespace]
    }

    /// The workload's service account.
    pub fn service_account(&self) -> &str {
        &self.text[self.namespace + SERVICE_ACCOUNT.len()..]
    }

    /// The service account's user name, as Kubernetes writes it.
    pub fn user(&self) -> String {
        format!(
            "system:serviceaccount:{}:{}",
            self.namespace(),
            self.service_account()
        )
    }
}

fn is_name(text: &str, others: &[u8]) -> bool {
    !text.is_empty()
        && text.bytes().all(|byte| {
            byte.is_ascii_lowercase() || byte.is_ascii_digit() || others.contains(&byte)
        })
}

impl FromStr for Identity {
    type Err = NotAnIdentity;

    fn from_str(text: &str) -> Result<Self, NotAnIdentity> {
        let rest = text
            .strip_prefix(SCHEME)
            .ok_or(NotAnIdentity("it does not begin with spiffe://"))?;
        let parts: Vec<&str> = rest.split('/').take(6).collect();
        match parts[..] {
            [trust_domain, "ns", namespace, "sa", service_account] => {
                Self::new(trust_domain, namespace, service_account)
            }
            _ => Err(NotAnIdentity(
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
    fn its_parts_come_out_as_they_went_in() {
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
            Identity::of_user("cluster.local", &identity.user()),
            Ok(identity)
        );
    }

    #[test]
    fn whatever_has_another_spelling_is_refused() {
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
    fn other_users_than_service_accounts_have_no_identity() {
        for user in [
            "",
            "kubernetes-admin",
            "system:node:one",
            "system:serviceaccount:shop",
            "system:serviceaccount:shop:web:more",
        ] {
            assert!(
                Identity::of_user("cluster.local", user).is_err(),
                "{user:?}"
            );
        }
    }
}
