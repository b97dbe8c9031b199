//! Renewal of credentials against a fake controller, with paused time. The wall clock follows the
//! paused clock.

use std::sync::Mutex;
use std::time::Duration;

use diy_mesh_proto::mesh::v1::{self as proto, SignCertificateRequest, SignCertificateResponse};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tonic::Status;

use super::renewal::{Environment, Renewal};
use super::testing::{Authority, WEB, token};
use super::*;
use crate::secure::control::ControlError;
use crate::secure::control::testing::Signing;

const DAY: Duration = Duration::from_secs(86_400);

/// A fake controller and clock.
#[derive(Clone)]
struct Fake(Arc<FakeState>);

struct FakeState {
    started: Instant,
    behaviour: Mutex<Behaviour>,
    /// Times of requests.
    requests: Mutex<Vec<Instant>>,
}

/// Behaviour of the controller.
struct Behaviour {
    /// The time at the start, by the wall clock.
    clock: SystemTime,
    signing: Signing,
    user: &'static str,
    mode: Mode,
}

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Sign,
    Reject,
    Hang,
}

impl Environment for Fake {
    fn now(&self) -> SystemTime {
        self.0.behaviour.lock().unwrap().clock + self.0.started.elapsed()
    }

    fn random(&mut self) -> f64 {
        0.5
    }

    async fn token(&self) -> Result<String, ControlError> {
        Ok(token(self.0.behaviour.lock().unwrap().user))
    }

    async fn sign(
        &self,
        request: SignCertificateRequest,
    ) -> Result<SignCertificateResponse, ControlError> {
        self.0.requests.lock().unwrap().push(Instant::now());
        let mode = self.0.behaviour.lock().unwrap().mode;
        match mode {
            Mode::Sign => Ok(self.response(&request)),
            Mode::Reject => Err(ControlError::Rejected(Status::unavailable("later"))),
            Mode::Hang => std::future::pending().await,
        }
    }
}

impl Fake {
    fn response(&self, request: &SignCertificateRequest) -> SignCertificateResponse {
        let now = self.now();
        let behaviour = self.0.behaviour.lock().unwrap();
        behaviour.signing.respond(request, now)
    }

    fn set(&self, change: impl FnOnce(&mut Behaviour)) {
        change(&mut self.0.behaviour.lock().unwrap());
    }
}

/// A running renewal task.
struct Running {
    fake: Fake,
    trust: Trust,
    metrics: IdentityMetrics,
    credentials: CurrentCredentials,
    _task: JoinSet<()>,
}

impl Running {
    fn start(lifetime: Duration) -> Self {
        Self::start_where(lifetime, |_| {})
    }

    fn start_where(lifetime: Duration, change: impl FnOnce(&mut Behaviour)) -> Self {
        let user = "system:serviceaccount:shop:web";
        let signing = Signing {
            authority: Arc::new(Authority::new("one")),
            lifetime,
            roots_version: "1",
        };
        // Whole seconds, like certificate times.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let mut behaviour = Behaviour {
            clock: UNIX_EPOCH + Duration::from_secs(now.as_secs()),
            signing,
            user,
            mode: Mode::Sign,
        };
        change(&mut behaviour);
        let state = FakeState {
            started: Instant::now(),
            behaviour: Mutex::new(behaviour),
            requests: Mutex::default(),
        };
        let (fake, trust, metrics) = (
            Fake(Arc::new(state)),
            Trust::default(),
            IdentityMetrics::default(),
        );
        let renewal = Renewal::new(
            fake.clone(),
            "cluster.local".to_owned(),
            trust.clone(),
            metrics.clone(),
        );
        let (credentials, mut tasks) = (renewal.credentials(), JoinSet::new());
        tasks.spawn(renewal.run());
        Self {
            fake,
            trust,
            metrics,
            credentials,
            _task: tasks,
        }
    }

    async fn changed(&mut self) -> Option<Arc<Credentials>> {
        self.credentials.changed().await.expect("the task runs");
        self.credentials.borrow_and_update().clone()
    }

    /// Times of requests in seconds since the first one.
    fn request_times(&self) -> Vec<f64> {
        let requests = self.fake.0.requests.lock().unwrap();
        requests
            .iter()
            .skip(1)
            .map(|at| (*at - requests[0]).as_secs_f64())
            .collect()
    }

    /// The CA of the controller.
    fn authority(&self) -> Arc<Authority> {
        let behaviour = self.fake.0.behaviour.lock().unwrap();
        behaviour.signing.authority.clone()
    }

    /// Receives roots and issuer on the discovery stream.
    fn announce(
        &self,
        authorities: &[&Authority],
        version: &str,
        issuer: &str,
        renew_within_seconds: u32,
    ) {
        let pem: Vec<String> = authorities.iter().map(|one| one.pem()).collect();
        let roots = proto::Roots {
            pem: pem.concat().into_bytes(),
            issuer: issuer.to_owned(),
            renew_within_seconds,
        };
        self.trust
            .set_from_stream(Roots::from_stream(roots, version).unwrap());
    }
}

fn close(actual: &[f64], expected: &[f64]) -> bool {
    actual.len() == expected.len()
        && actual
            .iter()
            .zip(expected)
            .all(|(actual, expected)| (actual - expected).abs() < 0.01)
}

#[tokio::test(start_paused = true)]
async fn requests_first_certificate_at_once_and_renews_with_new_keys() {
    let mut proxy = Running::start(DAY);
    let first = proxy.changed().await.expect("a certificate");
    assert_eq!(
        (
            first.identity.as_str(),
            first.roots_version.as_str(),
            first.roots.len()
        ),
        (WEB, "1", 1)
    );
    let second = proxy.changed().await.expect("another certificate");
    proxy.changed().await.expect("and one more");
    assert!(
        close(&proxy.request_times(), &[69_120.0, 138_240.0]),
        "{:?}",
        proxy.request_times()
    );
    assert_ne!(
        first.certified.key.public_key().unwrap(),
        second.certified.key.public_key().unwrap()
    );
    assert!(second.not_after > first.not_after);
    assert_eq!(
        (
            proxy.metrics.certificates.get(),
            proxy.metrics.failures.get()
        ),
        (3, 0)
    );
}

#[tokio::test(start_paused = true)]
async fn renews_short_lived_certificates() {
    let mut proxy = Running::start(Duration::from_secs(10));
    for _ in 0..4 {
        proxy.changed().await.expect("a certificate");
    }
    let requests = proxy.request_times();
    // Certificate times are whole seconds: validities are up to one second shorter than requested.
    let mut before = 0.0;
    for at in requests {
        let pause: f64 = at - before;
        assert!((7.0..=8.01).contains(&pause), "{pause}");
        before = at;
    }
    assert!(proxy.credentials.borrow().is_some());
}

#[tokio::test(start_paused = true)]
async fn retries_first_certificate_with_growing_delay() {
    let mut proxy = Running::start_where(DAY, |behaviour| behaviour.mode = Mode::Reject);
    sleep(Duration::from_secs(20)).await;
    assert!(
        close(
            &proxy.request_times(),
            &[0.15, 0.45, 1.05, 2.25, 4.65, 9.45, 16.95]
        ),
        "{:?}",
        proxy.request_times()
    );
    assert!(proxy.credentials.borrow().is_none());
    proxy.fake.set(|behaviour| behaviour.mode = Mode::Sign);
    assert!(proxy.changed().await.is_some());
}

#[tokio::test(start_paused = true)]
async fn credentials_expire_while_the_controller_is_unavailable() {
    let mut proxy = Running::start(DAY);
    let first = proxy.changed().await.expect("a certificate");
    proxy.fake.set(|behaviour| behaviour.mode = Mode::Reject);
    assert!(proxy.changed().await.is_none(), "expired");
    let now = proxy.fake.now();
    assert!(
        now >= first.not_after && now < first.not_after + Duration::from_secs(1),
        "at the expiry"
    );
    let tries = proxy.request_times();
    let pauses: Vec<f64> = tries.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(
        close(&pauses[..5], &[3.75, 7.5, 15.0, 30.0, 45.0]),
        "{pauses:?}"
    );
    assert!(
        pauses[5..].iter().all(|pause| (pause - 45.0).abs() < 0.01),
        "{pauses:?}"
    );
    assert_eq!(proxy.metrics.failures.get(), tries.len() as u64);
    proxy.fake.set(|behaviour| behaviour.mode = Mode::Sign);
    assert!(proxy.changed().await.is_some());
}

#[tokio::test(start_paused = true)]
async fn clock_that_is_set_back_delays_no_attempt() {
    let mut proxy = Running::start_where(DAY, |behaviour| behaviour.mode = Mode::Reject);
    sleep(Duration::from_secs(20)).await;
    proxy.fake.set(|behaviour| {
        behaviour.clock -= DAY;
        behaviour.mode = Mode::Sign;
    });
    let changed = timeout(Duration::from_secs(60), proxy.changed()).await;
    assert!(changed.expect("the next attempt is soon").is_some());
}

#[tokio::test(start_paused = true)]
async fn clock_that_is_set_back_renews_the_certificate_that_is_not_valid_yet() {
    let mut proxy = Running::start(DAY);
    proxy.changed().await.expect("a certificate");
    proxy.fake.set(|behaviour| behaviour.clock -= 2 * DAY);
    let renewed = timeout(Duration::from_secs(120), proxy.changed()).await;
    let renewed = renewed.expect("the clock is read every minute");
    let renewed = renewed.expect("a certificate");
    assert!(renewed.not_after < proxy.fake.now() + 2 * DAY);
    sleep(DAY / 2).await;
    assert_eq!(proxy.request_times().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn clock_that_is_set_forward_renews_the_expired_certificate() {
    let mut proxy = Running::start(DAY);
    let first = proxy.changed().await.expect("a certificate");
    proxy.fake.set(|behaviour| behaviour.clock += 2 * DAY);
    let renewed = timeout(Duration::from_secs(120), async {
        loop {
            if let Some(renewed) = proxy.changed().await {
                return renewed;
            }
        }
    });
    let renewed = renewed.await.expect("the clock is read every minute");
    assert!(renewed.not_after > first.not_after + DAY);
}

#[tokio::test(start_paused = true)]
async fn credentials_expire_while_a_request_hangs() {
    let mut proxy = Running::start(Duration::from_secs(60));
    let first = proxy.changed().await.expect("a certificate");
    proxy.fake.set(|behaviour| behaviour.mode = Mode::Hang);
    assert!(proxy.changed().await.is_none());
    assert!(proxy.fake.now() < first.not_after + Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn rejects_certificate_of_another_workload() {
    let proxy = Running::start_where(DAY, |behaviour| {
        behaviour.user = "system:serviceaccount:shop:cart"
    });
    sleep(Duration::from_secs(1)).await;
    assert!(
        proxy.credentials.borrow().is_none() && proxy.metrics.failures.get() > 1,
        "issued for another workload"
    );
}

#[tokio::test(start_paused = true)]
async fn applies_new_roots_to_the_current_certificate() {
    let mut proxy = Running::start(DAY);
    let first = proxy.changed().await.expect("a certificate");
    let (own, other) = (proxy.authority(), Authority::new("other"));
    proxy.announce(&[&own, &other], "2", "", 0);
    let second = proxy.changed().await.expect("the same certificate");
    let both = [own.roots().roots.clone(), other.roots().roots.clone()].concat();
    assert_eq!(
        (second.roots_version.as_str(), &second.roots.roots),
        ("2", &both)
    );
    assert!(Arc::ptr_eq(&first.certified, &second.certified));
    assert_eq!(second.status().roots_version, "2");
    proxy.announce(&[&own, &other], "2", "", 0);
    sleep(Duration::from_secs(1)).await;
    assert!(!proxy.credentials.has_changed().unwrap(), "same version");
    // Roots of the stream take precedence over the roots of the next certificate.
    assert_eq!(
        proxy
            .changed()
            .await
            .expect("another certificate")
            .roots_version,
        "2"
    );
}

#[tokio::test(start_paused = true)]
async fn renews_once_after_a_change_of_the_issuer() {
    let mut proxy = Running::start(DAY);
    proxy.changed().await.expect("a certificate");
    sleep(Duration::from_secs(1000)).await;
    let (old, other) = (proxy.authority(), Arc::new(Authority::new("other")));
    proxy.fake.set(|behaviour| {
        (behaviour.signing.authority, behaviour.signing.roots_version) = (other.clone(), "2")
    });
    proxy.announce(&[&old, &other], "2", &other.key_id(), 600);
    proxy.changed().await.expect("the new roots");
    let second = proxy
        .changed()
        .await
        .expect("a certificate of the new issuer");
    assert!(
        close(&proxy.request_times(), &[1300.0]),
        "{:?}",
        proxy.request_times()
    );
    assert_eq!(second.status().certificate_issuer, other.key_id());
    proxy.changed().await.expect("the next in its time");
    assert!(
        close(&proxy.request_times(), &[1300.0, 1300.0 + 69_120.0]),
        "{:?}",
        proxy.request_times()
    );
}

#[tokio::test(start_paused = true)]
async fn renews_at_once_if_no_root_verifies_the_certificate() {
    let mut proxy = Running::start(DAY);
    proxy.changed().await.expect("a certificate");
    sleep(Duration::from_secs(1000)).await;
    // The mesh was installed again: another root without a rotation.
    let other = Arc::new(Authority::new("other"));
    proxy.fake.set(|behaviour| {
        (behaviour.signing.authority, behaviour.signing.roots_version) = (other.clone(), "2")
    });
    proxy.announce(&[&other], "2", &other.key_id(), 600);
    let second = proxy.changed().await.expect("the new CA");
    assert!(
        close(&proxy.request_times(), &[1000.0]),
        "{:?}",
        proxy.request_times()
    );
    assert_eq!(second.status().certificate_issuer, other.key_id());
    assert_eq!(
        (second.roots_version.as_str(), second.roots.len()),
        ("2", 2),
        "peers may still have certificates of the former CA"
    );
    let third = proxy.changed().await.expect("the new roots alone");
    assert_eq!(third.roots.roots, other.roots().roots);
    assert!(Arc::ptr_eq(&second.certified, &third.certified));
    assert_eq!(proxy.request_times().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn retries_a_lagging_replica_at_the_minimum_interval() {
    let mut proxy = Running::start(DAY);
    proxy.changed().await.expect("a certificate");
    let authority = proxy.authority();
    proxy.announce(&[&authority], "1", "next issuer", 0);
    sleep(Duration::from_secs(100)).await;
    assert!(
        close(&proxy.request_times(), &[30.0, 60.0, 90.0]),
        "{:?}",
        proxy.request_times()
    );
}

#[tokio::test(start_paused = true)]
async fn retries_soon_after_roots_arrive() {
    let mut proxy = Running::start_where(DAY, |behaviour| behaviour.mode = Mode::Reject);
    sleep(Duration::from_secs(100)).await;
    let authority = proxy.authority();
    proxy.fake.set(|behaviour| behaviour.mode = Mode::Sign);
    let back = proxy.fake.now();
    proxy.announce(&[&authority], "1", "", 0);
    proxy.changed().await.expect("a certificate");
    assert!(proxy.fake.now() < back + Duration::from_millis(200));
}

#[tokio::test(start_paused = true)]
async fn debug_output_contains_no_key() {
    let mut proxy = Running::start(DAY);
    let credentials = proxy.changed().await.expect("a certificate");
    let printed = format!("{credentials:?} {:?}", proxy.credentials);
    assert!(printed.len() < 400 && printed.contains(WEB), "{printed}");
    let status = credentials.status();
    assert!(
        status.certificate_not_after - status.certificate_not_before >= 86_400
            && !status.certificate_serial.is_empty(),
        "{status:?}"
    );
}
