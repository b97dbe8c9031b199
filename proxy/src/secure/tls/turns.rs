//! The order of a worker's TLS handshakes in a burst of new connections.

use std::rc::Rc;

use tokio::sync::Semaphore;
use tokio::task::yield_now;

/// The steps of handshakes that take long or make more work: one connects, or processes a message,
/// in each round of the worker's event loop. Tasks that have become ready meanwhile run first, so a
/// new connection waits for at most one step before its ClientHello is sent. With all steps in one
/// round, the ClientHellos of a burst would be late by the sum of them. A late ClientHello looks to
/// a callee like the silence of a client of a server that speaks first.
#[derive(Clone)]
pub struct Turns(Rc<Semaphore>);

impl Default for Turns {
    fn default() -> Self {
        Self(Rc::new(Semaphore::new(1)))
    }
}

impl Turns {
    /// Waits for a turn, in the order of calls. The turn lasts until the caller waits for something.
    pub async fn next(&self) {
        let _round = self.0.acquire().await;
        // Continues after the event loop has polled the sockets, and after all that they have woken.
        yield_now().await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::task::Poll;

    use tokio::io::AsyncReadExt;
    use tokio::net::UnixStream;
    use tokio::task::{LocalSet, spawn_local};

    use super::*;

    /// Each step makes a socket readable, whose reader has run when the next step begins.
    #[tokio::test]
    async fn ready_sockets_are_read_between_two_steps() {
        let (writer, mut reader) = UnixStream::pair().unwrap();
        let writer = Rc::new(writer);
        let (turns, read) = (Turns::default(), Rc::new(Cell::new(0)));
        let steps = Rc::new(Cell::new(0));
        let counted = read.clone();
        let run = async {
            let reading = spawn_local(async move {
                while reader.read_u8().await.is_ok() {
                    counted.set(counted.get() + 1);
                }
            });
            let mut tasks = Vec::new();
            for _ in 0..200 {
                let (turns, read, steps) = (turns.clone(), read.clone(), steps.clone());
                let writer = writer.clone();
                tasks.push(spawn_local(async move {
                    turns.next().await;
                    let step = steps.replace(steps.get() + 1);
                    assert_eq!(read.get(), step);
                    writer.try_write(&[0]).unwrap();
                }));
            }
            for task in tasks {
                task.await.unwrap();
            }
            drop(writer);
            reading.await.unwrap();
        };
        LocalSet::new().run_until(run).await;
        assert_eq!(steps.get(), 200);
    }

    #[tokio::test]
    async fn cancelled_wait_takes_no_turn() {
        let turns = Turns::default();
        let mut first = Box::pin(turns.next());
        let mut second = Box::pin(turns.next());
        assert!(
            std::future::poll_fn(|cx| Poll::Ready(
                first.as_mut().poll(cx).is_pending() && second.as_mut().poll(cx).is_pending()
            ))
            .await
        );
        drop(first);
        second.await;
    }
}
