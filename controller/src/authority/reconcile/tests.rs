//! Replicas with wrong clocks over a whole rotation: tasks and decisions are real, the store and all
//! clocks are simulated.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::SystemTime;

use futures::Stream;
use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::{CertificateDer, UnixTime};
use tokio::task::JoinHandle;

use super::super::state::Fields;
use super::super::testing::start;
use super::*;
use crate::catalog::Change;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: i64 = 3600;
const SKEWS: [i64; 6] = [
    HOUR,
    -HOUR,
    24 * HOUR,
    -24 * HOUR,
    30 * 24 * HOUR,
    -30 * 24 * HOUR,
];
/// The lifetime of CAs, in minutes.
const CA_LIFE: u32 = 6 * 60;
/// Time between two checks, in minutes.
const STEP: u32 = 5;

/// A clock with a skew in seconds.
#[derive(Clone, Copy)]
struct SkewedClock {
    begun: Instant,
    skew: i64,
}

impl SkewedClock {
    fn now(self) -> SystemTime {
        let skew = Duration::from_secs(self.skew.unsigned_abs());
        let right = start() + self.begun.elapsed();
        if self.skew < 0 {
            right - skew
        } else {
            right + skew
        }
    }
}

/// A store in memory, whose server has a clock. Clones share the content.
#[derive(Clone)]
struct SimulatedStore {
    server: Option<SkewedClock>,
    content: Arc<Mutex<Content>>,
    changes: watch::Sender<u64>,
}

#[derive(Default)]
struct Content {
    fields: Fields,
    reports: BTreeMap<String, String>,
    is_unreadable: bool,
    /// The certificates that were in tls.crt.
    cas: BTreeSet<Vec<u8>>,
}

impl Content {
    fn replace(&mut self, fields: Fields) {
        self.cas.insert(fields["tls.crt"].clone());
        self.fields = fields;
    }
}

impl SimulatedStore {
    fn with_ca(server: Option<SkewedClock>) -> SimulatedStore {
        let ca = CaState::generate("cluster.local", start(), CA_LIFE * MINUTE).unwrap();
        let store = SimulatedStore {
            server,
            content: Arc::default(),
            changes: watch::Sender::new(1),
        };
        store.content.lock().unwrap().replace(ca.write());
        store
    }
}

impl Store for SimulatedStore {
    fn place(&self) -> String {
        "the simulated store".to_owned()
    }

    async fn read(&self) -> Result<Option<Stored>, StoreError> {
        if self.content.lock().unwrap().is_unreadable {
            let error = std::io::Error::other("it is broken");
            return Err(StoreError::File("ca".into(), error));
        }
        let version = self.changes.borrow().to_string();
        Ok(Some(Stored {
            fields: self.content.lock().unwrap().fields.clone(),
            request: None,
            version,
        }))
    }

    async fn date(&self) -> Option<SystemTime> {
        self.server.map(SkewedClock::now)
    }

    async fn traces(&self) -> Result<Vec<String>, StoreError> {
        Ok(Vec::new())
    }

    async fn write(&self, fields: &Fields, before: Option<&Stored>) -> Result<Written, StoreError> {
        let version = self.changes.borrow().to_string();
        if before.is_none_or(|before| before.version != version) {
            return Ok(Written::Conflict);
        }
        self.content.lock().unwrap().replace(fields.clone());
        self.changes.send_modify(|version| *version += 1);
        Ok(Written::Done)
    }

    fn changes(&self) -> impl Stream<Item = ()> + Send {
        let changes = self.changes.subscribe();
        futures::stream::unfold(changes, async |mut changes| {
            changes.changed().await.ok().map(|()| ((), changes))
        })
    }

    async fn reports(&self) -> Result<BTreeMap<String, String>, StoreError> {
        Ok(self.content.lock().unwrap().reports.clone())
    }

    async fn report(&self, replica: &str, report: Option<&str>) -> Result<(), StoreError> {
        let reports = &mut self.content.lock().unwrap().reports;
        reports.remove(replica);
        reports.extend(report.map(|report| (replica.to_owned(), report.to_owned())));
        Ok(())
    }
}

struct Replica {
    skew: i64,
    clock: Clock,
    stopping: CancellationToken,
    trust: watch::Receiver<Option<TrustSender>>,
    task: JoinHandle<()>,
}

impl Replica {
    fn start(number: usize, own: SkewedClock, store: &SimulatedStore) -> Replica {
        let hub = Hub::default();
        hub.apply(Kind::ALL.map(|kind| Change::Reset(kind, vec![])));
        let (trust, clock) = (watch::Sender::default(), Clock::new(move || own.now()));
        let loaded = trust.subscribe();
        let stopping = CancellationToken::new();
        let (sender, published) = watch::channel(PublishStatus::default());
        // The roots are published everywhere at once.
        let publish = async move |mut loaded: watch::Receiver<Option<TrustSender>>| {
            let trust = loaded.wait_for(Option::is_some).await.unwrap().clone();
            let mut trust = trust.unwrap().subscribe();
            loop {
                let version = trust.borrow_and_update().roots.version.clone();
                sender.send_modify(|published| published.version = version);
                if trust.changed().await.is_err() {
                    return;
                }
            }
        };
        let reconciler = Reconciler {
            store: Arc::new(store.clone()),
            policy: RotationPolicy {
                trust_domain: "cluster.local".into(),
                ca_life: CA_LIFE * MINUTE,
                leaf_life: 30 * MINUTE,
                settle: Duration::ZERO,
            },
            replica: format!("replica-{number}-a"),
            clock: clock.clone(),
            hub,
            proxies: Proxies::default(),
            published,
            stopping: stopping.clone(),
            trust,
            status: StatusSender::new("here", "replica"),
        };
        let following = loaded.clone();
        Replica {
            skew: own.skew,
            clock,
            stopping,
            trust: loaded,
            task: tokio::spawn(async move {
                tokio::join!(reconciler.run(), publish(following));
            }),
        }
    }

    fn trust(&self) -> Option<Arc<Trust>> {
        let trust = self.trust.borrow();
        trust.as_ref().map(|trust| trust.borrow().clone())
    }
}

/// Runs replicas with skewed clocks for longer than the lifetime of a CA, and checks again and again
/// that every replica with a right clock can sign, and that all of these trust what it signs. Returns
/// the number of CAs.
async fn count_cas(skews: &[i64], server: Option<i64>) -> usize {
    let begun = Instant::now();
    let clock = |skew| SkewedClock { begun, skew };
    let store = SimulatedStore::with_ca(server.map(clock));
    let replicas = skews.iter().enumerate();
    let replicas = replicas.map(|(number, skew)| Replica::start(number, clock(*skew), &store));
    let replicas = Vec::from_iter(replicas);
    for minute in (STEP..CA_LIFE + 30).step_by(STEP as usize) {
        tokio::time::sleep(STEP * MINUTE).await;
        let now = clock(0).now();
        let context = format!("{skews:?}, API server {server:?}, minute {minute}");
        let right = replicas.iter().filter(|replica| replica.skew == 0);
        let trusts = right.map(|replica| {
            assert_eq!(replica.clock.error(), None, "{context}");
            replica
                .trust()
                .unwrap_or_else(|| panic!("no CA: {context}"))
        });
        let trusts = Vec::from_iter(trusts);
        let state = CaState::read(&store.content.lock().unwrap().fields, now);
        let state = state.unwrap_or_else(|error| panic!("{error}: {context}"));
        let signer = state.signer().certificate();
        // With two clocks, the clock of the API server counts.
        let is_begun = skews.len() == 1 || signer.not_before <= now;
        let is_valid = is_begun && now < signer.not_after;
        assert!(is_valid, "{signer:?} at {now:?}: {context}");
        for trust in &trusts {
            let name = [String::from("controller")];
            let leaf = trust.issuer.sign_serving(None, &name, &[], now, MINUTE);
            let leaf = leaf.unwrap_or_else(|error| panic!("{error}: {context}"));
            for other in &trusts {
                assert!(accepts(&other.roots, &leaf.chain[0], now), "{context}");
            }
        }
        for replica in replicas.iter().filter(|replica| replica.skew != 0) {
            let error = replica.clock.error();
            assert!(error.is_some(), "replica of {}: {context}", replica.skew);
        }
    }
    for replica in replicas {
        replica.task.abort();
    }
    store.content.lock().unwrap().cas.len()
}

/// Whether a client with these roots accepts a certificate.
fn accepts(roots: &Roots, leaf: &CertificateDer<'_>, now: SystemTime) -> bool {
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(roots.certificates.iter().cloned());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(store.into(), provider);
    let verifier = verifier.build().unwrap();
    let name = "controller".try_into().unwrap();
    let now = UnixTime::since_unix_epoch(Duration::from_secs(seconds(now)));
    let verified = verifier.verify_server_cert(leaf, &[], &name, &[], now);
    verified.is_ok()
}

#[tokio::test(start_paused = true)]
async fn replica_with_a_wrong_clock_does_not_change_a_rotation() {
    for skew in SKEWS {
        assert_eq!(count_cas(&[0, skew], Some(0)).await, 2, "{skew}");
    }
    assert_eq!(count_cas(&[0, 0, -24 * HOUR], Some(0)).await, 2);
    // In a folder, the API server has no clock.
    assert_eq!(count_cas(&[0, 0, 24 * HOUR], None).await, 2);
}

#[tokio::test(start_paused = true)]
async fn api_server_with_a_wrong_clock_does_not_change_a_rotation() {
    for skew in SKEWS {
        assert_eq!(count_cas(&[0, 0], Some(skew)).await, 2, "{skew}");
    }
}

#[tokio::test(start_paused = true)]
async fn one_right_replica_of_three_and_the_api_server_rotate_the_ca() {
    for skew in SKEWS {
        assert_eq!(count_cas(&[0, skew, skew], Some(0)).await, 2, "{skew}");
    }
    assert_eq!(count_cas(&[0, HOUR, -HOUR], Some(0)).await, 2);
}

#[tokio::test(start_paused = true)]
async fn two_clocks_that_disagree_rotate_late() {
    assert_eq!(count_cas(&[0], Some(HOUR)).await, 2);
    assert_eq!(count_cas(&[0], Some(-HOUR / 2)).await, 2);
}

#[tokio::test(start_paused = true)]
async fn reports_go_on_while_the_ca_cannot_be_read() {
    let begun = Instant::now();
    let store = SimulatedStore::with_ca(None);
    let replica = Replica::start(0, SkewedClock { begun, skew: 0 }, &store);
    tokio::time::sleep(MINUTE).await;
    store.content.lock().unwrap().is_unreadable = true;
    for _ in 0..10 {
        tokio::time::sleep(MINUTE / 2).await;
        let reports = store.content.lock().unwrap().reports.clone();
        let report: Report = serde_json::from_str(&reports["replica-0-a"]).unwrap();
        let age = (SkewedClock { begun, skew: 0 }).now();
        let age = seconds(age) - report.beat;
        assert!(age < 12, "{age} s");
    }
    replica.task.abort();
}

#[tokio::test(start_paused = true)]
async fn replica_that_stops_tells_the_others_to_count_its_proxies_no_longer() {
    let begun = Instant::now();
    let store = SimulatedStore::with_ca(None);
    let replica = Replica::start(0, SkewedClock { begun, skew: 0 }, &store);
    let reported = || {
        let reports = store.content.lock().unwrap().reports.clone();
        let report: Report = serde_json::from_str(&reports["replica-0-a"]).unwrap();
        (report.beat, !report.programmed.is_null())
    };
    tokio::time::sleep(MINUTE).await;
    let (beat, is_counted) = reported();
    assert!(is_counted);
    replica.stopping.cancel();
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert!(!reported().1, "at once");
    tokio::time::sleep(MINUTE).await;
    let (later, is_counted) = reported();
    assert!(
        later >= beat + 50 && !is_counted,
        "it reports until it ends"
    );
    replica.task.abort();
}
