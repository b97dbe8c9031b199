//! Faults for tests of clients: delays and aborts of a share of the requests. Pure: `filters.rs`
//! waits and fails.

use crate::error::RequestPart;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;

use super::matching::{MatchInput, Matches};

/// A fault of the requests that it matches.
#[derive(Debug)]
pub struct Fault {
    /// The object that it comes from.
    pub name: Arc<str>,
    /// The requests.
    pub matches: Matches,
    /// A delay.
    pub delay: Option<(Duration, Share)>,
    /// A response in place of a backend's response, after the delay.
    pub abort: Option<(StatusCode, Share)>,
}

/// A share of the requests, drawn at random.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The numerator of the share.
    pub numerator: u32,
    /// The denominator of the share.
    pub denominator: NonZeroU32,
}

impl Share {
    fn is_drawn(self, rng: &mut fastrand::Rng) -> bool {
        rng.u32(..self.denominator.get()) < self.numerator
    }
}

/// The effect of a fault on one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Injection {
    /// The object that it comes from.
    pub name: Arc<str>,
    /// Delays the request.
    pub delay: Option<Duration>,
    /// The status of the response, after the delay.
    pub abort: Option<StatusCode>,
}

/// The kind of a fault: a label of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// A delay.
    Delay,
    /// An abort.
    Abort,
}

impl FaultKind {
    /// The value of the label.
    pub fn name(self) -> &'static str {
        match self {
            Self::Delay => "delay",
            Self::Abort => "abort",
        }
    }
}

/// The injections into a request, in order: only the last one can abort it. Fails if a part of the
/// request is too large to match.
pub fn draw(
    faults: &[Fault],
    request: &MatchInput<'_>,
    rng: &mut fastrand::Rng,
) -> Result<Vec<Injection>, RequestPart> {
    let mut drawn = Vec::new();
    for fault in faults {
        if !fault.matches.holds(request)? {
            continue;
        }
        let delay = fault.delay.filter(|(_, share)| share.is_drawn(rng));
        let abort = fault.abort.filter(|(_, share)| share.is_drawn(rng));
        if delay.is_some() || abort.is_some() {
            drawn.push(Injection {
                name: fault.name.clone(),
                delay: delay.map(|(delay, _)| delay),
                abort: abort.map(|(status, _)| status),
            });
        }
        if abort.is_some() {
            break;
        }
    }
    Ok(drawn)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::view::testing::request;
    use crate::route::matching::{Match, PathMatch};

    fn get(target: &str) -> MatchInput<'_> {
        MatchInput::new(request("GET", target))
    }

    fn share(numerator: u32, denominator: u32) -> Share {
        Share {
            numerator,
            denominator: NonZeroU32::new(denominator).unwrap(),
        }
    }

    fn fault(path: Option<&str>, delayed: Share, aborted: Share) -> Fault {
        let matches = path.map(|path| Match {
            path: Some(PathMatch::prefix(path)),
            ..Match::default()
        });
        Fault {
            name: path.unwrap_or("every path").into(),
            matches: Matches::new(matches.into_iter().collect()),
            delay: Some((Duration::from_secs(1), delayed)),
            abort: Some((StatusCode::SERVICE_UNAVAILABLE, aborted)),
        }
    }

    #[test]
    fn shares_are_drawn_independently_and_the_first_abort_is_the_last_fault() {
        let (never, always) = (share(0, 1), share(1, 1));
        let mut rng = fastrand::Rng::with_seed(1);
        let faults = [
            fault(Some("/other"), always, always),
            fault(Some("/a"), share(1, 4), share(10, 100)),
            fault(None, always, never),
            fault(Some("/"), never, always),
            fault(None, always, always),
        ];
        let (mut delays, mut aborts, mut both) = (0, 0, 0);
        for _ in 0..10_000 {
            let drawn = draw(&faults, &get("/a/b"), &mut rng).unwrap();
            let (last, others) = drawn.split_last().unwrap();
            assert!(last.abort.is_some() && others.iter().all(|one| one.abort.is_none()));
            let first = drawn.first().filter(|first| *first.name == *"/a");
            let is_delayed = first.is_some_and(|first| first.delay.is_some());
            let is_aborted = first.is_some_and(|first| first.abort.is_some());
            delays += u32::from(is_delayed);
            aborts += u32::from(is_aborted);
            both += u32::from(is_delayed && is_aborted);
            if !is_aborted {
                let names: Vec<_> = drawn.iter().rev().map(|one| &*one.name).collect();
                assert_eq!(names[..2], ["/", "every path"]);
            }
        }
        // Six standard deviations: 43, 30 and 16.
        assert!(delays.abs_diff(2500) < 260, "{delays} of 10000 delayed");
        assert!(aborts.abs_diff(1000) < 180, "{aborts} of 10000 aborted");
        assert!(both.abs_diff(250) < 96, "{both} of 10000 both");
        assert!(draw(&faults[..2], &get("/b"), &mut rng).unwrap().is_empty());
        assert!(draw(&[], &get("/"), &mut rng).unwrap().is_empty());
    }
}
