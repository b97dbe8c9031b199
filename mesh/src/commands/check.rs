//! `mesh check`: reports the findings of all checks with recommended actions. Changes nothing.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use serde_json::json;

use super::terminal::{Colors, Output, TextStyle};
use crate::{
    check::{self, Finding, Level, facts::Facts},
    cluster::{self, Cluster, ConnectError},
};

/// The arguments of `mesh check`.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit codes: 0, no problems (warnings are possible); 1, problems; 2, no connection to the cluster.\n\n\
    Examples:\n  mesh check\n  mesh check --context staging --mesh-namespace mesh\n  \
    mesh check --output json | jq -r '.checks[] | select(.level != \"ok\") | .text'"
)]
pub struct Arguments {
    #[command(flatten)]
    cluster: cluster::Arguments,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// Runs the checks and prints the findings.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let facts = super::block_on(async {
        let cluster = Cluster::connect(&arguments.cluster).await?;
        Ok::<_, ConnectError>(Facts::gather(&cluster).await)
    })?;
    let facts = match facts {
        Ok(facts) => facts,
        Err(error) => {
            eprintln!("mesh: {error}");
            return Ok(ExitCode::from(2));
        }
    };
    let findings = check::run(&facts);
    let ok = findings
        .iter()
        .all(|finding| finding.level != Level::Problem);
    let all = json!({"ok": ok, "checks": findings});
    let output = arguments.output;
    output.print(&all, |colors| text(&findings, colors))?;
    Ok(if ok {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn text(findings: &[Finding], colors: Colors) -> String {
    let mut text = String::new();
    let widths = findings.iter().map(|finding| finding.check.len());
    let width = widths.max().unwrap_or(0);
    for finding in findings {
        let (style, label) = appearance(finding.level);
        let indent = " ".repeat(9 + width + 2);
        text += &format!(
            "{}{:width$}  {}\n",
            colors.paint(style, &format!("{label:9}")),
            finding.check,
            finding.text
        );
        let details = finding.details.iter();
        text.extend(details.map(|detail| format!("{indent}  {detail}\n")));
        if !finding.advice.is_empty() {
            let advice = format!("-> {}", finding.advice);
            text += &format!("{indent}{}\n", colors.paint(TextStyle::Bold, &advice));
        }
    }
    let number = |level: Level| findings.iter().filter(|one| one.level == level).count();
    let (problems, warnings) = (number(Level::Problem), number(Level::Warning));
    if (problems, warnings) == (0, 0) {
        return text + "\nno problems found\n";
    }
    let problems = check::count(problems, "problem", "problems");
    let warnings = check::count(warnings, "warning", "warnings");
    text + &format!("\n{problems}, {warnings}\n")
}

fn appearance(level: Level) -> (TextStyle, &'static str) {
    match level {
        Level::Ok => (TextStyle::Ok, "ok"),
        Level::Warning => (TextStyle::Warning, "warning"),
        Level::Problem => (TextStyle::Error, "problem"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_findings_with_details_and_advice() {
        let finding = |level, check, details: &[&str], advice: &str| Finding {
            check,
            level,
            text: "result".into(),
            details: details.iter().map(|detail| (*detail).to_owned()).collect(),
            advice: advice.into(),
        };
        let findings = [
            finding(Level::Ok, "pods", &[], ""),
            finding(Level::Problem, "webhook", &["a", "b"], "advice"),
        ];
        let expected = "\
ok       pods     result
problem  webhook  result
                    a
                    b
                  -> advice

1 problem, 0 warnings
";
        assert_eq!(text(&findings, Colors::DISABLED), expected);
        assert!(text(&findings[..1], Colors::DISABLED).ends_with("\n\nno problems found\n"));
    }
}
