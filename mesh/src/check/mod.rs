//! Diagnosis of a mesh. `facts` reads the cluster, and each check is a pure function from facts to
//! findings. Nothing in the cluster changes. A fact that cannot be read results in a warning.

mod certificates;
pub mod facts;
mod gateway;
mod identity;
pub(crate) mod injection;
mod permissions;
mod platform;
mod policies;
mod services;
mod settings;
pub mod target;
mod traces;
pub mod traffic;
pub mod upgrade;
mod webhook;
mod workloads;

use std::collections::BTreeMap;

use serde::Serialize;

use facts::Facts;

use crate::cluster::FORBIDDEN;
use crate::terminal::printable;

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// No action is necessary.
    Ok,
    /// A hint, or what was not checked for lack of rights.
    Note,
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

    fn note(text: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            level: Level::Note,
            ..Self::warning(text, advice)
        }
    }

    /// A fact could not be read.
    fn unknown(reason: &str) -> Self {
        let text = format!("cannot be checked: {reason}");
        if is_intended(reason) {
            Self::note(text, "")
        } else {
            Self::warning(text, "")
        }
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

/// Why a fact is unknown that all namespaces decide.
const ALL_NAMESPACES: &str =
    "it needs the objects of all namespaces: run mesh check without --namespace";

/// Whether a fact is unknown because of the rights or the flags of the user.
fn is_intended(reason: &str) -> bool {
    reason == ALL_NAMESPACES || reason.contains(FORBIDDEN)
}

/// Runs all checks.
pub fn run(facts: &Facts) -> Vec<Finding> {
    let checks: [(&'static str, Check); 26] = [
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
        ("pods", injection::injected),
        ("proxies", injection::proxies),
        ("traffic", traffic::traffic),
        ("traces", traces::traces),
        ("certificates", identity::workloads),
        ("clocks", identity::clocks),
    ];
    report(checks.map(|(check, find)| (check, find(facts))))
}

/// The findings of checks by name.
fn report<'a>(checks: impl IntoIterator<Item = (&'static str, Findings<'a>)>) -> Vec<Finding> {
    let (mut all, mut unchecked) = (Vec::new(), BTreeMap::<&str, Vec<&str>>::new());
    for (check, findings) in checks {
        let findings = match findings {
            Ok(findings) => findings,
            Err(reason) if is_intended(reason) => {
                unchecked.entry(reason).or_default().push(check);
                continue;
            }
            Err(reason) => vec![Finding::unknown(reason)],
        };
        let named = findings.into_iter();
        all.extend(named.map(|finding| Finding { check, ..finding }));
    }
    all.extend(not_checked(&unchecked));
    all
}

/// One note about all checks that were not made.
fn not_checked(unchecked: &BTreeMap<&str, Vec<&str>>) -> Option<Finding> {
    let number = unchecked.values().map(Vec::len).sum();
    let text = format!("{} not made", count(number, "check was", "checks were"));
    let advice = "an account with these rights can make them: docs/reference/mesh.md lists them";
    let reasons = unchecked.iter();
    let details = reasons.map(|(reason, checks)| format!("{}: {reason}", checks.join(", ")));
    let note = Finding::note(text, advice).if_any(details)?;
    Some(Finding {
        check: "unchecked",
        ..note
    })
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
    fn what_rights_do_not_allow_is_one_note() {
        let forbidden = format!("{FORBIDDEN}nodes is forbidden: user alice cannot list it");
        let facts = Facts {
            permissions: Err(forbidden.clone()),
            webhook: Err(format!("no token: {forbidden}")),
            judgement: Err(ALL_NAMESPACES.into()),
            ..facts::testing::facts(vec![], serde_json::json!({}))
        };
        let findings = run(&facts);
        let notes = findings.iter().filter(|one| one.level == Level::Note);
        let notes: Vec<_> = notes.map(|one| (one.check, &*one.text)).collect();
        assert_eq!(notes, [("unchecked", "3 checks were not made")]);
        let details = &findings.last().expect("the note").details;
        assert!(details[0].starts_with(&format!("rights: {FORBIDDEN}")));
        assert!(
            details.iter().any(|one| one.starts_with("webhook: ")),
            "{details:?}"
        );
        assert!(
            findings
                .iter()
                .any(|one| (one.check, one.level) == ("pods", Level::Ok))
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
