//! What is wrong with a mesh: facts (`facts`, the only part that asks a cluster) to findings, one function a check, all pure. It never
//! changes anything in the cluster, and a fact that it may not see is a warning, not a guess.

mod certificates;
pub mod facts;
mod identity;
mod platform;
mod pods;
mod rights;
mod webhook;

use serde::Serialize;

use facts::Facts;

/// How it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// To be looked at, or not to be seen.
    Warning,
    /// Something does not work, or soon will not.
    Problem,
}

/// What a check has found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The check's name.
    pub check: &'static str,
    /// How it is.
    pub level: Level,
    /// In plain words.
    pub text: String,
    /// Which pods, nodes or the like, a few of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub details: Vec<String>,
    /// What to do.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub advice: String,
}

/// How many things of a kind are named.
const NAMED: usize = 10;

impl Finding {
    fn ok(check: &'static str, text: impl Into<String>) -> Self {
        Self {
            check,
            level: Level::Ok,
            text: text.into(),
            details: Vec::new(),
            advice: String::new(),
        }
    }

    fn warning(check: &'static str, text: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            level: Level::Warning,
            advice: advice.into(),
            ..Self::ok(check, text)
        }
    }

    fn problem(check: &'static str, text: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            level: Level::Problem,
            ..Self::warning(check, text, advice)
        }
    }

    /// A fact that nobody told.
    fn unknown(check: &'static str, why: &str) -> Self {
        Self::warning(check, format!("cannot be checked: {why}"), "")
    }

    fn naming(mut self, details: impl IntoIterator<Item = String>) -> Self {
        let mut details: Vec<String> = details.into_iter().collect();
        let more = details.len().saturating_sub(NAMED);
        details.truncate(NAMED);
        details.extend((more > 0).then(|| format!("and {more} more")));
        self.details = details;
        self
    }
}

/// Every check.
pub fn all(facts: &Facts) -> Vec<Finding> {
    let checks: [fn(&Facts) -> Vec<Finding>; 15] = [
        platform::kubernetes,
        platform::parts,
        platform::versions,
        rights::rights,
        webhook::configuration,
        webhook::ca_bundle,
        webhook::trial,
        identity::authority,
        identity::rotation,
        identity::roots,
        pods::wishes,
        pods::injected,
        pods::proxies,
        identity::workloads,
        identity::clocks,
    ];
    checks.into_iter().flat_map(|check| check(facts)).collect()
}

/// `1 pod`, `2 pods`.
fn count(number: usize, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_are_named_and_the_rest_are_counted() {
        let finding =
            Finding::problem("x", "y", "z").naming((0..13).map(|number| number.to_string()));
        assert_eq!(
            (finding.details.len(), finding.details[10].as_str()),
            (11, "and 3 more")
        );
    }

    #[test]
    fn of_a_cluster_that_tells_nothing_nothing_is_said_to_be_well_but_its_version() {
        let facts = facts::testing::untold();
        let findings = all(&facts);
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
