//! `mesh why`, `mesh tap` and `mesh proxy` ask a running demo: a failure in its output names the
//! command that explains it.

use std::{
    fs,
    os::unix::fs::{DirBuilderExt, chown},
    path::{Path, PathBuf},
    process::{Command, Output},
};

use diy_mesh_testkit::process::{Process, Signal};
use diy_mesh_tests::dashboard::Dashboard;
use diy_mesh_tests::sandbox::{empty, programs};
use serde_json::{Value, json};

/// The proxies of http-server deny all calls.
const DENIAL: &str = "
apiVersion: diy-service-mesh.dev/v1alpha1
kind: AuthorizationPolicy
metadata: {name: nobody, namespace: http-server}
spec:
  targetRefs: [{group: '', kind: Pod, selector: {matchLabels: {app: http-server}}}]
  action: DENY
  rules: [{networkAttributes: {ports: [8080]}}]
";

/// The directory of the sockets of a test, for its user alone.
pub(super) struct Session(PathBuf);

impl Session {
    pub(super) fn new(name: &str) -> Self {
        let name = format!("mesh-session-{name}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let mut builder = fs::DirBuilder::new();
        builder.mode(0o700).create(&directory).unwrap();
        Self(directory)
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.0.join("diy-service-mesh-demo.sock")
    }

    /// A command of `mesh`.
    fn mesh(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(programs().join("mesh"));
        command.args(arguments).env("XDG_RUNTIME_DIR", &self.0);
        command
    }

    pub(super) fn run(&self, arguments: &[&str]) -> Output {
        self.mesh(arguments).output().unwrap()
    }

    /// A demo with [`DENIAL`].
    fn demo(&self) -> Process {
        let file = self.0.join("denial.yaml");
        fs::write(&file, DENIAL).unwrap();
        let mut mesh = self.mesh(&["demo", "--for", "600", "--set", "-"]);
        Process::with_stdout(mesh.stdin(fs::File::open(file).unwrap()))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub(super) fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[&*output.stdout, &*output.stderr].concat()).into_owned()
}

#[test]
fn failures_of_a_demo_name_the_command_that_explains_them() {
    if empty().is_none() {
        return;
    }
    let session = Session::new("why");
    let mut demo = session.demo();
    let mut lines = demo.lines();
    let is_denied = |line: &String| line.starts_with("http-client -> ") && line.contains(" 403 ");
    let line = lines.find(is_denied).unwrap();
    let (_, command) = line.split_once("  mesh why --demo ").expect(&line);

    let page = session.run(&["why", "--demo", command]);
    let by_id = text(&page);
    assert_eq!(page.status.code(), Some(1), "{by_id}");
    for part in [
        "Why: the proxy of the callee answered denied: ",
        "AuthorizationPolicy http-server/nobody",
        "Proxy of the caller, http-client/http-client-",
        "Proxy of the callee, http-server/http-server-v",
        "verified by mutual TLS",
    ] {
        assert!(by_id.contains(part), "{part}: {by_id}");
    }
    let of_pair = ["http-client/http-client", "http-server/http-server"];
    let page = session.run(&[&["why", "--demo"], &of_pair[..]].concat());
    assert_eq!(page.status.code(), Some(1), "{}", text(&page));
    assert!(text(&page).contains("Why: the proxy of the callee answered denied: "));

    // The failure is one of both proxies.
    for pod in ["http-server/http-server", "http-client/http-client"] {
        assert_eq!(tapped(&session, pod), "[denied]", "{pod}");
    }
    asks_for_state(&session);
    shows_the_workloads_of_a_service(&session);
    demo.signal(Signal::SIGTERM);
    assert!(lines.count() > 0);
    assert!(demo.exit().success());
    assert!(!session.socket().exists(), "the socket is removed");
    let page = session.run(&["why", "--demo", command]);
    let error = "no demo of this user runs";
    assert_eq!(page.status.code(), Some(2));
    assert!(text(&page).contains(error), "{}", text(&page));
}

/// The code of the next failure of a pod, which names `mesh why --demo`.
fn tapped(session: &Session, pod: &str) -> String {
    let tap = Process::with_stdout(&mut session.mesh(&["tap", "--demo", pod, "--failures"]));
    let line = tap.lines().next().unwrap();
    let (before, _) = line.split_once("  mesh why --demo ").expect(&line);
    before.rsplit(' ').next().unwrap().to_owned()
}

fn asks_for_state(session: &Session) {
    let pod = "http-client/http-client";
    let service = "--destination=http-server/http-server";
    let state = session.run(&["proxy", "--demo", pod, service, "-o", "json"]);
    assert!(state.status.success(), "{}", text(&state));
    let state: Value = serde_json::from_slice(&state.stdout).unwrap();
    assert!(state["certificate"]["not_after"].is_string(), "{state:#}");
    let unknown = session.run(&["proxy", "--demo", "http-client/nobody"]);
    assert_eq!(unknown.status.code(), Some(2));
    let error = "no pod with a proxy of the mesh is http-client/nobody";
    assert!(text(&unknown).contains(error), "{}", text(&unknown));
}

/// The Service of the walkthrough has two Deployments, with other names.
fn shows_the_workloads_of_a_service(session: &Session) {
    let dashboard = Dashboard::start(session.mesh(&["dashboard", "--demo"])).unwrap();
    let name = |name: &str| format!("http-server/{name}");
    let workloads = ["http-server-v1", "http-server-v2"].map(name);
    let expected = json!({name("http-server"): workloads});
    dashboard.expect_services(&expected).unwrap();
}

#[test]
fn demo_that_cannot_be_asked_says_so_and_runs() {
    if empty().is_none() {
        return;
    }
    let session = Session::new("second");
    let sandbox = empty().unwrap();
    let created = session.0.join("created");
    let server = sandbox.serve(&created.join("demo.sock")).unwrap();
    assert!(created.is_dir());
    drop(server);
    assert!(!created.exists(), "it was created for the socket");
    let server = sandbox.serve(&session.socket()).unwrap();
    let mut second = session.demo();
    let mut lines = second.lines();
    let expected = "`mesh why --demo` does not know this demo: another demo of this user runs";
    assert!(lines.any(|line| line.contains(expected)));
    let failure = lines.find(|line| line.contains(" 403 ")).unwrap();
    assert!(!failure.contains("mesh why"), "{failure}");
    drop(lines);
    second.signal(Signal::SIGTERM);
    assert!(second.exit().success());
    assert!(session.socket().exists(), "the first one is left");
    drop(server);
    assert!(!session.socket().exists() && session.0.exists());
}

#[test]
fn directory_of_another_user_is_refused() {
    let session = Session::new("other");
    let root = nix::unistd::geteuid().is_root();
    // Without root, the directory of another user is the root directory.
    let other = if root { &session.0 } else { Path::new("/") };
    if root {
        chown(other, Some(65_534), None).unwrap();
    }
    let mut why = session.mesh(&["why", "--demo", "10.244.0.7-5f3a9c210b44"]);
    let output = why.env("XDG_RUNTIME_DIR", other).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output);
    let expected = format!("{} belongs to user ", other.display());
    assert!(error.contains(&expected), "{error}");
    assert!(error.contains("set XDG_RUNTIME_DIR"), "{error}");
    if let Some(sandbox) = empty() {
        let served = sandbox.serve(&other.join("demo.sock"));
        let error = served.err().unwrap().to_string();
        assert!(error.contains(&expected), "{error}");
    }
}
