//! One WatchServices stream: the existing Services, then each change. A slow client receives the
//! latest state of each Service.

use std::collections::HashMap;

use diy_mesh_proto::mesh::v1 as proto;
use prost::Message as _;
use tonic::Status;

use super::message;
use super::responses::Responses;
use crate::hub::Services;
use crate::index::object::Key;
use crate::index::version::Version;

/// Serves one stream until the client disconnects.
pub(super) async fn run(
    subscriber: Services,
    responses: &Responses<proto::WatchServicesResponse>,
) -> Result<(), Status> {
    let mut sent: HashMap<Key, Option<Version>> = HashMap::new();
    // Notifications keep their order, so these are the Services at the time of the call.
    let mut unsynced = Some(subscriber.pending());
    loop {
        if unsynced == Some(0) {
            unsynced = None;
            let synced = proto::WatchServicesResponse {
                service: None,
                synced: true,
            };
            let Some(capacity) = responses.reserve().await else {
                return Ok(());
            };
            let length = synced.encoded_len();
            capacity.send(synced, length);
        }
        subscriber.wait().await;
        let Some(capacity) = responses.reserve().await else {
            return Ok(());
        };
        let Some((key, view)) = subscriber.next() else {
            continue;
        };
        unsynced = unsynced.map(|left| left - 1);
        let version = view.as_ref().map(|view| view.version());
        if sent.get(&key) == Some(&version) {
            continue;
        }
        let response = proto::WatchServicesResponse {
            service: Some(message::service(&key, view.as_ref())),
            synced: false,
        };
        let length = response.encoded_len();
        capacity.send(response, length);
        // Deleted Services are remembered only if the client named them, which bounds the memory.
        if version.is_none() && subscriber.watches_all() {
            sent.remove(&key);
        } else {
            sent.insert(key, version);
        }
    }
}
