//! The certificates that the mesh trusts, as the sandbox's controllers publish them in the folder that they share: watched here,
//! and handed to pods as the ConfigMap that a cluster's controller would write. It never reads a key.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1::{ConfigMap, PodSpec};
use tokio::{sync::watch, time};

/// The ConfigMap that a cluster's controller keeps in every namespace with meshed pods.
pub(super) const CONFIG_MAP: &str = "diy-service-mesh-roots";
const KEY: &str = "roots.pem";
/// How often the file is looked at: kubelets take up to a minute.
const PERIOD: Duration = Duration::from_millis(200);

/// What the controllers last published; nothing before the first of them is up.
pub(super) type Published = watch::Receiver<Option<Arc<str>>>;

/// Watches the file in the folder for as long as somebody listens.
pub(super) fn watch(folder: &Path) -> Published {
    let (sender, published) = watch::channel(None);
    tokio::spawn(keep(folder.join(KEY), sender));
    published
}

async fn keep(file: PathBuf, sender: watch::Sender<Option<Arc<str>>>) {
    let mut ticks = time::interval(PERIOD);
    while !sender.is_closed() {
        ticks.tick().await;
        // Not there yet, or being looked at in a bad moment: the next look tells.
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

/// The ConfigMap of these roots.
pub(super) fn config_map(roots: &str) -> ConfigMap {
    ConfigMap {
        data: Some(BTreeMap::from([(KEY.to_owned(), roots.to_owned())])),
        ..ConfigMap::default()
    }
}

/// The pod cannot start before the roots are there.
pub(super) fn needed(spec: &PodSpec) -> bool {
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
        maps.any(|(name, optional)| name == CONFIG_MAP && optional != Some(true))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_that_mount_the_roots_are_told_from_others() {
        let needed = |volumes: &str| {
            needed(
                &serde_yaml_ng::from_str(&format!("{{containers: [], volumes: [{volumes}]}}"))
                    .unwrap(),
            )
        };
        assert!(needed(
            "{name: a, emptyDir: {}}, {name: b, projected: {sources: [{configMap: {name: diy-service-mesh-roots}}]}}"
        ));
        assert!(needed(
            "{name: a, configMap: {name: diy-service-mesh-roots}}"
        ));
        assert!(!needed(
            "{name: a, configMap: {name: diy-service-mesh-roots, optional: true}}"
        ));
        assert!(!needed("{name: a, configMap: {name: other}}"));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_published_and_published_again_is_seen() {
        let folder = std::env::temp_dir().join(format!("mesh-roots-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut published = watch(&folder);
        assert_eq!(*published.borrow(), None);
        for text in ["one", "two"] {
            std::fs::write(folder.join("new"), text).unwrap();
            std::fs::rename(folder.join("new"), folder.join(KEY)).unwrap();
            published
                .wait_for(|roots| roots.as_deref() == Some(text))
                .await
                .unwrap();
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
