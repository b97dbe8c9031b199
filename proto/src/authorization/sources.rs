//! Conditions on the other end of a call: the identity and the address of its client, or, of egress, the
//! name and the address of its destination.

use std::net::{IpAddr, Ipv6Addr};

use diy_mesh_model::identity::Identity;

use super::Call;
use super::fields::HostPattern;
use super::truth::Truth;
use crate::mesh::v1 as proto;
use crate::mesh::v1::authorization_source::Kind;
use crate::policy::{Violation, violation};

/// A condition on the other end.
#[derive(Debug)]
pub(super) enum Source {
    Identity(proto::IdentityMatch),
    Block(Block),
    Unauthenticated,
    Host(HostPattern),
}

/// Addresses with a common prefix. IPv4 addresses are mapped to IPv6.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Block {
    prefix: u128,
    mask: u128,
}

impl Source {
    pub(super) fn parse(message: &proto::AuthorizationSource) -> Result<Source, Violation> {
        match &message.kind {
            Some(Kind::Identity(identity)) => {
                check_identity(identity)?;
                Ok(Source::Identity(identity.clone()))
            }
            Some(Kind::IpBlock(text)) => Block::parse(text).map(Source::Block).ok_or_else(|| {
                let expected = "a block of addresses, such as 10.0.0.0/8";
                violation("ipBlock", text, expected)
            }),
            Some(Kind::Unauthenticated(_)) => Ok(Source::Unauthenticated),
            Some(Kind::Host(text)) => HostPattern::parse(text)
                .map(Source::Host)
                .map_err(|violation| violation.within("host")),
            None => {
                let expected = "one of identity, ipBlock, unauthenticated and host";
                Err(violation("type", "", expected))
            }
        }
    }

    pub(super) fn truth(&self, call: &Call<'_>) -> Truth {
        match (self, call.identity) {
            (Source::Identity(expected), Some(identity)) => is_identity(expected, identity).into(),
            (Source::Identity(_), None) => Truth::Unknown,
            (Source::Block(block), _) => block.contains(call.address).into(),
            (Source::Unauthenticated, identity) => identity.is_none().into(),
            (Source::Host(host), _) => call
                .host
                .map_or(Truth::Unknown, |name| host.matches(name.as_bytes()).into()),
        }
    }

    /// The names, of a condition on a name.
    pub(super) fn host(&self) -> Option<&HostPattern> {
        match self {
            Source::Host(host) => Some(host),
            _ => None,
        }
    }
}

fn is_identity(expected: &proto::IdentityMatch, identity: &Identity) -> bool {
    let is_part = |expected: &str, part: &str| expected.is_empty() || expected == part;
    is_part(&expected.namespace, identity.namespace())
        && is_part(&expected.service_account, identity.service_account())
        && is_part(&expected.trust_domain, identity.trust_domain())
}

fn check_identity(message: &proto::IdentityMatch) -> Result<(), Violation> {
    let (domain, namespace) = (&*message.trust_domain, &*message.namespace);
    let account = &*message.service_account;
    let part = |part: &str| if part.is_empty() { "any" } else { part }.to_owned();
    let identity = Identity::new(&part(domain), &part(namespace), &part(account));
    identity.map(|_| ()).map_err(|_| {
        let value = format!("{domain}/{namespace}/{account}");
        let expected = "a trust domain, a namespace and a service account";
        violation("identity", value, expected)
    })
}

impl Block {
    /// Parses CIDR notation. The bits after the prefix are 0.
    fn parse(text: &str) -> Option<Block> {
        let (address, length) = text.split_once('/')?;
        let address: IpAddr = address.parse().ok()?;
        let is_number = length.len() <= 3 && length.bytes().all(|byte| byte.is_ascii_digit());
        let length: u32 = length.parse().ok().filter(|_| is_number)?;
        let (most, mapped) = if address.is_ipv4() {
            (32, 96)
        } else {
            (128, 0)
        };
        if length > most {
            return None;
        }
        let mask = u128::MAX.checked_shl(128 - length - mapped).unwrap_or(0);
        let prefix = mapped_bits(address);
        (prefix & !mask == 0).then_some(Block { prefix, mask })
    }

    /// A block of IPv6 that contains all mapped addresses of IPv4, such as `::/0`, contains none.
    fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        let is_of_ipv4 = |bits: u128| Ipv6Addr::from_bits(bits).to_ipv4_mapped().is_some();
        let is_family = address.is_ipv4() == is_of_ipv4(self.prefix);
        is_family && mapped_bits(address) & self.mask == self.prefix
    }
}

fn mapped_bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().to_bits(),
        IpAddr::V6(address) => address.to_bits(),
    }
}
