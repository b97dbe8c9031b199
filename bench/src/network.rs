//! The network namespaces of a run, and their removal: also of what an earlier run left behind.
//!
//! Each side has a pair of its own, so that all sides are up at the same time and can be measured in turns:
//!
//! ```text
//! dmb-SIDE-client 10.244.0.10 == eth0 = veth = eth0 == 10.244.0.20 dmb-SIDE-server
//!          10.255.0.N  ctl0 --- bridge in dmb-control, 10.255.0.1 --- ctl0  10.255.0.M
//! ```
//!
//! The names have a prefix of their own (in place of `dmb-` here), and only what has it is ever removed. Nothing changes in the machine's own namespace.

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

/// The client's pod IP.
pub const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 10);
/// The server's pod IP.
pub const SERVER: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 20);
/// The Service's cluster IP; nothing answers there, the client's proxy knows what is behind it.
pub const CLUSTER: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 80);
/// Where the controller listens, as the proxies see it.
pub const CONTROL: Ipv4Addr = Ipv4Addr::new(10, 255, 0, 1);

const MOUNTED: &str = "/run/netns";

/// Where namespaces are made and removed: all whose names have one prefix.
#[derive(Clone)]
pub struct Site {
    prefix: &'static str,
    closed: Arc<Mutex<bool>>,
}

impl Site {
    /// The benchmark's own.
    pub const BENCH: &str = "dmb-";

    /// Takes a prefix over, and removes what an earlier run left there. Only one at a time may use a prefix.
    pub fn clear(prefix: &'static str) -> Result<Self> {
        sweep(prefix).context("remove what an earlier run left")?;
        Ok(Site {
            prefix,
            closed: Arc::default(),
        })
    }

    /// Ends every process in the namespaces and removes them; no process starts there any more.
    pub fn close(&self) -> Result<()> {
        *self.closed.lock().expect("no holder of the lock panics") = true;
        sweep(self.prefix).context("clean up")
    }
}

/// A network namespace of this run.
#[derive(Clone)]
pub struct Namespace {
    name: String,
    site: Site,
}

impl Namespace {
    /// One with nothing but its loopback.
    pub fn alone(name: &str, site: &Site) -> Result<Self> {
        Self::make(name, site)
    }

    fn make(name: &str, site: &Site) -> Result<Self> {
        let name = format!("{}{name}", site.prefix);
        ip(&["netns", "add", &name])?;
        ip(&["-n", &name, "link", "set", "lo", "up"])?;
        Ok(Namespace {
            name,
            site: site.clone(),
        })
    }

    /// What `ip netns` calls it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs `work` on a thread inside; threads that it starts are inside too.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                let path = Path::new(MOUNTED).join(&self.name);
                let file = File::open(&path).with_context(|| format!("open {}", path.display()))?;
                setns(file, CloneFlags::CLONE_NEWNET)
                    .with_context(|| format!("enter {}", self.name))?;
                work()
            });
            inside
                .join()
                .unwrap_or_else(|_| bail!("the work in {} panicked", self.name))
        })
    }

    /// Starts a process inside.
    pub fn spawn(&self, command: &mut Command) -> Result<Child> {
        self.enter(|| {
            let closed = self
                .site
                .closed
                .lock()
                .expect("no holder of the lock panics");
            ensure!(!*closed, "the run is being stopped");
            command
                .spawn()
                .with_context(|| format!("start {}", command.get_program().display()))
        })
    }
}

/// A client and a server, wired.
pub struct Pair {
    /// Where the load comes from.
    pub client: Namespace,
    /// Where the server answers.
    pub server: Namespace,
}

impl Pair {
    /// Makes both and the wire between them.
    pub fn make(side: &str, site: &Site) -> Result<Self> {
        let client = Namespace::make(&format!("{side}-client"), site)?;
        let server = Namespace::make(&format!("{side}-server"), site)?;
        wire((&client, "eth0", CLIENT), (&server, "eth0", SERVER))?;
        // The cluster IP needs a route before the redirect rules see the packet.
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
                tune();
                Ok(())
            })?;
        }
        Ok(Pair { client, server })
    }
}

/// The namespace of the controller, with a bridge that pods are plugged into.
pub struct ControlNetwork {
    /// Where the controller runs.
    pub namespace: Namespace,
    plugged: u8,
}

impl ControlNetwork {
    /// Makes it, with nothing plugged in.
    pub fn make(site: &Site) -> Result<Self> {
        let namespace = Namespace::make("control", site)?;
        let name = namespace.name();
        // An address of its own: it would take over the lowest of its ports', and change under those who have resolved it.
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
            plugged: 0,
        })
    }

    /// Gives a pod's namespace a second link, to here.
    pub fn plug(&mut self, pod: &Namespace) -> Result<()> {
        let port = format!("port{}", self.plugged);
        let address = Ipv4Addr::new(10, 255, 0, 10 + self.plugged);
        self.plugged += 1;
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

fn sweep(prefix: &str) -> Result<()> {
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
            "processes {left:?} in the benchmark's namespaces do not end"
        );
        for process in left {
            // It may have ended by itself since.
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
    if !Path::new(MOUNTED).exists() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(MOUNTED).with_context(|| format!("list {MOUNTED}"))?;
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    Ok(paths
        .filter(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(prefix))
        })
        .collect())
}

/// Those that can still run: one that has ended and waits for its parent counts as gone.
fn processes_in(inodes: &HashSet<u64>) -> Result<Vec<Pid>> {
    let entries = fs::read_dir("/proc").context("list /proc")?;
    let inside = |pid: &i32| {
        fs::metadata(format!("/proc/{pid}/ns/net"))
            .is_ok_and(|namespace| inodes.contains(&namespace.ino()))
    };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    Ok(pids.filter(inside).map(Pid::from_raw).collect())
}

fn wire(left: (&Namespace, &str, Ipv4Addr), right: (&Namespace, &str, Ipv4Addr)) -> Result<()> {
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

/// Room for tens of thousands of short connections a second: ports, and no minutes of remembrance. A kernel without one of these
/// settings goes without.
fn tune() {
    for (name, value) in [
        // The kernel's own default, whatever the machine prefers: pacing would blur what the proxies cost.
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
    let problem = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "ip {}: {}",
        arguments.join(" "),
        problem.trim()
    );
    Ok(())
}
