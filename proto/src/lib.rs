//! Contracts between the components of the mesh: generated gRPC types and shared constants. No logic but the parsing of values that both sides read.

/// API of the controller: discovery and certificates.
pub mod mesh {
    #[allow(missing_docs, clippy::all)]
    pub mod v1 {
        tonic::include_proto!("mesh.v1");
    }
}

/// API of the sample gRPC application.
pub mod echo {
    #[allow(missing_docs, clippy::all)]
    pub mod v1 {
        tonic::include_proto!("echo.v1");
    }
}

/// API of external authorization servers (ext_authz).
pub mod envoy {
    #[allow(missing_docs, clippy::all)]
    pub mod auth {
        tonic::include_proto!("envoy.service.auth.v3");
    }
}

/// API of collectors of traces (OTLP).
#[allow(missing_docs, clippy::all)]
pub mod otlp {
    tonic::include_proto!("opentelemetry.proto.collector.trace.v1");
}

pub mod authorization;
pub mod field;
pub mod pattern;
pub mod policy;
pub mod route;
pub mod telemetry;
pub mod traffic;

/// Audience of the service account tokens that authenticate workloads to the controller.
pub const TOKEN_AUDIENCE: &str = "diy-service-mesh";

/// The length of an encoded `Exceptions` message, and the number of its exceptions.
pub const MAX_EXCEPTIONS_BYTES: usize = 1024;
/// See [`MAX_EXCEPTIONS_BYTES`].
pub const MAX_EXCEPTIONS: usize = 64;

/// The length of an encoded `Edges` message, and the number of its edges.
pub const MAX_EDGES_BYTES: usize = 64 * 1024;
/// See [`MAX_EDGES_BYTES`].
pub const MAX_EDGES: usize = 512;

/// The length of an encoded `Traffic` message, and the number of its flows.
pub const MAX_TRAFFIC_BYTES: usize = 8 * 1024;
/// See [`MAX_TRAFFIC_BYTES`].
pub const MAX_FLOWS: usize = 64;

/// The number of issuers of an `UnknownKeys` message.
pub const MAX_UNKNOWN_KEYS: usize = 64;

/// Metadata of a Discover call and of its response: what the sender understands, words separated by
/// commas.
pub const CAPABILITIES_METADATA: &str = "diy-mesh-capabilities";
/// Whether the sender of this metadata announces a capability.
pub fn announces(metadata: Option<&str>, capability: &str) -> bool {
    let words = metadata.unwrap_or_default().split(',');
    words.map(str::trim).any(|word| word == capability)
}

/// The controller sends the inbound configuration of the client's own pod.
pub const CAPABILITY_SELF: &str = "self";
/// The controller resolves Service ports by name.
pub const CAPABILITY_BACKEND: &str = "backend";
/// The proxy understands snapshots in several messages.
pub const CAPABILITY_CHUNKS: &str = "chunks";
/// The proxy applies the routes of destinations.
pub const CAPABILITY_ROUTES: &str = "routes";
/// The proxy applies policies, faults and rate limits.
pub const CAPABILITY_POLICY: &str = "policy";
/// The proxy applies AuthorizationPolicies.
pub const CAPABILITY_AUTHORIZATION: &str = "authorization";
/// The proxy applies AuthorizationPolicies about calls to outside of the cluster.
pub const CAPABILITY_EGRESS: &str = "egress";
/// The proxy applies the telemetry of TrafficPolicies.
pub const CAPABILITY_TELEMETRY: &str = "telemetry";
/// The controller keeps the edges that proxies report.
pub const CAPABILITY_EDGES: &str = "edges";
/// The controller fetches the keys of issuers again when proxies report tokens of unknown ones.
pub const CAPABILITY_KEYS: &str = "keys";
/// The controller keeps the traffic that proxies report; the proxy reports it as often as it is told.
pub const CAPABILITY_TRAFFIC: &str = "traffic";
