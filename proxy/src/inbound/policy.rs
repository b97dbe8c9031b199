//! Step 4: authorization of a connection, and of each request. A strict workload accepts only
//! authenticated peers. Pure: all inputs are arguments.

use std::rc::Rc;

use diy_mesh_model::identity::Identity;
use diy_mesh_model::ports::PortSet;
pub use diy_mesh_proto::field::PREVIOUS_ATTEMPTS;

use crate::error::Failure;
use crate::http::view::RequestView;
use crate::inbound::limit::RateLimits;

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

/// The proof that a policy allows a request or a connection. Without it, there is no attempt to send
/// it: no protocol can forget authorization.
#[derive(Debug)]
pub struct Permit(());

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
    /// The policy that a controller sends, which weakens none of the settings of the pod itself:
    /// controllers of earlier releases cannot read them.
    pub fn from_controller(self, own: &Self) -> Self {
        Self {
            strict: self.strict || own.strict,
            opaque_ports: own.opaque_ports.clone(),
            allow_connect: own.allow_connect,
            ..self
        }
    }

    /// Whether the caller may have a connection to the application, whatever it carries.
    pub fn authorize_connection(&self, caller: &Caller) -> Result<Permit, Failure> {
        if self.strict && *caller == Caller::Unauthenticated {
            Err(Failure::MtlsRequired)
        } else {
            Ok(Permit(()))
        }
    }

    /// Whether the request may be forwarded to the application.
    pub fn authorize_request(
        &self,
        caller: &Caller,
        request: &RequestView<'_>,
    ) -> Result<Permit, Failure> {
        let permit = self.authorize_connection(caller)?;
        if *caller != Caller::App && !self.allow_connect && request.is_connect() {
            return Err(Failure::ConnectNotAllowed);
        }
        Ok(permit)
    }
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
    fn controller_weakens_no_settings_of_the_pod() {
        let policy = |strict, ports: &str, allow_connect, zone: &str| Policy {
            strict,
            opaque_ports: ports.parse().expect("ports"),
            allow_connect,
            zone: zone.to_owned(),
            ..Policy::default()
        };
        let own = policy(true, "25", false, "");
        let sent = policy(false, "80", true, "eu-1a");
        assert_eq!(
            sent.from_controller(&own),
            policy(true, "25", false, "eu-1a")
        );
        let stricter = policy(true, "", false, "");
        let own = policy(false, "25", true, "");
        assert_eq!(stricter.from_controller(&own), policy(true, "25", true, ""));
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
}
