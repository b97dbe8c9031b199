//! The demo without root: as user `nobody`, in a user namespace mapped by newuidmap. The test
//! requires root, to bind-mount a subordinate ID range for `nobody` in a private mount namespace.

use std::{env, fs, path::Path, process::Command};

use diy_mesh_testkit::process::{Process, Signal};
use diy_mesh_testkit::skip;
use diy_mesh_tests::sandbox::{empty, programs};

#[test]
fn demo_runs_without_root() {
    if empty().is_none() {
        return;
    }
    let missing: Vec<&str> = ["newuidmap", "newgidmap", "setpriv", "unshare"]
        .into_iter()
        .filter(|program| !Path::new("/usr/bin").join(program).exists())
        .collect();
    let root = nix::unistd::geteuid().is_root();
    if !root || !missing.is_empty() {
        return skip(format!(
            "needs root (is there: {root}) and the programs of Debian's packages uidmap and util-linux (missing: {missing:?})"
        ));
    }
    let folder = env::temp_dir().join(format!("mesh-rootless-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let ranges = folder.join("ranges");
    fs::write(&ranges, "nobody:100000:65536\n").unwrap();
    // The bind mount makes the programs accessible for user `nobody`. Each step is an exec: the
    // child process is the demo.
    let steps = "mount --bind $0/ranges /etc/subuid && mount --bind $0/ranges /etc/subgid && mkdir $0/programs && mount --bind $1 $0/programs \
         && chmod 755 $0 && exec setpriv --reuid nobody --regid nogroup --clear-groups $0/programs/mesh demo --only controller --for 600";
    let mut demo = Process::with_stdout(
        Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", steps])
            .args([&folder, &programs()])
            .current_dir("/"),
    );
    let mut lines = demo.lines();
    let ready = lines
        .by_ref()
        .any(|line| line.contains("everything is ready after"));
    demo.signal(Signal::SIGTERM);
    let rest: Vec<String> = lines.collect();
    let status = demo.exit();
    fs::remove_dir(folder.join("programs")).unwrap();
    fs::remove_dir_all(&folder).unwrap();
    assert!(ready && status.success(), "ready: {ready}, {status}");
    assert!(
        rest.iter()
            .any(|line| line.contains("6 of them with a proxy")),
        "{rest:?}"
    );
}
