//! The limits of the process and of its clients, with real sockets.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use support::{get, scratch};

/// Container runtimes start a process with a soft limit of 1,024 open files.
#[tokio::test]
async fn raises_the_limit_of_open_files() {
    let dir = scratch();
    let dir = dir.path();
    for folder in ["catalog", "ca"] {
        std::fs::create_dir(dir.join(folder)).unwrap();
    }
    std::fs::write(dir.join("jwks.json"), support::Issuer::new("a").jwks()).unwrap();
    let mut controller = Command::new("sh")
        .args(["-c", "ulimit -Sn 64 && exec \"$0\" \"$@\""])
        .arg(env!("CARGO_BIN_EXE_controller"))
        .args(["--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0"])
        .arg(format!("--catalog=files:{}/catalog", dir.display()))
        .arg(format!("--ca=files:{}/ca", dir.display()))
        .arg(format!("--authenticator=jwks:{}/jwks.json", dir.display()))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let log = BufReader::new(controller.stderr.take().unwrap());
    let admin = log
        .lines()
        .find_map(|line| Some(line.unwrap().split_once(" admin=")?.1.to_owned()))
        .unwrap();
    let (_, metrics) = get(admin.trim().parse().unwrap(), "/metrics").await;
    controller.kill().unwrap();
    controller.wait().unwrap();
    let line = metrics
        .lines()
        .find_map(|line| line.strip_prefix("diy_mesh_controller_max_open_files "));
    assert!(
        line.unwrap().parse::<u64>().unwrap() > 64,
        "{line:?} files can be open"
    );
    assert!(metrics.contains("\ndiy_mesh_controller_open_files "));
    assert!(metrics.contains("\ndiy_mesh_controller_resident_memory_bytes "));
}
