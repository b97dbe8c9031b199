//! The trust roots of the mesh. Watches the file that the controllers publish in their certificate
//! authority directory, and provides it to pods as the ConfigMap that a controller writes in a
//! cluster.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use diy_mesh_injector::containers::{ROOTS, ROOTS_CONFIG_MAP};
use k8s_openapi::api::core::v1::{ConfigMap, PodSpec};
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

/// The ConfigMap with these roots.
pub(super) fn config_map(roots: &str) -> ConfigMap {
    ConfigMap {
        data: Some(BTreeMap::from([(ROOTS.to_owned(), roots.to_owned())])),
        ..ConfigMap::default()
    }
}

/// Whether the pod mounts the ConfigMap with the trust roots as a required source.
pub(super) fn mounted(spec: &PodSpec) -> bool {
    let mut volumes = spec.volumes.iter().flatten();
    volumes.any(|volume| {
        let projected = volume
            .projected
            .iter()
            .flat_map(|projected| projected.sources.iter().flatten());
        let projected = projected
            .filter_map(|source| source.config_map.as_ref())
            .map(|map| (&map.name, map.optional));
        let mut maps = projected.chain(
            volume
                .config_map
                .iter()
                .map(|map| (&map.name, map.optional)),
        );
        maps.any(|(name, optional)| name == ROOTS_CONFIG_MAP && optional != Some(true))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detects_pods_that_require_the_roots() {
        let mounted = |volumes: &str| {
            mounted(
                &serde_yaml_ng::from_str(&format!("{{containers: [], volumes: [{volumes}]}}"))
                    .unwrap(),
            )
        };
        assert!(mounted(
            "{name: a, emptyDir: {}}, {name: b, projected: {sources: [{configMap: {name: diy-service-mesh-roots}}]}}"
        ));
        assert!(mounted(
            "{name: a, configMap: {name: diy-service-mesh-roots}}"
        ));
        assert!(!mounted(
            "{name: a, configMap: {name: diy-service-mesh-roots, optional: true}}"
        ));
        assert!(!mounted("{name: a, configMap: {name: other}}"));
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
