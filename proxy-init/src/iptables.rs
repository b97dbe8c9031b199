//! The rules as text for iptables: computes the input of one `iptables-restore --noflush` per address
//! family from the rules and the output of iptables-save. For kernels without nf_tables.
//!
//! Pure text, tested against the golden files in `tests/golden`. Rules are in the format of
//! iptables-save, which makes loaded and saved rules comparable.

pub mod programs;

use std::fmt;
use std::net::IpAddr;

use crate::rules::{Chain, Condition, Packets, Rule, Verdict};

/// Each built-in chain of nat, the protocol, and the chain of ours that it jumps to.
const REDIRECTS: &[Jump] = &[("PREROUTING", "tcp", INBOUND), ("OUTPUT", "tcp", OUTBOUND)];
/// The same of filter.
const REFUSALS: &[Jump] = &[("OUTPUT", "udp", OUTBOUND_UDP)];
const INBOUND: &str = "PROXY_INBOUND";
const OUTBOUND: &str = "PROXY_OUTBOUND";
const OUTBOUND_UDP: &str = "PROXY_UDP";
/// The chain for trials.
const TRIAL: &str = "PROXY_TRIAL";

type Jump = (&'static str, &'static str, &'static str);

/// Address family. Each has its own rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// The rules of one family.
#[derive(Debug)]
pub struct Rules {
    family: Family,
    tables: [Table; 2],
}

/// Our chains in a table of iptables.
#[derive(Debug)]
struct Table {
    name: &'static str,
    jumps: &'static [Jump],
    /// The lines of our chains. Empty: the chains do not exist.
    lines: Vec<String>,
}

/// Input of iptables-restore.
#[derive(Debug)]
pub struct RestoreInput(String);

impl Family {
    /// Prefix of the family's program names.
    pub fn program(self) -> &'static str {
        match self {
            Self::V4 => "iptables",
            Self::V6 => "ip6tables",
        }
    }

    /// Whether a rule can match packets of the family.
    fn has(self, rule: &Rule) -> bool {
        rule.conditions.iter().all(|condition| match condition {
            Condition::To(IpAddr::V4(_), _) => self == Self::V4,
            Condition::To(IpAddr::V6(_), _) => self == Self::V6,
            _ => true,
        })
    }

    /// The ICMP error of refused packets. Their senders get EPERM, and connected sockets this one, too.
    fn refusal(self) -> &'static str {
        match self {
            Self::V4 => "icmp-port-unreachable",
            Self::V6 => "icmp6-port-unreachable",
        }
    }
}

impl Rules {
    /// The rules of a family in chains. Those about an address of the other one are absent.
    pub fn new(chains: &[Chain], family: Family) -> Self {
        let lines = |packets: &[Packets]| {
            let chains = chains
                .iter()
                .filter(|chain| packets.contains(&chain.packets));
            chains.flat_map(|chain| lines(chain, family)).collect()
        };
        let filter = Table {
            name: "filter",
            jumps: REFUSALS,
            lines: lines(&[Packets::OutboundUdp]),
        };
        let nat = Table {
            name: "nat",
            jumps: REDIRECTS,
            lines: lines(&[Packets::Inbound, Packets::Outbound]),
        };
        // Tables change one after the other: if the kernel cannot refuse UDP, nothing changes.
        let tables = [filter, nat];
        Self { family, tables }
    }

    /// Address family of the rules.
    pub fn family(&self) -> Family {
        self.family
    }

    /// Input that replaces our rules in the tables that iptables-save prints as `saved`.
    pub fn restore_input(&self, saved: &str) -> RestoreInput {
        let inputs = self.tables.iter().map(|table| table.restore_input(saved));
        RestoreInput(inputs.collect())
    }

    /// Input for each rule alone, in a chain without references, and input that deletes that chain.
    /// Finds the rejected rule when the kernel does not name it.
    pub fn trial_inputs(&self) -> (impl Iterator<Item = (&str, RestoreInput)>, RestoreInput) {
        let tables = self.tables.iter().filter(|table| !table.lines.is_empty());
        let clean_up = tables.clone().map(|table| {
            let name = table.name;
            format!("*{name}\n:{TRIAL} - [0:0]\n-X {TRIAL}\nCOMMIT\n")
        });
        let clean_up = RestoreInput(clean_up.collect());
        (tables.flat_map(Table::trials), clean_up)
    }
}

impl Table {
    /// Declaring our chains flushes them in the same transaction. The jumps to them are in built-in
    /// chains, which may contain rules of other programs: a correct jump stays, wrong or duplicate
    /// jumps to our chains are deleted, and all of them if there are no rules.
    fn restore_input(&self, saved: &str) -> String {
        let saved = section(saved, self.name);
        let has_chain = |(_, _, chain): &Jump| saved.contains(&format!(":{chain} "));
        if self.lines.is_empty() && !self.jumps.iter().any(has_chain) {
            return String::new();
        }
        let mut text = format!("*{}\n", self.name);
        for (_, _, chain) in self.jumps {
            text.push_str(&format!(":{chain} - [0:0]\n"));
        }
        for (from, protocol, chain) in self.jumps {
            let expected = format!("-A {from} -p {protocol} -j {chain}");
            let expected = Some(expected).filter(|_| !self.lines.is_empty());
            let found = jumps(saved, from, chain);
            if !found.iter().eq(&expected) {
                for jump in found {
                    text.push_str(&format!("{}\n", jump.replacen("-A", "-D", 1)));
                }
                text.extend(expected.map(|jump| format!("{jump}\n")));
            }
        }
        for line in &self.lines {
            text.push_str(&format!("{line}\n"));
        }
        if self.lines.is_empty() {
            for (_, _, chain) in self.jumps {
                text.push_str(&format!("-X {chain}\n"));
            }
        }
        text.push_str("COMMIT\n");
        text
    }

    fn trials(&self) -> impl Iterator<Item = (&str, RestoreInput)> {
        self.lines.iter().map(|line| {
            let chains = self.jumps.iter();
            let trial = chains.fold(line.clone(), |line, (_, _, chain)| {
                line.replacen(chain, TRIAL, 1)
            });
            let name = self.name;
            let input = format!("*{name}\n:{TRIAL} - [0:0]\n{trial}\nCOMMIT\n");
            (line.as_str(), RestoreInput(input))
        })
    }
}

impl RestoreInput {
    /// Text for the standard input of iptables-restore.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// The rule at a line, counted from 1; `None` if the line is no rule.
    pub fn rule_at_line(&self, line: usize) -> Option<&str> {
        self.0
            .lines()
            .nth(line.checked_sub(1)?)
            .filter(|line| line.starts_with('-'))
    }
}

/// The rules of a chain that can match packets of a family.
fn lines(chain: &Chain, family: Family) -> impl Iterator<Item = String> {
    let name = match chain.packets {
        Packets::Inbound => INBOUND,
        Packets::Outbound => OUTBOUND,
        Packets::OutboundUdp => OUTBOUND_UDP,
    };
    let rules = chain.rules.iter().filter(move |rule| family.has(rule));
    rules.map(move |rule| line(name, rule, family))
}

fn line(chain: &str, rule: &Rule, family: Family) -> String {
    let mut line = format!("-A {chain}");
    for condition in &rule.conditions {
        line.push_str(&match condition {
            Condition::FromLoopback => " -i lo".to_owned(),
            Condition::ToLoopback => " -o lo".to_owned(),
            Condition::To(address, prefix) => format!(" -d {address}/{prefix}"),
            Condition::Protocol(protocol) => format!(" -p {}", protocol.name()),
            Condition::Ports(protocol, ports) => {
                let (name, first, last) = (protocol.name(), ports.start(), ports.end());
                let ports = if first == last {
                    first.to_string()
                } else {
                    format!("{first}:{last}")
                };
                format!(" -p {name} -m {name} --dport {ports}")
            }
            Condition::User(uid) => format!(" -m owner --uid-owner {uid}"),
            Condition::Reply => " -m conntrack --ctdir REPLY".to_owned(),
        });
    }
    line.push_str(&match rule.verdict {
        Verdict::Return => " -j RETURN".to_owned(),
        Verdict::Redirect(port) => format!(" -j REDIRECT --to-ports {port}"),
        Verdict::Refuse => format!(" -j REJECT --reject-with {}", family.refusal()),
    });
    line
}

/// The part of the output of iptables-save about a table.
fn section<'a>(saved: &'a str, table: &str) -> &'a str {
    let mut sections = saved.split("COMMIT\n");
    let is_of_table = |section: &&str| {
        section
            .lines()
            .any(|line| line.strip_prefix('*') == Some(table))
    };
    sections.find(is_of_table).unwrap_or_default()
}

/// The rules in built-in chain `from` that jump to `chain`.
fn jumps<'a>(saved: &'a str, from: &str, chain: &str) -> Vec<&'a str> {
    let in_chain = |line: &&str| {
        line.strip_prefix("-A ")
            .and_then(|rest| rest.split_once(' '))
            .is_some_and(|(name, _)| name == from)
    };
    let jumps_to_chain = |line: &&str| {
        line.split_whitespace()
            .collect::<Vec<_>>()
            .windows(2)
            .any(|pair| pair == ["-j", chain])
    };
    saved
        .lines()
        .map(str::trim_end)
        .filter(in_chain)
        .filter(jumps_to_chain)
        .collect()
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::rules::chains;

    fn rules(resolvers: Option<&[IpAddr]>, family: Family) -> Rules {
        Rules::new(&chains(&Config::example(), resolvers), family)
    }

    fn restore_input(saved: &str) -> String {
        rules(None, Family::V4)
            .restore_input(saved)
            .text()
            .to_owned()
    }

    #[test]
    fn empty_table_gets_golden_rules() {
        assert_eq!(
            restore_input(""),
            include_str!("../tests/golden/ipv4.rules")
        );
        let ipv6 = rules(None, Family::V6);
        assert_eq!(
            ipv6.restore_input("").text(),
            include_str!("../tests/golden/ipv6.rules")
        );
    }

    #[test]
    fn keeps_existing_jumps() {
        let saved = "*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -p tcp -j PROXY_INBOUND\n-A OUTPUT -p tcp -j PROXY_OUTBOUND\nCOMMIT\n";
        assert_eq!(
            restore_input(saved),
            include_str!("../tests/golden/again.rules")
        );
    }

    #[test]
    fn replaces_wrong_and_duplicate_jumps_and_keeps_foreign_rules() {
        let saved = "*mangle\n-A OUTPUT -p tcp -j PROXY_OUTBOUND\nCOMMIT\n*nat\n-A PREROUTING -j PROXY_INBOUND\n-A PREROUTING -j OTHERS\n-A OTHERS -j PROXY_INBOUND\n\
                     -A PREROUTING -m comment --comment x -j PROXY_INBOUND_2\n\
                     -A OUTPUT -p tcp -j PROXY_OUTBOUND\n-A OUTPUT -p tcp -j PROXY_OUTBOUND\nCOMMIT\n";
        assert_eq!(
            restore_input(saved),
            include_str!("../tests/golden/repaired.rules")
        );
    }

    #[test]
    fn udp_is_restricted_to_the_resolvers_of_the_family() {
        for (family, golden) in [
            (Family::V4, include_str!("../tests/golden/dns-ipv4.rules")),
            (Family::V6, include_str!("../tests/golden/dns-ipv6.rules")),
        ] {
            let resolvers =
                ["10.96.0.10", "fd00::a", "10.96.0.11"].map(|one| one.parse().expect("valid"));
            let restricted = rules(Some(&resolvers), family);
            assert_eq!(restricted.restore_input("").text(), golden);
            let without_resolvers = rules(Some(&[]), family).restore_input(golden);
            let text = without_resolvers.text();
            assert!(
                !text.contains("--dport 53")
                    && !text.contains("-A OUTPUT")
                    && text.contains("REJECT"),
                "{text}"
            );
        }
    }

    #[test]
    fn rules_about_udp_of_an_earlier_run_are_removed() {
        let nat = include_str!("../tests/golden/again.rules");
        let jumps = "-A PREROUTING -p tcp -j PROXY_INBOUND\n-A OUTPUT -p tcp -j PROXY_OUTBOUND\n";
        let saved = |filter: &str| {
            format!("*nat\n{jumps}COMMIT\n*filter\n:OUTPUT ACCEPT [0:0]\n{filter}COMMIT\n")
        };
        assert_eq!(restore_input(&saved("-A OUTPUT -p udp -j OTHERS\n")), nat);
        for (found, deleted) in [
            ("", ""),
            (
                "-A OUTPUT -p udp -j OTHERS\n-A OUTPUT -p udp -j PROXY_UDP\n",
                "-D OUTPUT -p udp -j PROXY_UDP\n",
            ),
        ] {
            let saved = saved(&format!(
                ":PROXY_UDP - [0:0]\n{found}-A PROXY_UDP -j DROP\n"
            ));
            let expected =
                format!("*filter\n:PROXY_UDP - [0:0]\n{deleted}-X PROXY_UDP\nCOMMIT\n{nat}");
            assert_eq!(restore_input(&saved), expected);
        }
    }

    #[test]
    fn rule_at_line_returns_rules_only() {
        let input = rules(None, Family::V4).restore_input("");
        assert_eq!(
            input.rule_at_line(4),
            Some("-A PREROUTING -p tcp -j PROXY_INBOUND")
        );
        let commit = input.text().lines().count();
        assert_eq!(
            [0, 1, 2, commit, commit + 1].map(|line| input.rule_at_line(line)),
            [None; 5]
        );
    }

    #[test]
    fn trial_inputs_contain_one_rule_each() {
        let ipv4 = rules(None, Family::V4);
        let (mut trials, _) = ipv4.trial_inputs();
        let (line, input) = trials.next().expect("there are rules");
        assert_eq!(line, "-A PROXY_INBOUND -i lo -j RETURN");
        assert_eq!(
            input.text(),
            "*nat\n:PROXY_TRIAL - [0:0]\n-A PROXY_TRIAL -i lo -j RETURN\nCOMMIT\n"
        );
        let ipv6 = rules(Some(&[]), Family::V6);
        let (mut trials, clean_up) = ipv6.trial_inputs();
        let refusal = trials.nth(3).map(|(_, input)| input.0);
        assert_eq!(
            refusal.as_deref(),
            Some(
                "*filter\n:PROXY_TRIAL - [0:0]\n-A PROXY_TRIAL -p udp -j REJECT --reject-with icmp6-port-unreachable\nCOMMIT\n"
            )
        );
        let clean_up = clean_up.text();
        assert!(clean_up.contains("*filter\n") && clean_up.contains("*nat\n"));
    }
}
