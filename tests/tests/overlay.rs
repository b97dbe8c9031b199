//! The manifests as the base of the kustomize overlay in `docs/operations.md`: images and namespace.
//! Requires kubectl.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use diy_mesh_testkit::has_program;
use diy_mesh_tests::repository::{read, root};

#[test]
fn overlay_changes_the_images_of_proxies_and_the_namespace() -> Result<()> {
    // kustomize accepts only relative paths of directories.
    let folder = root().join(format!("target/overlay-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let result = render(&folder);
    fs::remove_dir_all(&folder)?;
    let Some(text) = result? else {
        return Ok(());
    };
    for image in ["controller", "injector", "proxy", "proxy-init"] {
        let line = format!("image: registry.example.com/{image}:1.0");
        ensure!(text.contains(&line), "{line} is not in\n{text}");
    }
    ensure!(
        !text.contains("diy-sm-"),
        "an image has its old name:\n{text}"
    );
    // Names of objects, labels and annotations contain diy-service-mesh.
    let old = text.replace("diy-service-mesh", "");
    let old: Vec<_> = old
        .lines()
        .filter(|line| line.contains("service-mesh"))
        .collect();
    ensure!(old.is_empty(), "the old namespace remains: {old:#?}");
    Ok(())
}

fn render(folder: &Path) -> Result<Option<String>> {
    let document = read(Path::new("docs/operations.md"));
    let overlay = document
        .split("## Images and namespace")
        .nth(1)
        .and_then(|section| section.split("```yaml\n").nth(1)?.split("```").next())
        .context("docs/operations.md has no overlay")?
        .replace("resources: [manifests]", "resources: [../../manifests]");
    fs::write(folder.join("kustomization.yaml"), overlay)?;
    if !has_program("kubectl") {
        return Ok(None);
    }
    let mut kubectl = Command::new("kubectl");
    let output = kubectl.arg("kustomize").arg(folder).output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "kubectl kustomize: {error}");
    Ok(Some(String::from_utf8(output.stdout)?))
}
