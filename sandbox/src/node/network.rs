//! The pod network: a veth pair connects each pod's network namespace to the node's. Packets are
//! routed, not bridged, so that they pass the node's address translation in both directions, as
//! with kind's network plugin. All addresses are local to the sandbox's namespaces.

use std::{
    fs::{self, File},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    thread,
};

use anyhow::{Context, Result, bail};
use nix::sched::{CloneFlags, unshare};
use tokio::sync::oneshot;

use super::{
    links::{self, Route, all, host},
    services::RANGES,
};

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
        let ipv6 = Path::new("/proc/sys/net/ipv6").exists();
        write_sysctl("net/ipv4/ip_forward", "1")?;
        if ipv6 {
            write_sysctl("net/ipv6/conf/all/forwarding", "1")?;
        }
        links::set_up("lo")?;
        // Packets to cluster IPs need a route to reach the translation rules. Untranslated packets
        // are rejected.
        for to in RANGES
            .into_iter()
            .filter(|(address, _)| ipv6 || address.is_ipv4())
        {
            Route::new("lo", to).add()?;
        }
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
    // Each address of the pod with the address of the node.
    let mut addresses = vec![(IpAddr::from(v4), IpAddr::from(NODE_V4))];
    addresses.extend(v6.map(|v6| (v6.into(), NODE_V6.into())));
    let node_namespace = File::open(format!("/proc/{}/ns/net", std::process::id()))
        .context("failed to open the node's network namespace")?;
    unshare(CloneFlags::CLONE_NEWNET).context("failed to create a network namespace")?;
    let namespace = OwnedFd::from(
        File::open("/proc/thread-self/ns/net")
            .context("failed to open the new network namespace")?,
    );
    // Container runtimes allow unprivileged processes to bind low ports too.
    write_sysctl("net/ipv4/ip_unprivileged_port_start", "0")?;
    let node_link = format!("pod{number}");
    links::set_up("lo")?;
    links::add_pair("eth0", &node_link, &node_namespace)?;
    for (pod, node) in &addresses {
        links::add_address("eth0", *pod)?;
        links::set_up("eth0")?;
        Route::new("eth0", host(*node)).from(*pod).add()?;
        let default = Route::new("eth0", all(*node)).via(*node);
        default.from(*pod).add()?;
    }
    // The node's side is configured in the node's namespace.
    nix::sched::setns(node_namespace, CloneFlags::CLONE_NEWNET)
        .context("failed to return to the node's network namespace")?;
    links::set_up(&node_link)?;
    for (pod, node) in addresses {
        links::add_address(&node_link, node)?;
        Route::new(&node_link, host(pod)).from(node).add()?;
    }
    Ok(namespace)
}

fn write_sysctl(name: &str, value: &str) -> Result<()> {
    let path = Path::new("/proc/sys").join(name);
    fs::write(&path, value)
        .with_context(|| format!("failed to write {value} to {}", path.display()))
}
