//! The readings of paths by libraries of Node.js, Python, Go, Java and PHP, nginx, and Tomcat's
//! rules, compared with the readings that authorization judges. The programs are in
//! `proto/tests/readers`. `UPDATE_READERS=1` writes the table of the first paths, which the unit
//! tests of the readings use.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use diy_mesh_proto::authorization::other_readings;
use diy_mesh_testkit::has_program;

const PROGRAMS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/readers");
/// The number of generated paths, and of the paths in the table.
const PATHS: usize = 20_000;
const TABLE_PATHS: usize = 400;
/// Parts of paths that servers read in different ways.
const PIECES: [&str; 23] = [
    "/", "/", "//", "\\", "%2F", "%2f", "%5C", "/.", "/..", "/%2e", "/.%2E", "/%2e%2e", ".", "..",
    ";", ";x=1", "%3B", "/a", "/b", "admin", "%61", "x", ":",
];

#[test]
fn readings_of_paths_contain_those_of_libraries() {
    let paths = generate();
    let Some(read_by_all) = run_readers(&paths) else {
        return;
    };
    let mut failures = vec![];
    let mut count = 0;
    let mut table = String::new();
    for (position, (path, readings)) in paths.iter().zip(&read_by_all).enumerate() {
        let readings = distinct(path, readings);
        if position < TABLE_PATHS && !readings.is_empty() {
            let line = format!("{path}\t{}", readings.join("\t"));
            writeln!(table, "{}", line.trim_end()).expect("a string grows");
        }
        let Some(others) = other_readings(path.as_bytes(), false) else {
            continue;
        };
        for reading in readings {
            let (_, read) = reading.split_once('=').expect("NAME=PATH");
            let is_same =
                |other: &Vec<u8>| trimmed(&String::from_utf8_lossy(other)) == trimmed(read);
            count += 1;
            if !others.iter().any(is_same) {
                failures.push(format!("{path} {reading}"));
            }
        }
    }
    let first = &failures[..failures.len().min(40)];
    assert!(
        failures.is_empty(),
        "{} of {count}: {first:#?}",
        failures.len()
    );
    assert!(count > PATHS, "{count}");
    let file = Path::new(PROGRAMS).join("table.tsv");
    if std::env::var_os("UPDATE_READERS").is_some() {
        fs::write(&file, &table).expect("the table is written");
    }
    let written = fs::read_to_string(file).expect("there is a table");
    assert!(
        written == table,
        "the table differs, UPDATE_READERS=1 writes it"
    );
}

/// Paths of random pieces, always the same.
fn generate() -> Vec<String> {
    let mut random = fastrand::Rng::with_seed(49);
    let path = |random: &mut fastrand::Rng| {
        let pieces = (0..random.usize(1..7)).map(|_| PIECES[random.usize(..PIECES.len())]);
        format!("/{}", pieces.collect::<String>())
    };
    (0..PATHS).map(|_| path(&mut random)).collect()
}

/// The reading of each path by each reader, as NAME=PATH. `None` where a reader is missing.
fn run_readers(paths: &[String]) -> Option<Vec<Vec<String>>> {
    let programs = ["node", "python3", "go", "java", "php", "nginx"];
    if !programs.into_iter().all(has_program) {
        return None;
    }
    let input = Path::new(env!("CARGO_TARGET_TMPDIR")).join("paths");
    fs::write(&input, paths.join("\n") + "\n").expect("the paths are written");
    let mut all = vec![vec![]; paths.len()];
    for command in [
        ["node", "reader.js"].as_slice(),
        &["python3", "reader.py"],
        &["go", "run", "reader.go"],
        &["java", "Reader.java"],
        &["php", "reader.php"],
        &["python3", "nginx.py"],
    ] {
        let stdin = File::open(&input).expect("the paths are readable");
        let mut program = Command::new(command[0]);
        program.args(&command[1..]).current_dir(PROGRAMS);
        let output = program.stdin(stdin).stderr(Stdio::inherit()).output();
        let output = output.expect("the program starts");
        assert!(output.status.success(), "{command:?} failed");
        let output = String::from_utf8(output.stdout).expect("readings are UTF-8");
        let lines: Vec<_> = output.lines().collect();
        assert_eq!(lines.len(), paths.len(), "{command:?}");
        for (readings, line) in all.iter_mut().zip(lines) {
            readings.extend(
                line.split('\t')
                    .filter(|one| !one.is_empty())
                    .map(str::to_owned),
            );
        }
    }
    Some(all)
}

/// The readings other than the path, each by one of its readers.
fn distinct(path: &str, readings: &[String]) -> Vec<String> {
    let mut distinct: Vec<String> = vec![];
    for reading in readings {
        let read = |one: &str| {
            one.split_once('=')
                .map(|(_, path)| trimmed(path).to_owned())
        };
        let is_known = distinct.iter().any(|known| read(known) == read(reading));
        if !is_known && read(reading).is_some_and(|read| read != trimmed(path)) {
            distinct.push(reading.clone());
        }
    }
    distinct
}

/// A path without slashes at its end, which rules ignore where servers may, and with at most two
/// at its start: servers differ in the number of empty elements there.
fn trimmed(path: &str) -> &str {
    let mut path = path.trim_end_matches('/');
    while path.starts_with("///") {
        path = &path[1..];
    }
    path
}
