//! The commands of docs/your-own-app.md on a cluster, in their order.

use std::path::Path;

use anyhow::{Result, bail, ensure};
use diy_mesh_tests::cluster::{kubectl, wait_for, with_mesh};
use diy_mesh_tests::examples::{Example, examples};
use diy_mesh_tests::repository::{read, root};

const PAGE: &str = "docs/your-own-app.md";
/// The namespace that the page creates and deletes.
const NAMESPACE: &str = "five-minutes";

#[test]
fn commands_of_the_page_print_what_it_shows() -> Result<()> {
    if !with_mesh()? {
        return Ok(());
    }
    let get = ["get", "namespace", NAMESPACE];
    ensure!(kubectl(&get).is_err(), "{NAMESPACE} exists: delete it");
    let text = read(Path::new(PAGE));
    let examples = examples(Path::new(PAGE), &text);
    let blocks = text.lines().filter(|line| line.starts_with("```sh"));
    ensure!(blocks.count() == examples.len(), "a block is not tested");
    let result = examples.iter().try_for_each(run);
    if result.is_err() {
        kubectl(&["delete", "namespace", NAMESPACE, "--wait=false"])?;
    }
    result
}

/// Runs an example once, or, like a reader who looks again, until it prints what is expected.
fn run(example: &Example) -> Result<()> {
    let once = || match example.failure_of(&example.script, &root()) {
        None => Ok(Some(())),
        Some(failure) => bail!(failure),
    };
    if example.expected.is_empty() {
        return once().map(drop);
    }
    wait_for(&example.place, once)
}
