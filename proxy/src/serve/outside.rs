//! Calls to destinations outside of the cluster: the address that a name leads to. The attempts judge
//! it (`attempts.rs`); here is only what they need to allow it.

#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use diy_mesh_proto::authorization::Denial;

use crate::context::external;
use crate::context::flow::Flow;
use crate::egress::{Egress, Outside};
use crate::error::Failure;
use crate::inbound::policy::Permit;
use crate::labels::Verdict;
use crate::upstream::balance::Backend;

/// Replaces the backend of a call to outside of the cluster by an address that the proxy has
/// resolved itself, where the policies allow the name and not the address that the application has
/// chosen. That address stays if the name has it. Returns the denial of policies under audit. The
/// destination is an edge of the pod, unless it is denied.
pub async fn find(
    flow: &Flow,
    name: Option<String>,
    backend: &mut Rc<Backend>,
    permit: &mut Permit,
) -> Result<Option<Denial>, Failure> {
    // A host that a route has as its backend is resolved already.
    let host = backend.external();
    let Some(chosen) = host
        .as_ref()
        .map(|to| to.address)
        .or_else(|| flow.outside())
    else {
        return Ok(None);
    };
    let egress = flow.worker.policy().egress.clone();
    let name = match &host {
        Some(to) => {
            if let (Some(egress), Some(name)) = (&egress, name) {
                judge_host(flow, egress, to, name)?;
            }
            to.name.as_deref().map(str::to_owned)
        }
        None => name,
    };
    let (mut is_allowed, mut denial) = (true, None);
    if let Some(egress) = egress {
        is_allowed = match &host {
            Some(to) => egress.judge(to).is_ok(),
            None => egress.allows_address(chosen),
        };
        let named = name.as_deref().filter(|_| host.is_none() && !is_allowed);
        let allowed_name = named.filter(|name| egress.names(name, chosen.port()));
        if let Some(name) = allowed_name {
            let (to, found) = resolve(flow, &egress, name.into(), chosen).await?;
            permit.name(to);
            *backend = found;
            is_allowed = true;
        } else if let Some(name) = named {
            // The denial names the host, not only the address that the application has chosen.
            egress.judge(&Outside {
                address: chosen,
                name: Some(name.into()),
            })?;
        }
        denial = egress.audit(chosen, name.as_deref());
    }
    if denial.is_some() {
        let metrics = &flow.worker.metrics;
        metrics.verdict(flow.direction, Verdict::WouldDeny);
    }
    if is_allowed && !flow.worker.config.hide_edges {
        flow.worker.edges.add_destination(name.as_deref(), chosen);
    }
    Ok(denial)
}

/// Whether a request to a host outside may name this one. A server of several hosts would answer for
/// another one than the policies allow (domain fronting).
fn judge_host(flow: &Flow, egress: &Egress, to: &Outside, name: String) -> Result<(), Failure> {
    let service = flow.destination.name();
    let (namespace, service) = service.split_once('/').unwrap_or_default();
    let own = flow.worker.tls.identity();
    let domain = own
        .as_ref()
        .map_or("cluster.local", |own| own.trust_domain());
    let is_service = name.strip_prefix(service).is_some_and(|rest| {
        let rest = rest
            .strip_suffix(domain)
            .and_then(|rest| rest.strip_suffix('.'))
            .unwrap_or(rest);
        let rest = rest.strip_suffix(".svc").unwrap_or(rest);
        rest.is_empty() || rest.strip_prefix('.') == Some(namespace)
    });
    if is_service || to.name.as_deref() == Some(&*name) {
        return Ok(());
    }
    egress.judge(&Outside {
        address: to.address,
        name: Some(name.into()),
    })
}

/// An address of the name, of the family that the application has chosen.
async fn resolve(
    flow: &Flow,
    egress: &Egress,
    name: Arc<str>,
    chosen: SocketAddr,
) -> Result<(Outside, Rc<Backend>), Failure> {
    let resolved = flow.worker.resolver.resolve(&name, chosen.is_ipv6()).await;
    let mut addresses = resolved.map_err(|reason| Failure::Unresolved {
        name: name.clone(),
        reason,
    })?;
    addresses.sort_by_key(|address| *address != chosen.ip());
    let mut refusal = Failure::Unresolved {
        name: name.clone(),
        reason: "it has no address of this family".to_owned(),
    };
    for address in addresses {
        let to = Outside {
            address: SocketAddr::new(address, chosen.port()),
            name: Some(name.clone()),
        };
        match judge(flow, egress, &to).await {
            Ok(backend) => return Ok((to, backend)),
            Err(failure) => refusal = failure,
        }
    }
    Err(refusal)
}

/// The backend of an address of the name.
async fn judge(flow: &Flow, egress: &Egress, to: &Outside) -> Result<Rc<Backend>, Failure> {
    egress.judge(to)?;
    let backend = external::backend_at(&flow.worker, to.address).await;
    backend.map_err(|refusal| Failure::EgressDenied {
        destination: to.to_string(),
        reason: format!("the address, which is {refusal}"),
    })
}
