//! A control group with a memory limit, for a program whose memory a test measures.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// A control group of version 1 or 2. It is removed when it is dropped, after its processes.
pub struct MemoryGroup {
    path: PathBuf,
    is_v1: bool,
}

impl MemoryGroup {
    /// A group with a limit in bytes. An error: this machine has no controller for memory that this
    /// process may use.
    pub fn new(limit: u64) -> Result<Self, String> {
        let root = PathBuf::from("/sys/fs/cgroup");
        let is_v1 = root.join("memory/memory.limit_in_bytes").exists();
        let name = format!("diy-mesh-{}-{limit}", std::process::id());
        let path = if is_v1 { root.join("memory") } else { root }.join(name);
        let group = Self { path, is_v1 };
        let file = if is_v1 {
            "memory.limit_in_bytes"
        } else {
            "memory.max"
        };
        let failed = |error| format!("cannot create a memory control group: {error}");
        fs::create_dir(&group.path).map_err(failed)?;
        fs::write(group.path.join(file), limit.to_string()).map_err(failed)?;
        Ok(group)
    }

    /// A command that starts a program in this group.
    pub fn command(&self, program: &str) -> Command {
        let procs = self.path.join("cgroup.procs");
        let join = format!("echo $$ > {} && exec \"$0\" \"$@\"", procs.display());
        let mut command = Command::new("/bin/sh");
        command.args(["-c", &join, program]);
        command
    }

    /// The largest memory so far, in bytes. Version 1 counts socket buffers apart.
    pub fn peak(&self) -> u64 {
        let read = |file: &str| -> u64 {
            let text = fs::read_to_string(self.path.join(file)).unwrap();
            text.trim().parse().unwrap()
        };
        if self.is_v1 {
            read("memory.max_usage_in_bytes") + read("memory.kmem.tcp.max_usage_in_bytes")
        } else {
            read("memory.peak")
        }
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}
