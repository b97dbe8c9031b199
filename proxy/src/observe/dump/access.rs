//! A line of the access log, from a worker to the writer, which escapes and masks it.

use std::sync::Arc;
use std::time::SystemTime;

use diy_mesh_model::access::{Entry, shown};
use diy_mesh_proto::telemetry::Telemetry;

use super::{mask, rfc3339};

/// The length of a target.
const MAX_TARGET: usize = 1024;

/// What a line is made of.
pub struct AccessRecord {
    /// It has the format.
    pub telemetry: Arc<Telemetry>,
    /// Without the time, the method and the path.
    pub entry: Entry,
    /// The start.
    pub started: SystemTime,
    /// Method and target of the request.
    pub request: Option<RequestTarget>,
}

/// Method and target of a request, in bounded memory.
#[derive(Clone, Debug)]
pub struct RequestTarget {
    /// The method.
    pub method: Vec<u8>,
    /// The target.
    pub target: Vec<u8>,
}

impl RequestTarget {
    /// Copies them.
    pub fn new(method: &[u8], target: &[u8]) -> Self {
        let bounded = |bytes: &[u8]| bytes[..bytes.len().min(MAX_TARGET)].to_vec();
        Self {
            method: bounded(method),
            target: bounded(target),
        }
    }
}

impl AccessRecord {
    /// The line. Empty if the telemetry has no access log.
    pub(super) fn line(mut self) -> String {
        let Some(logs) = &self.telemetry.access_logs else {
            return String::new();
        };
        self.entry.time = rfc3339(self.started);
        if let Some(RequestTarget { method, target }) = &self.request {
            let line = [method, &b" "[..], target].concat();
            let masked = mask::start_line(&line, true);
            self.entry.path = masked.get(method.len() + 1..).map(shown);
            self.entry.method = Some(shown(method));
        }
        self.entry.line(&logs.format)
    }
}
