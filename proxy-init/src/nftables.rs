//! The rules as one table of nftables, which the kernel replaces in one transaction. It holds both
//! address families, and changes no other table.
//!
//! The text of a table is the output of `nft -y list table inet diy-service-mesh`, so that printed and
//! loaded rules are comparable. The kernel's numbers are those of `linux/netfilter/nf_tables.h`.

mod netlink;

use std::fmt::{self, Display, Write as _};
use std::net::IpAddr;

use nix::errno::Errno;

use self::netlink::{Attributes, Batch};
use crate::rules::{Chain, Condition, Packets, Protocol, Rule, Verdict};

const TABLE: &str = "diy-service-mesh";

/// Before the chains of iptables (-100): the first redirect of a connection counts, and rules of
/// others in the pod must not take it away from the proxy.
const NAT_PRIORITY: i32 = -101;
const FILTER_PRIORITY: i32 = 0;

/// Error of loading the table.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The kernel lacks a part of nf_tables.
    #[error(
        "{0}: the kernel does not support it: {1}; load nf_tables, nft_chain_nat, nft_redir, nft_ct and nft_reject_inet \
         on the node (Linux 5.2 or newer), or use the image of proxy-init whose tag ends in -iptables"
    )]
    Unsupported(String, Errno),
    /// The kernel has rejected a part of the table, and changed nothing.
    #[error("{0} rejected: {1}; the container needs the capability NET_ADMIN")]
    NotPermitted(String, Errno),
    /// The kernel has rejected a part of the table, and changed nothing.
    #[error("{0} rejected: {1}")]
    Rejected(String, Errno),
}

/// Replaces the table.
pub fn apply(chains: &[Chain]) -> Result<(), Error> {
    batch(chains)
        .send()
        .map_err(|(item, errno)| Error::new(&item, errno))
}

impl Error {
    fn new(item: &str, errno: Errno) -> Self {
        let error = match errno {
            Errno::ENOENT | Errno::EOPNOTSUPP | Errno::EPROTONOSUPPORT | Errno::EAFNOSUPPORT => {
                Self::Unsupported
            }
            Errno::EPERM => Self::NotPermitted,
            _ => Self::Rejected,
        };
        error(item.to_owned(), errno)
    }
}

/// The text of the table.
pub fn text(chains: &[Chain]) -> String {
    let mut text = format!("table inet {TABLE} {{\n");
    for (position, chain) in chains.iter().enumerate() {
        let separator = if position == 0 { "" } else { "\n" };
        let Hook {
            kind,
            name,
            priority,
            ..
        } = hook(chain.packets);
        write!(
            text,
            "{separator}\tchain {} {{\n\t\ttype {kind} hook {name} priority {priority}; policy accept;\n",
            chain_name(chain.packets)
        )
        .expect(NEVER_FAILS);
        for rule in &chain.rules {
            writeln!(text, "\t\t{rule}").expect(NEVER_FAILS);
        }
        text.push_str("\t}\n");
    }
    text + "}\n"
}

const NEVER_FAILS: &str = "writing to a String never fails";

/// Where the kernel evaluates a chain.
struct Hook {
    kind: &'static str,
    name: &'static str,
    number: u32,
    priority: i32,
}

fn hook(packets: Packets) -> Hook {
    let (kind, name, number, priority) = match packets {
        Packets::Inbound => ("nat", "prerouting", 0, NAT_PRIORITY),
        Packets::Outbound => ("nat", "output", 3, NAT_PRIORITY),
        Packets::OutboundUdp => ("filter", "output", 3, FILTER_PRIORITY),
    };
    Hook {
        kind,
        name,
        number,
        priority,
    }
}

fn chain_name(packets: Packets) -> &'static str {
    match packets {
        Packets::Inbound => "inbound",
        Packets::Outbound => "outbound",
        Packets::OutboundUdp => "outbound-udp",
    }
}

/// A rule in the syntax of nft.
impl Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for condition in &self.conditions {
            match condition {
                Condition::FromLoopback => write!(f, "iifname \"lo\" ")?,
                Condition::ToLoopback => write!(f, "oifname \"lo\" ")?,
                Condition::To(address, prefix) => {
                    let family = if address.is_ipv4() { "ip" } else { "ip6" };
                    write!(f, "{family} daddr {address}")?;
                    match (address, prefix) {
                        (IpAddr::V4(_), 32) | (IpAddr::V6(_), 128) => write!(f, " ")?,
                        _ => write!(f, "/{prefix} ")?,
                    }
                }
                Condition::Protocol(protocol) => write!(f, "meta l4proto {} ", protocol.name())?,
                Condition::Ports(protocol, ports) => {
                    write!(f, "{} dport {}", protocol.name(), ports.start())?;
                    if ports.start() != ports.end() {
                        write!(f, "-{}", ports.end())?;
                    }
                    write!(f, " ")?;
                }
                Condition::User(uid) => write!(f, "meta skuid {uid} ")?,
                Condition::Reply => write!(f, "ct direction reply ")?,
            }
        }
        match self.verdict {
            Verdict::Return => write!(f, "return"),
            Verdict::Redirect(port) => write!(f, "redirect to :{port}"),
            Verdict::Refuse => write!(f, "reject"),
        }
    }
}

/// The transaction: deletes the table, which is created before if there is none, and creates it
/// again.
fn batch(chains: &[Chain]) -> Batch {
    let mut batch = Batch::new();
    for message in [NEW_TABLE, DELETE_TABLE, NEW_TABLE] {
        batch.add(message, format!("table inet {TABLE}"), |table| {
            table.text(TABLE_NAME, TABLE);
        });
    }
    for chain in chains {
        let (name, hook) = (chain_name(chain.packets), hook(chain.packets));
        batch.add(NEW_CHAIN, format!("chain {name}"), |attributes| {
            attributes.text(CHAIN_TABLE, TABLE);
            attributes.text(CHAIN_NAME, name);
            attributes.nest(CHAIN_HOOK, |attributes| {
                attributes.number(HOOK_NUMBER, hook.number);
                attributes.number(HOOK_PRIORITY, hook.priority.cast_unsigned());
            });
            attributes.text(CHAIN_TYPE, hook.kind);
        });
        for rule in &chain.rules {
            let what = format!("rule `{rule}` of chain {name}");
            batch.add(NEW_RULE, what, |attributes| {
                attributes.text(RULE_TABLE, TABLE);
                attributes.text(RULE_CHAIN, name);
                attributes.nest(RULE_EXPRESSIONS, |expressions| add_rule(expressions, rule));
            });
        }
    }
    batch.end();
    batch
}

fn add_rule(to: &mut Attributes, rule: &Rule) {
    for condition in &rule.conditions {
        match condition {
            Condition::FromLoopback => meta(to, META_INPUT_INTERFACE, LOOPBACK),
            Condition::ToLoopback => meta(to, META_OUTPUT_INTERFACE, LOOPBACK),
            Condition::To(IpAddr::V4(address), prefix) => {
                meta(to, META_FAMILY, &[FAMILY_IPV4]);
                network(to, 16, &address.octets()[..usize::from(prefix / 8)]);
            }
            Condition::To(IpAddr::V6(address), prefix) => {
                meta(to, META_FAMILY, &[FAMILY_IPV6]);
                network(to, 24, &address.octets()[..usize::from(prefix / 8)]);
            }
            Condition::Protocol(protocol) => meta(to, META_PROTOCOL, &[number(*protocol)]),
            Condition::Ports(protocol, ports) => {
                meta(to, META_PROTOCOL, &[number(*protocol)]);
                payload(to, TRANSPORT_HEADER, 2, 2);
                if ports.start() == ports.end() {
                    compare(to, EQUAL, &ports.start().to_be_bytes());
                } else {
                    compare(to, AT_LEAST, &ports.start().to_be_bytes());
                    compare(to, AT_MOST, &ports.end().to_be_bytes());
                }
            }
            Condition::User(uid) => meta(to, META_USER, &uid.to_ne_bytes()),
            Condition::Reply => {
                expression(to, "ct", |ct| {
                    ct.number(CT_REGISTER, REGISTER);
                    ct.number(CT_KEY, CT_DIRECTION);
                });
                compare(to, EQUAL, &[DIRECTION_REPLY]);
            }
        }
    }
    match rule.verdict {
        Verdict::Return => expression(to, "immediate", |immediate| {
            immediate.number(IMMEDIATE_REGISTER, VERDICT_REGISTER);
            immediate.nest(IMMEDIATE_DATA, |data| {
                data.nest(DATA_VERDICT, |verdict| {
                    verdict.number(VERDICT_CODE, RETURN.cast_unsigned());
                });
            });
        }),
        Verdict::Redirect(port) => {
            expression(to, "immediate", |immediate| {
                immediate.number(IMMEDIATE_REGISTER, REGISTER);
                immediate.nest(IMMEDIATE_DATA, |data| {
                    data.bytes(DATA_VALUE, &port.to_be_bytes());
                });
            });
            expression(to, "redir", |redirect| {
                redirect.number(REDIRECT_PORT_REGISTER, REGISTER);
            });
        }
        Verdict::Refuse => expression(to, "reject", |reject| {
            reject.number(REJECT_TYPE, REJECT_ICMPX);
            reject.bytes(REJECT_CODE, &[ICMPX_PORT_UNREACHABLE]);
        }),
    }
}

/// Compares a property of the packet.
fn meta(to: &mut Attributes, key: u32, value: &[u8]) {
    expression(to, "meta", |meta| {
        meta.number(META_REGISTER, REGISTER);
        meta.number(META_KEY, key);
    });
    compare(to, EQUAL, value);
}

/// Compares the first bytes of an address in the header of IP.
fn network(to: &mut Attributes, offset: u32, bytes: &[u8]) {
    let length = u32::try_from(bytes.len()).expect("an address has at most 16 bytes");
    payload(to, NETWORK_HEADER, offset, length);
    compare(to, EQUAL, bytes);
}

/// Loads bytes of a header.
fn payload(to: &mut Attributes, header: u32, offset: u32, length: u32) {
    expression(to, "payload", |payload| {
        payload.number(PAYLOAD_REGISTER, REGISTER);
        payload.number(PAYLOAD_BASE, header);
        payload.number(PAYLOAD_OFFSET, offset);
        payload.number(PAYLOAD_LENGTH, length);
    });
}

/// Compares what was loaded.
fn compare(to: &mut Attributes, operator: u32, value: &[u8]) {
    expression(to, "cmp", |compare| {
        compare.number(COMPARE_REGISTER, REGISTER);
        compare.number(COMPARE_OPERATOR, operator);
        compare.nest(COMPARE_DATA, |data| data.bytes(DATA_VALUE, value));
    });
}

fn expression(to: &mut Attributes, name: &str, data: impl FnOnce(&mut Attributes)) {
    to.nest(LIST_ELEMENT, |element| {
        element.text(EXPRESSION_NAME, name);
        element.nest(EXPRESSION_DATA, data);
    });
}

fn number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
    }
}

// Messages.
const NEW_TABLE: u16 = 0;
const DELETE_TABLE: u16 = 2;
const NEW_CHAIN: u16 = 3;
const NEW_RULE: u16 = 6;

// Attributes.
const TABLE_NAME: u16 = 1;
const CHAIN_TABLE: u16 = 1;
const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const CHAIN_TYPE: u16 = 7;
const HOOK_NUMBER: u16 = 1;
const HOOK_PRIORITY: u16 = 2;
const RULE_TABLE: u16 = 1;
const RULE_CHAIN: u16 = 2;
const RULE_EXPRESSIONS: u16 = 4;
const LIST_ELEMENT: u16 = 1;
const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;
const META_REGISTER: u16 = 1;
const META_KEY: u16 = 2;
const PAYLOAD_REGISTER: u16 = 1;
const PAYLOAD_BASE: u16 = 2;
const PAYLOAD_OFFSET: u16 = 3;
const PAYLOAD_LENGTH: u16 = 4;
const COMPARE_REGISTER: u16 = 1;
const COMPARE_OPERATOR: u16 = 2;
const COMPARE_DATA: u16 = 3;
const CT_REGISTER: u16 = 1;
const CT_KEY: u16 = 2;
const IMMEDIATE_REGISTER: u16 = 1;
const IMMEDIATE_DATA: u16 = 2;
const DATA_VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
const REDIRECT_PORT_REGISTER: u16 = 1;
const REJECT_TYPE: u16 = 1;
const REJECT_CODE: u16 = 2;

// Values of attributes.
const VERDICT_REGISTER: u32 = 0;
const REGISTER: u32 = 1;
const META_INPUT_INTERFACE: u32 = 6;
const META_OUTPUT_INTERFACE: u32 = 7;
const META_USER: u32 = 10;
const META_FAMILY: u32 = 15;
const META_PROTOCOL: u32 = 16;
const NETWORK_HEADER: u32 = 1;
const TRANSPORT_HEADER: u32 = 2;
const EQUAL: u32 = 0;
const AT_MOST: u32 = 3;
const AT_LEAST: u32 = 5;
const CT_DIRECTION: u32 = 1;
const RETURN: i32 = -5;
const REJECT_ICMPX: u32 = 2;

// Values of packets. The name of an interface has 16 bytes.
const LOOPBACK: &[u8] = b"lo\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
const FAMILY_IPV4: u8 = 2;
const FAMILY_IPV6: u8 = 10;
const DIRECTION_REPLY: u8 = 1;
const ICMPX_PORT_UNREACHABLE: u8 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_without_nf_tables_gets_the_name_of_the_other_image() {
        for errno in [Errno::EPROTONOSUPPORT, Errno::EOPNOTSUPP, Errno::ENOENT] {
            let error = Error::new("chain inbound", errno).to_string();
            let start = format!("chain inbound: the kernel does not support it: {errno}; load ");
            assert!(
                error.starts_with(&start) && error.ends_with("whose tag ends in -iptables"),
                "{error}"
            );
            assert_eq!(error.lines().count(), 1, "{error}");
        }
        let error = Error::new("rule `return` of chain inbound", Errno::EINVAL);
        let expected = "rule `return` of chain inbound rejected: EINVAL: Invalid argument";
        assert_eq!(error.to_string(), expected);
    }
}
