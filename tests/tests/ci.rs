//! The scripts of `.ci`: the totals that `make test` prints after the output of cargo, the record of
//! `make e2e-all`, and the hooks of `.ci/run`.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use diy_mesh_tests::repository::{files, root};

const TWO_FAILURES: &str = "     Running unittests src/lib.rs (target/debug/deps/shop_cart-12ab)
test cart::adds ... FAILED
test cart::removes ... ok
test result: FAILED. 1 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out
\u{1b}[1m\u{1b}[92m     Running\u{1b}[0m tests/crash.rs (target/debug/deps/crash-0f0f)
skipped: requires promtool
test cart::prints ... skipped: requires root
     Running tests/prices.rs (/elsewhere/debug/deps/prices-34cd)
test result: ok. 30 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out
error: 2 targets failed:";

#[test]
fn totals_count_all_programs_and_name_failures() {
    let output = totals(&format!("printf '%s\\n' '{TWO_FAILURES}'; exit 101"));
    assert_eq!(output.status.code(), Some(101));
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        format!(
            "{TWO_FAILURES}\n\ntests: 31 passed, 1 failed, 3 ignored, 2 skipped; failed: shop_cart: \
             cart::adds, crash (no result)\n"
        )
    );
}

#[test]
fn totals_of_passed_tests_name_none() {
    let output = totals("echo 'test result: ok. 4 passed; 0 failed; 1 ignored; 0 measured' >&2");
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.ends_with("\ntests: 4 passed, 0 failed, 1 ignored, 0 skipped\n"),
        "{text}"
    );
}

#[test]
fn totals_report_command_without_tests() {
    let output = totals("echo 'error: could not compile'; exit 101");
    assert_eq!(output.status.code(), Some(101));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.ends_with("0 skipped; failed: the command, with exit code 101\n"),
        "{text}"
    );
}

fn totals(command: &str) -> Output {
    Command::new(root().join(".ci/totals"))
        .args(["sh", "-c", command])
        .output()
        .expect("bash is installed")
}

const RECORD: &str = "# Reliability

| fault | requests |
|---|---|
| lost packets | succeed |

| started (UTC) | commit | result |
|---|---|---|
| 2026-01-01 00:00:00 | `0123456789ab` | passed |
";

#[test]
fn record_of_a_passed_run_names_the_commit_and_precedes_older_ones() {
    let checkout = Checkout::new("passed", "true");
    let output = checkout.run();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let [result, older] = checkout.rows();
    assert!(result.contains(&checkout.commit()), "{result}");
    assert!(result.ends_with(" | passed |"), "{result}");
    assert!(RECORD.ends_with(&format!("{older}\n")), "{older}");
    let made = checkout.read("made");
    // The tests of e2e install the latest definitions, which refuse earlier ones.
    let mut rest = made.as_str();
    for target in [
        "images\n",
        "load-previous\n",
        "conformance GATEWAY_API=1.2.3 ARGS=\n",
        "e2e\n",
        "conformance GATEWAY_API= ARGS=\n",
    ] {
        let found = rest.split_once(target);
        rest = found
            .unwrap_or_else(|| panic!("{target} is not in {rest}"))
            .1;
    }
}

#[test]
fn record_of_a_failed_run_names_step_and_tests() {
    let failure = "tests: 8 passed, 1 failed, 0 ignored; failed: cluster: smi::splits";
    let checkout = Checkout::new("failed", &format!("echo '{failure}'; exit 3"));
    let output = checkout.run();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let [result, _] = checkout.rows();
    assert!(
        result.ends_with(" | failed in make e2e: cluster: smi::splits |"),
        "{result}"
    );
    let made = checkout.read("made");
    assert!(made.contains("conformance GATEWAY_API=1.2.3 "), "{made}");
    assert!(!made.contains("conformance GATEWAY_API= "), "{made}");
    let durations = String::from_utf8_lossy(&output.stdout);
    for line in ["0:00  make images\n", "make e2e (not completed)\n"] {
        assert!(durations.contains(line), "{durations}");
    }
}

#[test]
fn record_of_an_interrupted_or_killed_run_is_not_completed() {
    for (signal, expected) in [
        ("TERM", "not completed: interrupted in make e2e"),
        ("INT", "not completed: interrupted in make e2e"),
        ("KILL", "not completed"),
    ] {
        let checkout = Checkout::new(signal, &format!("kill -{signal} $PPID"));
        let output = checkout.run();
        assert!(!output.status.success(), "{output:?}");
        let [result, _] = checkout.rows();
        assert!(result.ends_with(&format!(" | {expected} |")), "{result}");
    }
}

#[test]
fn slow_and_other_tests_are_all_tests() {
    let output = |program: &str, arguments: &[&str]| {
        let output = Command::new(program)
            .args(arguments)
            .current_dir(root())
            .output();
        let output = output.expect("the program is installed");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("the output is text")
    };
    let metadata = output(
        "cargo",
        &["metadata", "--no-deps", "--format-version=1", "--offline"],
    );
    let metadata: serde_json::Value = serde_json::from_str(&metadata).expect("cargo prints JSON");
    let packages = metadata["packages"].as_array().expect("a list of packages");
    let targets = packages
        .iter()
        .flat_map(|package| package["targets"].as_array());
    let tests = targets
        .flatten()
        .filter(|target| target["kind"][0] == "test");
    let tests: BTreeSet<&str> = tests.filter_map(|target| target["name"].as_str()).collect();

    let names = |target: &str| {
        let commands = output("make", &["--dry-run", target]);
        let words = commands.replace("--test=", "--test ");
        let (first, _) = words.split_once('\n').expect("make prints commands");
        let names = first.split("--test ").skip(1);
        let name = |part: &str| part.trim_matches([' ', '\'']).to_owned();
        names.map(name).collect::<BTreeSet<String>>()
    };
    let (slow, rest) = (names("test-slow"), names("test-rest"));
    assert_eq!(slow.intersection(&rest).count(), 0, "{slow:?} and {rest:?}");
    let named: BTreeSet<&str> = slow.union(&rest).map(String::as_str).collect();
    assert_eq!(named, tests);
}

#[test]
fn changed_checkout_is_not_recorded() {
    let checkout = Checkout::new("changed", "true");
    fs::write(checkout.0.join("new.rs"), "").expect("the folder is writable");
    let output = checkout.run();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert_eq!(checkout.read("docs/reliability.md"), RECORD);
}

#[test]
fn run_uses_kind_and_docker_by_default() {
    let checkout = Checkout::new("default-hooks", "true");
    let output = checkout.run_script(".ci/run", &[]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let made = checkout.read("made");
    let image = checkout.0.join(".ci/hooks/cluster/image");
    let images = format!("\ndev-images IMAGE={}\n", image.display());
    let created = made.find("\nkind create cluster --name diy-mesh-ci ");
    assert!(created.is_some() && created < made.find(&images), "{made}");
    assert!(
        made.ends_with("\nkind delete cluster --name diy-mesh-ci\n"),
        "{made}"
    );

    let output = checkout.run_script(image, &["a:dev", "programs/make"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let made = checkout.read("made");
    let steps = made.lines().rev().take(2).collect::<Vec<_>>();
    assert_eq!(steps[0], "kind load docker-image --name diy-mesh-ci a:dev");
    assert!(
        steps[1].starts_with("docker build --quiet -t a:dev -f - "),
        "{made}"
    );
}

#[test]
fn run_prefers_hooks_of_another_folder() {
    let checkout = Checkout::new("other-hooks", "true");
    for (hook, script) in [("up", "echo a.kubeconfig"), ("down", "echo down >> made")] {
        let file = format!("other/cluster/{hook}");
        checkout.write(&file, &format!("#!/bin/sh\n{script}\n"));
    }
    let other = checkout.0.join("other");
    let script = "CI_HOOKS=\"$PWD/other\" exec .ci/run";
    let output = checkout.run_script("sh", &["-c", script]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let made = checkout.read("made");
    let images = format!("\ndev-images IMAGE={}/cluster/image\n", other.display());
    assert!(made.contains(&images), "{made}");
    assert!(made.ends_with("\ndown\n"), "{made}");
    assert!(!made.contains("kind"), "{made}");
}

/// A repository with the scripts of `.ci`, and programs `make`, `kind` and `docker` that write their
/// arguments to the file `made`. Deleted on drop.
struct Checkout(PathBuf);

impl Checkout {
    /// `e2e` is what `make e2e` runs.
    fn new(name: &str, e2e: &str) -> Self {
        let folder = format!("mesh-ci-{name}-{}", std::process::id());
        let checkout = Self(std::env::temp_dir().join(folder));
        let make = format!("#!/bin/sh\necho \"$*\" >> made\nif [ \"$1\" = e2e ]; then {e2e}; fi\n");
        for (file, text) in [
            ("docs/reliability.md", RECORD),
            ("tests/conformance/go.mod", ""),
            ("tests/conformance/go-1.2.3.mod", ""),
            (".gitignore", "made\n"),
            ("programs/make", &make),
            ("programs/kind", "#!/bin/sh\necho \"kind $*\" >> made\n"),
            ("programs/docker", "#!/bin/sh\necho \"docker $*\" >> made\n"),
        ] {
            checkout.write(file, text);
        }
        for file in files(".ci") {
            let file = file.to_str().expect("the path is text");
            let text = fs::read_to_string(root().join(file)).expect("the script exists");
            checkout.write(file, &text);
        }
        checkout.write(".ci/packages", "#!/bin/sh\n");
        checkout.git(&["init", "-q"]);
        checkout.git(&["add", "-A"]);
        checkout.git(&["commit", "-q", "-m", "a"]);
        checkout
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.0.join(file);
        fs::create_dir_all(path.parent().expect("the file is in a folder"))
            .and_then(|()| fs::write(&path, text))
            .and_then(|()| fs::set_permissions(&path, Permissions::from_mode(0o755)))
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }

    fn git(&self, arguments: &[&str]) -> String {
        let output = Command::new("git")
            .args(["-c", "user.name=a", "-c", "user.email=a@b.example"])
            .args(arguments)
            .current_dir(&self.0)
            .output()
            .expect("git is installed");
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn commit(&self) -> String {
        let name = self.git(&["rev-parse", "--short=12", "HEAD"]);
        format!("| `{}` |", name.trim())
    }

    /// Runs `.ci/e2e-all`.
    fn run(&self) -> Output {
        self.run_script(self.0.join(".ci/e2e-all"), &[])
    }

    fn run_script(&self, script: impl AsRef<OsStr>, arguments: &[&str]) -> Output {
        let path = std::env::var("PATH").expect("PATH is set");
        let programs = self.0.join("programs");
        // A shell starts programs in the background with SIGINT ignored.
        Command::new("env")
            .arg("--default-signal=INT")
            .arg(script)
            .args(arguments)
            .current_dir(&self.0)
            .env_remove("CI_HOOKS")
            .env("PATH", format!("{}:{path}", programs.display()))
            .env("KUBECONFIG", "unused")
            .output()
            .expect("bash is installed")
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.0.join(file)).expect("the file exists")
    }

    /// The row of the run, and the older one.
    fn rows(&self) -> [String; 2] {
        let text = self.read("docs/reliability.md");
        let rows = text.lines().filter(|line| line.starts_with("| 2"));
        let rows: Vec<String> = rows.map(str::to_owned).collect();
        rows.try_into().unwrap_or_else(|_| panic!("rows: {text}"))
    }
}

impl Drop for Checkout {
    fn drop(&mut self) {
        // An incomplete checkout is in the temporary directory, and its name is not used again.
        let _ = fs::remove_dir_all(&self.0);
    }
}
