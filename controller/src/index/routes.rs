//! The routes of the catalog, their parents and their backends. Pure.
//!
//! A change of a route, of a grant or of a Service marks the parents that it may concern. Their
//! routes are merged once for all changes of a batch.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::object::{Key, Kind, Service, Source};
use super::store::{Replaced, Store};
use super::{link, unlink};
use crate::routes::attach::{Attachment, PortTables, RouteId, Unresolved, attach};
use crate::routes::model::{Grant, Reference, Route};
use crate::routes::{
    BACKEND_NOT_FOUND, INVALID_KIND, ParentStatus, REF_NOT_PERMITTED, RouteStatus,
};

/// The routes, by everything that they depend on.
#[derive(Debug, Default)]
pub(super) struct Routes {
    http: Store<Route>,
    grpc: Store<Route>,
    pub(super) grants: Store<Grant>,
    grants_of: HashMap<Arc<str>, BTreeSet<Key>>,
    of_parent: HashMap<Key, BTreeSet<RouteId>>,
    of_backend: HashMap<Key, BTreeSet<RouteId>>,
    /// The routes with references into a namespace that is not theirs.
    into_namespace: HashMap<Arc<str>, BTreeSet<RouteId>>,
    attachments: HashMap<Key, Attachment>,
    /// Parents whose routes are to be merged again.
    changed: BTreeSet<Key>,
}

impl Routes {
    pub(super) fn of_kind(&self, kind: Kind) -> &Store<Route> {
        match kind {
            Kind::GrpcRoute => &self.grpc,
            _ => &self.http,
        }
    }

    /// The tables of a Service port.
    pub(super) fn tables(&self, service: &Key, port: u16) -> Option<&PortTables> {
        self.attachments.get(service)?.tables.get(&port)
    }

    pub(super) fn set_route(&mut self, source: Source, kind: Kind, key: &Key, new: Option<Route>) {
        let store = match kind {
            Kind::GrpcRoute => &mut self.grpc,
            _ => &mut self.http,
        };
        let Some(Replaced(old)) = store.replace(source, key, new) else {
            return;
        };
        let (id, new) = ((kind, key.clone()), store.get(key).cloned());
        if let Some(route) = &old {
            parents_of(route).for_each(|parent| unlink(&mut self.of_parent, &parent, &id));
            for reference in route.references() {
                unlink(&mut self.of_backend, &reference.key, &id);
                unlink(&mut self.into_namespace, &reference.key.namespace, &id);
            }
        }
        if let Some(route) = &new {
            parents_of(route).for_each(|parent| link(&mut self.of_parent, &parent, &id));
            for reference in route.references() {
                link(&mut self.of_backend, &reference.key, &id);
                if reference.key.namespace != key.namespace {
                    link(&mut self.into_namespace, &reference.key.namespace, &id);
                }
            }
        }
        let both = old.iter().chain(&new);
        self.changed.extend(both.flat_map(parents_of));
    }

    pub(super) fn set_grant(&mut self, source: Source, key: &Key, new: Option<Grant>) {
        if self.grants.replace(source, key, new).is_some() {
            match self.grants.get(key) {
                Some(_) => link(&mut self.grants_of, &key.namespace, key),
                None => unlink(&mut self.grants_of, &key.namespace, key),
            }
            let routes = self.into_namespace.get(&key.namespace);
            let routes = routes.into_iter().flatten();
            let parents = routes.flat_map(|id| self.parents_of_id(id));
            self.changed.extend(parents.collect::<Vec<_>>());
        }
    }

    /// A Service has changed, which may be a parent or a backend.
    pub(super) fn set_service(&mut self, key: &Key) {
        if self.of_parent.contains_key(key) {
            self.changed.insert(key.clone());
        }
        let routes = self.of_backend.get(key).into_iter().flatten();
        let parents = routes.flat_map(|id| self.parents_of_id(id));
        self.changed.extend(parents.collect::<Vec<_>>());
    }

    /// Merges the routes of changed parents. Returns the Services with other routes than before, if
    /// there are changes.
    pub(super) fn settle(&mut self, services: &Store<Service>) -> Option<Vec<Key>> {
        if self.changed.is_empty() {
            return None;
        }
        let mut affected = Vec::new();
        for parent in std::mem::take(&mut self.changed) {
            let ids = self.of_parent.get(&parent).into_iter().flatten();
            let routes: Vec<&Route> = ids
                .filter_map(|(kind, key)| self.of_kind(*kind).get(key))
                .collect();
            let next = match routes.is_empty() {
                true => None,
                false => {
                    let resolve = |route: &Route, reference: &Reference| {
                        self.resolve(services, &parent, route, reference)
                    };
                    Some(attach(&parent, services.get(&parent), routes, resolve))
                }
            };
            let tables = next.as_ref().map(|next| next.tables.clone());
            let before = match next {
                Some(next) => self.attachments.insert(parent.clone(), next),
                None => self.attachments.remove(&parent),
            };
            let before = before.map(|before| before.tables).unwrap_or_default();
            if before != tables.unwrap_or_default() {
                affected.push(parent);
            }
        }
        Some(affected)
    }

    /// The name of the resource that a reference of a route at a parent refers to.
    fn resolve(
        &self,
        services: &Store<Service>,
        parent: &Key,
        route: &Route,
        reference: &Reference,
    ) -> Result<String, Unresolved> {
        let (field, key) = (&reference.field, &reference.key);
        let invalid = |reason, problem: String| {
            let message = format!("{field}: {problem}");
            Err(Unresolved { reason, message })
        };
        if let Some(kind) = &reference.other_kind {
            return invalid(INVALID_KIND, format!("{kind} is not Service"));
        }
        // Clients of the parent reach it without any route.
        let is_own = key.namespace == route.key.namespace || key == parent;
        let grants = self.grants_of.get(&key.namespace).into_iter().flatten();
        let mut grants = grants.map(|grant| &self.grants[grant]);
        if !is_own && !grants.any(|grant| grant.permits(route, key)) {
            let from = format!("{} of namespace {}", route.kind, route.key.namespace);
            let problem = format!(
                "no ReferenceGrant in {} permits {from} to refer to {key}",
                key.namespace
            );
            return invalid(REF_NOT_PERMITTED, problem);
        }
        let Some(service) = services.get(key) else {
            return invalid(
                BACKEND_NOT_FOUND,
                format!("the Service {key} does not exist"),
            );
        };
        if !service.external_name.is_empty() {
            return invalid(
                INVALID_KIND,
                format!("the Service {key} is an ExternalName"),
            );
        }
        let Some(port) = reference.port else {
            return invalid(BACKEND_NOT_FOUND, "the port is missing".to_owned());
        };
        match service.tcp_port(|other| other.port == port) {
            Some(_) => Ok(format!("{key}:{port}")),
            None => invalid(
                BACKEND_NOT_FOUND,
                format!("the Service {key} has no TCP port {port}"),
            ),
        }
    }

    /// The status of each route with a parent that is a Service.
    pub(super) fn statuses(&self) -> Vec<RouteStatus> {
        let routes = self.http.values().chain(self.grpc.values());
        let statuses = routes.filter(|route| !route.parents.is_empty());
        let mut statuses: Vec<RouteStatus> = statuses.map(|route| self.status(route)).collect();
        statuses.sort_by(|one, other| (one.kind, &one.key).cmp(&(other.kind, &other.key)));
        statuses
    }

    fn status(&self, route: &Route) -> RouteStatus {
        let id = (route.kind, route.key.clone());
        let parents = route.parents.iter().enumerate();
        let parents = parents.filter_map(|(position, parent)| {
            let attachment = self.attachments.get(&parent.key(&route.key))?;
            Some(ParentStatus {
                parent: parent.clone(),
                conditions: attachment.conditions.get(&id)?.get(&position)?.clone(),
            })
        });
        RouteStatus {
            kind: route.kind,
            key: route.key.clone(),
            generation: route.generation,
            parents: parents.collect(),
        }
    }

    fn parents_of_id(&self, (kind, key): &RouteId) -> impl Iterator<Item = Key> {
        self.of_kind(*kind)
            .get(key)
            .into_iter()
            .flat_map(parents_of)
    }

    /// The number of references between objects.
    #[cfg(test)]
    pub(super) fn links(&self) -> usize {
        let routes = self.of_parent.len() + self.of_backend.len() + self.attachments.len();
        routes + self.into_namespace.len() + self.grants_of.len()
    }
}

fn parents_of(route: &Route) -> impl Iterator<Item = Key> {
    route.parents.iter().map(|parent| parent.key(&route.key))
}
