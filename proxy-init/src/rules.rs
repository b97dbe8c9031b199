//! Redirect rules: computes the input of one `iptables-restore --noflush` from the configuration
//! and the output of iptables-save.
//!
//! Pure text, tested against the golden files in `tests/golden`. Rules are in the format of
//! iptables-save, which makes loaded and saved rules comparable.

use std::fmt;

use diy_mesh_model::ports::PortSet;

use crate::config::Config;

/// Ports in one multiport rule; a range counts as two.
const MAX_MULTIPORT_SLOTS: usize = 15;
/// Each built-in chain and the chain of ours that it jumps to.
const CHAINS: [(&str, &str); 2] = [
    ("PREROUTING", "PROXY_INBOUND"),
    ("OUTPUT", "PROXY_OUTBOUND"),
];

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
}

impl Rules {
    /// Rules for a configuration. The first matching rule decides; RETURN means no redirect.
    pub fn new(config: &Config, family: Family) -> Self {
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
        Self { family, lines }
    }

    /// Address family of the rules.
    pub fn family(&self) -> Family {
        self.family
    }

    /// Input that replaces our rules in a nat table that iptables-save prints as `saved`.
    ///
    /// Declaring our chains flushes them in the same transaction. The jumps to them are in built-in
    /// chains, which may contain rules of other programs: a correct jump stays, wrong or duplicate
    /// jumps to our chains are deleted.
    pub fn restore_input(&self, saved: &str) -> RestoreInput {
        let mut text = "*nat\n".to_owned();
        for (_, chain) in CHAINS {
            text.push_str(&format!(":{chain} - [0:0]\n"));
        }
        for (from, chain) in CHAINS {
            let expected = format!("-A {from} -p tcp -j {chain}");
            let found = jumps(saved, from, chain);
            if found != [expected.as_str()] {
                for jump in found {
                    text.push_str(&format!("{}\n", jump.replacen("-A", "-D", 1)));
                }
                text.push_str(&format!("{expected}\n"));
            }
        }
        for line in &self.lines {
            text.push_str(&format!("{line}\n"));
        }
        text.push_str("COMMIT\n");
        RestoreInput(text)
    }

    /// Input for each rule alone, in a chain without references, and input that deletes that chain.
    /// Finds the rejected rule when the kernel does not name it.
    pub fn trial_inputs(&self) -> (impl Iterator<Item = (&str, RestoreInput)>, RestoreInput) {
        let trials = self.lines.iter().map(|line| {
            let trial = line.replacen("PROXY_INBOUND", "PROXY_TRIAL", 1).replacen(
                "PROXY_OUTBOUND",
                "PROXY_TRIAL",
                1,
            );
            (
                line.as_str(),
                RestoreInput(format!("*nat\n:PROXY_TRIAL - [0:0]\n{trial}\nCOMMIT\n")),
            )
        });
        (
            trials,
            RestoreInput("*nat\n:PROXY_TRIAL - [0:0]\n-X PROXY_TRIAL\nCOMMIT\n".to_owned()),
        )
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
        Rules::new(&Config::example(), Family::V4)
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
        let rules = Rules::new(&Config::example(), Family::V6);
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
        let saved = "*nat\n-A PREROUTING -j PROXY_INBOUND\n-A PREROUTING -j OTHERS\n-A OTHERS -j PROXY_INBOUND\n\
                     -A PREROUTING -m comment --comment x -j PROXY_INBOUND_2\n\
                     -A OUTPUT -p tcp -j PROXY_OUTBOUND\n-A OUTPUT -p tcp -j PROXY_OUTBOUND\nCOMMIT\n";
        assert_eq!(
            restore_input(saved),
            include_str!("../tests/golden/repaired.rules")
        );
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
        let input = Rules::new(&Config::example(), Family::V4).restore_input("");
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
        let rules = Rules::new(&Config::example(), Family::V4);
        let (mut trials, _) = rules.trial_inputs();
        let (line, input) = trials.next().expect("there are rules");
        assert_eq!(line, "-A PROXY_INBOUND -i lo -j RETURN");
        assert_eq!(
            input.text(),
            "*nat\n:PROXY_TRIAL - [0:0]\n-A PROXY_TRIAL -i lo -j RETURN\nCOMMIT\n"
        );
    }
}
