//! The rules: computes the input of one `iptables-restore --noflush` from the configuration, the
//! resolvers and the output of iptables-save.
//!
//! TCP is redirected in the table nat. UDP is refused in the table filter: nat cannot refuse, and a
//! redirect to a closed port gives no error to sockets that are not connected, and lets datagrams of
//! sockets that are bound to an interface leave the pod.
//!
//! Pure text, tested against the golden files in `tests/golden`. Rules are in the format of
//! iptables-save, which makes loaded and saved rules comparable.

use std::fmt;
use std::net::IpAddr;

use diy_mesh_model::ports::PortSet;

use crate::config::Config;

/// Ports in one multiport rule; a range counts as two.
const MAX_MULTIPORT_SLOTS: usize = 15;
/// Each built-in chain of nat, the protocol, and the chain of ours that it jumps to.
const REDIRECTS: &[Jump] = &[
    ("PREROUTING", "tcp", "PROXY_INBOUND"),
    ("OUTPUT", "tcp", "PROXY_OUTBOUND"),
];
/// The same of filter.
const REFUSALS: &[Jump] = &[("OUTPUT", "udp", "PROXY_UDP")];
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
    /// None: our chains do not exist.
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

    fn loopback(self) -> &'static str {
        match self {
            Self::V4 => "127.0.0.0/8",
            Self::V6 => "::1/128",
        }
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
    /// Rules for a configuration. The first matching rule decides; RETURN means no redirect, and no
    /// refusal. UDP is restricted to `resolvers`, if there is a list of them.
    pub fn new(config: &Config, resolvers: Option<&[IpAddr]>, family: Family) -> Self {
        let filter = Table {
            name: "filter",
            jumps: REFUSALS,
            lines: resolvers.map_or(Vec::new(), |resolvers| udp_rules(config, resolvers, family)),
        };
        let nat = Table {
            name: "nat",
            jumps: REDIRECTS,
            lines: redirect_rules(config, family),
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

fn redirect_rules(config: &Config, family: Family) -> Vec<String> {
    let mut lines = vec![
        "-A PROXY_INBOUND -i lo -j RETURN".to_owned(),
        format!(
            "-A PROXY_INBOUND -p tcp -m tcp --dport {} -j RETURN",
            config.admin_port
        ),
    ];
    lines.extend(skip_rules("PROXY_INBOUND", &config.skip_inbound_ports));
    lines.push(format!(
        "-A PROXY_INBOUND -p tcp -j REDIRECT --to-ports {}",
        config.inbound_port
    ));

    lines.push(format!(
        "-A PROXY_OUTBOUND -m owner --uid-owner {} -j RETURN",
        config.proxy_uid
    ));
    lines.push("-A PROXY_OUTBOUND -o lo -j RETURN".to_owned());
    lines.push(format!(
        "-A PROXY_OUTBOUND -d {} -j RETURN",
        family.loopback()
    ));
    lines.extend(skip_rules("PROXY_OUTBOUND", &config.skip_outbound_ports));
    lines.push(format!(
        "-A PROXY_OUTBOUND -p tcp -j REDIRECT --to-ports {}",
        config.outbound_port
    ));
    lines
}

/// Replies of the pod's servers pass: they belong to connections that others began.
fn udp_rules(config: &Config, resolvers: &[IpAddr], family: Family) -> Vec<String> {
    let mut lines = vec![
        format!(
            "-A PROXY_UDP -m owner --uid-owner {} -j RETURN",
            config.proxy_uid
        ),
        "-A PROXY_UDP -o lo -j RETURN".to_owned(),
        "-A PROXY_UDP -m conntrack --ctdir REPLY -j RETURN".to_owned(),
    ];
    let resolvers = resolvers.iter().filter_map(|address| match family {
        Family::V4 => address.is_ipv4().then(|| format!("{address}/32")),
        Family::V6 => address.is_ipv6().then(|| format!("{address}/128")),
    });
    lines
        .extend(resolvers.map(|address| {
            format!("-A PROXY_UDP -d {address} -p udp -m udp --dport 53 -j RETURN")
        }));
    lines.push(format!(
        "-A PROXY_UDP -j REJECT --reject-with {}",
        family.refusal()
    ));
    lines
}

/// RETURN rules for ports, as few as multiport allows.
fn skip_rules(chain: &str, ports: &PortSet) -> Vec<String> {
    let mut groups: Vec<(usize, String)> = Vec::new();
    for range in ports.ranges() {
        let (slots, item) = match (range.start(), range.end()) {
            (first, last) if first == last => (1, first.to_string()),
            (first, last) => (2, format!("{first}:{last}")),
        };
        match groups.last_mut() {
            Some((used, list)) if *used + slots <= MAX_MULTIPORT_SLOTS => {
                *used += slots;
                list.push_str(&format!(",{item}"));
            }
            _ => groups.push((slots, item)),
        }
    }
    groups
        .into_iter()
        .map(|(_, list)| format!("-A {chain} -p tcp -m multiport --dports {list} -j RETURN"))
        .collect()
}

/// What iptables-save prints of a table.
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

    fn restore_input(saved: &str) -> String {
        Rules::new(&Config::example(), None, Family::V4)
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
        let rules = Rules::new(&Config::example(), None, Family::V6);
        assert_eq!(
            rules.restore_input("").text(),
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
            let rules = Rules::new(&Config::example(), Some(&resolvers), family);
            assert_eq!(rules.restore_input("").text(), golden);
            let (rules, saved) = (Rules::new(&Config::example(), Some(&[]), family), golden);
            let without_resolvers = rules.restore_input(saved);
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
    fn splits_port_lists_at_multiport_limit() {
        let list: Vec<_> = (1..=15).map(|n| (n * 10).to_string()).collect();
        let ports = |text: &str| skip_rules("C", &text.parse().expect("valid"));
        assert_eq!(ports(&list.join(",")).len(), 1);
        assert_eq!(
            ports(&format!("{},1000", list.join(",")))[1],
            "-A C -p tcp -m multiport --dports 1000 -j RETURN"
        );
        assert_eq!(
            ports(&format!("{},1000-1001", list[..14].join(",")))[1],
            "-A C -p tcp -m multiport --dports 1000:1001 -j RETURN"
        );
        assert_eq!(
            ports(&format!("{},1000-1001", list[..13].join(","))).len(),
            1
        );
        assert_eq!(ports(""), Vec::<String>::new());
    }

    #[test]
    fn rule_at_line_returns_rules_only() {
        let input = Rules::new(&Config::example(), None, Family::V4).restore_input("");
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
        let rules = Rules::new(&Config::example(), None, Family::V4);
        let (mut trials, _) = rules.trial_inputs();
        let (line, input) = trials.next().expect("there are rules");
        assert_eq!(line, "-A PROXY_INBOUND -i lo -j RETURN");
        assert_eq!(
            input.text(),
            "*nat\n:PROXY_TRIAL - [0:0]\n-A PROXY_TRIAL -i lo -j RETURN\nCOMMIT\n"
        );
        let rules = Rules::new(&Config::example(), Some(&[]), Family::V6);
        let (mut trials, clean_up) = rules.trial_inputs();
        let refusal = trials.nth(3).map(|(_, input)| input.0);
        assert_eq!(
            refusal.as_deref(),
            Some(
                "*filter\n:PROXY_TRIAL - [0:0]\n-A PROXY_TRIAL -j REJECT --reject-with icmp6-port-unreachable\nCOMMIT\n"
            )
        );
        let clean_up = clean_up.text();
        assert!(clean_up.contains("*filter\n") && clean_up.contains("*nat\n"));
    }
}
