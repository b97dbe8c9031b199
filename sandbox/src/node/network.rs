//! The pod network: a veth pair connects each pod's network namespace to the node's. Packets are
//! routed, not bridged, so that they pass the node's address translation in both directions, as
//! with kind's network plugin. All addresses are local to the sandbox's namespaces.

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

/// The node's address in the pod network: the gateway of all pods and the source address of probes.
pub(super) const NODE_V4: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 1);
const NODE_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, 1);

/// Creates pod networks.
#[derive(Debug)]
pub(super) struct Network {
    /// Whether the kernel supports IPv6.
    pub(super) ipv6: bool,
    next: AtomicU32,
}

/// The network of a pod. The namespace exists as long as this value or a process in it.
#[derive(Debug)]
pub(super) struct PodNetwork {
    pub(super) v4: Ipv4Addr,
    pub(super) v6: Option<Ipv6Addr>,
    namespace: OwnedFd,
}

impl Network {
    /// Configures the node's side in the caller's namespace.
    pub(super) fn new() -> Result<Self> {
        let ipv6 = Path::new("/proc/sys/net/ipv6").exists()
            && run_with_input("ip6tables-restore", &["-w"], "*nat\nCOMMIT\n").is_ok();
        write_sysctl("net/ipv4/ip_forward", "1")?;
        if ipv6 {
            write_sysctl("net/ipv6/conf/all/forwarding", "1")?;
        }
        // Packets to cluster IPs need a route to reach the translation rules. Untranslated packets
        // are rejected.
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

    /// Creates the network of a new pod. Addresses are never reused.
    pub(super) async fn pod(&self) -> Result<PodNetwork> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let Ok(low) = u16::try_from(number) else {
            bail!("all 65,533 pod addresses of the sandbox are allocated: start a new sandbox")
        };
        let [high, low_byte] = low.to_be_bytes();
        let v4 = Ipv4Addr::new(10, 244, high, low_byte);
        let v6 = Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, low);
        let v6 = self.ipv6.then_some(v6);
        let namespace = on_own_thread("pod-network", move || create(number, v4, v6)).await?;
        Ok(PodNetwork { v4, v6, namespace })
    }
}

impl PodNetwork {
    /// The path of the network namespace for processes in the node's PID namespace.
    pub(super) fn path(&self) -> PathBuf {
        PathBuf::from(format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            self.namespace.as_raw_fd()
        ))
    }
}

/// Runs a function on a thread of its own, which may change its network namespace and is not reused.
pub(super) async fn on_own_thread<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = oneshot::channel();
    thread::Builder::new().name(name.into()).spawn(move || {
        // Fails if nobody waits any more. The result is dropped.
        let _ = sender.send(run());
    })?;
    let result = receiver.await;
    result.with_context(|| format!("the thread {name} panicked"))?
}

fn create(number: u32, v4: Ipv4Addr, v6: Option<Ipv6Addr>) -> Result<OwnedFd> {
    unshare(CloneFlags::CLONE_NEWNET).context("failed to create a network namespace")?;
    let namespace = OwnedFd::from(
        File::open("/proc/thread-self/ns/net")
            .context("failed to open the new network namespace")?,
    );
    // Container runtimes allow unprivileged processes to bind low ports too.
    write_sysctl("net/ipv4/ip_unprivileged_port_start", "0")?;
    ip(&pod_side(number, std::process::id(), v4, v6))?;
    // The node's side is configured in the node's namespace.
    let node_namespace = File::open(format!("/proc/{}/ns/net", std::process::id()))
        .context("failed to open the node's network namespace")?;
    nix::sched::setns(node_namespace, CloneFlags::CLONE_NEWNET)
        .context("failed to return to the node's network namespace")?;
    ip(&node_side(number, v4, v6))?;
    Ok(namespace)
}

/// The `ip -batch` commands for the pod's namespace. The veth peer is created in the node's
/// namespace.
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

/// The `ip -batch` commands for the node's namespace.
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

/// Runs `ip -batch` in the network namespace of the current thread.
fn ip(batch: &str) -> Result<()> {
    run_with_input("ip", &["-batch", "-"], batch)
}

/// Runs a program with the text as standard input. The error contains its standard error.
pub(super) fn run_with_input(program: &str, arguments: &[&str], input: &str) -> Result<()> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("failed to start {program}"))?;
    let mut stdin = child.stdin.take().expect("stdin is piped");
    // A program that fails early closes the pipe. Its standard error is more specific than the
    // broken pipe.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!(
            "{program} {} failed: {}; input:\n{input}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

fn write_sysctl(name: &str, value: &str) -> Result<()> {
    let path = Path::new("/proc/sys").join(name);
    fs::write(&path, value)
        .with_context(|| format!("failed to write {value} to {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generates_matching_commands_for_pod_and_node() {
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
