//! `mesh sandbox-exec SPEC`: becomes a container's program. It enters the pod's network namespace, takes an own view of the
//! file system, gives up privileges, and then is replaced by the program, so that its process id is the container's. It is a
//! separate start of this binary because these steps between fork and exec would need `unsafe`; it never returns on success.

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

/// A container's process, as a file of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// The pod's network namespace.
    pub network: PathBuf,
    /// The pod's name.
    pub hostname: String,
    /// Made in this order.
    pub binds: Vec<Bind>,
    /// Program and arguments; a program without a slash is looked up in PATH.
    pub argv: Vec<String>,
    /// The whole environment.
    pub env: Vec<(String, String)>,
    /// Where the program starts.
    pub directory: PathBuf,
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// Further groups.
    pub groups: Vec<u32>,
    /// What a program of user 0 may do at most; programs of other users may do nothing of it.
    pub capabilities: Vec<String>,
    /// Neither it nor its children can gain privileges.
    pub no_new_privileges: bool,
}

/// A file or folder that the container sees at another place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bind {
    /// What.
    pub source: PathBuf,
    /// Where.
    pub target: PathBuf,
    /// Not to be written.
    pub read_only: bool,
}

/// Becomes the program that the file at `spec` describes.
pub fn run(spec: &Path) -> Result<Infallible> {
    let text = fs::read(spec).with_context(|| format!("cannot read {}", spec.display()))?;
    let spec: Spec =
        serde_json::from_slice(&text).context("the container's description does not parse")?;
    enter(&spec)?;
    give_up_privileges(&spec)?;
    let (program, arguments) = spec
        .argv
        .split_first()
        .context("the container has no program")?;
    let error = Command::new(program)
        .args(arguments)
        .env_clear()
        .envs(spec.env.iter().map(|(k, v)| (OsStr::new(k), v)))
        .exec();
    Err(error).with_context(|| format!("cannot start {program}"))
}

fn enter(spec: &Spec) -> Result<()> {
    let network = File::open(&spec.network).with_context(|| {
        format!(
            "cannot open the pod's network namespace {}",
            spec.network.display()
        )
    })?;
    setns(network, CloneFlags::CLONE_NEWNET).context("cannot enter the pod's network namespace")?;
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUTS)
        .context("cannot make the container's own mount namespace")?;
    sethostname(&spec.hostname).context("cannot set the host name")?;
    // A container is its own session: a signal to its group reaches all of it and nothing else.
    setsid().context("cannot start a session")?;
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .context("cannot detach the container's mounts")?;
    for bind in &spec.binds {
        let place = || {
            format!(
                "cannot show {} at {}",
                bind.source.display(),
                bind.target.display()
            )
        };
        mount(
            Some(&bind.source),
            &bind.target,
            none,
            MsFlags::MS_BIND | MsFlags::MS_REC,
            none,
        )
        .with_context(place)?;
        if bind.read_only {
            make_read_only(&bind.target).with_context(place)?;
        }
    }
    // The host's own files are there to be read. What of them lies on further file systems is guarded by its permissions.
    make_read_only(Path::new("/")).context("cannot make / read-only")?;
    std::env::set_current_dir(&spec.directory)
        .with_context(|| format!("no working directory {}", spec.directory.display()))
}

/// Without root in the first user namespace a remount must keep the flags that the mount already has.
fn make_read_only(target: &Path) -> Result<()> {
    let has = statvfs(target)?.flags();
    let mut flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    for (stat, mount) in [
        (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
        (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
        (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
        (FsFlags::ST_RELATIME, MsFlags::MS_RELATIME),
    ] {
        flags.set(mount, has.contains(stat));
    }
    let none: Option<&str> = None;
    Ok(mount(none, target, none, flags, none)?)
}

fn give_up_privileges(spec: &Spec) -> Result<()> {
    for capability in caps::read(None, CapSet::Bounding).context("cannot read the capabilities")? {
        if !spec
            .capabilities
            .iter()
            .any(|name| is_named(capability, name))
        {
            caps::drop(None, CapSet::Bounding, capability)
                .with_context(|| format!("cannot drop {capability}"))?;
        }
    }
    caps::clear(None, CapSet::Inheritable).context("cannot clear the inheritable capabilities")?;
    let groups: Vec<Gid> = spec.groups.iter().copied().map(Gid::from_raw).collect();
    setgroups(&groups).context("cannot set the groups")?;
    let (uid, gid) = (Uid::from_raw(spec.uid), Gid::from_raw(spec.gid));
    setresgid(gid, gid, gid).with_context(|| format!("cannot become group {gid}"))?;
    setresuid(uid, uid, uid).with_context(|| format!("cannot become user {uid}"))?;
    if spec.no_new_privileges {
        prctl::set_no_new_privs().context("cannot forbid new privileges")?;
    }
    Ok(())
}

/// Kubernetes writes NET_ADMIN or CAP_NET_ADMIN; the kernel's name is CAP_NET_ADMIN.
fn is_named(capability: Capability, name: &str) -> bool {
    let own = capability.to_string();
    name == "ALL" || own == name || own.strip_prefix("CAP_") == Some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_known_by_both_their_names() {
        assert!(is_named(Capability::CAP_NET_ADMIN, "NET_ADMIN"));
        assert!(is_named(Capability::CAP_NET_ADMIN, "CAP_NET_ADMIN"));
        assert!(is_named(Capability::CAP_NET_ADMIN, "ALL"));
        assert!(!is_named(Capability::CAP_NET_ADMIN, "NET_RAW"));
    }
}
