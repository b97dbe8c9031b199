//! The admin port: /live, /ready and /metrics, for probes and Prometheus, and /identity for people. Plain HTTP, without secrets.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use tokio_util::sync::CancellationToken;

use crate::authority::{Kept, status};
use crate::hub::Hub;
use crate::metrics::Metrics;
use crate::proxies::Proxies;

/// What the answers are made from.
#[derive(Clone)]
pub struct Admin {
    /// Ready once its catalog is synced.
    pub hub: Hub,
    /// Ready once there is a CA that can be used.
    pub authority: Kept,
    /// Who is connected.
    pub proxies: Proxies,
    /// The mesh's trust domain.
    pub trust_domain: Arc<str>,
    /// The counters.
    pub metrics: Arc<Metrics>,
    /// Not ready any more once it is cancelled.
    pub stopping: CancellationToken,
}

/// The routes of the admin port.
pub fn routes(admin: Admin) -> Router {
    let routes = Router::new()
        .route("/live", get(async || "live\n"))
        .route("/ready", get(ready));
    routes
        .route("/metrics", get(metrics))
        .route("/identity", get(identity))
        .with_state(admin)
}

async fn ready(State(admin): State<Admin>) -> Response {
    match reason(&admin) {
        None => "ready\n".into_response(),
        Some(reason) => (
            StatusCode::SERVICE_UNAVAILABLE,
            format!("not ready: {reason}\n"),
        )
            .into_response(),
    }
}

fn reason(admin: &Admin) -> Option<String> {
    if admin.stopping.is_cancelled() {
        return Some("shutting down".to_owned());
    }
    if let Some(reason) = admin.authority.missing() {
        return Some(reason);
    }
    let missing: Vec<&str> = admin.hub.missing().iter().map(|kind| kind.name()).collect();
    (!missing.is_empty()).then(|| {
        format!(
            "the catalog is not synced, it waits for {} objects",
            missing.join(", ")
        )
    })
}

async fn identity(State(admin): State<Admin>) -> Response {
    let (status, trust) = (admin.authority.status(), admin.authority.trust());
    Json(status::answer(
        status,
        &admin.trust_domain,
        trust.as_deref(),
        &admin.proxies.snapshot(),
    ))
    .into_response()
}

async fn metrics(State(admin): State<Admin>) -> Response {
    let mut text = admin.metrics.text(&admin.hub.counts());
    status::metrics(&admin.authority.status(), &mut text);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}
