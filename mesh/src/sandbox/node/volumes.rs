//! A pod's files: volumes (emptyDir, configMap, projected), its hosts file, and the private trees of its containers, all in
//! the node's tmpfs. It never mounts; `exec` does.

use std::{
    fs, io,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::{
    ConfigMap, ConfigMapProjection, Container, Volume, VolumeProjection,
};

use super::{
    issuer::{Bearer, Issuer},
    roots,
    spec::Surroundings,
};

/// A token that must be renewed in time.
#[derive(Clone, Debug)]
pub(super) struct ProjectedToken {
    file: PathBuf,
    audience: String,
    lifetime: Duration,
}

/// What of a pod's files changes while it runs.
#[derive(Debug, Default)]
pub(super) struct Live {
    pub(super) tokens: Vec<ProjectedToken>,
    /// Where the mesh's roots are.
    pub(super) roots: Vec<PathBuf>,
}

/// What pods' files are made from.
pub(super) struct Sources<'a> {
    pub(super) issuer: &'a Issuer,
    pub(super) bearer: &'a Bearer,
    /// A ConfigMap of the pod's namespace.
    pub(super) config_map: &'a dyn Fn(&str) -> Option<ConfigMap>,
}

/// Makes all of a pod's files; what is given back is to be kept up to date.
pub(super) fn prepare(surroundings: &Surroundings<'_>, sources: &Sources<'_>) -> Result<Live> {
    let folder = surroundings.folder;
    let spec = surroundings
        .pod
        .spec
        .as_ref()
        .context("the pod has no spec")?;
    fs::write(
        folder.join("resolv.conf"),
        "# The sandbox has no name servers: see /etc/hosts.\n",
    )?;
    let mut live = Live::default();
    for volume in spec.volumes.iter().flatten() {
        let target = folder.join("volumes").join(&volume.name);
        fs::create_dir_all(&target)?;
        fill(volume, &target, surroundings, sources, &mut live)
            .with_context(|| format!("volume {}", volume.name))?;
    }
    for container in spec
        .init_containers
        .iter()
        .flatten()
        .chain(&spec.containers)
    {
        private_trees(container, surroundings)?;
    }
    Ok(live)
}

fn private_trees(container: &Container, surroundings: &Surroundings<'_>) -> Result<()> {
    let process = surroundings.process(container)?;
    let private = surroundings.folder.join("containers").join(&container.name);
    for (name, mode) in [("run", 0o755), ("tmp", 0o1777)] {
        fs::create_dir_all(private.join(name))?;
        fs::set_permissions(private.join(name), fs::Permissions::from_mode(mode))?;
    }
    // Where an injector writes its certificate authority, its own, and the controllers theirs, a common one: each as its user.
    for authority in [
        &surroundings.folder.join("injector"),
        surroundings.authority,
    ] {
        if process.binds.iter().any(|bind| bind.source == *authority) {
            fs::create_dir_all(authority)?;
            fs::set_permissions(authority, fs::Permissions::from_mode(0o700))?;
            chown(authority, Some(process.uid), Some(process.gid))?;
        }
    }
    // The places to mount on: a folder for a folder, a file for a file.
    if let Some(resolv) = surroundings
        .place(Path::new("/etc/resolv.conf"), &private)
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
    surroundings: &Surroundings<'_>,
    sources: &Sources<'_>,
    live: &mut Live,
) -> Result<()> {
    if volume.empty_dir.is_some() {
        fs::set_permissions(target, fs::Permissions::from_mode(0o777))?;
    } else if let Some(map) = &volume.config_map {
        let projection = ConfigMapProjection {
            items: map.items.clone(),
            name: map.name.clone(),
            optional: map.optional,
        };
        write_config_map(&projection, target, sources, live)?;
    } else if let Some(projected) = &volume.projected {
        for source in projected.sources.iter().flatten() {
            project(source, target, surroundings, sources, live)?;
        }
    } else {
        bail!("the sandbox knows emptyDir, configMap and projected volumes");
    }
    Ok(())
}

fn project(
    source: &VolumeProjection,
    target: &Path,
    surroundings: &Surroundings<'_>,
    sources: &Sources<'_>,
    live: &mut Live,
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
        token.renew(sources.issuer, sources.bearer)?;
        live.tokens.push(token);
    } else if let Some(map) = &source.config_map {
        write_config_map(map, target, sources, live)?;
    } else if let Some(fields) = &source.downward_api {
        for item in fields.items.iter().flatten() {
            let field = item
                .field_ref
                .as_ref()
                .context("the sandbox's downward API has fieldRef only")?;
            write(
                &inside(target, &item.path)?,
                surroundings.field(field)?.as_bytes(),
            )?;
        }
    } else {
        bail!("the sandbox projects serviceAccountToken, configMap and downwardAPI");
    }
    Ok(())
}

fn write_config_map(
    map: &ConfigMapProjection,
    target: &Path,
    sources: &Sources<'_>,
    live: &mut Live,
) -> Result<()> {
    let Some(object) = (sources.config_map)(&map.name) else {
        if map.optional == Some(true) {
            return Ok(());
        }
        bail!("there is no ConfigMap {}", map.name);
    };
    let data = object.data.unwrap_or_default();
    let files: Vec<(&String, &String)> = match &map.items {
        None => data.keys().map(|key| (key, key)).collect(),
        Some(items) => items.iter().map(|item| (&item.key, &item.path)).collect(),
    };
    for (key, path) in files {
        let text = data
            .get(key)
            .with_context(|| format!("ConfigMap {} has no key {key}", map.name))?;
        let file = inside(target, path)?;
        write(&file, text.as_bytes())?;
        if map.name == roots::CONFIG_MAP {
            live.roots.push(file);
        }
    }
    Ok(())
}

/// Writes new roots over the old ones.
pub(super) fn write_roots(file: &Path, roots: &str) -> io::Result<()> {
    write(file, roots.as_bytes())
}

impl ProjectedToken {
    /// Writes a new token over the old one.
    pub(super) fn renew(&self, issuer: &Issuer, bearer: &Bearer) -> Result<()> {
        Ok(write(
            &self.file,
            issuer
                .token(bearer, &self.audience, self.lifetime)?
                .as_bytes(),
        )?)
    }

    /// When to do it, as kubelets do: at four fifths of its life.
    pub(super) fn renew_after(&self) -> Duration {
        self.lifetime.mul_f64(0.8)
    }
}

/// Replaces the file at once: its readers see the old text or the new one.
fn write(path: &Path, text: &[u8]) -> io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
    let temporary = path.with_extension("new");
    fs::write(&temporary, text)?;
    fs::rename(temporary, path)
}

fn inside(folder: &Path, path: &str) -> Result<PathBuf> {
    if path.starts_with('/') || path.split('/').any(|part| part == "..") {
        bail!("the path {path:?} leads out of the volume");
    }
    Ok(folder.join(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_in_their_volume() {
        assert_eq!(
            inside(Path::new("/v"), "a/token").unwrap(),
            Path::new("/v/a/token")
        );
        assert!(inside(Path::new("/v"), "../x").is_err());
        assert!(inside(Path::new("/v"), "/etc/passwd").is_err());
    }

    #[test]
    fn tokens_are_replaced_in_good_time() {
        let token = ProjectedToken {
            file: "/x".into(),
            audience: String::new(),
            lifetime: Duration::from_secs(3600),
        };
        assert_eq!(token.renew_after(), Duration::from_secs(2880));
    }
}
