//! Nothing of a sandbox is left behind, however it ends; and sandboxes know nothing of each other.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use diy_mesh_tests::sandbox::{PATIENCE, empty, pod_of, programs, shell};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

#[test]
fn sigkill_of_the_demo_leaves_nothing() {
    if empty().is_none() {
        return;
    }
    assert_eq!(traces(), [""; 0], "something of another sandbox is here");
    let mut demo = Command::new(programs().join("mesh"))
        .args(["demo", "--for", "600"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(demo.stdout.take().unwrap())
        .lines()
        .map(|line| line.unwrap());
    lines
        .find(|line| line.contains("everything is ready after"))
        .unwrap();
    assert_eq!(
        traces(),
        [""; 0],
        "a running sandbox changes nothing outside either"
    );
    let inside = descendants(demo.id());
    assert!(inside.len() >= 19, "the processes of ten pods: {inside:?}");

    kill(Pid::from_raw(demo.id().cast_signed()), Signal::SIGKILL).unwrap();
    demo.wait().unwrap();
    gone(&inside);
    assert_eq!(traces(), [""; 0]);
}

#[test]
fn dropping_a_sandbox_ends_it_and_no_other() {
    let (Some(one), Some(two)) = (empty(), empty()) else {
        return;
    };
    for sandbox in [&one, &two] {
        sandbox.apply(&shell("")).unwrap();
        sandbox.wait_settled(PATIENCE).unwrap();
    }
    let inside = descendants(one.process_id());
    assert!(!inside.is_empty());
    drop(one);
    gone(&inside);
    let pod = pod_of(&two, "clients", "shell");
    assert_eq!(
        two.exec(&pod, "shell", &["echo", "still here"])
            .unwrap()
            .stdout,
        "still here\n"
    );
}

#[test]
fn the_death_of_any_stage_ends_all() {
    let Some(sandbox) = empty() else { return };
    sandbox.apply(&shell("")).unwrap();
    sandbox.wait_settled(PATIENCE).unwrap();
    let inside = descendants(sandbox.process_id());
    kill(
        Pid::from_raw(sandbox.process_id().cast_signed()),
        Signal::SIGKILL,
    )
    .unwrap();
    gone(&inside);
    assert!(
        sandbox
            .apply(&shell(""))
            .unwrap_err()
            .to_string()
            .starts_with("the sandbox has exited")
    );
}

/// What a sandbox makes, seen from outside: interfaces, folders and mounts. Others may be at work on this machine, so what is
/// not ours is not looked at.
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
    let mounts = fs::read_to_string("/proc/self/mounts").expect("/proc is there");
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

/// Process id and start time, by which a process is told from a later one of the same id.
fn descendants(root: u32) -> BTreeSet<(u32, String)> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir("/proc").expect("/proc is there").flatten() {
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
    // The name, in parentheses, may hold anything.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    Some((
        pid,
        fields.get(1)?.parse().ok()?,
        (*fields.get(19)?).to_owned(),
    ))
}

/// Waits until none of the processes is there.
fn gone(processes: &BTreeSet<(u32, String)>) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let left: Vec<_> = processes
            .iter()
            .filter(|(pid, start)| stat(*pid).is_some_and(|(_, _, now)| now == *start))
            .collect();
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "still there: {left:?}");
        thread::sleep(Duration::from_millis(20));
    }
}
