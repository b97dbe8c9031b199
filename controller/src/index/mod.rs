//! The index: the catalog's objects by the questions that are asked of them. Between the catalog
//! and its subscribers.
//!
//! Pure: no sockets, no clock, no Kubernetes client. The same objects give the same answers and
//! versions, in whatever order their events came. Each change costs what it touches, not what the
//! cluster holds.

pub mod convert;
pub mod object;
pub mod state;
pub mod version;
pub mod view;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::Hash;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use object::{
    Change, Key, Kind, Object, Pod, PodReference, Service, ServicePort, Slice, SliceEndpoint,
    Transport,
};
use state::{Endpoint, State, Target, TargetKind};
use view::ServiceView;

/// All objects of the catalog, and how they refer to each other.
#[derive(Debug, Default)]
pub struct Index {
    services: HashMap<Key, Service>,
    slices: HashMap<Key, Slice>,
    pods: HashMap<Key, Pod>,
    slices_of_service: HashMap<Key, BTreeSet<Key>>,
    slices_of_pod: HashMap<Key, BTreeSet<Key>>,
    services_at: HashMap<IpAddr, BTreeSet<Key>>,
    pods_at: HashMap<IpAddr, BTreeSet<Key>>,
    /// The meshed pods of each namespace that has any.
    meshed: BTreeMap<Arc<str>, BTreeSet<Key>>,
}

/// What changes may have touched: the only things to look at again.
#[derive(Debug, Default, PartialEq)]
pub struct Touched {
    /// Services whose view may be another one now.
    pub services: BTreeSet<Key>,
    /// Addresses whose destinations may stand for something else now.
    pub addresses: BTreeSet<IpAddr>,
}

impl Index {
    /// Takes one change in and adds to `touched` what it concerns.
    pub fn apply(&mut self, change: Change, touched: &mut Touched) {
        match change {
            Change::Apply(object) => self.set(object, touched),
            Change::Delete(kind, key) => self.remove(kind, &key, touched),
            Change::Reset(kind, objects) => {
                let kept: HashSet<Key> =
                    objects.iter().map(|object| object.key().clone()).collect();
                for gone in self
                    .keys(kind)
                    .into_iter()
                    .filter(|key| !kept.contains(key))
                {
                    self.remove(kind, &gone, touched);
                }
                for object in objects {
                    self.set(object, touched);
                }
            }
        }
    }

    /// What a destination stands for: a Service's port, else a pod, else a Service without the port,
    /// else nothing known.
    pub fn resolve(&self, destination: SocketAddr) -> State {
        State::new(
            self.service_target(destination)
                .or_else(|| self.pod_target(destination))
                .or_else(|| self.unknown_port(destination)),
        )
    }

    /// A Service as people and tools see it; none where it does not exist.
    pub fn service(&self, key: &Key) -> Option<ServiceView> {
        let service = self.services.get(key)?;
        let slices: Vec<&Slice> = self.slices_of(key).collect();
        Some(view::of(service, &slices, |reference| {
            self.pod_of(reference)
        }))
    }

    /// A pod.
    pub fn pod(&self, key: &Key) -> Option<&Pod> {
        self.pods.get(key)
    }

    /// The pods that an address belongs to; more than one while one takes it over from another.
    pub fn pods_at(&self, address: IpAddr) -> impl Iterator<Item = &Pod> {
        self.pods_at
            .get(&address)
            .into_iter()
            .flatten()
            .map(|key| &self.pods[key])
    }

    /// Namespace and name of every Service, in order.
    pub fn service_keys(&self) -> BTreeSet<Key> {
        self.services.keys().cloned().collect()
    }

    /// The namespaces that have meshed pods, in order.
    pub fn meshed_namespaces(&self) -> impl Iterator<Item = &Arc<str>> {
        self.meshed.keys()
    }

    /// The meshed pods that are ready and stay.
    pub fn ready_meshed_pods(&self) -> impl Iterator<Item = &Pod> {
        let meshed = self.meshed.values().flatten().map(|key| &self.pods[key]);
        meshed.filter(|pod| pod.ready && !pod.terminating)
    }

    /// How many objects of a kind there are.
    pub fn count(&self, kind: Kind) -> usize {
        match kind {
            Kind::Service => self.services.len(),
            Kind::Slice => self.slices.len(),
            Kind::Pod => self.pods.len(),
        }
    }

    /// TCP alone is redirected, so a port of another transport is no destination.
    fn service_target(&self, destination: SocketAddr) -> Option<Target> {
        let service = &self.services[self.services_at.get(&destination.ip())?.first()?];
        let port = service
            .ports
            .iter()
            .find(|port| port.port == destination.port() && port.protocol == Transport::Tcp)?;
        Some(Target {
            kind: TargetKind::Service,
            key: service.key.clone(),
            app_protocol: port.app_protocol.clone(),
            endpoints: self.endpoints(service, &port.name, destination.is_ipv6()),
        })
    }

    /// The Service at a cluster IP, which does not have the port: no connection can succeed there.
    fn unknown_port(&self, destination: SocketAddr) -> Option<Target> {
        let service = &self.services[self.services_at.get(&destination.ip())?.first()?];
        if !service.cluster_ips.contains(&destination.ip()) {
            return None;
        }
        let tcp = |port: &&ServicePort| port.protocol == Transport::Tcp;
        let ports = service.ports.iter().filter(tcp).map(|port| port.port);
        Some(Target {
            kind: TargetKind::UnknownPort(ports.collect()),
            key: service.key.clone(),
            app_protocol: String::new(),
            endpoints: Vec::new(),
        })
    }

    /// The pod that an address belongs to: one that stays before one that goes, then the youngest.
    fn pod_target(&self, destination: SocketAddr) -> Option<Target> {
        let pod = self
            .pods_at(destination.ip())
            .max_by_key(|pod| (!pod.terminating, pod.created, &pod.key))?;
        Some(Target {
            kind: TargetKind::Pod,
            key: pod.key.clone(),
            app_protocol: String::new(),
            endpoints: vec![Endpoint {
                address: destination,
                zone: pod.zone.clone(),
                pod: Some(pod.key.clone()),
                identity: pod.identity_at(destination.port()),
                opaque: pod.is_opaque_at(destination.port()),
            }],
        })
    }

    /// The endpoints behind one port that may take new connections, of the cluster IP's own family.
    fn endpoints(&self, service: &Service, port: &str, ipv6: bool) -> Vec<Endpoint> {
        let mut all: BTreeMap<SocketAddr, Vec<&SliceEndpoint>> = BTreeMap::new();
        for slice in self.slices_of(&service.key) {
            for number in slice
                .ports
                .iter()
                .filter(|candidate| candidate.name == port && candidate.protocol == Transport::Tcp)
            {
                for endpoint in slice
                    .endpoints
                    .iter()
                    .filter(|endpoint| endpoint.address.is_ipv6() == ipv6)
                {
                    all.entry(SocketAddr::new(endpoint.address, number.port))
                        .or_default()
                        .push(endpoint);
                }
            }
        }
        all.into_iter()
            .filter_map(|(address, same)| self.usable(service, address, &same))
            .collect()
    }

    /// Several slices may hold one address while an endpoint moves between them: any that calls its
    /// pod terminating is right.
    fn usable(
        &self,
        service: &Service,
        address: SocketAddr,
        same: &[&SliceEndpoint],
    ) -> Option<Endpoint> {
        let chosen = same.iter().find_map(|endpoint| {
            let pod = match &endpoint.pod {
                None => None,
                // Only the pod says whether it is meshed: an endpoint whose pod is not known (yet,
                // or any more) has to wait.
                Some(reference) => Some(self.pod_of(reference)?),
            };
            let leaving = pod.is_some_and(|pod| pod.terminating)
                || same
                    .iter()
                    .any(|other| other.terminating && other.pod == endpoint.pod);
            let ready = endpoint.ready || service.publish_not_ready;
            (ready && !leaving).then_some((endpoint, pod))
        });
        chosen.map(|(endpoint, pod)| Endpoint {
            address,
            zone: endpoint.zone.clone(),
            pod: pod.map(|pod| pod.key.clone()),
            identity: pod.and_then(|pod| pod.identity_at(address.port())),
            opaque: pod.is_some_and(|pod| pod.is_opaque_at(address.port())),
        })
    }

    /// The pod that a slice names, unless a successor has taken its name.
    fn pod_of(&self, reference: &PodReference) -> Option<&Pod> {
        let pod = self.pods.get(&reference.key)?;
        (reference.uid.is_empty() || pod.uid.is_empty() || reference.uid == pod.uid).then_some(pod)
    }

    /// In the order of their names, so that what wins does not depend on the order of events.
    fn slices_of(&self, service: &Key) -> impl Iterator<Item = &Slice> {
        self.slices_of_service
            .get(service)
            .into_iter()
            .flatten()
            .map(|key| &self.slices[key])
    }

    fn keys(&self, kind: Kind) -> Vec<Key> {
        match kind {
            Kind::Service => self.services.keys().cloned().collect(),
            Kind::Slice => self.slices.keys().cloned().collect(),
            Kind::Pod => self.pods.keys().cloned().collect(),
        }
    }

    fn set(&mut self, object: Object, touched: &mut Touched) {
        match object {
            Object::Service(service) => {
                self.set_service(&service.key.clone(), Some(service), touched)
            }
            Object::Slice(slice) => self.set_slice(&slice.key.clone(), Some(slice), touched),
            Object::Pod(pod) => self.set_pod(&pod.key.clone(), Some(pod), touched),
        }
    }

    fn remove(&mut self, kind: Kind, key: &Key, touched: &mut Touched) {
        match kind {
            Kind::Service => self.set_service(key, None, touched),
            Kind::Slice => self.set_slice(key, None, touched),
            Kind::Pod => self.set_pod(key, None, touched),
        }
    }

    fn set_service(&mut self, key: &Key, new: Option<Service>, touched: &mut Touched) {
        let old = replace(&mut self.services, key, new);
        let new = self.services.get(key);
        if old.as_ref() == new {
            return;
        }
        for ip in old.iter().flat_map(|service| &service.cluster_ips) {
            unlink(&mut self.services_at, ip, key);
            touched.addresses.insert(*ip);
        }
        for ip in new.iter().flat_map(|service| &service.cluster_ips) {
            self.services_at.entry(*ip).or_default().insert(key.clone());
            touched.addresses.insert(*ip);
        }
        touched.services.insert(key.clone());
    }

    fn set_slice(&mut self, key: &Key, new: Option<Slice>, touched: &mut Touched) {
        let old = replace(&mut self.slices, key, new);
        let new = self.slices.get(key);
        if old.as_ref() == new {
            return;
        }
        if let Some(slice) = &old {
            if let Some(service) = &slice.service {
                unlink(&mut self.slices_of_service, service, key);
            }
            for pod in slice
                .endpoints
                .iter()
                .filter_map(|endpoint| endpoint.pod.as_ref())
            {
                unlink(&mut self.slices_of_pod, &pod.key, key);
            }
        }
        if let Some(slice) = new {
            if let Some(service) = &slice.service {
                self.slices_of_service
                    .entry(service.clone())
                    .or_default()
                    .insert(key.clone());
            }
            for pod in slice
                .endpoints
                .iter()
                .filter_map(|endpoint| endpoint.pod.as_ref())
            {
                self.slices_of_pod
                    .entry(pod.key.clone())
                    .or_default()
                    .insert(key.clone());
            }
        }
        for service in old
            .iter()
            .chain(new)
            .filter_map(|slice| slice.service.as_ref())
        {
            touch_service(&self.services, service, touched);
        }
    }

    fn set_pod(&mut self, key: &Key, new: Option<Pod>, touched: &mut Touched) {
        let old = replace(&mut self.pods, key, new);
        let new = self.pods.get(key);
        let is_meshed = |pod: &Pod| pod.identity.is_some();
        match (
            old.as_ref().is_some_and(is_meshed),
            new.is_some_and(is_meshed),
        ) {
            (false, true) => {
                self.meshed
                    .entry(key.namespace.clone())
                    .or_default()
                    .insert(key.clone());
            }
            (true, false) => unlink_in_order(&mut self.meshed, &key.namespace, key),
            _ => {}
        }
        // Readiness alone touches nothing.
        if old
            .clone()
            .zip(new)
            .map_or(old.as_ref() == new, |(old, new)| {
                Pod {
                    ready: new.ready,
                    ..old
                } == *new
            })
        {
            return;
        }
        for ip in old.iter().flat_map(|pod| &pod.addresses) {
            unlink(&mut self.pods_at, ip, key);
            touched.addresses.insert(*ip);
        }
        for ip in new.iter().flat_map(|pod| &pod.addresses) {
            self.pods_at.entry(*ip).or_default().insert(key.clone());
            touched.addresses.insert(*ip);
        }
        for slice in self.slices_of_pod.get(key).into_iter().flatten() {
            if let Some(service) = &self.slices[slice].service {
                touch_service(&self.services, service, touched);
            }
        }
    }
}

/// Where the Service's endpoints are another matter now, so is each of its addresses.
fn touch_service(services: &HashMap<Key, Service>, key: &Key, touched: &mut Touched) {
    if let Some(service) = services.get(key) {
        touched.addresses.extend(&service.cluster_ips);
        touched.services.insert(key.clone());
    }
}

fn replace<T>(map: &mut HashMap<Key, T>, key: &Key, new: Option<T>) -> Option<T> {
    match new {
        Some(new) => map.insert(key.clone(), new),
        None => map.remove(key),
    }
}

fn unlink<K: Eq + Hash>(map: &mut HashMap<K, BTreeSet<Key>>, from: &K, key: &Key) {
    if let Some(keys) = map.get_mut(from) {
        keys.remove(key);
        if keys.is_empty() {
            map.remove(from);
        }
    }
}

fn unlink_in_order(map: &mut BTreeMap<Arc<str>, BTreeSet<Key>>, from: &Arc<str>, key: &Key) {
    if let Some(keys) = map.get_mut(from) {
        keys.remove(key);
        if keys.is_empty() {
            map.remove(from);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
