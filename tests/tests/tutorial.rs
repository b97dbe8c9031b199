//! Runs the commands of the tutorial and of docs/first-change.md, and compares their output.
//!
//! An example that needs a sandbox is skipped without root unless `CI=true`. A failed one is run
//! again with longer times for `--for` and `timeout`, for busy machines.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs};

use diy_mesh_tests::examples::{Example, examples};
use diy_mesh_tests::repository::{files, files_with_extension, read, root};

/// Blocks that run concurrently.
const MAX_CONCURRENT_BLOCKS: usize = 2;
/// Factor for the times of a block on the second attempt.
const RETRY_TIME_FACTOR: u32 = 6;

#[test]
fn commands_print_expected_output() {
    let runs: Vec<Example> = files_with_extension("docs/tutorial", "md")
        .iter()
        .flat_map(|chapter| examples(chapter, &read(chapter)))
        .collect();
    assert!(!runs.is_empty(), "the tutorial contains no `sh test` block");
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..MAX_CONCURRENT_BLOCKS {
            scope.spawn(|| {
                while let Some(run) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let failure = failure(run, 1).and_then(|first| {
                        eprintln!("{first}\nretry with {RETRY_TIME_FACTOR} times the time");
                        failure(run, RETRY_TIME_FACTOR)
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

/// The commands change files, so they run in a copy of the repository.
#[test]
fn commands_of_the_first_change_print_expected_output() {
    let page = Path::new("docs/first-change.md");
    let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join("first-change");
    for file in files("") {
        let to = copy.join(&file);
        fs::create_dir_all(to.parent().expect("the file is in a folder"))
            .and_then(|()| fs::copy(root().join(&file), &to))
            .unwrap_or_else(|error| panic!("{}: {error}", to.display()));
    }
    let text = read(page);
    let examples = examples(page, &text);
    let blocks = text.lines().filter(|line| line.starts_with("```sh"));
    assert_eq!(blocks.count(), examples.len(), "a block is not tested");
    for example in examples {
        let failure = example.failure_of(&example.script, &copy);
        assert!(failure.is_none(), "{}", failure.unwrap_or_default());
    }
}

#[test]
fn scales_only_times() {
    assert_eq!(
        scale_times("mesh demo --for 6 --only 6\n  timeout 3 a 3 || b --for", 6),
        "mesh demo --for 36 --only 6\n  timeout 18 a 3 || b --for"
    );
}

/// Runs an example with its times multiplied by `times`. Returns a description of the failure.
fn failure(example: &Example, times: u32) -> Option<String> {
    let place = &example.place;
    let is_skipped = match example.needs.as_str() {
        "" => false,
        "sandbox" => !is_root() && env::var_os("CI").is_none_or(|ci| ci != "true"),
        other => panic!("{place}: the tutorial cannot provide {other:?}, only a sandbox"),
    };
    if is_skipped {
        eprintln!("{place}: skipped, requires root (with CI=true it runs without root)");
        return None;
    }
    let failure = example.failure_of(&scale_times(&example.script, times), &root());
    if failure.is_none() {
        eprintln!("{place}: passed");
    }
    failure
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

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}
