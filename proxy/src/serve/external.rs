//! External authorization: asks the authorization servers of policies and routes about a request that the policies
//! of the pod allow, one after the other. The first one that denies it decides.

use std::future::{Future as _, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::SystemTime;

use diy_mesh_http2::Request;
use diy_mesh_model::exchange::Direction;
use tokio::time::timeout;

use crate::context::flow::Flow;
use crate::context::record::ExchangeRecord;
use crate::error::{Failure, Limit};
use crate::http::answer::Answer;
use crate::http::view::RequestView;
use crate::inbound::external::{Authorizer, Body, Decision, Question, Subject};
use crate::inbound::policy::Caller;
use crate::labels::ExternalResult;
use crate::limits::deadline::Deadline;
use crate::limits::timeouts::TimeoutKind;
use crate::route::Plan;
use crate::secure::io::MAX_FILL;
use crate::serve::call::{Call, CallHead};
use crate::serve::exchange::{Added, Protocol};

/// The most bytes that are read of the body of an answer.
const MAX_ANSWER: usize = 16 * 1024;

/// Asks about a request, and adds the fields that the application gets. `None` if the client leaves.
pub async fn ask(
    authorizers: &[Arc<Authorizer>],
    (plan, added): (&Plan, &mut Added),
    request: &RequestView<'_>,
    deadline: Deadline,
    record: &mut ExchangeRecord,
    client: &mut impl Protocol,
) -> Result<Option<()>, Failure> {
    let flow = record.flow.clone();
    let identity = flow.worker.tls.identity();
    for authorizer in authorizers {
        let body = match authorizer.max_body {
            // The bytes after CONNECT are of a tunnel.
            max if max > 0 && request.method != b"CONNECT" => {
                let continues = request.expects_continue();
                read_body(client, max, continues, deadline, record).await?
            }
            _ => Some(Body::default()),
        };
        let Some(body) = body else {
            return Ok(None);
        };
        let own = flow.request_edits();
        let subject = Subject {
            request,
            body: &body,
            edits: added.edits(plan, &own),
            client: flow.peer,
            caller: flow.caller.identity(),
            server: flow.original,
            own: identity.as_ref(),
            time: SystemTime::now(),
        };
        let question = authorizer.question(&subject);
        let question = question.map_err(Failure::BadRequest)?;
        let timeout = Deadline::after(Some(authorizer.timeout), Limit::Attempt);
        let deadline = deadline.earlier(timeout);
        let mut answer = pin!(send(question, authorizer, deadline, &flow));
        let answer = poll_fn(|cx| match answer.as_mut().poll(cx) {
            Poll::Ready(answer) => Poll::Ready(Some(answer)),
            Poll::Pending => client.poll_gone(cx).map(|()| None),
        });
        let Some(answer) = answer.await else {
            return Ok(None);
        };
        let decision = answer.and_then(|answer| {
            let decision = authorizer.decision(&answer);
            decision.map_err(|reason| failed(authorizer, reason))
        });
        apply(decision, authorizer, added, record)?;
    }
    Ok(Some(()))
}

/// Reads the part of the body that a server gets. A client that does not send it in time is
/// refused: neither the failure mode nor a part of the body may let its request pass. `None` if the
/// client leaves.
async fn read_body(
    client: &mut impl Protocol,
    max: usize,
    expects_continue: bool,
    deadline: Deadline,
    record: &mut ExchangeRecord,
) -> Result<Option<Body>, Failure> {
    let flow = record.flow.clone();
    let time = flow.worker.config.timeouts.request_head;
    let reading = pin!(async {
        let read = timeout(time, client.read_body(max, expects_continue, record)).await;
        read.unwrap_or_else(|_| {
            flow.count_timeout(TimeoutKind::RequestHead);
            Err(Failure::RequestTimeout)
        })
    });
    let read = deadline.limit(reading).await?;
    Ok(read.map(|read| Body::new(read, max)))
}

/// Sends a question for the pod.
async fn send(
    question: Question,
    authorizer: &Authorizer,
    deadline: Deadline,
    flow: &Flow,
) -> Result<Answer, Failure> {
    if authorizer.backend.is_empty() {
        let reason = "its backendRef, or its rule, is not valid";
        return Err(failed(authorizer, reason.to_owned()));
    }
    let (head, body) = match question {
        Question::Http { head, method, body } => {
            let chunked = false;
            let head = CallHead::Http1 {
                head,
                method,
                chunked,
            };
            (head, body)
        }
        Question::Grpc(request) => {
            let (parts, body) = request.into_parts();
            (CallHead::Http2(Box::new(Request::from(&parts))), body)
        }
    };
    let mut memory = flow.charge();
    memory.begin(2 * (head.size() + body.len()) + MAX_FILL + MAX_ANSWER)?;
    let call = Call {
        head,
        body,
        is_repeatable: true,
        max_answer: Some(MAX_ANSWER),
    };
    let own = Flow {
        direction: Direction::Outbound,
        caller: Caller::App,
        ..flow.clone()
    };
    let sent = pin!(call.send(&own, &authorizer.backend, deadline));
    deadline.limit(sent).await.map_err(|failure| match failure {
        Failure::Timeout(Limit::Attempt) => failed(
            authorizer,
            format!("timed out after {:?}", authorizer.timeout),
        ),
        // The client waits no longer, or has used its share of the memory: it would choose the
        // failure mode.
        Failure::Timeout(_) | Failure::Overloaded(_) | Failure::MemoryExhausted => failure,
        failure => failed(authorizer, failure.to_string()),
    })
}

fn failed(authorizer: &Authorizer, reason: String) -> Failure {
    Failure::AuthorizerFailed {
        policy: authorizer.policy.clone(),
        reason,
    }
}

/// Applies a decision, or the policy's failure mode.
fn apply(
    decision: Result<Decision, Failure>,
    authorizer: &Authorizer,
    added: &mut Added,
    record: &mut ExchangeRecord,
) -> Result<(), Failure> {
    let metrics = record.flow.worker.metrics.clone();
    let count = |result| metrics.external(result);
    match decision {
        Ok(Decision::Allowed(fields)) => {
            count(ExternalResult::Allowed);
            added.set_fields(fields);
            Ok(())
        }
        Ok(Decision::Denied(reply)) => {
            count(ExternalResult::Denied);
            Err(Failure::ExternallyDenied {
                policy: authorizer.policy.clone(),
                reply: Box::new(reply),
            })
        }
        Err(Failure::AuthorizerFailed { policy, reason }) if authorizer.fails_open => {
            count(ExternalResult::FailedOpen);
            record.failed_open(&policy, &reason);
            Ok(())
        }
        Err(failure) => {
            count(ExternalResult::Failed);
            Err(failure)
        }
    }
}
