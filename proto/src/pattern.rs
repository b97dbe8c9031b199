//! Regular expressions of routes. The controller rejects a route with an invalid one, and the proxy
//! applies the others: both compile them here.

use regex_lite::{Regex, RegexBuilder};

/// The length of an expression.
pub const MAX_PATTERN_BYTES: usize = 1024;
/// The sizes that compiled expressions may have. The largest bounds the time of a match per byte.
const COMPILED_BYTES: [usize; 3] = [1024, 4 * 1024, 32 * 1024];

/// A regular expression for a whole value, in RE2 syntax without Unicode classes. Case-sensitive.
/// Matching takes linear time.
#[derive(Clone, Debug)]
pub struct Pattern {
    regex: Regex,
    max_size: usize,
}

/// Why an expression is invalid.
#[derive(Debug, thiserror::Error)]
pub enum PatternError {
    /// Its length.
    #[error("it is longer than {MAX_PATTERN_BYTES} bytes")]
    TooLong,
    /// Its syntax, or its compiled size.
    #[error("{0}")]
    Invalid(regex_lite::Error),
}

impl Pattern {
    /// Compiles an expression.
    pub fn parse(text: &str) -> Result<Pattern, PatternError> {
        if text.len() > MAX_PATTERN_BYTES {
            return Err(PatternError::TooLong);
        }
        let [small, medium, large] = COMPILED_BYTES;
        let compile = |text: &str, max| RegexBuilder::new(text).size_limit(max).build();
        // On its own first: "a)|(b" is valid only within the group.
        compile(text, large).map_err(PatternError::Invalid)?;
        let whole = format!("^(?:{text})$");
        let at_most = |max| compile(&whole, max).map(|regex| (regex, max));
        let compiled = at_most(small).or_else(|_| at_most(medium));
        let (regex, max) = compiled
            .or_else(|_| at_most(large))
            .map_err(PatternError::Invalid)?;
        Ok(Self {
            regex,
            // The scratch memory of a match is kept for the next match.
            max_size: 2 * max,
        })
    }

    /// The memory that the expression takes at most, in bytes.
    pub fn max_size(&self) -> usize {
        self.max_size
    }

    /// Whether the expression matches the whole value.
    pub fn matches(&self, value: &str) -> bool {
        self.regex.is_match(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_whole_values_only() {
        for (pattern, value, expected) in [
            ("a|b", "b", true),
            ("a|b", "ab", false),
            ("/v[0-9]+/.*", "/v12/x", true),
            ("/v[0-9]+/.*", "x/v12/x", false),
            ("a", "a\n", false),
            ("(?i)ab", "AB", true),
            ("ab", "AB", false),
            ("", "", true),
        ] {
            let pattern = Pattern::parse(pattern).unwrap();
            assert_eq!(pattern.matches(value), expected, "{pattern:?} {value:?}");
        }
    }

    #[test]
    fn rejects_invalid_and_large_expressions() {
        let long = "a".repeat(MAX_PATTERN_BYTES + 1);
        for pattern in [
            "(",
            "a)|(b",
            "a{1000}{1000}",
            "(?x)a #",
            "(?=a)",
            "\\pL",
            &long,
        ] {
            assert!(Pattern::parse(pattern).is_err(), "{pattern}");
        }
    }
}
