//! The thread that writes dumps: renders records, writes each in one piece, and once a second fills the budget up and says
//! how much went by without a dump. It is the only place where a dump may wait.

use std::io::Write;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::{BUDGET, Format, Message, Shared, json, text};
use crate::metrics::Metrics;

const SECOND: Duration = Duration::from_secs(1);

pub(super) struct Writer {
    /// Weak: the thread ends when the last handle is gone.
    shared: Weak<Shared>,
    metrics: Arc<Metrics>,
    format: Format,
    out: Box<dyn Write + Send>,
    /// Exchanges that were not dumped, when that was last said.
    told: u64,
}

/// The output is gone.
struct Closed;

impl Writer {
    pub fn new(shared: &Arc<Shared>, format: Format, out: Box<dyn Write + Send>) -> Self {
        Self {
            shared: Arc::downgrade(shared),
            metrics: shared.metrics.clone(),
            format,
            out,
            told: 0,
        }
    }

    /// Writes until the handles or the output are gone.
    pub fn run(mut self, messages: &Receiver<Message>) {
        if self.serve(messages).is_err() {
            tracing::warn!("the output for dumps is closed: no more dumps; traffic goes on");
            if let Some(shared) = self.shared.upgrade() {
                // Never filled up again.
                shared.budget.store(0, Ordering::Relaxed);
            }
        }
    }

    fn serve(&mut self, messages: &Receiver<Message>) -> Result<(), Closed> {
        // Nothing goes by: sleep without a clock.
        while let Ok(first) = messages.recv() {
            self.write(first)?;
            let mut second_ends = Instant::now() + SECOND;
            loop {
                match messages.recv_timeout(second_ends.saturating_duration_since(Instant::now())) {
                    Ok(message) => self.write(message)?,
                    Err(RecvTimeoutError::Timeout) => {
                        second_ends = Instant::now() + SECOND;
                        if self.tick()? {
                            break;
                        }
                    }
                    Err(RecvTimeoutError::Disconnected) => {
                        return self.tell_suppressed().map(|_| ());
                    }
                }
            }
        }
        Ok(())
    }

    /// A second is over. True: nothing went by in it.
    fn tick(&mut self) -> Result<bool, Closed> {
        // Before anybody hears that the second is over.
        let left = self.shared.upgrade().map_or(BUDGET, |shared| {
            shared.budget.swap(BUDGET, Ordering::Relaxed)
        });
        let told = self.tell_suppressed()?;
        Ok(left == BUDGET && !told)
    }

    fn tell_suppressed(&mut self) -> Result<bool, Closed> {
        let total = self.metrics.dumps_suppressed.get() + self.metrics.dumps_dropped.get();
        let more = total - self.told;
        if more == 0 {
            return Ok(false);
        }
        self.told = total;
        self.put(&match self.format {
            Format::Text => text::suppressed(more),
            Format::Json => json::suppressed(more),
        })?;
        Ok(true)
    }

    fn write(&mut self, message: Message) -> Result<(), Closed> {
        let rendered = match (message, self.format) {
            (Message::Exchange(record), Format::Text) => text::exchange(&record),
            (Message::Exchange(record), Format::Json) => json::exchange(&record),
            (Message::Opaque(opaque), Format::Text) => text::opaque(&opaque),
            (Message::Opaque(opaque), Format::Json) => json::opaque(&opaque),
            (Message::Wake, _) => return Ok(()),
            (Message::Flush(done), _) => {
                self.tell_suppressed()?;
                // Whoever asked may have stopped waiting.
                let _ = done.send(());
                return Ok(());
            }
        };
        self.put(&rendered)
    }

    fn put(&mut self, rendered: &str) -> Result<(), Closed> {
        self.out
            .write_all(rendered.as_bytes())
            .and_then(|()| self.out.flush())
            .map_err(|_| Closed)
    }
}
