//! The four RPCs. Each authenticates the client, then waits for a synced catalog, then responds.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::time::Duration;

use diy_mesh_proto::TOKEN_AUDIENCE;
use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_proto::mesh::v1::service_mesh_service_server::ServiceMeshService;
use futures::Stream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};

use super::sign::Signer;
use super::{Context, discover, message, watch};
use crate::authenticate::{AuthError, Caller};
use crate::index::object::Key;

/// Time that a call waits for a synced catalog.
const SYNC_TIMEOUT: Duration = Duration::from_secs(5);
/// Answers that lie ready for a caller; more is not made before it has read these.
const RESPONSE_QUEUE_LENGTH: usize = 16;

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The service of the contract.
pub(super) struct Mesh {
    context: Context,
    signer: Signer,
}

impl Mesh {
    pub(super) fn new(context: Context) -> Mesh {
        Mesh {
            signer: Signer::new(context.clone()),
            context,
        }
    }

    /// Nothing is answered before this: a catalog half read would call destinations unknown that
    /// are not.
    async fn admit(&self, metadata: &MetadataMap) -> Result<Caller, Status> {
        let caller = self
            .context
            .authenticator
            .caller(metadata)
            .await
            .map_err(refusal)?;
        synced(&self.context).await?;
        Ok(caller)
    }
}

#[tonic::async_trait]
impl ServiceMeshService for Mesh {
    async fn get_services(
        &self,
        request: Request<proto::GetServicesRequest>,
    ) -> Result<Response<proto::GetServicesResponse>, Status> {
        self.admit(request.metadata()).await?;
        let mut names = keys(&request.get_ref().services)?;
        if names.is_empty() {
            names = self.context.hub.service_keys();
        }
        let services = names
            .iter()
            .map(|key| message::service(key, self.context.hub.service(key).as_ref()))
            .collect();
        Ok(Response::new(proto::GetServicesResponse { services }))
    }

    type WatchServicesStream = Answers<proto::WatchServicesResponse>;

    async fn watch_services(
        &self,
        request: Request<proto::WatchServicesRequest>,
    ) -> Result<Response<Self::WatchServicesStream>, Status> {
        let caller = self.admit(request.metadata()).await?;
        let names = keys(&request.get_ref().services)?;
        tracing::debug!(caller = %caller.user, services = names.len(), "WatchServices");
        let (answers, stream) = mpsc::channel(RESPONSE_QUEUE_LENGTH);
        tokio::spawn(watch::run(self.context.clone(), names, answers));
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn sign_certificate(
        &self,
        request: Request<proto::SignCertificateRequest>,
    ) -> Result<Response<proto::SignCertificateResponse>, Status> {
        let peer = request.remote_addr();
        Ok(Response::new(
            self.signer.sign(request.into_inner(), peer).await?,
        ))
    }

    type DiscoverStream = Answers<proto::DiscoverResponse>;

    async fn discover(
        &self,
        request: Request<Streaming<proto::DiscoverRequest>>,
    ) -> Result<Response<Self::DiscoverStream>, Status> {
        let caller = self.admit(request.metadata()).await?;
        tracing::debug!(caller = %caller.user, "Discover");
        let (answers, stream) = mpsc::channel(RESPONSE_QUEUE_LENGTH);
        tokio::spawn(discover::run(
            self.context.clone(),
            caller,
            request.into_inner(),
            answers,
        ));
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}

/// Waits a while for the catalog.
pub(super) async fn synced(context: &Context) -> Result<(), Status> {
    tokio::select! {
        () = context.hub.synced() => Ok(()),
        () = context.stopping.cancelled() => Err(stopping()),
        () = tokio::time::sleep(SYNC_TIMEOUT) => {
            let missing: Vec<&str> = context.hub.missing().iter().map(|kind| kind.name()).collect();
            Err(Status::unavailable(format!("the catalog is not synced yet, it waits for {} objects; try again", missing.join(", "))))
        }
    }
}

/// Said to every caller while the controller stops.
pub(super) fn stopping() -> Status {
    Status::unavailable("this controller is shutting down: connect again to reach another one")
}

/// What a caller is told whose token is not good.
pub(super) fn refusal(error: AuthError) -> Status {
    match error {
        AuthError::Unreachable(_) => Status::unavailable(format!("{error}; try again")),
        _ => Status::unauthenticated(format!(
            "{error}. Send `authorization: Bearer TOKEN` with a service account token of the audience {TOKEN_AUDIENCE:?} \
             (in a pod: a projected token; by hand: kubectl create token ACCOUNT --audience {TOKEN_AUDIENCE})"
        )),
    }
}

fn keys(names: &[String]) -> Result<BTreeSet<Key>, Status> {
    names.iter().map(|name| key(name)).collect()
}

fn key(name: &str) -> Result<Key, Status> {
    match name.split_once('/') {
        Some((namespace, service))
            if !namespace.is_empty() && !service.is_empty() && !service.contains('/') =>
        {
            Ok(Key::new(namespace, service))
        }
        _ => Err(Status::invalid_argument(format!(
            "services: {name:?} is not NAMESPACE/NAME"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_names_have_two_parts() {
        assert_eq!(key("shop/web").unwrap(), Key::new("shop", "web"));
        for name in ["", "web", "/web", "shop/", "a/b/c"] {
            let status = key(name).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert!(
                status.message().contains(&format!("{name:?}")),
                "{}",
                status.message()
            );
        }
    }

    #[test]
    fn a_refusal_says_what_to_do_and_an_unreachable_authenticator_is_not_the_callers_fault() {
        let status = refusal(AuthError::Missing);
        assert_eq!(status.code(), tonic::Code::Unauthenticated);
        assert!(
            status.message().contains("kubectl create token"),
            "{}",
            status.message()
        );
        assert_eq!(
            refusal(AuthError::Unreachable("down".into())).code(),
            tonic::Code::Unavailable
        );
    }
}
