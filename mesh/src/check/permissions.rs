//! The permissions that the service accounts of the mesh need according to the embedded manifests,
//! and whether the API server grants them. The caller needs the permission to create
//! SubjectAccessReviews.

use std::collections::BTreeSet;

use diy_mesh_model::identity;
use diy_mesh_model::json;
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::{
    authorization::v1::SubjectAccessReview,
    rbac::v1::{PolicyRule, RoleRef, Subject},
};
use kube::{Api, api::PostParams};
use serde_json::{Value, json};

use super::{
    Finding, Findings, count,
    facts::{Fact, Facts},
    or_ok,
};
use crate::cluster::{self, Cluster};
use diy_mesh_sandbox::manifest;

/// A permission that a service account needs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Permission {
    /// The service account in the namespace of the mesh.
    pub account: String,
    /// The verb, for example `list`.
    pub verb: String,
    /// The API group. Empty for the core group.
    pub group: String,
    /// The resource, for example `pods`.
    pub resource: String,
    /// The name, if the permission is limited to one object.
    pub name: Option<String>,
    /// Whether the permission is for all namespaces or for the namespace of the mesh only.
    pub cluster_wide: bool,
}

impl std::fmt::Display for Permission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (account, verb, resource) = (&self.account, &self.verb, &self.resource);
        write!(f, "{account} cannot {verb} {resource}")?;
        if !self.group.is_empty() {
            write!(f, ".{}", self.group)?;
        }
        self.name.iter().try_for_each(|name| write!(f, " {name}"))?;
        f.write_str(if self.cluster_wide {
            " in all namespaces"
        } else {
            " in the namespace of the mesh"
        })
    }
}

/// The service accounts of the mesh have the permissions that they need.
pub(super) fn permissions(facts: &Facts) -> Findings<'_> {
    let permissions = facts.permissions.as_ref()?;
    let missing = permissions.iter().filter(|(_, allowed)| !allowed);
    let missing: Vec<String> = missing
        .map(|(permission, _)| permission.to_string())
        .collect();
    let accounts = "the service accounts of the mesh";
    let number = |number| count(number, "permission", "permissions");
    let text = format!("{accounts} lack {}", number(missing.len()));
    let advice = "restore the roles of manifests/controller.yaml and manifests/injector.yaml: mesh install | kubectl apply -f -";
    let missing = Finding::problem(text, advice).if_any(missing);
    let text = format!("{accounts} have {}", number(permissions.len()));
    Ok(or_ok([missing], text))
}

/// Reviews all needed permissions with the API server.
pub(super) async fn review(cluster: &Cluster) -> Fact<Vec<(Permission, bool)>> {
    let objects = manifest::embedded()
        .objects()
        .map_err(|error| error.to_string())?;
    let api: Api<SubjectAccessReview> = Api::all(cluster.client.clone());
    let reviews = stream::iter(needed(&objects)).map(|permission| {
        let (api, namespace) = (api.clone(), cluster.mesh_namespace.clone());
        async move {
            let review = json::read(&access_review(&permission, &namespace))
                .map_err(|error| error.to_string())?;
            let response = api
                .create(&PostParams::default(), &review)
                .await
                .map_err(cluster::describe_error)?;
            let is_allowed = response.status.is_some_and(|status| status.allowed);
            Ok((permission, is_allowed))
        }
    });
    reviews.buffered(8).try_collect().await
}

fn access_review(permission: &Permission, namespace: &str) -> Value {
    let (resource, subresource) = match permission.resource.split_once('/') {
        Some((resource, subresource)) => (resource, Some(subresource)),
        None => (permission.resource.as_str(), None),
    };
    json!({"metadata": {}, "spec": {
        "user": identity::user(namespace, &permission.account),
        "groups": ["system:serviceaccounts", format!("system:serviceaccounts:{namespace}"), "system:authenticated"],
        "resourceAttributes": {
            "verb": permission.verb, "group": permission.group, "resource": resource, "subresource": subresource,
            "name": permission.name,
            "namespace": (!permission.cluster_wide).then_some(namespace),
        },
    }})
}

/// The permissions that the role bindings among the objects grant.
fn needed(objects: &[Value]) -> BTreeSet<Permission> {
    let bindings = objects
        .iter()
        .filter(|object| object["kind"] == "ClusterRoleBinding" || object["kind"] == "RoleBinding");
    bindings
        .filter_map(|binding| granted(binding, objects))
        .flatten()
        .collect()
}

fn granted(binding: &Value, objects: &[Value]) -> Option<Vec<Permission>> {
    let role: RoleRef = json::read(&binding["roleRef"]).ok()?;
    let subjects: Vec<Subject> = json::read(&binding["subjects"]).ok()?;
    let role = objects.iter().find(|object| {
        object["kind"] == role.kind.as_str() && object["metadata"]["name"] == role.name.as_str()
    })?;
    let rules: Vec<PolicyRule> = json::read(&role["rules"]).ok()?;
    let cluster_wide = binding["kind"] == "ClusterRoleBinding";
    let mut permissions = Vec::new();
    for account in subjects
        .iter()
        .filter(|subject| subject.kind == "ServiceAccount")
    {
        for rule in &rules {
            let mut names: Vec<_> = rule.resource_names.iter().flatten().map(Some).collect();
            if names.is_empty() {
                names.push(None);
            }
            for group in rule.api_groups.iter().flatten() {
                for resource in rule.resources.iter().flatten() {
                    for verb in &rule.verbs {
                        permissions.extend(names.iter().map(|name| Permission {
                            account: account.name.clone(),
                            verb: verb.clone(),
                            group: group.clone(),
                            resource: resource.clone(),
                            name: name.cloned(),
                            cluster_wide,
                        }));
                    }
                }
            }
        }
    }
    Some(permissions)
}

#[cfg(test)]
mod tests {
    use super::super::{Level, facts::testing::unknown_facts};
    use super::*;

    fn permission(account: &str, verb: &str, resource: &str) -> Permission {
        let (group, name) = (String::new(), None);
        Permission {
            account: account.into(),
            verb: verb.into(),
            group,
            resource: resource.into(),
            name,
            cluster_wide: true,
        }
    }

    #[test]
    fn reads_needed_permissions_from_the_manifests() {
        let needed = needed(&manifest::embedded().objects().unwrap());
        assert!(
            needed.contains(&permission("controller", "list", "pods")),
            "{needed:?}"
        );
        let webhook = Permission {
            group: "admissionregistration.k8s.io".into(),
            name: Some("diy-service-mesh-injector".into()),
            ..permission("injector", "patch", "mutatingwebhookconfigurations")
        };
        assert!(needed.contains(&webhook), "{needed:?}");
        assert!(
            needed
                .iter()
                .any(|permission| !permission.cluster_wide && permission.resource == "secrets"),
            "{needed:?}"
        );
    }

    #[test]
    fn reports_missing_permissions() {
        let facts = |allowed| Facts {
            permissions: Ok(vec![(permission("controller", "list", "pods"), allowed)]),
            ..unknown_facts()
        };
        assert_eq!(
            super::permissions(&facts(true)).unwrap()[0].level,
            Level::Ok
        );
        let finding = &super::permissions(&facts(false)).unwrap()[0];
        assert_eq!(finding.level, Level::Problem);
        assert_eq!(
            finding.details,
            ["controller cannot list pods in all namespaces"]
        );
    }

    #[test]
    fn reviews_service_accounts_in_the_namespace_of_the_mesh() {
        let review = access_review(
            &Permission {
                cluster_wide: false,
                ..permission("injector", "get", "secrets")
            },
            "mesh",
        );
        assert_eq!(
            review["spec"]["user"],
            "system:serviceaccount:mesh:injector"
        );
        assert_eq!(review["spec"]["resourceAttributes"]["namespace"], "mesh");
        let status = permission("controller", "update", "httproutes/status");
        let attributes = &access_review(&status, "mesh")["spec"]["resourceAttributes"];
        assert_eq!(attributes["resource"], "httproutes");
        assert_eq!(attributes["subresource"], "status");
    }
}
