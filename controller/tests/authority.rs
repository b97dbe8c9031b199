//! The authority of several replicas with a shared folder: one CA, rotations that wait for proxies
//! and survive restarts, CAs of operators. The proxies are simulated; stores, tasks and clocks are
//! real.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use diy_mesh_controller::authenticate::Caller;
use diy_mesh_controller::authority::state::Phase;
use diy_mesh_controller::authority::status::Status;
use diy_mesh_controller::authority::{
    self, AuthorityHandle, Options, Roots, Storage, TrustSender, self_signed,
};
use diy_mesh_controller::catalog::Change;
use diy_mesh_controller::kinds::{Object, Pod};
use diy_mesh_controller::object::{Key, Kind, PodRef};
use diy_mesh_controller::proxies::{ConnectedGuard, Proxies};
use diy_mesh_controller::publish::Hub;
use diy_mesh_proto::mesh::v1::ProxyStatus;
use diy_mesh_testkit::authority::ca;
use diy_mesh_testkit::wait::{eventually, soon};
use tokio::task::JoinHandle;

/// A simulated proxy. Unless it is stuck, it has the roots and a certificate of its replica.
#[derive(Clone, Default)]
struct Proxy {
    roots_version: String,
    issuer: String,
    stuck: bool,
}

impl Proxy {
    fn status(&self) -> ProxyStatus {
        ProxyStatus {
            roots_version: self.roots_version.clone(),
            certificate_issuer: self.issuer.clone(),
            ..ProxyStatus::default()
        }
    }
}

struct Connected {
    name: String,
    proxy: Proxy,
    guard: ConnectedGuard,
}

struct Replica {
    authority: AuthorityHandle,
    hub: Hub,
    registry: Proxies,
    proxies: Arc<Mutex<Vec<Connected>>>,
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
        let (hub, registry) = (Hub::default(), Proxies::default());
        let options = Options {
            trust_domain: "cluster.local".into(),
            certificate_life,
            ca_life,
            clock: Default::default(),
            stopping: Default::default(),
            storage: Storage::Files(folder.to_owned()),
        };
        let (authority, run) = authority::start(options, &hub, registry.clone());
        hub.apply(Kind::ALL.map(|kind| Change::Reset(kind, vec![])));
        let proxies: Arc<Mutex<Vec<Connected>>> = Arc::default();
        let follow = follow(authority.clone(), proxies.clone());
        let task = tokio::spawn(async move {
            tokio::select! {
                () = run => {}
                () = follow => {}
            }
        });
        Replica {
            authority,
            hub,
            registry,
            proxies,
            task,
        }
    }

    /// Connects a proxy in the state of its previous connection.
    fn connect(&self, name: &str, proxy: Proxy) {
        let pod = Some(PodRef {
            namespace: "shop".into(),
            name: name.into(),
            uid: name.into(),
        });
        self.connect_as(pod, name, proxy);
    }

    fn connect_as(&self, pod: Option<PodRef>, name: &str, proxy: Proxy) {
        let caller = Caller {
            user: "user".into(),
            pod,
        };
        let guard = self.registry.connect(&caller, SystemTime::now());
        guard.update(proxy.status(), 0);
        let name = name.to_owned();
        self.proxies
            .lock()
            .unwrap()
            .push(Connected { name, proxy, guard });
    }

    fn disconnect(&self, name: &str) -> Proxy {
        let mut proxies = self.proxies.lock().unwrap();
        let position = proxies.iter().position(|proxy| proxy.name == name);
        proxies.remove(position.unwrap()).proxy
    }

    fn change(&self, name: &str, change: impl FnOnce(&mut Proxy)) {
        let mut proxies = self.proxies.lock().unwrap();
        let connected = proxies.iter_mut().find(|proxy| proxy.name == name).unwrap();
        change(&mut connected.proxy);
        connected.guard.update(connected.proxy.status(), 0);
    }

    /// The catalog has these pods, ready and meshed.
    fn knows(&self, pods: &[&str]) {
        self.hub.apply(pods.iter().map(|name| {
            Change::Apply(Object::Pod(Pod {
                bypassed: Default::default(),
                restricts_udp: false,
                inbound: Default::default(),
                labels: Default::default(),
                key: Key::new("shop", name),
                uid: (*name).into(),
                addresses: vec![],
                host_network: false,
                terminating: false,
                ready: true,
                unready_by_node: false,
                created: 0,
                node: "".into(),
                zone: "".into(),
                identity: Some("spiffe://cluster.local/ns/shop/sa/web".into()),
            }))
        }));
    }

    async fn trust(&self) -> TrustSender {
        soon(self.authority.loaded()).await.unwrap()
    }

    async fn roots(&self) -> Arc<Roots> {
        self.trust().await.borrow().roots.clone()
    }

    async fn issuer(&self) -> String {
        self.trust().await.borrow().issuer.id().to_owned()
    }

    async fn until(&self, what: &str, condition: impl Fn(&Status) -> bool) -> Status {
        eventually(what, async || {
            let status = self.authority.status();
            if condition(&status) {
                Ok(status)
            } else {
                Err(status)
            }
        })
        .await
    }

    async fn until_problem(&self, problem: &str) {
        let has = |status: &Status| {
            status
                .problem
                .as_ref()
                .is_some_and(|text| text.contains(problem))
        };
        self.until(problem, has).await;
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

async fn follow(authority: AuthorityHandle, proxies: Arc<Mutex<Vec<Connected>>>) {
    let Some(trust) = authority.loaded().await else {
        return;
    };
    loop {
        let trust = trust.borrow().clone();
        let is_following = |one: &&mut Connected| !one.proxy.stuck;
        for Connected { proxy, guard, .. } in
            proxies.lock().unwrap().iter_mut().filter(is_following)
        {
            proxy.roots_version.clone_from(&trust.roots.version);
            trust.issuer.id().clone_into(&mut proxy.issuer);
            guard.update(proxy.status(), 0);
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
    let file = folder.join("roots.pem");
    eventually("the roots are published", async || {
        let is_published = std::fs::read_to_string(&file).is_ok_and(|text| text == roots.pem);
        is_published.then_some(()).ok_or(&file)
    })
    .await;
}

fn folder() -> (tempfile::TempDir, PathBuf) {
    let dir = support::scratch();
    let path = dir.path().to_owned();
    (dir, path)
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_share_and_publish_one_ca() {
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
async fn reports_of_replicas_that_never_lived_for_long_are_removed() {
    let (_dir, folder) = folder();
    let dead = (0..100).map(|number| format!("\"crashed-{number}\": \"{{\\\"beat\\\": 1}}\""));
    let dead: Vec<String> = dead.chain(["\"broken\": \"x\"".to_owned()]).collect();
    write(&folder, "reports.json", &format!("{{{}}}", dead.join(",")));
    let one = Replica::start(&folder);
    one.until("it reports", |status| !status.replicas.is_empty())
        .await;
    let reports = std::fs::read_to_string(folder.join("reports.json")).unwrap();
    let kept = reports.matches("crashed").count();
    assert!(kept <= 8, "{kept} of 100 unchanged reports");
    // A report that does not change is kept for some seconds: its replica may have another clock.
    eventually("the reports are removed", async || {
        let reports = std::fs::read_to_string(folder.join("reports.json")).unwrap();
        let has_own = reports.contains(&one.authority.status().replica);
        let has_others = reports.contains("crashed") || reports.contains("broken");
        (has_own && !has_others).then_some(()).ok_or(reports)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rotation_waits_for_all_proxies_and_survives_restarts() {
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
    two.change("b", |proxy| proxy.stuck = true);

    request(&folder, "start\n");
    let told = one
        .until("waiting for b", |status| {
            status.rotation.waiting == ["proxy shop/b to trust the current roots"]
        })
        .await;
    assert_eq!(
        (told.rotation.phase.as_str(), told.rotation.answer.as_str()),
        (
            "announcing",
            "granted: a new root is announced; the rotation takes about 6 min: up to 6 min in which proxies renew their certificates; \
             longer while a meshed pod has no connection to a controller or does not accept the root"
        )
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
    one.change("b", |proxy| {
        proxy.issuer.clone_from(&old_issuer);
        proxy.stuck = true;
    });
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
async fn abandoned_rotation_restores_the_roots() {
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
    one.knows(&["a"]);
    request(&folder, "start");
    one.until_phase(Phase::Announcing).await;
    request(&folder, "abandon");
    let status = one.until_phase(Phase::Steady).await;
    assert_eq!(status.rotation.answer, "granted: the next root is dropped");
    // The status may be known before the roots.
    let mut trust = one.trust().await.subscribe();
    let restored = trust.wait_for(|trust| trust.roots == roots);
    // The value is locked while it is borrowed.
    assert!(soon(restored).await.is_ok());
    request(&folder, "dance");
    one.until("the answer", |status| {
        status
            .rotation
            .answer
            .contains("\"dance\" is not a request")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rotation_waits_only_for_proxies_of_meshed_pods_in_the_catalog() {
    let (_dir, folder) = folder();
    let one = Replica::start(&folder);
    let roots = one.roots().await;
    let stuck = || Proxy {
        stuck: true,
        ..Proxy::default()
    };
    one.connect("a", stuck());
    one.knows(&["a"]);
    one.connect_as(None, "a service account", stuck());
    one.connect("a pod of no catalog", stuck());
    let other_uid = PodRef {
        namespace: "shop".into(),
        name: "a".into(),
        uid: "former".into(),
    };
    one.connect_as(Some(other_uid), "a former pod", stuck());
    request(&folder, "start");
    one.until("waiting for a", |status| {
        status.rotation.waiting == ["proxy shop/a to trust the current roots"]
    })
    .await;
    one.change("a", |proxy| proxy.stuck = false);
    one.until_phase(Phase::Switched).await;
    one.until_phase(Phase::Steady).await;
    assert_ne!(one.roots().await, roots);
}

#[tokio::test(flavor = "multi_thread")]
async fn forced_rotation_waits_for_no_proxy() {
    let (_dir, folder) = folder();
    let (one, two) = (Replica::start(&folder), Replica::start(&folder));
    let before = one.roots().await;
    one.connect(
        "a",
        Proxy {
            stuck: true,
            ..Proxy::default()
        },
    );
    one.knows(&["a"]);
    request(&folder, "force");
    for replica in [&one, &two] {
        let status = replica
            .until("forced", |status| {
                status.rotation.reason == "a rotation was forced"
            })
            .await;
        assert_eq!(
            status.rotation.answer,
            "granted: the new CA signs, and only its root is trusted"
        );
        let trust = replica.trust().await.borrow().clone();
        assert!(trust.renew_within.is_zero() && trust.roots.certificates.len() == 1);
        assert_ne!(trust.roots.version, before.version);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rotates_short_lived_ca_by_itself() {
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
async fn rejects_invalid_ca_until_it_is_repaired() {
    let (_dir, folder) = folder();
    let (certificate, key) = self_signed(
        "cluster.local",
        SystemTime::now(),
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
        one.authority
            .unavailable()
            .is_some_and(|reason| reason.contains("tls.key is missing"))
    );
    assert!(!folder.join("tls.key").exists(), "it is never replaced");
    write(&folder, "tls.key", &key);
    assert_eq!(
        one.roots().await.pem,
        Roots::from_pem(&certificate).unwrap().pem
    );
    assert_eq!(one.authority.unavailable(), None);

    // Once one is in use, a broken one changes nothing.
    let roots = one.roots().await;
    write(&folder, "tls.crt", "broken");
    one.until("a refusal", |status| status.problem.is_some())
        .await;
    assert_eq!(
        (one.roots().await, one.authority.unavailable()),
        (roots, None)
    );
    write(&folder, "tls.crt", &certificate);
    one.until("it is well", |status| status.problem.is_none())
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restores_loaded_ca_to_an_empty_store() {
    let (_dir, folder) = folder();
    let one = Replica::start(&folder);
    let before = one.roots().await;
    for name in ["tls.crt", "tls.key", "rotation.json"] {
        std::fs::remove_file(folder.join(name)).unwrap();
    }
    one.until_problem("contains no CA; it is restored after 5 s")
        .await;
    let filled = async || std::fs::metadata(folder.join("tls.key"));
    eventually("it is filled", filled).await;
    let two = Replica::start(&folder);
    assert_eq!(
        (one.roots().await, two.roots().await),
        (before.clone(), before)
    );
}

/// Removes the CA, as a cluster without the Secret, or empties its fields.
fn lose_ca(folder: &Path, fields: Option<&str>) {
    std::fs::remove_file(folder.join("rotation.json")).unwrap();
    for name in ["tls.crt", "tls.key"] {
        match fields {
            Some(text) => write(folder, name, text),
            None => std::fs::remove_file(folder.join(name)).unwrap(),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn new_replicas_leave_an_empty_store_to_the_replica_with_the_ca() {
    let (_dir, folder) = folder();
    let one = Replica::start(&folder);
    let before = one.roots().await;
    until_published(&folder, &before).await;
    lose_ca(&folder, None);
    let (two, three) = (Replica::start(&folder), Replica::start(&folder));
    for replica in [&one, &two, &three] {
        assert_eq!(replica.roots().await, before);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replaces_an_emptied_ca_that_no_replica_has_and_says_so() {
    let (_dir, folder) = folder();
    let one = Replica::start(&folder);
    let before = one.roots().await;
    until_published(&folder, &before).await;
    one.kill().await;
    lose_ca(&folder, Some("\n"));
    let (one, two) = (Replica::start(&folder), Replica::start(&folder));
    one.until_problem("contains no CA, but the mesh had one")
        .await;
    let after = one.roots().await;
    assert_ne!(after, before);
    assert_eq!(two.roots().await, after);
    let status = two.until_phase(Phase::Steady).await;
    let reason = status.rotation.reason;
    assert!(
        reason.contains("the CA was lost") && reason.contains("the file roots.pem"),
        "{reason}"
    );
    until_published(&folder, &after).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn adopts_ca_of_an_operator_when_all_proxies_trust_it() {
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
    one.knows(&["a"]);
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
    one.change("a", |proxy| proxy.stuck = false);
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
    let params = ca("an operator's");
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
    (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
}
