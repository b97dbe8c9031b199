//! Step 4: authorization of a connection, and of each request. A strict workload accepts
//! authenticated peers, and exempt probes of the kubelet. Pure: all inputs are arguments.

use std::fmt;
use std::rc::Rc;
use std::str::FromStr;

use diy_mesh_proto::Identity;

use crate::error::Failure;
use crate::http::edits::is_same_name;
use crate::http::view::RequestView;
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

/// How a request may be forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Without restrictions.
    Ordinary,
    /// As the only exchange of its connection, on an upstream connection of its own: an exempt
    /// probe of a strict pod.
    Probe,
}

/// The inbound policy of the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Only authenticated peers are accepted.
    pub strict: bool,
    /// The probes of the kubelet, which cannot authenticate.
    pub probes: Vec<Probe>,
    /// The ports of the application whose connections are copied without detection.
    pub opaque_ports: PortSet,
    /// The application accepts CONNECT requests.
    pub allow_connect: bool,
}

/// A probe that the pod declares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probe {
    /// A GET.
    Http {
        /// The app's port.
        port: u16,
        /// The path, and the query if there is one.
        path: String,
    },
    /// A connection without data.
    Tcp {
        /// The app's port.
        port: u16,
    },
    /// A call of grpc.health.v1.Health/Check.
    Grpc {
        /// The app's port.
        port: u16,
    },
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

    /// Whether the request may be forwarded to `port` of the application, and how.
    pub fn authorize_request(
        &self,
        caller: &Caller,
        port: u16,
        request: &RequestView<'_>,
    ) -> Result<Admission, Failure> {
        if let Err(refused) = self.authorize_connection(caller) {
            let is_probe = self
                .probes
                .iter()
                .any(|probe| probe.is_made_by(port, request));
            return if is_probe {
                Ok(Admission::Probe)
            } else {
                Err(refused)
            };
        }
        if *caller != Caller::App && !self.allow_connect && request.is_connect() {
            return Err(Failure::ConnectNotAllowed);
        }
        Ok(Admission::Ordinary)
    }
}

impl Probe {
    /// Whether this is exactly the request of the probe: a lenient server might parse a second
    /// request in a body, or after an upgrade. The body of a gRPC call is framed by its stream.
    fn is_made_by(&self, to: u16, request: &RequestView<'_>) -> bool {
        let (method, target) = (request.method, request.target);
        match self {
            _ if request.upgrade => false,
            Self::Http { port, path } => {
                *port == to && method == b"GET" && target == path.as_bytes() && !request.has_body
            }
            Self::Grpc { port } => {
                *port == to
                    && method == b"POST"
                    && target == b"/grpc.health.v1.Health/Check"
                    && request.version == http::Version::HTTP_2
            }
            // It sends no request: the accepted connection is the answer.
            Self::Tcp { .. } => false,
        }
    }
}

/// `http:PORT:PATH`, `tcp:PORT` or `grpc:PORT`.
impl FromStr for Probe {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("{text:?}: expected http:PORT:PATH, tcp:PORT or grpc:PORT");
        let port = |text: &str| {
            text.parse::<u16>()
                .ok()
                .filter(|port| *port != 0)
                .ok_or_else(expected)
        };
        match text.split_once(':').ok_or_else(expected)? {
            ("http", rest) => match rest.split_once(':') {
                Some((number, path)) if path.starts_with('/') => Ok(Self::Http {
                    port: port(number)?,
                    path: path.to_owned(),
                }),
                _ => Err(expected()),
            },
            ("tcp", number) => Ok(Self::Tcp {
                port: port(number)?,
            }),
            ("grpc", number) => Ok(Self::Grpc {
                port: port(number)?,
            }),
            _ => Err(expected()),
        }
    }
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http { port, path } => write!(f, "http:{port}:{path}"),
            Self::Tcp { port } => write!(f, "tcp:{port}"),
            Self::Grpc { port } => write!(f, "grpc:{port}"),
        }
    }
}

/// Whether some server reads this field as `X-Called-By`, which only the proxy may set.
pub fn is_called_by(name: &[u8]) -> bool {
    is_same_name(name, b"x-called-by")
}

/// Whether some server reads this field as `x-mesh-error`, which only a proxy may set.
pub fn is_mesh_error(name: &[u8]) -> bool {
    is_same_name(name, b"x-mesh-error")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::view::testing::request;

    fn strict(probes: &[&str]) -> Policy {
        let probes = probes
            .iter()
            .map(|probe| probe.parse().expect("a probe"))
            .collect();
        Policy {
            strict: true,
            probes,
            ..Policy::default()
        }
    }

    fn peer() -> Caller {
        Caller::Peer(Rc::new(
            Identity::new("cluster.local", "shop", "web").expect("an identity"),
        ))
    }

    #[test]
    fn strict_workload_accepts_peers_its_own_application_and_exempt_probes() {
        let policy = strict(&["http:8080:/healthz?full=1", "grpc:9000", "tcp:5432"]);
        for caller in [peer(), Caller::App] {
            assert_eq!(
                policy
                    .authorize_request(&caller, 8080, &request("POST", "/orders"))
                    .ok(),
                Some(Admission::Ordinary)
            );
            assert!(policy.authorize_connection(&caller).is_ok());
        }
        let probe = request("GET", "/healthz?full=1");
        let call = RequestView {
            version: http::Version::HTTP_2,
            has_body: true,
            ..request("POST", "/grpc.health.v1.Health/Check")
        };
        let unproven = |port, request: RequestView<'_>| {
            policy
                .authorize_request(&Caller::Unauthenticated, port, &request)
                .ok()
        };
        assert_eq!(unproven(8080, probe), Some(Admission::Probe));
        assert_eq!(unproven(9000, call), Some(Admission::Probe));
        let refused = [
            (8080, request("GET", "/healthz")),
            (8080, request("POST", "/healthz?full=1")),
            (8081, probe),
            (8080, request("GET", "/healthz?full=1/../orders")),
            (
                8080,
                RequestView {
                    has_body: true,
                    ..probe
                },
            ),
            (
                8080,
                RequestView {
                    upgrade: true,
                    ..probe
                },
            ),
            (
                9000,
                RequestView {
                    version: http::Version::HTTP_11,
                    ..call
                },
            ),
            (
                9000,
                RequestView {
                    target: b"/grpc.health.v1.Health/Watch",
                    ..call
                },
            ),
            (
                9000,
                RequestView {
                    target: b"/echo.Echo/Say",
                    ..call
                },
            ),
            (5432, request("GET", "/")),
        ];
        for (port, request) in refused {
            let target = String::from_utf8_lossy(request.target);
            assert_eq!(unproven(port, request), None, "{port} {target}");
        }
        assert!(
            policy
                .authorize_connection(&Caller::Unauthenticated)
                .is_err()
        );
    }

    #[test]
    fn permissive_workload_accepts_unauthenticated_clients() {
        let policy = Policy::default();
        assert!(
            policy
                .authorize_request(&Caller::Unauthenticated, 80, &request("GET", "/"))
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
                    closed.authorize_request(&caller, 80, &tunnel),
                    Err(Failure::ConnectNotAllowed)
                ));
                assert!(open.authorize_request(&caller, 80, &tunnel).is_ok());
            }
            assert!(
                closed.authorize_request(&Caller::App, 80, &tunnel).is_ok(),
                "the app may ask others for one"
            );
        }
    }

    #[test]
    fn probes_are_parsed_and_printed() {
        for text in ["http:8080:/a:b?c", "tcp:1", "grpc:65535"] {
            assert_eq!(
                text.parse::<Probe>()
                    .map(|probe| probe.to_string())
                    .as_deref(),
                Ok(text)
            );
        }
        for wrong in [
            "",
            "http",
            "http:80",
            "http:80:x",
            "http::/x",
            "tcp:0",
            "tcp:65536",
            "grpc:x",
            "exec:80",
        ] {
            assert!(
                wrong
                    .parse::<Probe>()
                    .is_err_and(|problem| problem.contains("expected http:PORT:PATH")),
                "{wrong}"
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
