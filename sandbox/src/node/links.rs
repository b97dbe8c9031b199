//! Links, addresses and routes in the network namespace of the current thread, over netlink. The
//! formats are from `linux/rtnetlink.h`, `linux/if_link.h` and `linux/if_addr.h`.

use std::{
    fs::File,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsFd, AsRawFd},
};

use anyhow::{Context, Result};
use diy_mesh_proxy_init::nftables::netlink;
use nix::net::if_::if_nametoindex;

/// The first address of a network, and the length of its prefix.
pub(super) type Network = (IpAddr, u8);

/// The network of one address.
pub(super) fn host(address: IpAddr) -> Network {
    (address, if address.is_ipv4() { 32 } else { 128 })
}

/// The network of all addresses of a family.
pub(super) fn all(family: IpAddr) -> Network {
    match family {
        IpAddr::V4(_) => (Ipv4Addr::UNSPECIFIED.into(), 0),
        IpAddr::V6(_) => (Ipv6Addr::UNSPECIFIED.into(), 0),
    }
}

/// Adds a pair of connected links: `name` here, and `peer` in another namespace.
pub(super) fn add_pair(name: &str, peer: &str, namespace: &File) -> Result<()> {
    let namespace = namespace.as_fd().as_raw_fd().cast_unsigned();
    netlink::request(NEW_LINK, CREATE, &link(0, 0), |attributes| {
        attributes.text(LINK_NAME, name);
        attributes.nest(LINK_INFO, |info| {
            info.text(INFO_KIND, "veth");
            info.nest(INFO_DATA, |data| {
                data.nest(VETH_PEER, |attributes| {
                    attributes.header(&link(0, 0));
                    attributes.text(LINK_NAME, peer);
                    attributes.bytes(LINK_NAMESPACE, &namespace.to_ne_bytes());
                });
            });
        });
    })
    .with_context(|| format!("failed to add the links {name} and {peer}"))
}

/// Sets a link up.
pub(super) fn set_up(name: &str) -> Result<()> {
    netlink::request(NEW_LINK, 0, &link(index(name)?, UP), |_| {})
        .with_context(|| format!("failed to set the link {name} up"))
}

/// Adds an address of this machine to a link.
pub(super) fn add_address(name: &str, address: IpAddr) -> Result<()> {
    let mut header = vec![family(address), host(address).1, NO_DUPLICATE_DETECTION, 0];
    header.extend(index(name)?.to_ne_bytes());
    netlink::request(NEW_ADDRESS, CREATE, &header, |attributes| {
        attributes.bytes(ADDRESS_LOCAL, &octets(address));
        attributes.bytes(ADDRESS, &octets(address));
    })
    .with_context(|| format!("failed to add {address} to the link {name}"))
}

/// A route to a network on a link.
#[derive(Clone, Copy)]
pub(super) struct Route<'a> {
    link: &'a str,
    to: Network,
    gateway: Option<IpAddr>,
    source: Option<IpAddr>,
}

impl<'a> Route<'a> {
    pub(super) fn new(link: &'a str, to: Network) -> Self {
        Self {
            link,
            to,
            gateway: None,
            source: None,
        }
    }

    /// Sets the next hop. Without one, the network is on the link.
    pub(super) fn via(self, gateway: IpAddr) -> Self {
        Self {
            gateway: Some(gateway),
            ..self
        }
    }

    /// Sets the source of packets from this machine. Without one, the kernel selects it.
    pub(super) fn from(self, source: IpAddr) -> Self {
        Self {
            source: Some(source),
            ..self
        }
    }

    pub(super) fn add(&self) -> Result<()> {
        let (address, prefix) = self.to;
        let scope = match self.gateway {
            None if address.is_ipv4() => SCOPE_LINK,
            _ => SCOPE_UNIVERSE,
        };
        let index = index(self.link)?;
        let header = [
            family(address),
            prefix,
            0,
            0,
            TABLE_MAIN,
            BY_BOOT,
            scope,
            UNICAST,
            0,
            0,
            0,
            0,
        ];
        netlink::request(NEW_ROUTE, CREATE, &header, |attributes| {
            if prefix > 0 {
                attributes.bytes(ROUTE_DESTINATION, &octets(address));
            }
            attributes.bytes(ROUTE_LINK, &index.to_ne_bytes());
            for (kind, address) in [(ROUTE_GATEWAY, self.gateway), (ROUTE_SOURCE, self.source)] {
                if let Some(address) = address {
                    attributes.bytes(kind, &octets(address));
                }
            }
        })
        .with_context(|| {
            format!(
                "failed to add a route to {address}/{prefix} on the link {}",
                self.link
            )
        })
    }
}

/// The header of messages about links.
fn link(index: u32, flags: u32) -> Vec<u8> {
    let fields = [0, index, flags, flags];
    fields
        .iter()
        .flat_map(|field: &u32| field.to_ne_bytes())
        .collect()
}

fn index(name: &str) -> Result<u32> {
    if_nametoindex(name).with_context(|| format!("no link {name}"))
}

fn family(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => 2,
        IpAddr::V6(_) => 10,
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().into(),
        IpAddr::V6(address) => address.octets().into(),
    }
}

// Messages and their flags: create, and fail if it exists.
const NEW_LINK: u16 = 16;
const NEW_ADDRESS: u16 = 20;
const NEW_ROUTE: u16 = 24;
const CREATE: u16 = 0x600;

// Attributes.
const LINK_NAME: u16 = 3;
const LINK_INFO: u16 = 18;
const LINK_NAMESPACE: u16 = 28;
const INFO_KIND: u16 = 1;
const INFO_DATA: u16 = 2;
const VETH_PEER: u16 = 1;
const ADDRESS: u16 = 1;
const ADDRESS_LOCAL: u16 = 2;
const ROUTE_DESTINATION: u16 = 1;
const ROUTE_LINK: u16 = 4;
const ROUTE_GATEWAY: u16 = 5;
const ROUTE_SOURCE: u16 = 7;

// Values.
const UP: u32 = 1;
const NO_DUPLICATE_DETECTION: u8 = 2;
const TABLE_MAIN: u8 = 254;
const BY_BOOT: u8 = 3;
const SCOPE_UNIVERSE: u8 = 0;
const SCOPE_LINK: u8 = 253;
const UNICAST: u8 = 1;
