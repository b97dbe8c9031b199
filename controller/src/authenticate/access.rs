//! Authorization of the calls that list pods: what Kubernetes RBAC allows the caller's account
//! (SubjectAccessReview), or, without a Kubernetes API, its own namespace.

use std::sync::Arc;

use diy_mesh_model::identity;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::{Api, PostParams};

use super::AuthError;
use super::tokenreview::explain;

/// The groups and names of resources that an account may list: pods, or a resource that exists in
/// RBAC only. With the latter alone, the token of the account reads nothing from the API server.
const RESOURCES: [[&str; 2]; 2] = [["diy-service-mesh.dev", "workloads"], ["", "pods"]];

/// The namespaces whose pods a caller may list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Namespaces {
    /// All namespaces.
    All,
    /// The namespace of the service account.
    One(Arc<str>),
}

impl Namespaces {
    /// Whether it contains a namespace.
    pub fn contains(&self, namespace: &str) -> bool {
        match self {
            Namespaces::All => true,
            Namespaces::One(own) => **own == *namespace,
        }
    }

    /// Without a Kubernetes API: the namespace of the account, and all for `viewer`.
    pub(super) fn of_account(user: &str, viewer: &str) -> Option<Namespaces> {
        if user == viewer {
            Some(Namespaces::All)
        } else {
            namespace(user).map(|own| Namespaces::One(own.into()))
        }
    }
}

/// The namespace of a service account. Never empty: in a review, that would be all namespaces.
pub(super) fn namespace(user: &str) -> Option<&str> {
    let (namespace, _) = identity::account(user)?;
    Some(namespace).filter(|namespace| !namespace.is_empty())
}

/// The namespaces of an account, as many as it may list. The account of `client` needs the verb
/// `create` on `subjectaccessreviews`.
pub(super) async fn review(
    client: &kube::Client,
    user: &str,
) -> Result<Option<Namespaces>, AuthError> {
    if may_list(client, user, None).await? {
        return Ok(Some(Namespaces::All));
    }
    match namespace(user) {
        Some(own) if may_list(client, user, Some(own)).await? => {
            Ok(Some(Namespaces::One(own.into())))
        }
        _ => Ok(None),
    }
}

async fn may_list(
    client: &kube::Client,
    user: &str,
    within: Option<&str>,
) -> Result<bool, AuthError> {
    for resource in RESOURCES {
        if is_allowed(client, user, within, resource).await? {
            return Ok(true);
        }
    }
    Ok(false)
}

async fn is_allowed(
    client: &kube::Client,
    user: &str,
    within: Option<&str>,
    resource: [&str; 2],
) -> Result<bool, AuthError> {
    let review = SubjectAccessReview {
        spec: review_spec(user, within, resource),
        ..SubjectAccessReview::default()
    };
    let api: Api<SubjectAccessReview> = Api::all(client.clone());
    match api.create(&PostParams::default(), &review).await {
        Ok(review) => Ok(review.status.is_some_and(|status| status.allowed)),
        Err(error) => {
            let reason = explain(&error, "subjectaccessreviews (authorization.k8s.io)");
            tracing::warn!("cannot review the access of {user}: {reason}");
            Err(AuthError::Unreachable(reason.into()))
        }
    }
}

/// The groups are the ones that every service account has. Other users are judged by their name
/// alone.
fn review_spec(
    user: &str,
    within: Option<&str>,
    [group, resource]: [&str; 2],
) -> SubjectAccessReviewSpec {
    let mut groups = vec!["system:authenticated".to_owned()];
    if let Some(own) = namespace(user) {
        groups.push("system:serviceaccounts".to_owned());
        groups.push(format!("system:serviceaccounts:{own}"));
    }
    SubjectAccessReviewSpec {
        user: Some(user.to_owned()),
        groups: Some(groups),
        resource_attributes: Some(ResourceAttributes {
            verb: Some("list".to_owned()),
            group: Some(group.to_owned()),
            resource: Some(resource.to_owned()),
            namespace: within.map(str::to_owned),
            ..ResourceAttributes::default()
        }),
        ..SubjectAccessReviewSpec::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn account_without_an_api_may_list_its_own_namespace() {
        let viewer = "system:serviceaccount:service-mesh:mesh-viewer";
        let of = |user| Namespaces::of_account(user, viewer);
        assert_eq!(of(viewer), Some(Namespaces::All));
        let shop = Namespaces::One("shop".into());
        assert_eq!(of("system:serviceaccount:shop:mesh-viewer"), Some(shop));
        let own = of("system:serviceaccount:service-mesh:default").unwrap();
        assert!(own.contains("service-mesh") && !own.contains("shop"));
        for user in [
            "admin",
            "",
            "system:serviceaccount:shop",
            "system:serviceaccount::mesh-viewer",
        ] {
            assert_eq!(of(user), None, "{user}");
        }
    }

    #[test]
    fn review_names_the_account_its_groups_and_the_namespace() {
        let [workloads, pods] = RESOURCES;
        let spec = review_spec("system:serviceaccount:shop:web", Some("shop"), workloads);
        let attributes = spec.resource_attributes.unwrap();
        assert_eq!(attributes.namespace.as_deref(), Some("shop"));
        let verb = (attributes.verb.as_deref(), attributes.resource.as_deref());
        assert_eq!(verb, (Some("list"), Some("workloads")));
        assert_eq!(attributes.group.as_deref(), Some("diy-service-mesh.dev"));
        let groups = spec.groups.unwrap();
        assert!(groups.contains(&"system:serviceaccounts:shop".to_owned()));
        let everywhere = review_spec("someone", None, pods);
        assert_eq!(everywhere.groups.unwrap(), ["system:authenticated"]);
        assert_eq!(everywhere.resource_attributes.unwrap().namespace, None);
    }
}
