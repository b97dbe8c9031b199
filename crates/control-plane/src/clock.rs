//! The trusted time of the control plane: the median of the own clock, the clock of the API server
//! and the clocks of the other replicas. A replica with a wrong clock notices it, and an API server
//! with a wrong clock misleads no replica. [`judge`] is pure, [`Clock`] stores the other clocks.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use http::{Request, header};
use kube::Client;
use kube::client::Body;
use tokio::time::{Instant, timeout};

/// Clocks that differ by at most this time agree. Certificates are backdated by the same time.
pub const TOLERANCE: Duration = Duration::from_secs(5 * 60);
/// The maximum age of a reading.
const MAX_AGE: Duration = Duration::from_secs(60);
/// Time for a request of the API server's time.
const DATE_TIMEOUT: Duration = Duration::from_secs(5);

/// The result of a comparison of clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The time for all but CAs: the trusted time. Without a majority, the own time.
    pub now: SystemTime,
    /// The time for CAs: the trusted time. Without a majority, the time of the API server, or else
    /// the earlier time.
    pub ca_time: SystemTime,
    /// The relation between the clocks.
    pub finding: Finding,
}

/// The relation between the clocks. Differences are in seconds, positive for a clock that is ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Finding {
    /// The own clock and the clock of the API server agree with the trusted time.
    #[default]
    Agreement,
    /// The clock of the API server differs from the trusted time.
    ServerDiffers(i64),
    /// No majority: the clocks of one half differ from the clocks of the other half.
    Disputed(i64),
    /// The own clock differs from the trusted time.
    OwnDiffers(i64),
    /// The own clock differs from the clock of the API server, and other replicas have not been
    /// heard yet.
    Unconfirmed(i64),
}

impl Finding {
    /// The names of the findings.
    pub const NAMES: [&str; 5] = [
        "agreement",
        "server-differs",
        "disputed",
        "own-differs",
        "unconfirmed",
    ];

    /// The name of the finding.
    pub fn name(self) -> &'static str {
        let [agreement, server, disputed, own, unconfirmed] = Finding::NAMES;
        match self {
            Finding::Agreement => agreement,
            Finding::ServerDiffers(_) => server,
            Finding::Disputed(_) => disputed,
            Finding::OwnDiffers(_) => own,
            Finding::Unconfirmed(_) => unconfirmed,
        }
    }
}

impl Verdict {
    /// The reason why this replica must not write CAs, certificates and deadlines.
    pub fn error(&self) -> Option<String> {
        let is_error = matches!(
            self.finding,
            Finding::OwnDiffers(_) | Finding::Unconfirmed(_)
        );
        is_error.then(|| self.finding.to_string())
    }

    /// Whether no majority of the clocks agrees.
    pub fn is_disputed(&self) -> bool {
        matches!(self.finding, Finding::Disputed(_))
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::Agreement => f.write_str("the clocks of the control plane agree"),
            Finding::ServerDiffers(seconds) => write!(
                f,
                "the clock of the API server is {}; the clocks of the controllers count",
                Difference(*seconds)
            ),
            Finding::Disputed(seconds) => write!(
                f,
                "one half of the clocks of the API server and the controllers is {}: CAs are rotated \
                 in the last tenth of their lifetime only; synchronize the clocks",
                Difference(*seconds)
            ),
            Finding::OwnDiffers(seconds) => write!(
                f,
                "the clock of this replica is {} compared with the API server and the other \
                 replicas: it signs no certificate; synchronize the clock of its node",
                Difference(*seconds)
            ),
            Finding::Unconfirmed(seconds) => write!(
                f,
                "the clock of this replica is {} compared with the API server: it signs no \
                 certificate until it has read the clocks of the other replicas",
                Difference(*seconds)
            ),
        }
    }
}

struct Difference(i64);

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let minutes = (self.0.unsigned_abs() + 30) / 60;
        let direction = if self.0 < 0 { "behind" } else { "ahead" };
        write!(f, "{minutes} min {direction}")
    }
}

/// Compares the own clock with the clocks of the API server and of other replicas.
///
/// A replica whose clock differs from the trusted time is wrong. If there are two clocks, neither
/// is wrong. If there are four or more clocks without a majority, the half with the API server is
/// right.
pub fn judge(own: SystemTime, server: Option<SystemTime>, replicas: &[SystemTime]) -> Verdict {
    let mut all = [replicas, server.as_slice(), &[own]].concat();
    all.sort_unstable();
    let (low, high) = (all[(all.len() - 1) / 2], all[all.len() / 2]);
    let is_disputed = differ(low, high);
    let trusted = server.filter(|_| is_disputed).unwrap_or(low);
    if differ(own, trusted) && (!is_disputed || all.len() > 2) {
        return Verdict {
            now: trusted,
            ca_time: trusted,
            finding: Finding::OwnDiffers(seconds_between(trusted, own)),
        };
    }
    let finding = match server {
        _ if is_disputed => Finding::Disputed(seconds_between(low, high)),
        Some(server) if differ(server, trusted) => {
            Finding::ServerDiffers(seconds_between(trusted, server))
        }
        _ => Finding::Agreement,
    };
    Verdict {
        now: own,
        ca_time: if is_disputed { trusted } else { own },
        finding,
    }
}

fn differ(one: SystemTime, other: SystemTime) -> bool {
    seconds_between(one, other).unsigned_abs() > TOLERANCE.as_secs()
}

/// Seconds from one time to another.
fn seconds_between(from: SystemTime, to: SystemTime) -> i64 {
    let seconds = |time: Duration| i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    match to.duration_since(from) {
        Ok(later) => seconds(later),
        Err(earlier) => -seconds(earlier.duration()),
    }
}

/// The time of another clock when it was read.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    time: SystemTime,
    at: Instant,
}

impl Reading {
    /// The reading of a clock at a moment.
    pub fn new(time: SystemTime, at: Instant) -> Reading {
        Reading { time, at }
    }

    /// The time of the clock now, unless the reading is too old.
    fn now(&self) -> Option<SystemTime> {
        let age = self.at.elapsed();
        self.time.checked_add(age).filter(|_| age <= MAX_AGE)
    }
}

/// The clock of this replica, and the latest readings of other clocks. Clones share them.
#[derive(Clone)]
pub struct Clock(Arc<Inner>);

struct Inner {
    own: Box<dyn Fn() -> SystemTime + Send + Sync>,
    readings: Mutex<Readings>,
}

#[derive(Default)]
struct Readings {
    server: Option<Reading>,
    replicas: Vec<Reading>,
    are_replicas_expected: bool,
}

impl Default for Clock {
    fn default() -> Clock {
        Clock::new(SystemTime::now)
    }
}

impl Clock {
    /// A clock that is not compared with others yet.
    pub fn new(own: impl Fn() -> SystemTime + Send + Sync + 'static) -> Clock {
        Clock(Arc::new(Inner {
            own: Box::new(own),
            readings: Mutex::default(),
        }))
    }

    /// The own time.
    pub fn own(&self) -> SystemTime {
        (self.0.own)()
    }

    /// The trusted time. Without a majority, the own time.
    pub fn now(&self) -> SystemTime {
        self.verdict().now
    }

    /// The reason why this replica must not write CAs, certificates and deadlines.
    pub fn error(&self) -> Option<String> {
        self.verdict().error()
    }

    /// Compares the clocks.
    pub fn verdict(&self) -> Verdict {
        let own = self.own();
        self.read(|readings| {
            let replicas = readings.replicas.iter().filter_map(Reading::now);
            let server = readings.server.as_ref().and_then(Reading::now);
            let mut verdict = judge(own, server, &replicas.collect::<Vec<_>>());
            if let (Some(server), true) = (server, readings.are_replicas_expected)
                && verdict.is_disputed()
            {
                verdict.finding = Finding::Unconfirmed(seconds_between(server, own));
            }
            verdict
        })
    }

    /// Stores the time of the API server, and the readings of the clocks of other replicas. Without
    /// a time, the former one counts until it is too old. `None`: other replicas probably run, but
    /// their clocks are not known yet.
    pub fn compare(&self, server: Option<SystemTime>, replicas: Option<Vec<Reading>>) {
        self.read(|readings| {
            let server = server.map(|time| Reading::new(time, Instant::now()));
            readings.server = server.or(readings.server);
            readings.are_replicas_expected = replicas.is_none();
            readings.replicas = replicas.unwrap_or_default();
        });
    }

    fn read<T>(&self, work: impl FnOnce(&mut Readings) -> T) -> T {
        let readings = self.0.readings.lock();
        work(&mut readings.unwrap_or_else(PoisonError::into_inner))
    }
}

/// The time of the API server: the `Date` of a response. `None` if the response has none.
pub async fn date(client: &Client) -> kube::Result<Option<SystemTime>> {
    let request = Request::get("/version").body(Body::empty());
    let response = client.send(request.map_err(kube::Error::HttpError)?);
    let response = timeout(DATE_TIMEOUT, response).await;
    let response = response.map_err(|elapsed| kube::Error::Service(elapsed.into()))??;
    let date = response.headers().get(header::DATE);
    Ok(date.and_then(|date| httpdate::parse_http_date(date.to_str().ok()?).ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = 3600;
    const SKEWS: [i64; 6] = [
        HOUR,
        -HOUR,
        24 * HOUR,
        -24 * HOUR,
        30 * 24 * HOUR,
        -30 * 24 * HOUR,
    ];

    fn at(seconds: i64) -> SystemTime {
        let seconds = u64::try_from(1_800_000_000 + seconds).expect("after 1970");
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn judged(own: i64, server: Option<i64>, replicas: &[i64]) -> Verdict {
        let replicas = replicas.iter().copied().map(at);
        judge(at(own), server.map(at), &replicas.collect::<Vec<_>>())
    }

    /// A verdict with the own time.
    fn own(ca_time: i64, finding: Finding) -> Verdict {
        Verdict {
            now: at(0),
            ca_time: at(ca_time),
            finding,
        }
    }

    #[test]
    fn replica_that_differs_from_the_majority_has_a_wrong_clock() {
        for skew in SKEWS {
            let wrong = Verdict {
                finding: Finding::OwnDiffers(skew),
                ..own(0, Finding::Agreement)
            };
            for (server, replicas) in [
                (Some(0), &[0][..]),
                (Some(0), &[0, 0]),
                (None, &[0, 0]),
                // Another one of three replicas is wrong, too.
                (Some(0), &[0, skew]),
                (Some(skew), &[0, 0, 0]),
            ] {
                let expected = Verdict {
                    now: at(0),
                    ca_time: at(0),
                    ..wrong
                };
                let verdict = judged(skew, server, replicas);
                assert_eq!(verdict, expected, "{skew} {server:?} {replicas:?}");
                assert!(verdict.error().is_some());
            }
        }
    }

    #[test]
    fn majority_goes_on_whoever_else_is_wrong() {
        for skew in SKEWS {
            for (server, replicas) in [
                (Some(0), &[skew][..]),
                (Some(0), &[0, skew]),
                (None, &[0, skew]),
            ] {
                let verdict = judged(0, server, replicas);
                assert_eq!(verdict, own(0, Finding::Agreement), "{skew} {replicas:?}");
            }
            for replicas in [&[0][..], &[0, 0]] {
                let verdict = judged(0, Some(skew), replicas);
                assert_eq!(verdict, own(0, Finding::ServerDiffers(skew)));
                assert_eq!(verdict.error(), None);
            }
        }
    }

    #[test]
    fn without_a_majority_the_api_server_decides_about_cas() {
        for skew in SKEWS {
            let disputed = Finding::Disputed(skew.abs());
            assert_eq!(judged(0, Some(skew), &[]), own(skew, disputed));
            // Two of three replicas are wrong.
            assert_eq!(judged(0, Some(0), &[skew, skew]), own(0, disputed));
            let earlier = own(skew.min(0), disputed);
            assert_eq!(judged(0, None, &[skew]), earlier);
        }
    }

    #[test]
    fn small_differences_and_missing_clocks_are_an_agreement() {
        let agreement = own(0, Finding::Agreement);
        assert_eq!(judged(0, None, &[]), agreement);
        for (server, replicas) in [(300, &[][..]), (-300, &[300]), (200, &[-100, 250])] {
            assert_eq!(judged(0, Some(server), replicas), agreement);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn readings_go_on_and_expire() {
        let clock = Clock::new(|| at(0));
        let reading = Reading::new(at(HOUR), Instant::now());
        clock.compare(Some(at(HOUR)), Some(vec![reading]));
        tokio::time::advance(MAX_AGE).await;
        let minute = 60;
        assert_eq!(clock.now(), at(HOUR + minute));
        assert!(clock.error().is_some());
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!((clock.now(), clock.error()), (at(0), None));
    }

    #[tokio::test(start_paused = true)]
    async fn replica_that_differs_from_the_api_server_signs_nothing_before_it_knows_the_others() {
        let clock = Clock::new(|| at(HOUR));
        clock.compare(Some(at(0)), None);
        let error = clock.error().expect("an error");
        assert!(
            error.contains("60 min ahead compared with the API server"),
            "{error}"
        );
        // There is no other replica.
        clock.compare(Some(at(0)), Some(vec![]));
        assert_eq!(clock.error(), None);
        let agreeing = Clock::new(|| at(60));
        agreeing.compare(Some(at(0)), None);
        assert_eq!(agreeing.error(), None);
    }
}
