//! The steps between the plan of a request and its first attempt, in this order: policies of the pod
//! that need no token, rate limits of the caller, the token, the other policies, rate limits of the
//! Service, the authorization servers that policies or routes to the pod name, faults. Authorization
//! and limits protect the pod's application: they apply inbound. Faults test its callers: routes draw
//! them, and only outbound requests have routes.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Instant;

use crate::context::flow::{Allowed, Flow};
use crate::context::record::ExchangeRecord;
use crate::egress::name_of;
use crate::error::Failure;
use crate::http::edits::{Edited, Edits};
use crate::http::view::RequestView;
use crate::inbound::limit::{By, Stage, Taken};
use crate::inbound::policy::Permit;
use crate::limits::deadline::Deadline;
use crate::route::Plan;
use crate::route::fault::{FaultKind, Injection};
use crate::route::matching::MatchInput;
use crate::serve::exchange::{Added, Exchange, Protocol};
use crate::serve::{external, outside};
use crate::upstream::balance::Backend;
use diy_mesh_model::exchange::Direction;

/// Whether the request may be forwarded. `None` if the client leaves in the meantime.
pub async fn apply<P: Protocol>(
    exchange: &mut Exchange<P>,
    plan: &Plan,
    backend: &mut Rc<Backend>,
    deadline: Deadline,
) -> Option<Result<Permit, Failure>> {
    let Exchange {
        head,
        client,
        record,
        allowed,
        added,
    } = exchange;
    let request = &P::view(head);
    let (mut permit, taken) = match authorize(added, request, record, allowed) {
        Ok(authorized) => authorized,
        Err(failure) => return Some(Err(failure)),
    };
    if record.flow.outside().is_some() || backend.external().is_some() {
        // The owner of a route chooses the host that it sets.
        let host = request.authority();
        let host = host.filter(|_| plan.request_edits(Edits::default()).host.is_none());
        let name = host.and_then(name_of);
        let flow = record.flow.clone();
        // Boxed: most requests stay in the cluster.
        let found = Box::pin(outside::find(&flow, name, backend, &mut permit));
        match deadline.limit(pin!(async { Ok(found.await) })).await {
            Ok(Ok(denial)) => denial.iter().for_each(|denial| record.would_deny(denial)),
            Ok(Err(failure)) => return Some(Err(failure)),
            Err(limit) => return Some(Err(Failure::Timeout(limit))),
        }
    }
    if !allowed.authorizers.is_empty() {
        // Boxed: most requests need no answer.
        let asked = Box::pin(external::ask(
            &allowed.authorizers,
            (plan, added),
            request,
            deadline,
            record,
            client,
        ));
        match asked.await {
            Ok(Some(())) => {}
            Ok(None) => {
                record.cut_off("the client closed");
                return None;
            }
            Err(failure) => {
                taken.put_back_shared();
                return Some(Err(failure));
            }
        }
    }
    record.allowed(request);
    let credentials = added.credentials.as_deref();
    if let Some(denial) = record.flow.audit(Some(request), credentials) {
        record.would_deny(&denial);
    }
    if !plan.faults.is_empty() {
        // Boxed: faults are for tests.
        let injected = Box::pin(inject(&plan.faults, deadline, record, client)).await?;
        if let Err(failure) = injected {
            return Some(Err(failure));
        }
    }
    Some(Ok(permit))
}

/// Authorizes a request by the policies of the pod and its limits: first what needs no token, then the
/// limits of the caller, which protect the verification of tokens and the authorization servers.
fn authorize(
    added: &mut Added,
    request: &RequestView<'_>,
    record: &ExchangeRecord,
    allowed: &mut Allowed,
) -> Result<(Permit, Taken), Failure> {
    let flow = &record.flow;
    let permit = flow.authorize_before_token(request)?;
    take(Stage::BeforeToken, flow, request)?;
    if let Some(credentials) = &mut added.credentials {
        flow.verify(credentials);
    }
    let credentials = added.credentials.as_deref();
    let permit = match permit {
        Some(permit) => permit,
        None => flow.authorize_request(request, credentials)?,
    };
    allowed.authorizers = flow.authorizers(request, credentials)?;
    // Limits see what the application gets of tokens.
    let head = Edited {
        head: request.head,
        edits: Edits {
            policy: credentials.map_or(&[], |credentials| &credentials.fields),
            ..Edits::default()
        },
    };
    let request = RequestView {
        head: &head,
        ..*request
    };
    Ok((permit, take(Stage::Allowed, flow, &request)?))
}

/// Takes a token of each rate limit of a stage that counts the request.
fn take(stage: Stage, flow: &Flow, request: &RequestView<'_>) -> Result<Taken, Failure> {
    let policy = flow.worker.policy();
    if flow.direction == Direction::Outbound || policy.rate_limits.0.is_empty() {
        return Ok(Taken::default());
    }
    let address = || By::Address(flow.peer.ip());
    let caller = flow.caller.identity().map_or_else(address, By::Identity);
    let set = flow.policy_fields();
    let set = set.as_deref().unwrap_or_default();
    let (port, input) = (flow.original.port(), MatchInput::new(*request));
    let limits = &policy.rate_limits;
    let taken = limits.take(stage, set, port, caller, &input, Instant::now());
    if let Err(Failure::RateLimited(exceeded)) = &taken {
        let (metrics, name) = (&flow.worker.metrics, &exceeded.name);
        metrics.rate_limited(exceeded.scope, name);
    }
    taken
}

/// Delays the request until its deadline at most, and fails in place of a backend. `None` if the
/// client leaves.
async fn inject(
    faults: &[Injection],
    deadline: Deadline,
    record: &mut ExchangeRecord,
    client: &mut impl Protocol,
) -> Option<Result<(), Failure>> {
    let flow = record.flow.clone();
    for Injection { name, delay, abort } in faults {
        let count = |kind| flow.worker.metrics.fault(kind, name);
        record.fault(name, *delay);
        if let Some(delay) = *delay {
            count(FaultKind::Delay);
            let delayed = pin!(async {
                let mut sleep = pin!(tokio::time::sleep(delay));
                Ok(poll_fn(|cx| match sleep.as_mut().poll(cx) {
                    Poll::Ready(()) => Poll::Ready(true),
                    Poll::Pending => client.poll_gone(cx).map(|()| false),
                })
                .await)
            });
            match deadline.limit(delayed).await {
                Ok(true) => {}
                Ok(false) => {
                    record.cut_off("the client closed");
                    return None;
                }
                Err(limit) => return Some(Err(Failure::Timeout(limit))),
            }
        }
        if let Some(status) = *abort {
            count(FaultKind::Abort);
            let name = name.clone();
            return Some(Err(Failure::FaultInjected { name, status }));
        }
    }
    Some(Ok(()))
}
