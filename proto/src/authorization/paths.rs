//! Patterns of paths.

use super::readings::{self, ANY_ELEMENT, MAX_ELEMENTS, Reading, Readings, element_set};
use super::truth::{Tally, Truth};
use crate::mesh::v1 as proto;
use crate::mesh::v1::authorized_path::Kind;
use crate::policy::{Violation, violation};

/// The length of a value in a rule.
pub(super) const MAX_VALUE_BYTES: usize = 1024;

/// A pattern of paths.
#[derive(Debug)]
pub(super) enum PathPattern {
    Exact(Box<[u8]>),
    /// Without slashes at the end.
    Prefix(Box<[u8]>),
    Suffix(Box<[u8]>),
    Template {
        /// The elements of the template. `None` matches any element that is not empty.
        elements: Vec<Option<Box<[u8]>>>,
        /// Any further elements may follow.
        has_rest: bool,
    },
}

/// Patterns, of which a reading of the path matches one. An unknown pattern is `None`.
#[derive(Debug)]
pub(super) struct Paths {
    /// Each with an element that all matches have.
    patterns: Vec<(u64, Option<PathPattern>)>,
    /// Those with encoded characters, decoded.
    decoded: Vec<(u64, PathPattern)>,
}

impl Paths {
    pub(super) fn compile(messages: &[proto::AuthorizedPath]) -> Paths {
        let patterns = messages.iter().map(|message| {
            let pattern = PathPattern::parse(message).ok();
            let element = pattern.as_ref().map_or(ANY_ELEMENT, PathPattern::element);
            (element, pattern)
        });
        let patterns: Vec<_> = patterns.collect();
        let known = patterns.iter().filter_map(|(_, pattern)| pattern.as_ref());
        let decoded = known.filter_map(PathPattern::decoded);
        Paths {
            decoded: decoded.map(|one| (one.element(), one)).collect(),
            patterns,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// A set of which each match has an element.
    pub(super) fn elements(&self) -> u64 {
        let decoded = self.decoded.iter().map(|(element, _)| element);
        let elements = self.patterns.iter().map(|(element, _)| element);
        let all = elements
            .chain(decoded)
            .fold(0, |all, element| all | element);
        if self.is_empty() { ANY_ELEMENT } else { all }
    }

    /// Whether each reading matches. It is unknown rather than false if a server that ignores ASCII
    /// case, or slashes at the end, or that decodes the pattern, may read a path that matches.
    pub(super) fn truth(&self, readings: &Readings<'_>) -> Truth {
        let Some(known) = readings.known() else {
            return Truth::Unknown;
        };
        let matches = |reading: &Reading<'_>, is_exact: bool| {
            let mut patterns = self.patterns.iter();
            patterns.any(|(element, pattern)| {
                readings.may_have(*element)
                    && pattern
                        .as_ref()
                        .is_some_and(|pattern| pattern.matches(reading, is_exact))
            })
        };
        let matches_decoded = |reading: &Reading<'_>| {
            let mut decoded = self.decoded.iter();
            decoded.any(|(element, pattern)| {
                readings.may_have(*element) && pattern.matches(reading, false)
            })
        };
        let mut tally = Tally::default();
        for reading in known.clone() {
            tally.add(matches(reading, true));
        }
        if !tally.matched {
            let is_unknown = self.patterns.iter().any(|(_, pattern)| pattern.is_none());
            let may_match =
                |reading: &Reading<'_>| matches(reading, false) || matches_decoded(reading);
            tally.matched = is_unknown || known.into_iter().any(may_match);
        }
        tally.truth()
    }
}

impl PathPattern {
    pub(super) fn parse(message: &proto::AuthorizedPath) -> Result<PathPattern, Violation> {
        let bytes = |text: &str| text.as_bytes().into();
        match &message.kind {
            Some(Kind::Exact(text)) => {
                check_path("value", text)?;
                Ok(PathPattern::Exact(bytes(text)))
            }
            Some(Kind::Prefix(text)) => {
                check_path("value", text)?;
                Ok(PathPattern::Prefix(bytes(text.trim_end_matches('/'))))
            }
            Some(Kind::Suffix(text)) => {
                check_characters("value", text)?;
                Ok(PathPattern::Suffix(bytes(text)))
            }
            Some(Kind::Template(text)) => parse_template(text),
            None => {
                let expected = "one of exact, prefix, suffix and template";
                Err(violation("type", "", expected))
            }
        }
    }

    /// The pattern of servers that decode it, or `None` if it is the same.
    fn decoded(&self) -> Option<PathPattern> {
        let decode = |text: &[u8]| readings::decoded_pattern(text).map(Box::from);
        match self {
            PathPattern::Exact(text) => decode(text).map(PathPattern::Exact),
            PathPattern::Prefix(text) => decode(text).map(PathPattern::Prefix),
            PathPattern::Suffix(text) => decode(text).map(PathPattern::Suffix),
            PathPattern::Template { elements, has_rest } => {
                let decoded = elements.iter().map(|element| {
                    let element = element.as_ref()?;
                    Some(decode(element).unwrap_or_else(|| element.clone()))
                });
                let decoded: Vec<_> = decoded.collect();
                (decoded != *elements).then_some(PathPattern::Template {
                    elements: decoded,
                    has_rest: *has_rest,
                })
            }
        }
    }

    /// An element that all matches have, as a set.
    pub(super) fn element(&self) -> u64 {
        let last = match self {
            PathPattern::Exact(path) | PathPattern::Prefix(path) => {
                let elements = path.split(|byte| *byte == b'/').skip(1).enumerate();
                elements.filter(|(_, element)| !element.is_empty()).last()
            }
            PathPattern::Suffix(_) => None,
            PathPattern::Template { elements, .. } => {
                let elements = elements.iter().map(Option::as_deref).enumerate();
                elements
                    .filter_map(|(at, element)| Some((at, element?)))
                    .next_back()
            }
        };
        let last = last.filter(|(position, _)| *position < MAX_ELEMENTS);
        last.map_or(ANY_ELEMENT, |(position, element)| {
            element_set(position, element)
        })
    }

    /// Whether the pattern matches a reading: exactly, or without ASCII case and without slashes at
    /// the end.
    pub(super) fn matches(&self, reading: &Reading<'_>, is_exact: bool) -> bool {
        let path = &*reading.path;
        let is_same = |one: &[u8], other: &[u8]| {
            if is_exact {
                one == other
            } else {
                one.eq_ignore_ascii_case(other)
            }
        };
        let ends_with = |path: &[u8], suffix: &[u8]| {
            let start = path.len().checked_sub(suffix.len());
            start.is_some_and(|start| is_same(&path[start..], suffix))
        };
        match self {
            PathPattern::Exact(exact) if is_exact => path == &**exact,
            PathPattern::Exact(exact) => is_same(trimmed(path), trimmed(exact)),
            PathPattern::Prefix(prefix) => {
                path.split_at_checked(prefix.len())
                    .is_some_and(|(start, rest)| {
                        matches!(rest, [] | [b'/', ..]) && is_same(start, prefix)
                    })
            }
            PathPattern::Suffix(suffix) => {
                ends_with(path, suffix) || !is_exact && ends_with(trimmed(path), suffix)
            }
            PathPattern::Template { elements, has_rest } => {
                let count = reading.count(!is_exact);
                let is_length = if *has_rest {
                    count >= elements.len()
                } else {
                    count == elements.len()
                };
                is_length
                    && elements.iter().enumerate().all(|(position, expected)| {
                        let element = reading.element(position);
                        expected
                            .as_ref()
                            .map_or(!element.is_empty(), |expected| is_same(element, expected))
                    })
            }
        }
    }
}

fn trimmed(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|byte| *byte != b'/');
    &path[..end.map_or(0, |end| end + 1)]
}

fn parse_template(text: &str) -> Result<PathPattern, Violation> {
    let field = "value";
    check_length(field, text)?;
    let path = text.strip_suffix("/{**}");
    let mut elements = vec![];
    for element in path.unwrap_or(text).split('/').skip(1) {
        let literal = Some(element).filter(|element| *element != "{*}");
        if let Some(literal) = literal {
            check_path(field, &format!("/{literal}"))?;
        }
        elements.push(literal.map(|literal| literal.as_bytes().into()));
    }
    let is_empty = |element: &Option<Box<[u8]>>| element.as_deref() == Some(b"");
    if !text.starts_with('/') || elements.len() > MAX_ELEMENTS || elements.iter().any(is_empty) {
        let expected = "a path of at most 32 elements that are not empty: {*} is any one, \
            {**} at the end any number of them";
        return Err(violation(field, text, expected));
    }
    Ok(PathPattern::Template {
        elements,
        has_rest: path.is_some(),
    })
}

/// Checks a path in a pattern: one that begins with a slash, without dot segments.
fn check_path(field: &'static str, path: &str) -> Result<(), Violation> {
    let has_dots = path.split('/').any(|element| matches!(element, "." | ".."));
    if !path.starts_with('/') || has_dots {
        let expected = "a path that begins with / and has neither . nor .. as an element";
        return Err(violation(field, path, expected));
    }
    check_characters(field, path)
}

/// Checks that a reading can have these characters.
fn check_characters(field: &'static str, text: &str) -> Result<(), Violation> {
    let is_invalid = |character: char| character.is_ascii_control() || "?#\\{}".contains(character);
    if text.is_empty() || text.contains(is_invalid) || !readings::is_encoded(text.as_bytes()) {
        let expected =
            "a part of a path without query, fragment, backslashes, braces and control characters";
        return Err(violation(field, text, expected));
    }
    check_length(field, text)
}

/// Checks the length of a value.
pub(super) fn check_length(field: &'static str, value: &str) -> Result<(), Violation> {
    if (1..=MAX_VALUE_BYTES).contains(&value.len()) {
        Ok(())
    } else {
        Err(violation(field, value, "of 1 to 1024 bytes"))
    }
}
