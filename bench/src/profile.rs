//! Looks into the proxies of one side while one case runs: stacks by perf, or system calls by strace.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{cases::Case, config::Profile};

/// Runs `load`, the load of `case`, while the profiler watches the targets (what each is, its process ID), each by itself for perf's
/// sake: each gets a profile of its own.
pub fn profile(
    how: Profile,
    case: &Case,
    targets: &[(String, u32)],
    load: &mut dyn FnMut() -> Result<()>,
    output: &Path,
) -> Result<()> {
    fs::create_dir_all(output).with_context(|| format!("make {}", output.display()))?;
    let file = |what: &str| output.join(format!("{}-{what}.{}", case.name, extension(how)));
    let files: Vec<_> = targets
        .iter()
        .map(|(what, id)| (what, *id, file(what)))
        .collect();
    let mut watchers = files
        .iter()
        .map(|(_, id, file)| attach(how, *id, file))
        .collect::<Result<Vec<_>>>()?;
    for (watcher, (_, _, file)) in watchers.iter_mut().zip(&files) {
        wait_attached(how, watcher, file)?;
    }
    let load = load();
    for watcher in watchers {
        finish(watcher)?;
    }
    load?;
    for (what, _, file) in &files {
        println!("\n== {}, {what}: {}", case.title, file.display());
        println!("{}", summary(how, file)?);
    }
    Ok(())
}

fn extension(how: Profile) -> &'static str {
    match how {
        Profile::Perf => "perf.data",
        Profile::Strace => "strace.txt",
    }
}

fn attach(how: Profile, id: u32, file: &Path) -> Result<Child> {
    if file.exists() {
        fs::remove_file(file).with_context(|| format!("remove {}", file.display()))?;
    }
    let mut command = match how {
        Profile::Perf => Command::new("perf"),
        Profile::Strace => Command::new("strace"),
    };
    match how {
        Profile::Perf => command
            .args(["record", "--quiet", "-g", "-F", "997", "-o"])
            .arg(file)
            .arg("-p")
            .arg(id.to_string()),
        Profile::Strace => command
            .args(["-c", "-f", "-o"])
            .arg(file)
            .arg("-p")
            .arg(id.to_string()),
    };
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("start the profiler")
}

/// strace opens its file when it is about to begin; perf then writes what it knows of the process, far more than 1 kB.
fn wait_attached(how: Profile, watcher: &mut Child, file: &Path) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    let begun =
        || fs::metadata(file).is_ok_and(|metadata| how == Profile::Strace || metadata.len() > 1024);
    while !begun() {
        if let Some(status) = watcher.try_wait().context("wait for the profiler")? {
            bail!("the profiler ended at once ({status}); does it work here by hand?");
        }
        ensure!(
            Instant::now() < deadline,
            "the profiler did not begin within 10 s"
        );
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Interrupted, both write what they have.
fn finish(mut watcher: Child) -> Result<()> {
    kill(Pid::from_raw(watcher.id() as i32), Signal::SIGINT)
        .context("the profiler ended early; does it work here by hand?")?;
    watcher.wait().context("wait for the profiler")?;
    Ok(())
}

fn summary(how: Profile, file: &Path) -> Result<String> {
    if how == Profile::Strace {
        return fs::read_to_string(file).with_context(|| format!("read {}", file.display()));
    }
    let report = |columns: &str| {
        let mut command = Command::new("perf");
        command
            .args([
                "report",
                "--stdio",
                "--no-children",
                "-g",
                "none",
                "--percent-limit",
                "0.7",
                "-F",
                columns,
                "-i",
            ])
            .arg(file);
        let output = command.output().context("run perf report")?;
        let problem = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "perf report: {}", problem.trim());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        anyhow::Ok(
            text.lines()
                .filter(|line| !line.starts_with('#') && !line.trim().is_empty())
                .collect::<Vec<_>>()
                .join("\n"),
        )
    };
    let (programs, functions) = (report("overhead,dso")?, report("overhead,dso,sym")?);
    Ok(format!(
        "{programs}\n\n{functions}\n\nstacks: perf report --stdio --no-children -i {}",
        file.display()
    ))
}
