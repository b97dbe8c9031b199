//! Embeds the manifests in the library, but the chart, which is generated from them.

use std::{env, fs, io, path::Path};

fn main() -> io::Result<()> {
    let own = env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let manifests = Path::new(&own).join("../manifests").canonicalize()?;
    println!("cargo::rerun-if-changed={}", manifests.display());
    let mut entries = Vec::new();
    collect(&manifests, &manifests, &mut entries)?;
    entries.sort();
    let list: String = entries
        .iter()
        .map(|(name, path)| format!("    ({name:?}, include_str!({path:?})),\n"))
        .collect();
    let out = Path::new(&env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("manifests.rs");
    fs::write(out, format!("&[\n{list}]\n"))
}

fn collect(root: &Path, folder: &Path, entries: &mut Vec<(String, String)>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.ends_with("manifests/chart") {
            continue;
        }
        if path.is_dir() {
            collect(root, &path, entries)?;
        } else if path
            .extension()
            .is_some_and(|extension| extension == "yaml")
        {
            let name = path
                .strip_prefix(root)
                .expect("the path is below the folder")
                .display()
                .to_string();
            entries.push((name, path.display().to_string()));
        }
    }
    Ok(())
}
