//! A batch of changes as steps, so that a list of all objects of a kind is applied in parts.

use std::collections::{BTreeSet, VecDeque};

use crate::index::object::{Change, Event, Kind, Source};
use crate::index::{Index, Step};

/// The steps of a batch.
pub(super) struct Update {
    events: VecDeque<Event>,
    /// Of the first events.
    steps: VecDeque<Step>,
    /// What these events list, or find unavailable.
    pub(super) listed: BTreeSet<(Source, Kind)>,
}

impl Update {
    pub(super) fn new(events: impl Iterator<Item = Event>) -> Update {
        Update {
            events: events.collect(),
            steps: VecDeque::new(),
            listed: BTreeSet::new(),
        }
    }

    /// The next step. All earlier ones are applied to the index.
    pub(super) fn next(&mut self, index: &Index) -> Option<Step> {
        while self.steps.is_empty() {
            let event = self.events.pop_front()?;
            if let Change::Reset(source, kind, _) | Change::Unavailable(source, kind) =
                &event.change
            {
                self.listed.insert((*source, *kind));
            }
            self.steps.extend(index.steps(event));
        }
        self.steps.pop_front()
    }
}
