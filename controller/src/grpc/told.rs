//! Messages for operators about the proxy of one Discover stream, in the log and in Events on its
//! pod. The proxy rejects an update, its clock is wrong, or its certificate has expired. Each is
//! sent once for a stream, whatever the proxy sends, and logged once a minute for a pod.

use std::mem::replace;
use std::time::{Duration, SystemTime};

use diy_mesh_control_plane::events::Events;
use diy_mesh_proto::mesh::v1::{Acknowledgement, ProxyStatus, ResourceType};
use tokio::time::{Instant, sleep_until};

use super::Context;
use super::subscriptions::printable;
use crate::issuer::BACKDATED;
use crate::metrics::Metrics;
use crate::proxies::ConnectedGuard;
use crate::quota::Lines;
use crate::status::events;
use crate::unix_time::seconds;

/// A stream ends before.
const MAX_EXPIRY: Duration = Duration::from_secs(86_400);

/// The messages that were sent about a stream.
pub(super) struct Told<'a> {
    proxy: &'a ConnectedGuard,
    events: &'a Events,
    metrics: &'a Metrics,
    lines: &'a Lines,
    has_rejected: bool,
    is_skewed: bool,
    has_expired: bool,
    /// The end of the certificate in use, if it is known.
    expiry: Option<Instant>,
}

impl<'a> Told<'a> {
    pub(super) fn new(proxy: &'a ConnectedGuard, context: &'a Context) -> Self {
        Self {
            proxy,
            events: &context.events,
            metrics: &context.metrics,
            lines: context.quotas.lines(),
            has_rejected: false,
            is_skewed: false,
            has_expired: false,
            expiry: None,
        }
    }

    /// Counts an acknowledgement, and tells of the first rejection.
    pub(super) fn acknowledged(&mut self, acknowledgement: &Acknowledgement) {
        if acknowledgement.rejection.is_empty() {
            self.metrics.acknowledged.inc();
            return;
        }
        self.metrics.rejected.inc();
        if !replace(&mut self.has_rejected, true) {
            let reason = printable(&acknowledgement.rejection);
            let name = printable(&acknowledgement.name);
            let kind = ResourceType::try_from(acknowledgement.r#type);
            let kind = kind.map_or("a resource", |kind| kind.as_str_name());
            let note =
                format!("rejects an update of {kind} {name}, and keeps the former one: {reason}");
            self.tell("UpdateRejected", &note);
        }
    }

    /// Tells of a clock beyond the tolerance of certificates, and watches the new certificate.
    pub(super) fn status(&mut self, status: &ProxyStatus, clock_skew: i64, now: SystemTime) {
        let skew = Duration::from_millis(clock_skew.unsigned_abs());
        if skew > BACKDATED && !replace(&mut self.is_skewed, true) {
            let direction = if clock_skew > 0 { "ahead of" } else { "behind" };
            let (skew, tolerance) = (skew.as_secs(), BACKDATED.as_secs());
            let note = format!(
                "has a clock {skew} s {direction} the clock of the controller, where certificates tolerate \
                 {tolerance} s: synchronize the clock of the node"
            );
            self.tell("ClockSkewed", &note);
        }
        let end = u64::try_from(status.certificate_not_after).unwrap_or_default();
        let left = Duration::from_secs(end.saturating_sub(seconds(now))).min(MAX_EXPIRY);
        let is_watched = end > 0 && !self.has_expired && left < MAX_EXPIRY;
        self.expiry = is_watched.then(|| Instant::now() + left);
    }

    /// Waits for the end of the certificate.
    pub(super) async fn expiry(&self) {
        match self.expiry {
            Some(expiry) => sleep_until(expiry).await,
            None => std::future::pending().await,
        }
    }

    /// Tells that the certificate has expired.
    pub(super) fn expired(&mut self) {
        (self.expiry, self.has_expired) = (None, true);
        let note = "has a certificate that has expired and was not renewed, so that connections with \
                    mutual TLS fail: the log of the proxy says why";
        self.tell("CertificateExpired", note);
    }

    fn tell(&self, reason: &'static str, note: &str) {
        let pod = self.proxy.pod();
        let uid = pod.as_ref().map(|pod| pod.uid.clone()).unwrap_or_default();
        if let Some(omitted) = self.lines.begin(&uid, reason) {
            tracing::warn!("{} {note}{omitted}", self.proxy);
        }
        if let Some(pod) = pod {
            events::of_pod(
                self.events,
                &pod,
                reason,
                "Discover",
                &format!("the proxy {note}"),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use diy_mesh_control_plane::events::Queue;
    use futures::FutureExt;

    use super::*;
    use crate::authenticate::Caller;
    use crate::object::PodRef;
    use crate::proxies::Proxies;
    use crate::status::testing::subscriber;
    use diy_mesh_testkit::output::Output;

    const NOW: u64 = 1_800_000_000;

    /// Tells of the proxy of shop/web. Returns the events as `REASON NOTE`.
    fn told(tell: impl AsyncFnOnce(&mut Told<'_>)) -> Vec<String> {
        let pod = PodRef {
            namespace: "shop".into(),
            name: "web".into(),
            uid: "u".into(),
        };
        let caller = Caller {
            user: "system:serviceaccount:shop:web".into(),
            pod: Some(pod),
        };
        let proxy = Proxies::default().connect(&caller, SystemTime::now());
        let ((events, queue), metrics) = (Events::new(), Metrics::new(|_| Ok(())));
        let mut told = Told {
            proxy: &proxy,
            events: &events,
            metrics: &metrics,
            lines: &Lines::default(),
            has_rejected: false,
            is_skewed: false,
            has_expired: false,
            expiry: None,
        };
        tell(&mut told).now_or_never().expect("it does not wait");
        notes(queue)
    }

    fn notes(mut queue: Queue) -> Vec<String> {
        let next = || {
            let (object, event) = queue.try_recv()?;
            assert_eq!(
                (object.name.as_deref(), object.uid.as_deref()),
                (Some("web"), Some("u"))
            );
            Some(format!("{} {}", event.reason, event.note?))
        };
        std::iter::from_fn(next).collect()
    }

    fn ends(end: u64) -> ProxyStatus {
        ProxyStatus {
            certificate_not_after: end.try_into().unwrap(),
            ..ProxyStatus::default()
        }
    }

    fn now() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(NOW)
    }

    #[test]
    fn rejections_of_a_hostile_proxy_are_one_short_line_of_the_log_and_one_event() {
        let log = Output::default();
        let rejection = Acknowledgement {
            rejection: format!("x\n2026 ERROR forged\r\u{1b}[2J{}", "y".repeat(100_000)),
            r#type: 77,
            ..Acknowledgement::default()
        };
        let events = tracing::subscriber::with_default(subscriber(&log), || {
            told(async |told| (0..1_000).for_each(|_| told.acknowledged(&rejection)))
        });
        let [event] = &events[..] else {
            panic!("{events:?}")
        };
        let start = "UpdateRejected the proxy rejects an update of a resource , and keeps the former one: x 2026";
        assert!(event.starts_with(start) && event.len() < 400, "{event}");
        assert!(!event.contains(char::is_control), "{event}");
        let text = log.text();
        let mut control = text.chars().filter(|character| character.is_control());
        assert_eq!(
            (control.next(), control.next()),
            (Some('\n'), None),
            "{text}"
        );
        assert!(text.ends_with('\n') && text.len() < 1_000, "{text}");
    }

    #[test]
    fn acknowledgements_are_no_events() {
        assert!(told(async |told| told.acknowledged(&Acknowledgement::default())).is_empty());
    }

    #[test]
    fn clock_beyond_the_tolerance_is_one_event() {
        let of =
            |skew: i64| told(async |told| (0..3).for_each(|_| told.status(&ends(0), skew, now())));
        assert!(of(300_000).is_empty() && of(-300_000).is_empty());
        let ahead = of(301_000);
        assert_eq!(ahead.len(), 1, "{ahead:?}");
        assert!(
            ahead[0].starts_with("ClockSkewed the proxy has a clock 301 s ahead of"),
            "{ahead:?}"
        );
        assert!(of(i64::MIN)[0].contains(" s behind the clock"));
    }

    #[tokio::test(start_paused = true)]
    async fn certificate_that_ends_on_a_stream_is_one_event_unless_it_is_renewed() {
        let events = told(async |told| {
            told.status(&ends(NOW - 7), 0, now());
            told.expiry().await;
            told.expired();
            told.status(&ends(NOW - 7), 0, now());
            assert!(told.expiry().now_or_never().is_none(), "told once");
        });
        assert_eq!(events.len(), 1, "{events:?}");
        assert!(events[0].starts_with("CertificateExpired "), "{events:?}");
        let events = told(async |told| {
            told.status(&ends(NOW + 60), 0, now());
            assert!(told.expiry().now_or_never().is_none());
            for end in [0, NOW + 90_000, i64::MAX as u64] {
                told.status(&ends(NOW - 7), 0, now());
                told.status(&ends(end), 0, now());
                assert!(told.expiry().now_or_never().is_none(), "{end}");
            }
        });
        assert!(events.is_empty());
    }
}
