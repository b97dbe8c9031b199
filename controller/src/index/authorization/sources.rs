//! Where the keys of issuers are that policies do not contain, kept up to date with the policies.
//! Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::kinds::authorization::AuthorizationPolicy;
use crate::object::issuer_keys::Source;
use crate::object::{Key, Kind, ObjectId};

/// Sources of a namespace whose keys are fetched: the first ones, so that all replicas agree.
pub const MAX_SOURCES: usize = 64;

/// The sources in the policies of each namespace.
#[derive(Debug, Default)]
pub struct KeySources(BTreeMap<Arc<str>, BTreeMap<Source, BTreeSet<Key>>>);

impl KeySources {
    /// A policy has changed.
    pub(super) fn replace(
        &mut self,
        key: &Key,
        old: Option<&AuthorizationPolicy>,
        new: Option<&AuthorizationPolicy>,
    ) {
        let fetched = |policy: Option<&AuthorizationPolicy>| {
            let fetched = policy.into_iter().flat_map(|policy| policy.fetched());
            fetched
                .map(|one| one.source.clone())
                .collect::<BTreeSet<_>>()
        };
        let (old, new) = (fetched(old), fetched(new));
        for source in old.difference(&new) {
            self.remove(key, source);
        }
        for source in new {
            self.add(key, source);
        }
    }

    /// Adds a source of a policy.
    pub fn add(&mut self, key: &Key, source: Source) {
        let of_namespace = self.0.entry(key.namespace.clone()).or_default();
        of_namespace.entry(source).or_default().insert(key.clone());
    }

    fn remove(&mut self, key: &Key, source: &Source) {
        let Some(of_namespace) = self.0.get_mut(&key.namespace) else {
            return;
        };
        if let Some(policies) = of_namespace.get_mut(source) {
            policies.remove(key);
            if policies.is_empty() {
                of_namespace.remove(source);
            }
        }
        if of_namespace.is_empty() {
            self.0.remove(&key.namespace);
        }
    }

    /// The sources within the limit of a namespace, each with the first of its namespaces.
    pub fn within_limit(&self) -> BTreeMap<&Source, &Arc<str>> {
        let mut all = BTreeMap::new();
        for (namespace, of_namespace) in &self.0 {
            for source in of_namespace.keys().take(MAX_SOURCES) {
                all.entry(source).or_insert(namespace);
            }
        }
        all
    }

    /// The sources over the limit of a namespace. Another one may have them within its limit.
    pub fn excess(&self) -> impl Iterator<Item = &Source> {
        let namespaces = self.0.values();
        namespaces.flat_map(|of_namespace| of_namespace.keys().skip(MAX_SOURCES))
    }

    /// The policies that need the keys of a source.
    pub fn policies(&self, source: &Source) -> impl Iterator<Item = ObjectId> {
        let policies = self.0.values().filter_map(|one| one.get(source));
        policies
            .flatten()
            .map(|key| (Kind::Authorization, key.clone()))
    }
}
