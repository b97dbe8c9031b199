//! Shell examples of documents, and the lines that they print.
//!
//! An example is a block that starts with ` ```sh test `, and the rest of that line says what it
//! needs: ` ```sh test sandbox `. Each line of a following block ` ```text expect ` must be a line
//! of its output; `...` matches any text.

use std::env;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use crate::sandbox::programs;

/// Time limit of an example in seconds.
const TIMEOUT: &str = "180";

/// An example of a document.
pub struct Example {
    /// The document, and the number of the line that starts the block.
    pub place: String,
    /// The environment that it needs: `sandbox`, `cluster`, or nothing.
    pub needs: String,
    /// The commands.
    pub script: String,
    /// The expected lines of the output.
    pub expected: Vec<String>,
}

impl Example {
    /// Runs these commands, not the example's, with bash in a directory and with the programs of the
    /// repository. Returns a description of the failure.
    pub fn failure_of(&self, script: &str, directory: &Path) -> Option<String> {
        // The target directory may be elsewhere.
        let folder = programs();
        let script = script.replace("target/debug/", &format!("{}/", folder.display()));
        // Merges both streams in order.
        let script = format!("exec 2>&1\n{script}");
        let place = &self.place;
        let output = Command::new("timeout")
            .args([TIMEOUT, "bash", "-euo", "pipefail", "-c", &script])
            .env("PATH", path_with(&folder))
            .current_dir(directory)
            .output();
        let output = output.unwrap_or_else(|error| panic!("{place}: cannot run bash: {error}"));
        let text = String::from_utf8_lossy(&output.stdout);
        let missing: Vec<_> = self
            .expected
            .iter()
            .filter(|pattern| !text.lines().any(|line| matches(pattern, line.trim_end())))
            .collect();
        if output.status.success() && missing.is_empty() {
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

/// The directories of PATH, after this one.
fn path_with(folder: &Path) -> OsString {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = [folder.to_owned()]
        .into_iter()
        .chain(env::split_paths(&path));
    env::join_paths(folders).expect("no directory of PATH has a colon")
}

/// The examples of a document, with their expected lines.
pub fn examples(document: &Path, text: &str) -> Vec<Example> {
    let mut examples: Vec<Example> = Vec::new();
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
        let place = format!("{}:{number}", document.display());
        if let Some(needs) = info.strip_prefix("sh test") {
            examples.push(Example {
                place,
                needs: needs.trim().to_owned(),
                script: block.join("\n"),
                expected: Vec::new(),
            });
        } else if info == "text expect" {
            let last = examples.last_mut();
            let example = last.unwrap_or_else(|| panic!("{place}: no example before this"));
            let lines = block.iter().map(|line| line.trim_end());
            let lines = lines.filter(|line| !matches!(*line, "" | "..."));
            example.expected.extend(lines.map(str::to_owned));
        }
    }
    examples
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

#[cfg(test)]
mod tests {
    use super::*;

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
    fn finds_examples_and_expectations() {
        let text = "# Title\n```sh\nno\n```\n```sh test\none\ntwo\n```\nwords\n```text expect\nyes\n```\n```sh test sandbox\nthree\n```\n```text\nno\n```\n";
        let found = examples(Path::new("chapter.md"), text);
        let [first, second] = found.as_slice() else {
            panic!("{} examples", found.len())
        };
        assert_eq!(
            (first.script.as_str(), first.needs.as_str()),
            ("one\ntwo", "")
        );
        assert_eq!(
            (first.place.as_str(), &*first.expected),
            ("chapter.md:5", &["yes".to_owned()][..])
        );
        assert_eq!(
            (second.script.as_str(), second.needs.as_str()),
            ("three", "sandbox")
        );
        assert_eq!(
            (second.place.as_str(), second.expected.len()),
            ("chapter.md:13", 0)
        );
    }
}
