//! What the accounts of the mesh must be allowed, read from the manifests that this program carries, and whether they are. The
//! reading is pure; `ask` asks the API server, which answers for others to whoever may create SubjectAccessReviews.

use std::collections::BTreeSet;

use futures::{StreamExt, stream};
use k8s_openapi::api::{
    authorization::v1::SubjectAccessReview,
    rbac::v1::{PolicyRule, RoleRef, Subject},
};
use kube::{Api, api::PostParams};
use serde_json::{Value, json};

use super::{
    Finding, count,
    facts::{Facts, Known},
};
use crate::{
    cluster::{self, Cluster},
    sandbox::manifest,
};

/// One thing that an account must be allowed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Access {
    /// The service account, in the mesh's namespace.
    pub account: String,
    /// For example `list`.
    pub verb: String,
    /// The API group; empty for the core.
    pub group: String,
    /// For example `pods`.
    pub resource: String,
    /// Of this name only.
    pub name: Option<String>,
    /// In all namespaces, or in the mesh's own.
    pub everywhere: bool,
}

impl std::fmt::Display for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            account,
            verb,
            group,
            resource,
            ..
        } = self;
        write!(
            f,
            "{account} may not {verb} {resource}{}{group}",
            if group.is_empty() { "" } else { "." }
        )?;
        self.name.iter().try_for_each(|name| write!(f, " {name}"))?;
        f.write_str(if self.everywhere {
            ", in all namespaces"
        } else {
            ", in the mesh's namespace"
        })
    }
}

/// The mesh's accounts may do what they must.
pub(super) fn rights(facts: &Facts) -> Vec<Finding> {
    const CHECK: &str = "rights";
    vec![match &facts.rights {
        Err(why) => Finding::unknown(CHECK, why),
        Ok(rights) => {
            let missing: Vec<String> = rights
                .iter()
                .filter(|(_, allowed)| !allowed)
                .map(|(access, _)| access.to_string())
                .collect();
            if missing.is_empty() {
                Finding::ok(
                    CHECK,
                    format!(
                        "the mesh's accounts have their {}",
                        count(rights.len(), "right", "rights")
                    ),
                )
            } else {
                let text = format!(
                    "the mesh's accounts lack {}",
                    count(missing.len(), "right", "rights")
                );
                let advice = "give them back what manifests/controller.yaml and manifests/injector.yaml say: kubectl apply -k manifests";
                Finding::problem(CHECK, text, advice).naming(missing)
            }
        }
    }]
}

/// Asks the API server about all of them.
pub(super) async fn ask(cluster: &Cluster) -> Known<Vec<(Access, bool)>> {
    let objects = manifest::embedded()
        .objects()
        .map_err(|error| error.to_string())?;
    let api: Api<SubjectAccessReview> = Api::all(cluster.client.clone());
    let asked = stream::iter(needed(&objects)).map(|access| {
        let (api, namespace) = (api.clone(), cluster.namespace.clone());
        async move {
            let review = serde_json::from_value(review(&access, &namespace))
                .map_err(|error| error.to_string())?;
            let answer = api
                .create(&PostParams::default(), &review)
                .await
                .map_err(|error| cluster::short(&error))?;
            Ok((access, answer.status.is_some_and(|status| status.allowed)))
        }
    });
    asked
        .buffered(8)
        .collect::<Vec<Known<_>>>()
        .await
        .into_iter()
        .collect()
}

fn review(access: &Access, namespace: &str) -> Value {
    json!({"metadata": {}, "spec": {
        "user": format!("system:serviceaccount:{namespace}:{}", access.account),
        "groups": ["system:serviceaccounts", format!("system:serviceaccounts:{namespace}"), "system:authenticated"],
        "resourceAttributes": {
            "verb": access.verb, "group": access.group, "resource": access.resource, "name": access.name,
            "namespace": (!access.everywhere).then_some(namespace),
        },
    }})
}

/// What the roles among these objects allow to whom, one by one.
fn needed(objects: &[Value]) -> BTreeSet<Access> {
    let bindings = objects
        .iter()
        .filter(|object| object["kind"] == "ClusterRoleBinding" || object["kind"] == "RoleBinding");
    bindings
        .filter_map(|binding| allowed(binding, objects))
        .flatten()
        .collect()
}

fn allowed(binding: &Value, objects: &[Value]) -> Option<Vec<Access>> {
    let role: RoleRef = serde_json::from_value(binding["roleRef"].clone()).ok()?;
    let subjects: Vec<Subject> = serde_json::from_value(binding["subjects"].clone()).ok()?;
    let role = objects.iter().find(|object| {
        object["kind"] == role.kind.as_str() && object["metadata"]["name"] == role.name.as_str()
    })?;
    let rules: Vec<PolicyRule> = serde_json::from_value(role["rules"].clone()).ok()?;
    let everywhere = binding["kind"] == "ClusterRoleBinding";
    let mut accesses = Vec::new();
    for subject in subjects
        .iter()
        .filter(|subject| subject.kind == "ServiceAccount")
    {
        for rule in &rules {
            let names: Vec<Option<&String>> = match rule
                .resource_names
                .iter()
                .flatten()
                .map(Some)
                .collect::<Vec<_>>()
            {
                names if names.is_empty() => vec![None],
                names => names,
            };
            for (group, resource) in pairs(&rule.api_groups, &rule.resources) {
                for (verb, name) in rule
                    .verbs
                    .iter()
                    .flat_map(|verb| names.iter().map(move |name| (verb, name)))
                {
                    let name = name.cloned();
                    let (account, verb) = (subject.name.clone(), verb.clone());
                    accesses.push(Access {
                        account,
                        verb,
                        group: group.clone(),
                        resource: resource.clone(),
                        name,
                        everywhere,
                    });
                }
            }
        }
    }
    Some(accesses)
}

fn pairs<'a>(
    groups: &'a Option<Vec<String>>,
    resources: &'a Option<Vec<String>>,
) -> impl Iterator<Item = (&'a String, &'a String)> {
    groups.iter().flatten().flat_map(move |group| {
        resources
            .iter()
            .flatten()
            .map(move |resource| (group, resource))
    })
}

#[cfg(test)]
mod tests {
    use super::super::{Level, facts::testing::untold};
    use super::*;

    fn access(account: &str, verb: &str, resource: &str) -> Access {
        let (group, name) = (String::new(), None);
        Access {
            account: account.into(),
            verb: verb.into(),
            group,
            resource: resource.into(),
            name,
            everywhere: true,
        }
    }

    #[test]
    fn what_is_needed_is_what_the_manifests_grant() {
        let needed = needed(&manifest::embedded().objects().unwrap());
        assert!(
            needed.contains(&access("controller", "list", "pods")),
            "{needed:?}"
        );
        let webhook = Access {
            group: "admissionregistration.k8s.io".into(),
            name: Some("diy-service-mesh-injector".into()),
            ..access("injector", "patch", "mutatingwebhookconfigurations")
        };
        assert!(needed.contains(&webhook), "{needed:?}");
        assert!(
            needed
                .iter()
                .any(|access| !access.everywhere && access.resource == "secrets"),
            "{needed:?}"
        );
    }

    #[test]
    fn a_lacking_right_is_named() {
        let rights = |allowed| Facts {
            rights: Ok(vec![(access("controller", "list", "pods"), allowed)]),
            ..untold()
        };
        assert_eq!(super::rights(&rights(true))[0].level, Level::Ok);
        let finding = &super::rights(&rights(false))[0];
        assert_eq!(finding.level, Level::Problem);
        assert_eq!(
            finding.details,
            ["controller may not list pods, in all namespaces"]
        );
    }

    #[test]
    fn a_review_asks_for_the_account_in_the_meshes_namespace() {
        let review = review(
            &Access {
                everywhere: false,
                ..access("injector", "get", "secrets")
            },
            "mesh",
        );
        assert_eq!(
            review["spec"]["user"],
            "system:serviceaccount:mesh:injector"
        );
        assert_eq!(review["spec"]["resourceAttributes"]["namespace"], "mesh");
    }
}
