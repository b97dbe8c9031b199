//! The table of the kinds whose objects a state or a status depends on, and what is withheld while
//! one of them cannot be read. Pure.
//!
//! A state without routes or policies that exist would send requests elsewhere, or admit what they
//! forbid. So it is withheld, and its subscribers keep what they have. A status without objects that
//! exist would report errors that do not. All else is served and written.

use std::net::SocketAddr;

use super::links::Link;
use super::state::Target;
use super::{Index, Resource};
use crate::object::{Key, Kind, ObjectId, TargetReference};

/// Without a Service, and so without routes and policies. Any of these objects may change that.
const WITHOUT_SERVICE: &[Kind] = &[Kind::Service, Kind::Slice, Kind::Pod, Kind::Node];
const BACKEND: &[Kind] = &[
    Kind::Service,
    Kind::Slice,
    Kind::Pod,
    Kind::Node,
    Kind::TrafficPolicy,
];
/// A Service selects the pod, and a TrafficPolicy limits the Service or the namespace.
/// AuthorizationPolicies, and TrafficTargets with their groups, select the pod. It enforces the filter
/// ExternalAuth of the Service's HTTPRoutes, which GRPCRoutes exclude.
const WORKLOAD: &[Kind] = &[
    Kind::Service,
    Kind::Pod,
    Kind::Node,
    Kind::HttpRoute,
    Kind::GrpcRoute,
    Kind::Grant,
    Kind::TrafficPolicy,
    Kind::RouteGroup,
    Kind::Authorization,
    Kind::TrafficTarget,
    Kind::TcpGroup,
];

/// All kinds that configure something. Nothing waits for XMeshes, or is withheld without them.
pub const CONFIGURATION: &[Kind] = match Kind::ALL.split_last() {
    Some((Kind::Mesh, others)) => others,
    _ => panic!("XMesh is the last kind"),
};
/// The called pods enforce AuthorizationPolicies, whatever their clients know.
const DESTINATION: &[Kind] = match CONFIGURATION {
    [
        others @ ..,
        Kind::Authorization,
        Kind::TrafficTarget,
        Kind::TcpGroup,
    ] => others,
    _ => panic!("the kinds of policies of pods are the last ones but XMesh"),
};

/// The kinds whose objects the state of a resource with this target depends on.
pub fn kinds(resource: &Resource, target: Option<&Target>) -> &'static [Kind] {
    let has_service = target.is_some_and(|target| target.service.is_some());
    match resource {
        Resource::Workload(..) => WORKLOAD,
        _ if !has_service => WITHOUT_SERVICE,
        Resource::Backend(..) => BACKEND,
        Resource::Destination(_) => DESTINATION,
    }
}

impl Index {
    /// Whether the state of a resource may be another one with the objects that cannot be read.
    pub(super) fn is_withheld(&self, resource: &Resource, target: Option<&Target>) -> bool {
        if let Resource::Workload(pod, _) = resource
            && self.lacks_policies(&pod.namespace)
        {
            return true;
        }
        let mut unreadable = kinds(resource, target).iter();
        unreadable.any(|kind| {
            let service = target.and_then(|target| target.service.as_ref());
            self.unreadable.contains(kind)
                && match (kind, resource) {
                    (Kind::Node, Resource::Destination(address)) => {
                        target.is_none() && self.may_be_node_port(*address)
                    }
                    (Kind::Node, _) => false,
                    _ => service.is_none_or(|service| self.may_change(*kind, service)),
                }
        })
    }

    /// Whether the status of an object may be another one with the objects that cannot be read. The
    /// status of a route, of a split or of a canary is withheld with the state of its Services.
    pub(super) fn is_status_withheld(&self, id: &ObjectId) -> bool {
        let (kind, key) = id;
        let mut unreadable = self.unreadable.iter();
        unreadable.any(|other| {
            let mut parents = match kind {
                Kind::TrafficPolicy | Kind::Mesh | Kind::Backend => &[],
                Kind::Authorization | Kind::TrafficTarget => &[],
                Kind::Service => self.canary_parents(key),
                _ => self.routes.get(id).map_or(&[][..], |route| &route.parents),
            }
            .iter();
            let is_group = matches!(other, Kind::RouteGroup | Kind::TcpGroup);
            let depends = match kind {
                Kind::TrafficTarget => is_group,
                // It names the Services of its routes.
                _ if self.routes.backends.get(id).is_some() => {
                    Kind::routes().any(|one| one == *other)
                }
                _ => false,
            };
            other == kind
                || depends
                || parents.any(|parent| self.may_change(*other, &parent.key(key)))
        })
    }

    fn canary_parents(&self, service: &Key) -> &[TargetReference] {
        let canary = self
            .services
            .get(service)
            .and_then(|one| one.canary.as_ref());
        canary.map_or(&[], |canary| &canary.parents)
    }

    /// Whether objects of a kind may change what routes and policies do with the requests to a
    /// Service.
    fn may_change(&self, kind: Kind, service: &Key) -> bool {
        match kind {
            // The zone is a preference.
            Kind::Node => false,
            // The called pods enforce them.
            Kind::Authorization | Kind::TrafficTarget | Kind::TcpGroup => false,
            Kind::Grant => self.needs_grants(service),
            Kind::Backend => self.needs_backends(service),
            Kind::RouteGroup => self.needs_groups(service),
            _ => true,
        }
    }

    fn may_be_node_port(&self, address: SocketAddr) -> bool {
        self.links.contains(&Link::NodePort(address.port()))
    }

    /// Whether routes of a Service refer to other namespaces.
    fn needs_grants(&self, service: &Key) -> bool {
        let mut routes = self.routes.of_service(&self.links, service);
        routes.any(|route| {
            let mut references = route.references();
            let own = |key: &Key| key.namespace == route.key.namespace || key == service;
            references.any(|reference| !own(&reference.key))
        })
    }

    /// Whether routes of a Service refer to XBackends.
    fn needs_backends(&self, service: &Key) -> bool {
        let mut routes = self.routes.of_service(&self.links, service);
        routes.any(|route| route.external().any(|(kind, _)| kind == Kind::Backend))
    }

    /// Whether TrafficSplits of a Service refer to HTTPRouteGroups.
    fn needs_groups(&self, service: &Key) -> bool {
        let mut routes = self.routes.of_service(&self.links, service);
        routes.any(|route| {
            let is_split = route.kind == Kind::TrafficSplit;
            let split = self
                .routes
                .traffic_splits
                .get(&route.key)
                .filter(|_| is_split);
            let rule = split.and_then(|split| split.content.as_ref().ok());
            rule.is_some_and(|rule| !rule.groups.is_empty())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use super::*;
    use crate::catalog::parse;
    use crate::index::locality::Location;
    use crate::index::tests::index;

    const OBJECTS: &str = r#"
{apiVersion: v1, kind: Service, metadata: {name: plain, namespace: shop}, spec: {
  clusterIP: 10.96.0.1, ports: [{port: 80, nodePort: 30080}], type: NodePort}}
---
{apiVersion: v1, kind: Service, metadata: {name: split, namespace: shop}, spec: {
  clusterIP: 10.96.0.2, ports: [{port: 80}]}}
---
{apiVersion: v1, kind: Service, metadata: {name: other, namespace: shop}, spec: {
  clusterIP: 10.96.0.3, ports: [{port: 80}]}}
---
{apiVersion: split.smi-spec.io/v1alpha4, kind: TrafficSplit, metadata: {name: split, namespace: shop},
 spec: {service: split, backends: [{service: plain, weight: 1}],
  matches: [{kind: HTTPRouteGroup, name: absent}]}}
---
{apiVersion: gateway.networking.k8s.io/v1, kind: HTTPRoute, metadata: {name: other, namespace: shop},
 spec: {parentRefs: [{group: "", kind: Service, name: other}],
  rules: [{backendRefs: [{name: api, namespace: till, port: 80}]}]}}
---
{apiVersion: v1, kind: Service, metadata: {name: outer, namespace: shop}, spec: {
  clusterIP: 10.96.0.5, ports: [{port: 80}]}}
---
{apiVersion: gateway.networking.k8s.io/v1, kind: HTTPRoute, metadata: {name: outer, namespace: shop},
 spec: {parentRefs: [{group: "", kind: Service, name: outer}],
  rules: [{backendRefs: [{group: gateway.networking.x-k8s.io, kind: XBackend, name: host}]}]}}
---
{apiVersion: v1, kind: Service, metadata: {name: public, namespace: shop}, spec: {
  clusterIP: 10.96.0.6, ports: [{port: 80}]}}
---
{apiVersion: gateway.networking.k8s.io/v1, kind: HTTPRoute, metadata: {name: public, namespace: shop},
 spec: {parentRefs: [{group: "", kind: Service, name: public}],
  rules: [{backendRefs: [{group: diy-service-mesh.dev, kind: TrafficPolicy, name: api}]}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: alone, namespace: shop, uid: u}, status: {
  podIP: 10.0.0.1, podIPs: [{ip: 10.0.0.1}]}}
"#;

    fn optional() -> impl Iterator<Item = Kind> {
        let kinds = CONFIGURATION.iter().copied();
        kinds.filter(|kind| kind.is_optional())
    }

    /// The resources and statuses that are withheld while a kind cannot be read.
    fn withheld(kind: Kind) -> Vec<&'static str> {
        let mut index = index(parse(OBJECTS, "cluster.local").unwrap().objects);
        index.set_readable(kind, false);
        let destinations = [
            ("plain", "10.96.0.1:80"),
            ("split", "10.96.0.2:80"),
            ("other", "10.96.0.3:80"),
            ("outer", "10.96.0.5:80"),
            ("public", "10.96.0.6:80"),
            ("no port", "10.96.0.1:81"),
            ("pod", "10.0.0.1:80"),
            ("node port", "10.1.0.1:30080"),
            ("unknown", "192.0.2.1:443"),
        ];
        let destinations = destinations.map(|(name, address)| {
            let address = address.parse().unwrap();
            (name, Resource::Destination(address))
        });
        let backend = |name| Resource::Backend(Key::new("shop", name), 80);
        let others = [
            ("backend", backend("plain")),
            ("no backend", backend("none")),
            (
                "self",
                Resource::Workload(Key::new("shop", "alone"), Arc::from("u")),
            ),
        ];
        let all = destinations.into_iter().chain(others);
        let is_withheld = |resource: &Resource| {
            let (_, state) = index.resolve(resource, &Location::default());
            assert!(!state.is_withheld || state.target.is_none());
            state.is_withheld
        };
        let all = all.filter(|(_, resource)| is_withheld(resource));
        let names = all.map(|(name, _)| name).collect();
        // The state is known as soon as the kind is.
        index.take_changed();
        index.set_readable(kind, true);
        assert!(index.take_changed().all);
        names
    }

    #[test]
    fn unreadable_kind_withholds_only_the_statuses_that_depend_on_it() {
        const OTHERS: &str = r#"
---
{apiVersion: gateway.networking.k8s.io/v1, kind: HTTPRoute, metadata: {name: plain, namespace: shop},
 spec: {parentRefs: [{group: "", kind: Service, name: plain}], rules: [{}]}}
---
{apiVersion: diy-service-mesh.dev/v1alpha1, kind: TrafficPolicy,
 metadata: {name: policy, namespace: shop},
 spec: {targetRefs: [{group: "", kind: Service, name: plain}], connections: {maxRequests: 1}}}
---
{apiVersion: v1, kind: Service, metadata: {name: canary, namespace: shop, annotations: {
  diy-service-mesh/canary-of: plain, diy-service-mesh/canary-weight: "1"}}, spec: {
  clusterIP: 10.96.0.4, ports: [{port: 80}]}}
---
{apiVersion: gateway.networking.x-k8s.io/v1alpha1, kind: XBackend,
 metadata: {name: host, namespace: shop}, spec: {type: ExternalHostname, port: {port: 443},
  externalHostname: {hostname: api.example.com}}}
---
{apiVersion: diy-service-mesh.dev/v1alpha1, kind: TrafficPolicy,
 metadata: {name: api, namespace: shop}, spec: {backend: {type: ExternalHostname, port: {port: 443},
  externalHostname: {hostname: api.example.com}}}}
"#;
        let objects = parse(&format!("{OBJECTS}{OTHERS}"), "cluster.local").unwrap();
        let all: BTreeSet<&str> = [
            "api", "canary", "host", "other", "outer", "plain", "policy", "public", "split",
        ]
        .into();
        for kind in optional() {
            let mut index = index(objects.objects.clone());
            index.take_changed_statuses();
            index.set_readable(kind, false);
            let ids = index.with_status().into_iter();
            let (withheld, written): (BTreeSet<_>, BTreeSet<_>) =
                ids.partition(|id| index.status(id).is_err());
            let withheld = BTreeSet::from_iter(withheld.iter().map(|id| &*id.1.name));
            let expected = match kind {
                Kind::Node | Kind::Authorization => [].into(),
                Kind::TrafficTarget | Kind::TcpGroup => [].into(),
                Kind::Grant => ["other"].into(),
                Kind::Backend => ["host", "outer"].into(),
                Kind::RouteGroup => ["split"].into(),
                Kind::TrafficPolicy => &all - &["host"].into(),
                Kind::TrafficSplit => &all - &["api", "host", "policy"].into(),
                _ => &all - &["policy"].into(),
            };
            assert_eq!(withheld, expected, "{kind}");
            let keeps_programmed = |id| index.status(id).unwrap().unwrap().keeps_programmed;
            assert!(written.iter().all(keeps_programmed), "of another replica");
            index.take_changed_statuses();
            index.set_readable(kind, true);
            let changed = index.take_changed_statuses();
            assert_eq!(
                BTreeSet::from_iter(changed.iter().map(|id| &*id.1.name)),
                all
            );
            assert!(changed.iter().all(|id| index.status(id).is_ok()));
        }
    }

    #[test]
    fn unreadable_kind_withholds_only_what_depends_on_it() {
        let services = ["plain", "split", "other", "outer", "public"];
        // The pod is not meshed: it has no configuration of its own.
        let own = ["self"];
        for kind in optional() {
            let expected: Vec<&str> = match kind {
                Kind::Node => vec!["node port"],
                Kind::Authorization | Kind::TrafficTarget | Kind::TcpGroup => vec![],
                Kind::HttpRoute | Kind::GrpcRoute | Kind::TcpRoute | Kind::TrafficSplit => {
                    services.to_vec()
                }
                Kind::Grant => vec!["other"],
                Kind::Backend => vec!["outer"],
                Kind::RouteGroup => vec!["split"],
                Kind::TrafficPolicy => [&services[..], &["backend"]].concat(),
                _ => panic!("{kind} has a place in the table"),
            };
            let withheld = withheld(kind);
            let withheld: BTreeSet<&str> = withheld.into_iter().collect();
            let expected = expected.into_iter().chain(own).collect();
            assert_eq!(withheld, expected, "{kind}");
        }
    }
}
