//! The queue of responses of one stream, bounded by number and, for all streams of a caller, by
//! bytes. An empty queue always has capacity: a stream that is not read does not stop others.

use std::sync::Arc;

use futures::{Stream, StreamExt as _};
use tokio::sync::mpsc::{self, Permit};
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::quota::Quota;

/// Responses that are queued for a client. No more are made before it has read these.
const MAX_QUEUED_RESPONSES: usize = 16;

/// The sending end.
pub(super) struct Responses<T> {
    queue: mpsc::Sender<Queued<T>>,
    read: Arc<Notify>,
    quota: Arc<Quota>,
}

type Queued<T> = (Result<T, Status>, [Option<OwnedSemaphorePermit>; 2]);

/// The capacity for one response.
pub(super) struct Capacity<'a, T> {
    place: Permit<'a, Queued<T>>,
    byte: Option<OwnedSemaphorePermit>,
    quota: &'a Quota,
}

/// A queue, and the stream of its responses.
pub(super) fn queue<T>(quota: Arc<Quota>) -> (Responses<T>, impl Stream<Item = Result<T, Status>>) {
    let (queue, responses) = mpsc::channel(MAX_QUEUED_RESPONSES);
    let read = Arc::new(Notify::new());
    let reading = read.clone();
    let responses = ReceiverStream::new(responses).map(move |(response, _): Queued<T>| {
        reading.notify_one();
        response
    });
    (Responses { queue, read, quota }, responses)
}

impl<T> Responses<T> {
    /// Waits for capacity. `None`: the client has disconnected. Cancel-safe.
    pub(super) async fn reserve(&self) -> Option<Capacity<'_, T>> {
        let place = self.queue.reserve().await.ok()?;
        let quota = &*self.quota;
        let byte = loop {
            let is_empty = self.queue.capacity() + 1 == MAX_QUEUED_RESPONSES;
            if is_empty {
                break None;
            }
            tokio::select! {
                byte = quota.byte() => break Some(byte),
                () = self.read.notified() => {}
                () = self.closed() => return None,
            }
        };
        Some(Capacity { place, byte, quota })
    }

    /// Completes when the client has disconnected.
    pub(super) async fn closed(&self) {
        self.queue.closed().await;
    }

    /// Ends the stream with an error. A client that reads no more does not receive it.
    pub(super) async fn fail(&self, status: Status) {
        let _ = self.queue.send((Err(status), [None, None])).await;
    }
}

impl<T> Capacity<'_, T> {
    /// Queues a response of this length.
    pub(super) fn send(self, response: T, length: usize) {
        let bytes = self.quota.bytes(length);
        self.place.send((Ok(response), [self.byte, bytes]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn fill(responses: &Responses<()>, length: usize) -> usize {
        let mut queued = 0;
        loop {
            tokio::select! {
                biased;
                capacity = responses.reserve() => capacity.unwrap().send((), length),
                () = std::future::ready(()) => return queued,
            }
            queued += 1;
        }
    }

    #[tokio::test]
    async fn streams_that_are_not_read_share_the_bytes_of_their_caller() {
        let quota = Arc::new(Quota::default());
        let (one, mut read_one) = queue(quota.clone());
        let (two, mut read_two) = queue(quota.clone());
        assert_eq!(fill(&one, 100_000).await, 3, "one exceeds the limit");
        assert_eq!(fill(&two, 100_000).await, 1, "an empty queue has capacity");
        for _ in 0..3 {
            read_two.next().await.unwrap().unwrap();
            assert_eq!(fill(&two, 100_000).await, 1);
        }
        read_one.next().await.unwrap().unwrap();
        assert_eq!(fill(&two, 100_000).await, 1);
        assert_eq!(fill(&one, 1).await, 0);
        drop(read_two);
        drop(two);
        assert!(fill(&one, 1).await > 10);
    }
}
