//! The fuzz targets without libFuzzer: every target holds for its seeds, and for some thousands of
//! random changes of them. The RNG is seeded, so that failures are reproducible.

#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

use diy_mesh_proxy_fuzz::{TARGETS, Target};
use fastrand::Rng;

/// Inputs that chance makes for each target.
const TRIES: usize = 2000;

#[test]
fn each_target_has_seeds_and_a_program_and_there_are_no_others() {
    let targets: BTreeSet<_> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(names("corpus"), targets, "folders in corpus/");
    assert_eq!(names("targets"), targets, "files in targets/");
    let manifest = fs::read_to_string(folder("Cargo.toml")).unwrap();
    let programs: BTreeSet<_> = manifest
        .split("name = \"fuzz-")
        .skip(1)
        .map(|rest| rest.split('"').next().unwrap().to_owned())
        .collect();
    assert_eq!(programs, targets, "programs in Cargo.toml");
    for target in targets {
        assert!(!seeds(&target).is_empty(), "corpus/{target} is empty");
    }
}

#[test]
fn every_seed_holds() {
    for (name, target) in TARGETS {
        for (seed, bytes) in seeds(name) {
            holds(target, &bytes, &format!("{name}, seed {seed}"));
        }
    }
}

#[test]
fn so_does_whatever_chance_makes_of_the_seeds() {
    let mut rng = Rng::with_seed(17);
    for (name, target) in TARGETS {
        let seeds: Vec<_> = seeds(name).into_values().collect();
        for number in 0..TRIES {
            let mut bytes = rng.choice(&seeds).unwrap().clone();
            for _ in 0..rng.usize(1..5) {
                change(&mut bytes, &seeds, &mut rng);
            }
            holds(target, &bytes, &format!("{name}, input {number}"));
        }
    }
}

/// A change of a few bytes, or a piece of another seed.
fn change(bytes: &mut Vec<u8>, seeds: &[Vec<u8>], rng: &mut Rng) {
    let at = rng.usize(0..=bytes.len());
    match rng.u8(0..5) {
        0 => bytes.truncate(at),
        1 => bytes.insert(at, rng.u8(..)),
        2 => {
            let end = rng.usize(at..=bytes.len());
            let piece = bytes[at..end].to_vec();
            bytes.splice(at..at, piece);
        }
        3 => {
            let other = rng.choice(seeds).unwrap();
            let from = rng.usize(0..=other.len());
            let to = rng.usize(from..=other.len());
            bytes.splice(at..at, other[from..to].iter().copied());
        }
        _ => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = if rng.bool() {
                    rng.u8(..)
                } else {
                    *byte ^ (1 << rng.u8(0..8))
                };
            }
        }
    }
}

fn holds(target: Target, bytes: &[u8], which: &str) {
    assert!(
        catch_unwind(|| target(bytes)).is_ok(),
        "{which}: {}",
        bytes.escape_ascii()
    );
}

/// A target's seeds by their name.
fn seeds(target: &str) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(folder("corpus").join(target))
        .unwrap()
        .map(|file| file.unwrap().path());
    files
        .map(|path| (stem(&path), fs::read(&path).unwrap()))
        .collect()
}

fn names(inside: &str) -> BTreeSet<String> {
    fs::read_dir(folder(inside))
        .unwrap()
        .map(|entry| stem(&entry.unwrap().path()))
        .collect()
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap().to_str().unwrap().to_owned()
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}
