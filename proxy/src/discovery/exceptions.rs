//! The message to the controller about what failed at the proxy: its bounds, and when to send it.

use std::sync::Arc;
use std::time::Duration;

use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_proto::{MAX_EXCEPTIONS, MAX_EXCEPTIONS_BYTES};
use prost::Message as _;
use tokio::time::Instant;

use crate::observe::exceptions::{Exception, Exceptions};

/// The encoded length of the number of exceptions that have no room.
const OMITTED_BYTES: usize = 6;

/// The exceptions of the proxy, and those that the controller knows.
pub(super) struct Reported {
    exceptions: Arc<Exceptions>,
    /// The latest ones on this stream.
    latest: proto::Exceptions,
    sent_at: Option<Instant>,
}

impl Reported {
    pub(super) fn new(exceptions: Arc<Exceptions>) -> Self {
        Self {
            exceptions,
            latest: proto::Exceptions::default(),
            sent_at: None,
        }
    }

    /// The controller of a new stream knows none.
    pub(super) fn stream_opened(&mut self) {
        self.latest = proto::Exceptions::default();
    }

    /// The current exceptions, if they have changed and it is time for a message.
    pub(super) fn changed(
        &mut self,
        interval: Duration,
        now: Instant,
    ) -> Option<proto::Exceptions> {
        let is_early = |at| now.saturating_duration_since(at) < interval;
        if self.sent_at.is_some_and(is_early) {
            return None;
        }
        let current = message(self.exceptions.report(now.into_std()));
        (current != self.latest).then(|| {
            self.sent_at = Some(now);
            self.latest = current.clone();
            current
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
        let mut reported = Reported::new(exceptions.clone());
        let interval = Duration::from_secs(10);
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut sent_at = |second: u64| {
            let sent = reported.changed(interval, after(second));
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
        reported.stream_opened();
        assert_eq!(reported.changed(interval, after(100)), None);
        exceptions.record(failed, 1, after(100).into_std());
        assert!(reported.changed(interval, after(100)).is_some());
        reported.stream_opened();
        assert!(reported.changed(interval, after(110)).is_some());
    }
}
