//! Copies of requests, which routes send to further backends ("mirror"). A copy is complete when the
//! whole request has passed, and is sent by a task of its own: the request never waits for it. Its
//! response is read and dropped.

use crate::labels::MirrorResult;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::spawn_local;

use crate::context::flow::Flow;
use crate::error::Limit;
use crate::http::replay::MAX_REPLAY;
use crate::limits::deadline::Deadline;
use crate::limits::memory::Charge;
use crate::secure::io::MAX_FILL;
use crate::serve::call::{Call, CallHead};

/// The time for a copy and its response.
const MIRROR_TIMEOUT: Duration = Duration::from_secs(10);

/// A copy that is collected while its request passes.
pub struct Mirror {
    head: CallHead,
    body: BytesMut,
    backends: Vec<Arc<str>>,
    flow: Rc<Flow>,
    memory: Charge,
    slot: OwnedSemaphorePermit,
}

impl Mirror {
    /// Begins a copy for each of these backends, or returns `None` if there are too many copies.
    pub fn new(flow: &Rc<Flow>, backends: &[Arc<str>], head: CallHead) -> Option<Box<Self>> {
        let slot = flow.worker.mirrors.clone().try_acquire_owned().ok();
        let mut memory = Charge::new(Rc::new(flow.slot.beside()));
        // The copy, its message for a backend, and the response that is read.
        let needed = 2 * (head.size() + MAX_REPLAY) + MAX_FILL;
        let slot = slot.filter(|_| memory.try_grow(needed));
        if slot.is_none() {
            flow.worker.metrics.mirror(MirrorResult::Dropped);
        }
        Some(Box::new(Self {
            head,
            body: BytesMut::new(),
            backends: backends.to_vec(),
            flow: flow.clone(),
            memory,
            slot: slot?,
        }))
    }

    /// Copies bytes of the body. False if the body is too long.
    pub fn body(&mut self, data: &[u8]) -> bool {
        let fits = self.body.len() + data.len() <= MAX_REPLAY && !self.memory.slot().is_ended();
        if fits {
            self.body.extend_from_slice(data);
        } else {
            self.flow.worker.metrics.mirror(MirrorResult::Dropped);
        }
        fits
    }

    /// Sends the copies, in the background.
    pub fn send(self) {
        spawn_local(async move {
            let Self {
                head,
                body,
                backends,
                flow,
                memory,
                slot,
            } = self;
            let call = Call {
                head,
                body: body.freeze(),
                is_repeatable: false,
                max_answer: None,
            };
            let sent = pin!(async {
                for name in backends {
                    let result = send(&flow, &name, &call).await;
                    flow.worker.metrics.mirror(result);
                }
            });
            if memory.slot().run(sent).await.is_none() {
                flow.worker.metrics.mirror(MirrorResult::Dropped);
            }
            drop(slot);
        });
    }
}

/// Sends a copy to one backend.
async fn send(flow: &Flow, name: &Arc<str>, call: &Call) -> MirrorResult {
    let deadline = Deadline::after(Some(MIRROR_TIMEOUT), Limit::Exchange);
    match call.send(flow, name, deadline).await {
        Ok(answer) if answer.whole().is_ok() => MirrorResult::Answered,
        Ok(_) => MirrorResult::Failed,
        Err(failure) => {
            tracing::debug!(backend = %name, "mirrored request failed: {failure}");
            MirrorResult::Failed
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::context::worker::{Worker, WorkerContext};
    use crate::inbound::policy::Caller;
    use crate::limits::memory::Holder;
    use crate::upstream::balance::Backend;
    use diy_mesh_model::exchange::Direction;

    #[tokio::test]
    async fn copy_is_charged_with_all_that_it_holds() {
        let address = ([127, 0, 0, 1], 80).into();
        let worker = Worker::new(WorkerContext::for_a_test(""));
        let flow = Rc::new(Flow {
            called_by: Default::default(),
            counted: Default::default(),
            slot: worker.slot(),
            worker: worker.clone(),
            direction: Direction::Outbound,
            peer: address,
            original: address,
            destination: Backend::alone(address),
            caller: Caller::App,
        });
        let head = CallHead::Http1 {
            head: vec![b'h'; 60_000].into(),
            method: Bytes::from_static(b"POST"),
            chunked: true,
        };
        let mirror = Mirror::new(&flow, &[], head);
        let used = || worker.admission.used_bytes(&Holder::App.path());
        assert!(used() >= 2 * (60_000 + MAX_REPLAY), "{} bytes", used());
        drop(mirror);
        assert_eq!(used(), 0);
    }
}
