//! The routes of the catalog, their parents and their backends. Pure.
//!
//! Routes of the Service's own namespace (producer routes) are for all clients. Routes of another
//! namespace (consumer routes) are for the clients of that namespace, in place of the former. So
//! no namespace changes the traffic between two others.
//!
//! The routes of one namespace at one Service are merged once for all changes of a batch.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use diy_mesh_proto::mesh::v1::ExternalBackend;

use super::links::{Link, Links};
use super::policies::Policies;
use super::put;
use super::reads::{self, Read, Reads};
use super::store::{Store, Values};
use crate::kinds::Service;
use crate::kinds::authorization::Rules;
use crate::kinds::route::attach::{Attachment, Table, attach};
use crate::kinds::route::backend::{Backend, External};
use crate::kinds::route::canary::Canaries;
use crate::kinds::route::model::{Grant, Reference, Route};
use crate::kinds::smi::split::{RouteGroup, Split};
use crate::object::condition::{BACKEND_NOT_FOUND, INVALID_KIND, REF_NOT_PERMITTED};
use crate::object::{
    Condition, Key, Kind, ObjectId, ObjectStatus, Rejection, TargetReference, TargetStatus,
};

/// The parents in the status of a host. Kubernetes rejects more.
const MAX_PARENTS: usize = 32;

/// The routes, what they refer to, and what results from both.
#[derive(Debug, Default)]
pub(super) struct Routes {
    /// By kind. TrafficSplits and the canaries of Services (of kind Service) are routes, too.
    all: BTreeMap<Kind, Store<Route>>,
    pub(super) traffic_splits: Store<Split>,
    pub(super) route_groups: Store<RouteGroup>,
    pub(super) grants: Store<Grant>,
    /// The XBackends, and the TrafficPolicies that are hosts.
    pub(super) backends: Values<ObjectId, Backend>,
    canaries: Values<Key, Canaries>,
    /// The routes of each Service by their namespace.
    attachments: HashMap<Key, HashMap<Arc<str>, Attachment>>,
}

/// Parts of the routes of a Service that are read apart.
const TABLES: &str = "tables";
const PROTECTED: &str = "protected";
const CONDITIONS: &str = "conditions";

impl Routes {
    pub(super) fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &Key> {
        self.all.get(&kind).into_iter().flat_map(Store::keys)
    }

    pub(super) fn backends(&self, kind: Kind) -> impl Iterator<Item = &Key> {
        let ids = self.backends.keys().filter(move |id| id.0 == kind);
        ids.map(|(_, key)| key)
    }

    /// The routes of a Service by their namespace, of which a part is read.
    fn attached(&self, part: &str, service: &Key) -> Option<&HashMap<Arc<str>, Attachment>> {
        reads::record(|| Read::of(part, service));
        self.attachments.get(service)
    }

    pub(super) fn get(&self, id: &ObjectId) -> Option<&Route> {
        self.all.get(&id.0)?.get(&id.1)
    }

    /// The routes with a Service as parent.
    pub(super) fn of_service(&self, links: &Links, service: &Key) -> impl Iterator<Item = &Route> {
        let namespaces = self.attached(TABLES, service).into_iter();
        let groups = namespaces.flat_map(HashMap::keys);
        let ids = groups
            .flat_map(|namespace| links.ids(&Link::RouteOf(service.clone(), namespace.clone())));
        ids.filter_map(|id| self.get(id))
    }

    /// The routes of a Service port for the clients of a namespace.
    pub(super) fn of_client(&self, service: &Key, port: u16, client: &str) -> Option<&Arc<Table>> {
        let attachments = self.attached(TABLES, service)?;
        let of_namespace = |namespace: &str| attachments.get(namespace)?.tables.get(&port);
        let (own, common) = (of_namespace(client), of_namespace(&service.namespace));
        match own {
            Some(table) if !table.is_unreadable => own,
            _ => common.or(own),
        }
    }

    /// The rules by which the pods of a Service ask authorization servers, at each port. Routes of other namespaces
    /// have no part in it.
    pub(super) fn protected(&self, service: &Key) -> Option<&BTreeMap<u16, Arc<Rules>>> {
        let own = self.attached(PROTECTED, service)?.get(&service.namespace);
        own.map(|own| &own.protected)
    }

    /// The authorization servers that the pods of a Service ask about the requests of each rule of a
    /// table. Without one for any rule, or with a table of another namespace: empty.
    pub(super) fn servers(
        &self,
        service: &Key,
        port: u16,
        table: &Arc<Table>,
    ) -> Vec<Option<String>> {
        let own = self.attached(TABLES, service);
        let own = own.and_then(|all| all.get(&service.namespace));
        let own = own.filter(|own| own.tables.get(&port) == Some(table));
        let rules = own.and_then(|own| own.protected.get(&port));
        let routes = rules.and_then(|rules| rules.message.routes.as_ref());
        let rules = routes.into_iter().flat_map(|routes| &routes.rules);
        let servers = rules.map(|rule| Some(rule.authorizer.as_ref()?.backend.clone()));
        servers.collect()
    }

    /// The namespaces with consumer routes for a Service port, if there are any.
    pub(super) fn consumers(&self, service: &Key, port: u16) -> Option<Arc<BTreeSet<Arc<str>>>> {
        let all = self.attached(TABLES, service)?.iter();
        let consumers = all.filter(|(namespace, attachment)| {
            **namespace != service.namespace && attachment.tables.contains_key(&port)
        });
        let consumers: BTreeSet<_> = consumers.map(|(namespace, _)| namespace.clone()).collect();
        (!consumers.is_empty()).then(|| Arc::new(consumers))
    }

    pub(super) fn set_route(
        &mut self,
        links: &mut Links,
        kind: Kind,
        key: &Key,
        new: Option<Route>,
    ) {
        self.all
            .entry(kind)
            .or_default()
            .replace(links, kind, key, new);
    }

    /// Answers what the route of a TrafficSplit is.
    pub(super) fn settle_split(&mut self, links: &mut Links, key: &Key) -> Reads {
        let (route, reads) = reads::ask(|| {
            let split = self.traffic_splits.get(key)?;
            Some(split.route(|group| self.route_groups.get(group)))
        });
        self.set_route(links, Kind::TrafficSplit, key, route);
        reads
    }

    /// Answers what the canaries of a Service are.
    pub(super) fn settle_canaries(
        &mut self,
        links: &mut Links,
        primary: &Key,
        services: &Store<Service>,
    ) -> Reads {
        let (canaries, reads) = reads::ask(|| {
            let annotated = links.keys(&Link::CanaryOf(primary.clone()));
            let annotated = annotated.filter_map(|key| services.get(key)).collect();
            Canaries::new(primary, services.get(primary), annotated)
        });
        self.set_route(links, Kind::Service, primary, canaries.route(primary));
        let canaries = Some(canaries).filter(|one| *one != Canaries::default());
        self.canaries.put(&mut links.changed, primary, canaries);
        reads
    }

    /// The canaries of a Service, with their shares in percent, if no route takes precedence.
    pub(super) fn canaries(&self, service: &Key) -> &[(Key, u32)] {
        let applies = || {
            let attachment = self
                .attached(CONDITIONS, service)?
                .get(&service.namespace)?;
            let conditions = attachment
                .conditions
                .get(&(Kind::Service, service.clone()))?;
            let mut conditions = conditions.values().flatten();
            conditions.find(|condition| condition.kind == "Accepted" && condition.holds)
        };
        let canaries = self.canaries.get(service);
        let canaries = canaries.filter(|_| applies().is_some());
        canaries.map_or(&[], |canaries| &canaries.accepted)
    }

    /// Answers what the routes of a Service are that are of one namespace.
    pub(super) fn settle(
        &mut self,
        links: &mut Links,
        (parent, namespace): (&Key, &Arc<str>),
        services: &Store<Service>,
        policies: &Policies,
    ) -> Reads {
        let (next, reads) = reads::ask(|| {
            let ids = links.ids(&Link::RouteOf(parent.clone(), namespace.clone()));
            let routes: Vec<&Route> = ids.filter_map(|id| self.get(id)).collect();
            let resolve = |route: &Route, reference: &Reference| {
                self.resolve(links, services, parent, route, reference)
            };
            (!routes.is_empty()).then(|| {
                let requests = policies.requests(parent);
                attach(parent, services.get(parent), routes, requests, resolve)
            })
        });
        let of_parent = self.attachments.entry(parent.clone()).or_default();
        let before = put(of_parent, namespace, next);
        let none = Attachment::default();
        let old = before.as_ref().unwrap_or(&none);
        let new = of_parent.get(namespace).unwrap_or(&none);
        let is_own = *namespace == parent.namespace;
        let differs = [
            (TABLES, old.tables != new.tables),
            (PROTECTED, is_own && old.protected != new.protected),
            (CONDITIONS, old.conditions != new.conditions),
        ];
        for (part, _) in differs.iter().filter(|(_, differs)| *differs) {
            links.changed.add(Read::of(part, parent));
        }
        if of_parent.is_empty() {
            self.attachments.remove(parent);
        }
        reads
    }

    /// Checks a reference of a route at a parent.
    fn resolve(
        &self,
        links: &Links,
        services: &Store<Service>,
        parent: &Key,
        route: &Route,
        reference: &Reference,
    ) -> Result<Option<ExternalBackend>, Rejection> {
        let (field, key) = (&reference.field, &reference.key);
        let invalid =
            |reason, problem: String| Err(Rejection::new(reason, format!("{field}: {problem}")));
        let not_found = |Rejection {
                             reason, message, ..
                         }| invalid(reason, message);
        let is_near = key.namespace == route.key.namespace;
        if let Some(kind) = reference.external {
            if !is_near {
                let problem = format!("the {kind} {key} is not of the namespace of the route");
                return invalid(REF_NOT_PERMITTED, problem);
            }
            let found = self.external(&(kind, key.clone()));
            let found = found.and_then(|one| one.of_route(route.kind, reference.port));
            return found.map(Some).or_else(not_found);
        }
        if let Some(kind) = &reference.other_kind {
            return invalid(INVALID_KIND, format!("{kind} is not Service"));
        }
        // Clients of the parent reach it without any route.
        let is_own = is_near || key == parent;
        let grants = links.keys(&Link::GrantIn(key.namespace.clone()));
        let mut grants = grants.map(|grant| &self.grants[grant]);
        if !is_own && !grants.any(|grant| grant.permits(route, key)) {
            let from = format!("{} of namespace {}", route.kind, route.key.namespace);
            let problem = format!(
                "no ReferenceGrant in {} permits {from} to refer to {key}",
                key.namespace
            );
            return invalid(REF_NOT_PERMITTED, problem);
        }
        let exists = check_backend(services, key, reference.port);
        exists.map(|()| None).or_else(not_found)
    }

    /// An accepted host.
    fn external(&self, id: &ObjectId) -> Result<&External, Rejection> {
        let (kind, key) = id;
        let Some(backend) = self.backends.get(id) else {
            let row = kind.row();
            let has_targets = match kind {
                Kind::TrafficPolicy => " or has targetRefs",
                _ => "",
            };
            let message = format!(
                "the {kind} {key} does not exist{has_targets}, or the definition {}.{} is not \
                 installed",
                row.plural, row.group
            );
            return Err(Rejection::new(BACKEND_NOT_FOUND, message));
        };
        backend.content.as_deref().map_err(|rejection| {
            let message = format!("the {kind} {key} is not accepted: {rejection}");
            Rejection::new(rejection.reason, message)
        })
    }

    /// The status of a host: at each Service whose routes may use it, or at itself if there is none.
    pub(super) fn backend_status(&self, links: &Links, id: &ObjectId) -> Option<ObjectStatus> {
        let backend = self.backends.get(id)?;
        let conditions = backend.conditions(match backend.rejection() {
            Some(rejection) => rejection.condition(),
            None => Condition::new("Accepted", true, "Accepted", String::new()),
        });
        let routes = links.ids(&Link::External(id.clone()));
        let routes = routes.filter(|(_, route)| route.namespace == backend.key.namespace);
        let routes = routes.filter_map(|id| self.get(id));
        let parents = |route: &Route| {
            let parents = route.parents.iter();
            Vec::from_iter(parents.map(|parent| parent.key(&route.key)))
        };
        let services: BTreeSet<Key> = routes.flat_map(parents).collect();
        let services = services.iter().take(MAX_PARENTS);
        let services = services.map(|service| TargetReference {
            namespace: Some(service.namespace.to_string()),
            ..TargetReference::object(Kind::Service, &service.name)
        });
        let mut parents: Vec<_> = services.collect();
        if parents.is_empty() {
            parents.push(TargetReference::object(id.0, &id.1.name));
        }
        let parents = parents.into_iter().map(|parent| TargetStatus {
            parent,
            conditions: conditions.clone(),
        });
        Some(backend.status(parents.collect()))
    }

    /// The routes of a Service that have conditions there.
    pub(super) fn ids(&self, service: &Key) -> impl Iterator<Item = &ObjectId> {
        let attachments = self.attached(CONDITIONS, service).into_iter();
        let attachments = attachments.flat_map(HashMap::values);
        let ids = attachments.flat_map(|one| one.conditions.keys());
        ids.filter(|id| id.0 != Kind::Service)
    }

    /// The status of a route with a parent that is a Service.
    pub(super) fn route_status(&self, id: &ObjectId) -> Option<ObjectStatus> {
        let route = self.get(id).filter(|route| !route.parents.is_empty())?;
        Some(self.status(route))
    }

    fn status(&self, route: &Route) -> ObjectStatus {
        let id = (route.kind, route.key.clone());
        let parents = route.parents.iter().enumerate();
        let parents = parents.filter_map(|(position, parent)| {
            let of_parent = self.attached(CONDITIONS, &parent.key(&route.key))?;
            let attachment = of_parent.get(&route.key.namespace)?;
            Some(TargetStatus {
                parent: parent.clone(),
                conditions: attachment.conditions.get(&id)?.get(&position)?.clone(),
            })
        });
        route.status(parents.collect())
    }

    /// The status of a Service with the annotation.
    pub(super) fn canary_status(&self, service: &Service) -> Option<TargetStatus> {
        let primary = service.primary()?;
        let canaries = self.canaries.get(&primary)?;
        let conditions = match canaries.rejection(&service.key) {
            Some(rejection) => vec![rejection.condition()],
            None => {
                let route = self.get(&(Kind::Service, primary.clone()));
                let parents = route.map(|route| self.status(route).parents);
                let parents = parents.into_iter().flatten();
                parents.flat_map(|parent| parent.conditions).collect()
            }
        };
        Some(TargetStatus {
            parent: TargetReference::service(&primary.name),
            conditions,
        })
    }

    /// The number of results.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.attachments.len() + self.canaries.len()
    }
}

/// Whether a Service has a TCP port that proxies can call, or why not.
pub(super) fn check_backend(
    services: &Store<Service>,
    key: &Key,
    port: Option<u16>,
) -> Result<(), Rejection> {
    let invalid = |reason, problem: String| Err(Rejection::new(reason, problem));
    let Some(service) = services.get(key) else {
        let problem = format!("the Service {key} does not exist");
        return invalid(BACKEND_NOT_FOUND, problem);
    };
    if !service.external_name.is_empty() {
        let problem = format!("the Service {key} is an ExternalName");
        return invalid(INVALID_KIND, problem);
    }
    let Some(port) = port else {
        return invalid(BACKEND_NOT_FOUND, "the port is missing".to_owned());
    };
    if service.tcp_port(|other| other.port == port).is_none() {
        let problem = format!("the Service {key} has no TCP port {port}");
        return invalid(BACKEND_NOT_FOUND, problem);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
