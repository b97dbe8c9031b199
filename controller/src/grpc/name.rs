//! The names of resources on the stream. Pure.

use std::net::SocketAddr;

use tonic::Status;

use crate::index::Resource;
use crate::object::Key;

/// The length of a destination and of a version. The longest destination is an IPv6 address with a
/// scope and a port.
pub(super) const MAX_NAME_BYTES: usize = 64;
/// Namespace, name and port of a Service.
const MAX_BACKEND_BYTES: usize = 63 + 1 + 63 + 1 + 5;

/// The usual spelling of the name of a resource.
pub(super) fn name_of(resource: &Resource) -> String {
    match resource {
        Resource::Destination(address) => address.to_string(),
        Resource::Backend(service, port) => format!("{service}:{port}"),
        Resource::Workload(..) => String::new(),
    }
}

/// Parses a destination. IPv4-mapped IPv6 addresses become IPv4 addresses; scope IDs are ignored.
pub(super) fn parse_destination(destination: &str) -> Result<SocketAddr, Status> {
    if destination.len() > MAX_NAME_BYTES {
        return Err(Status::invalid_argument(format!(
            "a destination is longer than {MAX_NAME_BYTES} bytes"
        )));
    }
    let address = destination
        .parse::<SocketAddr>()
        .ok()
        .filter(|address| address.port() != 0);
    address.map(|address| SocketAddr::new(address.ip().to_canonical(), address.port())).ok_or_else(|| {
        Status::invalid_argument(format!(
            "destination {destination:?} is not ADDRESS:PORT, for example \"10.96.0.7:80\" or \"[fd00::7]:80\""
        ))
    })
}

/// Parses NAMESPACE/NAME.
pub(super) fn parse_key(text: &str) -> Option<Key> {
    let (namespace, name) = text.split_once('/')?;
    let is_valid = !namespace.is_empty() && !name.is_empty() && !name.contains('/');
    is_valid.then(|| Key::new(namespace, name))
}

/// Parses the name of a backend.
pub(super) fn parse_backend(name: &str) -> Result<Resource, Status> {
    let parse = || {
        let (service, port) = name.rsplit_once(':')?;
        let port = port.parse().ok().filter(|port| *port != 0)?;
        Some(Resource::Backend(parse_key(service)?, port))
    };
    let is_bounded = name.len() <= MAX_BACKEND_BYTES;
    is_bounded.then(parse).flatten().ok_or_else(|| {
        let name: String = name.chars().take(MAX_BACKEND_BYTES).collect();
        Status::invalid_argument(format!(
            "backend {name:?} is not NAMESPACE/SERVICE:PORT, for example \"shop/web:80\""
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_only_addresses_with_port_as_destinations() {
        assert_eq!(
            parse_destination("10.96.0.7:80").unwrap(),
            "10.96.0.7:80".parse().unwrap()
        );
        assert_eq!(
            parse_destination("[fd00::7]:80").unwrap(),
            "[fd00::7]:80".parse().unwrap()
        );
        assert_eq!(
            parse_destination("[::ffff:10.96.0.7]:80").unwrap(),
            "10.96.0.7:80".parse().unwrap()
        );
        for text in [
            "",
            "10.96.0.7",
            "10.96.0.7:0",
            "web.shop:80",
            "10.96.0.7:80 ",
            "fd00::7:80",
        ] {
            let status = parse_destination(text).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert!(
                status.message().contains(&format!("{text:?}")),
                "{}",
                status.message()
            );
        }
    }
}
