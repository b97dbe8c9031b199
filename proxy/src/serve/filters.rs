//! The steps between the plan of a request and its first attempt, in this order: authorization by the
//! policies of the pod, then by the authorization servers that they name, or that routes to the pod
//! name, rate limits, faults. Authorization and limits protect the pod's application: they apply
//! inbound. Faults test its callers: routes draw them, and only outbound requests have routes.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;

use crate::context::flow::Allowed;
use crate::context::record::ExchangeRecord;
use crate::egress::name_of;
use crate::error::Failure;
use crate::http::credentials::Credentials;
use crate::http::view::RequestView;
use crate::inbound::policy::Permit;
use crate::limits::deadline::Deadline;
use crate::route::fault::{FaultKind, Injection};
use crate::route::matching::MatchInput;
use crate::route::{Answer, Plan};
use crate::serve::{external, outside};
use crate::upstream::balance::Backend;
use diy_mesh_model::exchange::Direction;

/// The client of a request that is not forwarded yet.
pub trait Client {
    /// Ready when it leaves.
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<()>;

    /// Reads until the body ends or is longer than `max` bytes. Returns all that was read, which is
    /// kept for the application, or None if the client leaves.
    async fn read_body(
        &mut self,
        max: usize,
        record: &mut ExchangeRecord,
    ) -> Result<Option<Bytes>, Failure>;
}

/// Whether the request may be forwarded. None if the client leaves in the meantime.
pub async fn apply(
    plan: &mut Plan,
    request: &RequestView<'_>,
    backend: &mut Rc<Backend>,
    deadline: Deadline,
    record: &mut ExchangeRecord,
    allowed: &mut Allowed,
    client: &mut impl Client,
) -> Option<Result<Permit, Answer>> {
    let credentials = plan.credentials.as_deref();
    let mut permit = match record.flow.authorize_request(request, credentials) {
        Ok(permit) => permit,
        Err(failure) => return Some(Err(failure.into())),
    };
    allowed.authorizers = match record.flow.authorizers(request, credentials) {
        Ok(authorizers) => authorizers,
        Err(failure) => return Some(Err(failure.into())),
    };
    if record.flow.outside().is_some() || backend.external().is_some() {
        // The host that a route sets is that of its owner.
        let host = request.authority();
        let host = host.filter(|_| plan.request_edits(&[]).host.is_none());
        let name = host.and_then(name_of);
        let flow = record.flow.clone();
        // Boxed: most requests stay in the cluster.
        let found = Box::pin(outside::find(&flow, name, backend, &mut permit));
        match deadline.limit(pin!(async { Ok(found.await) })).await {
            Ok(Ok(denial)) => denial.iter().for_each(|denial| record.would_deny(denial)),
            Ok(Err(failure)) => return Some(Err(failure.into())),
            Err(limit) => return Some(Err(Failure::Timeout(limit).into())),
        }
    }
    if !allowed.authorizers.is_empty() {
        let authorizers = &allowed.authorizers;
        // Boxed: most requests need no answer.
        let asked = Box::pin(external::ask(
            authorizers,
            plan,
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
            Err(failure) => return Some(Err(failure.into())),
        }
    }
    if let Err(failure) = count(record, request, plan.credentials.as_deref()) {
        return Some(Err(failure.into()));
    }
    if !plan.faults.is_empty() {
        let faults = std::mem::take(&mut plan.faults);
        // Boxed: faults are for tests.
        let injected = Box::pin(inject(faults, deadline, record, client)).await?;
        if let Err(failure) = injected {
            return Some(Err(failure.into()));
        }
    }
    Some(plan.answer.take().map_or(Ok(permit), Err))
}

/// Records an authorized request, and takes a token of each rate limit that counts it.
fn count(
    record: &mut ExchangeRecord,
    request: &RequestView<'_>,
    credentials: Option<&Credentials>,
) -> Result<(), Failure> {
    record.allowed(request);
    if let Some(denial) = record.flow.audit(Some(request), credentials) {
        record.would_deny(&denial);
    }
    let flow = &record.flow;
    let policy = flow.worker.policy();
    if flow.direction == Direction::Outbound || policy.rate_limits.0.is_empty() {
        return Ok(());
    }
    let (port, caller) = (flow.original.port(), flow.caller.identity());
    let input = MatchInput::new(*request);
    let taken = policy
        .rate_limits
        .take(port, caller, &input, Instant::now());
    if let Err(Failure::RateLimited(exceeded)) = &taken {
        let (metrics, name) = (&flow.worker.metrics, &exceeded.name);
        metrics.rate_limited(exceeded.scope, name);
    }
    taken
}

/// Delays the request until its deadline at most, and fails in place of a backend. None if the
/// client leaves.
async fn inject(
    faults: Vec<Injection>,
    deadline: Deadline,
    record: &mut ExchangeRecord,
    client: &mut impl Client,
) -> Option<Result<(), Failure>> {
    let flow = record.flow.clone();
    for Injection { name, delay, abort } in faults {
        let count = |kind| flow.worker.metrics.fault(kind, &name);
        record.fault(&name, delay);
        if let Some(delay) = delay {
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
        if let Some(status) = abort {
            count(FaultKind::Abort);
            return Some(Err(Failure::FaultInjected { name, status }));
        }
    }
    Some(Ok(()))
}
