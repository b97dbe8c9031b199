//! Conventions of this repository that a program can check: file headers, module boundaries, paths,
//! vocabulary.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use diy_mesh_tests::repository::{assert_none, files, files_with_extension, read, root};

/// Modules of the proxy that may use generated types.
const MODULES_WITH_GENERATED_TYPES: [&str; 9] = [
    "proxy/src/discovery",
    "proxy/src/inbound/edges",
    "proxy/src/inbound/external",
    "proxy/src/inbound/policy",
    "proxy/src/inbound/token",
    "proxy/src/route",
    "proxy/src/secure/control",
    "proxy/src/secure/identity",
    "proxy/src/serve/outside/tests",
];
/// The folders and files of crates in the order of their imports.
const ORDERS: [Order; 4] = [
    Order {
        sources: "proxy/src",
        folders: &[
            "path",
            "serve",
            "context",
            "discovery",
            "upstream",
            "secure",
            "observe",
            "inbound",
            "egress",
            "route",
            "http",
            "limits",
            "endpoint error labels protocol",
        ],
        earlier: &[
            // The record of an exchange owns the copy for a mirror.
            ("proxy/src/context/record.rs", "serve"),
            // A balancer follows the state of a resource.
            ("proxy/src/upstream/balance/mod.rs", "discovery"),
        ],
    },
    Order {
        sources: "controller/src",
        folders: &[
            "scrape",
            "grpc",
            "explain",
            "serving",
            "authority",
            "fetch",
            "publish",
            "status",
            "replicas",
            "proxies",
            "index",
            "catalog",
            "edges",
            "kinds",
            "quota",
            "authenticate",
            "object",
            "api",
            "file",
            "metrics",
            "unix_time",
        ],
        earlier: &[],
    },
    Order {
        sources: "mesh/src",
        folders: &[
            "commands",
            "dashboard",
            "plan",
            "check",
            "egress",
            "edges",
            "files",
            "sample",
            "changes",
            "identity",
            "install",
            "controller",
            "proxies",
            "routes",
            "authorization",
            "traffic",
            "why",
            "cluster",
            "pods",
            "names",
            "terminal",
            "time",
            "turns",
            "yaml",
        ],
        earlier: &[],
    },
    Order {
        sources: "sandbox/src",
        folders: &[
            "internal", "enter", "node", "client", "socket", "launch", "exec", "manifest",
            "protocol", "page",
        ],
        earlier: &[
            // The server of the socket reads the state that the client keeps.
            ("sandbox/src/socket.rs", "client"),
        ],
    },
];
/// Environment variables with a common meaning, which are no configuration.
const COMMON_VARIABLES: [&str; 3] = ["PATH", "NO_COLOR", "XDG_RUNTIME_DIR"];
/// Extensions of files that ARCHITECTURE.md may name.
const TEXT_EXTENSIONS: [&str; 8] = [
    ".rs", ".md", ".toml", ".yaml", ".yml", ".proto", ".svg", ".sh",
];
/// Pronouns in place of nouns in the documents. Lower it as they become fewer.
const MAX_PRONOUNS: usize = 95;
/// Pronouns in place of nouns, and beginnings of sentences that are not the subject.
const PRONOUNS: [&str; 6] = [
    " that of ",
    " those of ",
    " what of ",
    ". Of ",
    ". What ",
    ". Whoever ",
];
/// List of banned words with their replacements.
const BANNED_WORDS: &str = "tests/banned-words.txt";
/// Top-level entries that are not yet checked for banned words. Remove each as soon as it passes.
const QUOTES_BANNED_WORDS: &str = "CONTRIBUTING.md";

#[test]
fn every_source_file_has_a_module_comment() {
    let undocumented = sources()
        .into_iter()
        .filter(|path| !read(path).starts_with("//! "));
    assert_none(
        "files do not start with a module comment (`//! `)",
        undocumented.map(|path| path.display().to_string()),
    );
}

#[test]
fn only_config_reads_the_environment() {
    let elsewhere = sources().into_iter().filter(|path| {
        let allowed = path.ends_with("config.rs")
            || path.ends_with("build.rs")
            || path.starts_with("tests")
            || path.starts_with("crates/testkit")
            || path.starts_with("bench");
        !allowed
            && !path.components().any(|part| part.as_os_str() == "tests")
            && reads_environment(code(path))
    });
    assert_none(
        "files other than config.rs read the environment",
        elsewhere.map(|path| path.display().to_string()),
    );
}

#[test]
fn only_the_terminal_module_of_the_command_line_prints() {
    let elsewhere = sources().into_iter().filter(|path| {
        path.starts_with("mesh/src")
            && path != Path::new("mesh/src/terminal.rs")
            && ["print!(", "println!(", "io::stdout().", "io::stderr()."]
                .iter()
                .any(|output| code(path).contains(output))
    });
    assert_none(
        "files print past the filter of control characters, mesh/src/terminal.rs",
        elsewhere.map(|path| path.display().to_string()),
    );
}

#[test]
fn only_control_plane_modules_use_generated_types() {
    let elsewhere = sources().into_iter().filter(|path| {
        let name = path.to_string_lossy();
        name.starts_with("proxy/src")
            && !MODULES_WITH_GENERATED_TYPES
                .iter()
                .any(|allowed| name.starts_with(allowed))
            && code(path).contains("diy_mesh_proto::mesh")
    });
    assert_none(
        "files of the proxy use generated types",
        elsewhere.map(|path| path.display().to_string()),
    );
}

#[test]
fn folders_import_only_from_later_ones() {
    ORDERS.iter().for_each(Order::check);
}

/// The order of the folders and files of a crate: code imports only from its own and from later
/// ones. `lib.rs`, `main.rs` and `config.rs` are outside of this order.
struct Order {
    sources: &'static str,
    /// Names of folders and files. Several names in one entry may import from each other.
    folders: &'static [&'static str],
    /// Imports of an earlier folder that are still there: files, and the folders.
    earlier: &'static [(&'static str, &'static str)],
}

impl Order {
    fn check(&self) {
        let (mut wrong, mut earlier) = (Vec::new(), BTreeSet::new());
        for path in sources() {
            let Ok(relative) = path.strip_prefix(self.sources) else {
                continue;
            };
            let parts: Vec<_> = relative.iter().filter_map(|part| part.to_str()).collect();
            let folder = parts[0].trim_end_matches(".rs");
            let is_test = |part: &&str| part.contains("test");
            if parts.iter().any(is_test) || ["lib", "main", "config"].contains(&folder) {
                continue;
            }
            let Some(own) = self.position(folder) else {
                wrong.push(format!("{} is in no folder of the order", path.display()));
                continue;
            };
            let is_folder = parts[parts.len() - 1] == "mod.rs";
            let depth = parts.len() - usize::from(is_folder);
            for used in imports(&code_lines(&path), depth) {
                if self.position(&used).is_none_or(|used| used >= own) {
                    continue;
                }
                let import = (path.display().to_string(), used);
                if !self.earlier.contains(&(&import.0, &import.1)) {
                    wrong.push(format!("{} imports from {}", import.0, import.1));
                }
                earlier.insert(import);
            }
        }
        let sources = self.sources;
        assert_none(&format!("imports of an earlier folder of {sources}"), wrong);
        let known = self.earlier.len();
        assert_eq!(earlier.len(), known, "{sources}: remove what is gone");
    }

    fn position(&self, name: &str) -> Option<usize> {
        let mut folders = self.folders.iter();
        folders.position(|folders| folders.split(' ').any(|folder| folder == name))
    }
}

/// The code of a file without its tests and comments.
fn code_lines(path: &Path) -> String {
    let text = read(path);
    let code = text.split("#[cfg(test)]\nmod tests {").next();
    let lines = code.unwrap_or_default().lines();
    let lines = lines.filter(|line| !line.trim_start().starts_with("//"));
    lines.flat_map(|line| [line, "\n"]).collect()
}

/// The names after `crate::` in the code of a module, also in braces, and after `super::` as often
/// as the module is below the root of its crate.
fn imports(code: &str, depth: usize) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for root in ["crate::", &"super::".repeat(depth)] {
        for (at, _) in code.match_indices(root) {
            if code[..at].ends_with(|c: char| c.is_alphanumeric() || "_:$".contains(c)) {
                continue;
            }
            let rest = &code[at + root.len()..];
            let Some(list) = rest.strip_prefix('{') else {
                names.insert(module(rest));
                continue;
            };
            let (mut level, mut is_first) = (1, true);
            for item in list.split_inclusive(['{', '}', ',']) {
                if is_first {
                    names.insert(module(item.trim_start()));
                }
                match item.chars().last() {
                    Some('{') => level += 1,
                    Some('}') => level -= 1,
                    _ => {}
                }
                if level == 0 {
                    break;
                }
                is_first = level == 1 && item.ends_with(',');
            }
        }
    }
    names.remove("");
    names
}

/// The lower-case name at the beginning of a path.
fn module(path: &str) -> String {
    let name = path.chars();
    name.take_while(|c| c.is_ascii_lowercase() || *c == '_')
        .collect()
}

#[test]
fn imports_are_found_in_braces_and_by_super() {
    let code = "use crate::{\n    a::{b, c},\n    d,\n    e::F,\n};\nuse super::super::{g, h::I};\n\
        let j = crate::k::l(super::m, xcrate::n);";
    let expected = ["a", "d", "e", "g", "h", "k"].map(str::to_owned);
    assert_eq!(imports(code, 2), BTreeSet::from(expected));
}

#[test]
fn pages_for_newcomers_are_short() {
    for (page, max_lines) in [("README.md", 130), ("ARCHITECTURE.md", 350)] {
        let lines = read(Path::new(page)).lines().count();
        assert!(
            lines <= max_lines,
            "{page}: {lines} lines, expected at most {max_lines}"
        );
    }
}

#[test]
fn pages_of_the_reference_are_short() {
    let pages = files_with_extension("docs/reference", "md");
    let long = pages.iter().filter_map(|page| {
        let lines = read(page).lines().count();
        (lines > 500).then(|| format!("{}: {lines} lines", page.display()))
    });
    assert_none("pages of the reference with over 500 lines", long);
}

/// A noun is repeated instead, and stands at the beginning of a sentence.
#[test]
fn documents_have_few_pronouns_in_place_of_nouns() {
    let documents = files_with_extension("", "md");
    let found: usize = documents
        .iter()
        .map(|document| {
            let text = read(document);
            let words: Vec<_> = text.split_whitespace().collect();
            pronouns(&words.join(" "), &[". None "]).len()
        })
        .sum();
    assert!(
        found <= MAX_PRONOUNS,
        "{found} of {PRONOUNS:?} in the documents, expected at most {MAX_PRONOUNS}"
    );
}

/// The same holds for comments, whose reader often sees one sentence only.
#[test]
fn comments_have_no_pronouns_in_place_of_nouns() {
    let mut found = Vec::new();
    for path in sources() {
        for (number, text) in comments(&read(&path)) {
            let place = format!("{}:{number}", path.display());
            let phrases = pronouns(&text, &[" That of ", " Those of "]);
            found.extend(phrases.iter().map(|phrase| format!("{place}:{phrase}")));
        }
    }
    assert_none("comments with pronouns in place of nouns", found);
}

#[test]
fn comments_are_read_by_paragraph() {
    let code = "//! Those of a\n//! module.\n//!\n//! - What (that\n//! of it)\nuse a; // None";
    let expected = [(1, ". Those of a module."), (4, ". What that of it)")];
    let expected = expected.map(|(number, text): (usize, &str)| (number, text.to_owned()));
    assert_eq!(comments(code), expected);
}

/// The occurrences of [`PRONOUNS`] and `more` in words with one space between them, each with the
/// words after it.
fn pronouns(text: &str, more: &[&str]) -> Vec<String> {
    PRONOUNS
        .iter()
        .chain(more)
        .flat_map(|pattern| text.match_indices(*pattern))
        .map(|(at, _)| text[at..].chars().take(60).collect())
        .collect()
}

/// The paragraphs of the comment lines of code, each with the number of its first line. Each text
/// has a period, as after an earlier sentence, and the words with one space between them.
fn comments(code: &str) -> Vec<(usize, String)> {
    let (mut paragraphs, mut is_inside) = (Vec::new(), false);
    for (line, number) in code.lines().zip(1..) {
        let comment = line.trim_start().strip_prefix("//").unwrap_or_default();
        let text = comment.trim_start_matches(['/', '!']).trim();
        if !text.is_empty() && !is_inside {
            paragraphs.push((number, ".".to_owned()));
        }
        is_inside = !text.is_empty();
        if let Some((_, paragraph)) = paragraphs.last_mut() {
            for word in text.split_whitespace().filter(|word| *word != "-") {
                paragraph.push(' ');
                paragraph.push_str(word.trim_start_matches(['(', '"']));
            }
        }
    }
    paragraphs
}

#[test]
fn paths_in_architecture_exist() {
    let everything = files("");
    let text = read(Path::new("ARCHITECTURE.md")) + &read(Path::new("docs/decisions.md"));
    let missing = text
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|span| is_path(span))
        .filter(|span| {
            let named = span
                .split(['{', '*', ':'])
                .next()
                .unwrap_or_default()
                .trim_end_matches('/');
            !root().join(named).exists() && !everything.iter().any(|file| file.ends_with(named))
        });
    assert_none(
        "paths in ARCHITECTURE.md or docs/decisions.md do not exist",
        missing.map(str::to_owned),
    );
}

#[test]
fn walks_pass_few_files_and_return_to_none() {
    for (heading, max_files) in [("### A request", 10), ("## A certificate request", 12)] {
        check_walk(heading, max_files);
    }
}

/// Checks the list of files under a heading of ARCHITECTURE.md: its length, that no file is listed
/// twice, and that an earlier file imports each one.
fn check_walk(heading: &str, max_files: usize) {
    let text = read(Path::new("ARCHITECTURE.md"));
    let section = text
        .split(&format!("\n{heading}\n"))
        .nth(1)
        .and_then(|rest| rest.split("\n#").next())
        .unwrap_or_else(|| panic!("ARCHITECTURE.md has no section `{heading}`"));
    let walk: Vec<&str> = section
        .lines()
        .filter(|line| line.starts_with(|first: char| first.is_ascii_digit()))
        .map(|line| line.split('`').nth(1).unwrap_or(line))
        .collect();
    assert!(
        (5..=max_files).contains(&walk.len()),
        "{heading}: {} files, expected at most {max_files}: {walk:?}",
        walk.len()
    );
    assert_eq!(
        walk.iter().collect::<BTreeSet<_>>().len(),
        walk.len(),
        "{heading}: a file is listed twice: {walk:?}"
    );
    let unreachable = (1..walk.len()).filter(|&position| {
        let (earlier, path) = (&walk[..position], Path::new(walk[position]));
        !earlier
            .iter()
            .any(|file| mentions(&code(Path::new(file)), path))
    });
    assert_none(
        &format!("files under {heading} are not imported by an earlier one"),
        unreachable.map(|position| walk[position].to_owned()),
    );
}

/// Whether code refers to the module in a file, or to the crate of the file.
fn mentions(code: &str, path: &Path) -> bool {
    let names: Vec<_> = path.iter().filter_map(|part| part.to_str()).collect();
    let folder = names.iter().take_while(|name| **name != "src").last();
    let crate_name = folder.expect("the path begins with the folder of the crate");
    let file = names[names.len() - 1].trim_end_matches(".rs");
    let module = match file {
        "mod" => names[names.len() - 2],
        file => file,
    };
    code.contains(&format!("mod {module};"))
        || code.contains(&format!("{module}::"))
        || code.contains(&format!("{}::", crate_name.replace('-', "_")))
}

#[test]
fn image_builds_see_every_workspace_member() {
    let manifest = read(Path::new("Cargo.toml"));
    let members = manifest
        .split("\nmembers = [")
        .nth(1)
        .and_then(|rest| rest.split(']').next())
        .expect("Cargo.toml lists the members of the workspace");
    let (ignored, tiltfile) = (
        read(Path::new(".dockerignore")),
        read(Path::new("Tiltfile")),
    );
    let directories: BTreeSet<&str> = members
        .split('"')
        .skip(1)
        .step_by(2)
        .filter_map(|member| member.split('/').next())
        .collect();
    assert!(directories.len() > 5, "cannot parse Cargo.toml: {members}");
    let missing = directories.into_iter().filter(|directory| {
        !ignored.lines().any(|line| line == format!("!{directory}"))
            || !tiltfile.contains(&format!("'{directory}'"))
    });
    assert_none(
        "workspace members are missing in .dockerignore or Tiltfile",
        missing.map(str::to_owned),
    );
}

#[test]
fn toolchain_and_image_have_the_required_version_of_rust() {
    let quoted = |file: &str, key: &str| {
        let text = read(Path::new(file));
        let value = text.split(&format!("\n{key} = \"")).nth(1);
        let value = value.and_then(|rest| rest.split('"').next());
        value
            .unwrap_or_else(|| panic!("{file} has no {key}"))
            .to_owned()
    };
    let version = quoted("Cargo.toml", "rust-version");
    let toolchain = quoted("rust-toolchain.toml", "channel");
    assert!(
        toolchain == version || toolchain.starts_with(&format!("{version}.")),
        "rust-toolchain.toml has {toolchain}, Cargo.toml {version}"
    );
    let image = format!("FROM rust:{version}-");
    assert!(
        read(Path::new("Dockerfile")).contains(&image),
        "Dockerfile: expected {image}"
    );
}

#[test]
fn every_image_of_the_manifests_is_built() {
    // The manifests of the chart are templates.
    let manifests = files("manifests")
        .into_iter()
        .filter(|path| !path.starts_with("manifests/chart"))
        .map(|path| read(&path))
        .collect::<String>();
    let images: BTreeSet<_> = manifests
        .split("diy-sm-")
        .skip(1)
        .filter_map(|rest| rest.split_once(':'))
        .map(|(app, _)| app)
        .collect();
    assert!(
        images.len() > 2,
        "the manifests contain only the images {images:?}"
    );
    for (file, list, end) in [
        ("Dockerfile", "FROM run AS ", "\n"),
        ("Makefile", "APPS := ", "\n"),
        ("Tiltfile", "for app in [", "]"),
    ] {
        let text = read(Path::new(file));
        let listed = text
            .split(list)
            .skip(1)
            .filter_map(|rest| rest.split(end).next())
            .flat_map(|apps| apps.split([' ', ',', '\'']));
        let listed: BTreeSet<_> = listed.collect();
        assert_none(
            &format!("images of the manifests are missing in {file}"),
            images.difference(&listed).map(|app| (*app).to_owned()),
        );
    }
}

#[test]
fn no_banned_words() {
    let list = read(Path::new(BANNED_WORDS));
    let banned: Vec<_> = list
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| {
            line.split_once(" | ")
                .unwrap_or_else(|| panic!("no ` | ` in `{line}`"))
        })
        .collect();
    let mut violations = Vec::new();
    for path in text_files() {
        let Ok(text) = fs::read_to_string(root().join(&path)) else {
            continue; // Binary, such as a fuzz corpus.
        };
        for (line, number) in text.lines().zip(1..) {
            for (word, replacement) in banned.iter().filter(|(word, _)| contains_word(line, word)) {
                let place = format!("{}:{number}", path.display());
                violations.push(format!("{place}: `{word}`, write instead: {replacement}"));
            }
        }
    }
    assert_none(&format!("banned words ({BANNED_WORDS})"), violations);
}

#[test]
fn markdown_wraps_at_100_columns() {
    let mut violations = Vec::new();
    for path in text_files() {
        if path.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        let text = read(&path);
        // Inside of code, which each fence begins or ends.
        let mut is_code = false;
        for (line, number) in text.lines().zip(1..) {
            is_code ^= line.trim_start().starts_with("```");
            let is_exempt = is_code || line.starts_with('|') || line.starts_with("    ");
            if !is_exempt && line.chars().count() > 100 {
                violations.push(format!("{}:{number}", path.display()));
            }
        }
    }
    assert_none("lines over 100 columns", violations);
}

#[test]
fn banned_words_match_whole_words() {
    for (line, word, expected) in [
        ("const PATIENCE: Duration", "PATIENCE", true),
        ("--patience 5", "PATIENCE", false),
        ("LONG_PATIENCE", "PATIENCE", false),
        ("Tries in vain.", "in vain", true),
        ("fn waits_in_vain()", "in vain", true),
        ("if self.may_complain()", "may_complain", true),
        ("indices", "dice", false),
        ("indices and dice", "dice", true),
    ] {
        assert_eq!(contains_word(line, word), expected, "{word} in {line}");
    }
}

/// Whether a line contains a word of the list: an identifier if it has a capital letter, otherwise
/// a phrase.
fn contains_word(line: &str, word: &str) -> bool {
    let is_identifier = word.contains(char::is_uppercase);
    let normalize = |text: &str| {
        if is_identifier {
            text.to_owned()
        } else {
            text.to_lowercase().replace('_', " ")
        }
    };
    let (line, word) = (normalize(line), normalize(word));
    let is_word_char = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(&word).any(|(at, _)| {
        !line[..at].ends_with(is_word_char) && !line[at + word.len()..].starts_with(is_word_char)
    })
}

/// Files to check for banned words, including `.ci` and `.github`. Excludes generated files and the license.
fn text_files() -> Vec<PathBuf> {
    let mut paths = files("");
    paths.extend(files(".ci"));
    paths.extend(files(".github"));
    paths.retain(|path| {
        path != Path::new(BANNED_WORDS)
            && path != Path::new("tests/tests/tidy.rs")
            && path != Path::new("Cargo.lock")
            && path != Path::new("LICENSE")
            && path != Path::new(QUOTES_BANNED_WORDS)
    });
    paths
}

fn reads_environment(mut code: String) -> bool {
    for name in COMMON_VARIABLES {
        code = code.replace(&format!("env::var_os(\"{name}\")"), "");
    }
    code.contains("env::var")
}

/// Whether a quoted span is a path of this repository: it starts with a top-level directory or has
/// a file extension.
fn is_path(span: &str) -> bool {
    let path = span.split(['{', '*', ':']).next().unwrap_or_default();
    let plain = !path.is_empty()
        && path
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c))
        && !path.starts_with('/');
    let in_repository = span.contains('/')
        && path
            .split('/')
            .next()
            .is_some_and(|first| !first.is_empty() && root().join(first).is_dir());
    plain && (in_repository || TEXT_EXTENSIONS.iter().any(|ending| path.ends_with(ending)))
}

/// Source code of a file without its tests, which are at its end.
fn code(path: &Path) -> String {
    let text = read(path);
    text.split("#[cfg(test)]\nmod ")
        .next()
        .unwrap_or_default()
        .to_owned()
}

/// All Rust files, relative to the repository.
fn sources() -> Vec<PathBuf> {
    files_with_extension("", "rs")
}
