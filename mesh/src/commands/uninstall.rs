//! `mesh uninstall`: deletes the objects of `mesh install` that are of the mesh, once no pod has a
//! proxy. Objects that are deleted already are skipped, so an interrupted run can be repeated.

use std::{fmt::Debug, process::ExitCode, time::Duration};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Preconditions},
    core::NamespaceResourceScope,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::check::count;
use crate::cluster::{self, Cluster, describe_error};
use crate::install::{self, Values, live};
use crate::pods::{self, Pod};
use crate::terminal;

/// The arguments of `mesh uninstall`.
#[derive(Args, Debug)]
#[command(
    mut_arg("namespace", cluster::no_namespace),
    after_help = "Without --purge, the namespace of the mesh remains with the CA, and so do the policies with their definitions:\n\
    a new installation continues with the same identities.\n\n\
    Exit codes: 0, deleted; 1, pods with a proxy exist, or an error.\n\n\
    Examples:\n  mesh uninstall --dry-run    what would be deleted\n  mesh uninstall\n  \
    mesh uninstall --purge      also the CA, the policies and their definitions, and the namespace"
)]
pub struct Arguments {
    #[command(flatten)]
    cluster: cluster::Arguments,
    /// Also delete the CA, the certificate of the injector, all policies with their definitions, and
    /// the namespace of the mesh; refused while it contains pods, Secrets or PersistentVolumeClaims
    /// of others
    #[arg(long)]
    purge: bool,
    /// Print what would be deleted, and delete nothing
    #[arg(long)]
    dry_run: bool,
}

/// The time for an object to disappear: the pods of a Deployment, and all objects of a namespace.
const DELETE_TIMEOUT: Duration = Duration::from_secs(180);
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The Secrets that controller and injector create.
const SECRETS: [&str; 2] = ["diy-service-mesh-ca", "diy-service-mesh-injector-tls"];

/// Deletes the mesh.
pub async fn run(arguments: &Arguments) -> Result<ExitCode> {
    let cluster = Cluster::connect(&arguments.cluster).await?;
    let namespace = &arguments.cluster.mesh_namespace;
    let pods: Vec<Pod> = cluster::list(Api::all(cluster.client.clone()), &ListParams::default())
        .await
        .map_err(|error| anyhow!("cannot list the pods of all namespaces: {error}"))?;
    let others = if arguments.purge {
        let mut others = others::<Secret>(&cluster, namespace).await?;
        others.extend(self::others::<PersistentVolumeClaim>(&cluster, namespace).await?);
        others.extend(self::others::<Pod>(&cluster, namespace).await?);
        others
    } else {
        Vec::new()
    };
    if let Some(reason) = obstacle(&pods, &others, namespace) {
        terminal::note(&format!("mesh: {reason}"));
        return Ok(ExitCode::FAILURE);
    }
    let mut deleted = 0;
    for object in targets(namespace, arguments.purge)? {
        deleted += usize::from(delete(&cluster, &object, arguments.dry_run).await?);
    }
    let summary = match (deleted, arguments.dry_run, arguments.purge) {
        (0, ..) => format!("no object of the mesh is left in namespace {namespace}\n"),
        (_, false, false) => format!(
            "the namespace {namespace} with the CA, and the policies with their definitions, remain (mesh uninstall --purge)\n"
        ),
        _ => String::new(),
    };
    terminal::print(&summary)?;
    Ok(ExitCode::SUCCESS)
}

/// The objects of a kind in the namespace of the mesh that are not of the mesh, and not a record of
/// Helm.
async fn others<K>(cluster: &Cluster, namespace: &str) -> Result<Vec<String>>
where
    K: kube::Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + Debug
        + DeserializeOwned,
{
    let api: Api<K> = Api::namespaced(cluster.client.clone(), namespace);
    let kind = K::kind(&());
    let of_no_release = ListParams::default().labels("owner!=helm");
    let listed = api.list_metadata(&of_no_release).await.map_err(|error| {
        let error = describe_error(error);
        anyhow!("cannot list objects of kind {kind} in namespace {namespace}: {error}")
    })?;
    let others = listed.iter().filter(|object| !live::is_of_mesh(*object));
    Ok(others
        .map(|object| format!("{kind} {}", object.name_any()))
        .collect())
}

/// Why the mesh cannot be deleted.
fn obstacle(pods: &[Pod], others: &[String], namespace: &str) -> Option<String> {
    let list =
        |names: &[String]| -> String { names.iter().map(|name| format!("\n  {name}")).collect() };
    let meshed: Vec<String> = pods::meshed(pods).map(pods::name).collect();
    if !meshed.is_empty() {
        let number = count(meshed.len(), "pod has", "pods have");
        return Some(format!(
            "{number} a proxy, which would lose the control plane:{}\nremove the annotation or label \
            diy-service-mesh/inject, restart the workloads (kubectl rollout restart), and try again",
            list(&meshed)
        ));
    }
    (!others.is_empty()).then(|| {
        let number = count(others.len(), "object", "objects");
        format!(
            "namespace {namespace} contains {number} of others, which --purge would delete:{}\n\
            move them to another namespace, or run mesh uninstall without --purge",
            list(others)
        )
    })
}

/// The objects to delete, in order: the webhook first, Deployments before the rights of their pods,
/// and last the namespace.
fn targets(namespace: &str, purge: bool) -> Result<Vec<Value>> {
    let values = Values::load(&[], &[format!("namespace={namespace}")])?;
    let mut objects = install::objects(&values);
    objects.reverse();
    if purge {
        let secret = |name| {
            let metadata = json!({"namespace": namespace, "name": name});
            json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata})
        };
        let last = objects.len() - 1;
        objects.splice(last..last, install::definitions());
        objects.splice(last..last, SECRETS.map(secret));
    } else {
        objects.retain(|object| object["kind"] != "Namespace");
    }
    Ok(objects)
}

/// Deletes an object and waits until it is gone. Returns whether there was one of the mesh.
async fn delete(cluster: &Cluster, object: &Value, dry_run: bool) -> Result<bool> {
    let (title, name) = (live::title(object), object["metadata"]["name"].as_str());
    let name = name.context("objects of the manifests have names")?;
    let error = |error: kube::Error| anyhow!("cannot delete {title}: {}", describe_error(error));
    let api = live::api(&cluster.client, object).await;
    let api = api.map_err(|error| anyhow!("cannot delete {title}: {error}"))?;
    let Some(found) = api.get_opt(name).await.map_err(error)? else {
        return Ok(false);
    };
    if !live::is_of_mesh(&found) {
        let (label, value) = live::LABEL;
        terminal::note(&format!("kept {title}: it has no label {label}={value}"));
        return Ok(false);
    }
    let params = DeleteParams {
        dry_run,
        preconditions: Some(Preconditions {
            uid: found.uid(),
            resource_version: None,
        }),
        ..DeleteParams::foreground()
    };
    match api.delete(name, &params).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        result => drop(result.map_err(error)?),
    }
    if dry_run {
        terminal::print(&format!("would delete {title}\n"))?;
        return Ok(true);
    }
    let end = Instant::now() + DELETE_TIMEOUT;
    while let Some(left) = api.get_opt(name).await.map_err(error)?
        && left.uid() == found.uid()
    {
        if Instant::now() > end {
            let (time, finalizers) = (DELETE_TIMEOUT.as_secs(), left.finalizers().join(", "));
            bail!(
                "{title} still exists after {time} s (finalizers: {finalizers}); to continue, run the command again"
            );
        }
        sleep(POLL_INTERVAL).await;
    }
    terminal::print(&format!("deleted {title}\n"))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::facts::testing::{meshed, ready};

    fn titles(purge: bool) -> Vec<String> {
        let objects = targets("mesh", purge).unwrap();
        objects.iter().map(live::title).collect()
    }

    #[test]
    fn webhook_is_first_and_deployments_precede_the_rights_of_their_pods() {
        let all = titles(false);
        let at = |title: &str| all.iter().position(|one| one == title).expect(title);
        assert_eq!(
            at("MutatingWebhookConfiguration diy-service-mesh-injector"),
            0
        );
        assert!(at("Deployment mesh/injector") < at("ClusterRole diy-service-mesh-injector"));
        assert!(at("Deployment mesh/controller") < at("ClusterRole diy-service-mesh-controller"));
        assert!(
            !all.iter().any(|one| one.starts_with("Namespace")),
            "{all:?}"
        );
    }

    #[test]
    fn only_purge_deletes_state_definitions_and_the_namespace() {
        let (kept, purged) = (titles(false), titles(true));
        assert_eq!(purged[..kept.len()], kept);
        let more = [
            "Secret mesh/diy-service-mesh-ca",
            "Secret mesh/diy-service-mesh-injector-tls",
            "CustomResourceDefinition authorizationpolicies.diy-service-mesh.dev",
            "CustomResourceDefinition trafficpolicies.diy-service-mesh.dev",
            "Namespace mesh",
        ];
        assert_eq!(purged[kept.len()..], more);
    }

    #[test]
    fn pods_with_a_proxy_and_objects_of_others_are_obstacles() {
        let pods = [meshed("a", ready()), meshed("b", ready())];
        let reason = obstacle(&pods, &[], "mesh").unwrap();
        for part in [
            "2 pods have a proxy",
            "\n  shop/a\n  shop/b\n",
            "kubectl rollout restart",
        ] {
            assert!(reason.contains(part), "{reason}");
        }
        assert_eq!(obstacle(&[], &[], "mesh"), None);
        let reason = obstacle(&[], &["Secret registry".into()], "mesh").unwrap();
        assert!(
            reason.contains("1 object of others, which --purge would delete:\n  Secret registry\n"),
            "{reason}"
        );
    }
}
