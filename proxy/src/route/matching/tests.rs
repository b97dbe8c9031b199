//! Tests of the time that matching takes, counted in bytes.

use crate::error::{MAX_JUDGED, RequestPart};
use std::iter::repeat_n;

use super::*;
use crate::http::view::testing::request;
use crate::http::view::{Fields, Head};

fn pattern(text: &str) -> ValueMatch {
    ValueMatch::Regex(Pattern::parse(text).unwrap())
}

fn condition(name: &str, value: ValueMatch) -> Vec<FieldMatch> {
    let name = name.to_owned();
    vec![FieldMatch { name, value }]
}

/// A head of an HTTP/2 request, which counts its searches.
#[derive(Default)]
struct CountedHead {
    fields: Vec<(&'static str, String)>,
    searches: Cell<usize>,
}

impl Fields for CountedHead {
    fn visit<'a>(&'a self, each: &mut dyn FnMut(&'a [u8], &'a [u8])) {
        self.searches.set(self.searches.get() + 1);
        for (name, value) in &self.fields {
            each(name.as_bytes(), value.as_bytes());
        }
    }
}

impl Head for CountedHead {
    fn authority(&self) -> Option<&[u8]> {
        None
    }
}

fn with_head<'a>(target: &'a str, head: &'a CountedHead) -> MatchInput<'a> {
    MatchInput::new(RequestView {
        head,
        ..request("GET", target)
    })
}

/// Limits, each of which matches by one expression that applies to no request.
fn limits(expressions: usize, part: RequestPart) -> Vec<Matches> {
    let one = || match part {
        RequestPart::Target => Match {
            path: Some(PathMatch::Regex(Pattern::parse("no").unwrap())),
            ..Match::default()
        },
        RequestPart::Fields => Match {
            headers: condition("x-large", pattern("no")),
            ..Match::default()
        },
    };
    (0..16)
        .map(|_| Matches::new((0..expressions).map(|_| one()).collect()))
        .collect()
}

#[test]
fn expressions_judge_at_most_one_mebibyte_of_any_request() {
    let mut rng = fastrand::Rng::with_seed(3);
    let sizes = [1, 512, 4096, 65_535, 65_536];
    for size in sizes
        .into_iter()
        .chain(repeat_n((), 10).map(|()| rng.usize(..65_536)))
    {
        for expressions in [1, 2, 7, 60] {
            let large = "a".repeat(size);
            let target = format!("/{}", &large[1.min(size)..]);
            let head = CountedHead {
                fields: vec![("x-large", large)],
                ..CountedHead::default()
            };
            for part in [RequestPart::Target, RequestPart::Fields] {
                let input = match part {
                    RequestPart::Target => with_head(&target, &head),
                    RequestPart::Fields => with_head("/", &head),
                };
                let limits = limits(expressions, part);
                let judged: Result<Vec<bool>, _> =
                    limits.iter().map(|limit| limit.holds(&input)).collect();
                assert!(input.judged.get() <= MAX_JUDGED);
                let size = size.max(usize::from(part == RequestPart::Target));
                if size * expressions * limits.len() <= MAX_JUDGED {
                    assert_eq!(judged, Ok(vec![false; limits.len()]))
                } else {
                    assert_eq!(judged, Err(part), "{size} {expressions}")
                }
            }
        }
    }
}

#[test]
fn hundred_expressions_on_512_bytes_are_never_refused() {
    let value = "a".repeat(512);
    let target = format!("/{0}?x-large={0}", &value[1..]);
    let head = CountedHead {
        fields: vec![("x-large", value)],
        ..CountedHead::default()
    };
    let matches = (0..100).map(|_| Match {
        path: Some(PathMatch::Regex(Pattern::parse("/a*").unwrap())),
        query: condition("x-large", pattern("a*")),
        headers: condition("x-large", pattern("b*")),
        ..Match::default()
    });
    let matches = Matches::new(matches.collect());
    assert_eq!(matches.holds(&with_head(&target, &head)), Ok(false));
}

#[test]
fn fields_are_read_and_joined_once_for_all_conditions() {
    let head = CountedHead {
        fields: (0..1900).map(|at| ("x-many", at.to_string())).collect(),
        ..CountedHead::default()
    };
    let input = with_head("/", &head);
    let names = ["X-Many", "x-other", "x-many", "cookie"];
    let matches = names.iter().cycle().take(100).map(|name| Match {
        headers: condition(name, ValueMatch::Exact("none".to_owned())),
        ..Match::default()
    });
    assert_eq!(Matches::new(matches.collect()).holds(&input), Ok(false));
    assert_eq!(head.searches.get(), 1);
    let joined = (0..1900).map(|at| at.to_string()).collect::<Vec<_>>();
    assert_eq!(input.header("x-mANY"), Some(joined.join(",").as_bytes()));
}

#[test]
fn expressions_judge_only_requests_for_which_the_other_conditions_hold() {
    let head = CountedHead {
        fields: vec![("x-large", "a".repeat(1000)), ("x-other", "1".to_owned())],
        ..CountedHead::default()
    };
    let exact = |value: &str| ValueMatch::Exact(value.to_owned());
    let base = || Match {
        path: Some(PathMatch::Regex(Pattern::parse("/.*").unwrap())),
        headers: condition("x-large", pattern("a*")),
        ..Match::default()
    };
    let with_header = |name, value| {
        let mut headers = base().headers;
        headers.extend(condition(name, value));
        Match { headers, ..base() }
    };
    for (one, judged) in [
        (base(), 1002),
        (with_header("x-other", exact("1")), 1002),
        (with_header("x-other", exact("2")), 0),
        (with_header("x-none", pattern(".*")), 0),
        (
            Match {
                method: Some("PUT".to_owned()),
                ..base()
            },
            0,
        ),
        (
            Match {
                query: condition("q", exact("2")),
                ..base()
            },
            0,
        ),
    ] {
        let input = with_head("/a?q=1", &head);
        let held = Matches::new(vec![one]).holds(&input);
        assert_eq!((held, input.judged.get()), (Ok(judged > 0), judged));
    }
}
