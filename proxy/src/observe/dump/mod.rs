//! Dumps: requests and responses in readable form. Workers get an [`ExchangeDump`] of each exchange
//! from [`Dumps::exchange`] and fill it; a separate thread renders and writes it. It writes the lines
//! of the access log, too.
//!
//! Neither delays traffic: exchanges beyond the budget are counted only. A dump is dropped and counted
//! if the writer's queue is full, and a line if too many wait.

mod body;
mod exchange;
pub(crate) mod mask;
#[cfg(test)]
mod tests;
mod writer;

use std::io::{self, Write};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use diy_mesh_model::identity::Identity;
use diy_mesh_proto::telemetry::{DumpFilter, Mode as PolicyMode, Telemetry};
use time::OffsetDateTime;

use super::ended::Ended;
use crate::observe::metrics::Metrics;
pub use exchange::ExchangeDump;
pub(crate) use exchange::Record;

/// Maximum number of dumped exchanges per second, over all workers.
const MAX_DUMPS_PER_SECOND: u32 = 10;
/// Maximum number of concurrent dumps, which bounds their memory.
const MAX_CONCURRENT: u32 = 256;
/// Capacity of the queue of the writer, in messages.
const QUEUE_CAPACITY: usize = 512;
/// The bytes of lines of the access log that wait for the writer. One more may have any length.
const MAX_LINES: usize = 512 * 1024;

/// Content of dumps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// Headers, and the first bytes of text bodies
    Full,
    /// Headers only, without query strings
    Headers,
    /// No dumps
    Off,
}

/// Format of dumps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// HTTP-like text
    Text,
    /// One JSON object per line
    Json,
}

/// Configuration of [`Dumps::start`].
pub struct DumpConfig {
    /// Content of the dumps.
    pub mode: Mode,
    /// Format of the dumps.
    pub format: Format,
    /// Output; the proxy passes standard output.
    pub out: Box<dyn Write + Send>,
}

/// Handle of the workers. Cheap to clone.
#[derive(Clone)]
pub struct Dumps {
    shared: Option<Arc<Shared>>,
}

struct Shared {
    /// The mode in the arguments.
    mode: Mode,
    /// Exchanges that may still be dumped in this second. The writer resets it; 0 forever once the
    /// output has failed.
    budget: AtomicU32,
    /// Concurrent dumps.
    concurrent: AtomicU32,
    /// Lines of the access log that wait for the writer.
    lines: Arc<Mutex<Vec<u8>>>,
    queue: SyncSender<Message>,
    metrics: Arc<Metrics>,
}

enum Message {
    Exchange(Box<Record>, Arc<Ended>),
    Opaque(Arc<Ended>),
    /// Wakes the writer: to write lines, and to reset the budget in a second.
    Wake,
    /// Responds when all earlier messages are written.
    Flush(SyncSender<()>),
}

impl Dumps {
    /// Starts the writer thread, which waits while nothing is dumped. It ends when the last handle is
    /// dropped.
    pub fn start(config: DumpConfig, metrics: Arc<Metrics>) -> io::Result<Self> {
        let (queue, messages) = sync_channel(QUEUE_CAPACITY);
        let shared = Arc::new(Shared {
            mode: config.mode,
            budget: AtomicU32::new(MAX_DUMPS_PER_SECOND),
            concurrent: AtomicU32::new(0),
            lines: Arc::default(),
            queue,
            metrics,
        });
        let writer = writer::Writer::new(&shared, config.format, config.out);
        std::thread::Builder::new()
            .name("dumps".into())
            .spawn(move || writer.run(&messages))?;
        Ok(Self {
            shared: Some(shared),
        })
    }

    /// A handle without dumps.
    pub fn off() -> Self {
        Self { shared: None }
    }

    /// Dump of an exchange that starts now, by the telemetry of the pod. `None` if dumps are off or the
    /// budget is exhausted. With a filter, only what passes it uses the budget.
    pub fn exchange(
        &self,
        telemetry: Option<&Arc<Telemetry>>,
        caller: Option<&Identity>,
    ) -> Option<ExchangeDump> {
        let shared = self.shared.as_ref()?;
        let mode = shared.mode_of(telemetry);
        let filtered = telemetry.filter(|one| filter_of(one).is_some());
        let is_admitted = match filtered.and_then(|one| filter_of(one)) {
            _ if mode == Mode::Off => false,
            Some(filter) => filter.has_caller(caller) && shared.reserve(),
            None => shared.admit(),
        };
        let new = || ExchangeDump::new(shared.clone(), mode, filtered.cloned());
        is_admitted.then(new)
    }

    /// Dumps a closed opaque connection, which uses the budget like an exchange.
    pub fn opaque(&self, ended: &Arc<Ended>, telemetry: Option<&Arc<Telemetry>>) {
        let Some(shared) = self.shared.as_ref() else {
            return;
        };
        let duration = ended.ended.saturating_duration_since(ended.started);
        let passes = |filter: &DumpFilter| {
            let has_caller = filter.has_caller(ended.caller.as_deref());
            !filter.requires_http() && has_caller && filter.has_result(None, duration)
        };
        let filter = telemetry.and_then(|one| filter_of(one));
        let is_dumped = shared.mode_of(telemetry) != Mode::Off && filter.is_none_or(passes);
        if is_dumped && shared.admit() {
            shared.release();
            shared.send(Message::Opaque(ended.clone()));
        }
    }

    /// Adds a line to the access log, if the telemetry has one for it. The first one that waits wakes
    /// the writer, which lets others gather.
    pub fn access(&self, ended: &Ended, telemetry: &Telemetry) {
        let logs = telemetry.access_logs.as_ref();
        let logs = logs.filter(|logs| !logs.failures || ended.is_failure);
        let (Some(shared), Some(logs)) = (self.shared.as_ref(), logs) else {
            return;
        };
        let mut lines = lock(&shared.lines);
        let is_first = lines.is_empty();
        if lines.len() >= MAX_LINES {
            shared.metrics.access_logs_dropped.inc();
            return;
        }
        ended.write_access(&logs.format, &mut lines);
        // A writer whose queue is full writes the lines after that.
        if is_first && let Err(TrySendError::Disconnected(_)) = shared.queue.try_send(Message::Wake)
        {
            lines.clear();
            shared.metrics.access_logs_dropped.inc();
        }
    }

    /// Blocks until all dumps are written, at most for `timeout`. For shutdown.
    pub fn flush(&self, timeout: Duration) {
        let Some(shared) = self.shared.as_ref() else {
            return;
        };
        let (done, wait) = sync_channel(1);
        if shared.queue.try_send(Message::Flush(done)).is_ok() {
            // After the timeout, the remaining dumps are lost.
            let _ = wait.recv_timeout(timeout);
        }
    }
}

fn lock(lines: &Mutex<Vec<u8>>) -> MutexGuard<'_, Vec<u8>> {
    lines.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The conditions of dumps, if there are any.
fn filter_of(telemetry: &Telemetry) -> Option<&DumpFilter> {
    let filter = &telemetry.dump.as_ref()?.filter;
    (*filter != DumpFilter::default()).then_some(filter)
}

impl Shared {
    /// The mode of dumps. Bodies and queries are dumped only if the arguments say so, too.
    fn mode_of(&self, telemetry: Option<&Arc<Telemetry>>) -> Mode {
        match telemetry.and_then(|telemetry| telemetry.dump.as_ref()) {
            None => self.mode,
            Some(settings) => match settings.mode {
                PolicyMode::Full if self.mode == Mode::Full => Mode::Full,
                PolicyMode::Full | PolicyMode::Headers => Mode::Headers,
                PolicyMode::Off | PolicyMode::Unspecified => Mode::Off,
            },
        }
    }

    /// Reserves budget and memory for one exchange.
    fn admit(&self) -> bool {
        self.take_budget() && self.reserve()
    }

    /// Takes budget for one exchange. Without budget, costs one load and one addition.
    fn take_budget(&self) -> bool {
        if self.budget.load(Ordering::Relaxed) == 0 {
            self.metrics.dumps_suppressed.inc();
            return false;
        }
        let taken = self
            .budget
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(1)
            });
        if taken == Ok(MAX_DUMPS_PER_SECOND) {
            // The writer sleeps without messages. If the queue is full, it is awake.
            let _ = self.queue.try_send(Message::Wake);
        }
        if taken.is_err() {
            self.metrics.dumps_suppressed.inc();
        }
        taken.is_ok()
    }

    /// Reserves memory for a dump.
    fn reserve(&self) -> bool {
        let is_reserved = self.concurrent.fetch_add(1, Ordering::Relaxed) < MAX_CONCURRENT;
        if !is_reserved {
            self.release();
            self.metrics.dumps_suppressed.inc();
        }
        is_reserved
    }

    /// Ends a concurrent dump.
    fn release(&self) {
        self.concurrent.fetch_sub(1, Ordering::Relaxed);
    }

    fn send(&self, message: Message) {
        if self.queue.try_send(message).is_err() {
            self.metrics.dumps_dropped.inc();
        }
    }
}

/// A time in UTC with milliseconds. Each line of the access log has one: a description of its format
/// takes four times as many instructions.
pub(crate) fn rfc3339(time: SystemTime) -> String {
    let time = OffsetDateTime::from(time);
    let mut text = *b"0000-00-00T00:00:00.000Z";
    let mut put = |places: Range<usize>, mut number: u32| {
        for digit in text[places].iter_mut().rev() {
            *digit += (number % 10) as u8;
            number /= 10;
        }
    };
    put(0..4, time.year().unsigned_abs());
    put(5..7, u8::from(time.month()).into());
    put(8..10, time.day().into());
    put(11..13, time.hour().into());
    put(14..16, time.minute().into());
    put(17..19, time.second().into());
    put(20..23, time.millisecond().into());
    str::from_utf8(&text).unwrap_or_default().to_owned()
}
