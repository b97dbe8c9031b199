//! The destinations outside of the cluster that the pod may call. A destination is allowed by its
//! address, or by a name that the proxy itself has resolved to the address. Statements of the
//! application about an address have no effect. Pure, but for the resolver.

pub mod resolver;
mod special;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use diy_mesh_proto::authorization::{Authorization, Call, Denial, host_name};

use crate::error::Failure;

/// A destination outside of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outside {
    /// Where the proxy connects to.
    pub address: SocketAddr,
    /// The name that has this address, as the proxy has resolved it.
    pub name: Option<Arc<str>>,
}

/// For messages.
impl fmt::Display for Outside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "{name} at {}", self.address),
            None => write!(f, "{}", self.address),
        }
    }
}

/// The AuthorizationPolicies about calls by the pod.
#[derive(Clone, Debug)]
pub struct Egress(Arc<Authorization>);

/// Only the same policies are equal.
impl PartialEq for Egress {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Egress {}

impl Egress {
    /// The policies in this order of precedence: as of calls to pods.
    pub fn new(authorization: Authorization) -> Self {
        Self(Arc::new(authorization.outbound()))
    }

    /// Whether the pod may call the destination.
    pub fn judge(&self, to: &Outside) -> Result<(), Failure> {
        let verdict = self.0.judge(&call(to.address, to.name.as_deref()));
        verdict.map_err(|denial| Failure::EgressDenied {
            destination: to.to_string(),
            reason: denial.to_string(),
        })
    }

    /// Whether it may call this address, whatever its name is.
    pub fn allows_address(&self, address: SocketAddr) -> bool {
        self.0.judge(&call(address, None)).is_ok()
    }

    /// Whether a rule allows the name at this port, if an address of it is allowed too.
    pub fn names(&self, name: &str, port: u16) -> bool {
        self.0.names(name, port)
    }

    /// The denial of an allowed call, if the policies under audit were in force too.
    pub fn audit(&self, address: SocketAddr, name: Option<&str>) -> Option<Denial> {
        self.0.audit(&call(address, name))
    }
}

fn call(address: SocketAddr, host: Option<&str>) -> Call<'_> {
    Call {
        identity: None,
        address: address.ip().to_canonical(),
        port: address.port(),
        host,
        request: None,
        token: None,
    }
}

/// The name in an authority, in lower case, without the port and a trailing dot. `None` for an
/// address.
pub fn name_of(authority: &[u8]) -> Option<String> {
    let name = std::str::from_utf8(host_name(authority)?).ok()?;
    // A last label of digits belongs to an address (RFC 1123, section 2.1).
    let is_address = |name: &str| {
        let last = name.rsplit('.').next().unwrap_or_default();
        last.bytes().all(|byte| byte.is_ascii_digit()) || last.starts_with("0x")
    };
    // RFC 1035, section 2.3.4.
    let is_short = |label: &str| label.len() <= 63;
    let name = name.to_ascii_lowercase();
    let is_name = name.len() <= 253 && name.split('.').all(is_short) && !name.starts_with('[');
    (is_name && !is_address(&name)).then_some(name)
}

/// Whether no name leads there, unless a block of addresses allows it: the pod itself, its machine and
/// its link, and what is no address of one host. NAT64 has no private addresses (RFC 6052, section
/// 3.1).
pub fn is_local(address: IpAddr) -> bool {
    let given = address.to_canonical();
    let mut embedded = special::embedded(given);
    special::is_special(given)
        || embedded.any(|address| special::is_special(address) || is_private(address))
}

/// Whether the address is of a private network (RFC 1918, RFC 4193, RFC 6598), as addresses of
/// clusters are.
pub fn is_private(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => {
            let [first, second, ..] = address.octets();
            address.is_private() || first == 100 && second & 0xc0 == 0x40
        }
        IpAddr::V6(address) => address.is_unique_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_compared_in_one_spelling_and_addresses_are_none() {
        for (authority, expected) in [
            ("API.example.com", Some("api.example.com")),
            ("api.example.com:443", Some("api.example.com")),
            ("api.example.com.", Some("api.example.com")),
            ("api.example.com.:443", Some("api.example.com")),
            ("localhost", Some("localhost")),
            ("192.0.2.1", None),
            ("192.0.2.1:80", None),
            ("0x7f000001", None),
            ("2130706433", None),
            ("0177.0.0.1", None),
            ("[::1]:80", None),
            ("::1", None),
            ("", None),
            (".", None),
            ("a..b", None),
            ("a%2eb", None),
            ("user@api.example.com", None),
            ("api.example.com:x", None),
        ] {
            assert_eq!(
                name_of(authority.as_bytes()).as_deref(),
                expected,
                "{authority}"
            );
        }
        assert_eq!(name_of(b"a\xff.test"), None);
        assert_eq!(name_of("a".repeat(64).as_bytes()), None);
    }

    #[test]
    fn local_and_private_addresses_are_recognized_in_every_form() {
        for local in [
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "169.254.169.254",
            "224.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "fe80::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b::a00:1",
            "fd00:ec2::254",
            "fd00:ec2::23",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
            "100.100.100.200",
            "168.63.129.16",
            "64:ff9b::a83f:8110",
            "64:ff9b:1::a9fe:a9fe",
            "64:ff9b:1:a9fe:a9:fe00::",
            "64:ff9b:1::a00:1",
            "2002:a9fe:a9fe::1",
            "2002:7f00:1::",
            "2002:a00:1::",
            "::7f00:1",
            "192.0.0.192",
            "192.0.2.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.1",
            "203.0.113.1",
            "240.0.0.1",
            "100::1",
            "2001:db8::1",
            "2001::1",
            "3fff::1",
            "5f00::1",
            "fec0::1",
        ] {
            assert!(is_local(local.parse().unwrap()), "{local}");
        }
        for private in [
            "10.0.0.1",
            "172.31.0.1",
            "192.168.0.1",
            "100.64.0.1",
            "100.127.0.1",
            "fd00::1",
            "::ffff:10.0.0.1",
        ] {
            let private: IpAddr = private.parse().unwrap();
            assert!(is_private(private) && !is_local(private), "{private}");
        }
        for public in [
            "1.1.1.1",
            "100.128.0.1",
            "172.32.0.1",
            "192.0.1.1",
            "198.20.0.1",
            "168.63.129.17",
            "2600::1",
            "2001:4860:4860::8888",
            "64:ff9b::101:101",
            "64:ff9b:1:101:1:100:808:808",
            "2002:101:101::1",
        ] {
            let public: IpAddr = public.parse().unwrap();
            assert!(!is_private(public) && !is_local(public), "{public}");
        }
    }
}
