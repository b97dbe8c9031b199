//! SignCertificate: a pod's token and request in, its certificate out. The one place that decides
//! who gets an identity.
//!
//! What the certificate says comes from the token alone. The token must be bound to a pod, which
//! the catalog must know by that very UID, and the call must not come from another pod's address: a
//! token that was stolen is of no use elsewhere in the cluster.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use diy_mesh_proto::Identity;
use diy_mesh_proto::mesh::v1 as proto;
use tokio::sync::Semaphore;
use tonic::Status;

use super::limit::Limiter;
use super::{Context, service};
use crate::authenticate::{Caller, PodRef};
use crate::index::Index;
use crate::index::object::Key;
use crate::issuer::{Request, SignError};

/// How many calls are worked on at a time; more wait for their turn.
const MAX_CONCURRENT_REQUESTS: usize = 256;
/// How long a call may take, its wait for a turn included.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a pod is waited for that the catalog does not have yet: the proxy of a new pod is
/// sometimes faster than its news.
const POD_TIMEOUT: Duration = Duration::from_secs(5);

/// Signs certificates.
pub(super) struct Signer {
    context: Context,
    turns: Semaphore,
    limiter: Mutex<Limiter>,
}

/// What the catalog says of a pod that asks.
#[derive(Debug, PartialEq)]
enum Verdict {
    /// It may have its certificate.
    Good,
    /// The pod is not known, or not by this UID; that may change.
    Unknown,
    /// The pod is known, but the call comes from another one's address; that may be old news.
    Elsewhere(Key),
    /// The call comes from another pod's address, and not from the pod's own, which is known.
    Stolen(Key),
    /// The pod runs as somebody else.
    OtherAccount,
}

impl Signer {
    pub(super) fn new(context: Context) -> Signer {
        Signer {
            context,
            turns: Semaphore::new(MAX_CONCURRENT_REQUESTS),
            limiter: Mutex::default(),
        }
    }

    /// Answers one call from `peer`.
    pub(super) async fn sign(
        &self,
        message: proto::SignCertificateRequest,
        peer: Option<SocketAddr>,
    ) -> Result<proto::SignCertificateResponse, Status> {
        let work = async {
            let _turn = self
                .turns
                .acquire()
                .await
                .expect("the semaphore is never closed");
            self.decide(message, peer.map(|peer| peer.ip().to_canonical()))
                .await
        };
        let result = tokio::time::timeout(REQUEST_TIMEOUT, work).await;
        let result = result.unwrap_or_else(|_| {
            Err(Status::deadline_exceeded(format!(
                "no turn within {} s; try again",
                REQUEST_TIMEOUT.as_secs()
            )))
        });
        let metrics = &self.context.metrics;
        if result.is_ok() {
            &metrics.certificates_issued
        } else {
            &metrics.certificates_refused
        }
        .inc();
        result
    }

    async fn decide(
        &self,
        message: proto::SignCertificateRequest,
        peer: Option<IpAddr>,
    ) -> Result<proto::SignCertificateResponse, Status> {
        let caller = self
            .context
            .authenticator
            .caller_by_token(&message.token)
            .await
            .map_err(service::refusal)?;
        let (pod, identity) = whose(&caller, &message.name, &self.context.trust_domain)?;
        let answer = self.checked(&message.csr, pod, &identity, peer).await;
        if let Err(status) = &answer {
            tracing::info!(%identity, %pod, ?peer, "no certificate: {}", status.message());
        }
        answer
    }

    async fn checked(
        &self,
        csr: &[u8],
        pod: &PodRef,
        identity: &Identity,
        peer: Option<IpAddr>,
    ) -> Result<proto::SignCertificateResponse, Status> {
        let turn = self
            .limiter
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take(&pod.uid, Instant::now());
        turn.map_err(|wait| {
            let seconds = wait.as_secs_f64().ceil();
            Status::resource_exhausted(format!(
                "the pod {pod} asks for certificates too often; try again in {seconds} s"
            ))
        })?;
        let request = Request::parse(csr, &identity.user())
            .map_err(|error| Status::invalid_argument(format!("csr: {error}")))?;
        service::synced(&self.context).await?;
        self.known(pod, identity, peer).await?;
        self.issue(&request, pod, identity)
    }

    /// Waits a while for the catalog to know the pod.
    async fn known(
        &self,
        pod: &PodRef,
        identity: &Identity,
        peer: Option<IpAddr>,
    ) -> Result<(), Status> {
        let hub = &self.context.hub;
        let settled = hub.wait_for(|index| match verdict(index, pod, identity, peer) {
            Verdict::Unknown | Verdict::Elsewhere(_) => None,
            settled => Some(settled),
        });
        let settled = tokio::time::timeout(POD_TIMEOUT, settled).await;
        match settled.unwrap_or_else(|_| hub.ask(|index| verdict(index, pod, identity, peer))) {
            Verdict::Good => Ok(()),
            Verdict::Unknown => Err(Status::failed_precondition(format!(
                "the pod {pod} with the UID {} of the token is not known; if it is new, try again",
                pod.uid
            ))),
            Verdict::Elsewhere(other) | Verdict::Stolen(other) => {
                Err(Status::permission_denied(format!(
                    "the token is the pod {pod}'s, and the call comes from the address of {}/{}",
                    other.namespace, other.name
                )))
            }
            Verdict::OtherAccount => Err(Status::permission_denied(format!(
                "the pod {pod} does not run as {}",
                identity.service_account()
            ))),
        }
    }

    fn issue(
        &self,
        request: &Request,
        pod: &PodRef,
        identity: &Identity,
    ) -> Result<proto::SignCertificateResponse, Status> {
        // One look: the certificate and the roots belong together.
        let trust = self.context.authority.trust().borrow().clone();
        let signed = trust.issuer.sign(
            request,
            identity.as_str(),
            SystemTime::now(),
            self.context.certificate_life,
        );
        let signed = signed.map_err(|error| {
            tracing::error!(
                issuer = trust.issuer.id(),
                "a certificate cannot be signed: {error}"
            );
            match error {
                SignError::Expired => Status::unavailable(error.to_string()),
                SignError::Crypto(_) => Status::internal(error.to_string()),
            }
        })?;
        let until = signed
            .not_after
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs();
        tracing::info!(%identity, %pod, serial = %signed.serial, until, issuer = trust.issuer.id(), "a certificate was issued");
        Ok(proto::SignCertificateResponse {
            cert: (signed.pem + trust.issuer.chain_pem()).into(),
            ca: trust.roots.pem.clone().into(),
            roots_version: trust.roots.version.clone(),
        })
    }
}

/// The pod and the identity that a token stands for.
fn whose<'a>(
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
        Status::permission_denied("the token is bound to no pod; certificates are for pods, by their projected token, alone")
    })?;
    Ok((pod, identity))
}

/// Pure: what is known says.
fn verdict(index: &Index, pod: &PodRef, identity: &Identity, peer: Option<IpAddr>) -> Verdict {
    let key = Key {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
    };
    let Some(known) = index.pod(&key).filter(|known| known.uid == pod.uid) else {
        return Verdict::Unknown;
    };
    if known
        .identity
        .as_deref()
        .is_some_and(|expected| expected != identity.as_str())
    {
        return Verdict::OtherAccount;
    }
    let mut owners = peer
        .into_iter()
        .flat_map(|peer| index.pods_at(peer))
        .peekable();
    // Nobody's: a node's, or one that is translated on the way.
    let Some(other) = owners.peek().map(|owner| owner.key.clone()) else {
        return Verdict::Good;
    };
    match owners.any(|owner| owner.key == key) {
        true => Verdict::Good,
        false if known.addresses.is_empty() => Verdict::Elsewhere(other),
        false => Verdict::Stolen(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Touched;
    use crate::index::object::{Change, Object, Pod};

    fn pod(name: &str, uid: &str, addresses: &[&str]) -> Change {
        Change::Apply(Object::Pod(Pod {
            key: Key::new("shop", name),
            uid: uid.into(),
            addresses: addresses
                .iter()
                .map(|address| address.parse().unwrap())
                .collect(),
            terminating: false,
            ready: true,
            created: 0,
            zone: "".into(),
            identity: Some("spiffe://cluster.local/ns/shop/sa/web".into()),
            bypassed: Vec::new(),
            opaque_ports: Box::default(),
        }))
    }

    fn index(changes: impl IntoIterator<Item = Change>) -> Index {
        let mut index = Index::default();
        changes
            .into_iter()
            .for_each(|change| index.apply(change, &mut Touched::default()));
        index
    }

    fn reference(uid: &str) -> PodRef {
        PodRef {
            namespace: "shop".into(),
            name: "web-1".into(),
            uid: uid.into(),
        }
    }

    fn asks(index: &Index, uid: &str, peer: &str) -> Verdict {
        let identity = Identity::new("cluster.local", "shop", "web").unwrap();
        verdict(
            index,
            &reference(uid),
            &identity,
            Some(peer.parse().unwrap()),
        )
    }

    #[test]
    fn only_the_very_pod_from_its_own_address_or_nobodys_is_good() {
        let index = index([
            pod("web-1", "1", &["10.0.0.1", "fd00::1"]),
            pod("web-2", "2", &["10.0.0.2"]),
        ]);
        assert_eq!(asks(&index, "1", "10.0.0.1"), Verdict::Good);
        assert_eq!(asks(&index, "1", "fd00::1"), Verdict::Good);
        assert_eq!(
            asks(&index, "1", "192.0.2.7"),
            Verdict::Good,
            "translated on the way"
        );
        assert_eq!(
            asks(&index, "1", "10.0.0.2"),
            Verdict::Stolen(Key::new("shop", "web-2"))
        );
        assert_eq!(
            asks(&index, "its predecessor's", "10.0.0.1"),
            Verdict::Unknown
        );
        let other = Identity::new("cluster.local", "shop", "admin").unwrap();
        assert_eq!(
            verdict(&index, &reference("1"), &other, None),
            Verdict::OtherAccount
        );
    }

    #[test]
    fn an_address_that_changes_hands_is_waited_for() {
        let before = index([pod("web-1", "1", &[]), pod("gone", "0", &["10.0.0.1"])]);
        assert_eq!(
            asks(&before, "1", "10.0.0.1"),
            Verdict::Elsewhere(Key::new("shop", "gone"))
        );
        let between = index([
            pod("web-1", "1", &["10.0.0.1"]),
            pod("gone", "0", &["10.0.0.1"]),
        ]);
        assert_eq!(asks(&between, "1", "10.0.0.1"), Verdict::Good);
    }

    #[test]
    fn a_token_stands_for_its_own_user_in_a_pod_alone() {
        let caller = |user: &str, pod| Caller {
            user: user.into(),
            pod,
        };
        let user = "system:serviceaccount:shop:web";
        let good = caller(user, Some(reference("1")));
        assert_eq!(
            whose(&good, user, "cluster.local").unwrap().1.as_str(),
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
            let status = whose(caller, name, "cluster.local").unwrap_err();
            assert_eq!(status.code(), tonic::Code::PermissionDenied);
            assert!(status.message().contains(part), "{}", status.message());
        }
    }
}
