//! Consistency of documents and code: links, headings, metrics, annotations, error codes, flags.

mod flags;
mod generated;
mod metrics;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use diy_mesh_injector::settings::SETTINGS;
use diy_mesh_model::code::Code;
use diy_mesh_tests::repository::{assert_none, files_with_extension, read, root};

#[test]
fn links_resolve() {
    let mut broken = Vec::new();
    for document in documents() {
        let text = without_code(&read(&document));
        for target in text
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split(')').next())
        {
            if target.contains("://") {
                continue;
            }
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let file = if path.is_empty() {
                document.clone()
            } else {
                document.parent().unwrap_or(Path::new("")).join(path)
            };
            let found = root().join(&file).exists()
                && (anchor.is_empty() || headings(&read(&file)).contains(anchor));
            if !found {
                broken.push(format!("{}: {target}", document.display()));
            }
        }
    }
    assert_none("broken links", broken);
}

/// A shell accepts most prose as a command: a block that was wrapped as text is noticed by its first
/// words.
#[test]
fn shell_examples_are_commands() {
    const PROGRAMS: [&str; 18] = [
        "cargo",
        "cat",
        "controller",
        "cp",
        "echo",
        "export",
        "grep",
        "kill",
        "kubectl",
        "make",
        "mesh",
        "openssl",
        "rm",
        "sed",
        "sha256sum",
        "test",
        "unshare",
        "until",
    ];
    let mut invalid = Vec::new();
    for document in documents() {
        for (line, script) in blocks(&read(&document), "sh") {
            let place = format!("{}:{line}", document.display());
            let parsed = Command::new("bash").args(["-n", "-c", &script]).output();
            let parsed = parsed.expect("bash runs");
            if !parsed.status.success() || !parsed.stderr.is_empty() {
                let error = String::from_utf8_lossy(&parsed.stderr);
                invalid.push(format!("{place}: {error}"));
            }
            let first_words = commands(&script).filter_map(|line| line.split(' ').next());
            invalid.extend(
                first_words
                    .filter(|word| {
                        let assigns = word.contains('=') && !word.starts_with('-');
                        let is_local = word.starts_with("target/debug/");
                        !PROGRAMS.contains(word) && !assigns && !is_local
                    })
                    .map(|word| format!("{place}: {word} is not a known program")),
            );
        }
    }
    assert_none("shell examples cannot be run", invalid);
}

/// The blocks of a language in a document, with the numbers of their first lines.
fn blocks(text: &str, language: &str) -> Vec<(usize, String)> {
    let begin = format!("```{language}");
    let mut blocks: Vec<(usize, String)> = Vec::new();
    let mut is_inside = false;
    for (number, line) in text.lines().enumerate() {
        match is_inside {
            true if line == "```" => is_inside = false,
            true => {
                let (_, script) = blocks.last_mut().expect("the block that is open");
                *script += &format!("{line}\n");
            }
            false if line.starts_with(&begin) => {
                is_inside = true;
                blocks.push((number + 2, String::new()));
            }
            false => {}
        }
    }
    blocks
}

/// The first line of each command at the top level of a script: not of a comment, and not of a
/// command that continues the line before, as text in quotes or after `<<` does.
fn commands(script: &str) -> impl Iterator<Item = &str> {
    let mut is_complete = true;
    let mut pending = String::new();
    script.lines().filter(move |line| {
        let is_first = is_complete;
        if is_first {
            pending.clear();
        }
        pending += &format!("{line}\n");
        let parsed = Command::new("bash").args(["-n", "-c", &pending]).output();
        let parsed = parsed.expect("bash runs");
        let ends_open = line.ends_with(['\\', '|']);
        is_complete = parsed.status.success() && parsed.stderr.is_empty() && !ends_open;
        is_first && !line.starts_with('#') && !line.is_empty()
    })
}

/// Each policy that a document shows is valid.
#[test]
fn policies_in_documents_are_valid() {
    let mut found = 0;
    let mut invalid = Vec::new();
    for document in documents() {
        let blocks = blocks(&read(&document), "yaml");
        let objects = |(_, text): &(_, String)| text.starts_with("apiVersion:");
        for (line, text) in blocks.into_iter().filter(objects) {
            let objects = diy_mesh_sandbox::manifest::parse(&text).expect("YAML");
            for status in diy_mesh_controller::explain::statuses(&objects) {
                found += 1;
                let conditions = status.parents.into_iter().flat_map(|one| one.conditions);
                // Targets and parents are not in the document.
                let problems = conditions.filter(|one| one.reason == "Invalid");
                let place = format!("{}:{line}", document.display());
                invalid.extend(problems.map(|one| format!("{place}: {}", one.message)));
            }
        }
    }
    assert!(found > 1, "{found} policies");
    assert_none("policies in documents are invalid", invalid);
}

/// A block `rust FILE` shows consecutive lines of that file, without their common indentation.
#[test]
fn code_in_documents_is_that_of_the_program() {
    let (mut shown, mut outdated) = (0, Vec::new());
    for document in documents() {
        let text = read(&document);
        for block in text.split("\n```rust ").skip(1) {
            let (path, code) = block.split_once('\n').expect("the block has a file");
            let code = code.split("\n```").next().unwrap_or_default();
            let unindented = |text: &str| {
                let lines = text.lines().map(str::trim_start);
                lines.fold(String::new(), |text, line| text + line + "\n")
            };
            shown += 1;
            if !unindented(&read(Path::new(path))).contains(&unindented(code)) {
                outdated.push(format!("{}: {path}", document.display()));
            }
        }
    }
    assert!(shown > 3, "cannot parse the documents: {shown} blocks");
    assert_none(
        "blocks of code differ from the file that they name",
        outdated,
    );
}

#[test]
fn documented_annotations_exist() {
    let sources = [
        "injector/src/annotations.rs",
        "injector/src/settings.rs",
        "controller/src/catalog/convert.rs",
    ];
    let known = sources.map(|path| read(Path::new(path))).concat();
    let marker = "diy-service-mesh/";
    let mut unknown = Vec::new();
    for document in documents() {
        for rest in read(&document).split(marker).skip(1) {
            let name: String = rest
                .chars()
                .take_while(|c| c.is_ascii_lowercase() || *c == '-')
                .collect();
            // "secrets/diy-service-mesh/token" and ".../roots.pem" are paths.
            if !["", "token", "roots"].contains(&name.as_str())
                && !known.contains(&format!("\"{marker}{name}\""))
            {
                unknown.push(format!("{}: {marker}{name}", document.display()));
            }
        }
    }
    assert_none("annotations that no component knows", unknown);
}

#[test]
fn reference_has_the_row_of_each_setting() {
    let reference = read(Path::new("docs/reference/annotations.md"));
    let rows = |from: &str, to: &str| -> Vec<&str> {
        let lines = reference.lines().skip_while(|line| !line.starts_with(from));
        lines.take_while(|line| !line.starts_with(to)).collect()
    };
    let settings: Vec<String> = SETTINGS
        .iter()
        .map(|one| {
            let (annotation, values, description) = (one.annotation, one.values, one.description);
            let row = format!("| `{annotation}` | {values} | {description} |");
            with_links_of("docs/reference/annotations.md", &row)
        })
        .collect();
    let documented = rows(
        "| `diy-service-mesh/inbound`",
        "| `diy-service-mesh/status`",
    );
    assert_eq!(
        documented, settings,
        "docs/reference/annotations.md and injector/src/settings.rs differ"
    );
}

#[test]
fn reference_has_the_row_of_each_error_code() {
    let reference = read(Path::new("docs/reference/http.md"));
    let table = reference
        .split("| `x-mesh-error` |")
        .nth(1)
        .and_then(|rest| rest.split("\n\n").next())
        .expect("the reference has the table");
    let rows = Code::ALL.map(|code| {
        let statuses: Vec<_> = code.statuses().iter().map(u16::to_string).collect();
        let status = statuses.join(", ");
        let status = Some(status).filter(|status| !status.is_empty());
        let grpc = code
            .grpc()
            .map(|grpc| format!("{} {}", grpc as u8, grpc.name()));
        let [status, grpc] = [status, grpc].map(|column| column.unwrap_or("its own".to_owned()));
        let (label, meaning, check) = (code.label(), code.meaning(), code.check());
        let row = format!("| `{label}` | {status} | {grpc} | {meaning} | {check} |");
        with_links_of("docs/reference/http.md", &row)
    });
    let documented: Vec<&str> = table.lines().skip(2).collect();
    assert_eq!(
        documented, rows,
        "docs/reference/http.md and crates/model/src/code.rs differ"
    );
}

#[test]
fn invariants_name_existing_tests() {
    let document = "ARCHITECTURE.md";
    let tests = tests_named_in(document, "## Invariants", "**`unsafe`", "invariant");
    assert!(tests > 30, "cannot parse {document}: {tests} tests");
}

#[test]
fn security_promises_name_existing_tests() {
    let tests = tests_named_in("docs/security.md", "## Promises", "## Limits", "promise");
    assert!(tests > 20, "cannot parse docs/security.md: {tests} tests");
}

#[test]
fn kubernetes_fields_name_existing_tests() {
    let document = "docs/reference/kubernetes.md";
    let end = "### Fields without effect";
    let tests = tests_named_in(document, "## Kubernetes fields", end, "field");
    assert!(tests > 20, "cannot parse {document}: {tests} tests");
}

/// The cases of the drills are the rows of the table of faults.
#[test]
fn troubleshooting_has_the_row_of_each_fault_of_a_drill() {
    let mut drilled: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for drill in ["sandbox", "cluster"] {
        let code = read(Path::new(&format!("tests/tests/{drill}/drill.rs")));
        for case in code.split("fault: \"").skip(1) {
            let fault = case.split('"').next().unwrap_or_default().to_owned();
            let rest = case.split_once("command: \"");
            let words = rest.expect("a command").1.split([' ', '"']).take(2);
            let command = format!("`{}`", Vec::from_iter(words).join(" "));
            drilled.entry(fault).or_default().insert(command);
        }
    }
    let text = read(Path::new("docs/troubleshooting.md"));
    let table = text.split("| fault | command |").nth(1).expect("a table");
    let table = table.split("\n\n").next().unwrap_or_default();
    let cells = |row: &str| {
        let mut cells = row.split(" | ");
        let fault = cells.next()?.trim_start_matches("| ").to_owned();
        let commands = cells.next()?.split(", ").map(str::to_owned);
        Some((fault, commands.collect()))
    };
    let documented: BTreeMap<_, _> = table.lines().skip(2).filter_map(cells).collect();
    assert_eq!(
        documented, drilled,
        "docs/troubleshooting.md and the drills differ"
    );
    assert!(drilled.len() >= 20, "{} faults", drilled.len());
}

#[test]
fn gateway_api_features_name_existing_tests() {
    let document = "docs/gateway-api.md";
    let tests = tests_named_in(document, "## Features", "## Decisions", "feature");
    assert!(tests > 40, "cannot parse {document}: {tests} tests");
}

/// Checks that each row of the tables between two headings names tests in its last column, and that
/// they exist. Returns their number. `header` begins the first row of each table.
fn tests_named_in(document: &str, from: &str, to: &str, header: &str) -> usize {
    let code: String = files_with_extension("", "rs")
        .iter()
        .map(|path| read(path))
        .collect();
    let text = read(Path::new(document));
    let section = text
        .split(from)
        .nth(1)
        .and_then(|rest| rest.split(to).next())
        .expect("the document has both headings");
    let is_header = |line: &str| line.starts_with(&format!("| {header} |"));
    let rows = section
        .lines()
        .filter(|line| line.starts_with('|') && !is_header(line));
    let (mut missing, mut tests) = (Vec::new(), 0);
    for row in rows.filter(|row| !row.starts_with("|---")) {
        let cell = row.trim_end_matches('|').rsplit('|').next();
        let cell = cell.unwrap_or_default();
        let named: Vec<&str> = cell.split('`').skip(1).step_by(2).collect();
        assert!(!named.is_empty(), "no test in: {row}");
        tests += named.len();
        let exists =
            |name: &str| code.contains(&format!("fn {name}()")) || root().join(name).is_dir();
        missing.extend(
            named
                .into_iter()
                .filter(|name| !exists(name))
                .map(str::to_owned),
        );
    }
    assert_none("tests that the document names do not exist", missing);
    tests
}

/// A text of the code in a page of the reference. Its links are anchors of any page, or documents
/// beside the reference.
fn with_links_of(page: &str, text: &str) -> String {
    let mut parts = text.split("](");
    let mut linked = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        linked += "](";
        match part.split(')').next().and_then(|to| to.strip_prefix('#')) {
            Some(anchor) if headings(&read(Path::new(page))).contains(anchor) => {}
            Some(anchor) => linked += &page_with(anchor),
            None => linked += "../",
        }
        linked += part;
    }
    linked
}

/// The name of the reference's page with a heading.
fn page_with(anchor: &str) -> String {
    let pages = files_with_extension("docs/reference", "md");
    let mut found = pages
        .iter()
        .filter(|page| headings(&read(page)).contains(anchor));
    let page = found.next().and_then(|page| page.file_name());
    let page = page.unwrap_or_else(|| panic!("the reference has no heading of #{anchor}"));
    page.to_string_lossy().into_owned()
}

/// Anchors of a document's headings in GitHub's format.
fn headings(text: &str) -> BTreeSet<String> {
    let headings = without_code(text);
    headings
        .lines()
        .filter(|line| line.starts_with('#'))
        .map(|line| anchor(line.trim_start_matches('#').trim()))
        .collect()
}

fn anchor(heading: &str) -> String {
    let kept = heading
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| {
        if c == ' ' {
            '-'
        } else {
            c.to_ascii_lowercase()
        }
    })
    .collect()
}

/// A document without code blocks, in which `#` starts a comment.
fn without_code(text: &str) -> String {
    text.split("```").step_by(2).collect()
}

fn documents() -> Vec<PathBuf> {
    let mut documents: Vec<PathBuf> = [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "bench/README.md",
    ]
    .map(PathBuf::from)
    .into();
    documents.extend(files_with_extension("docs", "md"));
    documents
}
