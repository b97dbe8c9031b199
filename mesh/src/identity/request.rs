//! Asks for a rotation of the root, or for its end: an annotation on the CA's Secret, or a file in the CA's folder. Whichever replica
//! of the controller sees it first takes it away and answers.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;

use crate::cluster::{self, Cluster};

/// The Secret of the mesh's CA.
pub const SECRET: &str = "diy-service-mesh-ca";
const ANNOTATION: &str = "diy-service-mesh.dev/rotate-root";
const FILE: &str = "request";

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// A new root.
    Start,
    /// Back to the root before.
    Abandon,
}

impl Request {
    /// As the controller reads it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Abandon => "abandon",
        }
    }
}

/// Where it is asked.
#[derive(Clone)]
pub enum Place {
    /// In a cluster's Secret.
    Cluster(Box<Cluster>),
    /// In a folder.
    Folder(PathBuf),
}

/// Why it cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The Secret cannot be changed.
    #[error("cannot ask for it in Secret {SECRET} of namespace {0}: {1}")]
    Secret(String, String),
    /// The folder is not one of a CA.
    #[error("{0} holds no CA: the controller's --ca files:FOLDER names the right one")]
    NoFolder(PathBuf),
    /// The file cannot be written.
    #[error("cannot write {0}: {1}")]
    File(PathBuf, io::Error),
}

impl Place {
    /// Leaves the request there.
    pub async fn ask(&self, request: Request) -> Result<(), Error> {
        match self {
            Self::Folder(folder) => write(folder, request),
            Self::Cluster(cluster) => {
                let secrets: Api<Secret> =
                    Api::namespaced(cluster.client.clone(), &cluster.namespace);
                let patch = json!({"metadata": {"annotations": {ANNOTATION: request.word()}}});
                // The answer is the Secret's metadata alone: the CA's key does not come this way.
                let patched = secrets
                    .patch_metadata(SECRET, &PatchParams::default(), &Patch::Merge(patch))
                    .await;
                patched.map(drop).map_err(|error| {
                    Error::Secret(cluster.namespace.clone(), cluster::short(&error))
                })
            }
        }
    }

    /// Nobody has taken it yet.
    pub async fn pending(&self) -> Result<bool, Error> {
        match self {
            Self::Folder(folder) => Ok(folder.join(FILE).exists()),
            Self::Cluster(cluster) => {
                let secrets: Api<Secret> =
                    Api::namespaced(cluster.client.clone(), &cluster.namespace);
                let secret = secrets.get_metadata(SECRET).await;
                let secret = secret.map_err(|error| {
                    Error::Secret(cluster.namespace.clone(), cluster::short(&error))
                })?;
                Ok(secret
                    .metadata
                    .annotations
                    .is_some_and(|annotations| annotations.contains_key(ANNOTATION)))
            }
        }
    }
}

/// The file comes into being at once.
fn write(folder: &Path, request: Request) -> Result<(), Error> {
    if !folder.join("tls.crt").is_file() {
        return Err(Error::NoFolder(folder.to_owned()));
    }
    let (new, file) = (folder.join(format!("{FILE}.new")), folder.join(FILE));
    let written =
        fs::write(&new, format!("{}\n", request.word())).and_then(|()| fs::rename(&new, &file));
    written.map_err(|error| Error::File(file, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_left_in_the_folder_of_a_ca_and_nowhere_else() {
        let folder = std::env::temp_dir().join(format!("mesh-request-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let error = write(&folder, Request::Start).unwrap_err().to_string();
        assert!(error.contains("holds no CA"), "{error}");
        fs::write(folder.join("tls.crt"), "").unwrap();
        write(&folder, Request::Abandon).unwrap();
        assert_eq!(
            fs::read_to_string(folder.join("request")).unwrap(),
            "abandon\n"
        );
        fs::remove_dir_all(folder).unwrap();
    }
}
