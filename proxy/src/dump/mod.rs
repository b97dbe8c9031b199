//! Dumps: the requests and responses that go by, as a person reads them. Both paths ask [`Dumps::exchange`] for a record
//! of each exchange and fill it as the bytes pass; a thread of its own renders and writes what was recorded.
//!
//! Traffic never waits for a dump and never fails because of one: beyond the budget an exchange is only counted, and where
//! the writer can't keep up a dump is dropped and counted.

mod body;
mod exchange;
mod json;
mod mask;
#[cfg(test)]
mod tests;
mod text;
mod writer;

use std::io::{self, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, SystemTime};

pub use exchange::{ExchangeDump, pairs};

use crate::metrics::Metrics;
use exchange::Record;

/// Exchanges dumped per second, all workers together.
const BUDGET: u32 = 10;
/// Dumps that may be under way at once: bounds the memory that recording takes.
const LIVE_LIMIT: u32 = 256;
/// Records that wait for the writer. When it is full, dumps are dropped.
const QUEUE: usize = 64;

/// How much of an exchange is dumped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// Heads and a bounded part of the bodies.
    Full,
    /// Heads only; bodies are counted.
    Headers,
    /// Nothing.
    Off,
}

/// How dumps are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// As a person reads HTTP.
    Text,
    /// One JSON object a line; the fields stand in `dump/json.rs`.
    Json,
}

/// Which of the proxy's two paths a connection takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the pod's app.
    Inbound,
    /// From the pod's app.
    Outbound,
}

impl Direction {
    /// The word in metrics and JSON dumps.
    pub fn name(self) -> &'static str {
        match self {
            Self::Inbound => "inbound",
            Self::Outbound => "outbound",
        }
    }
}

/// The connection that an exchange came on.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionInfo {
    /// To the app or from it.
    pub direction: Direction,
    /// Who connected.
    pub peer: SocketAddr,
    /// Where the connection was going before it was redirected.
    pub destination: SocketAddr,
}

/// What [`Dumps::start`] needs.
pub struct DumpConfig {
    /// How much is dumped.
    pub mode: Mode,
    /// In which form.
    pub format: Format,
    /// Where to; the proxy passes its stdout.
    pub out: Box<dyn Write + Send>,
}

/// The handle by which a worker dumps. Cheap to clone.
#[derive(Clone)]
pub struct Dumps {
    shared: Option<Arc<Shared>>,
}

struct Shared {
    mode: Mode,
    /// Exchanges that may still be dumped this second; the writer fills it up. It stays at 0 once the output has failed.
    budget: AtomicU32,
    /// Dumps under way.
    live: AtomicU32,
    queue: SyncSender<Message>,
    metrics: Arc<Metrics>,
}

enum Message {
    Exchange(Box<Record>),
    Opaque(Opaque),
    /// The budget is being used: time to look at the clock again.
    Wake,
    /// Answers when all that was queued before has been written.
    Flush(SyncSender<()>),
}

/// A TCP connection that the proxy did not look into, when it is over.
struct Opaque {
    time: SystemTime,
    connection: ConnectionInfo,
    sent: u64,
    received: u64,
    duration: Duration,
}

impl Dumps {
    /// Starts the writer's thread, unless the mode is [`Mode::Off`]. The thread ends when the last handle is gone.
    pub fn start(config: DumpConfig, metrics: Arc<Metrics>) -> io::Result<Self> {
        if config.mode == Mode::Off {
            return Ok(Self::off());
        }
        let (queue, messages) = sync_channel(QUEUE);
        let shared = Arc::new(Shared {
            mode: config.mode,
            budget: AtomicU32::new(BUDGET),
            live: AtomicU32::new(0),
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

    /// A handle that dumps nothing.
    pub fn off() -> Self {
        Self { shared: None }
    }

    /// A handle whose text the test reads.
    #[cfg(test)]
    fn recorded() -> (Self, Arc<std::sync::Mutex<String>>) {
        struct Output(Arc<std::sync::Mutex<String>>);
        impl Write for Output {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0
                    .lock()
                    .map_err(|_| io::ErrorKind::Other)?
                    .push_str(&String::from_utf8_lossy(bytes));
                Ok(bytes.len())
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let text = Arc::new(std::sync::Mutex::new(String::new()));
        let config = DumpConfig {
            mode: Mode::Full,
            format: Format::Text,
            out: Box::new(Output(text.clone())),
        };
        (
            Self::start(config, Metrics::new()).expect("a thread can be started"),
            text,
        )
    }

    /// The record of an exchange that begins now. `None`: dumps are off, or as many as one second may have went by already.
    pub fn exchange(&self, connection: &ConnectionInfo) -> Option<ExchangeDump> {
        let shared = self.shared.as_ref()?;
        shared
            .admit()
            .then(|| ExchangeDump::new(shared.clone(), *connection))
    }

    /// One line for a TCP connection that is over: what the client sent, what it received, how long it took. Counts
    /// against the budget as an exchange does.
    pub fn opaque(
        &self,
        connection: &ConnectionInfo,
        sent: u64,
        received: u64,
        duration: Duration,
    ) {
        let Some(shared) = self.shared.as_ref() else {
            return;
        };
        if shared.admit() {
            shared.release();
            shared.send(Message::Opaque(Opaque {
                time: SystemTime::now(),
                connection: *connection,
                sent,
                received,
                duration,
            }));
        }
    }

    /// Blocks until what was dumped so far is written, at most for `limit`: for the end of the process.
    pub fn flush(&self, limit: Duration) {
        let Some(shared) = self.shared.as_ref() else {
            return;
        };
        let (done, wait) = sync_channel(1);
        if shared.queue.try_send(Message::Flush(done)).is_ok() {
            // Either it is done, or the output does not take it: no more can be done here.
            let _ = wait.recv_timeout(limit);
        }
    }
}

impl Shared {
    /// Takes one exchange out of this second's budget. What is not dumped costs a load and an addition.
    fn admit(&self) -> bool {
        if self.budget.load(Ordering::Relaxed) == 0 {
            self.metrics.dumps_suppressed.inc();
            return false;
        }
        let taken = self
            .budget
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(1)
            });
        if taken == Ok(BUDGET) {
            // The writer sleeps while nothing goes by. A full queue keeps it awake all the same.
            let _ = self.queue.try_send(Message::Wake);
        }
        let admitted = taken.is_ok() && self.live.fetch_add(1, Ordering::Relaxed) < LIVE_LIMIT;
        if !admitted {
            if taken.is_ok() {
                self.release();
            }
            self.metrics.dumps_suppressed.inc();
        }
        admitted
    }

    /// A dump that was under way has left.
    fn release(&self) {
        self.live.fetch_sub(1, Ordering::Relaxed);
    }

    fn send(&self, message: Message) {
        if self.queue.try_send(message).is_err() {
            self.metrics.dumps_dropped.inc();
        }
    }
}
