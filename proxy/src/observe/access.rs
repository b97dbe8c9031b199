//! The access log of a worker: the lines of what has ended gather for a few milliseconds, and the
//! thread that writes dumps gets them together. So a request pays for the text of its line only.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use diy_mesh_proto::telemetry::Telemetry;
use tokio::sync::Notify;

use super::dump::Dumps;
use super::ended::Ended;

/// The time for which lines gather: to wake another thread costs as much as many lines.
const GATHERING: Duration = Duration::from_millis(10);
/// The length of lines that no longer wait, the capacity of a pipe.
const MAX_GATHERED: usize = 64 * 1024;

/// The lines of a worker.
#[derive(Default)]
pub struct AccessLog {
    lines: RefCell<Vec<u8>>,
    /// The number of lines.
    count: Cell<u64>,
    added: Notify,
}

impl AccessLog {
    /// Adds the line of an exchange or a connection, if the telemetry has one for it.
    pub fn add(&self, ended: &Ended, telemetry: &Telemetry, dumps: &Dumps) {
        let logs = telemetry.access_logs.as_ref();
        let Some(logs) = logs.filter(|logs| !logs.failures || ended.is_failure) else {
            return;
        };
        let mut lines = self.lines.borrow_mut();
        ended.write_access(&logs.format, &mut lines);
        let is_full = lines.len() >= MAX_GATHERED;
        drop(lines);
        self.count.set(self.count.get() + 1);
        if is_full {
            self.hand_over(dumps);
        } else if self.count.get() == 1 {
            self.added.notify_one();
        }
    }

    /// Hands lines over when they have waited, until it is dropped.
    pub async fn gather(&self, dumps: &Dumps) {
        loop {
            self.added.notified().await;
            tokio::time::sleep(GATHERING).await;
            self.hand_over(dumps);
        }
    }

    /// Hands over what there is.
    pub fn hand_over(&self, dumps: &Dumps) {
        dumps.lines(self.lines.take(), self.count.take());
    }
}
