//! The keeping of the credentials, against a controller that is a few lines of the test. Time stands still but for what the task
//! waits for, and the wall clock goes with it: whole days pass at once.

use std::sync::Mutex;
use std::time::Duration;

use diy_mesh_proto::mesh::v1::{self as proto, SignCertificateRequest, SignCertificateResponse};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tonic::Status;

use super::renewal::{Renewal, World};
use super::testing::{Authority, WEB, token};
use super::*;
use crate::control::ControlError;
use crate::control::testing::Signing;

const DAY: Duration = Duration::from_secs(86_400);

/// A controller and a clock.
#[derive(Clone)]
struct Fake(Arc<FakeState>);

struct FakeState {
    started: (SystemTime, Instant),
    plan: Mutex<Plan>,
    /// When somebody asked.
    asked: Mutex<Vec<Instant>>,
}

/// What the controller does.
struct Plan {
    signing: Signing,
    user: &'static str,
    mood: Mood,
}

#[derive(Clone, Copy, PartialEq)]
enum Mood {
    Signs,
    Refuses,
    Hangs,
}

impl World for Fake {
    fn now(&self) -> SystemTime {
        self.0.started.0 + self.0.started.1.elapsed()
    }

    fn random(&mut self) -> f64 {
        0.5
    }

    async fn token(&self) -> Result<String, ControlError> {
        Ok(token(self.0.plan.lock().unwrap().user))
    }

    async fn sign(
        &self,
        request: SignCertificateRequest,
    ) -> Result<SignCertificateResponse, ControlError> {
        self.0.asked.lock().unwrap().push(Instant::now());
        let mood = self.0.plan.lock().unwrap().mood;
        match mood {
            Mood::Signs => Ok(self.answer(&request)),
            Mood::Refuses => Err(ControlError::Refused(Status::unavailable("later"))),
            Mood::Hangs => std::future::pending().await,
        }
    }
}

impl Fake {
    fn answer(&self, request: &SignCertificateRequest) -> SignCertificateResponse {
        self.0
            .plan
            .lock()
            .unwrap()
            .signing
            .answer(request, self.now())
    }

    fn plan(&self, change: impl FnOnce(&mut Plan)) {
        change(&mut self.0.plan.lock().unwrap());
    }
}

/// A proxy's keeping of its credentials that runs.
struct Running {
    fake: Fake,
    trust: Trust,
    metrics: IdentityMetrics,
    credentials: CurrentCredentials,
    _task: JoinSet<()>,
}

impl Running {
    fn start(life: Duration) -> Self {
        Self::start_where(life, |_| {})
    }

    fn start_where(life: Duration, change: impl FnOnce(&mut Plan)) -> Self {
        let user = "system:serviceaccount:shop:web";
        let signing = Signing {
            authority: Arc::new(Authority::new("one")),
            life,
            roots_version: "1",
        };
        let mut plan = Plan {
            signing,
            user,
            mood: Mood::Signs,
        };
        change(&mut plan);
        // In whole seconds, as certificates have it: what is measured below is then what was planned.
        let now = UNIX_EPOCH
            + Duration::from_secs(
                SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .unwrap()
                    .as_secs(),
            );
        let state = FakeState {
            started: (now, Instant::now()),
            plan: Mutex::new(plan),
            asked: Mutex::default(),
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

    /// The seconds between the first question and each further one.
    fn asked_at(&self) -> Vec<f64> {
        let asked = self.fake.0.asked.lock().unwrap();
        asked
            .iter()
            .skip(1)
            .map(|at| (*at - asked[0]).as_secs_f64())
            .collect()
    }

    /// The controller says over the stream whom to trust and who signs.
    fn announce(
        &self,
        authority: &Authority,
        version: &str,
        issuer: &str,
        renew_within_seconds: u32,
    ) {
        let roots = proto::Roots {
            pem: authority.pem().into_bytes(),
            issuer: issuer.to_owned(),
            renew_within_seconds,
        };
        self.trust
            .announce(Roots::announced(roots, version).unwrap());
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
async fn the_first_certificate_comes_at_once_and_the_next_in_time_each_with_its_own_key() {
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
        close(&proxy.asked_at(), &[69_120.0, 138_240.0]),
        "{:?}",
        proxy.asked_at()
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
async fn short_lives_are_renewed_likewise() {
    let mut proxy = Running::start(Duration::from_secs(10));
    for _ in 0..4 {
        proxy.changed().await.expect("a certificate");
    }
    let asked = proxy.asked_at();
    // A certificate's end has no fractions of a second: lives are up to a second shorter than asked for.
    let mut before = 0.0;
    for at in asked {
        let pause: f64 = at - before;
        assert!((7.0..=8.01).contains(&pause), "{pause}");
        before = at;
    }
    assert!(proxy.credentials.borrow().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_waits_for_its_first_certificate_asks_often_and_then_less_so() {
    let mut proxy = Running::start_where(DAY, |plan| plan.mood = Mood::Refuses);
    sleep(Duration::from_secs(20)).await;
    assert!(
        close(
            &proxy.asked_at(),
            &[0.15, 0.45, 1.05, 2.25, 4.65, 9.45, 16.95]
        ),
        "{:?}",
        proxy.asked_at()
    );
    assert!(proxy.credentials.borrow().is_none());
    proxy.fake.plan(|plan| plan.mood = Mood::Signs);
    assert!(proxy.changed().await.is_some());
}

#[tokio::test(start_paused = true)]
async fn the_old_certificate_serves_to_its_end_and_then_there_is_none_until_the_controller_is_back()
{
    let mut proxy = Running::start(DAY);
    let first = proxy.changed().await.expect("a certificate");
    proxy.fake.plan(|plan| plan.mood = Mood::Refuses);
    assert!(proxy.changed().await.is_none(), "closed, not open");
    let now = proxy.fake.now();
    assert!(
        now >= first.not_after && now < first.not_after + Duration::from_secs(1),
        "not before its end, and not after"
    );
    let tries = proxy.asked_at();
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
    proxy.fake.plan(|plan| plan.mood = Mood::Signs);
    assert!(proxy.changed().await.is_some());
}

#[tokio::test(start_paused = true)]
async fn a_certificate_ends_in_time_also_while_the_controller_keeps_the_next_one_back() {
    let mut proxy = Running::start(Duration::from_secs(60));
    let first = proxy.changed().await.expect("a certificate");
    proxy.fake.plan(|plan| plan.mood = Mood::Hangs);
    assert!(proxy.changed().await.is_none());
    assert!(proxy.fake.now() < first.not_after + Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_was_not_asked_for_is_no_certificate() {
    let proxy = Running::start_where(DAY, |plan| plan.user = "system:serviceaccount:shop:cart");
    sleep(Duration::from_secs(1)).await;
    assert!(
        proxy.credentials.borrow().is_none() && proxy.metrics.failures.get() > 1,
        "it is signed for another workload"
    );
}

#[tokio::test(start_paused = true)]
async fn new_roots_are_taken_at_once_with_the_same_certificate() {
    let mut proxy = Running::start(DAY);
    let first = proxy.changed().await.expect("a certificate");
    let other = Authority::new("other");
    proxy.announce(&other, "2", "", 0);
    let second = proxy.changed().await.expect("the same certificate");
    assert_eq!(
        (second.roots_version.as_str(), &second.roots.roots),
        ("2", &other.roots().roots)
    );
    assert!(Arc::ptr_eq(&first.certified, &second.certified));
    assert_eq!(second.status().roots_version, "2");
    proxy.announce(&other, "2", "", 0);
    sleep(Duration::from_secs(1)).await;
    assert!(
        !proxy.credentials.has_changed().unwrap(),
        "equal versions, equal sets"
    );
    // The stream's word goes before what comes with the next certificate.
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
async fn a_new_issuer_is_gone_to_within_the_time_given_and_not_again() {
    let mut proxy = Running::start(DAY);
    proxy.changed().await.expect("a certificate");
    sleep(Duration::from_secs(1000)).await;
    let other = Arc::new(Authority::new("other"));
    proxy
        .fake
        .plan(|plan| (plan.signing.authority, plan.signing.roots_version) = (other.clone(), "2"));
    proxy.announce(&other, "2", &other.key_id(), 600);
    proxy.changed().await.expect("the new roots");
    let second = proxy
        .changed()
        .await
        .expect("a certificate of the new issuer");
    assert!(
        close(&proxy.asked_at(), &[1300.0]),
        "{:?}",
        proxy.asked_at()
    );
    assert_eq!(second.status().certificate_issuer, other.key_id());
    proxy.changed().await.expect("the next in its time");
    assert!(
        close(&proxy.asked_at(), &[1300.0, 1300.0 + 69_120.0]),
        "{:?}",
        proxy.asked_at()
    );
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_lags_behind_is_asked_again_without_haste() {
    let mut proxy = Running::start(DAY);
    proxy.changed().await.expect("a certificate");
    let authority = proxy.fake.0.plan.lock().unwrap().signing.authority.clone();
    proxy.announce(&authority, "1", "the one that is to sign from now on", 0);
    sleep(Duration::from_secs(100)).await;
    assert!(
        close(&proxy.asked_at(), &[30.0, 60.0, 90.0]),
        "{:?}",
        proxy.asked_at()
    );
}

#[tokio::test(start_paused = true)]
async fn when_the_controller_is_back_a_pod_that_waits_asks_soon() {
    let mut proxy = Running::start_where(DAY, |plan| plan.mood = Mood::Refuses);
    sleep(Duration::from_secs(100)).await;
    let authority = proxy.fake.0.plan.lock().unwrap().signing.authority.clone();
    proxy.fake.plan(|plan| plan.mood = Mood::Signs);
    let back = proxy.fake.now();
    proxy.announce(&authority, "1", "", 0);
    proxy.changed().await.expect("a certificate");
    assert!(proxy.fake.now() < back + Duration::from_millis(200));
}

#[tokio::test(start_paused = true)]
async fn nothing_that_is_printed_holds_a_key() {
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
