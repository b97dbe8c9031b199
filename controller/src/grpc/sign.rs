//! SignCertificate: the token and the certificate request of a pod in, its certificate out. The
//! only place that decides on identities.
//!
//! The identity comes from the token alone. The token must be bound to a pod, the catalog must
//! contain the pod with this UID, and the call must not come from the address of another pod:
//! elsewhere in the cluster, a stolen token is useless.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use diy_mesh_model::identity::Identity;
use diy_mesh_proto::mesh::v1 as proto;
use tokio::sync::Semaphore;
use tonic::{Code, Status};

use super::Context;
use crate::authenticate::Caller;
use crate::index::Index;
use crate::issuer::{Request, SignError};
use crate::object::{Key, Kind, PodRef};
use crate::status::events;
use crate::unix_time::seconds;

/// More requests wait.
const MAX_CONCURRENT_REQUESTS: usize = 256;
/// Time for a request, including its wait for a slot.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for a new pod to appear in the catalog: its proxy may call before the watch event arrives.
const POD_TIMEOUT: Duration = Duration::from_secs(5);
/// Certificates that a pod gets at once, for a proxy that restarts several times.
const BURST: u32 = 5;
/// Interval of further certificates per pod.
const REFILL_INTERVAL: Duration = Duration::from_secs(10);
/// Pods with requests in the last minute. Further pods are rejected.
const MAX_RATE_LIMITED_PODS: usize = 100_000;

/// Signs certificates.
pub(super) struct Signer {
    context: Context,
    slots: Semaphore,
    limiter: Mutex<RateLimiter>,
}

impl Signer {
    pub(super) fn new(context: Context) -> Signer {
        Signer {
            context,
            slots: Semaphore::new(MAX_CONCURRENT_REQUESTS),
            limiter: Mutex::default(),
        }
    }

    /// Responds to a request of an authenticated caller, from `peer`.
    pub(super) async fn sign(
        &self,
        message: proto::SignCertificateRequest,
        caller: &Caller,
        peer: Option<SocketAddr>,
    ) -> Result<proto::SignCertificateResponse, Status> {
        let begun = Instant::now();
        let quota = self.context.quotas.of(caller);
        quota.check_failures()?;
        let response = async {
            let slot = self.slots.acquire().await;
            let _slot = slot.expect("the semaphore is never closed");
            let (pod, identity) = requester(caller, &message.name, &self.context.trust_domain)?;
            let peer = peer.map(|peer| peer.ip().to_canonical());
            let response = self.issue(&message.csr, pod, &identity, peer).await;
            if let Err(status) = &response {
                let reason = status.message();
                let lines = self.context.quotas.lines();
                if let Some(omitted) = lines.begin(&pod.uid, "SignCertificate") {
                    tracing::info!(
                        %identity, %pod, ?peer, "certificate request rejected: {reason}{omitted}"
                    );
                }
                // The proxy retries elsewhere.
                if status.code() != Code::Unavailable {
                    let (kind, action) = ("CertificateRefused", "SignCertificate");
                    events::of_pod(&self.context.events, pod, kind, action, reason);
                }
            }
            response
        };
        let result = tokio::time::timeout(REQUEST_TIMEOUT, response).await;
        let result = result.unwrap_or_else(|_| {
            Err(Status::deadline_exceeded(format!(
                "the request was not processed within {} s; try again",
                REQUEST_TIMEOUT.as_secs()
            )))
        });
        let metrics = &self.context.metrics;
        metrics.signing.observe(begun.elapsed().as_secs_f64());
        match result {
            Ok(_) => &metrics.certificates_issued,
            Err(_) => {
                quota.record_failure();
                &metrics.certificates_refused
            }
        }
        .inc();
        result
    }

    async fn issue(
        &self,
        csr: &[u8],
        pod: &PodRef,
        identity: &Identity,
        peer: Option<IpAddr>,
    ) -> Result<proto::SignCertificateResponse, Status> {
        if let Some(error) = self.context.authority.clock().error() {
            return Err(Status::unavailable(error));
        }
        self.limit(pod)?;
        let request = Request::parse(csr, &identity.user())
            .map_err(|error| Status::invalid_argument(format!("csr: {error}")))?;
        // Without routes or policies, pods can still prove who they are.
        let pods = [Kind::Pod];
        self.context
            .hub
            .wait_listed(&pods, &self.context.stopping)
            .await?;
        self.check_pod(pod, identity, peer).await?;
        self.sign_request(&request, pod, identity)
    }

    fn limit(&self, pod: &PodRef) -> Result<(), Status> {
        let mut limiter = self.limiter.lock().unwrap_or_else(PoisonError::into_inner);
        limiter.take(&pod.uid, Instant::now()).map_err(|wait| {
            let left = wait.as_secs_f64().ceil();
            Status::resource_exhausted(format!(
                "the pod {pod} requests certificates too often; try again in {left} s"
            ))
        })
    }

    /// Checks the pod against the catalog, and waits for a catalog that may lag.
    async fn check_pod(
        &self,
        pod: &PodRef,
        identity: &Identity,
        peer: Option<IpAddr>,
    ) -> Result<(), Status> {
        let check = |index: &Index| PodCheck::new(index, pod, identity, peer);
        let settled = self.context.hub.wait_for(|index| match check(index) {
            PodCheck::Unknown | PodCheck::AddressPending(_) => None,
            settled => Some(settled),
        });
        let settled = tokio::time::timeout(POD_TIMEOUT, settled).await;
        match settled.unwrap_or_else(|_| self.context.hub.read(check)) {
            PodCheck::Valid => Ok(()),
            PodCheck::Unknown => Err(Status::failed_precondition(format!(
                "the catalog does not contain the pod {pod} with the UID {} of the token; if it is new, try again",
                pod.uid
            ))),
            PodCheck::AddressPending(other) | PodCheck::OtherAddress(other) => {
                Err(Status::permission_denied(format!(
                    "the token belongs to the pod {pod}, and the call comes from the address of {other}"
                )))
            }
            PodCheck::OtherAccount => Err(Status::permission_denied(format!(
                "the pod {pod} does not run as {}",
                identity.service_account()
            ))),
        }
    }

    fn sign_request(
        &self,
        request: &Request,
        pod: &PodRef,
        identity: &Identity,
    ) -> Result<proto::SignCertificateResponse, Status> {
        // One read: the certificate and the roots belong together.
        let trust = self.context.trust.borrow().clone();
        let (now, issuer) = (self.context.authority.clock().now(), trust.issuer.id());
        let signed = trust
            .issuer
            .sign(
                request,
                identity.as_str(),
                now,
                self.context.certificate_life,
            )
            .map_err(|error| {
                tracing::error!(issuer, "cannot sign a certificate: {error}");
                match error {
                    SignError::Expired => Status::unavailable(error.to_string()),
                    SignError::Crypto(_) => Status::internal(error.to_string()),
                }
            })?;
        let until = seconds(signed.not_after);
        tracing::info!(%identity, %pod, serial = %signed.serial, until, issuer, "certificate issued");
        Ok(proto::SignCertificateResponse {
            cert: (signed.pem + trust.issuer.chain_pem()).into(),
            ca: trust.roots.pem.clone().into(),
            roots_version: trust.roots.version.clone(),
        })
    }
}

/// The pod and the identity of an authenticated caller that claims to be `name`.
fn requester<'a>(
    caller: &'a Caller,
    name: &str,
    trust_domain: &str,
) -> Result<(&'a PodRef, Identity), Status> {
    if name != &*caller.user {
        let name: String = name.chars().take(300).collect();
        return Err(Status::permission_denied(format!(
            "name: {name:?} is not the token's user name, {:?}",
            caller.user
        )));
    }
    let identity = Identity::from_user(trust_domain, name)
        .map_err(|error| Status::permission_denied(format!("{name:?}: {error}")))?;
    let pod = caller.pod.as_ref().ok_or_else(|| {
        Status::permission_denied(
            "the token is bound to no pod; only pods get certificates, with their projected token",
        )
    })?;
    Ok((pod, identity))
}

/// The result of the comparison of a request with the catalog.
#[derive(Debug, PartialEq)]
enum PodCheck {
    /// The pod may have its certificate.
    Valid,
    /// The catalog does not contain the pod with this UID, which may change.
    Unknown,
    /// The pod has no address yet, and the call comes from the address of another pod, which may be
    /// outdated.
    AddressPending(Key),
    /// The pod has another address than the call, which comes from the address of another pod.
    OtherAddress(Key),
    /// The pod runs under another service account.
    OtherAccount,
}

impl PodCheck {
    fn new(index: &Index, pod: &PodRef, identity: &Identity, peer: Option<IpAddr>) -> PodCheck {
        let key = pod.key();
        let Some(known) = index.pod_by_uid(pod) else {
            return PodCheck::Unknown;
        };
        let expected = known.identity.as_deref();
        if expected.is_some_and(|expected| expected != identity.as_str()) {
            return PodCheck::OtherAccount;
        }
        let owners: Vec<&Key> = peer
            .into_iter()
            .flat_map(|peer| index.pods_at(peer))
            .map(|owner| &owner.key)
            .collect();
        match owners.first() {
            // The address of a node, or a translated one.
            None => PodCheck::Valid,
            Some(_) if owners.contains(&&key) => PodCheck::Valid,
            Some(other) if known.own_addresses().is_empty() => {
                PodCheck::AddressPending((*other).clone())
            }
            Some(other) => PodCheck::OtherAddress((*other).clone()),
        }
    }
}

/// Limits the certificates per pod: a burst, then one per interval. Pure; bounded in memory.
#[derive(Default)]
struct RateLimiter {
    /// By UID, the time at which a pod has its full burst again. Earlier times are removed.
    full_at: HashMap<Arc<str>, Instant>,
    swept: Option<Instant>,
}

impl RateLimiter {
    /// Takes one of the pod's certificates, or returns the time to wait for the next.
    fn take(&mut self, uid: &Arc<str>, now: Instant) -> Result<(), Duration> {
        let is_due = |swept: Instant| now >= swept + REFILL_INTERVAL;
        if self.swept.is_none_or(is_due) {
            self.full_at.retain(|_, full| *full > now);
            self.swept = Some(now);
        }
        if self.full_at.len() >= MAX_RATE_LIMITED_PODS && !self.full_at.contains_key(uid) {
            return Err(REFILL_INTERVAL);
        }
        let full = self.full_at.get(uid).map_or(now, |full| now.max(*full)) + REFILL_INTERVAL;
        match (full - now).checked_sub(REFILL_INTERVAL * BURST) {
            Some(wait) if !wait.is_zero() => Err(wait),
            _ => {
                self.full_at.insert(uid.clone(), full);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Change;
    use crate::kinds::{Object, Pod};

    fn pod(name: &str, uid: &str, addresses: &[&str]) -> Change {
        Change::Apply(Object::Pod(Pod {
            key: Key::new("shop", name),
            uid: uid.into(),
            addresses: addresses
                .iter()
                .map(|address| address.parse().unwrap())
                .collect(),
            host_network: false,
            terminating: false,
            ready: true,
            unready_by_node: false,
            created: 0,
            node: "".into(),
            zone: "".into(),
            identity: Some("spiffe://cluster.local/ns/shop/sa/web".into()),
            bypassed: Default::default(),
            restricts_udp: false,
            inbound: Default::default(),
            labels: Default::default(),
        }))
    }

    fn index(changes: impl IntoIterator<Item = Change>) -> Index {
        let mut index = Index::default();
        changes.into_iter().for_each(|change| index.apply(change));
        index
    }

    fn reference(uid: &str) -> PodRef {
        PodRef {
            namespace: "shop".into(),
            name: "web-1".into(),
            uid: uid.into(),
        }
    }

    fn check(index: &Index, uid: &str, peer: &str) -> PodCheck {
        let identity = Identity::new("cluster.local", "shop", "web").unwrap();
        PodCheck::new(
            index,
            &reference(uid),
            &identity,
            Some(peer.parse().unwrap()),
        )
    }

    #[test]
    fn accepts_pod_from_its_own_or_an_unassigned_address() {
        let index = index([
            pod("web-1", "1", &["10.0.0.1", "fd00::1"]),
            pod("web-2", "2", &["10.0.0.2"]),
        ]);
        assert_eq!(check(&index, "1", "10.0.0.1"), PodCheck::Valid);
        assert_eq!(check(&index, "1", "fd00::1"), PodCheck::Valid);
        assert_eq!(
            check(&index, "1", "192.0.2.7"),
            PodCheck::Valid,
            "translated on the way"
        );
        assert_eq!(
            check(&index, "1", "10.0.0.2"),
            PodCheck::OtherAddress(Key::new("shop", "web-2"))
        );
        assert_eq!(check(&index, "predecessor", "10.0.0.1"), PodCheck::Unknown);
        let other = Identity::new("cluster.local", "shop", "admin").unwrap();
        assert_eq!(
            PodCheck::new(&index, &reference("1"), &other, None),
            PodCheck::OtherAccount
        );
    }

    #[test]
    fn reassigned_address_is_pending() {
        let before = index([pod("web-1", "1", &[]), pod("gone", "0", &["10.0.0.1"])]);
        assert_eq!(
            check(&before, "1", "10.0.0.1"),
            PodCheck::AddressPending(Key::new("shop", "gone"))
        );
        let between = index([
            pod("web-1", "1", &["10.0.0.1"]),
            pod("gone", "0", &["10.0.0.1"]),
        ]);
        assert_eq!(check(&between, "1", "10.0.0.1"), PodCheck::Valid);
    }

    #[test]
    fn rejects_token_of_another_user_or_without_pod() {
        let caller = |user: &str, pod| Caller {
            user: user.into(),
            pod,
        };
        let user = "system:serviceaccount:shop:web";
        let good = caller(user, Some(reference("1")));
        assert_eq!(
            requester(&good, user, "cluster.local").unwrap().1.as_str(),
            "spiffe://cluster.local/ns/shop/sa/web"
        );
        for (caller, name, part) in [
            (
                &good,
                "system:serviceaccount:shop:admin",
                "is not the token's user name",
            ),
            (&good, "", "is not the token's user name"),
            (&caller(user, None), user, "bound to no pod"),
            (
                &caller("admin", Some(reference("1"))),
                "admin",
                "not a service account",
            ),
        ] {
            let status = requester(caller, name, "cluster.local").unwrap_err();
            assert_eq!(status.code(), tonic::Code::PermissionDenied);
            assert!(status.message().contains(part), "{}", status.message());
        }
    }

    #[test]
    fn allows_a_burst_then_one_per_interval_and_pod() {
        let (mut limiter, now) = (RateLimiter::default(), Instant::now());
        let (one, other) = ("one".into(), "other".into());
        for _ in 0..BURST {
            assert_eq!(limiter.take(&one, now), Ok(()));
        }
        assert_eq!(limiter.take(&one, now), Err(REFILL_INTERVAL));
        assert_eq!(
            limiter.take(&one, now + REFILL_INTERVAL / 4),
            Err(REFILL_INTERVAL * 3 / 4),
            "rejections do not count"
        );
        assert_eq!(limiter.take(&other, now), Ok(()));
        assert_eq!(limiter.take(&one, now + REFILL_INTERVAL), Ok(()));
        assert_eq!(
            limiter.take(&one, now + REFILL_INTERVAL),
            Err(REFILL_INTERVAL)
        );
        let later = now + REFILL_INTERVAL * 100;
        for _ in 0..BURST {
            assert_eq!(limiter.take(&one, later), Ok(()));
        }
        assert!(
            limiter.take(&one, later).is_err(),
            "the burst does not accumulate"
        );
    }

    #[test]
    fn bounds_and_frees_memory() {
        let (mut limiter, now) = (RateLimiter::default(), Instant::now());
        for pod in 0..MAX_RATE_LIMITED_PODS {
            limiter.take(&pod.to_string().into(), now).unwrap();
        }
        assert_eq!(limiter.take(&"one more".into(), now), Err(REFILL_INTERVAL));
        assert_eq!(
            limiter.take(&"0".into(), now),
            Ok(()),
            "known pods are not affected"
        );
        limiter
            .take(&"later".into(), now + REFILL_INTERVAL * 3)
            .unwrap();
        assert_eq!(limiter.full_at.len(), 1);
    }
}
