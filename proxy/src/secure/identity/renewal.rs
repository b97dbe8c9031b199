//! Renewal task of the workload credentials: requests the first certificate at once and each next
//! one before expiry, and applies new roots immediately. If renewal fails, the certificate is used
//! until it expires; then there are no credentials.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use diy_mesh_proto::mesh::v1::{SignCertificateRequest, SignCertificateResponse};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::{error, info, warn};

use super::Credentials;
use super::request::{CertificateRequest, IdentityError, Issued, verify};
use super::roots::{Changes, Trust};
use super::schedule::{Validity, issuer_change_renewal_time, retry_delay};
use crate::observe::metrics::IdentityMetrics;
use crate::secure::control::{Control, ControlError};

/// Interval of checks of the wall clock, which can change or stop while the machine sleeps.
const CLOCK_INTERVAL: Duration = Duration::from_secs(60);

/// Failures with a shorter retry delay are logged only at powers of two.
const FREQUENT_RETRY_DELAY: Duration = Duration::from_secs(3);

/// Clock, randomness and controller of the task, which tests replace.
pub(super) trait Environment {
    /// The wall clock.
    fn now(&self) -> SystemTime;
    /// A random number in 0..1.
    fn random(&mut self) -> f64;
    /// The service account token.
    fn token(&self) -> impl Future<Output = Result<String, ControlError>> + Send;
    /// Requests a certificate from the controller.
    fn sign(
        &self,
        request: SignCertificateRequest,
    ) -> impl Future<Output = Result<SignCertificateResponse, ControlError>> + Send;
}

impl Environment for Control {
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

/// State of the renewal task.
pub(super) struct Renewal<E> {
    environment: E,
    trust_domain: String,
    trust: Trust,
    changes: Changes,
    credentials: watch::Sender<Option<Arc<Credentials>>>,
    metrics: IdentityMetrics,
    certificate: Option<Certificate>,
    /// Consecutive failures.
    failures: u32,
    next_attempt: SystemTime,
}

/// The current certificate.
struct Certificate {
    validity: Validity,
    not_before: SystemTime,
    issuer: String,
}

impl<E: Environment + Clone> Renewal<E> {
    pub fn new(
        environment: E,
        trust_domain: String,
        trust: Trust,
        metrics: IdentityMetrics,
    ) -> Self {
        let (next_attempt, changes) = (environment.now(), trust.changes());
        let credentials = watch::Sender::new(None);
        Self {
            environment,
            trust_domain,
            trust,
            changes,
            credentials,
            metrics,
            certificate: None,
            failures: 0,
            next_attempt,
        }
    }

    pub fn credentials(&self) -> watch::Receiver<Option<Arc<Credentials>>> {
        self.credentials.subscribe()
    }

    /// Runs forever.
    pub async fn run(mut self) {
        loop {
            self.wait().await;
            let issued = issue(self.environment.clone(), self.trust_domain.clone());
            match self.serve_until(issued).await {
                Ok(issued) => self.apply(issued),
                Err(error) => self.attempt_failed(&error),
            }
        }
    }

    /// Waits until the next attempt, which events and a change of the clock can bring forward. A clock
    /// that is set back does not delay it.
    async fn wait(&mut self) {
        let latest = Instant::now() + self.until_attempt();
        loop {
            let left = self.until_attempt().min(latest - Instant::now());
            if left.is_zero() {
                return;
            }
            self.serve_event(pin!(sleep(left.min(CLOCK_INTERVAL))))
                .await;
        }
    }

    /// The time until the next attempt, by the wall clock. Zero if that was set back to before the
    /// certificate is valid, so that peers reject it.
    fn until_attempt(&self) -> Duration {
        let now = self.environment.now();
        let current = self.certificate.as_ref().filter(|_| self.failures == 0);
        if current.is_some_and(|current| now < current.not_before) {
            return Duration::ZERO;
        }
        self.next_attempt.duration_since(now).unwrap_or_default()
    }

    /// Handles events until `work` completes.
    async fn serve_until<F: Future>(&mut self, work: F) -> F::Output {
        let mut work = pin!(work);
        loop {
            if let Some(output) = self.serve_event(work.as_mut()).await {
                return output;
            }
        }
    }

    /// Waits for `work`, new roots or the expiry of the certificate. `None` for events other than
    /// `work`.
    async fn serve_event<F: Future>(&mut self, work: Pin<&mut F>) -> Option<F::Output> {
        let remaining = self
            .certificate
            .as_ref()
            .map(|certificate| certificate.validity.remaining(self.environment.now()));
        tokio::select! {
            output = work => return Some(output),
            () = self.changes.next() => self.apply_roots(),
            () = sleep(remaining.unwrap_or(CLOCK_INTERVAL).min(CLOCK_INTERVAL)) => {}
        }
        self.remove_expired();
        None
    }

    fn apply(&mut self, issued: Issued) {
        let Issued {
            certified,
            leaf,
            roots,
        } = issued;
        let now = self.environment.now();
        self.trust.set_from_certificate(roots.clone());
        let roots = self.trust.newest().unwrap_or_else(|| Arc::new(roots));
        let validity = Validity {
            from: now,
            until: leaf.not_after,
        };
        info!(identity = %leaf.identity, serial = leaf.serial, seconds = validity.remaining(now).as_secs(), "certificate issued");
        self.metrics.issued(leaf.not_after);
        self.credentials
            .send_replace(Some(Arc::new(Credentials::new(
                leaf.identity,
                certified,
                &roots,
                leaf.not_after,
            ))));
        self.failures = 0;
        self.next_attempt = validity
            .renewal_time(self.environment.random())
            .max(validity.earliest_renewal());
        self.certificate = Some(Certificate {
            validity,
            not_before: leaf.not_before,
            issuer: leaf.issuer,
        });
        self.follow_issuer();
    }

    fn attempt_failed(&mut self, error: &IdentityError) {
        self.failures = self.failures.saturating_add(1);
        self.metrics.failed(error.to_string());
        let now = self.environment.now();
        let delay = self.retry_delay();
        self.next_attempt = now + delay;
        let attempts = self.failures;
        match self.certificate.as_ref().map(|current| current.validity) {
            None if !attempts.is_power_of_two() && delay < FREQUENT_RETRY_DELAY => {}
            None => warn!("no certificate: {error} ({attempts} attempts, next in {delay:.1?})"),
            Some(validity) if validity.is_late(now) => {
                let remaining = validity.remaining(now).as_secs();
                warn!(
                    "certificate renewal failed, expiry in {remaining} s: {error} ({attempts} attempts, next in {delay:.1?})"
                );
            }
            Some(_) => info!(
                "certificate renewal failed: {error} ({attempts} attempts, next in {delay:.1?})"
            ),
        }
    }

    fn retry_delay(&mut self) -> Duration {
        let validity = self.certificate.as_ref().map(|current| current.validity);
        retry_delay(validity, self.failures, self.environment.random())
    }

    /// Replaces the roots of the credentials. After failures, also retries soon: new roots show
    /// that the controller is available.
    fn apply_roots(&mut self) {
        let Some(roots) = self.trust.newest() else {
            return;
        };
        self.credentials.send_if_modified(|current| {
            let Some(old) = current.as_ref().filter(|old| {
                old.roots_version != roots.version || old.roots.roots != roots.trusted.roots
            }) else {
                return false;
            };
            let former = roots.trusted.len() - roots.store.len();
            info!(
                version = roots.version,
                roots = roots.store.len(),
                former,
                "trust roots updated"
            );
            *current = Some(Arc::new(Credentials::new(
                old.identity.clone(),
                old.certified.clone(),
                &roots,
                old.not_after,
            )));
            true
        });
        if self.failures > 1 {
            self.failures = 1;
            self.next_attempt = self
                .next_attempt
                .min(self.environment.now() + self.retry_delay());
        }
        self.follow_issuer();
    }

    /// Brings the renewal forward if the certificate is not from the current issuer, and to now if
    /// no announced root verifies it: peers that trust only these roots reject it.
    fn follow_issuer(&mut self) {
        let (Some(current), 0) = (&self.certificate, self.failures) else {
            return;
        };
        let now = self.environment.now();
        let within = match self.trust.issuer() {
            _ if !self.is_verified(now) => Duration::ZERO,
            Some(issuer) if !current.issuer.is_empty() && current.issuer != issuer.id => {
                issuer.renew_within
            }
            _ => return,
        };
        let random = self.environment.random();
        let time = issuer_change_renewal_time(now, current.validity, within, random);
        self.next_attempt = self.next_attempt.min(time);
    }

    /// Whether an announced root verifies the own certificate.
    fn is_verified(&self, now: SystemTime) -> bool {
        let (roots, credentials) = (self.trust.newest(), self.credentials.borrow());
        roots.zip(credentials.as_ref()).is_none_or(|(roots, own)| {
            verify(&own.certified.cert, &roots, &own.identity, now).is_ok()
        })
    }

    fn remove_expired(&mut self) {
        let now = self.environment.now();
        if self
            .certificate
            .take_if(|current| current.validity.remaining(now).is_zero())
            .is_some()
        {
            error!("certificate expired: no mutual TLS until the next one");
            self.credentials.send_replace(None);
        }
    }
}

/// Requests one certificate.
async fn issue(
    environment: impl Environment,
    trust_domain: String,
) -> Result<Issued, IdentityError> {
    let request = CertificateRequest::new(environment.token().await?, &trust_domain)?;
    let response = environment.sign(request.message()).await?;
    request.check(&response, environment.now())
}
