//! The demo without root: as the user nobody, in a user namespace whose ids newuidmap maps. The test itself needs root, to give
//! nobody a range of ids for its own eyes only; nothing of the machine's is changed.

use std::{
    env, fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
};

use diy_mesh_tests::sandbox::{empty, programs};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

#[test]
fn the_demo_runs_without_root() {
    if empty().is_none() {
        return;
    }
    let missing: Vec<&str> = ["newuidmap", "newgidmap", "setpriv", "unshare"]
        .into_iter()
        .filter(|program| !Path::new("/usr/bin").join(program).exists())
        .collect();
    let root = nix::unistd::geteuid().is_root();
    if !root || !missing.is_empty() {
        let reason = format!(
            "needs root (is there: {root}) and the programs of Debian's packages uidmap and util-linux (missing: {missing:?})"
        );
        assert!(
            env::var_os("CI").is_none_or(|value| value != "true"),
            "CI must be able to run this: {reason}"
        );
        eprintln!("SKIPPED: {reason}");
        return;
    }
    let folder = env::temp_dir().join(format!("mesh-rootless-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let ranges = folder.join("ranges");
    fs::write(&ranges, "nobody:100000:65536\n").unwrap();
    // Where the checkout is in a folder of root's alone, nobody still finds the programs. Each step becomes the next: the
    // process that is started is the demo in the end.
    let steps = "mount --bind $0/ranges /etc/subuid && mount --bind $0/ranges /etc/subgid && mkdir $0/programs && mount --bind $1 $0/programs \
         && chmod 755 $0 && exec setpriv --reuid nobody --regid nogroup --clear-groups $0/programs/mesh demo --only nothing --for 600";
    let mut demo = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", steps])
        .args([&folder, &programs()])
        .current_dir("/")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(demo.stdout.take().unwrap())
        .lines()
        .map(|line| line.unwrap());
    let ready = lines
        .by_ref()
        .any(|line| line.contains("everything is ready after"));
    kill(Pid::from_raw(demo.id().cast_signed()), Signal::SIGTERM).unwrap();
    let rest: Vec<String> = lines.collect();
    let status = demo.wait().unwrap();
    fs::remove_dir(folder.join("programs")).unwrap();
    fs::remove_dir_all(&folder).unwrap();
    assert!(ready && status.success(), "ready: {ready}, {status}");
    assert!(
        rest.iter()
            .any(|line| line.contains("6 of them with a proxy")),
        "{rest:?}"
    );
}
