//! The routes of the catalog, their parents and their backends. Pure.
//!
//! Routes of the Service's own namespace (producer routes) are for all clients. Routes of another
//! namespace (consumer routes) are for the clients of that namespace, in place of the former. So
//! no namespace changes the traffic between two others.
//!
//! A change of a route, of a grant or of a Service marks the groups that it may concern: the routes
//! of one namespace at one Service. They are merged once for all changes of a batch.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::object::{Key, Kind, Service, Source};
use super::policies::Policies;
use super::store::{Replaced, Store};
use super::{link, unlink};
use crate::routes::attach::{Attachment, RouteId, Table, Unresolved, attach};
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
    of_group: HashMap<Group, BTreeSet<RouteId>>,
    of_backend: HashMap<Key, BTreeSet<RouteId>>,
    /// The routes with references into a namespace that is not theirs.
    into_namespace: HashMap<Arc<str>, BTreeSet<RouteId>>,
    /// The routes of each Service by their namespace.
    attachments: HashMap<Key, BTreeMap<Arc<str>, Attachment>>,
    /// Groups that are to be merged again.
    changed: BTreeSet<Group>,
}

/// A Service, and a namespace with routes for it.
type Group = (Key, Arc<str>);

impl Routes {
    pub(super) fn of_kind(&self, kind: Kind) -> &Store<Route> {
        match kind {
            Kind::GrpcRoute => &self.grpc,
            _ => &self.http,
        }
    }

    /// The routes of a Service port for the clients of a namespace.
    pub(super) fn of_client(&self, service: &Key, port: u16, client: &str) -> Option<&Arc<Table>> {
        let attachments = self.attachments.get(service)?;
        let of_namespace = |namespace: &str| attachments.get(namespace)?.tables.get(&port);
        of_namespace(client).or_else(|| of_namespace(&service.namespace))
    }

    /// The namespaces with consumer routes for a Service port, if there are any.
    pub(super) fn consumers(&self, service: &Key, port: u16) -> Option<Arc<BTreeSet<Arc<str>>>> {
        let all = self.attachments.get(service)?.iter();
        let consumers = all.filter(|(namespace, attachment)| {
            **namespace != service.namespace && attachment.tables.contains_key(&port)
        });
        let consumers: BTreeSet<_> = consumers.map(|(namespace, _)| namespace.clone()).collect();
        (!consumers.is_empty()).then(|| Arc::new(consumers))
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
            groups_of(route).for_each(|group| unlink(&mut self.of_group, &group, &id));
            for reference in route.references() {
                unlink(&mut self.of_backend, &reference.key, &id);
                unlink(&mut self.into_namespace, &reference.key.namespace, &id);
            }
        }
        if let Some(route) = &new {
            groups_of(route).for_each(|group| link(&mut self.of_group, &group, &id));
            for reference in route.references() {
                link(&mut self.of_backend, &reference.key, &id);
                if reference.key.namespace != key.namespace {
                    link(&mut self.into_namespace, &reference.key.namespace, &id);
                }
            }
        }
        let both = old.iter().chain(&new);
        self.changed.extend(both.flat_map(groups_of));
    }

    pub(super) fn set_grant(&mut self, source: Source, key: &Key, new: Option<Grant>) {
        if self.grants.replace(source, key, new).is_some() {
            match self.grants.get(key) {
                Some(_) => link(&mut self.grants_of, &key.namespace, key),
                None => unlink(&mut self.grants_of, &key.namespace, key),
            }
            let routes = self.into_namespace.get(&key.namespace);
            let routes = routes.into_iter().flatten();
            let groups = routes.flat_map(|id| self.groups_of_id(id));
            self.changed.extend(groups.collect::<Vec<_>>());
        }
    }

    /// A Service has changed, which may be a parent or a backend.
    pub(super) fn set_service(&mut self, key: &Key) {
        self.set_policy(key);
        let routes = self.of_backend.get(key).into_iter().flatten();
        let groups = routes.flat_map(|id| self.groups_of_id(id));
        self.changed.extend(groups.collect::<Vec<_>>());
    }

    /// The policy of a Service has changed, which completes its rules.
    pub(super) fn set_policy(&mut self, key: &Key) {
        let attachments = self.attachments.get(key).into_iter();
        let namespaces = attachments.flat_map(BTreeMap::keys);
        let groups = namespaces.map(|namespace| (key.clone(), namespace.clone()));
        self.changed.extend(groups);
    }

    /// Merges the changed groups. Returns the Services with other routes than before, if
    /// there are changes.
    pub(super) fn settle(
        &mut self,
        services: &Store<Service>,
        policies: &Policies,
    ) -> Option<Vec<Key>> {
        if self.changed.is_empty() {
            return None;
        }
        let mut affected = Vec::new();
        for group in std::mem::take(&mut self.changed) {
            let next = self.of_group.get(&group).map(|ids| {
                let routes = ids.iter();
                let routes = routes.filter_map(|(kind, key)| self.of_kind(*kind).get(key));
                let parent = &group.0;
                let resolve = |route: &Route, reference: &Reference| {
                    self.resolve(services, parent, route, reference)
                };
                let requests = policies.requests(parent);
                let service = services.get(parent);
                attach(parent, service, routes.collect(), requests, resolve)
            });
            let (parent, namespace) = group;
            let tables = next.as_ref().map(|next| next.tables.clone());
            let of_parent = self.attachments.entry(parent.clone()).or_default();
            let before = match next {
                Some(next) => of_parent.insert(namespace, next),
                None => of_parent.remove(&namespace),
            };
            if of_parent.is_empty() {
                self.attachments.remove(&parent);
            }
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
            let of_parent = self.attachments.get(&parent.key(&route.key))?;
            let attachment = of_parent.get(&route.key.namespace)?;
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

    fn groups_of_id(&self, (kind, key): &RouteId) -> impl Iterator<Item = Group> {
        let route = self.of_kind(*kind).get(key);
        route.into_iter().flat_map(groups_of)
    }

    /// The number of references between objects.
    #[cfg(test)]
    pub(super) fn links(&self) -> usize {
        let routes = self.of_group.len() + self.of_backend.len() + self.attachments.len();
        routes + self.into_namespace.len() + self.grants_of.len()
    }
}

fn groups_of(route: &Route) -> impl Iterator<Item = Group> {
    let parents = route.parents.iter();
    parents.map(|parent| (parent.key(&route.key), route.key.namespace.clone()))
}

#[cfg(test)]
mod tests;
