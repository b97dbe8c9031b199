//! Writer thread of dumps: renders each record, writes it with one call, and once a second resets
//! the budget and reports the number of suppressed exchanges. Lines of the access log gather and
//! are written together. Only this thread waits for the output.

use std::io::Write;
use std::mem;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use diy_mesh_model::exchange::Dump;

use super::{Format, MAX_DUMPS_PER_SECOND, Message, Shared, lock, rfc3339};
use crate::observe::metrics::Metrics;

const SECOND: Duration = Duration::from_secs(1);
/// The time for which messages and lines gather: to wake this thread costs as much as many lines.
const GATHERING: Duration = Duration::from_millis(10);

pub(super) struct Writer {
    /// Weak, so that the thread ends when the last handle is dropped.
    shared: Weak<Shared>,
    metrics: Arc<Metrics>,
    format: Format,
    out: Box<dyn Write + Send>,
    /// Suppressed exchanges at the last report.
    reported: u64,
    /// Lines of the access log that wait.
    waiting: Arc<Mutex<Vec<u8>>>,
    /// Their place while they are written.
    lines: Vec<u8>,
}

/// The output is closed.
struct Closed;

impl Writer {
    pub fn new(shared: &Arc<Shared>, format: Format, out: Box<dyn Write + Send>) -> Self {
        Self {
            shared: Arc::downgrade(shared),
            metrics: shared.metrics.clone(),
            format,
            out,
            reported: 0,
            waiting: shared.lines.clone(),
            lines: Vec::new(),
        }
    }

    /// Runs until all handles are dropped or the output is closed.
    pub fn run(mut self, messages: &Receiver<Message>) {
        if self.serve(messages).is_err() {
            tracing::warn!("dumps stopped: the output is closed");
            if let Some(shared) = self.shared.upgrade() {
                // Suppresses all further dumps.
                shared.budget.store(0, Ordering::Relaxed);
            }
        }
    }

    fn serve(&mut self, messages: &Receiver<Message>) -> Result<(), Closed> {
        // Without messages, waits without a timeout.
        while let Ok(first) = messages.recv() {
            let (mut next, mut second_ends) = (Some(first), Instant::now() + SECOND);
            loop {
                if let Some(message) = next {
                    self.write(message)?;
                }
                let waiting = messages.try_recv().ok();
                if waiting.is_none() {
                    thread::sleep(GATHERING);
                    self.write_lines()?;
                }
                let left = second_ends.saturating_duration_since(Instant::now());
                let message = waiting.map_or_else(|| messages.recv_timeout(left), Ok);
                next = match message {
                    Ok(message) => Some(message),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => {
                        self.write_lines()?;
                        return self.report_suppressed().map(|_| ());
                    }
                };
                if Instant::now() >= second_ends {
                    second_ends = Instant::now() + SECOND;
                    if self.tick()? && next.is_none() {
                        self.release_lines();
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// Writes the lines that wait.
    fn write_lines(&mut self) -> Result<(), Closed> {
        mem::swap(&mut self.lines, &mut *lock(&self.waiting));
        if self.lines.is_empty() {
            return Ok(());
        }
        let written = self.out.write_all(&self.lines);
        let written = written.and_then(|()| self.out.flush());
        self.lines.clear();
        written.map_err(|_| Closed)
    }

    /// Releases the memory for lines, of which none waits.
    fn release_lines(&mut self) {
        self.lines = Vec::new();
        lock(&self.waiting).shrink_to_fit();
    }

    /// Resets the budget after a second. Returns whether the second had no exchanges.
    fn tick(&mut self) -> Result<bool, Closed> {
        // Before the report, which tests wait for.
        let remaining = self
            .shared
            .upgrade()
            .map_or(MAX_DUMPS_PER_SECOND, |shared| {
                shared.budget.swap(MAX_DUMPS_PER_SECOND, Ordering::Relaxed)
            });
        let reported = self.report_suppressed()?;
        Ok(remaining == MAX_DUMPS_PER_SECOND && !reported)
    }

    fn report_suppressed(&mut self) -> Result<bool, Closed> {
        let total = self.metrics.dumps_suppressed.get() + self.metrics.dumps_dropped.get();
        let more = total - self.reported;
        if more == 0 {
            return Ok(false);
        }
        self.reported = total;
        self.dump(&Dump::Suppressed {
            time: rfc3339(SystemTime::now()),
            suppressed: more,
        })?;
        Ok(true)
    }

    fn write(&mut self, message: Message) -> Result<(), Closed> {
        let exchange = match message {
            Message::Exchange(record, ended) => record.finish(ended.dumped()),
            Message::Opaque(ended) => ended.dumped(),
            Message::Wake => return Ok(()),
            Message::Flush(done) => {
                self.write_lines()?;
                self.report_suppressed()?;
                // The receiver may have timed out.
                let _ = done.send(());
                return Ok(());
            }
        };
        self.dump(&Dump::Exchange(Box::new(exchange)))
    }

    fn dump(&mut self, dump: &Dump) -> Result<(), Closed> {
        let rendered = match self.format {
            Format::Text => dump.text(),
            Format::Json => {
                serde_json::to_string(dump).expect("all keys of a record are strings") + "\n"
            }
        };
        self.put(&rendered)
    }

    fn put(&mut self, text: &str) -> Result<(), Closed> {
        self.out
            .write_all(text.as_bytes())
            .and_then(|()| self.out.flush())
            .map_err(|_| Closed)
    }
}
