//! Counters by the names of policies, in a limited number.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::MAX_POLICY_SETS;
use super::series::{Labels, Series};
use crate::labels::OTHER;

/// One counter for each policy and each value of another label.
#[derive(Debug)]
pub struct PolicyCounters(Series<PolicyLabels, AtomicU64>);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct PolicyLabels {
    value: &'static str,
    policy: Arc<str>,
}

/// A name is "KIND NAMESPACE/NAME".
impl Labels for PolicyLabels {
    fn namespace(&self) -> &str {
        let object = self.policy.split_once(' ').map_or("", |(_, object)| object);
        object.split('/').next().unwrap_or_default()
    }

    fn other(&self) -> Self {
        Self {
            value: self.value,
            policy: OTHER.into(),
        }
    }
}

impl PolicyCounters {
    /// No counters yet.
    pub fn new(start: Instant) -> Self {
        Self(Series::new(MAX_POLICY_SETS, start))
    }

    /// Counts an event of a policy.
    pub fn count(&self, value: &'static str, policy: &Arc<str>, now: Instant) {
        let policy = policy.clone();
        let set = self.0.get(&PolicyLabels { value, policy }, now);
        self.0.used(&set, now).fetch_add(1, Relaxed);
    }

    /// Writes all counters.
    pub fn encode(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        (name, help): (&str, &str),
        label: &'static str,
    ) -> fmt::Result {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, set) in self.0.all() {
            let count = set.value().load(Relaxed);
            let labels = [(label, labels.value), ("policy", &labels.policy)];
            let mut counter = family.encode_family(&labels)?;
            counter.encode_counter::<NoLabelSet, u64, f64>(&count, None)?;
        }
        Ok(())
    }
}
