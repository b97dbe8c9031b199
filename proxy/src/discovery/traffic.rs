//! The reports of the pod's traffic to the controller: when they are due, and what they contain. Each
//! is the difference to the previous one. Pure: the caller passes the time.

use std::sync::Arc;
use std::time::Duration;

use diy_mesh_proto::traffic::Traffic;
use prost::Message as _;
use tokio::time::{Instant, sleep_until};

use crate::observe::metrics::Requests;

/// Time between two reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);
/// Time between two reports while someone watches.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);
/// The longest time for which a controller can ask for these.
const MAX_WATCH: Duration = Duration::from_secs(60);

/// The reports of a stream.
pub(super) struct TrafficReports {
    requests: Arc<Requests>,
    /// When the next report is due. `None` if the controller of the stream reads none.
    next: Option<Instant>,
    watched_until: Instant,
    /// The totals at the previous report.
    reported: Traffic,
    /// The controller knows that there is no traffic.
    is_idle: bool,
}

impl TrafficReports {
    pub(super) fn new(requests: Arc<Requests>) -> Self {
        Self {
            requests,
            next: None,
            watched_until: Instant::now(),
            reported: Traffic::default(),
            is_idle: true,
        }
    }

    /// Begins anew: the controller knows no traffic of this proxy.
    pub(super) fn stream_opened(&mut self, is_accepted: bool, now: Instant) {
        self.next = is_accepted.then(|| now + REPORT_INTERVAL);
        self.watched_until = now;
        self.is_idle = true;
        self.reported = self.requests.traffic(now.into_std());
    }

    pub(super) fn stream_closed(&mut self) {
        self.next = None;
    }

    /// Has reports made each second for some time.
    pub(super) fn watch(&mut self, seconds: u32, now: Instant) {
        self.watched_until = now + Duration::from_secs(seconds.into()).min(MAX_WATCH);
        if let Some(next) = &mut self.next {
            *next = (*next).min(now + WATCH_INTERVAL);
        }
    }

    /// Waits until a report is due.
    pub(super) async fn due(&self) {
        match self.next {
            Some(next) => sleep_until(next).await,
            None => std::future::pending().await,
        }
    }

    /// The encoded report that is due now. `None` if there was no traffic, and the controller knows it.
    pub(super) fn take(&mut self, now: Instant) -> Option<Vec<u8>> {
        let is_watched = now < self.watched_until;
        let interval = if is_watched {
            WATCH_INTERVAL
        } else {
            REPORT_INTERVAL
        };
        self.next = self.next.map(|_| now + interval);
        let total = self.requests.traffic(now.into_std());
        let report = total.since(&self.reported);
        self.reported = total;
        let was_idle = std::mem::replace(&mut self.is_idle, report.flows.is_empty());
        let is_new = !was_idle || !self.is_idle;
        is_new.then(|| report.bounded().encode_to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::metrics::Counted;
    use crate::observe::metrics::testing::request;
    use diy_mesh_model::exchange::Direction;

    struct Pod {
        requests: Arc<Requests>,
        reports: TrafficReports,
        start: Instant,
    }

    impl Pod {
        fn new() -> Self {
            let start = Instant::now();
            let requests = Arc::new(Requests::new(start.into_std()));
            Self {
                reports: TrafficReports::new(requests.clone()),
                requests,
                start,
            }
        }

        fn after(&self, milliseconds: u64) -> Instant {
            self.start + Duration::from_millis(milliseconds)
        }

        fn call(&self) {
            let labels = request(Direction::Outbound, "", ("shop", "cart"));
            let now = self.start.into_std();
            self.requests
                .count(&Counted::default(), labels, Duration::from_millis(3), now);
        }

        /// When the next report is due, and its interval and requests.
        fn next(&mut self) -> (u64, Option<(u64, u64)>) {
            let due = self.reports.next.expect("it reports");
            let report = self.reports.take(due).map(|report| {
                let report = Traffic::decode(&*report).expect("a message");
                let requests = report.flows.iter().map(|flow| flow.requests).sum();
                (report.milliseconds, requests)
            });
            (due.duration_since(self.start).as_millis() as u64, report)
        }
    }

    #[test]
    fn reports_the_traffic_of_each_interval_and_its_end_once() {
        let mut pod = Pod::new();
        pod.call();
        pod.reports.stream_opened(true, pod.after(1_000));
        assert_eq!(pod.next(), (11_000, None));
        pod.call();
        pod.call();
        assert_eq!(pod.next(), (21_000, Some((10_000, 2))));
        pod.call();
        assert_eq!(pod.next(), (31_000, Some((10_000, 1))));
        assert_eq!(pod.next(), (41_000, Some((10_000, 0))));
        assert_eq!(pod.next(), (51_000, None));
    }

    #[test]
    fn reports_each_second_for_as_long_as_the_controller_asks() {
        let mut pod = Pod::new();
        pod.reports.stream_opened(true, pod.start);
        pod.reports.watch(3, pod.after(4_500));
        pod.call();
        assert_eq!(pod.next(), (5_500, Some((5_500, 1))));
        pod.call();
        assert_eq!(pod.next(), (6_500, Some((1_000, 1))));
        // Many of these do not make reports more frequent, and have no end that is far away.
        pod.reports.watch(u32::MAX, pod.after(6_600));
        pod.reports.watch(u32::MAX, pod.after(6_700));
        assert_eq!(pod.next(), (7_500, Some((1_000, 0))));
        pod.reports.watch(0, pod.after(7_600));
        assert_eq!(pod.next().0, 8_500);
        assert_eq!(pod.next().0, 18_500);
    }

    #[tokio::test(start_paused = true)]
    async fn reports_nothing_to_controllers_that_read_no_traffic() {
        let mut pod = Pod::new();
        let is_due = async |reports: &TrafficReports| {
            tokio::time::timeout(3 * REPORT_INTERVAL, reports.due()).await
        };
        pod.reports.stream_opened(false, pod.start);
        pod.reports.watch(10, pod.start);
        assert!(is_due(&pod.reports).await.is_err());
        pod.reports.stream_opened(true, pod.start);
        assert!(is_due(&pod.reports).await.is_ok());
        pod.reports.stream_closed();
        assert!(is_due(&pod.reports).await.is_err());
    }
}
