//! Cleanup of sandboxes after any kind of exit, and their isolation from each other.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use diy_mesh_testkit::process::{Process, Signal};
use diy_mesh_tests::sandbox::{READY_TIMEOUT, empty, programs, shell, single_pod};
use nix::{sys::signal::kill, unistd::Pid};

#[test]
fn sigkill_of_demo_leaves_no_traces() {
    if empty().is_none() {
        return;
    }
    assert_eq!(traces(), [""; 0], "traces of another sandbox");
    let mut mesh = Command::new(programs().join("mesh"));
    let mut demo = Process::with_stdout(mesh.args(["demo", "--for", "600"]));
    demo.wait_for("everything is ready after");
    assert_eq!(traces(), [""; 0], "a running sandbox has no traces outside");
    let inside = descendants(demo.id());
    assert!(inside.len() >= 19, "the processes of ten pods: {inside:?}");

    demo.signal(Signal::SIGKILL);
    demo.exit();
    wait_until_gone(&inside);
    assert_eq!(traces(), [""; 0]);
}

#[test]
fn demo_ends_without_error_when_nobody_reads_its_output() {
    if empty().is_none() {
        return;
    }
    for arguments in [&["--for", "600"][..], &["--for", "1", "--quiet"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut demo = Command::new(programs().join("mesh"));
        let demo = demo.arg("demo").args(arguments).stdout(writer).output();
        let demo = demo.unwrap();
        let stderr = String::from_utf8_lossy(&demo.stderr);
        assert_eq!((demo.status.code(), &*stderr), (Some(0), ""));
    }
}

#[test]
fn full_disk_is_reported_as_an_error_of_standard_output() {
    let mut mesh = Command::new(programs().join("mesh"));
    let full = fs::File::create("/dev/full").unwrap();
    let version = mesh.arg("version").stdout(full).output().unwrap();
    let expected =
        "mesh: failed to write to standard output: No space left on device (os error 28)\n";
    assert_eq!(String::from_utf8_lossy(&version.stderr), expected);
    assert_eq!(version.status.code(), Some(1));
}

#[test]
fn drop_stops_only_its_own_sandbox() {
    let (Some(one), Some(two)) = (empty(), empty()) else {
        return;
    };
    for sandbox in [&one, &two] {
        sandbox.apply(&shell("")).unwrap();
        sandbox.wait_settled(READY_TIMEOUT).unwrap();
    }
    let inside = descendants(one.process_id());
    assert!(!inside.is_empty());
    drop(one);
    wait_until_gone(&inside);
    let pod = single_pod(&two, "clients", "shell");
    assert_eq!(
        two.exec(&pod, "shell", &["echo", "still here"])
            .unwrap()
            .stdout,
        "still here\n"
    );
}

#[test]
fn sigkill_of_process_1_stops_sandbox() {
    let Some(sandbox) = empty() else { return };
    sandbox.apply(&shell("")).unwrap();
    sandbox.wait_settled(READY_TIMEOUT).unwrap();
    let inside = descendants(sandbox.process_id());
    kill(
        Pid::from_raw(sandbox.process_id().cast_signed()),
        Signal::SIGKILL,
    )
    .unwrap();
    wait_until_gone(&inside);
    assert!(
        sandbox
            .apply(&shell(""))
            .unwrap_err()
            .to_string()
            .starts_with("the sandbox has exited")
    );
}

/// Traces of sandboxes in the root namespaces: interfaces, directories and mounts.
fn traces() -> Vec<String> {
    let interfaces = fs::read_dir("/sys/class/net")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut traces: Vec<String> = interfaces
        .filter(|name| {
            name.strip_prefix("pod")
                .is_some_and(|rest| rest.parse::<u16>().is_ok())
        })
        .collect();
    let mounts = fs::read_to_string("/proc/self/mounts").expect("/proc is readable");
    traces.extend(
        mounts
            .lines()
            .filter(|line| line.contains("/run/mesh"))
            .map(str::to_owned),
    );
    traces.extend(
        Path::new("/run/mesh")
            .exists()
            .then(|| "/run/mesh".to_owned()),
    );
    traces
}

/// Process IDs and start times, which together identify processes.
fn descendants(root: u32) -> BTreeSet<(u32, String)> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir("/proc").expect("/proc is readable").flatten() {
        if let Some((pid, parent, start)) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
            .and_then(stat)
        {
            all.insert(pid, (parent, start));
        }
    }
    let mut found = BTreeSet::from([root]);
    loop {
        let more: BTreeSet<u32> = all
            .iter()
            .filter(|(pid, (parent, _))| found.contains(parent) && !found.contains(pid))
            .map(|(&pid, _)| pid)
            .collect();
        if more.is_empty() {
            break;
        }
        found.extend(more);
    }
    found.remove(&root);
    found
        .into_iter()
        .map(|pid| (pid, all[&pid].1.clone()))
        .collect()
}

/// Parent and start time of a process.
fn stat(pid: u32) -> Option<(u32, u32, String)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain any character.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    Some((
        pid,
        fields.get(1)?.parse().ok()?,
        (*fields.get(19)?).to_owned(),
    ))
}

/// Waits until all processes have exited.
fn wait_until_gone(processes: &BTreeSet<(u32, String)>) {
    let deadline = Instant::now() + READY_TIMEOUT;
    loop {
        let left: Vec<_> = processes
            .iter()
            .filter(|(pid, start)| stat(*pid).is_some_and(|(_, _, now)| now == *start))
            .collect();
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "still running: {left:?}");
        thread::sleep(Duration::from_millis(20));
    }
}
