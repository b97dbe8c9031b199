//! `mesh check`: what is wrong with the mesh of a cluster, in plain words and with what to do. It changes nothing.

use std::{io, process::ExitCode};

use anyhow::Result;
use clap::Args;
use serde_json::json;

use super::style::{self, Output, Style, Tone};
use crate::{
    check::{self, Finding, Level, facts::Facts},
    cluster::{self, Cluster, NoCluster},
};

/// What it can be told.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit code: 0, no problem (there may be warnings); 1, a problem; 2, there is no cluster to look at.\n\n\
    Examples:\n  mesh check\n  mesh check --context staging --namespace mesh\n  \
    mesh check --output json | jq -r '.checks[] | select(.level != \"ok\") | .text'"
)]
pub struct Arguments {
    #[command(flatten)]
    cluster: cluster::Arguments,
    /// In what form
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// Looks, and tells.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let facts = super::block_on(async {
        let cluster = Cluster::connect(&arguments.cluster).await?;
        Ok::<_, NoCluster>(Facts::gather(&cluster).await)
    })?;
    let facts = match facts {
        Ok(facts) => facts,
        Err(error) => {
            eprintln!("mesh: {error}");
            return Ok(ExitCode::from(2));
        }
    };
    let findings = check::all(&facts);
    let ok = findings
        .iter()
        .all(|finding| finding.level != Level::Problem);
    style::print(&match arguments.output {
        Output::Json => format!("{:#}\n", json!({"ok": ok, "checks": findings})),
        Output::Text => text(&findings, Style::of(&io::stdout())),
    })?;
    Ok(if ok {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn text(findings: &[Finding], style: Style) -> String {
    let mut text = String::new();
    let width = findings
        .iter()
        .map(|finding| finding.check.len())
        .max()
        .unwrap_or(0);
    for finding in findings {
        let (tone, word) = look(finding.level);
        let indent = " ".repeat(9 + width + 2);
        text += &format!(
            "{}{:width$}  {}\n",
            style.paint(tone, &format!("{word:9}")),
            finding.check,
            finding.text
        );
        text.extend(
            finding
                .details
                .iter()
                .map(|detail| format!("{indent}  {detail}\n")),
        );
        if !finding.advice.is_empty() {
            text += &format!(
                "{indent}{}\n",
                style.paint(Tone::Strong, &format!("-> {}", finding.advice))
            );
        }
    }
    let number = |level: Level| {
        findings
            .iter()
            .filter(|finding| finding.level == level)
            .count()
    };
    let (problems, warnings) = (number(Level::Problem), number(Level::Warning));
    let plural = |number: usize| if number == 1 { "" } else { "s" };
    text + &match (problems, warnings) {
        (0, 0) => "\nall is well\n".into(),
        (0, _) => format!("\nno problem, {warnings} warning{}\n", plural(warnings)),
        _ => format!(
            "\n{problems} problem{}, {warnings} warning{}\n",
            plural(problems),
            plural(warnings)
        ),
    }
}

fn look(level: Level) -> (Tone, &'static str) {
    match level {
        Level::Ok => (Tone::Good, "ok"),
        Level::Warning => (Tone::Doubtful, "warning"),
        Level::Problem => (Tone::Bad, "problem"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_what_is_wrong_with_whom_and_what_to_do() {
        let finding = |level, check, details: &[&str], advice: &str| Finding {
            check,
            level,
            text: "it is so".into(),
            details: details.iter().map(|detail| (*detail).to_owned()).collect(),
            advice: advice.into(),
        };
        let findings = [
            finding(Level::Ok, "pods", &[], ""),
            finding(Level::Problem, "webhook", &["a", "b"], "do this"),
        ];
        let expected = "\
ok       pods     it is so
problem  webhook  it is so
                    a
                    b
                  -> do this

1 problem, 0 warnings
";
        assert_eq!(text(&findings, Style::PLAIN), expected);
        assert!(text(&findings[..1], Style::PLAIN).ends_with("\n\nall is well\n"));
    }
}
