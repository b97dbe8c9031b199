//! Applying rules: finds the iptables that the kernel answers, asks it what is there, loads what is missing in one step.
//!
//! The only file that starts programs. Never changes a rule by itself: what is loaded is computed in [`crate::rules`].

use std::ffi::OsStr;
use std::io::{self, Write};
use std::process::{Command, Output, Stdio};

use thiserror::Error;

use crate::rules::{Family, Load, Rules};

/// iptables-legacy wants a file to lock. Any that is there will do, and this one is in every container, also where the root filesystem is
/// read-only; moreover it is one and the same for all who work on this network namespace, and no other.
const LOCK_FILE: &str = "/proc/self/ns/net";
/// How many seconds to wait for that lock.
const LOCK_WAIT: &str = "5";

/// Why no rules were set.
#[derive(Debug, PartialEq, Eq, Error)]
pub enum Failure {
    /// There is no iptables of this family.
    #[error("there is no {0}-nft, {0}-legacy or {0} in the PATH")]
    NoProgram(&'static str),
    /// What each kind of iptables said.
    #[error("{}", .0.join("; "))]
    Refused(Vec<String>),
}

/// Sets the rules of one family by the first kind of iptables with which it works, and gives its name.
pub fn apply(rules: &Rules, search_path: &OsStr) -> Result<String, Failure> {
    let family = rules.family();
    let mut refusals = Vec::new();
    for kind in ["nft", "legacy", ""] {
        // The plain name is one of the two others: only where these are missing does it add anything.
        if kind.is_empty() && !refusals.is_empty() {
            break;
        }
        for tool in tools(family, kind) {
            match tool.set(rules, search_path) {
                Ok(()) => return Ok(tool.name),
                Err(Attempt::Missing) => {}
                Err(Attempt::Refused(refusal)) => {
                    refusals.push(format!("{}: {refusal}", tool.name));
                    break;
                }
            }
        }
    }
    Err(if refusals.is_empty() {
        Failure::NoProgram(family.program())
    } else {
        Failure::Refused(refusals)
    })
}

/// Whether this network namespace has an IPv6 address by which others could reach it, or it others.
pub fn has_ipv6_address() -> bool {
    // The file is missing where the kernel has no IPv6.
    std::fs::read_to_string("/proc/self/net/if_inet6")
        .is_ok_and(|table| lists_global_address(&table))
}

/// One way to call an iptables: by its own name, or by the program that is all of them, as some images have it.
#[derive(Debug, PartialEq, Eq)]
struct Tool {
    name: String,
    save: Vec<String>,
    restore: Vec<String>,
}

enum Attempt {
    Missing,
    Refused(String),
}

fn tools(family: Family, kind: &str) -> Vec<Tool> {
    let family = family.program();
    if kind.is_empty() {
        return vec![Tool {
            name: family.to_owned(),
            save: vec![format!("{family}-save")],
            restore: vec![format!("{family}-restore")],
        }];
    }
    let name = format!("{family}-{kind}");
    let all_in_one = format!("xtables-{kind}-multi");
    vec![
        Tool {
            name: name.clone(),
            save: vec![format!("{name}-save")],
            restore: vec![format!("{name}-restore")],
        },
        Tool {
            name,
            save: vec![all_in_one.clone(), format!("{family}-save")],
            restore: vec![all_in_one, format!("{family}-restore")],
        },
    ]
}

impl Tool {
    fn set(&self, rules: &Rules, search_path: &OsStr) -> Result<(), Attempt> {
        let output = self.run(&self.save, &["-t", "nat"], "", search_path)?;
        if !output.status.success() {
            return Err(Attempt::Refused(format!(
                "the nat table cannot be read: {}",
                words(&output)
            )));
        }
        let load = rules.load(&String::from_utf8_lossy(&output.stdout));
        let output = self.restore(&load, search_path)?;
        if output.status.success() {
            return Ok(());
        }
        let named = line_number(&String::from_utf8_lossy(&output.stderr))
            .and_then(|line| load.rule_on(line))
            .map(str::to_owned);
        let refused = named.map_or_else(
            || self.find_refused(rules, search_path),
            |rule| Ok(Some(rule)),
        )?;
        Err(Attempt::Refused(match refused {
            Some(rule) => format!("the rule `{rule}` is refused: {}", words(&output)),
            None => format!("the rules are refused: {}", words(&output)),
        }))
    }

    /// Which rule it was, where the kernel has refused all of them in one go: each is tried in a chain that nothing leads to.
    fn find_refused(&self, rules: &Rules, search_path: &OsStr) -> Result<Option<String>, Attempt> {
        let (single, clean_up) = rules.one_by_one();
        let mut refused = None;
        for (rule, load) in single {
            if !self.restore(&load, search_path)?.status.success() {
                refused = Some(rule.to_owned());
                break;
            }
        }
        self.restore(&clean_up, search_path)?;
        Ok(refused)
    }

    fn restore(&self, load: &Load, search_path: &OsStr) -> Result<Output, Attempt> {
        self.run(
            &self.restore,
            &["--noflush", "-w", LOCK_WAIT],
            load.text(),
            search_path,
        )
    }

    fn run(
        &self,
        program: &[String],
        args: &[&str],
        input: &str,
        search_path: &OsStr,
    ) -> Result<Output, Attempt> {
        let mut command = Command::new(&program[0]);
        command
            .args(&program[1..])
            .args(args)
            .env("PATH", search_path)
            .env("XTABLES_LOCKFILE", LOCK_FILE);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let result = command.spawn().and_then(|mut child| {
            let mut stdin = child.stdin.take().expect("piped above");
            // One that ends before it has read everything says why in its output.
            stdin.write_all(input.as_bytes()).ok();
            drop(stdin);
            child.wait_with_output()
        });
        result.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Attempt::Missing,
            _ => Attempt::Refused(format!("{} cannot be run: {error}", program[0])),
        })
    }
}

/// What a program said of its failure, in one line and without what is of use only at a prompt.
fn words(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let idle = ["Try `", "Error occurred at line", "#"];
    let lines = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !idle.iter().any(|words| line.starts_with(words)));
    let lines: Vec<_> = lines
        .map(without_banner)
        .map(kernels_reason)
        .filter(|line| !line.is_empty())
        .collect();
    if lines.is_empty() {
        output.status.to_string()
    } else {
        lines.join(", ")
    }
}

/// `line 4: RULE_APPEND failed (REASON): rule in chain X` is for us REASON; `line 9 failed` is a refusal without one.
fn kernels_reason(line: &str) -> &str {
    if line.starts_with("line ") && line.ends_with(" failed") {
        return "the kernel gives no reason";
    }
    let reason = line
        .strip_prefix("line ")
        .and_then(|rest| rest.split_once(" failed ("))
        .and_then(|(_, rest)| rest.split_once(')'));
    reason.map_or(line, |(reason, _)| reason)
}

/// `iptables-nft-restore v1.8.9 (nf_tables): REASON` is for us REASON.
fn without_banner(line: &str) -> &str {
    match line
        .split_once(": ")
        .or_else(|| line.strip_suffix(':').map(|banner| (banner, "")))
    {
        Some((banner, reason))
            if banner.contains("tables") && (banner.contains(" v1.") || !banner.contains(' ')) =>
        {
            reason.trim()
        }
        _ => line,
    }
}

/// The line that a failure is about: `line 4: ...`, `line: 4`, `line 4 failed`.
fn line_number(stderr: &str) -> Option<usize> {
    stderr.match_indices("line").find_map(|(at, word)| {
        let rest = stderr[at + word.len()..].trim_start_matches([':', ' ']);
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        rest[..digits].parse().ok()
    })
}

/// Each line: address, interface, prefix, scope, flags, name; scope 00 is global, others are of this machine or this link.
fn lists_global_address(table: &str) -> bool {
    table
        .lines()
        .any(|line| line.split_whitespace().nth(3) == Some("00"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    fn said(stderr: &str) -> String {
        words(&Output {
            status: ExitStatus::from_raw(0x100),
            stdout: Vec::new(),
            stderr: stderr.into(),
        })
    }

    #[test]
    fn failures_are_told_in_one_line() {
        let nft = "iptables-nft-restore v1.8.9 (nf_tables): \nline 4: RULE_APPEND failed (Invalid argument): rule in chain X\n";
        assert_eq!(said(nft), "Invalid argument");
        let long = "iptables-restore v1.8.9 (legacy): too many ports specified\nError occurred at line: 4\nTry `iptables-restore -h' ...\n";
        assert_eq!(said(long), "too many ports specified");
        assert_eq!(
            said("iptables-restore: line 5 failed\n"),
            "the kernel gives no reason"
        );
        assert_eq!(
            said("iptables-nft-restore: line 4 failed: No chain/target/match by that name.\n"),
            "line 4 failed: No chain/target/match by that name."
        );
        assert_eq!(
            said("# Warning: iptables-legacy tables present\n"),
            "exit status: 1"
        );
    }

    #[test]
    fn the_line_is_found_in_each_wording() {
        for (stderr, line) in [
            (
                "iptables-nft-restore v1.8.9 (nf_tables): \nline 4: RULE_APPEND failed (Invalid argument)",
                Some(4),
            ),
            (
                "iptables-restore v1.8.9 (legacy): bad\nError occurred at line: 14\nTry `iptables-restore -h'",
                Some(14),
            ),
            ("iptables-restore: line 5 failed", Some(5)),
            ("Permission denied (you must be root)", None),
            ("a line", None),
        ] {
            assert_eq!(line_number(stderr), line, "{stderr}");
        }
    }

    #[test]
    fn only_global_addresses_count() {
        let link = "fe800000000000000000000000000001 02 40 20 80     eth0\n";
        let own = "00000000000000000000000000000001 01 80 10 80       lo\n";
        let global = "fd000000000000000000000000000001 02 40 00 80     eth0\n";
        assert!(!lists_global_address(&format!("{own}{link}")));
        assert!(lists_global_address(&format!("{own}{global}{link}")));
        assert!(!lists_global_address(""));
    }
}
