//! Step 4: authorization of a connection, and of each request. A strict workload accepts only
//! authenticated peers. Pure: all inputs are arguments.

use std::rc::Rc;

use diy_mesh_proto::Identity;
pub use diy_mesh_proto::field::PREVIOUS_ATTEMPTS;
use diy_mesh_proto::field::{CALLED_BY, MESH_ERROR, is_same_name};

use crate::error::Failure;
use crate::http::view::RequestView;
use crate::limit::RateLimits;
use crate::ports::PortSet;

/// The client of a connection, as far as it has authenticated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// The pod's own application: its outbound connections.
    App,
    /// A client without mutual TLS.
    Unauthenticated,
    /// A workload of the mesh, authenticated by mutual TLS.
    Peer(Rc<Identity>),
}

impl Caller {
    /// The identity, if the client has authenticated with one.
    pub fn identity(&self) -> Option<&Identity> {
        match self {
            Self::Peer(identity) => Some(identity),
            Self::App | Self::Unauthenticated => None,
        }
    }
}

/// The inbound policy of the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Only authenticated peers are accepted.
    pub strict: bool,
    /// The ports of the application whose connections are copied without detection.
    pub opaque_ports: PortSet,
    /// The application accepts CONNECT requests.
    pub allow_connect: bool,
    /// The zone of the pod's node. Empty: unknown.
    pub zone: String,
    /// The limits of its requests.
    pub rate_limits: RateLimits,
}

impl Policy {
    /// Whether the caller may have a connection to the application, whatever it carries.
    pub fn authorize_connection(&self, caller: &Caller) -> Result<(), Failure> {
        if self.strict && *caller == Caller::Unauthenticated {
            Err(Failure::MtlsRequired)
        } else {
            Ok(())
        }
    }

    /// Whether the request may be forwarded to the application.
    pub fn authorize_request(
        &self,
        caller: &Caller,
        request: &RequestView<'_>,
    ) -> Result<(), Failure> {
        self.authorize_connection(caller)?;
        if *caller != Caller::App && !self.allow_connect && request.is_connect() {
            return Err(Failure::ConnectNotAllowed);
        }
        Ok(())
    }
}

/// Whether some server reads this field as `X-Called-By`, which only the proxy may set.
pub fn is_called_by(name: &[u8]) -> bool {
    is_same_name(name, CALLED_BY.as_bytes())
}

/// Whether some server reads this field of a request as one that only the proxy may set.
pub fn is_reserved_in_requests(name: &[u8]) -> bool {
    is_called_by(name) || is_same_name(name, PREVIOUS_ATTEMPTS.as_bytes())
}

/// Whether some server reads this field as `x-mesh-error`, which only a proxy may set.
pub fn is_mesh_error(name: &[u8]) -> bool {
    is_same_name(name, MESH_ERROR.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::view::testing::request;

    fn peer() -> Caller {
        Caller::Peer(Rc::new(
            Identity::new("cluster.local", "shop", "web").expect("an identity"),
        ))
    }

    #[test]
    fn strict_workload_accepts_only_peers_and_its_own_application() {
        let policy = Policy {
            strict: true,
            ..Policy::default()
        };
        let health = request("GET", "/healthz");
        for caller in [peer(), Caller::App] {
            assert!(policy.authorize_request(&caller, &health).is_ok());
            assert!(policy.authorize_connection(&caller).is_ok());
        }
        let unauthenticated = Caller::Unauthenticated;
        assert!(matches!(
            policy.authorize_request(&unauthenticated, &health),
            Err(Failure::MtlsRequired)
        ));
        assert!(policy.authorize_connection(&unauthenticated).is_err());
    }

    #[test]
    fn permissive_workload_accepts_unauthenticated_clients() {
        let policy = Policy::default();
        assert!(
            policy
                .authorize_request(&Caller::Unauthenticated, &request("GET", "/"))
                .is_ok()
        );
        assert!(
            policy
                .authorize_connection(&Caller::Unauthenticated)
                .is_ok()
        );
    }

    #[test]
    fn connect_requires_the_annotation() {
        let (closed, open) = (
            Policy::default(),
            Policy {
                allow_connect: true,
                ..Policy::default()
            },
        );
        for method in ["CONNECT", "connect"] {
            let tunnel = request(method, "a:1");
            for caller in [Caller::Unauthenticated, peer()] {
                assert!(matches!(
                    closed.authorize_request(&caller, &tunnel),
                    Err(Failure::ConnectNotAllowed)
                ));
                assert!(open.authorize_request(&caller, &tunnel).is_ok());
            }
            assert!(
                closed.authorize_request(&Caller::App, &tunnel).is_ok(),
                "the app may ask others for one"
            );
        }
    }

    #[test]
    fn called_by_is_recognized_in_every_spelling() {
        for name in [
            "X-Called-By",
            "x-called-by",
            "X_CALLED_BY",
            "x-Called_by",
            "X.Called.By",
            "x!called~by",
        ] {
            assert!(is_called_by(name.as_bytes()), "{name}");
        }
        for name in [
            "X-Called-Bye",
            "X-Called",
            "XXCalled-By",
            "X-Called-B-",
            "X--Called-By",
        ] {
            assert!(!is_called_by(name.as_bytes()), "{name}");
        }
        assert!(is_mesh_error(b"X.Mesh_Error") && !is_mesh_error(b"x-mesh-errors"));
    }
}
