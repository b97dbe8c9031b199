//! The table of the kinds of objects in the catalog: one row a kind. The catalog, the index, the
//! writer of statuses and the command line read it. Plain values.

use std::fmt;

use Report::{Events, Silent, Status};
use serde::{Deserialize, Serialize};

/// The properties of a kind.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The name in Kubernetes.
    pub name: &'static str,
    /// The API group, empty for the core group.
    pub group: &'static str,
    /// The plural in paths of the API.
    pub plural: &'static str,
    /// The versions that have all fields that are read, the preferred one first.
    pub versions: &'static [&'static str],
    /// Whether every cluster has the kind, or its definition can be installed.
    pub presence: Presence,
    /// Where its objects say what applies.
    pub report: Report,
    /// Fields of rules that only some releases and channels of a definition have.
    pub optional_fields: &'static [&'static str],
}

/// Whether every cluster has a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// It has, and the mesh needs the objects.
    Required,
    /// It has, and the mesh works without the objects.
    Optional,
    /// It is a custom resource.
    Custom,
    /// It is a custom resource whose objects are routes of the Gateway API.
    Route,
}

/// Where the objects of a kind say what applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// Nowhere.
    Silent,
    /// In Events.
    Events,
    /// In their status.
    Status,
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident: $name:literal, $group:expr, $plural:literal,
        $versions:expr, $presence:ident, $report:ident, $fields:expr;)*) => {
        /// The kinds of objects in the catalog, in the order of the table.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum Kind { $($(#[$doc])* $kind,)* }

        impl Kind {
            /// All kinds. The catalog is synced when each that configures something was listed, is
            /// not installed, or cannot be read.
            pub const ALL: [Kind; [$($name),*].len()] = [$(Kind::$kind),*];

            /// The row of the table.
            pub fn row(self) -> Row {
                match self {
                    $(Kind::$kind => Row {
                        name: $name,
                        group: $group,
                        plural: $plural,
                        versions: &$versions,
                        presence: Presence::$presence,
                        report: $report,
                        optional_fields: &$fields,
                    },)*
                }
            }
        }
    };
}

/// The API group of the policies of the mesh.
pub const GROUP: &str = "diy-service-mesh.dev";
/// Its version.
pub const VERSION: &str = "v1alpha1";
/// The API group of routes.
pub const GATEWAY: &str = "gateway.networking.k8s.io";
const EXPERIMENTAL: &str = "gateway.networking.x-k8s.io";
const SPLIT: &str = "split.smi-spec.io";
const SPECS: &str = "specs.smi-spec.io";
const ACCESS: &str = "access.smi-spec.io";

kinds! {
    /// A Service.
    Service: "Service", "", "services", ["v1"], Required, Silent, [];
    /// An EndpointSlice.
    Slice: "EndpointSlice", "discovery.k8s.io", "endpointslices", ["v1"], Required, Silent, [];
    /// A Pod.
    Pod: "Pod", "", "pods", ["v1"], Required, Silent, [];
    /// A Node.
    Node: "Node", "", "nodes", ["v1"], Optional, Silent, [];
    /// An HTTPRoute.
    HttpRoute: "HTTPRoute", GATEWAY, "httproutes", ["v1"], Route, Status,
        ["retry", "sessionPersistence"];
    /// A GRPCRoute.
    GrpcRoute: "GRPCRoute", GATEWAY, "grpcroutes", ["v1"], Route, Status, ["sessionPersistence"];
    /// A TCPRoute. Before release 1.6, v1alpha2 of the experimental channel.
    TcpRoute: "TCPRoute", GATEWAY, "tcproutes", ["v1", "v1alpha2"], Route, Status, [];
    /// A ReferenceGrant.
    Grant: "ReferenceGrant", GATEWAY, "referencegrants", ["v1", "v1beta1"], Custom, Silent, [];
    /// An XBackend.
    Backend: "XBackend", EXPERIMENTAL, "xbackends", ["v1alpha1"], Custom, Status, [];
    /// A TrafficPolicy.
    TrafficPolicy: "TrafficPolicy", GROUP, "trafficpolicies", [VERSION],
        Custom, Status, [];
    /// A TrafficSplit of SMI. Its earlier version v1alpha2 has no matches.
    TrafficSplit: "TrafficSplit", SPLIT, "trafficsplits", ["v1alpha4", "v1alpha3", "v1alpha2"],
        Custom, Events, [];
    /// An HTTPRouteGroup of SMI.
    RouteGroup: "HTTPRouteGroup", SPECS, "httproutegroups", ["v1alpha4"], Custom, Silent, [];
    /// An AuthorizationPolicy.
    Authorization: "AuthorizationPolicy", GROUP, "authorizationpolicies",
        [VERSION], Custom, Status, [];
    /// A TrafficTarget of SMI.
    TrafficTarget: "TrafficTarget", ACCESS, "traffictargets", ["v1alpha3"], Custom, Events, [];
    /// A TCPRoute of SMI.
    TcpGroup: "TCPRoute", SPECS, "tcproutes", ["v1alpha4"], Custom, Silent, [];
    /// An XMesh.
    Mesh: "XMesh", EXPERIMENTAL, "xmeshes", ["v1alpha1"], Custom, Status, [];
}

impl Kind {
    /// Whether the mesh works without objects of this kind.
    pub fn is_optional(self) -> bool {
        self.row().presence != Presence::Required
    }

    /// Whether it is a custom resource.
    pub fn is_custom(self) -> bool {
        matches!(self.row().presence, Presence::Custom | Presence::Route)
    }

    /// Whether objects stay in force when their definition is deleted, and they with it: without
    /// them, everyone could call everything.
    pub fn outlives_definition(self) -> bool {
        matches!(self, Kind::Authorization | Kind::TrafficTarget)
    }

    /// The kinds of routes of the Gateway API.
    pub fn routes() -> impl Iterator<Item = Kind> {
        let is_route = |kind: &Kind| kind.row().presence == Presence::Route;
        Kind::ALL.into_iter().filter(is_route)
    }

    /// The name in Kubernetes.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// The name, with the group if another kind has the same name.
    pub fn unique_name(self) -> &'static str {
        match self {
            Kind::TcpGroup => "TCPRoute.specs.smi-spec.io",
            other => other.name(),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.unique_name())
    }
}
