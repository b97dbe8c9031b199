//! Profiles the proxies of one side during one case: stacks with perf, or system calls with strace.

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

/// Profiles the targets (name, process ID) while `load` runs. Each target has its own profile.
pub fn profile(
    profiler_kind: Profile,
    case: &Case,
    targets: &[(String, u32)],
    load: &mut dyn FnMut() -> Result<()>,
    output: &Path,
) -> Result<()> {
    fs::create_dir_all(output).with_context(|| format!("create {}", output.display()))?;
    let file =
        |what: &str| output.join(format!("{}-{what}.{}", case.name, extension(profiler_kind)));
    let files: Vec<_> = targets
        .iter()
        .map(|(what, id)| (what, *id, file(what)))
        .collect();
    let mut profilers = files
        .iter()
        .map(|(_, id, file)| attach(profiler_kind, *id, file))
        .collect::<Result<Vec<_>>>()?;
    for (profiler, (_, _, file)) in profilers.iter_mut().zip(&files) {
        wait_until_attached(profiler_kind, profiler, file)?;
    }
    let load = load();
    for profiler in profilers {
        finish(profiler)?;
    }
    load?;
    for (what, _, file) in &files {
        println!("\n== {}, {what}: {}", case.title, file.display());
        println!("{}", summary(profiler_kind, file)?);
    }
    Ok(())
}

fn extension(profiler_kind: Profile) -> &'static str {
    match profiler_kind {
        Profile::Perf => "perf.data",
        Profile::Strace => "strace.txt",
    }
}

fn attach(profiler_kind: Profile, id: u32, file: &Path) -> Result<Child> {
    if file.exists() {
        fs::remove_file(file).with_context(|| format!("remove {}", file.display()))?;
    }
    let mut command = match profiler_kind {
        Profile::Perf => Command::new("perf"),
        Profile::Strace => Command::new("strace"),
    };
    match profiler_kind {
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

/// Waits for the profiler to attach. strace creates its file then; perf writes more than 1 kB of
/// metadata.
fn wait_until_attached(profiler_kind: Profile, profiler: &mut Child, file: &Path) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    let begun = || {
        fs::metadata(file)
            .is_ok_and(|metadata| profiler_kind == Profile::Strace || metadata.len() > 1024)
    };
    while !begun() {
        if let Some(status) = profiler.try_wait().context("wait for the profiler")? {
            bail!("the profiler exited immediately ({status}); run it by hand to see why");
        }
        ensure!(
            Instant::now() < deadline,
            "the profiler did not attach within 10 s"
        );
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Interrupts the profiler, which writes its results.
fn finish(mut profiler: Child) -> Result<()> {
    kill(Pid::from_raw(profiler.id() as i32), Signal::SIGINT)
        .context("the profiler exited early; run it by hand to see why")?;
    profiler.wait().context("wait for the profiler")?;
    Ok(())
}

fn summary(profiler_kind: Profile, file: &Path) -> Result<String> {
    if profiler_kind == Profile::Strace {
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
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "perf report: {}", error.trim());
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
