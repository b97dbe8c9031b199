//! XMeshes (GEP-3949). An XMesh of this controller gets a status, with the features that the mesh
//! supports. XMeshes configure nothing. Pure.

use crate::object::fields::{NULL, field, string};
use crate::object::status::CONTROLLER_NAME;
use crate::object::{Condition, Key, Kind, Meta, ObjectStatus, TargetReference, TargetStatus};

/// The features that docs/gateway-api.md lists as supported, in alphabetical order.
pub(crate) const FEATURES: &[&str] = &[
    "GRPCRoute",
    "GRPCRouteNamedRouteRule",
    "HTTPRoute",
    "HTTPRoute303RedirectStatusCode",
    "HTTPRoute307RedirectStatusCode",
    "HTTPRoute308RedirectStatusCode",
    "HTTPRouteBackendProtocolH2C",
    "HTTPRouteBackendProtocolWebSocket",
    "HTTPRouteBackendRequestHeaderModification",
    "HTTPRouteBackendTimeout",
    "HTTPRouteCORS",
    "HTTPRouteDestinationPortMatching",
    "HTTPRouteHostRewrite",
    "HTTPRouteMethodMatching",
    "HTTPRouteNamedRouteRule",
    "HTTPRouteParentRefPort",
    "HTTPRoutePathRedirect",
    "HTTPRoutePathRewrite",
    "HTTPRoutePortRedirect",
    "HTTPRouteQueryParamMatching",
    "HTTPRouteRequestMirror",
    "HTTPRouteRequestMultipleMirrors",
    "HTTPRouteRequestPercentageMirror",
    "HTTPRouteRequestTimeout",
    "HTTPRouteResponseHeaderModification",
    "HTTPRouteRetry",
    "HTTPRouteRetryBackendTimeout",
    "HTTPRouteRetryConnectionError",
    "HTTPRouteSchemeRedirect",
    "Mesh",
    "MeshClusterIPMatching",
    "MeshConsumerRoute",
    "MeshHTTPRouteBackendRequestHeaderModification",
    "MeshHTTPRouteNamedRouteRule",
    "MeshHTTPRouteQueryParamMatching",
    "MeshHTTPRouteRedirectPath",
    "MeshHTTPRouteRedirectPort",
    "MeshHTTPRouteRewritePath",
    "MeshHTTPRouteSchemeRedirect",
];

/// An XMesh.
#[derive(Clone, Debug, PartialEq)]
pub struct Mesh {
    /// The name, without a namespace.
    pub key: Key,
    /// The status of an XMesh of this controller. It does not depend on other objects.
    pub status: Option<ObjectStatus>,
}

impl Mesh {
    /// The XMesh with this spec.
    pub fn new(meta: Meta, spec: &str) -> Mesh {
        let key = Key::new("", &meta.key.name);
        let accepted = if field(spec, "parametersRef") == NULL {
            Condition::new("Accepted", true, "Accepted", String::new())
        } else {
            let message = "spec.parametersRef: the mesh has no parameters, remove the reference";
            Condition::new("Accepted", false, "InvalidParameters", message.to_owned())
        };
        let parent = TargetReference::object(Kind::Mesh, &key.name);
        let conditions = vec![accepted];
        let parents = vec![TargetStatus { parent, conditions }];
        let status = ObjectStatus::new(Kind::Mesh, key.clone(), meta.generation, parents);
        let controller = string(field(spec, "controllerName"));
        let is_own = controller.as_deref() == Some(CONTROLLER_NAME);
        let status = is_own.then_some(status);
        Mesh { key, status }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_those_of_the_documentation() {
        let document = include_str!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../docs/gateway-api.md"
        ));
        let supported = document.lines().filter_map(|line| {
            let (name, rest) = line.strip_prefix("| `")?.split_once('`')?;
            let is_name = name.starts_with(|first: char| first.is_ascii_uppercase());
            (is_name && rest.starts_with(" | supported")).then_some(name)
        });
        let mut supported: Vec<&str> = supported.collect();
        supported.sort_unstable();
        assert_eq!(FEATURES, supported);
    }
}
