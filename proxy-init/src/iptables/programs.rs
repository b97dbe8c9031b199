//! The programs of iptables: finds an iptables backend that the kernel supports, reads its tables, and replaces
//! our rules in one run, with one transaction for each table.
//!
//! The only file that starts programs. The input is computed in [`super`].

use std::ffi::OsStr;
use std::io::{self, Write};
use std::process::{Command, Output, Stdio};

use super::{Family, RestoreInput, Rules};

/// Lock file of iptables-legacy. This one exists in every container, also with a read-only root
/// filesystem, and is specific to the network namespace.
const LOCK_FILE: &str = "/proc/self/ns/net";
/// Seconds to wait for that lock.
const LOCK_TIMEOUT: &str = "5";

/// Error of loading the rules of one address family.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No iptables program of this family was found.
    #[error("no {0}-nft, {0}-legacy or {0} found in PATH")]
    NotFound(&'static str),
    /// Every backend failed; one message each.
    #[error("{}", .0.join("; "))]
    Failed(Vec<String>),
}

/// Sets the rules of one family with the first working iptables backend and returns the backend's
/// name.
pub fn apply(rules: &Rules, search_path: &OsStr) -> Result<String, Error> {
    let family = rules.family();
    let mut failures = Vec::new();
    for backend in ["nft", "legacy", ""] {
        // Plain `iptables` is one of the two backends under another name.
        if backend.is_empty() && !failures.is_empty() {
            break;
        }
        for tool in tools(family, backend) {
            match tool.set(rules, search_path) {
                Ok(()) => return Ok(tool.name),
                Err(ToolError::NotFound) => {}
                Err(ToolError::Failed(failure)) => {
                    failures.push(format!("{}: {failure}", tool.name));
                    break;
                }
            }
        }
    }
    Err(if failures.is_empty() {
        Error::NotFound(family.program())
    } else {
        Error::Failed(failures)
    })
}

/// Commands of one iptables backend: standalone programs, or the multi-call binary that some images
/// provide instead.
#[derive(Debug, PartialEq, Eq)]
struct Tool {
    name: String,
    save: Vec<String>,
    restore: Vec<String>,
}

enum ToolError {
    NotFound,
    Failed(String),
}

fn tools(family: Family, backend: &str) -> Vec<Tool> {
    let family = family.program();
    if backend.is_empty() {
        return vec![Tool {
            name: family.to_owned(),
            save: vec![format!("{family}-save")],
            restore: vec![format!("{family}-restore")],
        }];
    }
    let name = format!("{family}-{backend}");
    let multi_call = format!("xtables-{backend}-multi");
    vec![
        Tool {
            name: name.clone(),
            save: vec![format!("{name}-save")],
            restore: vec![format!("{name}-restore")],
        },
        Tool {
            name,
            save: vec![multi_call.clone(), format!("{family}-save")],
            restore: vec![multi_call, format!("{family}-restore")],
        },
    ]
}

impl Tool {
    fn set(&self, rules: &Rules, search_path: &OsStr) -> Result<(), ToolError> {
        let output = self.run(&self.save, &[], "", search_path)?;
        if !output.status.success() {
            return Err(ToolError::Failed(format!(
                "cannot read the tables: {}",
                error_summary(&output)
            )));
        }
        let input = rules.restore_input(&String::from_utf8_lossy(&output.stdout));
        let output = self.restore(&input, search_path)?;
        if output.status.success() {
            return Ok(());
        }
        let rejected = line_number(&String::from_utf8_lossy(&output.stderr))
            .and_then(|line| input.rule_at_line(line))
            .map(str::to_owned);
        let rejected = match rejected {
            Some(rule) => Some(rule),
            None => self.find_rejected(rules, search_path)?,
        };
        let reason = error_summary(&output);
        Err(ToolError::Failed(match rejected {
            Some(rule) => format!("rule `{rule}` rejected: {reason}"),
            None => format!("rules rejected: {reason}"),
        }))
    }

    /// Finds the rejected rule after the kernel rejected the whole transaction: loads each rule
    /// alone into a chain without references.
    fn find_rejected(
        &self,
        rules: &Rules,
        search_path: &OsStr,
    ) -> Result<Option<String>, ToolError> {
        let (trials, clean_up) = rules.trial_inputs();
        let mut rejected = None;
        for (rule, input) in trials {
            if !self.restore(&input, search_path)?.status.success() {
                rejected = Some(rule.to_owned());
                break;
            }
        }
        self.restore(&clean_up, search_path)?;
        Ok(rejected)
    }

    fn restore(&self, input: &RestoreInput, search_path: &OsStr) -> Result<Output, ToolError> {
        self.run(
            &self.restore,
            &["--noflush", "-w", LOCK_TIMEOUT],
            input.text(),
            search_path,
        )
    }

    fn run(
        &self,
        program: &[String],
        args: &[&str],
        input: &str,
        search_path: &OsStr,
    ) -> Result<Output, ToolError> {
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
            // A program that exits before it reads all input reports the reason on standard error.
            stdin.write_all(input.as_bytes()).ok();
            drop(stdin);
            child.wait_with_output()
        });
        result.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => ToolError::NotFound,
            _ => ToolError::Failed(format!("cannot run {}: {error}", program[0])),
        })
    }
}

/// Error output of a program in one line, without usage hints.
fn error_summary(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let hints = ["Try `", "Error occurred at line", "#"];
    let lines = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !hints.iter().any(|hint| line.starts_with(hint)));
    let lines: Vec<_> = lines
        .map(strip_banner)
        .map(kernel_reason)
        .filter(|line| !line.is_empty())
        .collect();
    if lines.is_empty() {
        output.status.to_string()
    } else {
        lines.join(", ")
    }
}

/// Reduces `line 4: RULE_APPEND failed (REASON): rule in chain X` to REASON. `line 9 failed` has no
/// reason.
fn kernel_reason(line: &str) -> &str {
    if line.starts_with("line ") && line.ends_with(" failed") {
        return "the kernel returned no reason";
    }
    let reason = line
        .strip_prefix("line ")
        .and_then(|rest| rest.split_once(" failed ("))
        .and_then(|(_, rest)| rest.split_once(')'));
    reason.map_or(line, |(reason, _)| reason)
}

/// Reduces `iptables-nft-restore v1.8.9 (nf_tables): REASON` to REASON.
fn strip_banner(line: &str) -> &str {
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

/// Line number in an error: `line 4: ...`, `line: 4`, `line 4 failed`.
fn line_number(stderr: &str) -> Option<usize> {
    stderr.match_indices("line").find_map(|(at, word)| {
        let rest = stderr[at + word.len()..].trim_start_matches([':', ' ']);
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        rest[..digits].parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    fn summary(stderr: &str) -> String {
        error_summary(&Output {
            status: ExitStatus::from_raw(0x100),
            stdout: Vec::new(),
            stderr: stderr.into(),
        })
    }

    #[test]
    fn error_summary_is_one_line() {
        let nft = "iptables-nft-restore v1.8.9 (nf_tables): \nline 4: RULE_APPEND failed (Invalid argument): rule in chain X\n";
        assert_eq!(summary(nft), "Invalid argument");
        let long = "iptables-restore v1.8.9 (legacy): too many ports specified\nError occurred at line: 4\nTry `iptables-restore -h' ...\n";
        assert_eq!(summary(long), "too many ports specified");
        assert_eq!(
            summary("iptables-restore: line 5 failed\n"),
            "the kernel returned no reason"
        );
        assert_eq!(
            summary("iptables-nft-restore: line 4 failed: No chain/target/match by that name.\n"),
            "line 4 failed: No chain/target/match by that name."
        );
        assert_eq!(
            summary("# Warning: iptables-legacy tables present\n"),
            "exit status: 1"
        );
    }

    #[test]
    fn line_number_is_found_in_each_format() {
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
}
