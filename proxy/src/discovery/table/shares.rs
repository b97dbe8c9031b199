//! How destinations share the memory: namespaces among each other, and the destinations of a
//! namespace. No tenant takes what the Services of others need. Pure.

use std::collections::HashMap;
use std::sync::Arc;

/// The weights of all destinations, by the namespace of their Service or pod. Destinations without
/// a namespace are a group of their own. The unit is the memory of an endpoint.
pub(super) struct Shares {
    /// The maximum weight of all destinations together, for each of the two parts.
    pub(super) max: usize,
    total: Weight,
    namespaces: HashMap<Arc<str>, Weight>,
}

/// The least weight of each destination, and its weight beyond that. The two are shared separately:
/// many small destinations leave room for the endpoints of others, and large ones leave room for
/// further destinations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Weight {
    pub(super) least: usize,
    pub(super) more: usize,
}

/// The weight of a destination that its namespace is charged for.
#[derive(Debug, Default)]
pub(super) struct Charge {
    namespace: Arc<str>,
    weight: Weight,
}

impl Shares {
    pub(super) fn new(max: usize) -> Self {
        Self {
            max,
            total: Weight::default(),
            namespaces: HashMap::new(),
        }
    }

    /// The weight of all destinations.
    #[cfg(test)]
    pub(super) fn total(&self) -> Weight {
        self.total
    }

    /// The weight that a destination of a namespace may have in place of `own`, for each part. A
    /// namespace has at most three quarters of the rest beside the other namespaces. A destination has
    /// at most two thirds of the rest beside the others of its namespace.
    pub(super) fn limit(&self, namespace: &str, own: &Charge) -> Weight {
        let in_namespace = self.namespaces.get(namespace).copied().unwrap_or_default();
        let is_in_namespace = &*own.namespace == namespace;
        let share = |part: fn(&Weight) -> usize| {
            let replaced = if is_in_namespace {
                part(&own.weight)
            } else {
                0
            };
            let siblings = part(&in_namespace) - replaced;
            let others = part(&self.total) - part(&own.weight) - siblings;
            let of_namespace = self.max.saturating_sub(others) / 4 * 3;
            of_namespace.saturating_sub(siblings) / 3 * 2
        };
        Weight {
            least: share(|weight| weight.least),
            more: share(|weight| weight.more),
        }
    }

    /// Replaces the weight of a destination.
    pub(super) fn set(&mut self, charge: &mut Charge, namespace: &str, weight: Weight) {
        if &*charge.namespace != namespace || charge.weight != weight {
            self.release(charge);
            let known = self.namespaces.get_key_value(namespace);
            charge.namespace = known.map_or_else(|| namespace.into(), |(known, _)| known.clone());
            charge.weight = weight;
            let of_namespace = self.namespaces.entry(charge.namespace.clone()).or_default();
            for sum in [&mut self.total, of_namespace] {
                sum.least += weight.least;
                sum.more += weight.more;
            }
        }
    }

    /// A destination weighs nothing any more.
    pub(super) fn release(&mut self, charge: &mut Charge) {
        let weight = std::mem::take(&mut charge.weight);
        let of_namespace = self.namespaces.get_mut(&charge.namespace);
        for sum in of_namespace.into_iter().chain([&mut self.total]) {
            sum.least -= weight.least;
            sum.more -= weight.more;
        }
        if self.namespaces.get(&charge.namespace) == Some(&Weight::default()) {
            self.namespaces.remove(&charge.namespace);
        }
    }
}

impl Charge {
    /// The namespace of the Service or the pod. Empty: none.
    pub(super) fn namespace(&self) -> &str {
        &self.namespace
    }
}
