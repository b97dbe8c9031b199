//! The match of a request: conditions on path, fields, query and method, and an index of them by
//! path and header field. Paths, queries and values are compared as they were sent. Pure. The time
//! for one request is bounded: expressions judge at most [`MAX_JUDGED`] bytes of it.

#[cfg(test)]
mod tests;

use crate::error::{MAX_JUDGED, RequestPart};
use std::borrow::Cow;
use std::cell::{Cell, OnceCell};
use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use diy_mesh_proto::field::is_same_name;
use diy_mesh_proto::pattern::Pattern;
pub use diy_mesh_proto::route::{FieldMatch, Match, PathMatch, ValueMatch};

use crate::http::view::RequestView;

/// A request in the form in which its conditions are compared, for all stages that match it.
pub struct MatchInput<'a> {
    /// The request.
    pub request: RequestView<'a>,
    path: &'a [u8],
    fields: OnceCell<ByName<'a, Cow<'a, [u8]>>>,
    parameters: OnceCell<ByName<'a, &'a [u8]>>,
    judged: Cell<usize>,
}

/// Values in the order of their names.
type ByName<'a, V> = Vec<(&'a [u8], V)>;

impl<'a> MatchInput<'a> {
    /// A request of which no expression has judged anything.
    pub fn new(request: RequestView<'a>) -> Self {
        Self {
            path: path(&request),
            request,
            fields: OnceCell::new(),
            parameters: OnceCell::new(),
            judged: Cell::new(0),
        }
    }

    /// Reads the path as a server may. The bytes that expressions have judged so far count.
    pub fn set_path(&mut self, path: &'a [u8]) {
        self.path = path;
    }

    /// Reads the method as a server may. The bytes that expressions have judged so far count.
    pub fn set_method(&mut self, method: &'a [u8]) {
        self.request.method = method;
    }

    /// The bytes that expressions have judged.
    #[cfg(test)]
    pub fn judged(&self) -> usize {
        self.judged.get()
    }

    /// Whether the conditions of a match hold, given that an exact path or a prefix does. Expressions
    /// judge only requests for which all other conditions hold.
    fn satisfies(&self, one: &Match) -> Result<bool, RequestPart> {
        let has_method = |method: &String| method.as_bytes() == self.request.method;
        let may_hold = one.method.as_ref().is_none_or(has_method)
            && (one.headers.iter()).all(|field| may_match(field, self.header(&field.name)))
            && (one.query.iter()).all(|field| may_match(field, self.parameter(&field.name)));
        if !may_hold {
            return Ok(false);
        }
        let path = match &one.path {
            Some(PathMatch::Regex(pattern)) => Some((pattern, self.path, RequestPart::Target)),
            _ => None,
        };
        let headers = (one.headers.iter())
            .filter_map(|field| Some((pattern(field)?, self.header(&field.name)?)))
            .map(|(pattern, value)| (pattern, value, RequestPart::Fields));
        let query = (one.query.iter())
            .filter_map(|field| Some((pattern(field)?, self.parameter(&field.name)?)))
            .map(|(pattern, value)| (pattern, value, RequestPart::Target));
        for (pattern, value, part) in path.into_iter().chain(headers).chain(query) {
            if !self.judge(pattern, value, part)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether an expression matches a whole value, which has to be text. Fails if the expressions
    /// would judge more than [`MAX_JUDGED`] bytes.
    fn judge(
        &self,
        pattern: &Pattern,
        value: &[u8],
        part: RequestPart,
    ) -> Result<bool, RequestPart> {
        let judged = self.judged.get() + value.len();
        if judged > MAX_JUDGED {
            return Err(part);
        }
        self.judged.set(judged);
        Ok(std::str::from_utf8(value).is_ok_and(|value| pattern.matches(value)))
    }

    /// The value of a field. Several fields of one name count as one, joined by a comma (RFC 9110,
    /// section 5.3), or a semicolon for Cookie (RFC 9113, section 8.2.3).
    fn header(&self, name: &str) -> Option<&[u8]> {
        if name.eq_ignore_ascii_case("host") {
            return self.request.authority();
        }
        let fields = self.fields.get_or_init(|| joined_fields(&self.request));
        let found = fields.binary_search_by(|(field, _)| compare_names(field, name.as_bytes()));
        found.ok().map(|at| &*fields[at].1)
    }

    /// The first query parameter with this name.
    fn parameter(&self, name: &str) -> Option<&'a [u8]> {
        let parameters = self.parameters.get_or_init(|| parameters(&self.request));
        let found = parameters.binary_search_by_key(&name.as_bytes(), |(name, _)| name);
        found.ok().map(|at| parameters[at].1)
    }
}

/// Whether a value may match: not without a value, nor with another one than the exact one.
fn may_match(field: &FieldMatch, value: Option<&[u8]>) -> bool {
    value.is_some_and(|value| match &field.value {
        ValueMatch::Exact(exact) => exact.as_bytes() == value,
        ValueMatch::Regex(_) => true,
    })
}

fn pattern(field: &FieldMatch) -> Option<&Pattern> {
    match &field.value {
        ValueMatch::Exact(_) => None,
        ValueMatch::Regex(pattern) => Some(pattern),
    }
}

/// The path that routes see: "/" if a URL has none.
pub fn path<'a>(request: &RequestView<'a>) -> &'a [u8] {
    match request.path() {
        b"" if !request.is_connect() => b"/",
        path => path,
    }
}

/// The fields in the order of their names, each name once.
fn joined_fields<'a>(request: &RequestView<'a>) -> ByName<'a, Cow<'a, [u8]>> {
    let mut fields = Vec::new();
    request
        .head
        .visit(&mut |name, value| fields.push((name, value)));
    // Stable: values of one name stay in order.
    fields.sort_by(|(one, _), (other, _)| compare_names(one, other));
    let runs = fields.chunk_by(|(one, _), (other, _)| one.eq_ignore_ascii_case(other));
    let join = |run: &[(&'a [u8], &'a [u8])]| match run {
        [(name, value)] => (*name, Cow::Borrowed(*value)),
        _ => {
            let name = run[0].0;
            let separator: &[u8] = if name.eq_ignore_ascii_case(b"cookie") {
                b"; "
            } else {
                b","
            };
            let values: Vec<_> = run.iter().map(|(_, value)| *value).collect();
            (name, Cow::Owned(values.join(separator)))
        }
    };
    runs.map(join).collect()
}

/// An order of names without case. Most names differ in their length.
fn compare_names(one: &[u8], other: &[u8]) -> Ordering {
    let by_length = one.len().cmp(&other.len());
    by_length.then_with(|| {
        let one = one.iter().map(u8::to_ascii_lowercase);
        one.cmp(other.iter().map(u8::to_ascii_lowercase))
    })
}

/// The query parameters in the order of their names, the first one of each name.
fn parameters<'a>(request: &RequestView<'a>) -> ByName<'a, &'a [u8]> {
    let Some(query) = request.query() else {
        return Vec::new();
    };
    let pairs = query.split(|byte| *byte == b'&');
    let pairs = pairs.map(|pair| match memchr::memchr(b'=', pair) {
        Some(at) => (&pair[..at], &pair[at + 1..]),
        None => (pair, &b""[..]),
    });
    let mut parameters: Vec<_> = pairs.collect();
    parameters.sort_by_key(|(name, _)| *name);
    parameters.dedup_by_key(|(name, _)| *name);
    parameters
}

/// The requests that one of several matches selects. Without matches, these are all.
#[derive(Debug, Default)]
pub struct Matches {
    pub(super) matches: Vec<Match>,
    pub(super) index: Index,
}

impl Matches {
    /// Indexes matches.
    pub fn new(matches: Vec<Match>) -> Self {
        let index = Index::new(&matches);
        Self { matches, index }
    }

    /// Whether a match is about a field with one of these names.
    pub fn reads_field(&self, names: &[Arc<str>]) -> bool {
        let mut fields = self.matches.iter().flat_map(|one| &one.headers);
        fields.any(|field| {
            let is_name = |name: &Arc<str>| is_same_name(name.as_bytes(), field.name.as_bytes());
            names.iter().any(is_name)
        })
    }

    /// The first match of a request. Fails if a part of it is too large for the expressions.
    pub fn first(&self, input: &MatchInput<'_>) -> Result<Option<&Match>, RequestPart> {
        let selected = self.index.select(&self.matches, input)?;
        Ok(selected.map(|at| &self.matches[at]))
    }

    /// Whether they select a request. Fails if a part of it is too large for their expressions.
    pub fn holds(&self, input: &MatchInput<'_>) -> Result<bool, RequestPart> {
        Ok(self.matches.is_empty() || self.select(input)?.is_some())
    }

    /// The rule of the first match. Fails as [`holds`](Self::holds).
    pub fn select(&self, input: &MatchInput<'_>) -> Result<Option<usize>, RequestPart> {
        Ok(self.first(input)?.map(|one| one.rule))
    }
}

/// Matches by path and header field, so that the cost of a selection does not grow with their
/// number.
#[derive(Debug, Default)]
pub struct Index {
    pub(super) exact: HashMap<Box<[u8]>, Positions>,
    pub(super) prefixes: HashMap<Box<[u8]>, Positions>,
    /// The lengths of the prefixes.
    pub(super) lengths: BTreeSet<usize>,
    /// Matches with a regular expression for the path.
    pub(super) others: Positions,
}

/// Positions of matches that do not differ in their path. Each list is in order.
#[derive(Debug, Default)]
pub(super) struct Positions {
    /// Matches with an exact header value, by the name and the value of the first such field.
    pub(super) by_header: HashMap<String, HashMap<Box<[u8]>, Vec<usize>>>,
    pub(super) others: Vec<usize>,
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
    fn visit(
        &self,
        input: &MatchInput<'_>,
        consider: &mut impl FnMut(&[usize]) -> Result<(), RequestPart>,
    ) -> Result<(), RequestPart> {
        for (name, values) in &self.by_header {
            if let Some(list) = input.header(name).and_then(|value| values.get(value)) {
                consider(list)?;
            }
        }
        consider(&self.others)
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

    /// The first match of a request. Fails if a part of it is too large for the expressions.
    pub fn select(
        &self,
        matches: &[Match],
        input: &MatchInput<'_>,
    ) -> Result<Option<usize>, RequestPart> {
        let path = input.path;
        let mut first = None;
        let mut consider = |list: &[usize]| {
            let earlier = list
                .iter()
                .copied()
                .take_while(|at| first.is_none_or(|first| *at < first));
            for at in earlier {
                if input.satisfies(&matches[at])? {
                    first = Some(at);
                    break;
                }
            }
            Ok(())
        };
        if let Some(positions) = self.exact.get(path) {
            positions.visit(input, &mut consider)?;
        }
        for length in self.lengths.range(..=path.len()) {
            let is_element = *length == 0 || path.get(*length).is_none_or(|byte| *byte == b'/');
            if let Some(positions) =
                (is_element.then(|| &path[..*length])).and_then(|prefix| self.prefixes.get(prefix))
            {
                positions.visit(input, &mut consider)?;
            }
        }
        self.others.visit(input, &mut consider)?;
        Ok(first)
    }
}
