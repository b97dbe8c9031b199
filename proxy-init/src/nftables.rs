//! The rules as one table of nftables. The kernel replaces the table in one transaction. It holds
//! both address families. Other tables stay unchanged.
//!
//! The text of a table is the output of `nft -y list table inet diy-service-mesh`, so that printed
//! and loaded rules are comparable. The kernel's numbers are from `linux/netfilter/nf_tables.h`.

pub mod encoding;
pub mod netlink;

use std::fmt::{self, Display, Write as _};
use std::net::IpAddr;

use nix::errno::Errno;

use self::encoding::*;
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

fn hook(packets: Packets) -> Hook {
    let (kind, name, priority) = match packets {
        Packets::Inbound => ("nat", "prerouting", NAT_PRIORITY),
        Packets::Outbound => ("nat", "output", NAT_PRIORITY),
        Packets::OutboundUdp => ("filter", "output", FILTER_PRIORITY),
    };
    Hook {
        kind,
        name,
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
    let mut batch = Batch::begin();
    replace_table(&mut batch, TABLE);
    for chain in chains {
        let (name, hook) = (chain_name(chain.packets), hook(chain.packets));
        add_chain(&mut batch, TABLE, name, hook);
        for rule in &chain.rules {
            let what = format!("rule `{rule}` of chain {name}");
            add_rule(&mut batch, TABLE, name, what, |to| write_rule(to, rule));
        }
    }
    batch.end();
    batch
}

fn write_rule(to: &mut Attributes, rule: &Rule) {
    for condition in &rule.conditions {
        match condition {
            Condition::FromLoopback => meta(to, NFT_META_IIFNAME, LOOPBACK),
            Condition::ToLoopback => meta(to, NFT_META_OIFNAME, LOOPBACK),
            Condition::To(address, prefix) => destination(to, *address, *prefix),
            Condition::Protocol(protocol) => meta(to, NFT_META_L4PROTO, &[number(*protocol)]),
            Condition::Ports(protocol, ports) => {
                meta(to, NFT_META_L4PROTO, &[number(*protocol)]);
                payload(to, NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2);
                if ports.start() == ports.end() {
                    compare(to, NFT_CMP_EQ, &ports.start().to_be_bytes());
                } else {
                    compare(to, NFT_CMP_GTE, &ports.start().to_be_bytes());
                    compare(to, NFT_CMP_LTE, &ports.end().to_be_bytes());
                }
            }
            Condition::User(uid) => meta(to, NFT_META_SKUID, &uid.to_ne_bytes()),
            Condition::Reply => {
                expression(to, "ct", |ct| {
                    ct.number(CT_REGISTER, NFT_REG_1);
                    ct.number(CT_KEY, NFT_CT_DIRECTION);
                });
                compare(to, NFT_CMP_EQ, &[DIRECTION_REPLY]);
            }
        }
    }
    match rule.verdict {
        Verdict::Return => expression(to, "immediate", |immediate| {
            immediate.number(IMMEDIATE_REGISTER, NFT_REG_VERDICT);
            immediate.nest(IMMEDIATE_DATA, |data| {
                data.nest(DATA_VERDICT, |verdict| {
                    verdict.number(VERDICT_CODE, NFT_RETURN);
                });
            });
        }),
        Verdict::Redirect(port) => {
            load(to, NFT_REG_1, &port.to_be_bytes());
            expression(to, "redir", |redirect| {
                redirect.number(REDIRECT_PORT_REGISTER, NFT_REG_1);
            });
        }
        Verdict::Refuse => reject(to),
    }
}

fn number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
    }
}

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
