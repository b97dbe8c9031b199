//! The trust roots of the mesh. Watches the file that the controllers publish in their certificate
//! authority directory, and provides it to pods as the ConfigMap that a controller writes in a
//! cluster, the only one of the sandbox.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use diy_mesh_injector::containers::{ROOTS, ROOTS_CONFIG_MAP};
use k8s_openapi::api::core::v1::PodSpec;
use tokio::{sync::watch, time};

/// Kubelets refresh ConfigMap volumes within a minute.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The published trust roots as PEM, `None` until the first controller publishes them.
pub(super) type Published = watch::Receiver<Option<Arc<str>>>;

/// Watches the roots file in `directory` until all receivers are dropped.
pub(super) fn watch(directory: &Path) -> Published {
    let (sender, published) = watch::channel(None);
    tokio::spawn(poll(directory.join(ROOTS), sender));
    published
}

async fn poll(file: PathBuf, sender: watch::Sender<Option<Arc<str>>>) {
    let mut ticks = time::interval(POLL_INTERVAL);
    while !sender.is_closed() {
        ticks.tick().await;
        // The file may not exist yet.
        let Ok(text) = tokio::fs::read_to_string(&file).await else {
            continue;
        };
        sender.send_if_modified(|current| {
            let changed = current.as_deref() != Some(text.as_str());
            *current = changed.then(|| text.into()).or_else(|| current.take());
            changed
        });
    }
}

/// Whether the pod mounts the ConfigMap with the trust roots.
pub(super) fn mounted(spec: &PodSpec) -> bool {
    let volumes = spec.volumes.iter().flatten();
    let projected = volumes.filter_map(|volume| volume.projected.as_ref());
    let mut sources = projected.flat_map(|projected| projected.sources.iter().flatten());
    sources.any(|source| {
        let map = source.config_map.as_ref();
        map.is_some_and(|map| map.name == ROOTS_CONFIG_MAP)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detects_pods_that_require_the_roots() {
        let mounted = |volumes: &str| {
            let spec = format!("{{containers: [], volumes: [{volumes}]}}");
            mounted(&serde_yaml_ng::from_str(&spec).unwrap())
        };
        let volume = |name: &str| {
            format!("{{name: b, projected: {{sources: [{{configMap: {{name: {name}}}}}]}}}}")
        };
        let roots = format!(
            "{{name: a, emptyDir: {{}}}}, {}",
            volume("diy-service-mesh-roots")
        );
        assert!(mounted(&roots));
        assert!(!mounted(&volume("other")));
    }

    #[tokio::test(start_paused = true)]
    async fn reports_each_published_version() {
        let directory = std::env::temp_dir().join(format!("mesh-roots-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let mut published = watch(&directory);
        assert_eq!(*published.borrow(), None);
        for text in ["one", "two"] {
            std::fs::write(directory.join("new"), text).unwrap();
            std::fs::rename(directory.join("new"), directory.join(ROOTS)).unwrap();
            published
                .wait_for(|roots| roots.as_deref() == Some(text))
                .await
                .unwrap();
        }
        std::fs::remove_dir_all(directory).unwrap();
    }
}
