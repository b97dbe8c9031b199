//! Runs the commands of the tutorial and compares their output.
//!
//! bash runs each block that starts with ` ```sh test ` in the root directory of the repository. A
//! block ` ```sh test sandbox ` requires a sandbox; without root it is skipped unless `CI=true`.
//! Each line of a following block ` ```text expect ` must be a line of the output; `...` matches
//! any text. A failed block is run again with longer times for `--for` and `timeout`, for busy
//! machines.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs};

use diy_mesh_tests::repository::{files_with_extension, read, root};
use diy_mesh_tests::sandbox::programs;

/// Time limit of a block in seconds.
const BLOCK_TIMEOUT: &str = "180";
/// Blocks that run concurrently.
const MAX_CONCURRENT_BLOCKS: usize = 2;
/// Factor for the times of a block on the second attempt.
const RETRY_TIME_FACTOR: u32 = 6;

#[test]
fn commands_print_expected_output() {
    let runs: Vec<Run> = files_with_extension("docs/tutorial", "md")
        .iter()
        .flat_map(|chapter| runs(chapter, &read(chapter)))
        .collect();
    assert!(!runs.is_empty(), "the tutorial contains no `sh test` block");
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..MAX_CONCURRENT_BLOCKS {
            scope.spawn(|| {
                while let Some(run) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let failure = run.failure(1).and_then(|failure| {
                        eprintln!("{failure}\nretry with {RETRY_TIME_FACTOR} times the time");
                        run.failure(RETRY_TIME_FACTOR)
                    });
                    failures
                        .lock()
                        .expect("no thread panics with the lock")
                        .extend(failure);
                }
            });
        }
    });
    let failures: Vec<String> = failures
        .into_inner()
        .expect("no thread panics with the lock");
    assert!(
        failures.is_empty(),
        "{} of {} blocks failed:\n{}",
        failures.len(),
        runs.len(),
        failures.join("\n")
    );
}

#[test]
fn dots_match_any_text() {
    for (pattern, line, expected) in [
        ("GET / HTTP/1.1", "GET / HTTP/1.1", true),
        ("GET /", "GET / HTTP/1.1", false),
        ("...GET / HTTP/1.1", "a/b[proxy]   GET / HTTP/1.1", true),
        (
            "Outbound connection to ...:80",
            "Outbound connection to 10.96.0.7:80",
            true,
        ),
        (
            "Outbound connection to ...:80",
            "Outbound connection to 10.96.0.7:8080",
            false,
        ),
        ("one ... two ...", "one 1 two 2", true),
        ("one ... two ...", "two 2 one 1", false),
        ("a...a", "a", false),
    ] {
        assert_eq!(matches(pattern, line), expected, "{pattern:?} on {line:?}");
    }
}

#[test]
fn finds_blocks_and_expectations() {
    let text = "# Title\n```sh\nno\n```\n```sh test\none\ntwo\n```\nwords\n```text expect\nyes\n```\n```sh test sandbox\nthree\n```\n```text\nno\n```\n";
    let found = runs(Path::new("chapter.md"), text);
    let [first, second] = found.as_slice() else {
        panic!("{} runs", found.len())
    };
    assert_eq!(
        (
            first.script.as_str(),
            first.line,
            first.sandbox,
            first.expected.clone()
        ),
        ("one\ntwo", 5, false, vec!["yes".to_owned()])
    );
    assert_eq!(
        (
            second.script.as_str(),
            second.line,
            second.sandbox,
            second.expected.len()
        ),
        ("three", 13, true, 0)
    );
}

#[test]
fn scales_only_times() {
    assert_eq!(
        scale_times("mesh demo --for 6 --only 6\n  timeout 3 a 3 || b --for", 6),
        "mesh demo --for 36 --only 6\n  timeout 18 a 3 || b --for"
    );
}

/// A test block.
struct Run {
    chapter: PathBuf,
    line: usize,
    script: String,
    sandbox: bool,
    expected: Vec<String>,
}

impl Run {
    /// Runs the block with its times multiplied by `times`. Returns a description of the failure.
    fn failure(&self, times: u32) -> Option<String> {
        let place = format!("{}:{}", self.chapter.display(), self.line);
        if self.sandbox && !is_root() && env::var_os("CI").is_none_or(|ci| ci != "true") {
            eprintln!("{place}: skipped, requires root (with CI=true it runs without root)");
            return None;
        }
        // Merges both streams in order. The target directory may be elsewhere.
        let programs = format!("{}/", programs().display());
        let script = scale_times(&self.script, times).replace("target/debug/", &programs);
        let script = format!("exec 2>&1\n{script}");
        let output = Command::new("timeout")
            .args([BLOCK_TIMEOUT, "bash", "-euo", "pipefail", "-c", &script])
            .current_dir(root())
            .output();
        let output = output.unwrap_or_else(|error| panic!("{place}: cannot run bash: {error}"));
        let text = String::from_utf8_lossy(&output.stdout);
        let missing: Vec<_> = self
            .expected
            .iter()
            .filter(|pattern| !text.lines().any(|line| matches(pattern, line.trim_end())))
            .collect();
        if output.status.success() && missing.is_empty() {
            eprintln!("{place}: passed");
            return None;
        }
        let missing: String = missing
            .iter()
            .map(|line| format!("\n  missing line: {line}"))
            .collect();
        Some(format!(
            "{place}: {}{missing}\n  script:\n{}\n  output:\n{text}",
            output.status, self.script
        ))
    }
}

/// Test blocks of a chapter with their expectations.
fn runs(chapter: &Path, text: &str) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut lines = text.lines().zip(1..);
    while let Some((line, number)) = lines.next() {
        let Some(info) = line.strip_prefix("```") else {
            continue;
        };
        let block: Vec<&str> = lines
            .by_ref()
            .map(|(line, _)| line)
            .take_while(|line| *line != "```")
            .collect();
        match info {
            "sh test" | "sh test sandbox" => runs.push(Run {
                chapter: chapter.to_owned(),
                line: number,
                script: block.join("\n"),
                sandbox: info.ends_with("sandbox"),
                expected: Vec::new(),
            }),
            "text expect" => {
                let run = runs.last_mut().unwrap_or_else(|| {
                    panic!(
                        "{}:{number}: no test block before this expectation",
                        chapter.display()
                    )
                });
                run.expected.extend(
                    block
                        .iter()
                        .map(|line| line.trim_end())
                        .filter(|line| !matches!(*line, "" | "..."))
                        .map(str::to_owned),
                );
            }
            _ => {}
        }
    }
    runs
}

/// Multiplies the seconds of `--for` and `timeout` in a script.
fn scale_times(script: &str, times: u32) -> String {
    let mut limit = false;
    let word = |word: &str| {
        let seconds = if std::mem::replace(&mut limit, matches!(word, "--for" | "timeout")) {
            word.parse::<u32>().ok()
        } else {
            None
        };
        seconds.map_or(word.to_owned(), |seconds| (seconds * times).to_string())
    };
    script.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

fn matches(pattern: &str, line: &str) -> bool {
    let Some((first, rest)) = pattern.split_once("...") else {
        return pattern == line;
    };
    let (middle, last) = rest.rsplit_once("...").unwrap_or(("", rest));
    let Some(mut line) = line.strip_prefix(first) else {
        return false;
    };
    for part in middle.split("...") {
        match line.find(part) {
            Some(at) => line = &line[at + part.len()..],
            None => return false,
        }
    }
    line.ends_with(last)
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}
