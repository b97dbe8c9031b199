//! Step 8 for HTTP/1: one connection of a client, one exchange after the other.
//!
//! Heads are parsed strictly and messages are framed anew, so that two hops never disagree about
//! where a message ends. HTTP/1 leaves as HTTP/1, with the case and order of its fields.

pub mod body;
mod exchange;
pub mod head;

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, timeout, timeout_at};

use self::exchange::{After, Exchange, reply};
use self::head::{MAX_HEAD, Refused, RequestHead, find_end};
use crate::error::Failure;
use crate::flow::Flow;
use crate::io::Io;
use crate::lifetime::{Lifetime, drained_or};
use crate::metrics::Protocol;
use crate::record::ExchangeRecord;
use crate::timeouts::{IdleTimer, TimeoutKind};

/// Bytes that are read from a client after the last response, so that it is not lost to a reset.
const MAX_LINGER: usize = 256 * 1024;
/// How long they are read.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);

/// Serves a client's connection until either side closes it.
pub async fn serve(mut client: Io, flow: &Rc<Flow>) {
    let closes_at = client.lifetime().map(Lifetime::closes_idle_at);
    let mut end = pin!(drained_or(&flow.worker.drain, closes_at));
    let mut idle = IdleTimer::new(flow.worker.config.timeouts.http1_idle);
    loop {
        idle.touch();
        let request = match read_request(&mut client, flow, end.as_mut(), &mut idle).await {
            Ok(Some(request)) => request,
            Ok(None) => return,
            Err(failure) => {
                let mut record = ExchangeRecord::new(flow, Protocol::Http1);
                reply(&mut client, &mut record, &failure, false, false).await;
                return linger(client).await;
            }
        };
        match Exchange::new(&mut client, flow, request).run().await {
            After::KeepAlive => {}
            After::Close => return linger(client).await,
            After::Closed => return,
        }
    }
}

/// Reads a request's head. None if the client or the proxy closes the connection between two
/// requests.
async fn read_request(
    client: &mut Io,
    flow: &Flow,
    mut end: Pin<&mut impl Future<Output = ()>>,
    idle_timer: &mut IdleTimer,
) -> Result<Option<RequestHead>, Failure> {
    let mut scanned = 0;
    let mut deadline = None;
    loop {
        if let Some(end) = find_end(client.unread(), &mut scanned).map_err(Failure::from)? {
            let raw = client.unread().split_to(end).freeze();
            return RequestHead::parse(raw).map(Some).map_err(Failure::from);
        }
        let idle = client
            .unread()
            .iter()
            .all(|byte| matches!(byte, b'\r' | b'\n'));
        let filled = if idle {
            poll_fn(|cx| match client.poll_fill(cx) {
                Poll::Pending => {
                    if idle_timer.poll(cx).is_ready() {
                        flow.count_timeout(TimeoutKind::Http1Idle);
                    } else {
                        ready!(end.as_mut().poll(cx));
                    }
                    // An error means that the client has closed.
                    let _ = Pin::new(&mut *client).poll_shutdown(cx);
                    Poll::Ready(Ok(0))
                }
                filled => filled,
            })
            .await
        } else {
            // One deadline for the whole head: a byte now and then does not extend it.
            let head_timeout = flow.worker.config.timeouts.request_head;
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + head_timeout);
            timeout_at(deadline, poll_fn(|cx| client.poll_fill(cx)))
                .await
                .map_err(|_| {
                    flow.count_timeout(TimeoutKind::RequestHead);
                    Failure::RequestTimeout
                })?
        };
        match filled {
            Ok(0) | Err(_) if idle => return Ok(None),
            Ok(0) => {
                return Err(Failure::BadRequest(
                    "the connection was closed in the middle of a head",
                ));
            }
            Err(_) => return Ok(None),
            Ok(_) => {}
        }
    }
}

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::TooLarge => Self::HeadersTooLarge(MAX_HEAD),
            Refused::Malformed(reason) => Self::BadRequest(reason),
        }
    }
}

/// Closes a connection so that the client sees the last response: a close while its bytes still
/// arrive would reset it.
async fn linger(mut client: Io) {
    if client.shutdown().await.is_err() {
        return;
    }
    let drained = async {
        let mut total = 0;
        while total < MAX_LINGER {
            client.unread().clear();
            match poll_fn(|cx| client.poll_fill(cx)).await {
                Ok(read) if read > 0 => total += read,
                _ => break,
            }
        }
    };
    // A client that sends for longer gets the reset.
    let _ = timeout(LINGER_TIMEOUT, drained).await;
}
