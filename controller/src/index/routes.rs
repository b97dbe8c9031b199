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

use super::object::{Key, Kind, Service};
use super::policies::Policies;
use super::store::{Replaced, Store};
use super::{link, unlink};
use crate::routes::attach::{Attachment, RouteId, Table, attach};
use crate::routes::canary::Canaries;
use crate::routes::model::{Grant, Reference, Rejection, Route};
use crate::routes::smi::{RouteGroup, Split};
use crate::routes::{
    BACKEND_NOT_FOUND, INVALID_KIND, ParentReference, ParentStatus, REF_NOT_PERMITTED, RouteStatus,
};

/// The routes, by everything that they depend on.
#[derive(Debug, Default)]
pub(super) struct Routes {
    http: Store<Route>,
    grpc: Store<Route>,
    tcp: Store<Route>,
    pub(super) traffic_splits: Store<Split>,
    pub(super) route_groups: Store<RouteGroup>,
    /// The TrafficSplits with a group.
    of_route_group: HashMap<Key, BTreeSet<Key>>,
    /// TrafficSplits and the canaries of Services, as routes.
    splits: HashMap<RouteId, Route>,
    canaries: HashMap<Key, Canaries>,
    /// The Services with the annotation, by the Service that it names.
    canaries_of: HashMap<Key, BTreeSet<Key>>,
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
    /// Services whose canaries are to be computed again.
    changed_canaries: BTreeSet<Key>,
}

/// A Service, and a namespace with routes for it.
type Group = (Key, Arc<str>);

impl Routes {
    pub(super) fn of_kind(&self, kind: Kind) -> &Store<Route> {
        match kind {
            Kind::GrpcRoute => &self.grpc,
            Kind::TcpRoute => &self.tcp,
            _ => &self.http,
        }
    }

    pub(super) fn get(&self, id: &RouteId) -> Option<&Route> {
        match id.0 {
            Kind::Service | Kind::TrafficSplit => self.splits.get(id),
            kind => self.of_kind(kind).get(&id.1),
        }
    }

    /// The routes with a Service as parent.
    pub(super) fn of_service(&self, service: &Key) -> impl Iterator<Item = &Route> {
        let namespaces = self.attachments.get(service).into_iter();
        let groups = namespaces.flat_map(BTreeMap::keys).filter_map(|namespace| {
            let group = (service.clone(), namespace.clone());
            self.of_group.get(&group)
        });
        groups.flatten().filter_map(|id| self.get(id))
    }

    /// The routes of a Service port for the clients of a namespace.
    pub(super) fn of_client(&self, service: &Key, port: u16, client: &str) -> Option<&Arc<Table>> {
        let attachments = self.attachments.get(service)?;
        let of_namespace = |namespace: &str| attachments.get(namespace)?.tables.get(&port);
        let (own, common) = (of_namespace(client), of_namespace(&service.namespace));
        match own {
            Some(table) if !table.is_unreadable => own,
            _ => common.or(own),
        }
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

    pub(super) fn set_route(&mut self, kind: Kind, key: &Key, new: Option<Route>) {
        let store = match kind {
            Kind::GrpcRoute => &mut self.grpc,
            Kind::TcpRoute => &mut self.tcp,
            _ => &mut self.http,
        };
        let Some(Replaced(old)) = store.replace(key, new) else {
            return;
        };
        let (id, new) = ((kind, key.clone()), store.get(key).cloned());
        self.relink(&id, old.as_ref(), new.as_ref());
    }

    /// Replaces a route that has been computed from objects of the catalog.
    fn set_split(&mut self, id: RouteId, new: Option<Route>) {
        let old = match new.clone() {
            Some(new) => self.splits.insert(id.clone(), new),
            None => self.splits.remove(&id),
        };
        if old != new {
            self.relink(&id, old.as_ref(), new.as_ref());
        }
    }

    pub(super) fn set_traffic_split(&mut self, key: &Key, new: Option<Split>) {
        let Some(Replaced(old)) = self.traffic_splits.replace(key, new) else {
            return;
        };
        let groups = |split: Option<&Split>| {
            let rule = split.and_then(|split| split.content.as_ref().ok());
            rule.map_or(vec![], |rule| rule.groups.clone())
        };
        for group in groups(old.as_ref()) {
            unlink(&mut self.of_route_group, &group, key);
        }
        for group in groups(self.traffic_splits.get(key)) {
            link(&mut self.of_route_group, &group, key);
        }
        self.update_split(key);
    }

    pub(super) fn set_group(&mut self, key: &Key, new: Option<RouteGroup>) {
        if self.route_groups.replace(key, new).is_some() {
            let splits = self.of_route_group.get(key).cloned();
            let splits = splits.into_iter().flatten();
            splits.for_each(|split| self.update_split(&split));
        }
    }

    fn update_split(&mut self, key: &Key) {
        let split = self.traffic_splits.get(key);
        let route = split.map(|split| split.route(|group| self.route_groups.get(group)));
        self.set_split((Kind::TrafficSplit, key.clone()), route);
    }

    fn relink(&mut self, id: &RouteId, old: Option<&Route>, new: Option<&Route>) {
        let namespace = &id.1.namespace;
        if let Some(route) = old {
            groups_of(route).for_each(|group| unlink(&mut self.of_group, &group, id));
            for reference in route.references() {
                unlink(&mut self.of_backend, &reference.key, id);
                unlink(&mut self.into_namespace, &reference.key.namespace, id);
            }
        }
        if let Some(route) = new {
            groups_of(route).for_each(|group| link(&mut self.of_group, &group, id));
            for reference in route.references() {
                link(&mut self.of_backend, &reference.key, id);
                if reference.key.namespace != *namespace {
                    link(&mut self.into_namespace, &reference.key.namespace, id);
                }
            }
        }
        let both = old.into_iter().chain(new);
        self.changed.extend(both.flat_map(groups_of));
    }

    pub(super) fn set_grant(&mut self, key: &Key, new: Option<Grant>) {
        if self.grants.replace(key, new).is_some() {
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

    /// A Service has changed, which may be a parent, a backend or a canary.
    pub(super) fn set_service(&mut self, key: &Key, old: Option<&Service>, new: Option<&Service>) {
        self.set_policy(key);
        let routes = self.of_backend.get(key).into_iter().flatten();
        let groups = routes.flat_map(|id| self.groups_of_id(id));
        self.changed.extend(groups.collect::<Vec<_>>());
        let primary = |service: &Service| {
            let parent = service.canary.as_ref()?.parents.first()?;
            Some(parent.key(key))
        };
        let (before, after) = (old.and_then(primary), new.and_then(primary));
        if let Some(primary) = &before {
            unlink(&mut self.canaries_of, primary, key);
        }
        if let Some(primary) = &after {
            link(&mut self.canaries_of, primary, key);
        }
        let primaries = [Some(key.clone()), before, after];
        self.changed_canaries
            .extend(primaries.into_iter().flatten());
    }

    /// Computes the canaries of a changed Service, once for all changes of a batch: a Service may
    /// have many. Returns the Service, and whether it has other canaries than before.
    pub(super) fn settle_canaries(
        &mut self,
        services: &Store<Service>,
        statuses: &mut BTreeSet<RouteId>,
    ) -> Option<(Key, bool)> {
        let primary = self.changed_canaries.pop_first()?;
        let canaries = self.canaries_of.get(&primary);
        let annotated = canaries.into_iter().flatten();
        let annotated = annotated.filter_map(|key| services.get(key)).collect();
        let canaries = Canaries::new(&primary, services.get(&primary), annotated);
        let id = (Kind::Service, primary.clone());
        self.set_split(id, canaries.route(&primary));
        let before = match canaries == Canaries::default() {
            true => self.canaries.remove(&primary),
            false => self.canaries.insert(primary.clone(), canaries),
        };
        let is_changed = before.as_ref() != self.canaries.get(&primary);
        if is_changed {
            // Their status may have changed.
            let group = (primary.clone(), primary.namespace.clone());
            self.changed.insert(group);
            let after = self.canaries.get(&primary);
            let both = before.iter().chain(after).flat_map(Canaries::services);
            statuses.extend(both.map(|key| (Kind::Service, key.clone())));
        }
        Some((primary, is_changed))
    }

    pub(super) fn has_canaries(&self, service: &Key) -> bool {
        self.canaries.contains_key(service)
    }

    /// The canaries of a Service, with their shares in percent, if no route takes precedence.
    pub(super) fn canaries(&self, service: &Key) -> &[(Key, u32)] {
        let applies = || {
            let attachment = self.attachments.get(service)?.get(&service.namespace)?;
            let conditions = attachment
                .conditions
                .get(&(Kind::Service, service.clone()))?;
            let mut conditions = conditions.values().flatten();
            conditions.find(|condition| condition.kind == "Accepted" && condition.holds)
        };
        let canaries = applies().and_then(|_| self.canaries.get(service));
        canaries.map_or(&[], |canaries| &canaries.accepted)
    }

    /// The policy of a Service has changed, which completes its rules.
    pub(super) fn set_policy(&mut self, key: &Key) {
        let attachments = self.attachments.get(key).into_iter();
        let namespaces = attachments.flat_map(BTreeMap::keys);
        let groups = namespaces.map(|namespace| (key.clone(), namespace.clone()));
        self.changed.extend(groups);
    }

    /// Merges a changed group. Returns the Service, and whether it has other routes than before, or
    /// `None` without changes.
    pub(super) fn settle_one(
        &mut self,
        services: &Store<Service>,
        policies: &Policies,
        statuses: &mut BTreeSet<RouteId>,
    ) -> Option<(Key, bool)> {
        let group = self.changed.pop_first()?;
        let next = self.of_group.get(&group).map(|ids| {
            let routes = ids.iter().filter_map(|id| self.get(id));
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
            Some(next) => of_parent.insert(namespace.clone(), next),
            None => of_parent.remove(&namespace),
        };
        let none = HashMap::new();
        let old = before.as_ref().map_or(&none, |one| &one.conditions);
        let new = of_parent
            .get(&namespace)
            .map_or(&none, |one| &one.conditions);
        let both = old.keys().chain(new.keys());
        let changed: BTreeSet<RouteId> = both
            .filter(|id| old.get(*id) != new.get(*id))
            .cloned()
            .collect();
        if of_parent.is_empty() {
            self.attachments.remove(&parent);
        }
        for id in changed {
            match id.0 {
                Kind::Service => {
                    let canaries = self.canaries.get(&id.1).into_iter();
                    let canaries = canaries.flat_map(Canaries::services);
                    statuses.extend(canaries.map(|key| (Kind::Service, key.clone())));
                }
                _ => drop(statuses.insert(id)),
            }
        }
        let before = before.map(|before| before.tables).unwrap_or_default();
        Some((parent, before != tables.unwrap_or_default()))
    }

    /// The name of the resource that a reference of a route at a parent refers to.
    fn resolve(
        &self,
        services: &Store<Service>,
        parent: &Key,
        route: &Route,
        reference: &Reference,
    ) -> Result<String, Rejection> {
        let (field, key) = (&reference.field, &reference.key);
        let invalid =
            |reason, problem: String| Err(Rejection::new(reason, format!("{field}: {problem}")));
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

    /// The routes that may have a status.
    pub(super) fn ids(&self) -> impl Iterator<Item = RouteId> {
        let kinds = [Kind::HttpRoute, Kind::GrpcRoute, Kind::TcpRoute].into_iter();
        let routes = kinds.flat_map(|kind| self.of_kind(kind).keys().map(move |key| (kind, key)));
        let splits = self.traffic_splits.keys();
        let splits = splits.map(|key| (Kind::TrafficSplit, key));
        routes.chain(splits).map(|(kind, key)| (kind, key.clone()))
    }

    /// Marks the routes of a Service.
    pub(super) fn mark(&self, service: &Key, statuses: &mut BTreeSet<RouteId>) {
        let attachments = self.attachments.get(service).into_iter();
        let attachments = attachments.flat_map(BTreeMap::values);
        let ids = attachments.flat_map(|one| one.conditions.keys());
        statuses.extend(ids.filter(|id| id.0 != Kind::Service).cloned());
    }

    /// The status of a route with a parent that is a Service.
    pub(super) fn route_status(&self, id: &RouteId) -> Option<RouteStatus> {
        let route = self.get(id).filter(|route| !route.parents.is_empty())?;
        Some(self.status(route))
    }

    /// The Services with the annotation of canaries.
    pub(super) fn canary_services(&self) -> impl Iterator<Item = &Key> {
        self.canaries_of.values().flatten()
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
            uid: match route.kind {
                Kind::TrafficSplit => route.uid.clone(),
                _ => "".into(),
            },
            generation: route.generation,
            parents: parents.collect(),
            keeps_programmed: false,
        }
    }

    /// The status of a Service with the annotation.
    pub(super) fn canary_status(&self, service: &Service) -> Option<ParentStatus> {
        let reference = service.canary.as_ref()?.parents.first()?;
        let primary = reference.key(&service.key);
        let canaries = self.canaries.get(&primary)?;
        let conditions = match canaries.rejection(&service.key) {
            Some(rejection) => vec![rejection.condition()],
            None => {
                let route = self.splits.get(&(Kind::Service, primary.clone()));
                let parents = route.map(|route| self.status(route).parents);
                let parents = parents.into_iter().flatten();
                parents.flat_map(|parent| parent.conditions).collect()
            }
        };
        Some(ParentStatus {
            parent: ParentReference::service(&primary.name),
            conditions,
        })
    }

    fn groups_of_id(&self, id: &RouteId) -> impl Iterator<Item = Group> {
        let route = self.get(id);
        route.into_iter().flat_map(groups_of)
    }

    /// The number of references between objects.
    #[cfg(test)]
    pub(super) fn links(&self) -> usize {
        let routes = self.of_group.len() + self.of_backend.len() + self.attachments.len();
        let canaries = self.splits.len()
            + self.of_route_group.len()
            + self.canaries.len()
            + self.canaries_of.len();
        routes + canaries + self.into_namespace.len() + self.grants_of.len()
    }
}

fn groups_of(route: &Route) -> impl Iterator<Item = Group> {
    let parents = route.parents.iter();
    parents.map(|parent| (parent.key(&route.key), route.key.namespace.clone()))
}

#[cfg(test)]
mod tests;
