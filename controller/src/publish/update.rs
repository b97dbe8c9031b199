//! A batch of changes as steps, so that a list of all objects of a kind is applied in parts.

use std::collections::{BTreeMap, VecDeque};

use crate::catalog::{Change, Event};
use crate::index::{Index, Step};
use crate::object::Kind;

/// The steps of a batch.
pub(super) struct Update {
    events: VecDeque<Event>,
    /// The steps of the events before them.
    steps: VecDeque<Step>,
    /// The kinds that can be read according to these events, because they are listed or have no
    /// objects, and those that cannot be read.
    pub(super) readable: BTreeMap<Kind, bool>,
}

impl Update {
    pub(super) fn new(events: impl Iterator<Item = Event>) -> Update {
        Update {
            events: events.collect(),
            steps: VecDeque::new(),
            readable: BTreeMap::new(),
        }
    }

    /// Divides the next events into steps. All earlier steps must be applied to the index: the
    /// steps of a list depend on it. Returns whether there are steps.
    pub(super) fn prepare(&mut self, index: &Index) -> bool {
        while let Some(event) = self.events.pop_front() {
            let is_list = matches!(event.change, Change::Reset(..) | Change::NotInstalled(..));
            if is_list && !self.steps.is_empty() {
                self.events.push_front(event);
                break;
            }
            match event.change {
                Change::Reset(kind, _) | Change::NotInstalled(kind) => {
                    self.readable.insert(kind, true);
                }
                Change::Unreadable(kind) => {
                    self.readable.insert(kind, false);
                }
                Change::Apply(..) | Change::Delete(..) => {}
                Change::Bookmark(..) | Change::Epoch(_) | Change::Lost(_) => {}
            }
            self.steps.extend(index.steps(event));
            if is_list {
                break;
            }
        }
        !self.steps.is_empty()
    }

    /// The next step.
    pub(super) fn next(&mut self) -> Option<Step> {
        self.steps.pop_front()
    }
}
