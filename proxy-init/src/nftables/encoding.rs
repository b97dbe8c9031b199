//! Messages and expressions of nf_tables. The kernel's numbers are from
//! `linux/netfilter/nf_tables.h`.

use std::net::{IpAddr, SocketAddr};

pub(super) use nix::libc::{
    NFT_CMP_EQ, NFT_CMP_GTE, NFT_CMP_LTE, NFT_CT_DIRECTION, NFT_META_IIFNAME, NFT_META_L4PROTO,
    NFT_META_NFPROTO, NFT_META_OIFNAME, NFT_META_SKUID, NFT_NAT_DNAT, NFT_NG_RANDOM,
    NFT_PAYLOAD_NETWORK_HEADER, NFT_PAYLOAD_TRANSPORT_HEADER, NFT_REG_1, NFT_REG_2,
    NFT_REG_VERDICT, NFT_REJECT_ICMPX_UNREACH, NFT_RETURN,
};

use super::netlink::{Attributes, Batch};

/// Where the kernel evaluates a chain.
#[derive(Debug, Clone, Copy)]
pub struct Hook {
    /// The type of the chain: `nat` or `filter`.
    pub kind: &'static str,
    /// `prerouting`, `forward`, `output` or `postrouting`.
    pub name: &'static str,
    /// Chains with lower numbers come first.
    pub priority: i32,
}

impl Hook {
    fn number(&self) -> i32 {
        let names = ["prerouting", "input", "forward", "output", "postrouting"];
        let position = names.iter().zip(0..).find(|(name, _)| **name == self.name);
        position.expect("the kernel has the hook").1
    }
}

/// Deletes a table, which is created before if there is none, and creates it again.
pub fn replace_table(batch: &mut Batch, table: &str) {
    for message in [NEW_TABLE, DELETE_TABLE, NEW_TABLE] {
        batch.add(message, format!("table inet {table}"), |attributes| {
            attributes.text(TABLE_NAME, table);
        });
    }
}

/// Adds a chain to a table.
pub fn add_chain(batch: &mut Batch, table: &str, name: &str, hook: Hook) {
    batch.add(NEW_CHAIN, format!("chain {name}"), |attributes| {
        attributes.text(CHAIN_TABLE, table);
        attributes.text(CHAIN_NAME, name);
        attributes.nest(CHAIN_HOOK, |attributes| {
            attributes.number(HOOK_NUMBER, hook.number());
            attributes.number(HOOK_PRIORITY, hook.priority);
        });
        attributes.text(CHAIN_TYPE, hook.kind);
    });
}

/// Adds a rule to a chain. `what` names it in errors, and `write` adds its expressions.
pub fn add_rule(
    batch: &mut Batch,
    table: &str,
    chain: &str,
    what: String,
    write: impl FnOnce(&mut Attributes),
) {
    batch.add(NEW_RULE, what, |attributes| {
        attributes.text(RULE_TABLE, table);
        attributes.text(RULE_CHAIN, chain);
        attributes.nest(RULE_EXPRESSIONS, write);
    });
}

/// Is sent to an address of the network, whose prefix has whole bytes.
pub fn destination(to: &mut Attributes, address: IpAddr, prefix: u8) {
    address_at(to, address, prefix, [16, 24]);
}

/// Comes from an address.
pub fn source(to: &mut Attributes, address: IpAddr) {
    address_at(to, address, 128, [12, 8]);
}

/// Compares an address at the offset of its family.
fn address_at(to: &mut Attributes, address: IpAddr, prefix: u8, [v4, v6]: [i32; 2]) {
    let length = usize::from(prefix / 8);
    meta(to, NFT_META_NFPROTO, &[family(address)]);
    match address {
        IpAddr::V4(address) => network(to, v4, &address.octets()[..length.min(4)]),
        IpAddr::V6(address) => network(to, v6, &address.octets()[..length]),
    }
}

/// Has the protocol and the destination port.
pub fn port(to: &mut Attributes, protocol: u8, port: u16) {
    meta(to, NFT_META_L4PROTO, &[protocol]);
    payload(to, NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2);
    compare(to, NFT_CMP_EQ, &port.to_be_bytes());
}

/// Has a random number that one of `count` packets has.
pub fn one_of(to: &mut Attributes, count: usize) {
    expression(to, "numgen", |generator| {
        generator.number(RANDOM_REGISTER, NFT_REG_1);
        generator.number(RANDOM_MODULUS, i32::try_from(count).unwrap_or(i32::MAX));
        generator.number(RANDOM_TYPE, NFT_NG_RANDOM);
    });
    compare(to, NFT_CMP_EQ, &0_u32.to_ne_bytes());
}

/// Changes the destination.
pub fn translate(to: &mut Attributes, target: SocketAddr) {
    match target.ip() {
        IpAddr::V4(address) => load(to, NFT_REG_1, &address.octets()),
        IpAddr::V6(address) => load(to, NFT_REG_1, &address.octets()),
    }
    load(to, NFT_REG_2, &target.port().to_be_bytes());
    expression(to, "nat", |nat| {
        nat.number(NAT_TYPE, NFT_NAT_DNAT);
        nat.number(NAT_FAMILY, i32::from(family(target.ip())));
        nat.number(NAT_ADDRESS, NFT_REG_1);
        nat.number(NAT_PORT, NFT_REG_2);
    });
}

/// Refuses the packet.
pub fn reject(to: &mut Attributes) {
    expression(to, "reject", |reject| {
        reject.number(REJECT_TYPE, NFT_REJECT_ICMPX_UNREACH);
        reject.bytes(REJECT_CODE, &[ICMPX_PORT_UNREACHABLE]);
    });
}

/// Loads a value.
pub fn load(to: &mut Attributes, register: i32, value: &[u8]) {
    expression(to, "immediate", |immediate| {
        immediate.number(IMMEDIATE_REGISTER, register);
        immediate.nest(IMMEDIATE_DATA, |data| data.bytes(DATA_VALUE, value));
    });
}

fn family(address: IpAddr) -> u8 {
    if address.is_ipv4() {
        FAMILY_IPV4
    } else {
        FAMILY_IPV6
    }
}

/// Compares a property of the packet.
pub fn meta(to: &mut Attributes, key: i32, value: &[u8]) {
    expression(to, "meta", |meta| {
        meta.number(META_REGISTER, NFT_REG_1);
        meta.number(META_KEY, key);
    });
    compare(to, NFT_CMP_EQ, value);
}

/// Compares the first bytes of an address in the header of IP.
fn network(to: &mut Attributes, offset: i32, bytes: &[u8]) {
    let length = i32::try_from(bytes.len()).expect("an address has at most 16 bytes");
    payload(to, NFT_PAYLOAD_NETWORK_HEADER, offset, length);
    compare(to, NFT_CMP_EQ, bytes);
}

/// Loads bytes of a header.
pub fn payload(to: &mut Attributes, header: i32, offset: i32, length: i32) {
    expression(to, "payload", |payload| {
        payload.number(PAYLOAD_REGISTER, NFT_REG_1);
        payload.number(PAYLOAD_BASE, header);
        payload.number(PAYLOAD_OFFSET, offset);
        payload.number(PAYLOAD_LENGTH, length);
    });
}

/// Compares what was loaded.
pub fn compare(to: &mut Attributes, operator: i32, value: &[u8]) {
    expression(to, "cmp", |compare| {
        compare.number(COMPARE_REGISTER, NFT_REG_1);
        compare.number(COMPARE_OPERATOR, operator);
        compare.nest(COMPARE_DATA, |data| data.bytes(DATA_VALUE, value));
    });
}

/// Adds an expression.
pub fn expression(to: &mut Attributes, name: &str, data: impl FnOnce(&mut Attributes)) {
    to.nest(LIST_ELEMENT, |element| {
        element.text(EXPRESSION_NAME, name);
        element.nest(EXPRESSION_DATA, data);
    });
}

// Messages.
pub(super) const NEW_TABLE: u16 = 0;
pub(super) const DELETE_TABLE: u16 = 2;
pub(super) const NEW_CHAIN: u16 = 3;
pub(super) const NEW_RULE: u16 = 6;

// Attributes.
pub(super) const TABLE_NAME: u16 = 1;
pub(super) const CHAIN_TABLE: u16 = 1;
pub(super) const CHAIN_NAME: u16 = 3;
pub(super) const CHAIN_HOOK: u16 = 4;
pub(super) const CHAIN_TYPE: u16 = 7;
pub(super) const HOOK_NUMBER: u16 = 1;
pub(super) const HOOK_PRIORITY: u16 = 2;
pub(super) const RULE_TABLE: u16 = 1;
pub(super) const RULE_CHAIN: u16 = 2;
pub(super) const RULE_EXPRESSIONS: u16 = 4;
pub(super) const LIST_ELEMENT: u16 = 1;
pub(super) const EXPRESSION_NAME: u16 = 1;
pub(super) const EXPRESSION_DATA: u16 = 2;
pub(super) const META_REGISTER: u16 = 1;
pub(super) const META_KEY: u16 = 2;
pub(super) const PAYLOAD_REGISTER: u16 = 1;
pub(super) const PAYLOAD_BASE: u16 = 2;
pub(super) const PAYLOAD_OFFSET: u16 = 3;
pub(super) const PAYLOAD_LENGTH: u16 = 4;
pub(super) const COMPARE_REGISTER: u16 = 1;
pub(super) const COMPARE_OPERATOR: u16 = 2;
pub(super) const COMPARE_DATA: u16 = 3;
pub(super) const CT_REGISTER: u16 = 1;
pub(super) const CT_KEY: u16 = 2;
pub(super) const IMMEDIATE_REGISTER: u16 = 1;
pub(super) const IMMEDIATE_DATA: u16 = 2;
pub(super) const DATA_VALUE: u16 = 1;
pub(super) const DATA_VERDICT: u16 = 2;
pub(super) const VERDICT_CODE: u16 = 1;
pub(super) const REDIRECT_PORT_REGISTER: u16 = 1;
pub(super) const REJECT_TYPE: u16 = 1;
pub(super) const REJECT_CODE: u16 = 2;

const RANDOM_REGISTER: u16 = 1;
const RANDOM_MODULUS: u16 = 2;
const RANDOM_TYPE: u16 = 3;
const NAT_TYPE: u16 = 1;
const NAT_FAMILY: u16 = 2;
const NAT_ADDRESS: u16 = 3;
const NAT_PORT: u16 = 5;

// Values of packets. The name of an interface has 16 bytes.
pub(super) const LOOPBACK: &[u8] = b"lo\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
pub(super) const FAMILY_IPV4: u8 = 2;
pub(super) const FAMILY_IPV6: u8 = 10;
pub(super) const DIRECTION_REPLY: u8 = 1;
pub(super) const ICMPX_PORT_UNREACHABLE: u8 = 1;
