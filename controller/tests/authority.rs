//! The authority as replicas keep it together in a folder: one CA for all, a rotation that waits
//! for the proxies and survives restarts in each phase, an operator's hand. The proxies are
//! pretended; the stores, the tasks and the clocks are real.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use diy_mesh_controller::authority::reports::Connected;
use diy_mesh_controller::authority::rotation::Phase;
use diy_mesh_controller::authority::{
    self, AuthorityHandle, Options, Provider, Roots, TrustSender, self_signed,
};
use diy_mesh_controller::hub::Hub;
use diy_mesh_controller::index::object::{Change, Key, Kind, Object, Pod};
use diy_mesh_proto::status::Status;
use tokio::task::JoinHandle;

const DEADLINE: Duration = Duration::from_secs(40);

/// A pretended proxy: it trusts, and has a certificate of, whatever the replica that it is
/// connected to says, unless it is stuck.
#[derive(Clone, Default)]
struct Proxy {
    roots_version: String,
    issuer: String,
    stuck: bool,
}

struct Replica {
    kept: AuthorityHandle,
    hub: Hub,
    proxies: Arc<Mutex<Vec<(String, Proxy)>>>,
    task: JoinHandle<()>,
}

impl Replica {
    fn start(folder: &Path) -> Replica {
        Replica::with_lives(
            folder,
            Duration::from_secs(3600),
            Duration::from_secs(100_000),
        )
    }

    fn with_lives(folder: &Path, certificate_life: Duration, ca_life: Duration) -> Replica {
        let (hub, proxies) = (Hub::default(), Arc::new(Mutex::new(Vec::new())));
        let options = Options {
            trust_domain: "cluster.local".into(),
            certificate_life,
            ca_life,
            provider: Provider::Files(folder.to_owned()),
        };
        let connected = {
            let proxies: Arc<Mutex<Vec<(String, Proxy)>>> = proxies.clone();
            Arc::new(move || {
                proxies
                    .lock()
                    .unwrap()
                    .iter()
                    .map(|(name, proxy)| connected(name, proxy))
                    .collect()
            })
        };
        let (kept, keeping) = authority::keep(options, &hub, connected);
        hub.apply(Kind::ALL.map(|kind| Change::Reset(kind, vec![])));
        let task = tokio::spawn({
            let (kept, proxies) = (kept.clone(), proxies.clone());
            async move {
                tokio::select! {
                    () = keeping => {}
                    () = follow(kept, proxies) => {}
                }
            }
        });
        Replica {
            kept,
            hub,
            proxies,
            task,
        }
    }

    /// Connects a proxy, as it was if it was connected elsewhere before.
    fn connect(&self, name: &str, proxy: Proxy) {
        self.proxies.lock().unwrap().push((name.to_owned(), proxy));
    }

    fn disconnect(&self, name: &str) -> Proxy {
        let mut proxies = self.proxies.lock().unwrap();
        let position = proxies
            .iter()
            .position(|(candidate, _)| candidate == name)
            .unwrap();
        proxies.remove(position).1
    }

    /// The catalog has these pods, ready and meshed.
    fn knows(&self, pods: &[&str]) {
        self.hub.apply(pods.iter().map(|name| {
            Change::Apply(Object::Pod(Pod {
                bypassed: Vec::new(),
                opaque_ports: Box::default(),
                key: Key::new("shop", name),
                uid: (*name).into(),
                addresses: vec![],
                terminating: false,
                ready: true,
                created: 0,
                zone: "".into(),
                identity: Some("spiffe://cluster.local/ns/shop/sa/web".into()),
            }))
        }));
    }

    async fn authority(&self) -> TrustSender {
        tokio::time::timeout(DEADLINE, self.kept.loaded())
            .await
            .unwrap()
            .unwrap()
    }

    async fn roots(&self) -> Arc<Roots> {
        self.authority().await.borrow().roots.clone()
    }

    async fn issuer(&self) -> String {
        self.authority().await.borrow().issuer.id().to_owned()
    }

    async fn until(&self, what: &str, condition: impl Fn(&Status) -> bool) -> Status {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let status = self.kept.status();
            if condition(&status) {
                return status;
            }
            assert!(Instant::now() < deadline, "never {what}: {status:#?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn until_phase(&self, phase: Phase) -> Status {
        self.until(phase.name(), |status| {
            status.issuer.is_some() && status.rotation.phase == phase.name()
        })
        .await
    }

    /// As a process that is killed.
    async fn kill(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }
}

fn connected(name: &str, proxy: &Proxy) -> Connected {
    let pod = Some(("shop".to_owned(), name.to_owned(), name.to_owned()));
    Connected {
        pod,
        user: String::new(),
        roots_version: proxy.roots_version.clone(),
        issuer: proxy.issuer.clone(),
    }
}

async fn follow(kept: AuthorityHandle, proxies: Arc<Mutex<Vec<(String, Proxy)>>>) {
    let Some(authority) = kept.loaded().await else {
        return;
    };
    loop {
        let trust = authority.borrow().clone();
        for (_, proxy) in proxies
            .lock()
            .unwrap()
            .iter_mut()
            .filter(|(_, proxy)| !proxy.stuck)
        {
            (proxy.roots_version, proxy.issuer) =
                (trust.roots.version.clone(), trust.issuer.id().to_owned());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn request(folder: &Path, what: &str) {
    write(folder, "request", what);
}

fn write(folder: &Path, name: &str, text: &str) {
    let hidden = folder.join(format!(".new-{name}"));
    std::fs::write(&hidden, text).unwrap();
    std::fs::rename(hidden, folder.join(name)).unwrap();
}

async fn until_published(folder: &Path, roots: &Roots) {
    let deadline = Instant::now() + DEADLINE;
    while std::fs::read_to_string(folder.join("roots.pem"))
        .ok()
        .as_ref()
        != Some(&roots.pem)
    {
        assert!(Instant::now() < deadline, "the roots are never published");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn folder() -> (tempfile::TempDir, PathBuf) {
    let dir = support::scratch();
    let path = dir.path().to_owned();
    (dir, path)
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_that_start_at_the_same_moment_share_one_ca_and_publish_it() {
    let (_dir, folder) = folder();
    let replicas: Vec<Replica> = (0..5).map(|_| Replica::start(&folder)).collect();
    let roots = replicas[0].roots().await;
    for replica in &replicas {
        assert_eq!(replica.roots().await, roots);
        assert_eq!(replica.issuer().await, replicas[0].issuer().await);
    }
    until_published(&folder, &roots).await;
    // Edited by somebody: put right.
    write(&folder, "roots.pem", "edited");
    until_published(&folder, &roots).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rotation_waits_for_every_proxy_on_every_replica_and_survives_restarts_in_each_phase() {
    let (_dir, folder) = folder();
    let (one, two) = (Replica::start(&folder), Replica::start(&folder));
    let (old_roots, old_issuer) = (one.roots().await, one.issuer().await);
    one.connect("a", Proxy::default());
    two.connect("b", Proxy::default());
    for replica in [&one, &two] {
        replica.knows(&["a", "b"]);
    }
    two.until("both replicas report", |status| status.replicas.len() == 2)
        .await;
    two.proxies.lock().unwrap()[0].1.stuck = true;

    request(&folder, "start\n");
    let told = one
        .until("waiting for b", |status| {
            status.rotation.waiting == ["proxy shop/b to trust the current roots"]
        })
        .await;
    assert_eq!(
        (told.rotation.phase.as_str(), told.rotation.answer.as_str()),
        ("announcing", "granted: a new root is announced")
    );
    assert!(!folder.join("request").exists());
    assert_eq!(
        (one.roots().await.certificates.len(), one.issuer().await),
        (2, old_issuer.clone())
    );

    // The replica of the stuck proxy restarts: the silence of its proxy is no consent.
    let b = two.disconnect("b");
    two.kill().await;
    let two = Replica::start(&folder);
    two.knows(&["a", "b"]);
    let absent = |status: &Status| {
        status
            .rotation
            .waiting
            .contains(&"pod shop/b to connect to the controller".to_owned())
    };
    two.until("b missed", absent).await;
    assert_eq!(two.issuer().await, old_issuer);
    // It comes back to the other replica, and takes the roots; not yet its certificate, later.
    one.connect("b", Proxy { stuck: false, ..b });
    one.until_phase(Phase::Switched).await;
    let a = one.proxies.lock().unwrap()[0].1.clone();
    one.proxies.lock().unwrap()[1].1 = Proxy {
        issuer: old_issuer.clone(),
        stuck: true,
        ..a
    };
    let waiting = one
        .until("waiting for b's certificate", |status| {
            status
                .rotation
                .waiting
                .iter()
                .any(|line| line.contains("shop/b"))
        })
        .await;
    assert!(
        waiting
            .rotation
            .waiting
            .contains(&"proxy shop/b to renew its certificate".to_owned()),
        "{waiting:?}"
    );
    let new_issuer = one.issuer().await;
    assert_ne!(new_issuer, old_issuer);

    // Both restart, in this phase too.
    let (a, b) = (one.disconnect("a"), one.disconnect("b"));
    one.kill().await;
    two.kill().await;
    let (one, two) = (Replica::start(&folder), Replica::start(&folder));
    for replica in [&one, &two] {
        replica.knows(&["a", "b"]);
    }
    assert_eq!(
        (one.issuer().await, one.roots().await.certificates.len()),
        (new_issuer.clone(), 2)
    );
    one.connect("a", a);
    two.connect("b", Proxy { stuck: false, ..b });
    for replica in [&one, &two] {
        replica.until_phase(Phase::Steady).await;
        assert_eq!(
            (
                replica.issuer().await,
                replica.roots().await.certificates.len()
            ),
            (new_issuer.clone(), 1)
        );
    }
    assert_ne!(one.roots().await.version, old_roots.version);
    until_published(&folder, &*one.roots().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_abandoned_rotation_leaves_everything_as_it_was() {
    let (_dir, folder) = folder();
    let one = Replica::start(&folder);
    let roots = one.roots().await;
    one.connect(
        "a",
        Proxy {
            stuck: true,
            ..Proxy::default()
        },
    );
    request(&folder, "start");
    one.until_phase(Phase::Announcing).await;
    request(&folder, "abandon");
    let status = one.until_phase(Phase::Steady).await;
    assert_eq!(status.rotation.answer, "granted: the next root is dropped");
    assert_eq!(one.roots().await, roots);
    request(&folder, "dance");
    one.until("the answer", |status| {
        status.rotation.answer.contains("\"dance\" is no request")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ca_of_seconds_is_rotated_by_itself() {
    let (_dir, folder) = folder();
    let one = Replica::with_lives(&folder, Duration::from_secs(10), Duration::from_secs(15));
    let roots = one.roots().await;
    one.connect("a", Proxy::default());
    one.knows(&["a"]);
    one.until_phase(Phase::Switched).await;
    one.until_phase(Phase::Steady).await;
    assert_ne!(one.roots().await, roots);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_ca_is_refused_and_used_once_it_is_repaired() {
    let (_dir, folder) = folder();
    let (certificate, key) = self_signed(
        "cluster.local",
        std::time::SystemTime::now(),
        Duration::from_secs(3600),
    )
    .unwrap();
    write(&folder, "tls.crt", &certificate);
    let one = Replica::start(&folder);
    one.until("a refusal", |status| {
        status
            .problem
            .as_ref()
            .is_some_and(|problem| problem.contains("tls.key is missing"))
    })
    .await;
    assert!(
        one.kept
            .unavailable()
            .is_some_and(|reason| reason.contains("tls.key is missing"))
    );
    assert!(!folder.join("tls.key").exists(), "it is never replaced");
    write(&folder, "tls.key", &key);
    assert_eq!(
        one.roots().await.pem,
        Roots::from_pem(&certificate).unwrap().pem
    );
    assert_eq!(one.kept.unavailable(), None);

    // Once one is in use, a broken one changes nothing.
    let roots = one.roots().await;
    write(&folder, "tls.crt", "broken");
    one.until("a refusal", |status| status.problem.is_some())
        .await;
    assert_eq!((one.roots().await, one.kept.unavailable()), (roots, None));
    write(&folder, "tls.crt", &certificate);
    one.until("it is well", |status| status.problem.is_none())
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_emptied_is_filled_again_with_what_is_in_force() {
    let (_dir, folder) = folder();
    let one = Replica::start(&folder);
    let before = one.roots().await;
    for name in ["tls.crt", "tls.key", "rotation.json"] {
        std::fs::remove_file(folder.join(name)).unwrap();
    }
    let deadline = Instant::now() + DEADLINE;
    while !folder.join("tls.key").exists() {
        assert!(Instant::now() < deadline, "it is never filled");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let two = Replica::start(&folder);
    assert_eq!(
        (one.roots().await, two.roots().await),
        (before.clone(), before)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ca_replaced_by_an_operator_is_used_once_all_proxies_trust_it() {
    let (_dir, folder) = folder();
    let (one, two) = (Replica::start(&folder), Replica::start(&folder));
    let old_issuer = one.issuer().await;
    assert_eq!(two.issuer().await, old_issuer);
    one.connect(
        "a",
        Proxy {
            stuck: true,
            ..Proxy::default()
        },
    );
    let theirs = rcgen_ca();
    write(&folder, "tls.key", &theirs.1);
    write(&folder, "tls.crt", &theirs.0);
    two.until_phase(Phase::Adopting).await;
    one.until("waiting for a", |status| {
        status.rotation.waiting == ["proxy shop/a to trust the current roots"]
    })
    .await;
    for replica in [&one, &two] {
        assert_eq!(
            (
                replica.issuer().await,
                replica.roots().await.certificates.len()
            ),
            (old_issuer.clone(), 2)
        );
    }
    one.proxies.lock().unwrap()[0].1.stuck = false;
    for replica in [&one, &two] {
        let status = replica.until_phase(Phase::Steady).await;
        assert!(!status.issuer.unwrap().own);
        assert_eq!(
            replica.roots().await.pem,
            Roots::from_pem(&theirs.0).unwrap().pem
        );
        assert_ne!(replica.issuer().await, old_issuer);
    }
}

/// An operator's CA.
fn rcgen_ca() -> (String, String) {
    let mut params = rcgen::CertificateParams::default();
    params
        .distinguished_name
        .push(rcgen::DnType::CommonName, "an operator's");
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign];
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
    (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
}
