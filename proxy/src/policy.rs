//! Step 4: who calls, and whether they may. A caller has proven who they are, or has not; a workload that is strict lets only
//! the proven in, and the kubelet's probes. Pure: it is told everything.

use std::fmt;
use std::rc::Rc;
use std::str::FromStr;

use diy_mesh_proto::Identity;

use crate::error::Failure;

/// Who is at the other end of a client's connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// The pod's own app: its outbound connections.
    App,
    /// Somebody who came in plaintext.
    Unproven,
    /// A workload of the mesh, by mutual TLS.
    Peer(Rc<Identity>),
}

impl Caller {
    /// What the app is told of them.
    pub fn identity(&self) -> Option<&Identity> {
        match self {
            Self::Peer(identity) => Some(identity),
            Self::App | Self::Unproven => None,
        }
    }
}

/// Whom the pod's app takes calls from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Only from those who prove who they are.
    pub strict: bool,
    /// The kubelet's, which can't.
    pub probes: Vec<Probe>,
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
    /// A connection, on which nothing is said.
    Tcp {
        /// The app's port.
        port: u16,
    },
    /// A call of grpc.health.v1.Health.
    Grpc {
        /// The app's port.
        port: u16,
    },
}

impl Policy {
    /// Whether a connection to the app may be made for this caller before anything is known of what they want.
    pub fn admits_unseen(&self, caller: &Caller) -> Result<(), Failure> {
        if self.strict && *caller == Caller::Unproven { Err(Failure::MtlsRequired) } else { Ok(()) }
    }

    /// Whether the app may be shown this request to its `port`.
    pub fn admits(&self, caller: &Caller, port: u16, method: &[u8], target: &[u8]) -> Result<(), Failure> {
        self.admits_unseen(caller).or_else(|refused| {
            let is_probe = self.probes.iter().any(|probe| probe.is_asked_by(port, method, target));
            if is_probe { Ok(()) } else { Err(refused) }
        })
    }
}

impl Probe {
    fn is_asked_by(&self, to: u16, method: &[u8], target: &[u8]) -> bool {
        match self {
            Self::Http { port, path } => *port == to && method == b"GET" && target == path.as_bytes(),
            Self::Grpc { port } => *port == to && method == b"POST" && target.starts_with(b"/grpc.health.v1.Health/"),
            // It asks for nothing: that the connection is taken is its answer.
            Self::Tcp { .. } => false,
        }
    }
}

/// `http:PORT:PATH`, `tcp:PORT` or `grpc:PORT`.
impl FromStr for Probe {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("{text:?}: expected http:PORT:PATH, tcp:PORT or grpc:PORT");
        let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port != 0).ok_or_else(expected);
        match text.split_once(':').ok_or_else(expected)? {
            ("http", rest) => match rest.split_once(':') {
                Some((number, path)) if path.starts_with('/') => Ok(Self::Http { port: port(number)?, path: path.to_owned() }),
                _ => Err(expected()),
            },
            ("tcp", number) => Ok(Self::Tcp { port: port(number)? }),
            ("grpc", number) => Ok(Self::Grpc { port: port(number)? }),
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

/// Whether a field is `X-Called-By` to anybody: in any case, and with the underscores that some servers read as hyphens. It tells
/// the app who calls, which nobody but the proxy can know.
pub fn is_called_by(name: &[u8]) -> bool {
    const NAME: &[u8] = b"x-called-by";
    let same = |one: &u8, other: &u8| one.eq_ignore_ascii_case(other) || (*one == b'_' && *other == b'-');
    name.len() == NAME.len() && name.iter().zip(NAME).all(|(one, other)| same(one, other))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strict(probes: &[&str]) -> Policy {
        Policy { strict: true, probes: probes.iter().map(|probe| probe.parse().expect("a probe")).collect() }
    }

    fn peer() -> Caller {
        Caller::Peer(Rc::new(Identity::new("cluster.local", "shop", "web").expect("an identity")))
    }

    #[test]
    fn a_strict_workload_admits_peers_its_own_app_and_probes() {
        let policy = strict(&["http:8080:/healthz?full=1", "grpc:9000", "tcp:5432"]);
        for caller in [peer(), Caller::App] {
            assert!(policy.admits(&caller, 8080, b"POST", b"/orders").is_ok());
            assert!(policy.admits_unseen(&caller).is_ok());
        }
        assert!(policy.admits(&Caller::Unproven, 8080, b"GET", b"/healthz?full=1").is_ok());
        assert!(policy.admits(&Caller::Unproven, 9000, b"POST", b"/grpc.health.v1.Health/Check").is_ok());
        let refused: [(u16, &[u8], &[u8]); 6] = [
            (8080, b"GET", b"/healthz"),
            (8080, b"POST", b"/healthz?full=1"),
            (8081, b"GET", b"/healthz?full=1"),
            (8080, b"GET", b"/healthz?full=1/../orders"),
            (9000, b"POST", b"/echo.Echo/Say"),
            (5432, b"GET", b"/"),
        ];
        for (port, method, target) in refused {
            assert!(policy.admits(&Caller::Unproven, port, method, target).is_err(), "{port} {target:?}");
        }
        assert!(policy.admits_unseen(&Caller::Unproven).is_err());
    }

    #[test]
    fn a_permissive_workload_admits_everybody() {
        let policy = Policy::default();
        assert!(policy.admits(&Caller::Unproven, 80, b"GET", b"/").is_ok() && policy.admits_unseen(&Caller::Unproven).is_ok());
    }

    #[test]
    fn probes_are_read_as_they_are_written() {
        for text in ["http:8080:/a:b?c", "tcp:1", "grpc:65535"] {
            assert_eq!(text.parse::<Probe>().map(|probe| probe.to_string()).as_deref(), Ok(text));
        }
        for wrong in ["", "http", "http:80", "http:80:x", "http::/x", "tcp:0", "tcp:65536", "grpc:x", "exec:80"] {
            assert!(wrong.parse::<Probe>().is_err_and(|problem| problem.contains("expected http:PORT:PATH")), "{wrong}");
        }
    }

    #[test]
    fn called_by_is_known_in_every_spelling() {
        for name in ["X-Called-By", "x-called-by", "X_CALLED_BY", "x-Called_by"] {
            assert!(is_called_by(name.as_bytes()), "{name}");
        }
        for name in ["X-Called-Bye", "X-Called", "XXCalled-By", "X.Called.By"] {
            assert!(!is_called_by(name.as_bytes()), "{name}");
        }
    }
}
