//! Tables of what a peer does, and how the engine reacts.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

use super::bench::*;
use super::*;
use crate::Error;

/// The reaction to what a peer does.
#[derive(Clone, Copy, Debug)]
pub enum Expect {
    /// The connection ends with this code.
    Connection(ErrorCode),
    /// The stream is reset with this code, and the connection goes on.
    Reset(u32, ErrorCode),
    /// The connection and all streams go on.
    Ignored,
}

pub const PROTOCOL: Expect = Expect::Connection(ErrorCode::PROTOCOL_ERROR);
pub const SIZE: Expect = Expect::Connection(ErrorCode::FRAME_SIZE_ERROR);
pub const FLOW: Expect = Expect::Connection(ErrorCode::FLOW_CONTROL_ERROR);
pub const COMPRESSION: Expect = Expect::Connection(ErrorCode::COMPRESSION_ERROR);
pub const CLOSED: Expect = Expect::Connection(ErrorCode::STREAM_CLOSED);
pub const MALFORMED: Expect = Expect::Reset(1, ErrorCode::PROTOCOL_ERROR);
pub const IGNORED: Expect = Expect::Ignored;

/// A table of cases for one role.
pub struct Table {
    role: Role,
    failures: RefCell<Vec<String>>,
}

/// A row of a table: its name, and an engine.
pub struct Case<'a> {
    failures: &'a RefCell<Vec<String>>,
    name: &'static str,
    bench: Bench,
    is_complete: bool,
}

impl Table {
    pub fn new(role: Role) -> Self {
        let failures = RefCell::default();
        Self { role, failures }
    }

    /// A case whose connection is in this state.
    fn case(&self, name: &'static str, bench: Bench, state: impl FnOnce(&mut Bench)) -> Case<'_> {
        let mut case = Case {
            failures: &self.failures,
            name,
            bench,
            is_complete: false,
        };
        state(&mut case);
        case
    }

    /// Nothing has arrived.
    pub fn bare(&self, name: &'static str) -> Case<'_> {
        let bench = Bench::bare(config(self.role));
        self.case(name, bench, |bench| bench.frames.clear())
    }

    /// There are no streams.
    pub fn idle(&self, name: &'static str) -> Case<'_> {
        self.case(name, Bench::new(self.role), |_| ())
    }

    /// Both sides send bodies on stream 1, whose handles are held.
    pub fn started(&self, name: &'static str) -> Case<'_> {
        self.case(name, Bench::new(self.role), Bench::start)
    }

    /// The peer has ended stream 1.
    pub fn half_closed(&self, name: &'static str) -> Case<'_> {
        self.case(name, Bench::new(self.role), Bench::start_half)
    }

    /// Both sides have ended stream 1, which has no handles.
    pub fn closed(&self, name: &'static str) -> Case<'_> {
        self.case(name, Bench::new(self.role), Bench::finish)
    }

    /// This side has reset stream 1, whose handles are held.
    pub fn cancelled(&self, name: &'static str) -> Case<'_> {
        self.case(name, Bench::new(self.role), Bench::cancel)
    }

    /// Fails unless each case had its reaction.
    pub fn end(&self) {
        let failures = self.failures.borrow();
        assert!(failures.is_empty(), "\n{}", failures.join("\n"));
    }
}

impl Case<'_> {
    pub fn feed(&mut self, bytes: impl AsRef<[u8]>) -> &mut Self {
        self.bench.feed(bytes);
        self
    }

    pub fn open(&mut self, method: &str, end_stream: bool) -> &mut Self {
        self.bench.open(method, end_stream);
        self
    }

    pub fn drop_handles(&mut self) -> &mut Self {
        self.bench.streams.clear();
        self
    }

    /// Completes the case.
    pub fn expect(&mut self, expect: Expect) {
        self.is_complete = true;
        let (bench, name) = (&mut self.bench, self.name);
        bench.flush();
        let (resets, go_aways) = (resets(&bench.frames), go_aways(&bench.frames));
        let (role, result) = (bench.role, bench.result);
        let is_right = match expect {
            Expect::Connection(code) => {
                let is_closed = go_aways.last().is_some_and(|(_, sent)| *sent == code);
                let has_ended = matches!(bench.ended(), Some(Error::Violation(_)));
                let is_told = result.is_err_and(|violation| violation.code == code);
                bench.frames.clear();
                bench.feed(ping());
                is_closed && has_ended && is_told && go_aways.len() == 1 && bench.frames.is_empty()
            }
            Expect::Reset(stream, code) => {
                let is_reset = resets == [(stream, code)];
                is_reset && go_aways.is_empty() && result.is_ok() && bench.is_alive()
            }
            Expect::Ignored => {
                let is_quiet = resets.is_empty() && go_aways.is_empty();
                is_quiet && result.is_ok() && bench.is_alive()
            }
        };
        if !is_right {
            let state = format!("{result:?} {resets:?} {go_aways:?}");
            let failure = format!("{name} ({role:?}): {expect:?}, not {state}");
            self.failures.borrow_mut().push(failure);
        }
    }
}

impl Deref for Case<'_> {
    type Target = Bench;

    fn deref(&self) -> &Bench {
        &self.bench
    }
}

impl DerefMut for Case<'_> {
    fn deref_mut(&mut self) -> &mut Bench {
        &mut self.bench
    }
}

impl Drop for Case<'_> {
    fn drop(&mut self) {
        let is_tested = self.is_complete || std::thread::panicking();
        assert!(is_tested, "no reaction is expected of: {}", self.name);
    }
}
