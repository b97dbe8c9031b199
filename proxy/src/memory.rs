//! The memory that connections may use: the limit of the container, divided into connections and
//! buffers.
//!
//! A task that runs may use more; what it holds while it waits is charged to the account of its
//! caller (`account.rs`). Under pressure, reads become small and large heads are rejected. When the
//! budget is exhausted, or the caller has its share of it, new work is rejected. Nothing here
//! allocates or frees these bytes.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

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

/// The memory for the connections of the proxy, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// The limit of the container, or a fraction of the machine's memory.
    limit: usize,
}

impl Memory {
    /// The memory of a container with this limit.
    pub fn new(limit: usize) -> Self {
        let limit = limit.max(MIN_LIMIT);
        Self { limit }
    }

    /// The configured limit, or that of the container, or a fraction of the machine's memory.
    pub fn detect(configured: Option<usize>) -> Self {
        let root = Path::new("/");
        let limit = configured.or_else(|| container_limit(root));
        Self::new(limit.unwrap_or_else(|| machine_memory(root) / MACHINE_FRACTION))
    }

    /// The limit.
    pub fn limit(self) -> usize {
        self.limit
    }

    /// The maximum number of connections: they use a quarter of the memory.
    pub fn max_connections(self) -> usize {
        self.limit / 4 / CONNECTION_COST
    }

    /// The maximum number of endpoints of all destinations: they use an eighth of the memory.
    pub fn max_endpoints(self, workers: usize) -> usize {
        self.limit / 8 / (ENDPOINT_COST.0 + ENDPOINT_COST.1 * workers)
    }

    /// The budget for the buffers of one direction in each of `workers` workers. Both directions
    /// together use half of the memory. The last eighth is for windows of connections to the
    /// application ([`Budgets`]), the program, the kernel and the fragmentation of the heap.
    pub fn buffers(self, workers: usize) -> usize {
        self.limit / 4 / workers.max(1)
    }
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

    const MIB: usize = 1024 * 1024;

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
    fn divides_the_limit() {
        let memory = Memory::new(256 * MIB);
        assert_eq!(memory.max_connections(), 16 * 1024);
        assert_eq!((memory.buffers(1), memory.buffers(4)), (64 * MIB, 16 * MIB));
        let endpoints = (memory.max_endpoints(1), memory.max_endpoints(4));
        assert_eq!(endpoints, (39_475, 15_252));
        assert_eq!(Memory::new(0).limit(), 32 * MIB);
    }
}
