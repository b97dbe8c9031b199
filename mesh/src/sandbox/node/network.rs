//! The pods' network: each pod has a namespace, joined to the node's by a veth pair and routed, not bridged, so that every
//! packet passes the node's address translation in both directions (as kind's own network plugin does it). All addresses are
//! inside the sandbox's namespaces; the host's never hears of them.

use std::{
    fs::{self, File},
    io::Write,
    net::{Ipv4Addr, Ipv6Addr},
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
};

use anyhow::{Context, Result, bail};
use nix::sched::{CloneFlags, unshare};
use tokio::sync::oneshot;

use super::services::{RANGE_V4, RANGE_V6};

/// The node's address in the pods' network, every pod's gateway, and where probes come from.
pub(super) const NODE_V4: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 1);
const NODE_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, 1);

/// Makes pods' networks.
#[derive(Debug)]
pub(super) struct Network {
    /// The kernel has IPv6.
    pub(super) ipv6: bool,
    next: AtomicU32,
}

/// A pod's network; the namespace lives as long as this or a process in it.
#[derive(Debug)]
pub(super) struct PodNetwork {
    pub(super) v4: Ipv4Addr,
    pub(super) v6: Option<Ipv6Addr>,
    namespace: OwnedFd,
}

impl Network {
    /// Prepares the node's side, in the namespace of the caller.
    pub(super) fn new() -> Result<Self> {
        // A kernel or a machine without IPv6 has IPv4 pods.
        let ipv6 = Path::new("/proc/sys/net/ipv6").exists()
            && feed("ip6tables-restore", &["-w"], "*nat\nCOMMIT\n").is_ok();
        set("net/ipv4/ip_forward", "1")?;
        if ipv6 {
            set("net/ipv6/conf/all/forwarding", "1")?;
        }
        // Cluster addresses need a route to get as far as their translation; what is not translated is refused.
        let mut batch = format!("link set lo up\nroute add {RANGE_V4} dev lo\n");
        if ipv6 {
            batch += &format!("route add {RANGE_V6} dev lo\n");
        }
        ip(&batch)?;
        Ok(Self {
            ipv6,
            next: AtomicU32::new(2),
        })
    }

    /// A new network for a pod; addresses are not used twice.
    pub(super) async fn pod(&self) -> Result<PodNetwork> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let Ok(low) = u16::try_from(number) else {
            bail!("the sandbox has used up its 65,533 pod addresses")
        };
        let [high, low] = low.to_be_bytes();
        let v4 = Ipv4Addr::new(10, 244, high, low);
        let v6 = self.ipv6.then(|| {
            Ipv6Addr::new(
                0xfd00,
                0x10,
                0x244,
                0,
                0,
                0,
                0,
                u16::from_be_bytes([high, low]),
            )
        });
        let (sender, receiver) = oneshot::channel();
        // An own thread: it changes its namespace, and only threads without a later use may.
        thread::Builder::new()
            .name("pod-network".into())
            .spawn(move || {
                // The pod may have been deleted meanwhile; then the namespace goes with the result.
                let _ = sender.send(make(number, v4, v6));
            })?;
        let namespace = receiver
            .await
            .context("the thread that makes the pod's network died")??;
        Ok(PodNetwork { v4, v6, namespace })
    }
}

impl PodNetwork {
    /// Where other processes of this process namespace can open the pod's network namespace.
    pub(super) fn path(&self) -> PathBuf {
        PathBuf::from(format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            self.namespace.as_raw_fd()
        ))
    }
}

fn make(number: u32, v4: Ipv4Addr, v6: Option<Ipv6Addr>) -> Result<OwnedFd> {
    unshare(CloneFlags::CLONE_NEWNET).context("cannot make a network namespace")?;
    let namespace = OwnedFd::from(
        File::open("/proc/thread-self/ns/net").context("cannot open the new network namespace")?,
    );
    // As container runtimes do: port 80 is for everybody.
    set("net/ipv4/ip_unprivileged_port_start", "0")?;
    ip(&pod_side(number, std::process::id(), v4, v6))?;
    // Back on the node for its side; this thread ends here.
    let node_namespace = File::open(format!("/proc/{}/ns/net", std::process::id()))
        .context("cannot open the node's network namespace")?;
    nix::sched::setns(node_namespace, CloneFlags::CLONE_NEWNET)
        .context("cannot return to the node's network namespace")?;
    ip(&node_side(number, v4, v6))?;
    Ok(namespace)
}

/// What `ip -batch` does inside the pod. The peer is born in the node's namespace.
fn pod_side(number: u32, node: u32, v4: Ipv4Addr, v6: Option<Ipv6Addr>) -> String {
    let mut batch = format!(
        "link set lo up\n\
         link add eth0 type veth peer name pod{number} netns /proc/{node}/ns/net\n\
         addr add {v4}/32 dev eth0\n\
         link set eth0 up\n\
         route add {NODE_V4} dev eth0 scope link src {v4}\n\
         route add default via {NODE_V4} dev eth0 src {v4}\n"
    );
    if let Some(v6) = v6 {
        batch += &format!(
            "addr add {v6}/128 dev eth0 nodad\nroute add {NODE_V6} dev eth0\nroute add default via {NODE_V6} dev eth0\n"
        );
    }
    batch
}

/// What `ip -batch` does on the node.
fn node_side(number: u32, v4: Ipv4Addr, v6: Option<Ipv6Addr>) -> String {
    let mut batch = format!(
        "link set pod{number} up\naddr add {NODE_V4}/32 dev pod{number}\nroute add {v4} dev pod{number} scope link src {NODE_V4}\n"
    );
    if let Some(v6) = v6 {
        batch += &format!(
            "addr add {NODE_V6}/128 dev pod{number} nodad\nroute add {v6} dev pod{number}\n"
        );
    }
    batch
}

/// Runs a batch of commands in the namespace of this thread.
fn ip(batch: &str) -> Result<()> {
    feed("ip", &["-batch", "-"], batch)
}

/// Runs a program with a text as its input; what it says on standard error is the error.
pub(super) fn feed(program: &str, arguments: &[&str], input: &str) -> Result<()> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {program}"))?;
    let mut stdin = child.stdin.take().expect("it is piped");
    // A program that refuses its input early closes the pipe; its own words say more than the broken pipe.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!(
            "{program} {}: {}; its input was:\n{input}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

fn set(name: &str, value: &str) -> Result<()> {
    let path = Path::new("/proc/sys").join(name);
    fs::write(&path, value).with_context(|| format!("cannot write {value} to {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_agree_and_ipv6_is_left_out_where_the_kernel_has_none() {
        let v4 = Ipv4Addr::new(10, 244, 0, 7);
        let pod = pod_side(7, 3, v4, None);
        assert!(
            pod.contains("peer name pod7 netns /proc/3/ns/net")
                && pod.contains("addr add 10.244.0.7/32 dev eth0")
        );
        assert!(!pod.contains("fd00"));
        let node = node_side(7, v4, Some("fd00:10:244::7".parse().unwrap()));
        assert!(
            node.contains("route add 10.244.0.7 dev pod7")
                && node.contains("route add fd00:10:244::7 dev pod7")
        );
    }
}
