//! The rules as data, computed from the configuration and the resolvers for both address families.
//! [`crate::nftables`] and [`crate::iptables`] load them.
//!
//! TCP is redirected in chains of type nat. UDP is refused in a chain of type filter: nat cannot
//! refuse, and a redirect to a closed port gives no error to sockets that are not connected, and lets
//! datagrams of sockets that are bound to an interface leave the pod.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;

use diy_mesh_model::ports::PortSet;

use crate::config::Config;

/// The rules of one kind of packets. The first matching rule decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// The packets.
    pub packets: Packets,
    /// The rules in their order.
    pub rules: Vec<Rule>,
}

/// The packets of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packets {
    /// The first packets of connections to the pod.
    Inbound,
    /// The first packets of connections from the pod.
    Outbound,
    /// All UDP from the pod.
    OutboundUdp,
}

/// The verdict on packets that meet all conditions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The conditions.
    pub conditions: Vec<Condition>,
    /// The effect.
    pub verdict: Verdict,
}

/// A condition of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    /// Arrives on the loopback interface.
    FromLoopback,
    /// Leaves on the loopback interface.
    ToLoopback,
    /// Is sent to an address of the network, whose prefix has whole bytes.
    To(IpAddr, u8),
    /// Has the protocol.
    Protocol(Protocol),
    /// Has the protocol, and a destination port in the range.
    Ports(Protocol, RangeInclusive<u16>),
    /// Is sent by a socket of the user.
    User(u32),
    /// Answers a connection that the other side began.
    Reply,
}

/// A transport protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// The effect of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// No redirect and no refusal.
    Return,
    /// Redirects the connection to a port of the pod.
    Redirect(u16),
    /// Drops the packet. Its sender gets EPERM.
    Refuse,
}

/// The chains of a configuration. UDP is restricted to `resolvers`, if there is a list of them.
pub fn chains(config: &Config, resolvers: Option<&[IpAddr]>) -> Vec<Chain> {
    let inbound = Chain {
        packets: Packets::Inbound,
        rules: inbound(config),
    };
    let outbound = Chain {
        packets: Packets::Outbound,
        rules: outbound(config),
    };
    let udp = resolvers.map(|resolvers| Chain {
        packets: Packets::OutboundUdp,
        rules: outbound_udp(config, resolvers),
    });
    [inbound, outbound].into_iter().chain(udp).collect()
}

impl Rule {
    fn new<const N: usize>(conditions: [Condition; N], verdict: Verdict) -> Self {
        let conditions = conditions.into();
        Self {
            conditions,
            verdict,
        }
    }
}

impl Protocol {
    /// Its name in rules.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

fn inbound(config: &Config) -> Vec<Rule> {
    let admin = config.admin_port;
    let mut rules = vec![
        Rule::new([Condition::FromLoopback], Verdict::Return),
        Rule::new(
            [Condition::Ports(Protocol::Tcp, admin..=admin)],
            Verdict::Return,
        ),
    ];
    rules.extend(skips(&config.skip_inbound_ports));
    rules.push(redirect(config.inbound_port));
    rules
}

fn outbound(config: &Config) -> Vec<Rule> {
    let mut rules = Vec::from(probes(config));
    rules.extend([
        Rule::new([Condition::User(config.proxy_uid)], Verdict::Return),
        Rule::new([Condition::ToLoopback], Verdict::Return),
        Rule::new(
            [Condition::To(Ipv4Addr::new(127, 0, 0, 0).into(), 8)],
            Verdict::Return,
        ),
        Rule::new(
            [Condition::To(Ipv6Addr::LOCALHOST.into(), 128)],
            Verdict::Return,
        ),
    ]);
    rules.extend(skips(&config.skip_outbound_ports));
    rules.push(redirect(config.outbound_port));
    rules
}

/// The connections by which the proxy verifies these rules before it is ready: from its own user to
/// its inbound port on loopback. Nothing else connects from this user to this port.
fn probes(config: &Config) -> [Rule; 2] {
    let loopbacks = [
        (Ipv4Addr::LOCALHOST.into(), 32),
        (Ipv6Addr::LOCALHOST.into(), 128),
    ];
    loopbacks.map(|(address, prefix)| {
        let port = config.inbound_port;
        let conditions = [
            Condition::To(address, prefix),
            Condition::Ports(Protocol::Tcp, port..=port),
            Condition::User(config.proxy_uid),
        ];
        Rule::new(conditions, Verdict::Redirect(config.outbound_port))
    })
}

/// Replies of the pod's servers pass: they belong to connections that others began.
fn outbound_udp(config: &Config, resolvers: &[IpAddr]) -> Vec<Rule> {
    let mut rules = vec![
        Rule::new([Condition::User(config.proxy_uid)], Verdict::Return),
        Rule::new([Condition::ToLoopback], Verdict::Return),
        Rule::new([Condition::Reply], Verdict::Return),
    ];
    rules.extend(resolvers.iter().map(|address| {
        let prefix = if address.is_ipv4() { 32 } else { 128 };
        let dns = Condition::Ports(Protocol::Udp, 53..=53);
        Rule::new([Condition::To(*address, prefix), dns], Verdict::Return)
    }));
    rules.push(Rule::new(
        [Condition::Protocol(Protocol::Udp)],
        Verdict::Refuse,
    ));
    rules
}

fn skips(ports: &PortSet) -> impl Iterator<Item = Rule> {
    let tcp = |range: &RangeInclusive<u16>| Condition::Ports(Protocol::Tcp, range.clone());
    let ranges = ports.ranges().iter();
    ranges.map(move |range| Rule::new([tcp(range)], Verdict::Return))
}

fn redirect(port: u16) -> Rule {
    Rule::new(
        [Condition::Protocol(Protocol::Tcp)],
        Verdict::Redirect(port),
    )
}
