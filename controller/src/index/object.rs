//! The catalog's objects as the index keeps them: the few fields that decide where traffic goes,
//! and nothing else.
//!
//! First stop behind the catalog providers. Plain values: they know neither Kubernetes nor gRPC.

use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// The three kinds of object that the catalog is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A Service.
    Service,
    /// An EndpointSlice.
    Slice,
    /// A Pod.
    Pod,
}

impl Kind {
    /// Every kind; the catalog is synced once each was listed.
    pub const ALL: [Kind; 3] = [Kind::Service, Kind::Slice, Kind::Pod];

    /// The kind as Kubernetes writes it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Service => "Service",
            Kind::Slice => "EndpointSlice",
            Kind::Pod => "Pod",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Namespace and name of an object. Cheap to clone: it stands in many maps.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The namespace.
    pub namespace: Arc<str>,
    /// The name.
    pub name: Arc<str>,
}

impl Key {
    /// The key of `name` in `namespace`.
    pub fn new(namespace: &str, name: &str) -> Key {
        Key {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// What a catalog provider tells the index.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// The object is new or has changed.
    Apply(Object),
    /// The object is gone.
    Delete(Kind, Key),
    /// These are all objects of the kind; what is not among them is gone.
    Reset(Kind, Vec<Object>),
}

/// One object of the catalog.
#[derive(Clone, Debug, PartialEq)]
pub enum Object {
    /// A Service.
    Service(Service),
    /// An EndpointSlice.
    Slice(Slice),
    /// A Pod.
    Pod(Pod),
}

impl Object {
    /// Which kind it is.
    pub fn kind(&self) -> Kind {
        match self {
            Object::Service(_) => Kind::Service,
            Object::Slice(_) => Kind::Slice,
            Object::Pod(_) => Kind::Pod,
        }
    }

    /// Its namespace and name.
    pub fn key(&self) -> &Key {
        match self {
            Object::Service(service) => &service.key,
            Object::Slice(slice) => &slice.key,
            Object::Pod(pod) => &pod.key,
        }
    }
}

/// A Service.
#[derive(Clone, Debug, PartialEq)]
pub struct Service {
    /// Namespace and name.
    pub key: Key,
    /// The cluster IPs of both families; none for a headless Service and for an ExternalName.
    pub cluster_ips: Vec<IpAddr>,
    /// All ports, in the order of the Service.
    pub ports: Vec<ServicePort>,
    /// Where an ExternalName points; empty for all other types.
    pub external_name: String,
    /// Whether endpoints count as ready when they are not.
    pub publish_not_ready: bool,
}

/// One port of a Service.
#[derive(Clone, Debug, PartialEq)]
pub struct ServicePort {
    /// Empty where the Service has one port without a name.
    pub name: String,
    /// The number on the cluster IP.
    pub port: u16,
    /// What it stands for on the pods.
    pub target: TargetPort,
    /// The transport.
    pub protocol: Transport,
    /// The application protocol as the Service names it; empty where it names none.
    pub app_protocol: String,
}

/// A Service port's target.
#[derive(Clone, Debug, PartialEq)]
pub enum TargetPort {
    /// A number.
    Number(u16),
    /// A named port of the pods: its number may differ by pod, so the slices say it.
    Name(String),
}

/// A transport protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// TCP, the only one that is redirected to the proxies.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl Transport {
    /// The name as Kubernetes writes it.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Tcp => "TCP",
            Transport::Udp => "UDP",
            Transport::Sctp => "SCTP",
        }
    }
}

/// An EndpointSlice.
#[derive(Clone, Debug, PartialEq)]
pub struct Slice {
    /// Namespace and name.
    pub key: Key,
    /// The Service that it belongs to, in its own namespace; none for a slice that nobody claimed.
    pub service: Option<Key>,
    /// The ports behind the Service's ports.
    pub ports: Vec<SlicePort>,
    /// The endpoints; none for a slice of names instead of addresses.
    pub endpoints: Vec<SliceEndpoint>,
}

/// One port of an EndpointSlice.
#[derive(Clone, Debug, PartialEq)]
pub struct SlicePort {
    /// The Service port's name.
    pub name: String,
    /// The number on the endpoints.
    pub port: u16,
    /// The transport.
    pub protocol: Transport,
}

/// One endpoint of an EndpointSlice.
#[derive(Clone, Debug, PartialEq)]
pub struct SliceEndpoint {
    /// Its address (the first one: further ones mean nothing, says Kubernetes).
    pub address: IpAddr,
    /// Whether it takes new connections.
    pub ready: bool,
    /// Whether it is on its way out.
    pub terminating: bool,
    /// Its zone, or empty.
    pub zone: Arc<str>,
    /// The pod behind it; none where the slice names no pod.
    pub pod: Option<PodReference>,
}

/// A pod as an EndpointSlice names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodReference {
    /// Namespace and name.
    pub key: Key,
    /// Tells a pod from its successor of the same name; empty where the slice does not say.
    pub uid: Arc<str>,
}

/// A Pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Pod {
    /// Namespace and name.
    pub key: Key,
    /// Its UID, or empty.
    pub uid: Arc<str>,
    /// The addresses that are its own: none while it has none, once it has finished, and on the
    /// host's network.
    pub addresses: Vec<IpAddr>,
    /// Whether it is being deleted.
    pub terminating: bool,
    /// Whether all of its containers are ready. Where traffic goes does not depend on it: slices
    /// say that.
    pub ready: bool,
    /// When it was made, in seconds since 1970; 0 where that is not said.
    pub created: i64,
    /// Its zone, or empty.
    pub zone: Arc<str>,
    /// The SPIFFE ID to expect of it; none where it is not meshed.
    pub identity: Option<Arc<str>>,
    /// The ports that do not pass its proxy, where it is meshed: nobody there proves anything.
    pub bypassed: Vec<RangeInclusive<u16>>,
    /// The ports whose connections its proxy carries as bytes, whatever anybody else says.
    pub opaque_ports: Box<[RangeInclusive<u16>]>,
}

impl Pod {
    /// The SPIFFE ID to expect at one of its ports.
    pub fn identity_at(&self, port: u16) -> Option<Arc<str>> {
        self.identity
            .clone()
            .filter(|_| !self.bypassed.iter().any(|ports| ports.contains(&port)))
    }

    /// Whether the pod declares one of its ports opaque.
    pub fn is_opaque_at(&self, port: u16) -> bool {
        self.opaque_ports.iter().any(|ports| ports.contains(&port))
    }
}
