//! Step 5, outbound: hosts outside of the cluster as backends of routes. A task follows the addresses of
//! a host as long as it has a backend. This module opens no connections.

use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::context::worker::Worker;
use crate::discovery::{Place, Target, TargetKind};
use crate::egress::{Outside, is_local, is_private};
use crate::endpoint::{EndpointInfo, ExternalHost};
use crate::route::BackendRef;
use crate::upstream::balance::Backend;

/// How often the addresses of a host are resolved: the resolver keeps them for this time at least.
const RESOLVE_INTERVAL: Duration = Duration::from_secs(5);
/// The same for a host without usable addresses.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// The maximum number of addresses of a host that are used.
const MAX_ADDRESSES: usize = 16;

impl Worker {
    /// The backend of a rule. Waits for the first response about a new one, from the controller or
    /// from name servers.
    pub async fn backend(self: &Rc<Self>, to: &BackendRef) -> Rc<Backend> {
        match to {
            BackendRef::Service(name) => self.destinations.backend(name).await,
            BackendRef::External(host) => {
                let follow = async || follow(self, host).await;
                self.destinations.external(host, follow).await
            }
        }
    }
}

/// The addresses of a host, and their changes until the result is dropped.
async fn follow(worker: &Rc<Worker>, host: &Arc<ExternalHost>) -> watch::Receiver<Arc<Target>> {
    let first = resolve(worker, host, &[]).await;
    let (updates, receiver) = watch::channel(Arc::new(first));
    let (worker, host) = (worker.clone(), host.clone());
    tokio::task::spawn_local(async move {
        loop {
            let before = updates.borrow().clone();
            let interval = if before.endpoints.is_empty() {
                RETRY_INTERVAL
            } else {
                RESOLVE_INTERVAL
            };
            tokio::select! {
                () = updates.closed() => return,
                () = tokio::time::sleep(interval) => {}
                () = worker.policy_changed() => {}
            }
            let target = resolve(&worker, &host, &before.endpoints).await;
            if target != *before {
                updates.send_replace(Arc::new(target));
            }
        }
    });
    receiver
}

/// The endpoints of a host: its IPv4 addresses if it has any, else its IPv6 addresses. Without an
/// answer, the addresses in `before` stay.
pub(crate) async fn resolve(
    worker: &Rc<Worker>,
    host: &Arc<ExternalHost>,
    before: &[Arc<EndpointInfo>],
) -> Target {
    let resolver = &worker.resolver;
    let (v4, v6) = tokio::join!(
        resolver.resolve(&host.host, false),
        resolver.resolve(&host.host, true),
    );
    let resolved = match v4 {
        Ok(none) if none.is_empty() => v6,
        found => found,
    };
    let (addresses, mut reason) = match resolved {
        Ok(addresses) if addresses.is_empty() => (addresses, Some("it has no address".to_owned())),
        Ok(addresses) => (addresses, None),
        Err(reason) => {
            let before = before.iter().map(|info| info.address.ip());
            (before.collect(), Some(reason))
        }
    };
    let endpoints = match usable(worker, host, addresses).await {
        Ok(endpoints) => endpoints,
        Err(refusal) => {
            reason.get_or_insert_with(|| format!("its addresses are {refusal}"));
            vec![]
        }
    };
    if let Some(reason) = &reason
        && worker.warnings.should_log(Instant::now())
    {
        tracing::warn!(backend = %host.name, "cannot resolve {}: {reason}", host.host);
    }
    match reason {
        Some(reason) if endpoints.is_empty() => Target::from(TargetKind::Unresolved {
            host: host.host.clone(),
            reason,
        }),
        _ => Target {
            endpoints: endpoints
                .into_iter()
                .map(|address| endpoint(host, address, before))
                .collect(),
            ..Target::from(TargetKind::Service)
        },
    }
}

/// An endpoint, the same one as before if there was one.
fn endpoint(
    host: &Arc<ExternalHost>,
    address: SocketAddr,
    before: &[Arc<EndpointInfo>],
) -> Arc<EndpointInfo> {
    let known = before.iter().find(|info| info.address == address);
    known.cloned().unwrap_or_else(|| {
        Arc::new(EndpointInfo {
            external: Some(host.clone()),
            ..EndpointInfo::bare(address)
        })
    })
}

/// The addresses to which the name may lead, sorted: those that the policies allow, if there are any.
/// Fails if all are refused.
async fn usable(
    worker: &Rc<Worker>,
    host: &ExternalHost,
    mut addresses: Vec<IpAddr>,
) -> Result<Vec<SocketAddr>, Refusal> {
    addresses.sort_unstable();
    addresses.dedup();
    let mut judged = JoinSet::new();
    for ip in addresses.into_iter().take(MAX_ADDRESSES) {
        let (worker, address) = (worker.clone(), SocketAddr::new(ip, host.port));
        judged.spawn_local(async move {
            let backend = backend_at(&worker, address).await?;
            // A block may contain pods and Services. Their endpoints may be meshed: only discovery
            // knows how to connect to them.
            backend.outside().map(|_| address).ok_or(Refusal::Local)
        });
    }
    let (mut usable, mut refusal) = (Vec::new(), None);
    for judged in judged.join_all().await {
        match judged {
            Ok(address) => usable.push(address),
            Err(other) => refusal = refusal.max(Some(other)),
        }
    }
    if let Some(refusal) = refusal.filter(|_| usable.is_empty()) {
        return Err(refusal);
    }
    usable.sort_unstable();
    let policy = worker.policy();
    let is_allowed = |address: &SocketAddr| {
        let to = Outside {
            address: *address,
            name: Some(host.host.clone()),
        };
        policy.judge_outside(&to).is_ok()
    };
    if usable.iter().any(is_allowed) {
        usable.retain(is_allowed);
    }
    Ok(usable)
}

/// Why a name does not lead to one of its addresses. One with a setting is the greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Refusal {
    /// The address is of the machine or the cluster.
    #[error(
        "local or of the cluster: no name leads there, but a block of addresses in a policy may"
    )]
    Local,
    /// The address is private, and the setting of the pod refuses those.
    #[error(
        "private: with egress.privateNames=false no name leads there, but a block of addresses in a \
         policy may"
    )]
    Private,
}

/// The backend of an address that a name has. A name must not lead to local addresses or into the
/// cluster, nor to private ones with a setting: whoever answers for it could choose any address
/// there. A block of addresses may.
pub async fn backend_at(worker: &Worker, address: SocketAddr) -> Result<Rc<Backend>, Refusal> {
    let is_private = is_private(address.ip());
    let refusal = if is_local(address.ip()) {
        Refusal::Local
    } else if is_private && worker.config.refuse_private_names {
        Refusal::Private
    } else {
        let backend = worker.destinations.get_or_watch(address).await;
        let place = backend.outside().map(|_| backend.place());
        match place {
            Some(Place::Outside) => return Ok(backend),
            // The controller has not answered.
            Some(Place::Unanswered) if !is_private => return Ok(backend),
            Some(Place::Unanswered | Place::Node) | None => Refusal::Local,
        }
    };
    let is_in_block = {
        let policy = worker.policy();
        let egress = policy.egress.as_ref();
        egress.is_some_and(|egress| egress.allows_address(address))
    };
    if is_in_block {
        Ok(worker.destinations.get_or_watch(address).await)
    } else {
        Err(refusal)
    }
}
