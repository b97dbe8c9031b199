//! The match of a request: conditions on path, fields, query and method, and an index of them by
//! path and header field. Paths, queries and values are compared as they were sent. Pure, and
//! without allocation for usual requests.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};

use diy_mesh_proto::pattern::Pattern;

use crate::http::view::RequestView;

/// Conditions on a request, all of which hold.
#[derive(Debug, Default)]
pub struct Match {
    /// The index of the rule.
    pub rule: usize,
    /// None: every path.
    pub path: Option<PathMatch>,
    /// Of header fields.
    pub headers: Vec<FieldMatch>,
    /// Of query parameters.
    pub query: Vec<FieldMatch>,
    /// None: every method.
    pub method: Option<String>,
}

/// A condition on the path.
#[derive(Debug)]
pub enum PathMatch {
    /// The whole path.
    Exact(String),
    /// The first elements, without a slash at the end.
    Prefix(String),
    /// The whole path.
    Regex(Pattern),
}

/// A condition on a header field or a query parameter.
#[derive(Debug)]
pub struct FieldMatch {
    /// The name.
    pub name: String,
    /// The value.
    pub value: ValueMatch,
}

/// A condition on a value.
#[derive(Debug)]
pub enum ValueMatch {
    /// The whole value.
    Exact(String),
    /// The whole value.
    Regex(Pattern),
}

impl PathMatch {
    /// A prefix of elements: "/a" and "/a/" are the same.
    pub fn prefix(prefix: &str) -> Self {
        Self::Prefix(prefix.strip_suffix('/').unwrap_or(prefix).to_owned())
    }
}

/// Whether an expression matches a whole value, which has to be text.
fn matches(pattern: &Pattern, value: &[u8]) -> bool {
    std::str::from_utf8(value).is_ok_and(|value| pattern.matches(value))
}

impl ValueMatch {
    fn is_match(&self, value: &[u8]) -> bool {
        match self {
            Self::Exact(exact) => exact.as_bytes() == value,
            Self::Regex(pattern) => matches(pattern, value),
        }
    }
}

impl Match {
    /// The length of the path's prefix that selected the rule.
    pub fn prefix_len(&self) -> Option<usize> {
        match &self.path {
            None => Some(0),
            Some(PathMatch::Prefix(prefix)) => Some(prefix.len()),
            Some(PathMatch::Exact(_) | PathMatch::Regex(_)) => None,
        }
    }

    /// Whether the conditions hold, given that an exact path or a prefix does.
    fn holds(&self, request: &RequestView<'_>, path: &[u8]) -> bool {
        let has_path = match &self.path {
            Some(PathMatch::Regex(pattern)) => matches(pattern, path),
            _ => true,
        };
        let has_method = |method: &String| method.as_bytes() == request.method;
        has_path
            && self.method.as_ref().is_none_or(has_method)
            && self.headers.iter().all(|field| {
                header(request, &field.name).is_some_and(|value| field.value.is_match(&value))
            })
            && self.query.iter().all(|field| {
                parameter(request, &field.name).is_some_and(|value| field.value.is_match(value))
            })
    }
}

/// The path that routes see: "/" if a URL has none.
pub fn path<'a>(request: &RequestView<'a>) -> &'a [u8] {
    match request.path() {
        b"" if !request.is_connect() => b"/",
        path => path,
    }
}

/// The value of a field. Several fields of one name count as one, joined by a comma (RFC 9110, section
/// 5.3), or a semicolon for Cookie (RFC 9113, section 8.2.3).
fn header<'a>(request: &RequestView<'a>, name: &str) -> Option<Cow<'a, [u8]>> {
    if name.eq_ignore_ascii_case("host") {
        return request.authority().map(Cow::Borrowed);
    }
    let separator: &[u8] = match name.eq_ignore_ascii_case("cookie") {
        true => b"; ",
        false => b",",
    };
    let mut joined: Option<Cow<'a, [u8]>> = None;
    request.head.visit(&mut |field, value| {
        if field.eq_ignore_ascii_case(name.as_bytes()) {
            joined = Some(match joined.take() {
                None => Cow::Borrowed(value),
                Some(before) => Cow::Owned([&before, separator, value].concat()),
            });
        }
    });
    joined
}

/// The first query parameter with this name.
fn parameter<'a>(request: &RequestView<'a>, name: &str) -> Option<&'a [u8]> {
    let parameters = request.query()?.split(|byte| *byte == b'&');
    let mut parameters = parameters.map(|pair| match memchr::memchr(b'=', pair) {
        Some(at) => (&pair[..at], &pair[at + 1..]),
        None => (pair, &b""[..]),
    });
    let (_, value) = parameters.find(|(key, _)| *key == name.as_bytes())?;
    Some(value)
}

/// The requests that one of several matches selects. Without matches, these are all.
#[derive(Debug, Default)]
pub struct Matches {
    matches: Vec<Match>,
    index: Index,
}

impl Matches {
    /// Indexes matches.
    pub fn new(matches: Vec<Match>) -> Self {
        let index = Index::new(&matches);
        Self { matches, index }
    }

    /// Whether they select a request.
    pub fn holds(&self, request: &RequestView<'_>) -> bool {
        self.matches.is_empty() || self.index.select(&self.matches, request).is_some()
    }
}

/// Matches by path and header field, so that the cost of a selection does not grow with their
/// number.
#[derive(Debug, Default)]
pub struct Index {
    exact: HashMap<Box<[u8]>, Positions>,
    prefixes: HashMap<Box<[u8]>, Positions>,
    /// The lengths of the prefixes.
    lengths: BTreeSet<usize>,
    /// Matches with a regular expression for the path.
    others: Positions,
}

/// Positions of matches that do not differ in their path. Each list is in order.
#[derive(Debug, Default)]
struct Positions {
    /// Matches with an exact header value, by the name and the value of the first such field.
    by_header: HashMap<String, HashMap<Box<[u8]>, Vec<usize>>>,
    others: Vec<usize>,
}

impl Positions {
    fn add(&mut self, at: usize, one: &Match) {
        let exact = one.headers.iter().find_map(|field| match &field.value {
            ValueMatch::Exact(value) => Some((field.name.to_ascii_lowercase(), value)),
            ValueMatch::Regex(_) => None,
        });
        let list = match exact {
            Some((name, value)) => self
                .by_header
                .entry(name)
                .or_default()
                .entry(value.as_bytes().into())
                .or_default(),
            None => &mut self.others,
        };
        list.push(at);
    }

    /// Calls `consider` with the lists that contain a match of the request, if there is one.
    fn visit(&self, request: &RequestView<'_>, consider: &mut impl FnMut(&[usize])) {
        consider(&self.others);
        for (name, values) in &self.by_header {
            if let Some(list) = header(request, name).and_then(|value| values.get(&*value)) {
                consider(list);
            }
        }
    }
}

impl Index {
    /// Indexes matches.
    pub fn new(matches: &[Match]) -> Self {
        let mut index = Self::default();
        for (at, one) in matches.iter().enumerate() {
            let positions = match &one.path {
                Some(PathMatch::Exact(path)) => {
                    index.exact.entry(path.as_bytes().into()).or_default()
                }
                Some(PathMatch::Regex(_)) => &mut index.others,
                None | Some(PathMatch::Prefix(_)) => {
                    let prefix = match &one.path {
                        Some(PathMatch::Prefix(prefix)) => prefix.as_bytes(),
                        _ => b"",
                    };
                    index.lengths.insert(prefix.len());
                    index.prefixes.entry(prefix.into()).or_default()
                }
            };
            positions.add(at, one);
        }
        index
    }

    /// The first match of a request.
    pub fn select(&self, matches: &[Match], request: &RequestView<'_>) -> Option<usize> {
        let path = path(request);
        let mut first = None;
        let mut consider = |list: &[usize]| {
            let earlier = list
                .iter()
                .copied()
                .take_while(|at| first.is_none_or(|first| *at < first));
            for at in earlier {
                if matches[at].holds(request, path) {
                    first = Some(at);
                    break;
                }
            }
        };
        if let Some(positions) = self.exact.get(path) {
            positions.visit(request, &mut consider);
        }
        for length in self.lengths.range(..=path.len()) {
            let is_element = *length == 0 || path.get(*length).is_none_or(|byte| *byte == b'/');
            let positions = self.prefixes.get(&path[..*length]);
            if let Some(positions) = positions.filter(|_| is_element) {
                positions.visit(request, &mut consider);
            }
        }
        self.others.visit(request, &mut consider);
        first
    }
}
