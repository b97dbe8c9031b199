//! One WatchServices stream: the Services as they are, then each change to them, the latest state
//! of each at the caller's pace.

use std::collections::{BTreeSet, HashMap};

use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_runtime::metrics::Active;
use tokio::sync::mpsc;
use tonic::Status;

use super::{Context, message, service};
use crate::index::object::Key;
use crate::index::version::Version;

/// Serves one stream until the caller leaves or the controller stops.
pub(super) async fn run(
    context: Context,
    names: BTreeSet<Key>,
    answers: mpsc::Sender<Result<proto::WatchServicesResponse, Status>>,
) {
    let _open = Active::new(&context.metrics.watch_streams);
    let news = context.hub.watch_services(&names);
    let mut told: HashMap<Key, Option<Version>> = HashMap::new();
    // News is served in its order, so these are the Services that existed when the call came.
    let mut unsynced = Some(news.waiting());
    loop {
        if unsynced == Some(0) {
            unsynced = None;
            if answers
                .send(Ok(proto::WatchServicesResponse {
                    service: None,
                    synced: true,
                }))
                .await
                .is_err()
            {
                return;
            }
        }
        let room = tokio::select! {
            () = context.stopping.cancelled() => break,
            () = answers.closed() => return,
            room = async { news.wait().await; answers.reserve().await } => room,
        };
        let Ok(room) = room else { return };
        let Some((key, view)) = news.next() else {
            continue;
        };
        unsynced = unsynced.map(|left| left - 1);
        let version = view.as_ref().map(|view| view.version());
        if told.get(&key) == Some(&version) {
            continue;
        }
        room.send(Ok(proto::WatchServicesResponse {
            service: Some(message::service(&key, view.as_ref())),
            synced: false,
        }));
        // One that is gone is remembered only where the caller named it: names that come and go
        // must not add up.
        if version.is_none() && names.is_empty() {
            told.remove(&key);
        } else {
            told.insert(key, version);
        }
    }
    let _ = answers.send(Err(service::stopping())).await;
}
