//! The volumes of a pod (emptyDir, projected tokens and trust roots) and the private directories of its
//! containers, on the node's tmpfs. `exec` mounts them.

use std::{
    fs, io,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use diy_mesh_injector::containers::{ROOTS, ROOTS_CONFIG_MAP};
use k8s_openapi::api::core::v1::{ConfigMapProjection, Container, Volume, VolumeProjection};

use super::{
    issuer::{Issuer, TokenSubject},
    spec::PodContext,
};

/// A projected service account token.
#[derive(Clone, Debug)]
pub(super) struct ProjectedToken {
    file: PathBuf,
    audience: String,
    lifetime: Duration,
}

/// The files that the node refreshes while the pod runs.
#[derive(Debug, Default)]
pub(super) struct RefreshedFiles {
    pub(super) tokens: Vec<ProjectedToken>,
    /// Copies of the mesh's trust roots.
    pub(super) roots: Vec<PathBuf>,
}

/// The sources of volume contents.
pub(super) struct Sources<'a> {
    pub(super) issuer: &'a Issuer,
    pub(super) subject: &'a TokenSubject,
    /// The mesh's trust roots.
    pub(super) roots: &'a str,
}

/// Creates all files of a pod. Returns those to refresh.
pub(super) fn prepare(context: &PodContext<'_>, sources: &Sources<'_>) -> Result<RefreshedFiles> {
    let directory = context.directory;
    let spec = context.pod.spec.as_ref().context("spec is missing")?;
    fs::write(
        directory.join("resolv.conf"),
        "# The sandbox has no DNS: names are in /etc/hosts.\n",
    )?;
    let mut refreshed = RefreshedFiles::default();
    for volume in spec.volumes.iter().flatten() {
        let target = directory.join("volumes").join(&volume.name);
        fs::create_dir_all(&target)?;
        fill(volume, &target, sources, &mut refreshed)
            .with_context(|| format!("volume {}", volume.name))?;
    }
    for container in spec
        .init_containers
        .iter()
        .flatten()
        .chain(&spec.containers)
    {
        create_private_directories(container, context)?;
    }
    Ok(refreshed)
}

fn create_private_directories(container: &Container, context: &PodContext<'_>) -> Result<()> {
    let process = context.process(container)?;
    let private = context.directory.join("containers").join(&container.name);
    for (name, mode) in [("run", 0o755), ("tmp", 0o1777)] {
        fs::create_dir_all(private.join(name))?;
        fs::set_permissions(private.join(name), fs::Permissions::from_mode(mode))?;
    }
    // The injector's and the controllers' certificate authority directories belong to the user of
    // the container.
    for authority in [&context.directory.join("injector"), context.authority] {
        if process.binds.iter().any(|bind| bind.source == *authority) {
            fs::create_dir_all(authority)?;
            fs::set_permissions(authority, fs::Permissions::from_mode(0o700))?;
            chown(authority, Some(process.uid), Some(process.gid))?;
        }
    }
    // Mount points: a directory for a directory, a file for a file.
    if let Some(resolv) = context
        .mount_point(Path::new("/etc/resolv.conf"), &private)
        .filter(|path| path.starts_with(&private))
    {
        fs::create_dir_all(resolv.parent().unwrap_or(&private))?;
        fs::write(resolv, "")?;
    }
    for bind in process
        .binds
        .iter()
        .filter(|bind| bind.target.starts_with(&private))
    {
        if bind.source.is_dir() {
            fs::create_dir_all(&bind.target)?;
        }
    }
    Ok(())
}

fn fill(
    volume: &Volume,
    target: &Path,
    sources: &Sources<'_>,
    refreshed: &mut RefreshedFiles,
) -> Result<()> {
    if volume.empty_dir.is_some() {
        fs::set_permissions(target, fs::Permissions::from_mode(0o777))?;
    } else if let Some(projected) = &volume.projected {
        for source in projected.sources.iter().flatten() {
            project(source, target, sources, refreshed)?;
        }
    } else {
        bail!("unsupported volume type: the sandbox supports emptyDir and projected");
    }
    Ok(())
}

fn project(
    source: &VolumeProjection,
    target: &Path,
    sources: &Sources<'_>,
    refreshed: &mut RefreshedFiles,
) -> Result<()> {
    if let Some(token) = &source.service_account_token {
        let seconds = token
            .expiration_seconds
            .and_then(|seconds| u64::try_from(seconds).ok())
            .unwrap_or(3600);
        let audience = token
            .audience
            .clone()
            .unwrap_or_else(|| "https://kubernetes.default.svc.cluster.local".into());
        let token = ProjectedToken {
            file: inside(target, &token.path)?,
            audience,
            lifetime: Duration::from_secs(seconds),
        };
        token.renew(sources.issuer, sources.subject)?;
        refreshed.tokens.push(token);
    } else if let Some(map) = &source.config_map {
        write_roots(map, target, sources.roots, refreshed)?;
    } else {
        bail!(
            "unsupported projected source: the sandbox supports serviceAccountToken and configMap"
        );
    }
    Ok(())
}

fn write_roots(
    map: &ConfigMapProjection,
    target: &Path,
    roots: &str,
    refreshed: &mut RefreshedFiles,
) -> Result<()> {
    ensure!(
        map.name == ROOTS_CONFIG_MAP,
        "ConfigMap {} not found: the sandbox has {ROOTS_CONFIG_MAP} only",
        map.name
    );
    let path = match &map.items {
        None => ROOTS,
        Some(items) => {
            let item = items.iter().find(|item| item.key == ROOTS);
            &item
                .with_context(|| format!("key {ROOTS} not found in the items of {}", map.name))?
                .path
        }
    };
    let file = inside(target, path)?;
    replace_file(&file, roots)?;
    refreshed.roots.push(file);
    Ok(())
}

impl ProjectedToken {
    /// Replaces the token.
    pub(super) fn renew(&self, issuer: &Issuer, subject: &TokenSubject) -> Result<()> {
        let token = issuer.token(subject, &self.audience, self.lifetime)?;
        Ok(replace_file(&self.file, &token)?)
    }

    /// The time until the next renewal: 80% of the token's lifetime, as kubelets do.
    pub(super) fn renew_after(&self) -> Duration {
        self.lifetime.mul_f64(0.8)
    }
}

/// Replaces a file atomically and creates its directory.
pub(super) fn replace_file(path: &Path, text: &str) -> io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
    let temporary = path.with_extension("new");
    fs::write(&temporary, text)?;
    fs::rename(temporary, path)
}

fn inside(directory: &Path, path: &str) -> Result<PathBuf> {
    if path.starts_with('/') || path.split('/').any(|part| part == "..") {
        bail!("path {path:?} must not leave the volume");
    }
    Ok(directory.join(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_paths_outside_the_volume() {
        assert_eq!(
            inside(Path::new("/v"), "a/token").unwrap(),
            Path::new("/v/a/token")
        );
        assert!(inside(Path::new("/v"), "../x").is_err());
        assert!(inside(Path::new("/v"), "/etc/passwd").is_err());
    }

    #[test]
    fn renews_tokens_at_80_percent_of_their_lifetime() {
        let token = ProjectedToken {
            file: "/x".into(),
            audience: String::new(),
            lifetime: Duration::from_secs(3600),
        };
        assert_eq!(token.renew_after(), Duration::from_secs(2880));
    }
}
