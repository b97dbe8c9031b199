//! The task that keeps the credentials: a first certificate as soon as may be, the next in time, the newest roots at once. Where no
//! new certificate is to be had the old one serves until its end, and not a moment longer: then there are no credentials.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use diy_mesh_proto::mesh::v1::{SignCertificateRequest, SignCertificateResponse};
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{error, info, warn};

use super::Credentials;
use super::request::{IdentityError, Issued, Request};
use super::roots::{Changes, Trust};
use super::schedule::{Life, after_switch, pause};
use crate::control::{Control, ControlError};
use crate::metrics::IdentityMetrics;

/// The wall clock, which certificates go by, is looked at this often: it may have been set, or the machine asleep.
const LOOK: Duration = Duration::from_secs(60);

/// Tries without a certificate that are closer together than this are not all told of.
const QUIET: Duration = Duration::from_secs(3);

/// What the task needs of the world.
pub(super) trait World {
    /// The wall clock.
    fn now(&self) -> SystemTime;
    /// By chance, from 0 to 1.
    fn random(&mut self) -> f64;
    /// The token that proves who we are.
    fn token(&self) -> impl Future<Output = Result<String, ControlError>> + Send;
    /// Asks the controller.
    fn sign(
        &self,
        request: SignCertificateRequest,
    ) -> impl Future<Output = Result<SignCertificateResponse, ControlError>> + Send;
}

impl World for Control {
    fn now(&self) -> SystemTime {
        SystemTime::now()
    }

    fn random(&mut self) -> f64 {
        fastrand::f64()
    }

    async fn token(&self) -> Result<String, ControlError> {
        Ok(self.read_token().await?.unwrap_or_default())
    }

    async fn sign(
        &self,
        request: SignCertificateRequest,
    ) -> Result<SignCertificateResponse, ControlError> {
        self.sign_certificate(request).await
    }
}

/// See the file's head.
pub(super) struct Renewal<W> {
    world: W,
    trust_domain: String,
    trust: Trust,
    changes: Changes,
    credentials: watch::Sender<Option<Arc<Credentials>>>,
    metrics: IdentityMetrics,
    held: Option<Held>,
    failures: u32,
    /// When to try next.
    due: SystemTime,
}

/// The certificate that is there.
struct Held {
    life: Life,
    issuer: String,
}

impl<W: World + Clone> Renewal<W> {
    pub fn new(world: W, trust_domain: String, trust: Trust, metrics: IdentityMetrics) -> Self {
        let (due, changes) = (world.now(), trust.changes());
        let credentials = watch::Sender::new(None);
        Self {
            world,
            trust_domain,
            trust,
            changes,
            credentials,
            metrics,
            held: None,
            failures: 0,
            due,
        }
    }

    pub fn credentials(&self) -> watch::Receiver<Option<Arc<Credentials>>> {
        self.credentials.subscribe()
    }

    /// Never ends.
    pub async fn run(mut self) {
        loop {
            self.wait().await;
            let certificate = issue(self.world.clone(), self.trust_domain.clone());
            match self.meanwhile(certificate).await {
                Ok(issued) => self.take(issued),
                Err(error) => self.fail(&error),
            }
        }
    }

    /// Until the next try is due, which what happens meanwhile may bring forward.
    async fn wait(&mut self) {
        while let Ok(left) = self.due.duration_since(self.world.now())
            && !left.is_zero()
        {
            self.attend(pin!(sleep(left.min(LOOK)))).await;
        }
    }

    async fn meanwhile<F: Future>(&mut self, work: F) -> F::Output {
        let mut work = pin!(work);
        loop {
            if let Some(output) = self.attend(work.as_mut()).await {
                return output;
            }
        }
    }

    /// Waits for `work`, for newer roots or for the certificate's end. `None`: it was not `work`.
    async fn attend<F: Future>(&mut self, work: Pin<&mut F>) -> Option<F::Output> {
        let left = self
            .held
            .as_ref()
            .map(|held| held.life.left(self.world.now()));
        tokio::select! {
            output = work => return Some(output),
            () = self.changes.next() => self.take_roots(),
            () = sleep(left.unwrap_or(LOOK).min(LOOK)) => {}
        }
        self.end_in_time();
        None
    }

    fn take(&mut self, issued: Issued) {
        let Issued {
            certified,
            leaf,
            roots,
        } = issued;
        let now = self.world.now();
        self.trust.mention(roots.clone());
        let roots = self.trust.newest().unwrap_or_else(|| Arc::new(roots));
        let life = Life {
            from: now,
            until: leaf.not_after,
        };
        info!(identity = %leaf.identity, serial = leaf.serial, seconds = life.left(now).as_secs(), "a new certificate");
        self.metrics.issued(leaf.not_after);
        self.credentials.send_replace(Some(Arc::new(Credentials {
            identity: leaf.identity,
            certified,
            roots: roots.store.clone(),
            roots_version: roots.version.clone(),
            not_after: leaf.not_after,
            tickets: OnceLock::new(),
        })));
        self.failures = 0;
        self.due = life.renew_at(self.world.random()).max(life.earliest());
        self.held = Some(Held {
            life,
            issuer: leaf.issuer,
        });
        self.follow_issuer();
    }

    fn fail(&mut self, problem: &IdentityError) {
        self.failures = self.failures.saturating_add(1);
        self.metrics.failures.inc();
        let now = self.world.now();
        let life = self.held.as_ref().map(|held| held.life);
        let pause = pause(life, self.failures, self.world.random());
        self.due = now + pause;
        let times = self.failures;
        match life {
            // The first tries follow each other fast: one line for each would say nothing new.
            None if !times.is_power_of_two() && pause < QUIET => {}
            None => warn!(
                "no certificate, so this pod is not ready: {problem} ({times} tries, the next in {pause:.1?})"
            ),
            Some(life) if life.is_late(now) => {
                let left = life.left(now).as_secs();
                warn!(
                    "the certificate ends in {left} s and can't be renewed: {problem} ({times} tries, the next in {pause:.1?})"
                );
            }
            Some(_) => info!(
                "the certificate can't be renewed yet: {problem} ({times} tries, the next in {pause:.1?})"
            ),
        }
    }

    /// The same certificate, other roots; and where there is none for lack of a controller, it seems to be back.
    fn take_roots(&mut self) {
        let Some(roots) = self.trust.newest() else {
            return;
        };
        self.credentials.send_if_modified(|current| {
            let Some(old) = current
                .as_ref()
                .filter(|old| old.roots_version != roots.version)
            else {
                return false;
            };
            info!(
                version = roots.version,
                roots = roots.store.len(),
                "new trust roots"
            );
            *current = Some(Arc::new(Credentials {
                identity: old.identity.clone(),
                certified: old.certified.clone(),
                roots: roots.store.clone(),
                roots_version: roots.version.clone(),
                not_after: old.not_after,
                tickets: OnceLock::new(),
            }));
            true
        });
        if self.failures > 1 {
            self.failures = 1;
            let life = self.held.as_ref().map(|held| held.life);
            self.due = self
                .due
                .min(self.world.now() + pause(life, 1, self.world.random()));
        }
        self.follow_issuer();
    }

    /// Brings the renewal forward where the certificate is not of the issuer that signs now.
    fn follow_issuer(&mut self) {
        let (Some(held), Some(issuer)) = (&self.held, self.trust.issuer()) else {
            return;
        };
        if self.failures == 0 && !held.issuer.is_empty() && held.issuer != issuer.id {
            let life = held.life;
            let moment = after_switch(
                self.world.now(),
                life,
                issuer.renew_within,
                self.world.random(),
            );
            self.due = self.due.min(moment);
        }
    }

    /// A certificate that has ended is no identity any more.
    fn end_in_time(&mut self) {
        if self
            .held
            .take_if(|held| held.life.left(self.world.now()).is_zero())
            .is_some()
        {
            error!(
                "the certificate has ended: this pod is not ready, and the mesh does not know it, until there is a new one"
            );
            self.credentials.send_replace(None);
        }
    }
}

/// One try.
async fn issue(world: impl World, trust_domain: String) -> Result<Issued, IdentityError> {
    let request = Request::new(world.token().await?, &trust_domain)?;
    let answer = world.sign(request.message()).await?;
    request.check(&answer, world.now())
}
