//! The files of a pod: its volumes (emptyDir, projected tokens and trust roots), its hosts file, and
//! the private directories of its containers, on the node's tmpfs. `exec` mounts them.

use std::{
    convert::Infallible,
    fs::{self, OpenOptions, Permissions},
    io,
    os::unix::fs::{FileExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Error, Result, bail, ensure};
use diy_mesh_injector::containers::{ROOTS, ROOTS_CONFIG_MAP};
use k8s_openapi::api::core::v1::{ConfigMapProjection, Container, Pod, VolumeProjection};
use tokio::time::{self, Instant};

use super::{Node, spec::PodContext, status::PodStatus};

/// The interval of renewals of a pod without tokens.
const NO_RENEWAL: Duration = Duration::from_secs(1 << 30);

/// The files that change while the pod runs.
#[derive(Debug)]
pub(super) struct Volumes {
    tokens: Vec<ProjectedToken>,
    /// Copies of the mesh's trust roots.
    roots: Vec<PathBuf>,
    hosts: PathBuf,
    namespace: String,
    /// The lines of the pod itself in its hosts file.
    own_hosts: String,
}

/// A projected service account token.
#[derive(Clone, Debug)]
struct ProjectedToken {
    file: PathBuf,
    audience: String,
    lifetime: Duration,
}

impl Volumes {
    /// Creates all files of a pod.
    pub(super) fn create(
        node: &Node,
        context: &PodContext<'_>,
        namespace: &str,
        own_hosts: String,
    ) -> Result<Self> {
        let directory = context.directory;
        fs::create_dir_all(directory)?;
        fs::write(
            directory.join("resolv.conf"),
            "# The sandbox has no DNS: names are in /etc/hosts.\n",
        )?;
        let mut files = Self {
            tokens: Vec::new(),
            roots: Vec::new(),
            hosts: directory.join("hosts"),
            namespace: namespace.to_owned(),
            own_hosts,
        };
        fs::write(&files.hosts, files.hosts_text(node))?;
        let spec = context.spec();
        for volume in spec.volumes.iter().flatten() {
            let target = directory.join("volumes").join(&volume.name);
            fs::create_dir_all(&target)?;
            let name = || format!("volume {}", volume.name);
            if volume.empty_dir.is_some() {
                fs::set_permissions(target, Permissions::from_mode(0o777))?;
            } else if let Some(projected) = &volume.projected {
                for source in projected.sources.iter().flatten() {
                    files
                        .project(source, &target, node, context.pod)
                        .with_context(name)?;
                }
            } else {
                bail!(
                    "{}: unsupported type: the sandbox supports emptyDir and projected",
                    name()
                );
            }
        }
        let init = spec.init_containers.iter().flatten();
        for container in init.chain(&spec.containers) {
            create_private_directories(container, context)?;
        }
        Ok(files)
    }

    fn project(
        &mut self,
        source: &VolumeProjection,
        target: &Path,
        node: &Node,
        pod: &Pod,
    ) -> Result<()> {
        if let Some(token) = &source.service_account_token {
            let seconds = token.expiration_seconds.unwrap_or(3600).unsigned_abs();
            let audience = token.audience.clone();
            let token = ProjectedToken {
                file: inside(target, &token.path)?,
                audience: audience.context("the audience of the token is missing")?,
                lifetime: Duration::from_secs(seconds),
            };
            token.renew(node, pod)?;
            self.tokens.push(token);
        } else if let Some(map) = &source.config_map {
            let file = inside(target, roots_path(map)?)?;
            let roots = node.roots.borrow().clone().unwrap_or_default();
            replace_file(&file, &roots)?;
            self.roots.push(file);
        } else {
            bail!(
                "unsupported projected source: the sandbox supports serviceAccountToken and configMap"
            );
        }
        Ok(())
    }

    /// Renews the tokens, and follows the trust roots and the names of the Services.
    pub(super) async fn refresh(&self, node: &Node, pod: &Pod, status: &PodStatus) -> Infallible {
        let (mut roots, mut hosts) = (node.roots.clone(), node.hosts.subscribe());
        // They may have changed since the files were created.
        hosts.mark_changed();
        roots.mark_changed();
        let lifetimes = self.tokens.iter().map(ProjectedToken::renew_after);
        let interval = lifetimes.min().unwrap_or(NO_RENEWAL);
        let mut renewals = time::interval_at(Instant::now() + interval, interval);
        loop {
            // The senders live as long as the node.
            let result = tokio::select! {
                _ = renewals.tick() => self.tokens.iter().try_for_each(|token| token.renew(node, pod)),
                Ok(()) = roots.changed() => {
                    let roots = roots.borrow_and_update().clone().unwrap_or_default();
                    self.roots.iter().try_for_each(|file| Ok(replace_file(file, &roots)?))
                }
                Ok(()) = hosts.changed() => {
                    hosts.mark_unchanged();
                    overwrite(&self.hosts, &self.hosts_text(node)).map_err(Error::from)
                }
            };
            if let Err(error) = result {
                let name = status.view().full_name();
                status.notice(format!(
                    "failed to refresh the volumes of pod {name}: {error:#}"
                ));
            }
        }
    }

    fn hosts_text(&self, node: &Node) -> String {
        let services = node.hosts.borrow();
        let services = services.get(&self.namespace).map_or("", String::as_str);
        format!(
            "127.0.0.1 localhost\n::1 localhost\n{}{services}",
            self.own_hosts
        )
    }
}

fn create_private_directories(container: &Container, context: &PodContext<'_>) -> Result<()> {
    let process = context.process(container)?;
    let private = context.private_directory(container);
    for (name, mode) in [("run", 0o755), ("tmp", 0o1777)] {
        fs::create_dir_all(private.join(name))?;
        fs::set_permissions(private.join(name), Permissions::from_mode(mode))?;
    }
    // The injector's and the controllers' certificate authority directories belong to the user of
    // the container.
    for authority in [
        &context.directory.join("injector"),
        &context.paths.authority,
    ] {
        if process.binds.iter().any(|bind| bind.source == *authority) {
            fs::create_dir_all(authority)?;
            fs::set_permissions(authority, Permissions::from_mode(0o700))?;
            chown(authority, Some(process.uid), Some(process.gid))?;
        }
    }
    // Mount points: a directory for a directory, a file for a file.
    let resolv = context.mount_point(Path::new("/etc/resolv.conf"), &private);
    if let Some(resolv) = resolv.filter(|path| path.starts_with(&private)) {
        fs::create_dir_all(resolv.parent().unwrap_or(&private))?;
        fs::write(resolv, "")?;
    }
    for bind in &process.binds {
        if bind.target.starts_with(&private) && bind.source.is_dir() {
            fs::create_dir_all(&bind.target)?;
        }
    }
    Ok(())
}

/// The path of the trust roots in a volume.
fn roots_path(map: &ConfigMapProjection) -> Result<&str> {
    ensure!(
        map.name == ROOTS_CONFIG_MAP,
        "ConfigMap {} not found: the sandbox has {ROOTS_CONFIG_MAP} only",
        map.name
    );
    let Some(items) = &map.items else {
        return Ok(ROOTS);
    };
    let item = items.iter().find(|item| item.key == ROOTS);
    let item = item.with_context(|| format!("key {ROOTS} not found in the items of {}", map.name));
    Ok(&item?.path)
}

impl ProjectedToken {
    /// Replaces the token.
    fn renew(&self, node: &Node, pod: &Pod) -> Result<()> {
        let token = node.issuer.token(pod, &self.audience, self.lifetime)?;
        Ok(replace_file(&self.file, &token)?)
    }

    /// The time until the next renewal: 80% of the token's lifetime, as kubelets do.
    fn renew_after(&self) -> Duration {
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

/// Overwrites a file in place: the containers have mounted this inode.
fn overwrite(path: &Path, text: &str) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    file.write_all_at(text.as_bytes(), 0)?;
    file.set_len(text.len() as u64)
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

    #[test]
    fn overwrites_files_in_place() {
        use std::os::unix::fs::MetadataExt;
        let path = std::env::temp_dir().join(format!("mesh-hosts-{}", std::process::id()));
        fs::write(&path, "a longer text").unwrap();
        let inode = fs::metadata(&path).unwrap().ino();
        overwrite(&path, "short").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "short");
        assert_eq!(fs::metadata(&path).unwrap().ino(), inode);
        fs::remove_file(path).unwrap();
    }
}
