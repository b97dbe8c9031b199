//! The rules themselves: a configuration and the rules that are there, in; the text for one `iptables-restore --noflush`, out.
//!
//! Pure text, tested against the golden files in `tests/golden`. Each rule is written as iptables-save writes it, so that what is loaded
//! and what is found there later can be compared.

use std::fmt;

use crate::config::Config;
use crate::ports::Ports;

/// What multiport takes in one rule; a range counts as two.
const MULTIPORT_SLOTS: usize = 15;
/// The chains and the built-in ones that lead to them.
const CHAINS: [(&str, &str); 2] = [
    ("PREROUTING", "PROXY_INBOUND"),
    ("OUTPUT", "PROXY_OUTBOUND"),
];

/// A family of addresses: each has its own rules.
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
    lines: Vec<String>,
}

/// A text for iptables-restore.
#[derive(Debug)]
pub struct Load(String);

impl Family {
    /// What the names of the family's programs begin with.
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
}

impl Rules {
    /// The rules that a configuration asks for. The first that fits a connection decides; RETURN leaves it alone.
    pub fn new(config: &Config, family: Family) -> Self {
        let mut lines = vec![
            "-A PROXY_INBOUND -i lo -j RETURN".to_owned(),
            format!(
                "-A PROXY_INBOUND -p tcp -m tcp --dport {} -j RETURN",
                config.admin_port
            ),
        ];
        lines.extend(skip("PROXY_INBOUND", &config.skip_inbound_ports));
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
        lines.extend(skip("PROXY_OUTBOUND", &config.skip_outbound_ports));
        lines.push(format!(
            "-A PROXY_OUTBOUND -p tcp -j REDIRECT --to-ports {}",
            config.outbound_port
        ));
        Self { family, lines }
    }

    /// Whose rules these are.
    pub fn family(&self) -> Family {
        self.family
    }

    /// What to load where iptables-save prints `saved` now: afterwards the rules are there, once.
    ///
    /// Naming our chains empties them, in the same step that fills them. The jumps to them stand in chains that may hold rules of others,
    /// so one that is as it should be stays untouched, and others of ours go.
    pub fn load(&self, saved: &str) -> Load {
        let mut text = "*nat\n".to_owned();
        for (_, chain) in CHAINS {
            text.push_str(&format!(":{chain} - [0:0]\n"));
        }
        for (from, chain) in CHAINS {
            let wanted = format!("-A {from} -p tcp -j {chain}");
            let found = jumps(saved, from, chain);
            if found != [wanted.as_str()] {
                for jump in found {
                    text.push_str(&format!("{}\n", jump.replacen("-A", "-D", 1)));
                }
                text.push_str(&format!("{wanted}\n"));
            }
        }
        for line in &self.lines {
            text.push_str(&format!("{line}\n"));
        }
        text.push_str("COMMIT\n");
        Load(text)
    }

    /// A load for each rule, in a chain that nothing leads to, and one that takes that chain away: for finding the rule that is refused
    /// by a kernel that says no more than that one is.
    pub fn one_by_one(&self) -> (impl Iterator<Item = (&str, Load)>, Load) {
        let single = self.lines.iter().map(|line| {
            let tried = line.replacen("PROXY_INBOUND", "PROXY_TRIAL", 1).replacen(
                "PROXY_OUTBOUND",
                "PROXY_TRIAL",
                1,
            );
            (
                line.as_str(),
                Load(format!("*nat\n:PROXY_TRIAL - [0:0]\n{tried}\nCOMMIT\n")),
            )
        });
        (
            single,
            Load("*nat\n:PROXY_TRIAL - [0:0]\n-X PROXY_TRIAL\nCOMMIT\n".to_owned()),
        )
    }
}

impl Load {
    /// What iptables-restore reads.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// The rule on a line, counted from 1; nothing where the line is no rule.
    pub fn rule_on(&self, line: usize) -> Option<&str> {
        self.0
            .lines()
            .nth(line.checked_sub(1)?)
            .filter(|line| line.starts_with('-'))
    }
}

/// Rules that leave ports alone, as few as multiport allows.
fn skip(chain: &str, ports: &Ports) -> Vec<String> {
    let mut groups: Vec<(usize, String)> = Vec::new();
    for range in ports.ranges() {
        let (slots, item) = match (range.start(), range.end()) {
            (first, last) if first == last => (1, first.to_string()),
            (first, last) => (2, format!("{first}:{last}")),
        };
        match groups.last_mut() {
            Some((used, list)) if *used + slots <= MULTIPORT_SLOTS => {
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

/// The rules of a built-in chain that jump to one of ours.
fn jumps<'a>(saved: &'a str, from: &str, chain: &str) -> Vec<&'a str> {
    let in_chain = |line: &&str| {
        line.strip_prefix("-A ")
            .and_then(|rest| rest.split_once(' '))
            .is_some_and(|(name, _)| name == from)
    };
    let to_ours = |line: &&str| {
        line.split_whitespace()
            .collect::<Vec<_>>()
            .windows(2)
            .any(|pair| pair == ["-j", chain])
    };
    saved
        .lines()
        .map(str::trim_end)
        .filter(in_chain)
        .filter(to_ours)
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

    fn load(saved: &str) -> String {
        Rules::new(&Config::example(), Family::V4)
            .load(saved)
            .text()
            .to_owned()
    }

    #[test]
    fn a_fresh_namespace_gets_the_golden_rules() {
        assert_eq!(load(""), include_str!("../tests/golden/ipv4.rules"));
        let rules = Rules::new(&Config::example(), Family::V6);
        assert_eq!(
            rules.load("").text(),
            include_str!("../tests/golden/ipv6.rules")
        );
    }

    #[test]
    fn jumps_that_are_there_are_not_made_again() {
        let saved = "*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -p tcp -j PROXY_INBOUND\n-A OUTPUT -p tcp -j PROXY_OUTBOUND\nCOMMIT\n";
        assert_eq!(load(saved), include_str!("../tests/golden/again.rules"));
    }

    #[test]
    fn jumps_that_are_wrong_or_doubled_are_replaced_and_those_of_others_kept() {
        let saved = "*nat\n-A PREROUTING -j PROXY_INBOUND\n-A PREROUTING -j OTHERS\n-A OTHERS -j PROXY_INBOUND\n\
                     -A PREROUTING -m comment --comment x -j PROXY_INBOUND_2\n\
                     -A OUTPUT -p tcp -j PROXY_OUTBOUND\n-A OUTPUT -p tcp -j PROXY_OUTBOUND\nCOMMIT\n";
        assert_eq!(load(saved), include_str!("../tests/golden/repaired.rules"));
    }

    #[test]
    fn many_ports_are_split_where_multiport_ends() {
        let list: Vec<_> = (1..=15).map(|n| (n * 10).to_string()).collect();
        let ports = |text: &str| skip("C", &Ports::parse(text).expect("valid"));
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
    fn a_line_number_leads_back_to_its_rule() {
        let load = Rules::new(&Config::example(), Family::V4).load("");
        assert_eq!(
            load.rule_on(4),
            Some("-A PREROUTING -p tcp -j PROXY_INBOUND")
        );
        let commit = load.text().lines().count();
        assert_eq!(
            [0, 1, 2, commit, commit + 1].map(|line| load.rule_on(line)),
            [None; 5]
        );
    }

    #[test]
    fn each_rule_can_be_tried_alone() {
        let rules = Rules::new(&Config::example(), Family::V4);
        let (mut single, _) = rules.one_by_one();
        let (line, load) = single.next().expect("there are rules");
        assert_eq!(line, "-A PROXY_INBOUND -i lo -j RETURN");
        assert_eq!(
            load.text(),
            "*nat\n:PROXY_TRIAL - [0:0]\n-A PROXY_TRIAL -i lo -j RETURN\nCOMMIT\n"
        );
    }
}
