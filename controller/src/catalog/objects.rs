//! The objects of one kind, on their way from a watch to the index.

use std::time::Duration;

use kube::Client;
use kube::core::ApiResource;
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

use super::claims::{Claims, Subject};
use super::convert::ConvertError;
use super::freshness::Freshness;
use super::marker::{self, Marker};
use super::resources::{read, resource};
use super::watch::{Sink, Target, Timing, Update, watch as follow};
use super::{Change, Event, definitions};
use crate::api::bytes::Pages;
use crate::kinds::Object;
use crate::object::Kind;

/// Time for a new epoch. Without one, proxies refuse the states of this replica for a while.
const EPOCH_TIMEOUT: Duration = Duration::from_secs(10);

/// Time between two reads of the namespaces that had objects.
const MARKER_INTERVAL: Duration = Duration::from_secs(5);
/// Time between two requests for a definition.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The context that the watches of a cluster share.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub trust_domain: &'a str,
    /// The namespace of the mesh.
    pub namespace: &'a str,
    pub freshness: &'a Freshness,
    pub changes: &'a mpsc::Sender<Event>,
    pub claims: &'a Claims,
    pub is_restored: &'a watch::Sender<bool>,
    pub pages: &'a Pages,
    pub timing: Timing,
}

/// The objects of a kind.
pub(super) struct Objects<'a> {
    kind: Kind,
    client: Client,
    context: Context<'a>,
    /// The latest version since the list, if the objects were listed.
    latest: Option<Option<u64>>,
}

impl<'a> Objects<'a> {
    pub fn new(kind: Kind, client: &Client, context: Context<'a>) -> Self {
        Self {
            kind,
            client: client.clone(),
            context,
            latest: None,
        }
    }

    /// Sends all objects, then changes, in the first of these versions of the kind that is installed.
    /// Never ends.
    pub async fn watch(&mut self, versions: Vec<ApiResource>, fields: Option<&str>) {
        let (target, timing) = (self.target(versions, fields), self.context.timing);
        follow(target, self, timing).await;
    }

    pub(super) fn target<'s>(
        &self,
        resources: Vec<ApiResource>,
        fields: Option<&'s str>,
    ) -> Target<'s>
    where
        'a: 's,
    {
        let resource = resource(self.kind);
        let group = match &*resource.group {
            "" => "the core group",
            group => group,
        };
        Target {
            name: self.kind.to_string(),
            client: self.client.clone(),
            resources,
            pages: self.context.pages,
            fields,
            // A custom resource may have 1.5 MiB.
            page_size: if self.kind.is_optional() { 50 } else { 500 },
            permission: format!("{} of {group}, in all namespaces", resource.plural),
        }
    }

    /// The kind is not installed: it has no objects.
    pub async fn remove(&mut self) {
        if self.kind.outlives_definition() {
            if self.latest.is_some() {
                self.context.freshness.remove(self.kind);
                return tracing::error!(
                    "{} is not installed any longer, and its objects stay in force: install it again",
                    self.kind
                );
            }
            if self.kind == Kind::Authorization {
                return self.wait_for_lost().await;
            }
        }
        self.context.freshness.remove(self.kind);
        let change = match self.latest {
            Some(_) => Change::Reset(self.kind, Vec::new()),
            None => Change::NotInstalled(self.kind),
        };
        // Versions of definitions are of another kind: the position of the catalog stays.
        let version = self.latest.flatten();
        self.queue(Event { change, version }).await;
    }

    /// The objects of the kind may have been deleted with their definition: sends the namespaces that
    /// had some, again and again. Never ends.
    async fn wait_for_lost(&self) {
        let (marker, kind) = (Marker::new(&self.client, self.context.namespace), self.kind);
        let mut known = None;
        loop {
            match marker.read().await {
                Ok(lost) if known.as_ref() == Some(&lost) => {}
                Ok(lost) => {
                    self.context.freshness.remove(kind);
                    self.queue(Change::Lost(lost.clone()).into()).await;
                    self.queue(Change::NotInstalled(kind).into()).await;
                    known = Some(lost);
                }
                Err(error) if known.is_some() => {
                    tracing::warn!(
                        "cannot read ConfigMap {}, retrying: {error}",
                        marker::CONFIG_MAP
                    );
                }
                Err(error) => {
                    let error = format!("cannot read ConfigMap {}: {error}", marker::CONFIG_MAP);
                    self.context.freshness.fail(kind, error);
                }
            }
            sleep(MARKER_INTERVAL).await;
        }
    }

    /// Waits while the definition of the kind is being deleted, which deletes all objects first.
    async fn wait_for_definition(&self) {
        if !self.kind.outlives_definition() {
            return;
        }
        loop {
            match definitions::is_kept(&self.client, self.kind).await {
                Ok(true) => return,
                // The next step depends on the definition, whose own watch ends this one.
                Ok(false) => std::future::pending().await,
                Err(error) => self.context.freshness.fail(self.kind, error.to_string()),
            }
            sleep(RETRY_INTERVAL).await;
        }
    }

    /// The version up to which all events were received.
    fn seen(&self) -> u64 {
        self.latest.flatten().unwrap_or_default()
    }

    async fn queue(&self, event: Event) {
        // An error means that the controller stops, and with it the watches.
        let _ = self.context.changes.send(event).await;
    }
}

impl Sink for Objects<'_> {
    type Item = Object;

    fn convert(&self, json: &str) -> Result<Object, ConvertError> {
        read(self.kind, json, self.context.trust_domain)
    }

    fn confirm(&mut self, invalid: usize) {
        self.context.freshness.confirm(self.kind, invalid);
    }

    async fn send(&mut self, update: Update<Object>, version: Option<u64>) {
        if matches!(update, Update::Reset(_) | Update::Delete(_)) {
            self.wait_for_definition().await;
        }
        let is_earlier = version.is_some() && version < self.latest.flatten();
        if matches!(update, Update::Reset(_)) && is_earlier {
            // A new epoch ends this watch.
            self.context.is_restored.send_replace(true);
            sleep(EPOCH_TIMEOUT).await;
        }
        // Events may arrive in another order than their versions.
        self.latest = Some(match &update {
            Update::Reset(_) => version,
            _ => version.max(self.latest.flatten()),
        });
        let change = match update {
            Update::Reset(objects) => Change::Reset(self.kind, objects),
            Update::Apply(object) => Change::Apply(object),
            Update::Delete(key) => Change::Delete(self.kind, key),
            Update::Bookmark => Change::Bookmark(self.kind),
        };
        self.queue(Event { change, version }).await;
    }

    async fn claimed(&self) {
        let subject = Subject::Kind(self.kind);
        self.context.claims.later_than(subject, self.seen()).await;
    }

    fn answer(&self, current: u64) -> bool {
        let subject = Subject::Kind(self.kind);
        self.context.claims.answer(subject, self.seen(), current)
    }

    fn failed(&mut self, error: String) {
        self.context.freshness.fail(self.kind, error);
    }
}
