//! Requests to the Kubernetes API, which end in time, and responses whose bytes are bounded.

pub(crate) mod bytes;

use std::time::Duration;

use diy_mesh_runtime::error_chain;
use kube::api::ObjectMeta;
use tokio::time::timeout;

/// Time for a request.
pub(crate) const API_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a request has failed.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The API returned an error, or cannot be reached.
    #[error("{}", error_chain(.0))]
    Client(#[from] kube::Error),
    /// The response is longer than a page may be.
    #[error("the response is longer than a page may be")]
    TooLong,
    /// The response is no list of objects.
    #[error("the response cannot be read: {0}")]
    Unreadable(#[from] serde_json::Error),
    /// The API did not respond in time.
    #[error("the Kubernetes API does not respond")]
    Timeout,
}

impl ApiError {
    /// Whether the API returned this status code.
    pub fn is(&self, code: u16) -> bool {
        matches!(self, ApiError::Client(kube::Error::Api(status)) if status.code == code)
    }
}

/// The metadata of an object of the mesh.
pub(crate) fn metadata(name: &str) -> ObjectMeta {
    let label = ("app.kubernetes.io/part-of", "diy-service-mesh");
    ObjectMeta {
        name: Some(name.into()),
        labels: Some([(label.0.into(), label.1.into())].into()),
        ..ObjectMeta::default()
    }
}

/// The result of a request, or of several, unless the API does not respond in time.
pub(crate) async fn request<T, E: Into<ApiError>>(
    deadline: Duration,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, ApiError> {
    match timeout(deadline, work).await {
        Ok(result) => result.map_err(Into::into),
        Err(_) => Err(ApiError::Timeout),
    }
}
