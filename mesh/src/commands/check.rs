//! `mesh check`: reports the findings of all checks with recommended actions. Changes nothing.

use std::{process::ExitCode, time::Duration};

use anyhow::Result;
use clap::Args;
use serde_json::json;
use tokio::time::{Instant, sleep_until};

use crate::terminal::{self, Colors, Output, TextStyle};
use crate::{
    check::{self, Finding, Level, facts::Facts},
    cluster::{self, Cluster},
    time::parse_duration,
};

/// The arguments of `mesh check`.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit codes: 0, no problems (warnings are possible); 1, problems; 2, no connection to the cluster.\n\n\
    Examples:\n  mesh check\n  mesh check --context staging --mesh-namespace mesh\n  \
    mesh check --namespace shop     what concerns one namespace, also without rights elsewhere\n  \
    mesh check --wait=2m            until all is well, for example after an installation\n  \
    mesh check --output json | jq -r '.checks[] | select(.level != \"ok\") | .text'"
)]
pub struct Arguments {
    #[command(flatten)]
    cluster: cluster::Arguments,
    /// Repeat the checks until there is no problem, at most for this time, such as 90s [default: 5m]
    #[arg(
        long, value_name = "DURATION", num_args = 0..=1,
        default_missing_value = "5m", value_parser = parse_duration
    )]
    wait: Option<Duration>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// The time between two runs of the checks.
const INTERVAL: Duration = Duration::from_secs(5);

/// Runs the checks and prints the findings.
pub async fn run(arguments: &Arguments) -> Result<ExitCode> {
    let cluster = Cluster::connect(&arguments.cluster).await?;
    let only = arguments.cluster.namespace.as_deref();
    let check = async || check::run(&Facts::gather(&cluster, only).await);
    let findings = match arguments.wait {
        Some(time) => {
            wait(time, check, |problems| {
                problems.lines().for_each(terminal::note)
            })
            .await
        }
        None => check().await,
    };
    print(&findings, arguments.output)
}

/// Prints findings. The exit code is 1 if there are problems.
pub(super) fn print(findings: &[Finding], output: Output) -> Result<ExitCode> {
    let ok = problems(findings).is_empty();
    let all = json!({"ok": ok, "checks": findings});
    output.print(&all, |colors| text(findings, colors))?;
    Ok(if ok {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Repeats the checks until there is no problem, or the time is over. Reports problems when they
/// change.
async fn wait(
    time: Duration,
    check: impl AsyncFn() -> Vec<Finding>,
    report: impl Fn(&str),
) -> Vec<Finding> {
    let end = Instant::now() + time;
    let mut reported = String::new();
    loop {
        let findings = check().await;
        let problems = problems(&findings);
        if problems.is_empty() || Instant::now() >= end {
            return findings;
        }
        if problems != reported {
            report(&problems);
            reported = problems;
        }
        sleep_until(end.min(Instant::now() + INTERVAL)).await;
    }
}

/// A line for each problem.
fn problems(findings: &[Finding]) -> String {
    let problems = findings.iter().filter(|one| one.level == Level::Problem);
    problems
        .map(|one| format!("waiting: {}: {}\n", one.check, one.text))
        .collect()
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
        Level::Note => (TextStyle::Dim, "note"),
        Level::Warning => (TextStyle::Warning, "warning"),
        Level::Problem => (TextStyle::Error, "problem"),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    fn finding(level: Level, check: &'static str, details: &[&str], advice: &str) -> Finding {
        Finding {
            check,
            level,
            text: "result".into(),
            details: details.iter().map(|detail| (*detail).to_owned()).collect(),
            advice: advice.into(),
        }
    }

    /// Waits for 5 minutes while the runs of the checks have these problems, all further ones the last.
    /// Returns the seconds, the problems at the end, and what was reported.
    async fn waited(runs: &[&[&'static str]]) -> (u64, String, Vec<String>) {
        let (began, run) = (Instant::now(), Cell::new(0));
        let reported = RefCell::new(Vec::new());
        let check = async || {
            let now = &runs[run.get().min(runs.len() - 1)];
            run.set(run.get() + 1);
            let mut all = vec![finding(Level::Warning, "clocks", &[], "")];
            all.extend(
                now.iter()
                    .map(|check| finding(Level::Problem, check, &[], "")),
            );
            all
        };
        let report = |problems: &str| reported.borrow_mut().push(problems.to_owned());
        let findings = wait(Duration::from_secs(300), check, report).await;
        (
            began.elapsed().as_secs(),
            problems(&findings),
            reported.into_inner(),
        )
    }

    #[tokio::test(start_paused = true)]
    async fn waits_until_there_is_no_problem_and_reports_changes() {
        let [pods, roots] = ["pods", "roots"].map(|check| format!("waiting: {check}: result\n"));
        let runs: [&[&str]; 4] = [&["pods", "roots"], &["pods", "roots"], &["roots"], &[]];
        let reported = vec![pods + &roots, roots.clone()];
        assert_eq!(waited(&runs).await, (15, String::new(), reported));
        assert_eq!(waited(&[&[]]).await, (0, String::new(), vec![]));
        let expected = (300, roots.clone(), vec![roots]);
        assert_eq!(waited(&[&["roots"]]).await, expected, "the time is over");
    }

    #[test]
    fn waits_five_minutes_by_default() {
        let wait = |line| crate::commands::parsed::<Arguments>(line).map(|one| one.wait);
        let minutes = |number: u64| Some(Duration::from_secs(60 * number));
        assert_eq!(wait("check --wait").unwrap(), minutes(5));
        assert_eq!(wait("check --wait=2m").unwrap(), minutes(2));
        assert_eq!(wait("check").unwrap(), None);
        assert_eq!(wait("check --wait 2m").unwrap(), minutes(2));
        assert!(wait("check --wait=2").is_err() && wait("check --wait 2").is_err());
    }

    #[test]
    fn prints_findings_with_details_and_advice() {
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
