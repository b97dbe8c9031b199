//! The messages to the controller about the proxy itself, what failed there, what its pod is called
//! by and which issuers have unknown keys: their bounds, and when to send them. `traffic.rs` has
//! those about its traffic.

use std::sync::Arc;
use std::time::Duration;

use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_proto::{MAX_EXCEPTIONS, MAX_EXCEPTIONS_BYTES};
use prost::Message as _;
use tokio::time::Instant;

use super::traffic::TrafficReports;
use crate::inbound::edges::{Edges, Sent};
use crate::observe::exceptions::{Exception, Exceptions};
use crate::observe::metrics::Requests;
use crate::secure::control::AcceptedReports;

/// The encoded length of the number of exceptions that have no room.
const OMITTED_BYTES: usize = 6;

/// The exceptions and the edges of the proxy, and those that the controller knows.
pub(super) struct Reported {
    exceptions: Arc<Exceptions>,
    /// The latest ones on this stream.
    latest: proto::Exceptions,
    exceptions_pace: Pace,
    /// `None` if the pod does not report them.
    edges: Option<Arc<Edges>>,
    /// Those that were sent on this stream.
    sent: Option<Sent>,
    edges_pace: Pace,
    keys_pace: Pace,
    /// These have a pace of their own.
    pub(super) traffic: TrafficReports,
    /// Those that the controller of the stream reads.
    accepts: AcceptedReports,
}

/// The time of the latest message of a kind.
#[derive(Default)]
struct Pace(Option<Instant>);

impl Pace {
    /// The message of `make`, if it is time for one.
    fn limit<T>(
        &mut self,
        interval: Duration,
        now: Instant,
        make: impl FnOnce() -> Option<T>,
    ) -> Option<T> {
        let is_early = |at| now.saturating_duration_since(at) < interval;
        if self.0.is_some_and(is_early) {
            return None;
        }
        make().inspect(|_| self.0 = Some(now))
    }
}

impl Reported {
    pub(super) fn new(
        exceptions: Arc<Exceptions>,
        edges: Option<Arc<Edges>>,
        requests: Arc<Requests>,
    ) -> Self {
        Self {
            exceptions,
            latest: proto::Exceptions::default(),
            exceptions_pace: Pace::default(),
            edges,
            sent: None,
            edges_pace: Pace::default(),
            keys_pace: Pace::default(),
            traffic: TrafficReports::new(requests),
            accepts: AcceptedReports::default(),
        }
    }

    /// The controller of a new stream knows nothing.
    pub(super) fn stream_opened(&mut self, accepts: AcceptedReports) {
        self.latest = proto::Exceptions::default();
        self.sent = None;
        // A pod that does not report its edges does not report their traffic.
        let accepts_traffic = accepts.traffic && self.edges.is_some();
        self.traffic.stream_opened(accepts_traffic, Instant::now());
        self.accepts = accepts;
    }

    /// The current exceptions, if they have changed and it is time for a message.
    pub(super) fn exceptions(
        &mut self,
        interval: Duration,
        now: Instant,
    ) -> Option<proto::Exceptions> {
        self.exceptions_pace.limit(interval, now, || {
            let current = message(self.exceptions.report(now.into_std()));
            (current != self.latest).then(|| {
                self.latest = current.clone();
                current
            })
        })
    }

    /// The new edges of a day, if it is time for a message.
    pub(super) fn edges(
        &mut self,
        interval: Duration,
        now: Instant,
        day: u64,
    ) -> Option<proto::Edges> {
        let edges = self.edges.as_ref().filter(|_| self.accepts.edges)?;
        let sent = &mut self.sent;
        self.edges_pace
            .limit(interval, now, || edges.unsent(sent, day))
    }

    /// The issuers with unknown keys that `take` returns, if it is time for a message.
    pub(super) fn unknown_keys(
        &mut self,
        interval: Duration,
        now: Instant,
        take: impl FnOnce() -> Vec<String>,
    ) -> Option<proto::UnknownKeys> {
        if !self.accepts.keys {
            return None;
        }
        self.keys_pace.limit(interval, now, || {
            let issuers = take();
            (!issuers.is_empty()).then_some(proto::UnknownKeys { issuers })
        })
    }
}

/// A message with as many of the exceptions as have room.
fn message(exceptions: Vec<Exception>) -> proto::Exceptions {
    let mut message = proto::Exceptions::default();
    for exception in exceptions {
        message.exceptions.push(proto::exceptions::Exception {
            kind: exception.kind.name().to_owned(),
            destination: exception.destination,
            endpoint: exception.endpoint,
            reason: exception.reason,
            count: exception.count,
            total: exception.total,
        });
        let is_small = message.encoded_len() + OMITTED_BYTES <= MAX_EXCEPTIONS_BYTES;
        if !is_small || message.exceptions.len() > MAX_EXCEPTIONS {
            message.exceptions.pop();
            message.omitted += 1;
        }
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::exceptions::{Event, Kind};

    const ALL: AcceptedReports = AcceptedReports {
        edges: true,
        keys: true,
        traffic: true,
    };

    fn reported(exceptions: Arc<Exceptions>, edges: Option<Arc<Edges>>) -> Reported {
        let requests = Arc::new(Requests::new(std::time::Instant::now()));
        Reported::new(exceptions, edges, requests)
    }

    #[test]
    fn message_is_bounded_and_says_what_it_lacks() {
        let exception = |length: usize| Exception {
            kind: Kind::Ejected,
            destination: "x".repeat(length),
            endpoint: "192.0.2.1:80".into(),
            reason: "consecutive".into(),
            count: u32::MAX,
            total: u32::MAX,
        };
        for (length, expected) in [(0, 1..64), (325, 1..3), (2000, 0..1)] {
            let message = message(vec![exception(length); 198]);
            let count = message.exceptions.len();
            assert!(message.encoded_len() <= MAX_EXCEPTIONS_BYTES);
            assert!(expected.contains(&count), "{length}: {count}");
            assert_eq!(count + message.omitted as usize, 198);
        }
        // One that has no room does not displace the next one.
        let message_of_both = message(vec![exception(2000), exception(10)]);
        assert_eq!(
            (message_of_both.exceptions.len(), message_of_both.omitted),
            (1, 1)
        );
        let small = Exception {
            endpoint: String::new(),
            reason: String::new(),
            count: 0,
            total: 0,
            ..exception(0)
        };
        assert_eq!(message(vec![small; 198]).exceptions.len(), MAX_EXCEPTIONS);
    }

    #[test]
    fn exceptions_are_sent_after_a_change_and_at_most_every_ten_seconds() {
        let start = Instant::now();
        let failed = Event {
            kind: Kind::Inbound,
            destination: "",
            endpoint: "",
            reason: "overloaded",
        };
        let exceptions = Arc::new(Exceptions::new(start.into_std()));
        let mut reported = reported(exceptions.clone(), None);
        let interval = Duration::from_secs(10);
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut sent_at = |second: u64| {
            let sent = reported.exceptions(interval, after(second));
            sent.map(|sent| sent.exceptions.iter().map(|one| one.count).sum::<u32>())
        };
        assert_eq!(sent_at(0), None);
        exceptions.record(failed, 1, start.into_std());
        assert_eq!(sent_at(1), Some(1));
        exceptions.record(failed, 1, after(2).into_std());
        assert_eq!((sent_at(3), sent_at(11)), (None, Some(2)));
        assert_eq!((sent_at(30), sent_at(59)), (None, None));
        // Nothing has failed for a minute.
        assert_eq!((sent_at(60), sent_at(80)), (Some(0), None));
        reported.stream_opened(ALL);
        assert_eq!(reported.exceptions(interval, after(100)), None);
        exceptions.record(failed, 1, after(100).into_std());
        assert!(reported.exceptions(interval, after(100)).is_some());
        reported.stream_opened(ALL);
        assert!(reported.exceptions(interval, after(110)).is_some());
    }

    #[test]
    fn edges_are_sent_to_controllers_that_keep_them_and_at_most_every_ten_seconds() {
        let start = Instant::now();
        let interval = Duration::from_secs(10);
        let after = |seconds| start + Duration::from_secs(seconds);
        let exceptions = Arc::new(Exceptions::new(start.into_std()));
        let mut reported = reported(exceptions, Some(Arc::default()));
        assert_eq!(reported.edges(interval, after(0), 7), None);
        reported.stream_opened(ALL);
        let empty = Some(proto::Edges::default());
        assert_eq!(reported.edges(interval, after(0), 7), empty);
        assert_eq!(reported.edges(interval, after(30), 7), None);
        assert_eq!(reported.edges(interval, after(30), 8), empty);
        reported.stream_opened(ALL);
        assert_eq!(reported.edges(interval, after(39), 8), None);
        assert_eq!(reported.edges(interval, after(40), 8), empty);
    }

    #[tokio::test(start_paused = true)]
    async fn traffic_is_reported_by_pods_that_report_edges() {
        let exceptions = Arc::new(Exceptions::new(Instant::now().into_std()));
        for (edges, is_reported) in [(Some(Arc::default()), true), (None, false)] {
            let mut reported = reported(exceptions.clone(), edges);
            reported.stream_opened(ALL);
            let due = reported.traffic.due();
            let due = tokio::time::timeout(Duration::from_secs(60), due).await;
            assert_eq!(due.is_ok(), is_reported);
        }
    }

    #[test]
    fn unknown_keys_are_sent_to_controllers_that_fetch_keys_and_at_most_every_ten_seconds() {
        let start = Instant::now();
        let exceptions = Arc::new(Exceptions::new(start.into_std()));
        let mut reported = reported(exceptions, None);
        let sent_at = |reported: &mut Reported, second, issuers: &[&str]| {
            let now = start + Duration::from_secs(second);
            let take = || issuers.iter().map(|one| one.to_string()).collect();
            let sent = reported.unknown_keys(Duration::from_secs(10), now, take);
            sent.map(|sent| sent.issuers)
        };
        let edges_only = AcceptedReports { keys: false, ..ALL };
        reported.stream_opened(edges_only);
        assert_eq!(sent_at(&mut reported, 0, &["a"]), None);
        reported.stream_opened(ALL);
        assert_eq!(sent_at(&mut reported, 0, &[]), None);
        let sent = Some(vec!["a".to_owned()]);
        assert_eq!(sent_at(&mut reported, 1, &["a"]), sent);
        assert_eq!(sent_at(&mut reported, 10, &["a"]), None);
        // Another stream has the same limit.
        reported.stream_opened(ALL);
        assert_eq!(sent_at(&mut reported, 10, &["a"]), None);
        assert_eq!(sent_at(&mut reported, 11, &["a"]), sent);
    }
}
