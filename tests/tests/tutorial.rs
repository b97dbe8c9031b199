//! The tutorial's commands, run as they stand: what a chapter promises, it has to keep.
//!
//! A block that begins with ` ```sh test ` is run by bash in the repository's top folder. With ` ```sh test sandbox ` it needs
//! what `mesh demo` needs, and is skipped where that is missing, unless `CI=true`. Where a block ` ```text expect ` follows, each
//! of its lines must be a line of the output, `...` standing for anything. What a busy machine does not do in the seconds that a block
//! gives it with `--for` or `timeout` is run once more with many times as many.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs};

/// The longest that a block may take.
const TIME_LIMIT: &str = "180";
/// Most of a block's time is waiting; each has namespaces of its own.
const AT_A_TIME: usize = 2;
/// How many times the seconds of a block a busy machine gets.
const BUSY: u32 = 6;

#[test]
fn the_chapters_commands_print_what_the_chapters_say() {
    let programs = root().join("target/debug/mesh");
    assert!(
        programs.is_file(),
        "{} is missing: run `cargo build --bins` first",
        programs.display()
    );
    let runs: Vec<Run> = chapters()
        .iter()
        .flat_map(|chapter| {
            runs(
                chapter,
                &fs::read_to_string(chapter).expect("it was just listed"),
            )
        })
        .collect();
    assert!(
        !runs.is_empty(),
        "the tutorial has no block to run: is its mark another one now?"
    );
    let (next, problems) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some(run) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let problem = run.problem(1).and_then(|problem| {
                        eprintln!("{problem}\nand once more, with {BUSY} times the seconds");
                        run.problem(BUSY)
                    });
                    problems
                        .lock()
                        .expect("nobody panics while holding it")
                        .extend(problem);
                }
            });
        }
    });
    let problems: Vec<String> = problems
        .into_inner()
        .expect("nobody panics while holding it");
    assert!(
        problems.is_empty(),
        "{} of {} blocks failed:\n{}",
        problems.len(),
        runs.len(),
        problems.join("\n")
    );
}

#[test]
fn dots_stand_for_anything_and_the_rest_is_literal() {
    for (pattern, line, fits) in [
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
        assert_eq!(matches(pattern, line), fits, "{pattern:?} on {line:?}");
    }
}

#[test]
fn blocks_and_what_they_expect_are_found() {
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
fn only_a_blocks_seconds_are_stretched() {
    assert_eq!(
        stretched("mesh demo --for 6 --only 6\n  timeout 3 a 3 || b --for", 6),
        "mesh demo --for 36 --only 6\n  timeout 18 a 3 || b --for"
    );
}

/// One block to run.
struct Run {
    chapter: PathBuf,
    line: usize,
    script: String,
    sandbox: bool,
    expected: Vec<String>,
}

impl Run {
    /// Runs the block with so many times the seconds that it says; what is wrong with it, if anything is.
    fn problem(&self, times: u32) -> Option<String> {
        let place = format!("{}:{}", self.chapter.display(), self.line);
        if self.sandbox && !is_root() && env::var_os("CI").is_none_or(|ci| ci != "true") {
            eprintln!("{place}: skipped: it needs root (with CI=true it is run all the same)");
            return None;
        }
        // One stream for both, in the order in which a reader sees them.
        let script = format!("exec 2>&1\n{}", stretched(&self.script, times));
        let output = Command::new("timeout")
            .args([TIME_LIMIT, "bash", "-euo", "pipefail", "-c", &script])
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
            eprintln!("{place}: as it says");
            return None;
        }
        let missing: String = missing
            .iter()
            .map(|line| format!("\n  no line is: {line}"))
            .collect();
        Some(format!(
            "{place}: {}{missing}\n  the script:\n{}\n  its output:\n{text}",
            output.status, self.script
        ))
    }
}

/// The blocks to run of a chapter, each with the expectations that follow it.
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
                        "{}:{number}: expects something of no block",
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

/// The script with so many times the seconds that it gives its programs.
fn stretched(script: &str, times: u32) -> String {
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

fn chapters() -> Vec<PathBuf> {
    let folder = root().join("docs/tutorial");
    let entries =
        fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let paths = entries.map(|entry| entry.expect("our own folders can be read").path());
    let mut chapters: Vec<_> = paths
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    chapters.sort();
    chapters
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("tests is a folder of the repository")
        .to_owned()
}
