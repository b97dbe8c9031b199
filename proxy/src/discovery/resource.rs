//! Names of the resources that a proxy subscribes to.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use diy_mesh_proto::mesh::v1::ResourceType;

use super::target::canonical;
use crate::endpoint::ExternalHost;

/// A resource with endpoints.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Resource {
    /// The target of the connections to an address.
    Destination(SocketAddr),
    /// A Service port, "NAMESPACE/SERVICE:PORT", to which a route sends requests.
    Backend(Arc<str>),
    /// A host outside of the cluster, to which a route sends requests. The controller is not asked.
    External(Arc<ExternalHost>),
}

impl Resource {
    /// Reads the type and the name of a resource as responses have them.
    pub(super) fn parse(kind: i32, name: &str) -> Result<Self, String> {
        match ResourceType::try_from(kind) {
            Ok(ResourceType::Destination) => name
                .parse()
                .map(|address| Self::Destination(canonical(address)))
                .map_err(|_| format!("destination {name:?}: expected ADDRESS:PORT")),
            Ok(ResourceType::Backend) => Self::backend(name),
            _ => Err(format!(
                "response about {name:?} of the unknown type {kind}"
            )),
        }
    }

    /// The backend with this name.
    pub fn backend(name: &str) -> Result<Self, String> {
        match Self::split(name) {
            Some(_) => Ok(Self::Backend(name.into())),
            None => Err(format!("backend {name:?}: expected NAMESPACE/SERVICE:PORT")),
        }
    }

    pub(super) fn kind(&self) -> ResourceType {
        match self {
            Self::Destination(_) => ResourceType::Destination,
            Self::Backend(_) | Self::External(_) => ResourceType::Backend,
        }
    }

    /// The form under which the table has it.
    pub(super) fn canonical(self) -> Self {
        match self {
            Self::Destination(address) => Self::Destination(canonical(address)),
            backend => backend,
        }
    }

    /// The port of the address, or of the Service. 0: there is none to ask the controller for.
    pub fn port(&self) -> u16 {
        match self {
            Self::Destination(address) => address.port(),
            Self::Backend(name) => Self::split(name).map_or(0, |(.., port)| port),
            Self::External(_) => 0,
        }
    }

    /// The address of a destination.
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Destination(address) => Some(*address),
            Self::Backend(_) | Self::External(_) => None,
        }
    }

    /// Namespace and name of a backend's Service.
    pub(super) fn service(&self) -> Option<(&str, &str)> {
        match self {
            Self::Destination(_) | Self::External(_) => None,
            Self::Backend(name) => Self::split(name).map(|(namespace, name, _)| (namespace, name)),
        }
    }

    fn split(name: &str) -> Option<(&str, &str, u16)> {
        let (namespace, rest) = name.split_once('/')?;
        let (service, port) = rest.split_once(':')?;
        let port: u16 = port.parse().ok()?;
        let is_valid = !namespace.is_empty() && !service.is_empty() && port != 0;
        is_valid.then_some((namespace, service, port))
    }
}

impl From<SocketAddr> for Resource {
    fn from(address: SocketAddr) -> Self {
        Self::Destination(address)
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Destination(address) => address.fmt(f),
            Self::Backend(name) => name.fmt(f),
            Self::External(host) => host.name.fmt(f),
        }
    }
}
