//! The memory that connections may use: the limit of the container, divided into connections and
//! buffers. It is read every few seconds.
//!
//! A task that runs may use more; what it holds while it waits is charged to the account of its
//! caller (`account.rs`). Under pressure, reads become small and large heads are rejected. When the
//! budget is exhausted, or the caller has its share of it, new work is rejected. Nothing here
//! allocates or frees these bytes.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::account::Budget;

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

thread_local! {
    /// Budgets of this thread that are under pressure.
    static UNDER_PRESSURE: Cell<usize> = const { Cell::new(0) };
}

/// How often unused memory is returned to the kernel, and the limit is read: it changes when the pod
/// is resized in place.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(5);

/// The memory for the connections of the proxy, in bytes: the limit of the container, or a fraction
/// of the machine's memory. A handle, because the limit changes.
#[derive(Clone, Debug)]
pub struct Memory(Arc<AtomicUsize>);

impl Memory {
    /// The memory of a container with this limit.
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(limit.into()))
    }

    /// The configured limit, or that of the container, or a fraction of the machine's memory.
    pub fn detect(configured: Option<usize>) -> Self {
        Self::new(configured.unwrap_or_else(|| detect(Path::new("/"))))
    }

    /// Returns unused memory to the kernel, and follows the limit of the container unless one is
    /// configured.
    pub async fn maintain(self, configured: Option<usize>) {
        loop {
            tokio::time::sleep(MAINTENANCE_INTERVAL).await;
            diy_mesh_allocator::release_unused();
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

    /// The budget for the buffers of one direction in each of `workers` workers. Both directions
    /// together use half of the memory. The last eighth is for windows of connections to the
    /// application ([`Budgets`]), the program, the kernel and the fragmentation of the heap.
    pub fn buffers(&self, workers: usize) -> usize {
        self.limit() / 4 / workers.max(1)
    }
}

fn detect(root: &Path) -> usize {
    let limit = container_limit(root);
    let limit = limit.unwrap_or_else(|| machine_memory(root) / MACHINE_FRACTION);
    limit.max(MIN_LIMIT)
}

/// The smallest memory limit of the control groups of this process, in version 1 and 2. None
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

/// The budgets of one worker and direction.
#[derive(Debug)]
pub struct Budgets {
    /// For buffers.
    pub buffers: Rc<Budget>,
    /// For flow-control windows of HTTP/2 connections beyond the first stream's. Separate: a window
    /// that is granted may stay unused.
    pub windows: Rc<Budget>,
    /// For those of HTTP/2 connections to the application, by the callers of the requests on them.
    pub app_windows: Rc<Budget>,
}

impl Budgets {
    /// Divides `bytes` bytes.
    pub fn new(bytes: usize) -> Self {
        Self {
            buffers: Budget::bytes(bytes / 4 * 3),
            windows: Budget::bytes(bytes / 4),
            app_windows: Budget::bytes(bytes / 4),
        }
    }

    /// Divides another number of bytes.
    pub fn resize(&self, bytes: usize) {
        self.buffers.resize(bytes / 4 * 3);
        self.windows.resize(bytes / 4);
        self.app_windows.resize(bytes / 4);
    }
}

/// Counts a budget of this thread whose pressure begins (1) or ends (-1).
pub(crate) fn count_pressure(change: isize) {
    UNDER_PRESSURE.set(UNDER_PRESSURE.get().saturating_add_signed(change));
}

/// The size of one read: small while a budget of this thread is under pressure.
pub fn max_read(usual: usize) -> usize {
    if UNDER_PRESSURE.get() > 0 {
        SMALL_READ.min(usual)
    } else {
        usual
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::account::{Charge, Holder};

    const MIB: usize = 1024 * 1024;

    impl Memory {
        /// The memory of which each direction of each of `workers` workers has `bytes` for buffers.
        pub fn of_buffers(bytes: usize, workers: usize) -> Self {
            Self::new(4 * bytes * workers)
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
        let budgets = Budgets::new(memory.buffers(1));
        let mut charge = Charge::new(budgets.buffers.account(Holder::App));
        charge.set(20 * MIB);
        assert!(!budgets.buffers.is_under_pressure());
        for (limit, expected) in [
            ("67108864\n", 64),
            ("1\n", 32),
            ("536870912\n", 512),
            ("max", 1024),
        ] {
            memory.read(v2(limit).path());
            assert_eq!(memory.limit(), expected * MIB, "{limit}");
            budgets.resize(memory.buffers(1));
            assert_eq!(budgets.buffers.limit(), expected * MIB / 16 * 3);
            assert_eq!(budgets.buffers.is_under_pressure(), expected < 100);
            assert_eq!(max_read(100_000) < 100_000, expected < 100);
        }
    }

    #[test]
    fn divides_the_limit() {
        let memory = Memory::new(256 * MIB);
        assert_eq!(memory.max_connections(), 16 * 1024);
        assert_eq!((memory.buffers(1), memory.buffers(4)), (64 * MIB, 16 * MIB));
        let endpoints = (memory.max_endpoints(1), memory.max_endpoints(4));
        assert_eq!(endpoints, (39_475, 15_252));
    }
}
