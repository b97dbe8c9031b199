//! A release as users get it: the files of `.ci/package` from a local web server, the commands of
//! README.md in a container that has curl and tar, and what `install.sh` does when a download fails.
//!
//! The container has the programs of this workspace, or the programs of the folder `RELEASE`, which
//! `make release` wrote.

use std::env;
use std::fs::{self, File, Permissions};
use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;
use std::time::{Instant, UNIX_EPOCH};

use diy_mesh_testkit::process::Process;
use diy_mesh_testkit::{has_program, is_root};
use diy_mesh_tests::repository::{read, root};
use diy_mesh_tests::sandbox::{PROGRAMS, READY_TIMEOUT, programs};
use tempfile::TempDir;

/// The programs that README.md requires, and programs that each distribution has.
const CONTAINER_PROGRAMS: &str = "/bin/sh curl tar gzip sha256sum cat ln mkdir mv rm uname";
/// The address of a release in README.md.
const EXAMPLE_URL: &str = "https://releases.example.com/0.1.0";

/// Shows traffic in a container without Rust, by the commands of README.md.
#[test]
fn readme_installs_without_rust_in_an_empty_container() {
    if !is_root() {
        return;
    }
    let folder = folder();
    let release = env::var_os("RELEASE").map_or_else(|| package_own(&folder), PathBuf::from);
    let container = folder.path().join("container");
    create_container(&container, &programs().join("mesh"));
    let commands = section_commands("## Install without Rust");
    assert!(commands.contains(EXAMPLE_URL), "{commands}");
    let script = commands.replace(EXAMPLE_URL, &serve(&release));
    let enter = "exec 2>&1; mount --bind \"$0\" \"$0\"; mount --rbind /dev \"$0/dev\"; \
        mount -t proc proc \"$0/proc\"; exec chroot \"$0\" /bin/sh -euc \"$1\"";
    let container = Process::with_stdout(
        Command::new("unshare")
            .args(["--mount", "--pid", "--fork", "--kill-child"])
            .args(["sh", "-euc", enter])
            .args([container.as_os_str(), script.as_ref()])
            .env_clear()
            .envs([("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"), ("HOME", "/root")]),
    );
    container.wait_for("checking its SHA-256 sum");
    let downloaded = Instant::now();
    let deadline = downloaded + READY_TIMEOUT;
    let is_traffic =
        |line: String| line.starts_with("http-client -> http-server") && line.contains("mTLS");
    let mut lines = container.lines().take_while(|_| Instant::now() < deadline);
    assert!(lines.any(is_traffic), "no traffic");
    let seconds = downloaded.elapsed().as_secs_f64();
    println!("traffic {seconds:.1} s after the download");
}

/// The installed release stays as it is.
#[test]
fn failed_installation_changes_nothing() {
    let folder = folder();
    let release = package(
        &folder.path().join("release"),
        &small_stage(&folder, "one"),
        None,
    );
    let prefix = folder.path().join("prefix");
    let base = serve(&release);
    assert_success(&install(&base, &prefix, ""));
    let before = tree(&prefix);
    let archive = archive_name();
    // The shell that runs install.sh begins with `preparation`.
    for (path, preparation, expected) in [
        (
            "/missing",
            "",
            "/missing/SHA256SUMS: check BASE_URL".to_owned(),
        ),
        (
            "/incomplete",
            "",
            format!("cannot download {base}/incomplete/{archive}"),
        ),
        (
            "/truncated",
            "",
            format!("cannot download {base}/truncated/{archive}"),
        ),
        (
            "/changed",
            "",
            format!("{archive} differs from its sum in SHA256SUMS"),
        ),
        (
            "",
            "uname() { echo Plan9; }",
            "no programs for Plan9 Plan9, expected Linux x86_64".to_owned(),
        ),
        (
            "",
            "uname() { [ $1 = -m ] && echo aarch64 || echo Linux; }",
            "has no programs for linux-arm64".to_owned(),
        ),
        (
            "",
            "VERSION=0.0.9",
            "SHA256SUMS lists no diy-service-mesh-0.0.9-linux-amd64.tar.gz".to_owned(),
        ),
        (
            "",
            "command() { [ $2 != curl ]; }",
            "program curl not found".to_owned(),
        ),
        // Files of at most 16 blocks, as on a full disk.
        (
            "",
            "trap '' XFSZ; ulimit -f 16",
            format!("cannot unpack {archive}"),
        ),
        (
            "",
            "PREFIX=/proc",
            "cannot create /proc/lib/diy-service-mesh: set PREFIX".to_owned(),
        ),
        ("", "BASE_URL=", "BASE_URL is not set".to_owned()),
        (
            "",
            "set -- --prefix=a",
            "unknown argument \"--prefix=a\", expected none".to_owned(),
        ),
    ] {
        let output = install(&format!("{base}{path}"), &prefix, preparation);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            output.status.code(),
            Some(1),
            "{path} {preparation}: {text}"
        );
        assert!(text.contains(&expected), "{path} {preparation}: {text}");
        assert_eq!(tree(&prefix), before, "{path} {preparation}: {text}");
    }
}

#[test]
fn installs_over_an_earlier_release_and_says_how_to_remove_it() {
    let folder = folder();
    let prefix = folder.path().join("prefix");
    let mut removal = String::new();
    for content in ["one", "two"] {
        let release = package(
            &folder.path().join(content),
            &small_stage(&folder, content),
            None,
        );
        let output = install(&serve(&release), &prefix, "");
        assert_success(&output);
        let text = String::from_utf8_lossy(&output.stdout);
        let installed = text.split_once(&format!("installed mesh {content}. To remove it: "));
        let (_, rest) = installed.unwrap_or_else(|| panic!("{text}"));
        removal = rest.lines().next().unwrap_or_default().to_owned();
    }
    assert_success(&run(Command::new("sh").args(["-c", &removal])));
    assert_eq!(tree(&prefix), ["bin", "lib"].map(PathBuf::from));
}

#[test]
fn signature_is_checked_with_the_given_key() {
    if !has_program("openssl") {
        return;
    }
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    for name in ["own", "other"] {
        let [private, public] = ["pem", "pub"].map(|kind| path(&format!("{name}.{kind}")));
        let generate = ["genpkey", "-algorithm", "ed25519", "-out"];
        assert_success(&run(Command::new("openssl").args(generate).arg(&private)));
        let mut export = Command::new("openssl");
        export.args(["pkey", "-pubout", "-in"]).arg(&private);
        assert_success(&run(export.arg("-out").arg(&public)));
    }
    let stage = small_stage(&folder, "one");
    let signed = package(&path("signed"), &stage, Some(&path("own.pem")));
    let unsigned = package(&path("unsigned"), &stage, None);
    for (release, key, expected) in [
        (&signed, "own.pub", None),
        (
            &signed,
            "other.pub",
            Some("SHA256SUMS is not signed with the key of "),
        ),
        (
            &unsigned,
            "own.pub",
            Some("/SHA256SUMS.sig: check BASE_URL"),
        ),
    ] {
        let prefix = tempfile::tempdir_in(folder.path()).expect("the folder is writable");
        let version = env!("CARGO_PKG_VERSION");
        let preparation = format!("PUBLIC_KEY={} VERSION={version}", path(key).display());
        let output = install(&serve(release), prefix.path(), &preparation);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), expected.is_none(), "{text}");
        assert!(text.contains(expected.unwrap_or_default()), "{text}");
    }
}

/// Order, owners, modes and times of files do not depend on the machine.
#[test]
fn equal_content_gives_equal_files() {
    let folder = folder();
    let stage = small_stage(&folder, "one");
    let sums = |name: &str| {
        let release = package(&folder.path().join(name), &stage, None);
        fs::read_to_string(release.join("SHA256SUMS")).expect("the sums are written")
    };
    let first = sums("first");
    for file in ["LICENSE", "bin/mesh"] {
        let old = File::open(stage.join(file)).and_then(|file| file.set_modified(UNIX_EPOCH));
        old.expect("the file exists");
    }
    let private = Permissions::from_mode(0o600);
    fs::set_permissions(stage.join("LICENSE"), private).expect("the file exists");
    assert_eq!(sums("second"), first);
    let names = first.lines().filter_map(|line| line.split("  ").nth(1));
    let chart = format!("diy-service-mesh-{}.tgz", env!("CARGO_PKG_VERSION"));
    assert_eq!(
        names.collect::<Vec<_>>(),
        [
            "crds.yaml",
            &archive_name(),
            &chart,
            "install.sh",
            "install.yaml"
        ]
    );
}

#[test]
fn target_that_is_not_installed_is_named_with_its_remedy() {
    let output = Command::new(root().join(".ci/release"))
        .args(["0.1.0", "unused"])
        .env("TARGET", "sparc64-unknown-linux-gnu")
        .output()
        .expect("bash is installed");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(
        text.contains("run `rustup target add sparc64-unknown-linux-gnu`"),
        "{text}"
    );
}

/// The commands of a section of README.md.
fn section_commands(heading: &str) -> String {
    let text = read(Path::new("README.md"));
    let section = text.split(heading).nth(1).expect("the section exists");
    let section = section.split("\n## ").next().unwrap_or_default();
    let commands = section.lines().filter_map(|line| line.strip_prefix("    "));
    commands.fold(String::new(), |text, line| text + line + "\n")
}

/// Packages the programs of this workspace, without symbols.
fn package_own(folder: &TempDir) -> PathBuf {
    let stage = folder.path().join("stage");
    fs::create_dir_all(stage.join("bin")).expect("the folder is writable");
    for program in PROGRAMS {
        let mut strip = Command::new("strip");
        strip.arg("-o").arg(stage.join("bin").join(program));
        assert_success(&run(strip.arg(programs().join(program))));
    }
    package(&folder.path().join("release"), &stage, None)
}

/// A stage with a `mesh` that prints `content` as its version and as its manifests, and a file that
/// is larger than the archive.
fn small_stage(folder: &TempDir, content: &str) -> PathBuf {
    let stage = folder.path().join(format!("stage-{content}"));
    let mesh = stage.join("bin/mesh");
    fs::create_dir_all(stage.join("bin"))
        .and_then(|()| fs::write(&mesh, format!("#!/bin/sh\necho mesh {content}\n")))
        .and_then(|()| fs::set_permissions(&mesh, Permissions::from_mode(0o755)))
        .and_then(|()| fs::write(stage.join("LICENSE"), vec![b'\n'; 100_000]))
        .expect("the folder is writable");
    stage
}

/// Writes a release to a folder, and returns the folder.
fn package(release: &Path, stage: &Path, signing_key: Option<&Path>) -> PathBuf {
    let mut command = Command::new(root().join(".ci/package"));
    command
        .arg(stage)
        .arg(release)
        .args([env!("CARGO_PKG_VERSION"), "amd64"]);
    command.env("SOURCE_DATE_EPOCH", "1000000000");
    command.envs(signing_key.map(|key| ("SIGNING_KEY", key)));
    assert_success(&run(&mut command));
    release.to_owned()
}

fn archive_name() -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!("diy-service-mesh-{version}-linux-amd64.tar.gz")
}

/// Runs install.sh in a shell that has run `preparation`.
fn install(base: &str, prefix: &Path, preparation: &str) -> Output {
    let script = root().join("install.sh");
    run(Command::new("sh")
        .args(["-c", &format!("{preparation}\n. {}", script.display())])
        .env("BASE_URL", base)
        .env("PREFIX", prefix))
}

/// Copies programs with their shared libraries to the root of a container that has nothing else,
/// and the libraries of `program`.
fn create_container(container: &Path, program: &Path) {
    let script = "
        mkdir -p \"$0\"/dev \"$0\"/proc \"$0\"/sys \"$0\"/tmp \"$0\"/run \"$0\"/etc \"$0\"/root \"$0\"/usr/local/bin \"$0\"/var
        ln -s ../run \"$0\"/var/run
        touch \"$0\"/etc/hosts \"$0\"/etc/resolv.conf
        for program in $2; do
            path=$(command -v \"$program\")
            echo \"$path\"
            ldd \"$path\" | grep -oE '/[^ :()]+' || true
        done >\"$0.files\"
        ldd \"$1\" | grep -oE '/[^ :()]+' >>\"$0.files\" || true
        sort -u \"$0.files\" | xargs cp --parents -L -t \"$0\"";
    assert_success(&run(Command::new("bash")
        .args(["-euc", script])
        .arg(container)
        .arg(program)
        .arg(CONTAINER_PROGRAMS)));
}

/// Serves a release over HTTP until the test program ends, and returns its address. Below `/changed`
/// and `/truncated` the archive is damaged, below `/incomplete` it is absent.
fn serve(release: &Path) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
    let address = listener.local_addr().expect("the socket is bound");
    let release = release.to_owned();
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            // The client has closed the connection.
            let _ = respond(&stream, &release);
        }
    });
    format!("http://{address}")
}

fn respond(mut stream: &TcpStream, release: &Path) -> io::Result<()> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let request = lines.next().unwrap_or_default();
    lines.take_while(|line| !line.is_empty()).for_each(drop);
    let path = request.split(' ').nth(1).unwrap_or_default();
    let (damage, name) = path.rsplit_once('/').unwrap_or_default();
    let is_archive = name.ends_with(".tar.gz");
    let mut body = match damage {
        "" | "/changed" | "/truncated" => fs::read(release.join(name)).ok(),
        "/incomplete" if !is_archive => fs::read(release.join(name)).ok(),
        _ => None,
    };
    let status = body.as_ref().map_or("404 Not Found", |_| "200 OK");
    let body = body.get_or_insert_default();
    let length = body.len();
    if is_archive && damage == "/changed" {
        body[length / 2] ^= 1;
    }
    if is_archive && damage == "/truncated" {
        body.truncate(length / 2);
    }
    write!(
        stream,
        "HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
    )?;
    stream.write_all(body)
}

/// The entries below a folder, and the targets of links.
fn tree(folder: &Path) -> Vec<PathBuf> {
    let output = run(Command::new("find")
        .args([".", "-mindepth", "1", "-printf", "%P %l\n"])
        .current_dir(folder));
    let text = String::from_utf8_lossy(&output.stdout);
    let mut entries: Vec<_> = text
        .lines()
        .map(|line| PathBuf::from(line.trim_end()))
        .collect();
    entries.sort();
    entries
}

fn run(command: &mut Command) -> Output {
    let output = command.output();
    output.unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

fn assert_success(output: &Output) {
    assert!(output.status.success(), "{output:?}");
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("the temporary folder is writable")
}
