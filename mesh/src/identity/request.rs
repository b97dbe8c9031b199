//! Requests to start, abandon or force a root rotation: an annotation on the Secret of the CA, or a
//! file in its directory. One replica of the controller removes the request and publishes its
//! answer.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, anyhow, ensure};
use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api, ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::json;

use crate::cluster::{Cluster, describe_error};

/// The Secret of the CA.
pub const SECRET: &str = "diy-service-mesh-ca";
const ANNOTATION: &str = "diy-service-mesh.dev/rotate-root";
const FILE: &str = "request";

/// A request to the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Start a rotation to a new root.
    Start,
    /// Return to the previous root.
    Abandon,
    /// Trust only a new root, at once.
    Force,
}

impl Request {
    /// The value that the controller reads.
    fn as_str(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Abandon => "abandon",
            Self::Force => "force",
        }
    }
}

/// The place where the controller reads requests.
#[derive(Clone)]
pub enum RequestTarget {
    /// The Secret of the CA in a cluster.
    Cluster(Box<Cluster>),
    /// The directory of a file-based CA.
    Directory(PathBuf),
}

impl RequestTarget {
    /// Submits a request.
    pub async fn submit(&self, request: Request) -> Result<()> {
        match self {
            Self::Directory(directory) => write(directory, request),
            Self::Cluster(cluster) => {
                let patch = json!({"metadata": {"annotations": {ANNOTATION: request.as_str()}}});
                // The response contains metadata only, not the key of the CA.
                let secrets = secrets(cluster);
                let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
                let patched = secrets.patch_metadata(SECRET, &params, &patch).await;
                patched
                    .map(drop)
                    .map_err(|error| inaccessible(cluster, error))
            }
        }
    }

    /// Whether no controller has accepted the request yet.
    pub async fn pending(&self) -> Result<bool> {
        match self {
            Self::Directory(directory) => Ok(directory.join(FILE).exists()),
            Self::Cluster(cluster) => {
                let secret = secrets(cluster).get_metadata(SECRET).await;
                let secret = secret.map_err(|error| inaccessible(cluster, error))?;
                Ok(secret.annotations().contains_key(ANNOTATION))
            }
        }
    }
}

fn secrets(cluster: &Cluster) -> Api<Secret> {
    Api::namespaced(cluster.client.clone(), &cluster.mesh_namespace)
}

fn inaccessible(cluster: &Cluster, error: kube::Error) -> anyhow::Error {
    let (namespace, error) = (&cluster.mesh_namespace, describe_error(error));
    anyhow!("failed to access Secret {SECRET} in namespace {namespace}: {error}")
}

/// Creates the request file atomically.
fn write(directory: &Path, request: Request) -> Result<()> {
    ensure!(
        directory.join("tls.crt").is_file(),
        "{} contains no CA: set it to the directory in the controller's option --ca files:FOLDER",
        directory.display()
    );
    let (new, file) = (directory.join(format!("{FILE}.new")), directory.join(FILE));
    let written =
        fs::write(&new, format!("{}\n", request.as_str())).and_then(|()| fs::rename(&new, &file));
    written.with_context(|| format!("failed to write {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_requests_only_to_a_ca_directory() {
        let directory = std::env::temp_dir().join(format!("mesh-request-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let error = write(&directory, Request::Start).unwrap_err().to_string();
        assert!(error.contains("contains no CA"), "{error}");
        fs::write(directory.join("tls.crt"), "").unwrap();
        write(&directory, Request::Abandon).unwrap();
        assert_eq!(
            fs::read_to_string(directory.join("request")).unwrap(),
            "abandon\n"
        );
        fs::remove_dir_all(directory).unwrap();
    }
}
