//! `mesh sandbox-exec SPEC`: enters the pod's network namespace and a new mount namespace, drops
//! privileges, and replaces itself with the container's program. It is a separate process because
//! these steps between fork and exec would require `unsafe`.

use std::{
    convert::Infallible,
    ffi::OsStr,
    fs::{self, File},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use caps::{CapSet, Capability};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, setns, unshare},
    sys::{
        prctl,
        statvfs::{FsFlags, statvfs},
    },
    unistd::{Gid, Uid, setgroups, sethostname, setresgid, setresuid, setsid},
};
use serde::{Deserialize, Serialize};

/// The specification of a container's process, stored as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// The path of the pod's network namespace.
    pub network: PathBuf,
    /// The pod's name.
    pub hostname: String,
    /// The bind mounts, in order.
    pub binds: Vec<Bind>,
    /// The program and its arguments. A program without a slash is searched in PATH.
    pub argv: Vec<String>,
    /// The complete environment.
    pub env: Vec<(String, String)>,
    /// The user id.
    pub uid: u32,
    /// The group id.
    pub gid: u32,
    /// The capability bounding set. Programs of other users than 0 have no capabilities.
    pub capabilities: Vec<String>,
    /// Whether to set no_new_privs.
    pub no_new_privileges: bool,
}

/// A bind mount of a file or directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bind {
    /// The source path.
    pub source: PathBuf,
    /// The mount point.
    pub target: PathBuf,
    /// Whether the mount is read-only.
    pub read_only: bool,
}

/// Replaces this process with the program of the specification in the file `spec`.
pub fn run(spec: &Path) -> Result<Infallible> {
    let text = fs::read(spec).with_context(|| format!("failed to read {}", spec.display()))?;
    let spec: Spec =
        serde_json::from_slice(&text).context("failed to parse the process specification")?;
    enter_namespaces(&spec)?;
    drop_privileges(&spec)?;
    let (program, arguments) = spec.argv.split_first().context("argv is empty")?;
    let error = Command::new(program)
        .args(arguments)
        .env_clear()
        .envs(spec.env.iter().map(|(k, v)| (OsStr::new(k), v)))
        .exec();
    Err(error).with_context(|| format!("failed to start {program}"))
}

fn enter_namespaces(spec: &Spec) -> Result<()> {
    let path = spec.network.display();
    let network = File::open(&spec.network)
        .with_context(|| format!("failed to open the network namespace {path}"))?;
    setns(network, CloneFlags::CLONE_NEWNET).context("failed to enter the network namespace")?;
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUTS)
        .context("failed to create a mount namespace")?;
    sethostname(&spec.hostname).context("failed to set the host name")?;
    // The container is its own session, so that a signal to the process group reaches all of its
    // processes.
    setsid().context("failed to create a session")?;
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .context("failed to make the mounts private")?;
    for bind in &spec.binds {
        let (source, target) = (bind.source.display(), bind.target.display());
        let context = || format!("failed to mount {source} at {target}");
        let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
        mount(Some(&bind.source), &bind.target, none, flags, none).with_context(context)?;
        if bind.read_only {
            make_read_only(&bind.target).with_context(context)?;
        }
    }
    // The root file system of the host is visible read-only. File permissions protect its other
    // mounts.
    make_read_only(Path::new("/")).context("failed to make / read-only")?;
    std::env::set_current_dir("/").context("failed to enter the working directory /")
}

/// Remounts read-only. A remount in a user namespace must keep the existing flags.
fn make_read_only(target: &Path) -> Result<()> {
    let current = statvfs(target)?.flags();
    let mut flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    for (stat, mount) in [
        (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
        (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
        (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
        (FsFlags::ST_RELATIME, MsFlags::MS_RELATIME),
    ] {
        flags.set(mount, current.contains(stat));
    }
    let none: Option<&str> = None;
    Ok(mount(none, target, none, flags, none)?)
}

fn drop_privileges(spec: &Spec) -> Result<()> {
    let bounding = caps::read(None, CapSet::Bounding).context("failed to read the capabilities")?;
    for capability in bounding {
        let mut names = spec.capabilities.iter();
        if !names.any(|name| is_named(capability, name)) {
            caps::drop(None, CapSet::Bounding, capability)
                .with_context(|| format!("failed to drop {capability}"))?;
        }
    }
    caps::clear(None, CapSet::Inheritable)
        .context("failed to clear the inheritable capabilities")?;
    let (uid, gid) = (Uid::from_raw(spec.uid), Gid::from_raw(spec.gid));
    setgroups(&[gid]).context("failed to set the supplementary groups")?;
    setresgid(gid, gid, gid).with_context(|| format!("failed to change to group {gid}"))?;
    setresuid(uid, uid, uid).with_context(|| format!("failed to change to user {uid}"))?;
    if spec.no_new_privileges {
        prctl::set_no_new_privs().context("failed to set no_new_privs")?;
    }
    Ok(())
}

/// Whether a Kubernetes capability name, with or without the prefix CAP_, refers to this
/// capability.
fn is_named(capability: Capability, name: &str) -> bool {
    let own = capability.to_string();
    name == "ALL" || own == name || own.strip_prefix("CAP_") == Some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_capability_names_with_and_without_prefix() {
        assert!(is_named(Capability::CAP_NET_ADMIN, "NET_ADMIN"));
        assert!(is_named(Capability::CAP_NET_ADMIN, "CAP_NET_ADMIN"));
        assert!(is_named(Capability::CAP_NET_ADMIN, "ALL"));
        assert!(!is_named(Capability::CAP_NET_ADMIN, "NET_RAW"));
    }
}
