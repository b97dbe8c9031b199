//! Diagnosis of a mesh. `facts` reads the cluster, and each check is a pure function from facts to
//! findings. Nothing in the cluster changes. A fact that cannot be read results in a warning.

mod certificates;
pub mod facts;
mod gateway;
mod identity;
mod permissions;
mod platform;
pub(crate) mod pods;
mod policies;
mod services;
mod settings;
pub mod traffic;
pub mod upgrade;
mod webhook;
mod workloads;

use serde::Serialize;

use facts::Facts;

use crate::commands::terminal::printable;

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// No action is necessary.
    Ok,
    /// Needs attention, or could not be checked.
    Warning,
    /// Something fails or will fail soon.
    Problem,
}

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The name of the check. [`run`] sets it.
    pub check: &'static str,
    /// The severity.
    pub level: Level,
    /// A description of the result.
    pub text: String,
    /// The affected objects, at most `MAX_DETAILS`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub details: Vec<String>,
    /// The recommended action.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub advice: String,
}

/// The maximum number of affected objects in a finding.
const MAX_DETAILS: usize = 10;
/// The length of a detail, before characters are escaped.
const MAX_DETAIL_CHARS: usize = 2000;

impl Finding {
    fn ok(text: impl Into<String>) -> Self {
        Self {
            check: "",
            level: Level::Ok,
            text: printable(&text.into()),
            details: Vec::new(),
            advice: String::new(),
        }
    }

    fn warning(text: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            level: Level::Warning,
            advice: advice.into(),
            ..Self::ok(text)
        }
    }

    fn problem(text: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            level: Level::Problem,
            ..Self::warning(text, advice)
        }
    }

    /// A fact could not be read.
    fn unknown(reason: &str) -> Self {
        Self::warning(format!("cannot be checked: {reason}"), "")
    }

    fn with_details(mut self, details: impl IntoIterator<Item = String>) -> Self {
        let mut details: Vec<String> = details.into_iter().collect();
        let more = details.len().saturating_sub(MAX_DETAILS);
        details.truncate(MAX_DETAILS);
        details.extend((more > 0).then(|| format!("and {more} more")));
        // Proxies and authors of objects write parts of it.
        let bounded = |text: String| text.chars().take(MAX_DETAIL_CHARS).collect::<String>();
        let details = details.into_iter().map(bounded);
        self.details = details.map(|detail| printable(&detail)).collect();
        self
    }

    /// A finding about these objects, with their number in front of the text. `None` if there are
    /// none.
    fn about(self, objects: Vec<String>, one: &str, many: &str) -> Option<Self> {
        let text = format!("{} {}", count(objects.len(), one, many), self.text);
        Self { text, ..self }.if_any(objects)
    }

    /// The finding with these details, unless there are none.
    fn if_any(self, details: impl IntoIterator<Item = String>) -> Option<Self> {
        let finding = self.with_details(details);
        (!finding.details.is_empty()).then_some(finding)
    }
}

/// The findings of a check, or why a fact that it needs is unknown.
type Findings<'a> = Result<Vec<Finding>, &'a String>;

type Check = fn(&Facts) -> Findings<'_>;

/// The findings that there are, or that all is well.
fn or_ok(findings: impl IntoIterator<Item = Option<Finding>>, text: String) -> Vec<Finding> {
    let mut findings: Vec<Finding> = findings.into_iter().flatten().collect();
    if findings.is_empty() {
        findings.push(Finding::ok(text));
    }
    findings
}

/// Runs all checks.
pub fn run(facts: &Facts) -> Vec<Finding> {
    let checks: [(&str, Check); 25] = [
        ("kubernetes", platform::kubernetes),
        ("controller", platform::controller),
        ("injector", platform::injector),
        ("versions", platform::versions),
        ("services", services::services),
        ("rights", permissions::permissions),
        ("webhook", webhook::configuration),
        ("caBundle", webhook::ca_bundle),
        ("injection", webhook::injection),
        ("authority", identity::authority),
        ("rotation", identity::rotation),
        ("roots", identity::roots),
        ("wishes", settings::labels_and_annotations),
        ("strict", settings::strict),
        ("workloads", workloads::workloads),
        ("gateway-api", gateway::definitions),
        ("routes", gateway::routes),
        ("policy-definition", policies::definition),
        ("policies", policies::policies),
        ("upgrade", upgrade::upgrade),
        ("pods", pods::injected),
        ("proxies", pods::proxies),
        ("traffic", traffic::traffic),
        ("certificates", identity::workloads),
        ("clocks", identity::clocks),
    ];
    let findings = checks.map(|(check, find)| {
        let findings = find(facts).unwrap_or_else(|reason| vec![Finding::unknown(reason)]);
        findings
            .into_iter()
            .map(move |finding| Finding { check, ..finding })
    });
    findings.into_iter().flatten().collect()
}

/// `1 pod`, `2 pods`.
pub(crate) fn count(number: usize, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_the_number_of_details() {
        let finding =
            Finding::problem("y", "z").with_details((0..13).map(|number| number.to_string()));
        assert_eq!(
            (finding.details.len(), finding.details[10].as_str()),
            (11, "and 3 more")
        );
    }

    #[test]
    fn unknown_facts_are_warnings() {
        let facts = facts::testing::unknown_facts();
        let findings = run(&facts);
        assert!(
            findings
                .iter()
                .all(|finding| finding.level != Level::Ok || finding.check == "kubernetes"),
            "{findings:?}"
        );
        assert!(
            findings
                .iter()
                .all(|finding| finding.level != Level::Problem),
            "{findings:?}"
        );
    }
}
