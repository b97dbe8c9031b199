//! Publication of the roots for pods that start: in a ConfigMap in each namespace with meshed
//! pods ([`config_maps`]), or in a file.
//!
//! Every replica publishes, and all write the same content. Logs a warning if published roots have
//! none in common with the new ones. During a rotation they always do.

pub mod config_maps;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::store::files::replace;
use super::{Roots, TrustReceiver};

/// The name of the file, and the key in ConfigMaps.
pub const KEY: &str = "roots.pem";
const FILE_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The maximum number of places in a warning.
const MAX_NAMES: usize = 5;

/// The state of the publication.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PublishStatus {
    /// The version of the roots. Empty before the first publication.
    pub version: String,
    /// The places without these roots, each with the error, if any.
    pub waiting: BTreeMap<String, String>,
}

/// The inputs and the output of a publication.
pub struct Publication {
    /// The roots to publish.
    pub trust: TrustReceiver,
    /// The namespaces with meshed pods.
    pub namespaces: watch::Receiver<BTreeSet<Arc<str>>>,
    /// The state.
    pub status: watch::Sender<PublishStatus>,
}

impl Publication {
    fn roots(&mut self) -> Arc<Roots> {
        self.trust.borrow_and_update().roots.clone()
    }

    /// Updates the state, and logs new errors.
    fn report(&self, roots: &Roots, waiting: BTreeMap<String, String>) {
        let version = roots.version.clone();
        let now = PublishStatus { version, waiting };
        self.status.send_if_modified(|before| {
            for (place, error) in &now.waiting {
                if !error.is_empty() && before.waiting.get(place) != Some(error) {
                    tracing::warn!("cannot publish the roots in {place}, retrying: {error}");
                }
            }
            let is_modified = *before != now;
            *before = now;
            is_modified
        });
    }
}

/// Writes the roots to the file FOLDER/roots.pem and restores it after changes. Returns when the
/// authority ends.
pub async fn file(folder: PathBuf, mut publication: Publication) {
    let path = folder.join(KEY);
    let mut ticks = interval(FILE_CHECK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let roots = publication.roots();
        let error = restore(&path, &roots).err();
        let waiting = error.map(|error| (path.display().to_string(), error));
        publication.report(&roots, waiting.into_iter().collect());
        tokio::select! {
            _ = ticks.tick() => {}
            changed = publication.trust.changed() => if changed.is_err() { return },
        }
    }
}

fn restore(path: &Path, roots: &Roots) -> Result<(), String> {
    let published = std::fs::read_to_string(path).unwrap_or_default();
    if published == roots.pem {
        return Ok(());
    }
    replace(path, roots.pem.as_bytes(), 0o644).map_err(|error| error.to_string())?;
    if are_disjoint(roots, &published) {
        warn_of_disjoint_roots(&[path.display().to_string()]);
    }
    tracing::info!("published the roots in {}", path.display());
    Ok(())
}

/// Whether published roots have none in common with these. Invalid roots are trusted by no pod.
fn are_disjoint(roots: &Roots, published: &str) -> bool {
    let published = Roots::from_pem(published).map(|roots| roots.certificates);
    let published = published.unwrap_or_default();
    let in_common = |root| roots.certificates.contains(root);
    !published.is_empty() && !published.iter().any(in_common)
}

fn warn_of_disjoint_roots(places: &[String]) {
    if let Some(warning) = disjoint_roots_warning(places) {
        tracing::warn!("{warning}");
    }
}

fn disjoint_roots_warning(places: &[String]) -> Option<String> {
    let listed = &places[..places.len().min(MAX_NAMES)];
    let more = match places.len() - listed.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let listed = listed.join(", ");
    (!places.is_empty()).then(|| {
        format!(
            "the trust roots in {listed}{more} have none in common with the roots of the current CA: the former CA was lost, replaced while no \
             controller was running, or replaced by a forced rotation (`mesh identity` says which). New pods trust the new root only. Running \
             proxies get it, and a new certificate, when they reconnect, which takes up to two minutes; until then, requests between them and \
             new pods fail. To keep the former CA: write it back to tls.crt, tls.key and ca.crt. To replace a CA without this: write the new \
             one while the controllers run: they wait until all proxies trust both roots. `mesh rotate-root` replaces a CA that the mesh has \
             generated"
        )
    })
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::authority::self_signed;

    #[test]
    fn detects_sets_without_common_root() {
        let new = || {
            self_signed(
                "cluster.local",
                SystemTime::now(),
                Duration::from_secs(3600),
            )
            .unwrap()
            .0
        };
        let (old, next, other) = (new(), new(), new());
        let both = Roots::from_pem(&(old.clone() + &next)).unwrap();
        let alone = Roots::from_pem(&next).unwrap();
        assert!(!are_disjoint(&both, &old), "announced");
        assert!(!are_disjoint(&alone, &both.pem), "the old one is dropped");
        assert!(are_disjoint(&alone, &old) && are_disjoint(&alone, &(old + &other)));
        assert!(!are_disjoint(&alone, "") && !are_disjoint(&alone, "edited"));
    }

    #[test]
    fn warning_names_places_consequence_and_remedy() {
        assert_eq!(disjoint_roots_warning(&[]), None);
        let places: Vec<String> = (1..=7)
            .map(|number| format!("namespace shop-{number}"))
            .collect();
        let text = disjoint_roots_warning(&places).unwrap();
        for part in [
            "namespace shop-1, ",
            "namespace shop-5 and 2 more",
            "requests between them and new pods fail",
            "write it back",
            "mesh rotate-root",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(
            disjoint_roots_warning(&places[..1])
                .unwrap()
                .contains("roots in namespace shop-1 have")
        );
    }
}
