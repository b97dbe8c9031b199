//! The namespaces that have AuthorizationPolicies, in a ConfigMap in the namespace of the mesh. The
//! definition of the policies may be deleted, and all policies with it: a replica that starts then
//! knows from here which pods have to wait for them.
//!
//! The replica that holds the Lease of statuses keeps it up to date while the definition is installed;
//! `mesh authz forget` removes namespaces from it.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::PostParams;
use kube::{Api, Client};

use super::definitions::is_kept;
use crate::api::{API_TIMEOUT, ApiError, metadata, request};
use crate::object::Kind;

/// The ConfigMap. Its keys are namespaces. The namespace of the mesh stands for all namespaces.
pub const CONFIG_MAP: &str = "diy-service-mesh-authorization";

/// Namespaces.
pub type Namespaces = BTreeSet<Arc<str>>;

/// The ConfigMap of a mesh.
pub struct Marker {
    client: Client,
    config_maps: Api<ConfigMap>,
}

impl Marker {
    /// The ConfigMap of the mesh in a namespace.
    pub fn new(client: &Client, namespace: &str) -> Marker {
        Marker {
            client: client.clone(),
            config_maps: Api::namespaced(client.clone(), namespace),
        }
    }

    /// The namespaces in it.
    pub async fn read(&self) -> Result<Namespaces, ApiError> {
        Ok(namespaces(self.stored().await?.as_ref()))
    }

    /// Replaces the namespaces, if the definition of policies is installed: without it, they have none.
    pub async fn update(&self, current: &Namespaces) -> Result<(), ApiError> {
        let stored = self.stored().await?;
        if namespaces(stored.as_ref()) == *current
            || !is_kept(&self.client, Kind::Authorization).await?
        {
            return Ok(());
        }
        self.write(stored, current).await
    }

    /// Removes a namespace. Returns whether it was in it.
    pub async fn forget(&self, namespace: &str) -> Result<bool, ApiError> {
        let stored = self.stored().await?;
        let mut left = namespaces(stored.as_ref());
        let was_in_it = left.remove(namespace);
        if was_in_it {
            self.write(stored, &left).await?;
        }
        Ok(was_in_it)
    }

    async fn stored(&self) -> Result<Option<ConfigMap>, ApiError> {
        request(API_TIMEOUT, self.config_maps.get_opt(CONFIG_MAP)).await
    }

    /// Fails if another client has changed it since it was read.
    async fn write(&self, before: Option<ConfigMap>, new: &Namespaces) -> Result<(), ApiError> {
        let data = new.iter().map(|name| (name.to_string(), String::new()));
        let exists = before.is_some();
        let map = ConfigMap {
            metadata: before.map_or(metadata(CONFIG_MAP), |before| before.metadata),
            data: Some(data.collect()),
            ..ConfigMap::default()
        };
        let params = PostParams::default();
        if exists {
            let write = self.config_maps.replace(CONFIG_MAP, &params, &map);
            request(API_TIMEOUT, write).await?;
        } else {
            request(API_TIMEOUT, self.config_maps.create(&params, &map)).await?;
        }
        Ok(())
    }
}

fn namespaces(stored: Option<&ConfigMap>) -> Namespaces {
    let data = stored.into_iter().flat_map(|map| &map.data);
    let names = data.flat_map(|data| data.keys());
    names.map(|name| Arc::from(&**name)).collect()
}
