//! Regular expressions of routes. The controller rejects a route with an invalid one, and the proxy
//! applies the others: both compile them here.

use regex_lite::{Regex, RegexBuilder};

/// The length of an expression.
pub const MAX_PATTERN_BYTES: usize = 1024;
/// The size of a compiled expression, which bounds the time of a match per byte.
const MAX_COMPILED_BYTES: usize = 32 * 1024;

/// A regular expression for a whole value, in RE2 syntax without Unicode classes. Case-sensitive.
/// Matching takes linear time.
#[derive(Clone, Debug)]
pub struct Pattern(Regex);

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
        let compile = |text: &str| {
            let mut builder = RegexBuilder::new(text);
            let built = builder.size_limit(MAX_COMPILED_BYTES).build();
            built.map_err(PatternError::Invalid)
        };
        // On its own first: "a)|(b" is valid only within the group.
        compile(text)?;
        Ok(Pattern(compile(&format!("^(?:{text})$"))?))
    }

    /// Whether the expression matches the whole value.
    pub fn matches(&self, value: &str) -> bool {
        self.0.is_match(value)
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
