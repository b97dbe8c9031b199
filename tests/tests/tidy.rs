//! House rules that a program can check. Sizes and taste are for people to judge, not for a test.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The files, and folders of that name, of the proxy that may see generated types.
const SEE_GENERATED_TYPES: [&str; 4] = ["control", "discovery", "policy", "identity"];
/// Variables of every program rather than of ours: they are no configuration.
const EVERY_PROGRAMS_OWN: [&str; 2] = ["PATH", "NO_COLOR"];
const TEXT: [&str; 8] = [
    ".rs", ".md", ".toml", ".yaml", ".yml", ".proto", ".svg", ".sh",
];

#[test]
fn every_source_file_says_what_it_is() {
    let silent = sources()
        .into_iter()
        .filter(|path| !read(path).starts_with("//! "));
    none(
        "files do not open with `//! ` and what they are",
        silent.map(|path| path.display().to_string()),
    );
}

#[test]
fn the_environment_is_read_in_config_alone() {
    let elsewhere = sources().into_iter().filter(|path| {
        let allowed = path.ends_with("config.rs")
            || path.ends_with("build.rs")
            || path.starts_with("tests")
            || path.starts_with("bench");
        !allowed
            && !path.components().any(|part| part.as_os_str() == "tests")
            && reads_environment(code(path))
    });
    none(
        "files read the environment, which is for config.rs",
        elsewhere.map(|path| path.display().to_string()),
    );
}

#[test]
fn generated_types_stay_where_the_proxy_talks_to_the_controller() {
    let elsewhere = sources().into_iter().filter(|path| {
        let Ok(inside) = path.strip_prefix("proxy/src") else {
            return false;
        };
        let module = inside
            .iter()
            .next()
            .and_then(|first| Path::new(first).file_stem())
            .unwrap_or_default();
        !SEE_GENERATED_TYPES.iter().any(|allowed| module == *allowed)
            && code(path).contains("diy_mesh_proto::mesh")
    });
    none(
        "files of the proxy see generated types",
        elsewhere.map(|path| path.display().to_string()),
    );
}

#[test]
fn what_the_architecture_names_is_there() {
    let document = "ARCHITECTURE.md";
    let everything = files(&root());
    let text = read(Path::new(document));
    let gone = text
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
    none(
        "paths that ARCHITECTURE.md names are not there",
        gone.map(str::to_owned),
    );
}

#[test]
fn every_image_of_the_manifests_is_built_in_every_way() {
    let manifests = files(&root())
        .into_iter()
        .filter(|path| path.starts_with("manifests"))
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
        "the manifests name images, among them {images:?}"
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
        none(
            &format!("images of the manifests are not built by the {file}"),
            images.difference(&listed).map(|app| (*app).to_owned()),
        );
    }
}

fn reads_environment(mut code: String) -> bool {
    for name in EVERY_PROGRAMS_OWN {
        code = code.replace(&format!("env::var_os(\"{name}\")"), "");
    }
    code.contains("env::var")
}

/// Whether a quoted span is a path of ours: it begins with one of our folders, or ends like a file.
fn is_path(span: &str) -> bool {
    let path = span.split(['{', '*', ':']).next().unwrap_or_default();
    let plain = !path.is_empty()
        && path
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c))
        && !path.starts_with('/');
    let in_ours = span.contains('/')
        && path
            .split('/')
            .next()
            .is_some_and(|first| !first.is_empty() && root().join(first).is_dir());
    plain && (in_ours || TEXT.iter().any(|ending| path.ends_with(ending)))
}

/// A file's code without its tests, which stand last.
fn code(path: &Path) -> String {
    let text = read(path);
    text.split("#[cfg(test)]\nmod ")
        .next()
        .unwrap_or_default()
        .to_owned()
}

/// All Rust files, by their path from the top of the repository.
fn sources() -> Vec<PathBuf> {
    files(&root())
        .into_iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("our own folders can be read") {
        let entry = entry.expect("our own folders can be read");
        let (path, name) = (entry.path(), entry.file_name());
        if name == "target" || name.as_encoded_bytes().starts_with(b".") {
            continue;
        }
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push(
                path.strip_prefix(root())
                    .expect("found below it")
                    .to_owned(),
            );
        }
    }
    found
}

fn read(path: &Path) -> String {
    fs::read_to_string(root().join(path))
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("tests is a folder of the repository")
        .to_owned()
}

fn none(what: &str, found: impl Iterator<Item = String>) {
    let found: Vec<_> = found.collect();
    assert!(
        found.is_empty(),
        "{} {what}:\n  {}",
        found.len(),
        found.join("\n  ")
    );
}
