//! Network namespaces of a run, and their removal, including the namespaces of an earlier run.
//!
//! Each side has its own pair, so that all sides run at the same time:
//!
//! ```text
//! dmb-SIDE-client 10.244.0.10 == eth0 = veth = eth0 == 10.244.0.20 dmb-SIDE-server
//!          10.255.0.N  ctl0 --- bridge in dmb-control, 10.255.0.1 --- ctl0  10.255.0.M
//! ```
//!
//! The names have a prefix (here `dmb-`). Only namespaces with this prefix are removed. The root
//! namespace is not modified.

use std::{
    collections::HashSet,
    fs::{self, File},
    net::Ipv4Addr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Child, Command},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    sched::{CloneFlags, setns},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// Pod IP of the client.
pub const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 10);
/// Pod IP of the server.
pub const SERVER: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 20);
/// IP of the server as an endpoint without a proxy.
pub const PLAIN_SERVER: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 21);
/// Cluster IP of the Service. Only the client's proxy resolves it.
pub const CLUSTER: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 80);
/// Cluster IP of the Service with [`PLAIN_SERVER`].
pub const PLAIN_CLUSTER: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 81);
/// IP of the controller for the proxies.
pub const CONTROL: Ipv4Addr = Ipv4Addr::new(10, 255, 0, 1);

const NETNS_DIRECTORY: &str = "/run/netns";

/// The network namespaces with one name prefix.
#[derive(Clone)]
pub struct NamespaceSet {
    prefix: &'static str,
    closed: Arc<Mutex<bool>>,
}

impl NamespaceSet {
    /// Prefix of the benchmark.
    pub const BENCH: &str = "dmb-";

    /// Removes the namespaces of an earlier run. Only one process may use a prefix at a time.
    pub fn clear(prefix: &'static str) -> Result<Self> {
        remove_namespaces(prefix).context("remove the namespaces of an earlier run")?;
        Ok(NamespaceSet {
            prefix,
            closed: Arc::default(),
        })
    }

    /// Kills all processes in the namespaces and removes them. No process can start there
    /// afterwards.
    pub fn close(&self) -> Result<()> {
        *self.closed.lock().expect("no holder of the lock panics") = true;
        remove_namespaces(self.prefix).context("clean up")
    }
}

/// A network namespace of this run.
#[derive(Clone)]
pub struct Namespace {
    name: String,
    namespaces: NamespaceSet,
}

impl Namespace {
    /// Creates a namespace that has only a loopback interface.
    pub fn create(name: &str, namespaces: &NamespaceSet) -> Result<Self> {
        let name = format!("{}{name}", namespaces.prefix);
        ip(&["netns", "add", &name])?;
        ip(&["-n", &name, "link", "set", "lo", "up"])?;
        Ok(Namespace {
            name,
            namespaces: namespaces.clone(),
        })
    }

    /// Name for `ip netns`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs `work` on a thread in the namespace; its child threads inherit the namespace.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                let path = Path::new(NETNS_DIRECTORY).join(&self.name);
                let file = File::open(&path).with_context(|| format!("open {}", path.display()))?;
                setns(file, CloneFlags::CLONE_NEWNET)
                    .with_context(|| format!("enter {}", self.name))?;
                work()
            });
            inside
                .join()
                .unwrap_or_else(|_| bail!("a thread in {} panicked", self.name))
        })
    }

    /// Starts a process in the namespace.
    pub fn spawn(&self, command: &mut Command) -> Result<Child> {
        self.enter(|| {
            let closed = self
                .namespaces
                .closed
                .lock()
                .expect("no holder of the lock panics");
            ensure!(!*closed, "the run is stopping");
            command
                .spawn()
                .with_context(|| format!("start {}", command.get_program().display()))
        })
    }
}

/// Connected namespaces of a client and a server.
pub struct Pair {
    /// Namespace of the load generator.
    pub client: Namespace,
    /// Namespace of the origin server.
    pub server: Namespace,
}

impl Pair {
    /// Creates both namespaces and a veth pair between them.
    pub fn create(side: &str, namespaces: &NamespaceSet) -> Result<Self> {
        let client = Namespace::create(&format!("{side}-client"), namespaces)?;
        let server = Namespace::create(&format!("{side}-server"), namespaces)?;
        create_veth((&client, "eth0", CLIENT), (&server, "eth0", SERVER))?;
        let plain = format!("{PLAIN_SERVER}/24");
        let (name, add) = (server.name(), ["address", "add", &plain, "dev", "eth0"]);
        ip(&[&["-n", name], &add[..]].concat())?;
        // Without a route to the cluster IP, the packet never reaches the redirect rules.
        ip(&[
            "-n",
            client.name(),
            "route",
            "add",
            "default",
            "via",
            &SERVER.to_string(),
        ])?;
        for namespace in [&client, &server] {
            namespace.enter(|| {
                set_sysctls();
                Ok(())
            })?;
        }
        Ok(Pair { client, server })
    }
}

/// Namespace of the controller, with a bridge to the pods.
pub struct ControlNetwork {
    /// Namespace of the controller.
    pub namespace: Namespace,
    ports: u8,
}

impl ControlNetwork {
    /// Creates the namespace and its bridge.
    pub fn create(name: &str, namespaces: &NamespaceSet) -> Result<Self> {
        let namespace = Namespace::create(name, namespaces)?;
        let name = namespace.name();
        // A fixed MAC address: by default the bridge takes the lowest of its ports, which
        // invalidates ARP entries.
        ip(&[
            "-n",
            name,
            "link",
            "add",
            "br0",
            "address",
            "02:00:00:00:00:01",
            "type",
            "bridge",
        ])?;
        ip(&[
            "-n",
            name,
            "address",
            "add",
            &format!("{CONTROL}/24"),
            "dev",
            "br0",
        ])?;
        ip(&["-n", name, "link", "set", "br0", "up"])?;
        Ok(ControlNetwork {
            namespace,
            ports: 0,
        })
    }

    /// Connects a pod's namespace to the bridge.
    pub fn connect(&mut self, pod: &Namespace) -> Result<()> {
        let port = format!("port{}", self.ports);
        let address = Ipv4Addr::new(10, 255, 0, 10 + self.ports);
        self.ports += 1;
        let control = self.namespace.name();
        ip(&[
            "link",
            "add",
            "ctl0",
            "netns",
            pod.name(),
            "type",
            "veth",
            "peer",
            "name",
            &port,
            "netns",
            control,
        ])?;
        ip(&["-n", control, "link", "set", &port, "master", "br0", "up"])?;
        ip(&[
            "-n",
            pod.name(),
            "address",
            "add",
            &format!("{address}/24"),
            "dev",
            "ctl0",
        ])?;
        ip(&["-n", pod.name(), "link", "set", "ctl0", "up"])
    }
}

fn remove_namespaces(prefix: &str) -> Result<()> {
    let ours = ours(prefix)?;
    let inodes: HashSet<u64> = ours
        .iter()
        .filter_map(|path| fs::metadata(path).ok())
        .map(|metadata| metadata.ino())
        .collect();
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let left = processes_in(&inodes)?;
        if left.is_empty() {
            break;
        }
        ensure!(
            Instant::now() < deadline,
            "cannot kill processes {left:?} in the benchmark namespaces"
        );
        for process in left {
            // The process may have exited already.
            let _ = kill(process, Signal::SIGKILL);
        }
        thread::sleep(Duration::from_millis(5));
    }
    for path in ours {
        if let Some(name) = path.file_name().and_then(|name| name.to_str()) {
            ip(&["netns", "delete", name])?;
        }
    }
    Ok(())
}

fn ours(prefix: &str) -> Result<Vec<PathBuf>> {
    if !Path::new(NETNS_DIRECTORY).exists() {
        return Ok(Vec::new());
    }
    let entries =
        fs::read_dir(NETNS_DIRECTORY).with_context(|| format!("list {NETNS_DIRECTORY}"))?;
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    Ok(paths
        .filter(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(prefix))
        })
        .collect())
}

/// Live processes in the namespaces; zombies have no namespace.
fn processes_in(inodes: &HashSet<u64>) -> Result<Vec<Pid>> {
    let entries = fs::read_dir("/proc").context("list /proc")?;
    let inside = |pid: &i32| {
        fs::metadata(format!("/proc/{pid}/ns/net"))
            .is_ok_and(|namespace| inodes.contains(&namespace.ino()))
    };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    Ok(pids.filter(inside).map(Pid::from_raw).collect())
}

fn create_veth(
    left: (&Namespace, &str, Ipv4Addr),
    right: (&Namespace, &str, Ipv4Addr),
) -> Result<()> {
    ip(&[
        "link",
        "add",
        left.1,
        "netns",
        left.0.name(),
        "type",
        "veth",
        "peer",
        "name",
        right.1,
        "netns",
        right.0.name(),
    ])?;
    for (namespace, device, address) in [left, right] {
        ip(&[
            "-n",
            namespace.name(),
            "address",
            "add",
            &format!("{address}/24"),
            "dev",
            device,
        ])?;
        ip(&["-n", namespace.name(), "link", "set", device, "up"])?;
    }
    Ok(())
}

/// Sets kernel parameters for tens of thousands of short connections per second. Ignores parameters
/// that the kernel does not have.
fn set_sysctls() {
    for (name, value) in [
        // The kernel default: an algorithm with pacing would distort the results.
        ("ipv4/tcp_congestion_control", "cubic"),
        ("ipv4/ip_local_port_range", "1024 65535"),
        ("ipv4/tcp_tw_reuse", "1"),
        ("ipv4/tcp_max_tw_buckets", "262144"),
        ("netfilter/nf_conntrack_tcp_timeout_time_wait", "1"),
        ("netfilter/nf_conntrack_tcp_timeout_close", "1"),
    ] {
        let _ = fs::write(format!("/proc/sys/net/{name}"), value);
    }
}

fn ip(arguments: &[&str]) -> Result<()> {
    let output = Command::new("ip")
        .args(arguments)
        .output()
        .context("run ip (Debian package iproute2)")?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "ip {}: {}",
        arguments.join(" "),
        error.trim()
    );
    Ok(())
}
