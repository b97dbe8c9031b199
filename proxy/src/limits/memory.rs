//! The memory that connections may use: the limit of the container, divided into connections and
//! the bytes that they hold, and who uses both. It is read every few seconds.
//!
//! A task that runs may use more; what it holds while it waits is charged to its connection, by the
//! rule of `crates/runtime/src/admission.rs`. Under pressure, reads become small. Nothing here
//! allocates or frees these bytes.
//!
//! Each worker has its own connections and bytes: threads share nothing.

use std::cell::Cell;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use diy_mesh_model::identity::Identity;
use diy_mesh_runtime::admission;

use crate::error::Failure;

/// The budget of a machine without a limit is this fraction of its memory.
const MACHINE_FRACTION: usize = 8;
/// The smallest limit that is divided.
const MIN_LIMIT: usize = 32 * 1024 * 1024;
/// The memory of a connection to the proxy and of its connection to the upstream, without buffers.
const CONNECTION_COST: usize = 4 * 1024;
/// The memory of an endpoint: what discovery knows of it, and its state in each worker.
const ENDPOINT_COST: (usize, usize) = (400, 450);
/// The memory of a connection whose protocol is unknown: the first bytes, or a TLS handshake.
pub const PENDING_COST: usize = 8 * 1024;
/// The size of reads under pressure.
const SMALL_READ: usize = 4 * 1024;

/// The failure of work for which no memory is left.
pub const EXHAUSTED: Failure =
    Failure::Overloaded("the memory is in use, and this caller uses more than its share");

thread_local! {
    /// Whether the memory of this worker is under pressure.
    static UNDER_PRESSURE: Cell<bool> = const { Cell::new(false) };
}

/// How often unused memory is returned to the kernel.
const RELEASE_INTERVAL: Duration = Duration::from_secs(1);
/// How often it is returned between two times that the limit is read: the limit changes when the pod
/// is resized in place.
const RELEASES_PER_READ: u32 = 5;

/// The memory for the connections of the proxy, in bytes: the limit of the container, or a fraction
/// of the machine's memory. A handle, because the limit changes.
#[derive(Clone, Debug)]
pub struct Memory(Arc<AtomicUsize>);

impl Memory {
    /// The memory of a container with this limit.
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(limit.into()))
    }

    /// The configured limit, or the limit of the container, or a fraction of the machine's memory.
    pub fn detect(configured: Option<usize>) -> Self {
        Self::new(configured.unwrap_or_else(|| detect(Path::new("/"))))
    }

    /// Returns unused memory to the kernel, and follows the limit of the container unless one is
    /// configured.
    pub async fn maintain(self, configured: Option<usize>) {
        loop {
            for _ in 0..RELEASES_PER_READ {
                tokio::time::sleep(RELEASE_INTERVAL).await;
                diy_mesh_allocator::release_unused();
            }
            if configured.is_none() {
                self.read(Path::new("/"));
            }
        }
    }

    /// Changes the limit.
    #[cfg(test)]
    pub fn set(&self, limit: usize) {
        self.0.store(limit, Relaxed);
    }

    fn read(&self, root: &Path) {
        let limit = detect(root);
        let before = self.0.swap(limit, Relaxed);
        if before != limit {
            tracing::info!(
                before,
                limit,
                "the memory limit of the container has changed"
            );
        }
    }

    /// The limit.
    pub fn limit(&self) -> usize {
        self.0.load(Relaxed)
    }

    /// The maximum number of connections: they use a quarter of the memory.
    pub fn max_connections(&self) -> usize {
        self.limit() / 4 / CONNECTION_COST
    }

    /// The maximum number of endpoints of all destinations: they use an eighth of the memory.
    pub fn max_endpoints(&self, workers: usize) -> usize {
        self.limit() / 8 / (ENDPOINT_COST.0 + ENDPOINT_COST.1 * workers)
    }

    /// The bytes that the connections of each of `workers` workers may hold. Together, they use an
    /// eighth of the memory: tasks, the allocator and the kernel add more. The rest is for the program.
    pub fn bytes(&self, workers: usize) -> usize {
        self.limit() / 8 / workers.max(1)
    }
}

fn detect(root: &Path) -> usize {
    let limit = container_limit(root);
    let limit = limit.unwrap_or_else(|| machine_memory(root) / MACHINE_FRACTION);
    limit.max(MIN_LIMIT)
}

/// The smallest memory limit of the control groups of this process, in version 1 and 2, or `None`
/// without a limit.
fn container_limit(root: &Path) -> Option<usize> {
    let groups = std::fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let limits = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, group) = (fields.next()?, fields.next()?);
        let (mount, file) = if controllers.is_empty() {
            ("sys/fs/cgroup", "memory.max")
        } else if controllers.split(',').any(|name| name == "memory") {
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
        } else {
            return None;
        };
        // A container sees only its own part of the hierarchy, or the path on the host.
        let group = Path::new(group.trim_start_matches('/'));
        let read = |group: &Path| read_bytes(root.join(mount).join(group).join(file));
        group.ancestors().filter_map(read).min()
    });
    // Version 1 has a very large number in place of no limit.
    limits.min().filter(|limit| *limit < machine_memory(root))
}

fn read_bytes(path: PathBuf) -> Option<usize> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The memory of the machine.
fn machine_memory(root: &Path) -> usize {
    let info = std::fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let total = info.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kibibytes = total.and_then(|total| total.trim().strip_suffix("kB")?.trim().parse().ok());
    kibibytes.map_or(usize::MAX, |kibibytes: usize| {
        kibibytes.saturating_mul(1024)
    })
}

/// The slot of a connection at its worker, and the bytes that it holds.
pub type ConnectionSlot = admission::Slot<Holder>;

/// Who uses slots and bytes. Addresses are [`admission::network`]s.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Holder {
    /// The pod's own application. Only it uses the outbound path.
    App,
    /// All clients of the application: they share half.
    Clients,
    /// A workload of the mesh.
    Peer(Arc<Identity>),
    /// A client without mutual TLS.
    Plaintext(IpAddr),
    /// A client that has not authenticated, and whose protocol is unknown.
    Pending(IpAddr),
    /// All workloads of a namespace, with the trust domain: a tenant creates service accounts at will.
    Namespace(Rc<str>),
    /// All clients without mutual TLS: a client with many addresses is one holder.
    AllPlaintext,
    /// All clients whose protocol is unknown.
    AllPending,
}

impl Holder {
    /// The holders of a connection, from the largest group on.
    pub fn path(self) -> Vec<Self> {
        let group = match &self {
            Self::Peer(identity) => {
                let namespace = format!("{}/{}", identity.trust_domain(), identity.namespace());
                Self::Namespace(namespace.into())
            }
            Self::Plaintext(_) => Self::AllPlaintext,
            Self::Pending(_) => Self::AllPending,
            _ => return vec![self],
        };
        vec![Self::Clients, group, self]
    }
}

/// Bytes that a task holds for a connection while it waits, released on drop.
#[derive(Debug)]
pub struct Charge {
    slot: Rc<ConnectionSlot>,
    amount: usize,
}

impl Charge {
    /// A charge of nothing.
    pub fn new(slot: Rc<ConnectionSlot>) -> Self {
        Self { slot, amount: 0 }
    }

    /// The connection.
    pub fn slot(&self) -> &Rc<ConnectionSlot> {
        &self.slot
    }

    /// Changes the charge for new work. Fails, and changes nothing, if it grows and the holder has to
    /// give way.
    pub fn begin(&mut self, amount: usize) -> Result<(), Failure> {
        self.change(amount, ConnectionSlot::begin)
    }

    /// As [`Charge::begin`], for work in progress, which grows as its peers send.
    pub fn hold(&mut self, amount: usize) -> Result<(), Failure> {
        self.change(amount, ConnectionSlot::hold)
    }

    /// Increases the charge to `amount` for what the holder can do without, unless memory is short.
    pub fn try_grow(&mut self, amount: usize) -> bool {
        let more = amount.max(self.amount);
        self.change(more, ConnectionSlot::try_hold).is_ok()
    }

    fn change(
        &mut self,
        amount: usize,
        hold: impl Fn(&ConnectionSlot, usize, usize) -> bool,
    ) -> Result<(), Failure> {
        if amount == self.amount {
            return Ok(());
        }
        let is_held = hold(&self.slot, self.amount, amount);
        if is_held {
            self.amount = amount;
        }
        UNDER_PRESSURE.set(self.slot.is_under_pressure());
        if is_held { Ok(()) } else { Err(EXHAUSTED) }
    }

    /// The charged bytes.
    pub fn amount(&self) -> usize {
        self.amount
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        // Never fails: it does not grow.
        let _ = self.hold(0);
    }
}

/// Whether three quarters of the memory of this worker are in use.
pub fn is_under_pressure() -> bool {
    UNDER_PRESSURE.get()
}

/// The size of one read, or of output that waits: small under pressure.
pub fn max_read(usual: usize) -> usize {
    if is_under_pressure() {
        SMALL_READ.min(usual)
    } else {
        usual
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    const MIB: usize = 1024 * 1024;

    impl Memory {
        /// The memory of which each of `workers` workers has `bytes` for what connections hold.
        pub fn of_bytes(bytes: usize, workers: usize) -> Self {
            Self::new(bytes * workers * 8)
        }
    }

    /// A root directory with these files, on a machine of 8 GiB.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let meminfo = (
            "proc/meminfo",
            "MemTotal:        8388608 kB\nMemFree: 1 kB\n",
        );
        for (path, content) in files.iter().chain([&meminfo]) {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        root
    }

    #[test]
    fn finds_the_limit_of_the_container() {
        let v2 = ("proc/self/cgroup", "0::/\n");
        let nested = ("proc/self/cgroup", "0::/kubepods/pod1/proxy\n");
        let v1 = ("proc/self/cgroup", "5:cpu:/a\n4:memory:/kubepods/a\n0::/\n");
        for (files, expected) in [
            (
                &[v2, ("sys/fs/cgroup/memory.max", "268435456\n")][..],
                Some(256 * MIB),
            ),
            (&[v2, ("sys/fs/cgroup/memory.max", "max\n")], None),
            (
                &[
                    nested,
                    ("sys/fs/cgroup/kubepods/pod1/proxy/memory.max", "max\n"),
                    ("sys/fs/cgroup/kubepods/pod1/memory.max", "134217728\n"),
                    ("sys/fs/cgroup/kubepods/memory.max", "268435456\n"),
                ],
                Some(128 * MIB),
            ),
            (
                &[
                    v1,
                    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "268435456\n"),
                ],
                Some(256 * MIB),
            ),
            (
                &[
                    v1,
                    (
                        "sys/fs/cgroup/memory/memory.limit_in_bytes",
                        "9223372036854771712\n",
                    ),
                ],
                None,
            ),
            (&[], None),
        ] {
            assert_eq!(container_limit(root(files).path()), expected, "{files:?}");
        }
        assert_eq!(machine_memory(root(&[]).path()), 8192 * MIB);
    }

    #[test]
    fn follows_the_limit_of_the_container() {
        let v2 = |limit| {
            let files = [
                ("proc/self/cgroup", "0::/\n"),
                ("sys/fs/cgroup/memory.max", limit),
            ];
            root(&files)
        };
        let memory = Memory::new(detect(v2("268435456\n").path()));
        let admission = admission::Admission::new(10);
        let resize = || admission.resize(10, memory.bytes(1));
        resize();
        let slot = admission.admit(&Holder::App.path()).unwrap();
        let mut charge = Charge::new(Rc::new(slot));
        charge.hold(6 * MIB).unwrap();
        assert!(!is_under_pressure());
        for (limit, expected) in [
            ("67108864\n", 64),
            ("536870912\n", 512),
            ("max", 1024),
            ("67108864\n", 64),
        ] {
            memory.read(v2(limit).path());
            assert_eq!(memory.limit(), expected * MIB, "{limit}");
            resize();
            assert_eq!(admission.max_bytes(), expected * MIB / 64 * 7);
            // With the next charge.
            Charge::new(charge.slot().clone()).hold(1).unwrap();
            assert_eq!(is_under_pressure(), expected < 100);
            assert_eq!(max_read(100_000) < 100_000, expected < 100);
        }
        // A connection that uses more than all ends.
        memory.read(v2("1\n").path());
        resize();
        assert!(memory.limit() == 32 * MIB && charge.slot().is_ended());
    }

    #[test]
    fn divides_the_limit() {
        let memory = Memory::new(256 * MIB);
        assert_eq!(memory.max_connections(), 16 * 1024);
        assert_eq!((memory.bytes(1), memory.bytes(4)), (32 * MIB, 8 * MIB));
        let endpoints = (memory.max_endpoints(1), memory.max_endpoints(4));
        assert_eq!(endpoints, (39_475, 15_252));
    }
}
